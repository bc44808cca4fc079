"""Jobs that apply one scalar function, as the Triton emitter spells it, to values of one type; and
what they must give."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tests.backends.triton_jobs import Job

from onchip.backends.nvidia.source import Launch
from onchip.backends.scalar_numpy import apply, numpy_dtype
from onchip.backends.triton import spelling
from onchip.backends.triton.source import TritonSource
from onchip.ir.dtype import BY_LABEL, DType

UNARY = """neg abs sign floor ceil trunc round frac isnan isinf isfinite logical_not""".split()  # noqa: SIM905
FLOAT_UNARY = """sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos
atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid""".split()  # noqa: SIM905
BINARY = """add sub mul maximum minimum fmax fmin floordiv mod truncdiv fmod pow eq ne lt le gt ge
logical_and logical_or logical_xor""".split()  # noqa: SIM905
FLOAT_BINARY = "div copysign atan2 hypot nextafter logaddexp xlogy ldexp".split()  # noqa: SIM905
INT_BINARY = "bitwise_and bitwise_or bitwise_xor shift_left shift_right".split()  # noqa: SIM905
BOOLS = """add mul maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and
bitwise_or bitwise_xor bitwise_not logical_not""".split()  # noqa: SIM905
TO_BOOL = frozenset(
    """isnan isinf isfinite logical_not eq ne lt le gt ge logical_and logical_or
    logical_xor""".split()  # noqa: SIM905
)
FLOATS, INTS = (DType.F32, DType.F64), (DType.I8, DType.I16, DType.I32, DType.I64, DType.U8)
COARSE = ("exp", "exp2", "div", "reciprocal", "sigmoid", "tanh", "erf")
ONE_ARGUMENT = frozenset((*UNARY, *FLOAT_UNARY, "bitwise_not"))
DIVISIONS = frozenset(("floordiv", "mod", "truncdiv", "fmod"))


@dataclass(frozen=True)
class Case:
    fn: str
    operand: DType
    coarse: bool = False
    literal: float | None = None  # of the last operand

    @property
    def dtype(self) -> DType:
        if self.fn.startswith("cast_"):
            return BY_LABEL[self.fn[5:]].compute
        return DType.BOOL if self.fn in TO_BOOL else self.operand

    @property
    def arity(self) -> int:
        if self.fn in ("where", "fma"):
            return 3
        return 1 if self.fn in ONE_ARGUMENT or self.fn.startswith("cast_") else 2

    def __str__(self) -> str:
        text = f"{self.fn}-{self.operand.label}" + "-coarse" * self.coarse
        return text if self.literal is None else f"{text}-{self.literal}"


def cases() -> list[Case]:
    out = [Case(fn, d) for d in FLOATS for fn in (*UNARY, *FLOAT_UNARY, *BINARY, *FLOAT_BINARY)]
    out += [Case(fn, d) for d in INTS for fn in (*UNARY, "bitwise_not", *BINARY, *INT_BINARY)]
    out += [Case(fn, DType.BOOL) for fn in BOOLS]
    out += [Case(fn, d) for d in (*FLOATS, *INTS) for fn in ("where", "fma")]
    computed = [d for d in BY_LABEL.values() if d.is_computable]
    sources = [d for d in computed if d.compute is d]
    out += [Case(f"cast_{to.label}", own) for own in sources for to in computed if to is not own]
    out += [Case(fn, DType.F32, coarse=True) for fn in COARSE]
    for literal in (2.0, -0.0, 0.1, float("inf")):
        literals = ("add", "mul", "div", "maximum", "where", "pow", "copysign", "sub")
        out += [Case(fn, d, literal=literal) for d in FLOATS for fn in literals]
    for fn in ("add", "mul", "maximum", "floordiv", "mod", "where", "shift_left", "pow"):
        out += [Case(fn, d, literal=3) for d in INTS]
    return out


def values(dtype: DType) -> torch.Tensor:
    """Both signs, limits, ties, and the corners of the functions."""
    if dtype is DType.BOOL:
        return torch.tensor([False, True])
    kind = getattr(torch, dtype.label)
    if dtype.is_int:
        info = torch.iinfo(kind)
        found = {info.min, info.min + 1, info.max, info.max - 1, *range(-9, 10), 31, 32, 33, 63, 64}
        return torch.tensor(sorted(v for v in found if info.min <= v <= info.max), dtype=kind)
    sizes = [0.0, 1e-10, 1e-3, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 7.0, 9.5, 10.0, 12.25]
    sizes += [30.0, 60.0, 88.5, 104.1, 150.0, 8388609.0, 1e10, 1e30, np.inf, np.nan]
    return torch.tensor([s * v for v in sizes for s in (1, -1)], dtype=torch.float64).to(kind)


def arguments(case: Case) -> list[torch.Tensor]:
    own = values(case.operand)
    sources = [own] * (case.arity - (case.literal is not None))
    if case.fn == "where":
        sources[0] = values(DType.BOOL)
    if case.arity == 3:
        sources = [s[::3] if len(s) > 2 else s for s in sources]
    rows = list(itertools.product(*(s.tolist() for s in sources)))
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    found = [c.to(s.dtype) for c, s in zip(columns, sources, strict=True)]
    keep = _defined(case, found)
    return [f[keep] for f in found]


def _defined(case: Case, found: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where the result is the same on every machine: no integer divided by zero, no float that an
    integer type does not hold."""
    last = found[-1] if case.literal is None else torch.full_like(found[0], case.literal)
    if case.operand.is_int and case.fn in DIVISIONS:
        lowest = torch.iinfo(found[0].dtype).min
        return (last != 0) & ~((last == -1) & (found[0] == lowest) & (lowest < 0))
    if case.fn.startswith("cast_") and case.operand.is_float and case.dtype.is_int:
        info = torch.iinfo(getattr(torch, case.dtype.label))
        wide = found[0].double()
        return (wide > float(info.min) - 1.0) & (wide < float(info.max)) & ~wide.isnan()
    if case.operand is DType.F32 and case.fn in ("sin", "cos", "tan"):
        return ~(found[0].abs() > 1e5) | found[0].isinf()
    return torch.ones(len(found[0]), dtype=torch.bool)


def job(case: Case) -> Job:
    inputs = arguments(case)
    names = ["a", "b", "c"][: len(inputs)]
    texts = list(names)
    if case.literal is not None:
        texts.append(spelling.constant(case.literal, case.operand))
    made = spelling.call(case.fn, texts, case.dtype, case.operand, case.coarse)
    size = len(inputs[0])
    width = 1 << max(size - 1, 0).bit_length()
    lines = [f"i = tl.arange(0, {width})", f"m = i < {size}"]
    lines += [f"{n} = tl.load(in{k} + i, mask=m, other=0)" for k, n in enumerate(names)]
    lines += [f"v = {made}", "tl.store(out0 + i, v, mask=m)"]
    head = f"def kernel({', '.join(f'in{k}' for k in range(len(names)))}, out0):"
    function = "\n    ".join(["@triton.jit", head][1:] + lines)
    text = "\n\n\n".join([*spelling.prelude("\n".join(lines)), "@triton.jit\n" + function]) + "\n"
    types = [BY_LABEL[str(x.dtype).removeprefix("torch.")] for x in inputs]
    pointers = tuple(spelling.POINTERS[d] for d in (*types, case.dtype))
    launch = Launch("kernel", 1, tuple(range(len(pointers))))
    kind = getattr(torch, case.dtype.label)
    return Job(
        str(case), TritonSource(text, (launch,), (), (), pointers),
        tuple((x, (1,)) for x in inputs), ((kind, (size,), (1,)),),
    )  # fmt: skip


def expected(case: Case, inputs: Sequence[torch.Tensor]) -> np.ndarray:
    """In float64 where it is a float; casts and nextafter in their own types."""
    arrays = [x.numpy() for x in inputs]
    if case.literal is not None:
        arrays.append(np.full_like(arrays[0 if case.fn != "where" else 1], case.literal))
    exact = case.fn not in ("nextafter",) and not case.fn.startswith("cast_")
    if exact:
        arrays = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays]
    with np.errstate(all="ignore"):
        return apply(case.fn, arrays, case.dtype, exact)


# Relative errors in units of the type's rounding. The first are CUDA's own bounds for libdevice.
LOOSE = {
    "lgamma": 400, "digamma": 400, "tan": 40, "pow": 40, "erfc": 60, "erfinv": 40, "logaddexp": 40,
    "ldexp": 8,
}  # fmt: skip
COARSE_ERROR = {"erf": 2e-4, "exp": 2e-5, "sigmoid": 2e-5, "tanh": 2e-6}


def check(case: Case, got: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    want, have = expected(case, inputs), got.numpy()
    if not case.dtype.is_float:
        np.testing.assert_array_equal(have, want, err_msg=str(case))
        return
    kind = np.finfo(numpy_dtype(case.dtype))
    with np.errstate(all="ignore"):
        rounded = want.astype(kind.dtype)
    error = LOOSE.get(case.fn, 6) * kind.eps
    if case.coarse:
        error = COARSE_ERROR.get(case.fn, 1e-6)
    # libdevice flushes denormal float32; sums and differences cancel
    absolute = 4 * float(kind.smallest_normal)
    if case.fn in ("lgamma", "digamma", "logaddexp", "fma", "floordiv", "mod", "fmod"):
        absolute = error
    if case.fn in ("mod", "fmod", "floordiv", "truncdiv", "ldexp"):
        rounded = expected_own(case, inputs)
    np.testing.assert_allclose(
        have.astype(np.float64), rounded.astype(np.float64), rtol=error, atol=absolute,
        equal_nan=True, err_msg=str(case),
    )  # fmt: skip
    zeros = (have == 0) & (rounded == 0) & np.array(_sign_matters(case))
    same = np.signbit(have) == np.signbit(rounded)
    assert same[zeros].all(), f"{case}: a zero has the wrong sign"


def expected_own(case: Case, inputs: Sequence[torch.Tensor]) -> np.ndarray:
    """In the operands' own type: functions with jumps, where a rounded quotient decides."""
    arrays = [x.numpy() for x in inputs]
    if case.literal is not None:
        arrays.append(np.full_like(arrays[0], case.literal))
    with np.errstate(all="ignore"):
        return apply(case.fn, arrays, case.dtype)


def _sign_matters(case: Case) -> bool:
    return not case.coarse and case.fn not in ("maximum", "minimum", "fmax", "fmin", "fma", "sign")
