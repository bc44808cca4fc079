"""Affine operators and inference batch norms behind a layer go into its weights and bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onchip.algebra.layers import Affine, Layer, affine, layer
from onchip.algebra.rewriting import Facts, Rewrite, Values, derived, made, rewrite
from onchip.capture.captured import Captured, LedgerEntry, Prepare
from onchip.errors import OpaqueOperator
from onchip.ir.expr import Number, Tensor
from onchip.ir.graph import Node

# Elements of a weight that are folded at once: in float64 they stay in the cache, and PyTorch hands
# no fewer out to threads.
_AT_ONCE = 1 << 15
_NORM = "aten._native_batch_norm_legit_no_training.default"
NORM_FOLDED, AFFINE_FOLDED = "batch_norm_folded", "affine_folded"


@dataclass(frozen=True, eq=False, slots=True)
class _Norm:
    """An inference batch norm: (x - mean) / sqrt(var + eps) * gamma + beta."""

    node: Node
    x: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor
    var: Tensor
    eps: float

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return tuple(p for p in (self.gamma, self.beta, self.mean, self.var) if p is not None)


def fold_affine(captured: Captured, enabled: frozenset[str]) -> Captured:
    """Fold what stands directly behind a layer into it: its scale multiplies the weights.

    Legal when each operator of the chain reads the one before it directly (an activation between
    them forbids it), nobody else reads that result, and every parameter is a constant that no
    call changes and is one value or one a feature. The chain is folded in float64, the weights
    are rounded once to their own type, and again whenever a source changes. Where the chain only
    adds, the weights stay the user's.
    """
    return rewrite(captured, lambda facts, n: _match(facts, n, enabled))


def fold_batch_norm(captured: Captured) -> Captured:
    """Fold inference batch norms alone."""
    return fold_affine(captured, frozenset([NORM_FOLDED]))


def _match(facts: Facts, node: Node, enabled: frozenset[str]) -> Rewrite | None:
    found = layer(node, facts)
    chain = _chain(found, facts, enabled) if found else []
    scaled = any(isinstance(e, _Norm) or e.scales for e in chain)
    if found is None or not chain or (found.kind == "matmul" and not scaled):
        return None
    sources = (*found.parameters, *(s for e in chain for s in e.sources))
    base = f"{found.weight.name}*{chain[-1].node.name}"
    prepare: list[Prepare] = []
    weight = found.weight
    if scaled:
        weight, step = _weight(found, chain, sources, base)
        prepare.append(step)
    bias = found.bias
    if bias is not None or any(isinstance(e, _Norm) or not e.scales for e in chain):
        bias, step = _bias(found, chain, sources)
        prepare.append(step)
    try:
        new = rebuilt(found, weight, bias)
    except OpaqueOperator:
        return None
    last = chain[-1].node.results[0]
    new.results[0].tag["strides"] = node.results[0].tag.get("strides")
    ledger = tuple(_entry(node, e) for e in chain)
    old = (node, *(e.node for e in chain))
    return Rewrite(old, (new,), last, new.results[0], ledger, tuple(prepare))


def _entry(node: Node, e: _Norm | Affine) -> LedgerEntry:
    norm = isinstance(e, _Norm)
    does = "its scale multiplies the weights" if norm or e.scales else "it is added to the bias"
    text = f"{e.node.name} is folded into {node.name}: {does}"
    return LedgerEntry(NORM_FOLDED if norm else AFFINE_FOLDED, text, (node.name, e.node.name))


def _chain(found: Layer, facts: Facts, enabled: frozenset[str]) -> list[_Norm | Affine]:
    chain: list[_Norm | Affine] = []
    last = found.node
    while len(facts.users.get(last.results[0], ())) == 1:
        reader = facts.users[last.results[0]][0]
        if facts.source(last.results[0], reader) is not last:
            break
        e = _norm(reader, facts) or affine(reader, facts)
        kind = NORM_FOLDED if isinstance(e, _Norm) else AFFINE_FOLDED
        if e is None or kind not in enabled or not _by_feature(found, e):
            break
        chain.append(e)
        last = reader
    return chain


def _norm(n: Node, facts: Facts) -> _Norm | None:
    if n.call.target != _NORM or len(n.results) != 1 or n.outputs[0] is None or n.opaque:
        return None
    x, gamma, beta, mean, var, _, eps = n.call.args
    found = _Norm(n, x, gamma, beta, mean, var, eps)
    return found if all(p in facts.fixed for p in found.sources) else None


def _by_feature(found: Layer, e: _Norm | Affine) -> bool:
    """Whether the operator's constants are one value, or one a feature of the layer."""
    if e.x.dtype is not e.node.results[0].dtype:
        return False
    if isinstance(e, _Norm):
        return found.axis == 1
    return e.varies <= {found.axis}


# ---- the new layer -----------------------------------------------------------------------------


def rebuilt(found: Layer, weight: Tensor, bias: Tensor | None) -> Node:
    """The layer with another weight and bias; a matmul's new weight is [out, in], as a linear
    layer's is."""
    name, x = found.node.name, found.x
    if not found.is_convolution:
        return made(found.node, name, "aten.linear.default", x, weight, bias)
    rest = found.node.call.args[3:]
    return made(found.node, name, found.node.call.target, x, weight, bias, *rest)


def _weight(
    found: Layer, chain: list[_Norm | Affine], sources: tuple[Tensor, ...], name: str
) -> tuple[Tensor, Prepare]:
    w = found.weight

    def by_feature(values: Values) -> torch.Tensor:
        return _scale_and_shift(chain, values)[0].expand(found.features)

    def exact(values: Values) -> torch.Tensor:
        scale, original = by_feature(values), values[w].double()
        if found.kind == "transposed":  # [C, F/groups, *kernel], each channel of one group
            wide = scale.reshape(found.groups, 1, -1).expand(-1, len(original) // found.groups, -1)
            return original * wide.reshape(*original.shape[:2], *[1] * (original.dim() - 2))
        original = original.T if found.kind == "matmul" else original
        return original * scale.reshape(-1, *[1] * (original.dim() - 1))

    def rounded(values: Values) -> torch.Tensor:
        return scaled(values[w], by_feature(values))

    if found.kind == "matmul":
        return derived(name, w.shape[::-1], w.dtype, sources, exact)
    quick = rounded if found.kind != "transposed" else None
    return derived(name, w.shape, w.dtype, sources, exact, w, quick)


def _bias(
    found: Layer, chain: list[_Norm | Affine], sources: tuple[Tensor, ...]
) -> tuple[Tensor, Prepare]:
    given, name = found.bias, f"{found.node.name}.bias*{chain[-1].node.name}"

    def compute(values: Values) -> torch.Tensor:
        start = torch.zeros((), dtype=torch.float64, device=values[found.weight].device)
        first = start if given is None else values[given].double()
        scale, shift = _scale_and_shift(chain, values)
        return (first * scale + shift).expand(found.features)

    return derived(name, (found.features,), found.weight.dtype, sources, compute)


def _scale_and_shift(
    chain: list[_Norm | Affine], values: Values
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chain as one affine map in float64: each one value, or one a feature."""
    device = next(iter(values.values())).device
    scale = torch.ones((), dtype=torch.float64, device=device)
    shift = torch.zeros((), dtype=torch.float64, device=device)
    for e in chain:
        if isinstance(e, _Norm):
            by = (values[e.var].double() + e.eps).rsqrt()
            by = by if e.gamma is None else by * values[e.gamma].double()
            shift = (shift - values[e.mean].double()) * by
            shift = shift if e.beta is None else shift + values[e.beta].double()
            scale = scale * by
            continue
        c = value(e.c, values)
        match e.kind:
            case "add":
                shift = shift + c * e.factor
            case "mul":
                scale, shift = scale * c, shift * c
            case "div":
                scale, shift = scale / c, shift / c
    return scale, shift


def value(c: Tensor | Number, values: Values) -> torch.Tensor | float:
    """A constant of one value or one a feature, in float64."""
    if not isinstance(c, Tensor):
        return float(c)
    exact = values[c].double()
    return exact.reshape(()) if exact.numel() == 1 else exact.flatten()


def scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each output channel times its scale (float64), rounded once; strides as the weight's."""
    out = torch.empty_like(weight, memory_format=torch.preserve_format)
    scale = scale.reshape(-1, *[1] * (weight.dim() - 1))
    channels = max(_AT_ONCE * len(weight) // max(weight.numel(), 1), 1)
    for i in range(0, len(weight), channels):
        part = slice(i, i + channels)
        out[part] = weight[part].double() * scale[part]  # a new tensor: the weight may be float64
    return out
