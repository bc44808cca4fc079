"""Batch-norm folding: a convolution or linear layer takes over the affine map behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from onchip.capture.captured import Captured, LedgerEntry, Prepare
from onchip.capture.cleanup import fixed_constants, remove_dead
from onchip.capture.rewriting import substitute
from onchip.ir.expr import Tensor
from onchip.ir.graph import LibraryCall, Node, defined_by
from onchip.ops.registry import OPERATORS

# Where a layer's call holds its weight's output channels (axis of the weight).
_LAYERS = {
    "aten.conv1d.default": 0,
    "aten.conv2d.default": 0,
    "aten.conv3d.default": 0,
    "aten.conv2d.padding": 0,
    "aten.conv1d.padding": 0,
    "aten.linear.default": 0,
}
# Elements of a weight that are folded at once: in float64 they stay in the cache, and PyTorch hands
# no fewer out to threads.
_AT_ONCE = 1 << 15
_NORM = "aten._native_batch_norm_legit_no_training.default"


def fold_batch_norm(captured: Captured) -> Captured:
    """Fold each inference batch norm into the layer before it.

    Legal when the norm reads the layer's result directly (an activation between them forbids
    it), nobody else reads that result, and every parameter of both is a constant that no call
    changes. The weights are folded in float64, rounded once to their own type, and folded again
    whenever a source changes. Each fold changes roundings, so it stands in the ledger.
    """
    graph = captured.graph
    fixed, users, producer = fixed_constants(graph), graph.users(), graph.producer()
    results = set(graph.output_tensors)
    nodes = list(graph.nodes)
    mapping: dict[Tensor, Tensor] = {}
    prepare, ledger, constants = [], [], dict(graph.constants)
    for norm in graph.nodes:
        layer = producer.get(norm.call.args[0]) if norm.call.target == _NORM else None
        if layer is None or not _legal(layer, norm, fixed, users, results):
            continue
        folded, step = _fold(layer, norm, mapping)
        nodes[nodes.index(layer)] = folded
        nodes.remove(norm)
        mapping[norm.results[0]] = folded.results[0]
        prepare.append(step)
        constants.update({t: t.name for t in step.outputs})
        ledger.append(
            LedgerEntry(
                f"{norm.name} is folded into {layer.name}: its scale multiplies the weights",
                (layer.name, norm.name),
            )
        )
    if not mapping:
        return captured
    graph = substitute(replace(graph, constants=constants), nodes, mapping)
    return captured.with_graph(
        remove_dead(graph),
        prepare=captured.prepare + tuple(prepare),
        ledger=captured.ledger + tuple(ledger),
    )


def _legal(
    layer: Node,
    norm: Node,
    fixed: set[Tensor],
    users: dict[Tensor, list[Node]],
    results: set[Tensor],
) -> bool:
    if layer.call.target not in _LAYERS or layer.call.kwargs or len(norm.results) != 1:
        return False
    out, weight = layer.results[0], layer.call.args[1]
    if out in results or users.get(out) != [norm] or norm.outputs[0] is None:
        return False
    bias = layer.call.args[2] if len(layer.call.args) > 2 else None
    parameters = [weight, bias, *norm.call.args[1:5]]
    if any(p is not None and p not in fixed for p in parameters):
        return False
    channels_second = layer.op != "linear" or out.rank == 2
    return channels_second and weight.dtype is norm.results[0].dtype and not _batched(layer, out)


def _batched(layer: Node, out: Tensor) -> bool:
    """A convolution of an input without a batch axis: channels are not axis 1."""
    return layer.op != "linear" and out.rank != layer.call.args[1].rank


def _fold(layer: Node, norm: Node, mapping: dict[Tensor, Tensor]) -> tuple[Node, Prepare]:
    x, weight, *rest = layer.call.args
    bias = rest[0] if rest else None
    eps = norm.call.args[6]
    channels = weight.shape[0]
    new_weight = Tensor(f"{weight.name}*{norm.name}", weight.shape, weight.dtype)
    new_bias = Tensor(f"{layer.name}.bias*{norm.name}", (channels,), weight.dtype)
    new_weight.tag["strides"] = weight.tag.get("strides")
    new_bias.tag["strides"] = (1,)
    call = LibraryCall(layer.call.target, (x, new_weight, new_bias, *rest[1:]))
    folded = _redeclared(layer, call, norm.results[0])
    parts = (weight, bias, *norm.call.args[1:5])
    sources = tuple(dict.fromkeys(p for p in parts if p is not None))
    step = Prepare(
        f"{layer.name}+{norm.name}",
        sources,
        (new_weight, new_bias),
        _computation(parts, sources, eps),
    )
    return folded, step


def _redeclared(layer: Node, call: LibraryCall, like: Tensor) -> Node:
    function = None if layer.opaque else OPERATORS[call.target]
    if function is None:
        out = Tensor(layer.results[0].name, like.shape, like.dtype)
        tensors: tuple[Tensor, ...] = ()
    else:
        out = function(*call.args)
        out.name = layer.results[0].name
        tensors = defined_by([out], call.tensors())
    out.tag["strides"] = layer.results[0].tag.get("strides")
    return replace(layer, call=call, tensors=tensors, outputs=(out,))


def _computation(
    parts: tuple[Any, ...], sources: tuple[Tensor, ...], eps: float
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    weight, bias, gamma, beta, mean, var = parts  # bias, gamma and beta may be None

    def compute(values: list[torch.Tensor]) -> list[torch.Tensor]:
        given = dict(zip(sources, values, strict=True))
        original = given.pop(weight)
        exact = {s: v.double() for s, v in given.items()}
        scale = (exact[var] + eps).rsqrt()
        if gamma is not None:
            scale = scale * exact[gamma]
        shift = (-exact[mean] if bias is None else exact[bias] - exact[mean]) * scale
        if beta is not None:
            shift = shift + exact[beta]
        return [_scaled(original, scale), shift.to(original.dtype)]

    return compute


def _scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each output channel times its scale (float64), rounded once; strides as the weight's."""
    out = torch.empty_like(weight, memory_format=torch.preserve_format)
    scale = scale.reshape(-1, *[1] * (weight.dim() - 1))
    channels = max(_AT_ONCE * len(weight) // max(weight.numel(), 1), 1)
    for i in range(0, len(weight), channels):
        part = slice(i, i + channels)
        out[part] = weight[part].double() * scale[part]  # a new tensor: the weight may be float64
    return out
