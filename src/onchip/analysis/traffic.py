"""Global-memory traffic of one operator, of one fused kernel and of a whole graph.

Conventions:
- An access is one read or one write of a whole activation tensor. Parameters (the graph's
  constants, and views of them) count in the bytes and not in the accesses.
- Every kernel reads each of its inputs once and writes each of its results once. Bytes of a read
  are those of the elements that are reached, never more than are stored: a broadcast tensor costs
  its stored size, a slice its own part, an embedding table the rows looked up.
- A view (in PyTorch's sense: the result shares its input's storage) starts no kernel and moves
  nothing; whoever reads it reads the tensor behind it. A reshape that its input's strides do not
  allow as a view is a copy: a kernel that reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onchip.analysis.demand import demand, volume, whole
from onchip.analysis.kind import Kind, node_kind
from onchip.analysis.record import Totals, total
from onchip.analysis.work import bindings, node_flops
from onchip.ir.expr import Load, Tensor, loads, mentioned
from onchip.ir.graph import Graph, Node

# ATen calls whose result shares its input's storage. Names, since an expression can't tell a copy
# from an alias (torch/csrc/autograd/python_variable_methods.cpp; native_functions.yaml "(a)").
VIEWS = {
    "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "numpy_T", "mT", "expand",
    "expand_as", "view_as", "squeeze", "unsqueeze", "slice", "select", "narrow", "split",
    "split_with_sizes", "chunk", "unbind", "unflatten", "flatten", "as_strided", "detach", "alias",
    "diagonal", "unfold", "movedim", "swapaxes", "real", "imag", "lift_fresh", "view_as_real",
    "view_as_complex",
}  # fmt: skip
# Those that copy where the input's strides leave no other way.
RESHAPES = {"view", "_unsafe_view", "reshape", "view_as", "flatten", "unflatten"}
# Calls that hand back their input unchanged when there is nothing to convert.
NO_OPS = {"contiguous", "to", "type_as", "dropout", "feature_dropout", "alpha_dropout", "identity"}


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kernel. reads/writes: activation tensors, with bytes; parameters: constants, with
    bytes; on_chip: intermediates that never reach global memory, with the bytes they would be."""

    reads: tuple[tuple[Tensor, int], ...]
    writes: tuple[tuple[Tensor, int], ...]
    parameters: tuple[tuple[Tensor, int], ...]
    on_chip: tuple[tuple[Tensor, int], ...]
    flops: int | None
    launches: int

    @property
    def accesses(self) -> int:
        return len(self.reads) + len(self.writes)

    @property
    def dram_bytes(self) -> int:
        return sum(n for _, n in (*self.reads, *self.writes, *self.parameters))

    @property
    def totals(self) -> Totals:
        """Without a latency: nothing was run."""
        return Totals(self.launches, self.accesses, self.dram_bytes, self.flops)


class Ledger:
    """The accounts of one graph: who produces and reads what, and which tensors are views. Facts
    about an operator are worked out once.

    layouts   strides in elements, of tensors that are not as capture found them
    """

    def __init__(self, graph: Graph, layouts: Mapping[Tensor, tuple[int, ...]] | None = None):
        self.graph = graph
        self.layouts = layouts or {}
        self.producer = graph.producer()
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self._facts: dict[Node, tuple[Kind, int | None, dict[Tensor, int]]] = {}
        self._free = {n: self._is_view(n) for n in graph.nodes}
        self._wanted = {self.stored(t) for t in graph.output_tensors}
        self._readers: dict[Tensor, set[Node]] = {}
        for n in graph.nodes:
            for t in () if self._free[n] else n.inputs:
                self._readers.setdefault(self.stored(t), set()).add(n)

    def kind(self, node: Node) -> Kind:
        return self._about(node)[0]

    def flops(self, node: Node) -> int | None:
        return self._about(node)[1]

    def _about(self, node: Node) -> tuple[Kind, int | None, dict[Tensor, int]]:
        if node not in self._facts:
            self._facts[node] = (node_kind(node), node_flops(node), _read_bytes(node))
        return self._facts[node]

    def is_free(self, node: Node) -> bool:
        """True if the operator is a view: no kernel, no traffic."""
        return self._free[node]

    def _is_view(self, node: Node) -> bool:
        if node.op in VIEWS:
            return not (node.op in RESHAPES and self._copies(node))
        if node.op not in NO_OPS or node.opaque or node_kind(node) is not Kind.VIEW:
            return False
        (src, out) = (node.inputs[0], node.results[0])
        behind = self.producer.get(src)
        unchanged = src.shape == out.shape and src.dtype is out.dtype
        # contiguous() of a transposed view copies
        return unchanged and not (node.op == "contiguous" and behind and behind.op in VIEWS)

    def _copies(self, node: Node) -> bool:
        """Whether a reshape finds strides that it can't keep."""
        src, out = node.inputs[0], node.results[0]
        if src.dtype is not out.dtype:
            return False  # `view(dtype)` looks at the same bytes, or raises
        strides = self.layouts.get(src) or src.tag.get("strides")
        known = isinstance(strides, (tuple, list))
        return known and not viewable(src.shape, tuple(strides), out.shape)

    def stored(self, tensor: Tensor) -> Tensor:
        """The tensor whose memory `tensor` is: itself, or what a chain of views looks at."""
        return self._chain(tensor)[-1]

    def _chain(self, tensor: Tensor) -> list[Tensor]:
        """`tensor` and the tensors that it is a view of, the stored one last."""
        chain = [tensor]
        while (node := self.producer.get(chain[-1])) is not None and self._free[node]:
            chain.append(node.inputs[0])
        return chain

    def kernel(self, nodes: Iterable[Node]) -> Traffic:
        """Traffic of `nodes` run as one kernel. What others, or the caller, read is written."""
        work = sorted((n for n in set(nodes) if not self._free[n]), key=self.position.__getitem__)
        made = {t for n in work for t in n.results}
        seen: dict[Tensor, int] = {}
        for node in work:
            for read, size in self._about(node)[2].items():
                chain = self._chain(read)
                base = chain[-1]
                if base not in made:
                    # an expanded slice is no more than the slice
                    size = min(size, *(t.nbytes for t in chain))
                    seen[base] = min(base.nbytes, seen.get(base, 0) + size)
        inside = set(work)
        ordered = [(t, t.nbytes) for n in work for t in n.results]
        escapes = {t for t in made if t in self._wanted or self._readers.get(t, inside) - inside}
        writes = tuple(x for x in ordered if x[0] in escapes)
        inner = tuple(x for x in ordered if x[0] not in escapes)
        flops = [self.flops(n) for n in work]
        return Traffic(
            tuple((t, n) for t, n in seen.items() if t not in self.graph.constants),
            writes,
            tuple((t, n) for t, n in seen.items() if t in self.graph.constants),
            inner,
            None if None in flops else sum(f or 0 for f in flops),
            1 if work else 0,
        )

    def operator(self, node: Node) -> Traffic:
        """Traffic of one operator run alone: every result is written, read or not."""
        own = self.kernel((node,))
        unread = tuple((t, n) for t, n in own.on_chip)
        return Traffic(own.reads, own.writes + unread, own.parameters, (), own.flops, own.launches)


def viewable(shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape and these strides (in elements) can be seen as one of shape
    `new`, of as many elements, without a copy: each run of axes that lie in memory as one axis
    is cut into whole axes of `new` (as at::detail::computeStride does)."""
    if 0 in shape:
        return True
    axes = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    runs: list[int] = []  # elements of each, outermost first
    for i, (n, s) in enumerate(axes):
        if i and axes[i - 1][1] == n * s:
            runs[-1] *= n
        else:
            runs.append(n)
    left = iter(n for n in new if n != 1)
    for run in runs:
        have = 1
        while have < run:
            have *= next(left)
        if have != run:
            return False
    return True


def account(graph: Graph) -> Totals:
    """The graph as the user gave it: one kernel an operator."""
    ledger = Ledger(graph)
    return total(ledger.operator(n).totals for n in graph.nodes)


def account_kernel(nodes: Iterable[Node], graph: Graph) -> Totals:
    """`nodes` of `graph` as one fused kernel. For many kernels of one graph use Ledger."""
    return Ledger(graph).kernel(nodes).totals


def _read_bytes(node: Node) -> dict[Tensor, int]:
    """Bytes of each input that the operator's expressions reach (all of it if opaque)."""
    inputs = set(node.inputs)
    if node.opaque or not node.tensors:
        return {t: t.nbytes for t in inputs}
    out: dict[Tensor, int] = {}
    for t in node.tensors:
        reads = loads(t.body) if t.body is not None else []
        for src, box in demand(t, whole(t)).items():
            if src in inputs:
                points = sum(_points(ld) for ld in reads if ld.src is src)
                size = out.get(src, 0) + min(volume(box), points) * src.dtype.size
                out[src] = min(src.nbytes, size)
    return dict(sorted(out.items(), key=lambda kv: node.inputs.index(kv[0])))


def _points(load: Load) -> int:
    """Bindings of the axes that a load's index mentions."""
    return bindings({a for i in load.index for a in mentioned(i)})
