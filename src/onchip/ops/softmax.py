"""Softmax, its logarithm, and the losses made of it. A row's top and total are small tensors;
exp(x - top), which is read twice, is one of the row's size."""

from __future__ import annotations

from collections.abc import Callable

from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Tensor, call, cast, fold, lift, tensor, where
from onchip.ops.geometry import NEGATIVE_INFINITY, require_float
from onchip.ops.promotion import compare, normalize_dim
from onchip.ops.registry import op

Element = Callable[..., Expr]


@op("aten.softmax.int")
def softmax(x: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    """exp(x) over its sum along `dim`; x is converted to `dtype` first."""
    kind = _result_type(x, dtype)
    return _softmax_of(x, dim, kind, safe=False)


@op("aten._softmax.default")
def softmax_core(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """exp(x) over its sum along `dim`; a half precision x may give a float32 result."""
    require_float(x, "softmax")
    return _softmax_of(x, dim, DType.F32 if half_to_float else x.dtype, safe=False)


@op("aten._safe_softmax.default")
def safe_softmax(x: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    """Softmax that gives zeros where everything along `dim` is minus infinity."""
    return _softmax_of(x, dim, _result_type(x, dtype), safe=True)


@op("aten.log_softmax.int")
def log_softmax(x: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    """x - log(sum(exp(x))) along `dim`; x is converted to `dtype` first."""
    return _log_softmax_of(x, dim, _result_type(x, dtype))


@op("aten._log_softmax.default")
def log_softmax_core(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """x - log(sum(exp(x))) along `dim`; a half precision x may give a float32 result."""
    require_float(x, "log_softmax")
    return _log_softmax_of(x, dim, DType.F32 if half_to_float else x.dtype)


@op("aten.cross_entropy_loss.default")
def cross_entropy_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Cross entropy of scores x [N?, C, ...] and class numbers [N?, ...], or probabilities of
    x's shape. `reduction`: 0 none, 1 mean, 2 sum. A class outside 0..C-1 that is not
    `ignore_index` gives NaN (ATen raises or asserts)."""
    require_float(x, "cross entropy")
    if label_smoothing:
        raise OpaqueOperator("cross entropy with label smoothing is left to the library")
    classes = 1 if x.rank > 1 else 0
    if target.shape == x.shape and target.dtype.is_float:
        logs = _log_softmax_of(x, classes, x.dtype.compute)
        return _probability_loss(x, logs, target, weight, reduction, classes)
    # from float32 log probabilities: what eager rounds in between stays on chip
    return _class_loss(
        _log_softmax_of(x, classes, x.dtype.compute), x.dtype, target, weight, reduction,
        ignore_index,
    )[0]  # fmt: skip


@op("aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default")
def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Minus the log probability x [N?, C, ...] of each target class [N?, ...]."""
    require_float(x, "negative log likelihood")
    return _class_loss(x, x.dtype, target, weight, reduction, ignore_index)[0]


@op("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """(loss, total weight); the total is only meaningful for a reduced loss."""
    require_float(x, "negative log likelihood")
    loss, total = _class_loss(x, x.dtype, target, weight, reduction, ignore_index)
    return loss, total if reduction else None


# ---- parts -------------------------------------------------------------------------------------


def _result_type(x: Tensor, dtype: DType | None) -> DType:
    kind = dtype or x.dtype
    if not kind.is_float:
        raise OpaqueOperator(f"softmax of {kind.label} is left to the library")
    return kind


def _sum_over(extents: tuple[int, ...], fn: Element) -> Expr:
    """Sum over new axes (of an unbatched loss there are none)."""
    return fold("sum", extents, fn) if extents else fn()


def _without(i: tuple[Expr, ...], dim: int) -> tuple[Expr, ...]:
    return i[:dim] + i[dim + 1 :]


def _reader(x: Tensor, kind: DType) -> Element:
    """x's elements, converted to `kind` (rounded if that is narrower)."""
    if x.dtype is kind or (x.dtype.is_float and kind is x.dtype.compute):
        return lambda *i: x[i]
    return lambda *i: cast(x[i], kind)


def _top(read: Element, shape: tuple[int, ...], dim: int, kind: DType, safe: bool) -> Tensor:
    """Largest element along `dim`. `safe`: minus infinity counts as 0."""

    def top_of(*i: Expr) -> Expr:
        value = fold("max", (shape[dim],), lambda k: read(*i[:dim], k, *i[dim:]))
        return where(compare("eq", value, NEGATIVE_INFINITY), 0.0, value) if safe else value

    return tensor(shape[:dim] + shape[dim + 1 :], kind, top_of, "top")


def _softmax_of(x: Tensor, dim: int, kind: DType, safe: bool) -> Tensor:
    read = _reader(x, kind)
    if x.rank == 0:
        # one element: exp(x - x) is 1, or NaN for what is not finite
        return tensor((), kind, lambda: call("exp", read() - read()), "softmax")
    dim = normalize_dim(dim, x.rank)
    top = _top(read, x.shape, dim, kind.compute, safe)
    weights = tensor(
        x.shape, kind.compute, lambda *i: call("exp", read(*i) - top[_without(i, dim)]), "weights"
    )

    def inverse_of(*i: Expr) -> Expr:
        total = fold("sum", (x.shape[dim],), lambda k: weights[(*i[:dim], k, *i[dim:])])
        # at least exp(0), so that the inverse is finite and as good as a division an element
        return 1.0 / (where(compare("eq", total, 0.0), 1.0, total) if safe else total)

    inverse = tensor(top.shape, kind.compute, inverse_of, "inverse")
    return tensor(x.shape, kind, lambda *i: weights[i] * inverse[_without(i, dim)], "softmax")


def _log_softmax_of(x: Tensor, dim: int, kind: DType) -> Tensor:
    read = _reader(x, kind)
    if x.rank == 0:
        return tensor((), kind, lambda: read() - read(), "log_softmax")
    dim = normalize_dim(dim, x.rank)
    top = _top(read, x.shape, dim, kind.compute, safe=False)

    def total_of(*i: Expr) -> Expr:
        def term(k: Expr) -> Expr:
            return call("exp", read(*i[:dim], k, *i[dim:]) - top[i])

        return fold("sum", (x.shape[dim],), term)

    total = tensor(top.shape, kind.compute, total_of, "total")

    def element(*i: Expr) -> Expr:
        at = _without(i, dim)
        return read(*i) - top[at] - call("log", total[at])

    return tensor(x.shape, kind, element, "log_softmax")


def _class_loss(
    logs: Tensor, kind: DType, target: Tensor, weight: Tensor | None, reduction: int,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of class targets, and the sum of their weights."""
    if not target.dtype.is_int:
        raise OpaqueOperator(f"class targets of {target.dtype.label}")
    batched = logs.rank > 1
    compute = logs.dtype.compute

    def weight_of(*i: Expr) -> Expr:
        kept = compare("ne", target[i], ignore_index)
        if weight is None:
            return where(kept, lift(1.0, compute), 0.0)
        chosen = weight.padded(0.0)[(cast(target[i], DType.I64),)]
        return where(kept, cast(chosen, compute), 0.0)

    def loss_of(*i: Expr) -> Expr:
        chosen = cast(target[i], DType.I64)
        at = (i[0], chosen, *i[1:]) if batched else (chosen,)
        value = -logs.padded(float("nan"))[at]
        if weight is not None:
            value = value * cast(weight.padded(0.0)[(chosen,)], compute)
        return where(compare("ne", target[i], ignore_index), value, 0.0)

    if reduction == 0:
        return tensor(target.shape, kind, loss_of, "loss"), target
    total = tensor((), compute, lambda: _sum_over(target.shape, weight_of), "total_weight")
    each = tensor(target.shape, compute, loss_of, "losses")

    def reduced() -> Expr:
        value = _sum_over(target.shape, lambda *i: each[i])
        return value / total[()] if reduction == 1 else value

    return tensor((), kind, reduced, "loss"), total


def _probability_loss(
    x: Tensor, logs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, dim: int
) -> Tensor:
    rest = x.shape[:dim] + x.shape[dim + 1 :]
    compute = logs.dtype

    def loss_of(*i: Expr) -> Expr:
        def term(c: Expr) -> Expr:
            at = (*i[:dim], c, *i[dim:])
            value = logs[at] * cast(target[at], compute)
            return value if weight is None else value * cast(weight[c], compute)

        return -fold("sum", x.shape[dim : dim + 1], term)

    if reduction == 0:
        return tensor(rest, x.dtype, loss_of, "loss")
    each = tensor(rest, compute, loss_of, "losses")
    count = 1
    for n in rest:
        count *= n

    def reduced() -> Expr:
        value = _sum_over(rest, lambda *i: each[i])
        return value / float(count) if reduction == 1 else value

    return tensor((), x.dtype, reduced, "loss")
