"""Elementwise choice and combination of several tensors: where, clamp, lerp, addcmul."""

from __future__ import annotations

from onchip.errors import InputError
from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Number, Tensor, call, cast, lift, tensor, where
from onchip.ops.promotion import (
    broadcast_shape,
    common_dtype,
    compare,
    element,
    pointwise,
    read,
    shape_of,
)
from onchip.ops.registry import op

Operand = Tensor | Number


@op(*(f"aten.where.{o}" for o in ("self", "ScalarSelf", "ScalarOther", "Scalar")))
def select(condition: Tensor, a: Operand, b: Operand) -> Tensor:
    """a where the condition holds, else b."""
    dtype = common_dtype(a, b)
    shape = broadcast_shape(condition.shape, shape_of(a), shape_of(b))
    return tensor(
        shape,
        dtype,
        lambda *i: where(
            element(condition, i, shape), read(a, i, shape, dtype), read(b, i, shape, dtype)
        ),
        "where",
    )


@op("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    """x with `value`, converted to x's type, where the mask holds."""
    shape = broadcast_shape(x.shape, mask.shape)
    return tensor(
        shape,
        x.dtype,
        lambda *i: where(
            element(mask, i, shape), read(value, i, shape, x.dtype), element(x, i, shape)
        ),
        "masked_fill",
    )


@op("aten.clamp.default", "aten.clamp.Tensor", "aten.clip.default", "aten.clip.Tensor")
def clamp(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """x limited from below by min, then from above by max; NaN in any of them wins."""
    limits = [v for v in (min, max) if v is not None]
    if not limits:
        raise InputError("clamp needs at least one of min and max")

    def body(a: Expr, *bounds: Expr) -> Expr:
        left = list(bounds)
        out = a if min is None else call("maximum", a, left.pop(0))
        return out if max is None else call("minimum", out, left.pop(0))

    return pointwise("clamp", [x, *limits], body, common_dtype(x, *limits))


@op("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp_min(x: Tensor, min: Operand) -> Tensor:
    return clamp(x, min, None)


@op("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(x: Tensor, max: Operand) -> Tensor:
    return clamp(x, None, max)


@op("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(start: Tensor, end: Tensor, weight: Operand) -> Tensor:
    """start + weight (end - start), written from the nearer end, so that both ends are met."""

    def body(a: Expr, b: Expr, w: Expr) -> Expr:
        near = a + w * (b - a)
        far = b - (b - a) * (1.0 - w)
        return where(compare("lt", call("abs", w), 0.5), near, far)

    return pointwise("lerp", [start, end, weight], body, start.dtype)


@op("aten.addcmul.default")
def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    """x + value a b."""
    dtype = common_dtype(x, a, b)
    return pointwise(
        "addcmul", [x, a, b], lambda p, q, r: p + (q if value == 1 else q * value) * r, dtype
    )


@op("aten.addcdiv.default")
def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    """x + value a / b, in floating point."""
    dtype = common_dtype(x, a, b)
    if not dtype.is_float:
        raise InputError(f"addcdiv of {dtype.label} is undefined; divide first")
    return pointwise(
        "addcdiv", [x, a, b], lambda p, q, r: p + (q if value == 1 else q * value) / r, dtype
    )


@op("aten.tril.default")
def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """The lower triangle of the last two dimensions, zero above the diagonal."""
    return _triangle(x, "le", diagonal)


@op("aten.triu.default")
def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    return _triangle(x, "ge", diagonal)


def _triangle(x: Tensor, fn: str, diagonal: int) -> Tensor:
    if x.rank < 2:
        raise InputError(f"a triangle needs two dimensions, {x} has {x.rank}")
    zero = False if x.dtype is DType.BOOL else 0
    return tensor(
        x.shape,
        x.dtype,
        lambda *i: where(
            compare(fn, i[-1] - i[-2], diagonal), x[i], cast(lift(zero), x.dtype.compute)
        ),
        "triangle",
    )
