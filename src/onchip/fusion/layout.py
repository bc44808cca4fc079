"""The memory layout of every tensor: channels-last inside the convolutional parts.

Generated convolutions vectorise over output channels, and pooling and pointwise kernels over
whatever is contiguous, so one decision serves all: a tensor of rank 3 to 5 that a convolution
reads or writes, and everything that is connected to it by operators that keep (batch, channel,
...) apart, has its channels innermost. Inputs, constants and results keep eager's strides.
"""

from __future__ import annotations

from onchip.ir.expr import Axis, Tensor, loads, mentioned
from onchip.ir.graph import Graph, Node

Strides = tuple[int, ...]

# With fewer channels a vector register would be mostly empty.
FEWEST_CHANNELS = 8


def contiguous(shape: tuple[int, ...]) -> Strides:
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def channels_last(shape: tuple[int, ...]) -> Strides:
    """Strides with axis 1 innermost: (N, C, H, W) stored as N, H, W, C."""
    order = [0, *range(2, len(shape)), 1]
    inner = contiguous(tuple(shape[d] for d in order))
    out = [0] * len(shape)
    for d, s in zip(order, inner, strict=True):
        out[d] = s
    return tuple(out)


def choose_layouts(graph: Graph) -> dict[Tensor, Strides]:
    """Strides (in elements) of all tensors between operators."""
    out: dict[Tensor, Strides] = {}
    tensors = [t for n in graph.nodes for t in n.results]
    for t in (*graph.inputs, *graph.constants, *tensors):
        out[t] = _eager(t)
    spatial = _spatial_tensors(graph)
    fixed = {*graph.inputs, *graph.constants, *graph.output_tensors}
    for t in tensors:
        if t in spatial and t not in fixed and t.shape[1] >= FEWEST_CHANNELS:
            out[t] = channels_last(t.shape)
        elif t not in fixed and not _is_view(graph, t):
            out[t] = contiguous(t.shape)
    for n in graph.nodes:
        for t in n.tensors:  # what an operator computes on the way is dense
            out.setdefault(t, contiguous(t.shape))
    return out


def _eager(t: Tensor) -> Strides:
    found = t.tag.get("strides")
    return tuple(found) if isinstance(found, (tuple, list)) else contiguous(t.shape)  # type: ignore[arg-type]


def _is_view(graph: Graph, t: Tensor) -> bool:
    return bool(t.tag.get("view"))


def _spatial_tensors(graph: Graph) -> set[Tensor]:
    """Tensors that reach a convolution through operators that keep batch and channel axes."""
    parent: dict[Tensor, Tensor] = {}

    def find(t: Tensor) -> Tensor:
        parent.setdefault(t, t)
        while parent[t] is not t:
            parent[t] = parent[parent[t]]
            t = parent[t]
        return t

    seeds: list[Tensor] = []
    for n in graph.nodes:
        data = [t for t in (*n.inputs, *n.results) if t not in graph.constants and 3 <= t.rank <= 5]
        if is_convolution(n):
            seeds += [t for t in data if t in n.results or t is n.inputs[0]]
        if n.opaque:
            continue
        for r in n.results:
            for t in data:
                if t is not r and t.rank == r.rank and keeps_channels(n, t, r):
                    parent[find(t)] = find(r)
    roots = {find(t) for t in seeds}
    return {t for t in list(parent) if find(t) in roots}


def is_convolution(n: Node) -> bool:
    return n.op.startswith("conv")


def keeps_channels(n: Node, source: Tensor, result: Tensor) -> bool:
    """`result` reads `source` with its batch axis at the batch axis and its channel axis at the
    channel axis (or summed over it), and not through another view of memory."""
    if is_convolution(n):
        return source is n.inputs[0]
    for t in n.tensors:
        if t.rank != result.rank or t.body is None:
            continue
        for ld in loads(t.body):
            if ld.src is source:
                batch, channel = mentioned(ld.index[0]), mentioned(ld.index[1])
                spatial: set[Axis] = set().union(*(mentioned(i) for i in ld.index[2:]))
                if not (batch <= {t.axes[0]} and t.axes[1] not in spatial):
                    return False
                if not channel <= {t.axes[1]} or t.axes[0] in spatial:
                    return False
    return source.shape[0] == result.shape[0]
