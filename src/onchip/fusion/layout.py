"""The memory layout of every tensor: channels-last inside the convolutional parts.

Generated convolutions vectorise over output channels, and pooling and pointwise kernels over
whatever is contiguous, so one decision serves all: a tensor of rank 3 to 5 that a convolution
reads or writes, and everything that is connected to it by operators that keep (batch, channel,
...) apart, has its channels innermost. Inputs, constants and results keep eager's strides.
"""

from __future__ import annotations

from collections.abc import Callable

from onchip.ir.expr import Axis, Load, Tensor, loads, mentioned
from onchip.ir.graph import Graph, Node, addressed
from onchip.ir.index import linear

Strides = tuple[int, ...]

# With fewer channels a vector register would be mostly empty.
FEWEST_CHANNELS = 8


def contiguous(shape: tuple[int, ...]) -> Strides:
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def extent(shape: tuple[int, ...], strides: Strides) -> int:
    """Elements between the first and the last one in memory, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))


def channels_last(shape: tuple[int, ...]) -> Strides:
    """Strides with axis 1 innermost: (N, C, H, W) stored as N, H, W, C."""
    order = [0, *range(2, len(shape)), 1]
    inner = contiguous(tuple(shape[d] for d in order))
    out = [0] * len(shape)
    for d, s in zip(order, inner, strict=True):
        out[d] = s
    return tuple(out)


def choose_layouts(graph: Graph, is_view: Callable[[Node], bool]) -> dict[Tensor, Strides]:
    """Strides (in elements) of all tensors between operators: eager's, but for the channels-last
    ones and the views of them."""
    out = {t: captured_strides(t) for t in (*graph.inputs, *graph.constants)}
    spatial = _spatial_tensors(graph)
    fixed = {*graph.inputs, *graph.constants, *graph.output_tensors}
    fixed |= {t for n in addressed(graph) for t in n.results}
    for n in graph.nodes:
        viewed = is_view(n) and bool(n.inputs)
        for t in n.results:
            if viewed and out.get(n.inputs[0]) != captured_strides(n.inputs[0]):
                out[t] = _view_strides(t, n.inputs[0], out[n.inputs[0]])
            elif not viewed and t in spatial and t not in fixed and t.shape[1] >= FEWEST_CHANNELS:
                out[t] = channels_last(t.shape)
            else:
                out[t] = captured_strides(t)
        for t in n.tensors:  # what an operator computes on the way is dense
            out.setdefault(t, contiguous(t.shape))
    return out


def _view_strides(t: Tensor, base: Tensor, strides: Strides) -> Strides:
    """Strides of a view of a tensor that lies in memory by `strides`; dense if the elements do
    not lie in any regular way (the library copies then)."""
    body = t.body
    if not isinstance(body, Load) or body.src is not base:
        return contiguous(t.shape)
    forms = [linear(i) for i in body.index]
    if any(not isinstance(a, Axis) for f in forms for a, _ in f.terms):
        return contiguous(t.shape)
    return tuple(
        sum(f.coefficient(a) * s for f, s in zip(forms, strides, strict=True)) for a in t.axes
    )


def captured_strides(t: Tensor) -> Strides:
    """The strides that the tensor has in PyTorch, as capture found them; dense if it found none."""
    found = t.tag.get("strides")
    return tuple(found) if isinstance(found, (tuple, list)) else contiguous(t.shape)


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
