"""A region: operators that could be one kernel, and what flows in and out of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onchip.ir.expr import Tensor
from onchip.ir.graph import Graph, Node, defined_by, reads


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
    nodes: Iterable[Node],
    graph: Graph,
    constants: frozenset[Tensor],
    position: dict[Node, int],
    users: dict[Tensor, list[Node]] | None = None,
) -> Region:
    """The region of a set of nodes. Its outputs are the results that others or the caller read.
    `users`: graph.users(), where many regions of one graph are made."""
    users = graph.users() if users is None else users
    ordered = tuple(sorted(nodes, key=position.__getitem__))
    inside, final = set(ordered), set(graph.output_tensors)
    produced = [t for n in ordered for t in n.results]
    outputs = tuple(
        t for t in produced if t in final or any(n not in inside for n in users.get(t, ()))
    )
    made = set(produced)
    given = {t for n in ordered for t in n.inputs if t not in made}
    tensors = defined_by(outputs, given | constants)
    computed = set(tensors)
    read = dict.fromkeys(s for t in tensors for s in reads(t) if s not in computed)
    return Region(ordered, tuple(read), outputs, tensors)
