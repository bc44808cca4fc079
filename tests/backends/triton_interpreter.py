"""Triton's interpreter, made to compute what a GPU does where Triton 3.6 to 3.8 does not.

libdevice's functions (there are none), bfloat16 (its casts truncate, its products are of the bits),
tl.fma (rounded twice), comparisons of scalars, casts of floats that no integer holds, and folds by
a function of one's own (an element at a time; here by halves). And made faster where most of its
time goes: Triton's test that no integer overflows, whose answer only its debug mode looks at, is
left out, and what is asked of each operation's types is answered once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from tests.backends.triton_together import EXCHANGE
from triton.language import semantic
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda
from triton.runtime import interpreter as ti

from onchip.backends.scalar_numpy import FUNCTIONS_NUMPY, round_bfloat16

_OTHER = {
    "fast_fdivide": np.true_divide,
    "rint": np.rint,
}


def _extern(self, library, path, symbol: str, arguments, kind, pure):
    """One function of libdevice, in float64, rounded to the type of its arguments."""
    name, own = symbol.removeprefix("__nv_"), arguments[0].data.dtype
    name = name.removesuffix("f") if own == np.float32 else name
    function = _OTHER.get(name) or FUNCTIONS_NUMPY[name]
    wide = own if name == "nextafter" else np.float64
    with np.errstate(all="ignore"):
        value = function(*(a.data.astype(wide) for a in arguments))
    return ti.TensorHandle(np.asarray(value).astype(own), arguments[0].dtype.scalar)


class _Result:
    def __init__(self, *values: Any) -> None:
        self.values = values

    def get_result(self, place: int) -> Any:
        return self.values[place]


_ASSEMBLY = {
    "ex2.approx.ftz.f32 $0, $1;": np.exp2,
    "rcp.approx.ftz.f32 $0, $1;": np.reciprocal,
}


_WIDENED = "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }"  # two elements of bfloat16


def _inline_asm(self, text: str, constraints, values, kinds, pure, pack):
    if not values:  # an instruction without a result
        return _Result(ti.TensorHandle(np.zeros(1, np.int32), tl.int32))
    if "st.shared::cluster" in text:
        *mine, ranks = (v.data for v in values)
        found = EXCHANGE[0](tuple(x.flat[0] for x in mine))
        every = [np.array([found[n][i] for n in ranks.flat]) for i in range(len(mine))]
        return _Result(*(ti.TensorHandle(x.astype(np.float32), tl.float32) for x in every))
    (x,) = values
    if text == _WIDENED:
        bits = (x.data.astype(np.uint32) << np.uint32(16)).view(np.int32)
        return _Result(ti.TensorHandle(bits, tl.int32))
    with np.errstate(all="ignore"):
        return _Result(ti.TensorHandle(_ASSEMBLY[text](x.data), x.dtype.scalar))


def _from_bits(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bits(x: np.ndarray) -> np.ndarray:
    wide = np.ascontiguousarray(round_bfloat16(x.astype(np.float32)))
    bits = (wide.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FFF), bits)


def _cast(self, source, target):
    have, want = source.dtype.scalar, target.scalar
    data = _from_bits(source.data) if have == tl.bfloat16 else source.data
    if want == tl.bfloat16:
        return ti.TensorHandle(_bits(data), want)
    kind = ti._get_np_dtype(want)
    with np.errstate(all="ignore"):
        if data.dtype.kind == "f" and kind.kind in "iu":
            ends = np.iinfo(kind)
            data = np.clip(np.nan_to_num(data, nan=0.0), float(ends.min), float(ends.max))
            near = data >= float(ends.max)  # as a float it may be one beyond
            return ti.TensorHandle(np.where(near, ends.max, data.astype(kind)), want)
        return ti.TensorHandle(np.asarray(data).astype(kind), want)


def _fp_to_fp(self, source, target, rounding):
    return _cast(self, source, target)


def _fma(self, x, y, z):
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return ti.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def _dot(self, a, b, total, precision, limit):
    left, right = (_from_bits(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
    kind = total.data.dtype
    product = np.matmul(left.astype(kind), right.astype(kind))
    return ti.TensorHandle(product + total.data, total.dtype.scalar)


def _reduce(self, values):
    """Halves combined until one element is left (dimensions are powers of two)."""
    whole = self.axis is None
    kinds = [v.dtype for v in values]
    parts = [v.handle.data.reshape(-1) if whole else v.handle.data for v in values]
    axis = 0 if whole else self.axis
    while parts[0].shape[axis] > 1:
        halves = [np.split(p, 2, axis) for p in parts]
        first, last = (
            [self.to_tensor(h[side], k) for h, k in zip(halves, kinds, strict=True)]
            for side in (0, 1)
        )
        made = self.combine_fn.fn(*first, *last)
        made = made if isinstance(made, tuple) else (made,)
        parts = [m.handle.data for m in made]
    if not self.keep_dims:
        parts = [np.squeeze(p, axis) for p in parts]
    return [self.to_tensor(p.item() if whole else p, k) for p, k in zip(parts, kinds, strict=True)]


def _truth(compare):
    """A comparison whose result is of type int1, not of its operands'."""

    def truth(self, a, b):
        return ti.TensorHandle(compare(self, a, b).data.astype(bool), tl.int1)

    return truth


def _answer_once() -> None:
    """Element types by name, block types by element type and shape: both are immutable."""
    known: dict[str, np.dtype] = {}
    numpy_type, block_type = ti._get_np_dtype, tl.block_type.with_element_ty

    def by_name(kind: tl.dtype) -> np.dtype:
        scalar = kind.scalar
        if scalar.name not in known:
            known[scalar.name] = numpy_type(scalar)
        return known[scalar.name]

    blocks: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}

    def with_element(self, scalar: tl.dtype) -> tl.block_type:
        key = (scalar.name, tuple(self.shape))
        if key not in blocks:
            blocks[key] = block_type(self, scalar)
        return blocks[key]

    ti._get_np_dtype = by_name
    tl.block_type.with_element_ty = with_element


def repair() -> None:
    builder: Any = ti.InterpreterBuilder
    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, _truth(getattr(builder, name)))
    builder.create_extern_elementwise = _extern
    builder.create_inline_asm = _inline_asm
    builder.cast_impl = _cast
    builder.create_fp_to_fp = _fp_to_fp
    builder.create_fma = _fma
    builder.create_dot = _dot
    ti.ReduceOps.generic_reduce = _reduce
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _answer_once()
    for name in vars(libdevice):
        # the compiler puts a device's functions in the place of these, which do nothing
        if not name.startswith("_") and hasattr(cuda, name):
            function = functools.partial(getattr(cuda, name), _semantic=ti.interpreter_semantic)
            setattr(libdevice, name, function)
