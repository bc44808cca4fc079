"""Conversions of type, copies that change nothing, and tensors made from numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from onchip.errors import InputError, OpaqueOperator
from onchip.ir.dtype import DType, scalar_dtype
from onchip.ir.expr import Expr, Number, Tensor, cast, lift, tensor, where
from onchip.ops.promotion import DEFAULT_FLOAT, compare, read, real_dtype, require_number, rounded
from onchip.ops.registry import op

# Keyword arguments named `placement` (layout, device, pin_memory, memory_format...) say where and
# how a tensor is stored; they change no value.


def converted(x: Tensor, dtype: DType | None) -> Tensor:
    """x in another element type (its own if None)."""
    target = x.dtype if dtype is None else real_dtype(dtype)
    if target is x.dtype:
        return tensor(x.shape, target, lambda *i: x[i], "copy")
    return tensor(x.shape, target, lambda *i: cast(x[i], target), "cast")


@op("aten._to_copy.default")
def to_copy(x: Tensor, *, dtype: DType | None = None, **placement: Any) -> Tensor:
    return converted(x, dtype)


@op("aten.to.dtype", "prims.convert_element_type.default")
def to_dtype(x: Tensor, dtype: DType, *placement: Any, **more: Any) -> Tensor:
    return converted(x, dtype)


@op("aten.to.dtype_layout")
def to_dtype_layout(x: Tensor, *, dtype: DType | None = None, **placement: Any) -> Tensor:
    return converted(x, dtype)


@op("aten.to.device")
def to_device(x: Tensor, device: Any, dtype: DType, *placement: Any, **more: Any) -> Tensor:
    return converted(x, dtype)


@op("aten.to.other", "aten.type_as.default")
def to_other(x: Tensor, other: Tensor, *placement: Any, **more: Any) -> Tensor:
    return converted(x, other.dtype)


@op(
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.alias.default",
    "aten.alias_copy.default",
    "aten.detach.default",
    "aten.detach_copy.default",
    "aten.lift.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.positive.default",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
    "aten.conj.default",
    "aten.conj_physical.default",
    "aten.real.default",
)
def copy_of(x: Tensor, *placement: Any, **more: Any) -> Tensor:
    """The same values (complex tensors have no expression, so conjugates are the same too)."""
    return converted(x, None)


@op("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")
def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if train and p > 0:
        raise OpaqueOperator("dropout in training draws random numbers")
    return converted(x, None)


@op("aten.native_dropout.default")
def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The values and the mask of what was kept: everything, outside training."""
    if (train or train is None) and p > 0:
        raise OpaqueOperator("dropout in training draws random numbers")
    return converted(x, None), constant(x.shape, True, DType.BOOL)


# ---- tensors made from numbers -----------------------------------------------------------------


def constant(shape: Sequence[int], value: Number, dtype: DType) -> Tensor:
    """A tensor that holds one number everywhere."""
    number = rounded(require_number(value), dtype)
    return tensor(shape, dtype, lambda *_: cast(lift(number), dtype.compute), "constant")


@op("aten.full.default")
def full(
    size: Sequence[int], fill_value: Number, *, dtype: DType | None = None, **placement: Any
) -> Tensor:
    inferred = scalar_dtype(require_number(fill_value))
    return constant(size, fill_value, real_dtype(dtype or inferred))


@op("aten.zeros.default")
def zeros(size: Sequence[int], *, dtype: DType | None = None, **placement: Any) -> Tensor:
    return constant(size, 0, real_dtype(dtype or DEFAULT_FLOAT))


@op("aten.ones.default")
def ones(size: Sequence[int], *, dtype: DType | None = None, **placement: Any) -> Tensor:
    return constant(size, 1, real_dtype(dtype or DEFAULT_FLOAT))


@op("aten.scalar_tensor.default")
def scalar_tensor(value: Number, *, dtype: DType | None = None, **placement: Any) -> Tensor:
    return constant((), value, real_dtype(dtype or DEFAULT_FLOAT))


@op("aten.full_like.default")
def full_like(
    x: Tensor, fill_value: Number, *, dtype: DType | None = None, **placement: Any
) -> Tensor:
    return constant(x.shape, fill_value, real_dtype(dtype or x.dtype))


@op("aten.zeros_like.default")
def zeros_like(x: Tensor, *, dtype: DType | None = None, **placement: Any) -> Tensor:
    return constant(x.shape, 0, real_dtype(dtype or x.dtype))


@op("aten.ones_like.default")
def ones_like(x: Tensor, *, dtype: DType | None = None, **placement: Any) -> Tensor:
    return constant(x.shape, 1, real_dtype(dtype or x.dtype))


@op("aten.new_full.default")
def new_full(
    x: Tensor,
    size: Sequence[int],
    fill_value: Number,
    *,
    dtype: DType | None = None,
    **placement: Any,
) -> Tensor:
    return constant(size, fill_value, real_dtype(dtype or x.dtype))


@op("aten.new_zeros.default")
def new_zeros(
    x: Tensor, size: Sequence[int], *, dtype: DType | None = None, **placement: Any
) -> Tensor:
    return constant(size, 0, real_dtype(dtype or x.dtype))


@op("aten.new_ones.default")
def new_ones(
    x: Tensor, size: Sequence[int], *, dtype: DType | None = None, **placement: Any
) -> Tensor:
    return constant(size, 1, real_dtype(dtype or x.dtype))


@op("aten.fill.Scalar", "aten.fill.Tensor")
def fill(x: Tensor, value: Tensor | Number) -> Tensor:
    """x's shape and type, holding `value` (a number or a 0-d tensor) everywhere."""
    return tensor(x.shape, x.dtype, lambda *i: read(value, i, x.shape, x.dtype), "fill")


@op("aten.arange.default")
def arange_to(end: Number, *, dtype: DType | None = None, **placement: Any) -> Tensor:
    return arange(0, end, 1, dtype=dtype)


@op("aten.arange.start")
def arange_from(
    start: Number, end: Number, *, dtype: DType | None = None, **placement: Any
) -> Tensor:
    return arange(start, end, 1, dtype=dtype)


@op("aten.arange.start_step")
def arange(
    start: Number,
    end: Number,
    step: Number = 1,
    *,
    dtype: DType | None = None,
    **placement: Any,
) -> Tensor:
    """start, start + step, ... up to, not including, end; floats are formed in float64."""
    numbers = [require_number(v) for v in (start, end, step)]
    if step == 0:
        raise InputError("arange needs a step other than 0")
    whole = all(not isinstance(v, float) for v in numbers)
    chosen = real_dtype(dtype or (DType.I64 if whole else DEFAULT_FLOAT))
    count = int(-((start - end) // step)) if whole else math.ceil((end - start) / step)
    if not chosen.is_float:
        first, stride = int(start), int(step)
        return tensor(
            (max(count, 0),), chosen, lambda i: cast(i * stride + first, chosen), "arange"
        )
    first, stride = float(start), float(step)
    return tensor(
        (max(count, 0),), chosen, lambda i: cast(cast(i, DType.F64) * stride + first, chosen),
        "arange",
    )  # fmt: skip


@op("aten.linspace.default")
def linspace(
    start: Number, end: Number, steps: int, *, dtype: DType | None = None, **placement: Any
) -> Tensor:
    """`steps` numbers at equal distances, both ends met exactly."""
    chosen = real_dtype(dtype or DEFAULT_FLOAT)
    if not chosen.is_float:
        raise OpaqueOperator("linspace of integers is left to ATen")
    first, last = float(require_number(start)), float(require_number(end))
    stride = (last - first) / (steps - 1) if steps > 1 else 0.0

    def body(i: Expr) -> Expr:
        position = cast(i, DType.F64)
        up, down = position * stride + first, last - (steps - 1.0 - position) * stride
        return cast(where(compare("lt", i, (steps + 1) // 2), up, down), chosen)

    return tensor((steps,), chosen, body, "linspace")


@op("aten.eye.default")
def eye(n: int, *, dtype: DType | None = None, **placement: Any) -> Tensor:
    return eye_rectangular(n, n, dtype=dtype)


@op("aten.eye.m")
def eye_rectangular(n: int, m: int, *, dtype: DType | None = None, **placement: Any) -> Tensor:
    """Ones on the diagonal of an n x m matrix."""
    chosen = real_dtype(dtype or DEFAULT_FLOAT)
    return tensor((n, m), chosen, lambda i, j: cast(compare("eq", i, j), chosen), "eye")


@op("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")
def empty(*arguments: Any, **placement: Any) -> Tensor:
    raise OpaqueOperator("an uninitialised tensor has no defined elements")


@op("aten.empty_strided.default", "aten.new_empty_strided.default", "aten.empty_permuted.default")
def empty_strided(*arguments: Any, **placement: Any) -> Tensor:
    raise OpaqueOperator("an uninitialised tensor has no defined elements")


@op(*(f"aten.{n}.default" for n in ("rand", "randn", "rand_like", "randn_like", "bernoulli")))
def random(*arguments: Any, **placement: Any) -> Tensor:
    raise OpaqueOperator("random numbers are drawn by ATen's generator")
