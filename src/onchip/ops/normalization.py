"""Normalisations: statistics as small tensors of the compute type, then one pointwise tensor.

Variances are taken about the mean (two passes). An inference batch norm is x * scale + shift, with
a scale and a shift for each channel that depend on parameters only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType, promote
from onchip.ir.expr import Expr, Tensor, call, fold, tensor
from onchip.ops.geometry import require_float
from onchip.ops.registry import op

# Smallest e with 1 + e > 1: what rms_norm adds when it is given no eps.
MACHINE_EPSILON = {DType.F32: 2.0**-23, DType.F64: 2.0**-52}


# ---- batch norm --------------------------------------------------------------------------------


@op("aten._native_batch_norm_legit_no_training.default")
def batch_norm_inference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor,
    momentum: float, eps: float,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """x [N, C, ...] normalised by running statistics; nothing is saved."""
    return _affine(x, weight, bias, mean, var, eps), None, None


@op("aten._batch_norm_no_update.default")
def batch_norm_no_update(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None,
    var: Tensor | None, momentum: float, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As the inference form; the reserve is cuDNN's own."""
    if mean is None or var is None:
        raise OpaqueOperator("batch norm without running statistics in inference")
    return _affine(x, weight, bias, mean, var, eps), None, None, None


@op("aten._native_batch_norm_legit_functional.default")
def batch_norm_functional(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor,
    running_var: Tensor, training: bool, momentum: float, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(output, batch mean, batch 1/deviation, new running mean, new running variance)."""
    if not training:
        out = _affine(x, weight, bias, running_mean, running_var, eps)
        same = [_copy(running_mean), _copy(running_var)]
        return out, None, None, *same
    out, mean, inverse, squares = _batch_statistics(x, weight, bias, eps)
    count = float(x.numel // x.shape[1] if x.shape[1] else 0)

    def blend(old: Tensor, new: Callable[[Expr], Expr]) -> Tensor:
        keep = 1.0 - momentum
        out = tensor(old.shape, old.dtype, lambda c: old[c] * keep + new(c) * momentum, "running")
        out.tag["type_by_device"] = True  # of half precision, float32 on a GPU
        return out

    new_mean = blend(running_mean, lambda c: mean[c])
    new_var = blend(running_var, lambda c: squares[c] / (count - 1.0))
    return out, mean, inverse, new_mean, new_var


@op("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [N, C, ...] normalised by the statistics of the batch."""
    return _batch_statistics(x, weight, bias, eps)[:3]


@op("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default")
def native_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The mutable form, where it changes nothing."""
    if not training and running_mean is not None and running_var is not None:
        return _affine(x, weight, bias, running_mean, running_var, eps), None, None
    if running_mean is not None or running_var is not None:
        raise OpaqueOperator("batch norm updates its running statistics in place")
    return _batch_statistics(x, weight, bias, eps)[:3]


@op("aten.batch_norm.default")
def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn: bool = False,
) -> Tensor:  # fmt: skip
    """The composite form."""
    results = native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    return results[0]


def _affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """x * scale[c] + shift[c]; scale and shift come from parameters alone."""
    require_float(x, "batch norm")
    kind = promote(x.dtype.compute, var.dtype.compute)
    channels = (x.shape[1],)

    def scaling(c: Expr) -> Expr:
        inverse = call("rsqrt", var[c] + eps)
        return inverse if weight is None else weight[c] * inverse

    scale = tensor(channels, kind, scaling, "scale")

    def shifting(c: Expr) -> Expr:
        centre = mean[c] * scale[c]
        return -centre if bias is None else bias[c] - centre

    shift = tensor(channels, kind, shifting, "shift")
    return tensor(x.shape, x.dtype, lambda *i: x[i] * scale[i[1]] + shift[i[1]], "batch_norm")


def _batch_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output, mean, 1/deviation, sum of squares about the mean), the last three by channel."""
    require_float(x, "batch norm")
    others = (x.shape[0], *x.shape[2:])
    mean, squares = _moments(x, (x.shape[1],), others, lambda i, r: x[(r[0], i[0], *r[1:])])
    count = float(math.prod(others))
    inverse = _inverse_deviation(squares, count, eps)

    def element(*i: Expr) -> Expr:
        value = (x[i] - mean[i[1]]) * inverse[i[1]]
        return _scaled(value, weight, bias, (i[1],))

    return tensor(x.shape, x.dtype, element, "batch_norm"), mean, inverse, squares


# ---- layer norm, RMS norm ----------------------------------------------------------------------


@op("aten.native_layer_norm.default")
def native_layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x normalised over its last dimensions; (output, mean, 1/deviation), the latter [..., 1]."""
    require_float(x, "layer norm")
    k = x.rank - len(normalized_shape)
    mean, squares = _moments(x, x.shape[:k], x.shape[k:], lambda i, r: x[(*i, *r)])
    inverse = _inverse_deviation(squares, float(math.prod(x.shape[k:])), eps)

    def element(*i: Expr) -> Expr:
        value = (x[i] - mean[i[:k]]) * inverse[i[:k]]
        return _scaled(value, weight, bias, i[k:])

    out = tensor(x.shape, x.dtype, element, "layer_norm")
    return out, _kept(mean, x.rank), _kept(inverse, x.rank)


@op("aten.layer_norm.default")
def layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    """x normalised over its last dimensions."""
    return native_layer_norm(x, normalized_shape, weight, bias, eps)[0]


@op("aten._fused_rms_norm.default")
def fused_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """x over the root mean square of its last dimensions; (output, 1/root [..., 1])."""
    require_float(x, "RMS norm")
    k = x.rank - len(normalized_shape)
    count = float(math.prod(x.shape[k:]))
    small = MACHINE_EPSILON[x.dtype.compute] if eps is None else eps

    def inverse_root(*i: Expr) -> Expr:
        squares = fold("sum", x.shape[k:], lambda *r: x[(*i, *r)] * x[(*i, *r)])
        return call("rsqrt", squares / count + small)

    inverse = tensor(x.shape[:k], x.dtype.compute, inverse_root, "inverse_root")

    def element(*i: Expr) -> Expr:
        return _scaled(x[i] * inverse[i[:k]], weight, None, i[k:])

    return tensor(x.shape, x.dtype, element, "rms_norm"), _kept(inverse, x.rank)


@op("aten.rms_norm.default")
def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    """x over the root mean square of its last dimensions."""
    return fused_rms_norm(x, normalized_shape, weight, eps)[0]


# ---- group norm, instance norm -----------------------------------------------------------------


@op("aten.group_norm.default")
def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """x [N, C, ...] normalised over each group of C / groups channels."""
    return _group_norm(x, groups, weight, bias, eps)[0]


@op("aten.native_group_norm.default")
def native_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, area: int,
    groups: int, eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(output, mean [N, groups], 1/deviation [N, groups]); statistics of half precision inputs,
    whose type depends on the device, are not given."""
    out, mean, inverse = _group_norm(x, groups, weight, bias, eps)
    if x.dtype.compute is not x.dtype:
        return out, None, None
    return out, mean, inverse


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    require_float(x, "group norm")
    width = x.shape[1] // groups
    over = (width, *x.shape[2:])
    mean, squares = _moments(
        x, (x.shape[0], groups), over, lambda i, r: x[(i[0], i[1] * width + r[0], *r[1:])]
    )
    inverse = _inverse_deviation(squares, float(math.prod(over)), eps)

    def element(*i: Expr) -> Expr:
        at = (i[0], i[1] // width)
        return _scaled((x[i] - mean[at]) * inverse[at], weight, bias, (i[1],))

    return tensor(x.shape, x.dtype, element, "group_norm"), mean, inverse


@op("aten.instance_norm.default")
def instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, use_input_stats: bool, momentum: float, eps: float,
    cudnn_enabled: bool = False,
) -> Tensor:  # fmt: skip
    """x [N, C, ...] normalised over each channel of each sample, or by running statistics."""
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise OpaqueOperator("instance norm without statistics")
        return _affine(x, weight, bias, running_mean, running_var, eps)
    if running_mean is not None or running_var is not None:
        raise OpaqueOperator("instance norm updates its running statistics in place")
    return _group_norm(x, x.shape[1], weight, bias, eps)[0]


# ---- statistics --------------------------------------------------------------------------------


def _moments(
    x: Tensor, keep: Sequence[int], over: Sequence[int],
    read: Callable[[tuple[Expr, ...], tuple[Expr, ...]], Expr],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mean, and sum of squares about the mean, of read(i, r) over r, for each i."""
    kind, count = x.dtype.compute, float(math.prod(over))
    mean = tensor(keep, kind, lambda *i: fold("sum", over, lambda *r: read(i, r)) / count, "mean")

    def squares(*i: Expr) -> Expr:
        def term(*r: Expr) -> Expr:
            deviation = read(i, r) - mean[i]
            return deviation * deviation

        return fold("sum", over, term)

    return mean, tensor(keep, kind, squares, "squares")


def _inverse_deviation(squares: Tensor, count: float, eps: float) -> Tensor:
    return tensor(
        squares.shape,
        squares.dtype,
        lambda *i: call("rsqrt", squares[i] / count + eps),
        "inverse_deviation",
    )


def _scaled(value: Expr, weight: Tensor | None, bias: Tensor | None, at: tuple[Expr, ...]) -> Expr:
    if weight is not None:
        value = value * weight[at]
    return value if bias is None else value + bias[at]


def _kept(x: Tensor, rank: int) -> Tensor:
    """x with dimensions of size 1 appended up to `rank`."""
    shape = x.shape + (1,) * (rank - x.rank)
    return tensor(shape, x.dtype, lambda *i: x[i[: x.rank]], "kept")


def _copy(x: Tensor) -> Tensor:
    out = tensor(x.shape, x.dtype, lambda *i: x[i], "running")
    out.tag["type_by_device"] = True
    return out
