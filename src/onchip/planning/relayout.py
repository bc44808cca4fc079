"""Copies that put channels side by side in front of convolutions whose input has them apart.

The tensor-core engine's copies fetch rows of channels, which a user's channels-first picture does
not have. A copy to channels-last costs the picture's bytes twice and lets the engine in. It is an
operator like any other: one kernel with the convolution (which then reads channels-first), or one
of its own, whichever is measured faster (decide.py).

Of few channels (three float32 are 12 bytes) rows are no multiple of what the copy engine fetches.
The engine's packed form reads them as they lie, of pictures; for volumes and transposed
convolutions the copy's positions are that many bytes apart, with nothing in the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onchip.capture.captured import Captured
from onchip.capture.rewriting import substitute
from onchip.capture.schema import is_view
from onchip.fusion.layout import channels_last, choose_layouts, is_convolution
from onchip.ir.expr import Load, Tensor
from onchip.ir.graph import Graph, LibraryCall, Node
from onchip.ops.registry import OPERATORS
from onchip.planning.cut import Cut

FETCHED = 16  # bytes that the copy engine takes at a time
_CLONE = "aten.clone.default"
_MARK = "copied to channels-last"  # a tag of such a copy
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def with_channels_last(captured: Captured) -> Captured:
    """The program with a copy of each tensor whose channels lie apart for the convolutions with
    several channels a group that read it, one for all of them."""
    graph = captured.graph
    layouts = choose_layouts(graph, lambda n: is_view(n.call.target))
    found = [(n, t, c) for n, t, c in _readers(graph) if _apart(t, layouts[t])]
    readers = {n: t for n, t, _ in found}
    packed = {t for _, t, c in found if _has_packed_form(c)}
    copies: dict[Tensor, Node] = {}
    nodes: list[Node] = []
    for n in graph.nodes:
        t = readers.get(n)
        if t is not None and t not in copies:
            copies[t] = _copy(t, n, t in packed)
            nodes.append(copies[t])
        nodes.append(n)
    if not copies:
        return captured
    own = {n: {t: copies[t].results[0]} for n, t in readers.items()}
    return captured.with_graph(substitute(graph, nodes, {}, own))


def _readers(graph: Graph) -> list[tuple[Node, Tensor, Node]]:
    """What reads a convolution's input from memory, with what it reads, and the convolution: this
    itself, or zeros put around for it, which the engine's copies add themselves."""
    producer, out = graph.producer(), []
    for n in graph.nodes:
        if not is_convolution(n) or n.opaque or n.call.args[0].rank not in (3, 4, 5):
            continue
        c, x, weight = n, n.call.args[0], n.call.args[1]
        if weight.rank != x.rank or _channels_of_a_group(n) < 2:  # no batch axis; depthwise
            continue
        while (before := producer.get(x)) is not None and _puts_zeros_around(before):
            n, x = before, before.inputs[0]
        out.append((n, x, c))
    return out


def _channels_of_a_group(n: Node) -> int:
    """Along the second axis a convolution's weight has them, a transposed one's has a group's
    features."""
    x, weight = n.call.args[0], n.call.args[1]
    flag = n.call.target == "aten.convolution.default" and n.call.args[6]
    if not flag and "transpose" not in n.call.target:
        return weight.shape[1]
    groups = n.results[0].shape[1] // max(weight.shape[1], 1)
    return x.shape[1] // max(groups, 1)


def _puts_zeros_around(n: Node) -> bool:
    body = n.tensors[0].body if len(n.tensors) == 1 else None
    return isinstance(body, Load) and body.pad == 0 and len(n.inputs) == 1


def _apart(t: Tensor, strides: tuple[int, ...]) -> bool:
    return t.rank > 2 and t.shape[1] > 1 and strides[1] != 1 and 0 not in t.shape


def _has_packed_form(convolution: Node) -> bool:
    """Rows of few channels are read as they lie: of at most two lines, without classes."""
    return convolution.call.args[0].rank < 5 and "transpose" not in convolution.op


def _copy(t: Tensor, reader: Node, packed: bool) -> Node:
    kwargs = {"memory_format": _FORMATS[t.rank]} if t.rank in _FORMATS else {}
    out = OPERATORS[_CLONE](t)
    out.name = f"{t.name}_channels_last"
    every = 1 if packed else FETCHED // t.dtype.size
    pitch = -(-t.shape[1] // every) * every
    out.tag |= {"strides": channels_last((t.shape[0], pitch, *t.shape[2:])), _MARK: True}
    call = LibraryCall(_CLONE, (t,), kwargs)
    return Node(out.name, call, (out,), (out,), reader.origin)


def relayout_cut(nodes: Sequence[Node]) -> Cut | None:
    """The cut of a region behind a copy to channels-last that is in it with its convolution."""
    for i, n in enumerate(nodes):
        if any(_MARK in t.tag for t in n.results) and any(map(is_convolution, nodes)):
            return Cut((i,), 2 * n.results[0].nbytes)
    return None
