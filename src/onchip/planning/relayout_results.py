"""Copies behind transposed convolutions with a stride whose results have their channels apart.

The tensor-core engine computes such a result class by class of positions modulo the stride. Where
positions lie side by side (channels-first), a class' elements are a stride apart, so that each
sector of memory is written by several tiles, a part at a time. With channels innermost they are
whole rows, and a copy behind them puts the channels apart. It is an operator like any other: one
kernel with the convolution (which then stores as it did), or one of its own, whichever is measured
faster (decide.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from onchip.analysis.kind import Kind, node_kind
from onchip.capture.captured import Captured
from onchip.fusion.layout import FEWEST_CHANNELS, captured_strides, contiguous
from onchip.ir.expr import Tensor
from onchip.ir.graph import LibraryCall, Node
from onchip.ops.registry import OPERATORS
from onchip.planning.cut import Cut
from onchip.planning.relayout import FETCHED

_CLONE = "aten.clone.default"
_MARK = "copied to channels-first"  # a tag of such a copy


def with_channels_first_results(captured: Captured) -> Captured:
    """The program with a copy in place of each result that a transposed convolution with a stride,
    and element-wise operators behind it, have made with its channels apart."""
    graph, producer, users = captured.graph, captured.graph.producer(), captured.graph.users()
    written = {m.value for m in graph.mutations}
    made = (t for t in dict.fromkeys(graph.outputs) if isinstance(t, Tensor) and t in producer)
    copies = {
        t: _copy(t, producer[t])
        for t in made
        if t not in written and t not in users and _rows_apart(t) and _of_classes(t, producer)
    }
    if not copies:
        return captured
    outputs = tuple(
        copies[t].results[0] if isinstance(t, Tensor) and t in copies else t for t in graph.outputs
    )
    return captured.with_graph(graph.with_nodes([*graph.nodes, *copies.values()], outputs=outputs))


def results_cut(nodes: Sequence[Node]) -> Cut | None:
    """The cut of a region in front of such a copy that is in it with what it copies."""
    for i, n in enumerate(nodes):
        if any(_MARK in t.tag for t in n.results) and any(
            t in m.results for m in nodes for t in n.inputs
        ):
            rest = tuple(k for k in range(len(nodes)) if k != i)
            return Cut(rest, 2 * n.inputs[0].nbytes)
    return None


def _rows_apart(t: Tensor) -> bool:
    """Channels-first, with channels that would be rows of their own."""
    own = t.rank in (4, 5) and 0 not in t.shape and captured_strides(t) == contiguous(t.shape)
    if not own or t.shape[1] < FEWEST_CHANNELS:
        return False
    return t.shape[1] * t.dtype.size % FETCHED == 0


def _of_classes(t: Tensor, producer: Mapping[Tensor, Node]) -> bool:
    """Whether a transposed convolution with a stride makes t's values, or what element-wise
    operators make them of."""
    stack, seen = [producer[t]], set()
    while stack:
        n = stack.pop()
        if n.op.startswith("conv_transpose"):
            strides = n.call.args[3] if len(n.call.args) > 3 else ()
            if any(s > 1 for s in strides):
                return True
        elif n not in seen and node_kind(n) is Kind.POINTWISE:
            stack += [producer[s] for s in n.inputs if s in producer and s.shape == t.shape]
        seen.add(n)
    return False


def _copy(t: Tensor, maker: Node) -> Node:
    out = OPERATORS[_CLONE](t)
    out.name = f"{t.name}_channels_first"
    out.tag |= {"strides": contiguous(t.shape), _MARK: True}
    call = LibraryCall(_CLONE, (t,), {"memory_format": torch.contiguous_format})
    return Node(out.name, call, (out,), (out,), maker.origin)
