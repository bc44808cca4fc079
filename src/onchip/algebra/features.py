"""Means and sums of a linear layer's features or rows: a smaller linear layer gives them.

Linear maps commute: L(x W' + b) = x (L W)' + L b where L acts on the features, and
mean(x W' + b) = mean(x) W' + b where it acts on the rows.
"""

from __future__ import annotations

import torch

from onchip.algebra.layers import Fold, Layer, Pool, layer
from onchip.algebra.rewriting import Facts, Rewrite, Values, derived, made, pays
from onchip.capture import schema
from onchip.capture.captured import LedgerEntry, Prepare
from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ir.graph import LibraryCall, Node

INTO_LAYER = "mean_into_layer"
Made = tuple[tuple[Node, ...], tuple[Prepare, ...]]  # what is computed, the last its result


def replaced(
    old: tuple[Node, ...], r: Fold | Pool, names: tuple[str, ...], made_: Made, text: str,
    share: float = 1.0,
) -> Rewrite | None:  # fmt: skip
    """The rewrite of layer and mean, if it pays; `names` are its ledger entry's."""
    new, prepare = made_
    result = new[-1].results[0]
    if result.shape != r.node.results[0].shape or not pays(old, new, share):
        return None
    entry = LedgerEntry(INTO_LAYER, text, names)
    return Rewrite(old, new, r.node.results[0], result, (entry,), prepare)


def without_dims(r: Fold, new: list[Node]) -> list[Node]:
    """`new`, whose result has kept the axes of the fold, and their removal if it removes them."""
    if r.keepdim:
        return new
    name = f"{r.node.name}.shape"
    return [*new, made(r.node, name, "aten.squeeze.dims", new[-1].results[0], list(r.dims))]


def of_features(facts: Facts, r: Fold | Pool) -> Rewrite | None:
    """L(x W' + b) = x (L W)' + L b for a sum, mean or one-dimensional pool L of the features."""
    source, views = facts.source(r.x, r.node), ()
    if isinstance(r, Pool) and source is not None and source.op == "unsqueeze":
        views, source = (source,), facts.source(source.call.args[0], source)
    found = layer(source, facts)
    if found is None:
        return None
    if isinstance(r, Pool):
        fits = len(r.kernel) == 1 and not found.is_convolution
        fits = fits and (not views or views[0].call.args[1] not in (-1, found.out.rank))
    else:
        fits = r.dims == (found.axis,)
    try:
        made_ = _features_made(found, r, views) if fits else None
    except OpaqueOperator:
        return None
    if made_ is None:
        return None
    text = f"{r.node.name} is taken of the weights of {found.node.name}, not of its results"
    old = (found.node, *views, r.node)
    return replaced(old, r, tuple(n.name for n in (old[0], r.node)), made_, text)


def _features_made(found: Layer, r: Fold | Pool, views: tuple[Node, ...]) -> Made:
    node, given, x = found.node, found.bias, found.x
    new: list[Node] = []
    for v in views:
        new.append(made(v, v.name, v.call.target, x, v.call.args[1]))
        x = new[-1].results[0]
    features = 1 if isinstance(r, Fold) else r.node.results[0].shape[-1]
    weight, step = _feature_weights(found, r, features)
    prepare, bias = [step], None
    if given is not None:
        bias, step = derived(
            f"{node.name}.bias*{r.node.name}", (features,), weight.dtype, (given,),
            lambda values: _reduced(values[given].double()[None], r),
        )  # fmt: skip
        prepare.append(step)
    if found.is_convolution:
        rest = list(node.call.args[3:])
        rest[3:4] = [1] * len(rest[3:4])  # the groups have dissolved
        new.append(made(node, node.name, node.call.target, x, weight, bias, *rest))
    else:
        new.append(made(node, node.name, "aten.linear.default", x, weight, bias))
    return tuple(without_dims(r, new) if isinstance(r, Fold) else new), tuple(prepare)


def _feature_weights(found: Layer, r: Fold | Pool, features: int) -> tuple[Tensor, Prepare]:
    w, kernel = found.weight, found.kernel

    def compute(values: Values) -> torch.Tensor:
        exact = values[w].double()
        if found.is_convolution:
            assert isinstance(r, Fold)
            return _one_feature(found, exact, r.kind)
        return _reduced(exact if found.kind == "matmul" else exact.T, r).T

    shape = {
        "conv": (1, found.x.shape[1], *kernel), "transposed": (w.shape[0], 1, *kernel),
    }.get(found.kind, (features, found.x.shape[-1]))  # fmt: skip
    return derived(f"{w.name}*{r.node.name}", shape, w.dtype, (w,), compute)


def _reduced(rows: torch.Tensor, r: Fold | Pool) -> torch.Tensor:
    """[n, features] -> [n, features of the result], as the mean, sum or pool does it."""
    if isinstance(r, Fold):
        return rows.sum(1, keepdim=True) if r.kind == "sum" else rows.mean(1, keepdim=True)
    stand_in = Tensor("rows", (), DType.F64)
    call = LibraryCall(r.node.call.target, (stand_in, *r.node.call.args[1:]))
    return schema.call(call, {stand_in: rows})[0]


def _one_feature(found: Layer, w: torch.Tensor, kind: str) -> torch.Tensor:
    """The weights of one feature that is the sum or mean of a convolution's: each input channel
    gives to the features of its own group only."""
    total = w.sum(1) if found.kind == "transposed" else w.unflatten(0, (found.groups, -1)).sum(1)
    total = total / found.features if kind == "mean" else total
    return total[:, None] if found.kind == "transposed" else total.flatten(0, 1)[None]


def of_rows(facts: Facts, r: Fold | Pool) -> Rewrite | None:
    """The mean over rows of x W' + b is mean(x) W' + b; a sum adds b as often as there are rows.
    (Not in half types, which would round the mean of x to as few bits as each result.)"""
    found = layer(facts.source(r.x, r.node), facts)
    if found is None or found.is_convolution or isinstance(r, Pool) or found.axis in r.dims:
        return None
    if found.out.dtype.compute is not found.out.dtype:
        return None
    prepare, bias = (), found.bias
    if bias is not None and r.kind == "sum":
        given, times = bias, r.count
        bias, step = derived(f"{found.node.name}.bias*{r.node.name}", given.shape, given.dtype,
                             (given,), lambda values: values[given].double() * times)  # fmt: skip
        prepare = (step,)
    target = "aten.mean.dim" if r.kind == "mean" else "aten.sum.dim_IntList"
    rest = () if found.kind == "matmul" else (bias,)
    try:
        first = made(r.node, r.node.name, target, found.x, list(r.dims), r.keepdim)
        then = made(found.node, found.node.name, found.node.call.target, first.results[0],
                    found.weight, *rest)  # fmt: skip
    except OpaqueOperator:
        return None
    text = f"{r.node.name} is taken of what {found.node.name} reads, not of its results"
    return replaced((found.node, r.node), r, (r.node.name,), ((first, then), prepare), text)
