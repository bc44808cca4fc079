"""What operators share: PyTorch's promotion and broadcasting, and reading operands by them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from onchip.errors import InputError, OpaqueOperator
from onchip.ir.dtype import DType, result_type, scalar_dtype
from onchip.ir.expr import Expr, Number, Tensor, call, cast, lift, tensor

# torch.get_default_dtype(): what integers become in a floating-point function
DEFAULT_FLOAT = DType.F32


def require_number(x: Any) -> Number:
    if isinstance(x, (bool, int, float)):
        return x
    raise OpaqueOperator(f"{type(x).__name__} operand {x!r} is not a real number")


def real_dtype(dtype: Any) -> DType:
    """An element type argument that expressions have (complex types are opaque)."""
    if not isinstance(dtype, DType) or not dtype.is_computable:
        raise OpaqueOperator(f"element type {dtype!r} is not one that expressions have")
    return dtype


def common_dtype(*operands: Tensor | Number) -> DType:
    """torch.result_type of tensors and Python numbers."""
    ranked = []
    for x in operands:
        if isinstance(x, Tensor):
            ranked.append((real_dtype(x.dtype), "tensor" if x.rank else "zero_dim"))
        else:
            ranked.append((scalar_dtype(require_number(x)), "scalar"))
    return result_type(ranked)


def float_dtype(*operands: Tensor | Number) -> DType:
    """As common_dtype, integers and bools becoming the default float type."""
    dtype = common_dtype(*operands)
    return dtype if dtype.is_float else DEFAULT_FLOAT


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape; raises InputError where two sizes differ and neither is 1."""
    rank = max((len(s) for s in shapes), default=0)
    out = [1] * rank
    for shape in shapes:
        for d, n in enumerate(shape, rank - len(shape)):
            if n != 1 and out[d] not in (1, n):
                raise InputError(f"shapes {[list(s) for s in shapes]} do not broadcast")
            out[d] = n if n != 1 else out[d]
    return tuple(out)


def read(x: Tensor | Number, index: Sequence[Expr], shape: Sequence[int], dtype: DType) -> Expr:
    """The element of `x`, broadcast to `shape`, at `index`, in the compute type of `dtype`."""
    if not isinstance(x, Tensor):
        value = require_number(x)
        if dtype is DType.BOOL or not dtype.is_float:
            return cast(lift(value), dtype)
        return lift(float(value), dtype.compute)
    return cast(element(x, index, shape), dtype.compute)


def element(x: Tensor, index: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """The element of `x`, broadcast to `shape`, at `index`, in its own compute type."""
    skipped = len(shape) - x.rank
    own = zip(x.shape, shape[skipped:], index[skipped:], strict=True)
    return x[tuple(i if n == full else 0 for n, full, i in own)]


def read_rounded(
    x: Tensor | Number, index: Sequence[Expr], shape: Sequence[int], dtype: DType
) -> Expr:
    """As `read`, but rounded to `dtype` itself: what ATen compares (bf16(0.1) == 0.1 is true)."""
    if not isinstance(x, Tensor):
        return read(rounded(require_number(x), dtype), index, shape, dtype)
    if x.dtype is dtype:
        return read(x, index, shape, dtype)
    return cast(element(x, index, shape), dtype)


def rounded(value: Number, dtype: DType) -> Number:
    """A Python number as `dtype` holds it."""
    match dtype:
        case DType.F64:
            return float(value)
        case DType.F32 | DType.BF16 | DType.F16:
            try:
                single = struct.unpack("f", struct.pack("f", float(value)))[0]
            except OverflowError:
                return float("inf") if value > 0 else float("-inf")
            return _half(single, dtype)
        case DType.BOOL:
            return bool(value)
    return int(value)


def _half(single: float, dtype: DType) -> float:
    if single != single or dtype is DType.F32:
        return single
    if dtype is DType.F16:
        try:
            return struct.unpack("e", struct.pack("e", single))[0]
        except OverflowError:
            return float("inf") if single > 0 else float("-inf")
    bits = struct.unpack("I", struct.pack("f", single))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("f", struct.pack("I", bits))[0]


def shape_of(x: Tensor | Number) -> tuple[int, ...]:
    return x.shape if isinstance(x, Tensor) else ()


def pointwise(
    name: str,
    operands: Sequence[Tensor | Number],
    fn: Callable[..., Any],
    dtype: DType,
    compute: DType | None = None,
) -> Tensor:
    """`fn` of the operands' elements, broadcast; `fn` sees them in the compute type of `compute`
    (default `dtype`, the result's type)."""
    shape = broadcast_shape(*(shape_of(x) for x in operands))
    seen = compute or dtype
    return tensor(shape, dtype, lambda *i: fn(*(read(x, i, shape, seen) for x in operands)), name)


def compare(fn: str, a: Expr, b: Expr | Number) -> Expr:
    """A comparison or predicate in the type of its operands; the result is a bool."""
    return call(fn, a, b, dtype=DType.BOOL)


def normalize_dim(dim: int, rank: int) -> int:
    """A dimension counted from the front; a 0-d tensor has dimension 0, as in ATen."""
    limit = max(rank, 1)
    if not -limit <= dim < limit:
        raise InputError(f"dimension {dim} is out of range for a tensor of {rank} dimensions")
    return dim % limit


def normalize_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Dimensions counted from the front; None and an empty list mean all of them."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    out = [normalize_dim(d, rank) for d in listed]
    if len(set(out)) != len(out):
        raise InputError(f"a dimension appears twice in {listed}")
    return tuple(d for d in out if rank)
