"""Losses of two tensors of one shape, element by element, and their mean or sum. `reduction`: 0
none, 1 mean, 2 sum; what eager rounds between the elements and their sum stays unrounded."""

from __future__ import annotations

from collections.abc import Callable

from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Tensor, call, tensor, where
from onchip.ops.promotion import broadcast_shape, common_dtype, compare, read, shape_of
from onchip.ops.reductions import mean_all, sum_all
from onchip.ops.registry import op


def _loss(name: str, operands: list[Tensor], reduction: int, fn: Callable[..., Expr]) -> Tensor:
    """`fn` of the operands' elements, in the compute type of the common type, then reduced."""
    kind = common_dtype(*operands)
    shape = broadcast_shape(*(shape_of(x) for x in operands))

    def element(*i: Expr) -> Expr:
        return fn(*(read(x, i, shape, kind) for x in operands))

    if reduction == 0:
        return tensor(shape, kind, element, name)
    whole = (mean_all if reduction == 1 else sum_all)(tensor(shape, kind.compute, element, name))
    return _rounded(whole, kind)


def _rounded(x: Tensor, kind: DType) -> Tensor:
    return x if x.dtype is kind else tensor(x.shape, kind, lambda *i: x[i], "loss")


@op("aten.mse_loss.default")
def mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """(x - target)^2"""

    def element(a: Expr, b: Expr) -> Expr:
        d = a - b
        return d * d

    return _loss("mse", [x, target], reduction, element)


@op("aten.l1_loss.default")
def l1_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """|x - target|"""
    return _loss("l1", [x, target], reduction, lambda a, b: call("abs", a - b))


@op("aten.smooth_l1_loss.default")
def smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    """A parabola below a distance of `beta`, and |x - target| - beta / 2 beyond."""

    def element(a: Expr, b: Expr) -> Expr:
        d = call("abs", a - b)
        if not beta:
            return d
        return where(compare("lt", d, beta), d * d * 0.5 / beta, d - 0.5 * beta)

    return _loss("smooth_l1", [x, target], reduction, element)


@op("aten.huber_loss.default")
def huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """A parabola up to a distance of `delta`, and delta (|x - target| - delta / 2) beyond."""

    def element(a: Expr, b: Expr) -> Expr:
        d = call("abs", a - b)
        return where(compare("le", d, delta), d * d * 0.5, (d - 0.5 * delta) * delta)

    return _loss("huber", [x, target], reduction, element)


@op("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:  # fmt: skip
    """(1 - target) x - (1 + (pos_weight - 1) target) log sigmoid(x), times `weight`."""
    more = [t for t in (weight, pos_weight) if t is not None]

    def element(a: Expr, b: Expr, *others: Expr) -> Expr:
        rest = list(others)
        scale = rest.pop(0) if weight is not None else None
        log_sigmoid = call("minimum", a, 0.0) - call("log1p", call("exp", -call("abs", a)))
        if rest:
            log_sigmoid = ((rest[0] - 1.0) * b + 1.0) * log_sigmoid
        loss = (1.0 - b) * a - log_sigmoid
        return loss if scale is None else loss * scale

    return _loss("bce", [x, target, *more], reduction, element)


@op("aten.kl_div.default")
def kl_div(x: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False) -> Tensor:
    """target (log target - x), x being log probabilities; 0 where the target is 0."""

    def element(a: Expr, b: Expr) -> Expr:
        if log_target:
            return call("exp", b) * (b - a)
        return call("xlogy", b, b) - b * a

    return _loss("kl", [x, target], reduction, element)
