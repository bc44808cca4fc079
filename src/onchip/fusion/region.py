"""A region: operators that could be one kernel, and what flows in and out of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onchip.ir.expr import Tensor
from onchip.ir.graph import Graph, Node, defined_by


@dataclass(frozen=True, eq=False, slots=True)
class Region:
    """nodes in execution order; `tensors` all that is computed inside, in dependency order
    (tensors that depend only on constants are excluded: they are computed once, at load)."""

    nodes: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        return " + ".join(n.op for n in self.nodes)


def region_of(
    nodes: Iterable[Node], graph: Graph, constants: frozenset[Tensor], position: dict[Node, int]
) -> Region:
    """The region of a set of nodes. Its outputs are the results that others or the caller read."""
    ordered = tuple(sorted(nodes, key=position.__getitem__))
    inside = set(ordered)
    produced = [t for n in ordered for t in n.results]
    wanted = set(graph.output_tensors)
    for n in graph.nodes:
        if n not in inside:
            wanted.update(n.inputs)
    outputs = tuple(t for t in produced if t in wanted)
    given = {t for n in ordered for t in n.inputs if t not in set(produced)}
    tensors = defined_by(outputs, given | constants)
    reads = dict.fromkeys(ld for t in tensors for ld in _sources(t) if ld not in set(tensors))
    return Region(ordered, tuple(reads), outputs, tensors)


def _sources(t: Tensor) -> list[Tensor]:
    from onchip.ir.graph import reads

    return reads(t)
