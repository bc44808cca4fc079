"""A constant that a normalisation subtracts again with the mean."""

from __future__ import annotations

from onchip.algebra.folding import rebuilt
from onchip.algebra.layers import affine, layer
from onchip.algebra.rewriting import Facts, Rewrite, again, rewrite
from onchip.capture.captured import Captured, LedgerEntry
from onchip.errors import OpaqueOperator
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node

RULE = "bias_cancelled"
_TEXT = "{} is the same wherever {} takes a mean, which it subtracts: it is left out"


def cancel_bias(captured: Captured, _: frozenset[str]) -> Captured:
    """Leave out a layer's bias, or the addition of a constant, directly in front of a norm whose
    means run over elements that have all got the same constant. The deviations from the mean, and
    so the variance, do not change. (Not where the mean itself is read: batch norm in training
    also puts it into its running mean.)"""
    return rewrite(captured, _match)


def _match(facts: Facts, n: Node) -> Rewrite | None:
    averaged = _averaged(n)
    source = facts.source(n.call.args[0], n) if averaged is not None else None
    if source is None or averaged is None:
        return None
    added = affine(source, facts)
    if added is not None:
        if added.scales or added.varies & averaged:
            return None
        text = _TEXT.format(source.name, n.name)
        before = facts.producer.get(added.x)
        names = (n.name,) if before is None else (before.name, source.name)
        return _without(n, (source, n), added.x, (), text, names)
    found = layer(source, facts)
    if found is None or found.bias is None or found.axis in averaged:
        return None
    try:
        bare = rebuilt(found, found.weight, None)
    except OpaqueOperator:
        return None
    bare.results[0].tag["strides"] = source.results[0].tag.get("strides")
    text = _TEXT.format(f"the bias of {source.name}", n.name)
    return _without(n, (source, n), bare.results[0], (bare,), text, (source.name,))


def _without(
    n: Node, old: tuple[Node, ...], x: Tensor, new: tuple[Node, ...], text: str,
    names: tuple[str, ...],
) -> Rewrite:  # fmt: skip
    norm = again(n, x, *n.call.args[1:])
    entry = LedgerEntry(RULE, text, names)
    return Rewrite(old, (*new, norm), n.results[0], norm.results[0], (entry,))


def _averaged(n: Node) -> frozenset[int] | None:
    """The axes of the input over which the norm takes each mean (a constant that varies along
    none of them cancels); None if `n` is no such norm, or gives more than what it normalised."""
    if n.opaque or len(n.results) != 1 or n.outputs[0] is None or n.call.kwargs:
        return None
    args, x = n.call.args, n.call.args[0] if n.call.args else None
    if not isinstance(x, Tensor):
        return None
    spatial = frozenset(range(2, x.rank))
    match n.op:
        case "layer_norm" | "native_layer_norm":
            return frozenset(range(x.rank - len(args[1]), x.rank))
        case "group_norm":
            return spatial if args[1] == x.shape[1] else spatial | {1}
        case "native_group_norm":
            return spatial if args[6] == x.shape[1] else spatial | {1}
        case "instance_norm" if args[5] and args[3] is None and args[4] is None:
            return spatial
        case "_native_batch_norm_legit" if n.call.target.endswith("no_stats"):
            return spatial | {0}
    return None
