"""Analyse first: where a model's time goes, what limits it, and what fusion can gain at best.

Predictions from the roofline: they run nothing and need no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onchip.analysis.kind import Kind
from onchip.analysis.record import Totals, total
from onchip.analysis.roofline import Bound, Ceilings, kernel_us, launch_us
from onchip.analysis.traffic import Ledger, Traffic
from onchip.ir.dtype import DType
from onchip.ir.graph import Graph, Node


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator run alone. predicted_us includes its launch; share is of the whole, 0..1;
    bound is what limits it, running what does once it runs (launches apart); None for a view."""

    name: str
    op: str
    kind: Kind
    totals: Totals
    predicted_us: float
    share: float
    bound: Bound | None
    running: Bound | None


@dataclass(frozen=True, slots=True)
class Potential:
    """Neighbouring operators that one kernel could hold, and what that would save at best."""

    ops: tuple[str, ...]
    before: Totals
    after: Totals
    before_us: float
    after_us: float

    @property
    def gain_us(self) -> float:
        return self.before_us - self.after_us


@dataclass(frozen=True, slots=True)
class Analysis:
    """predicted_us: one kernel an operator; best_us: every group of `potentials` one kernel;
    bound_us: the whole model one kernel, the physical limit. All for `ceilings`."""

    ceilings: Ceilings
    rows: tuple[OperatorRow, ...]
    unfused: Totals
    fused: Totals
    potentials: tuple[Potential, ...]
    predicted_us: float
    best_us: float
    bound_us: float

    def share(self, bound: Bound) -> float:
        """Share of the predicted time spent in operators that `bound` limits."""
        return sum(r.share for r in self.rows if r.bound is bound)


def analyze(graph: Graph, ceilings: Ceilings, graphs: bool = False) -> Analysis:
    """The analysis of a captured model on a device's ceilings. `graphs` prices a launch as a node
    of a CUDA graph."""
    ledger = Ledger(graph)
    traffic = {n: ledger.operator(n) for n in graph.nodes}
    times = {n: _time_us(ledger, t, [n], ceilings, graphs) for n, t in traffic.items()}
    whole = sum(times.values())
    rows = tuple(
        OperatorRow(
            n.name,
            n.op,
            ledger.kind(n),
            traffic[n].totals,
            times[n],
            times[n] / whole if whole else 0.0,
            *_bounds(ledger, n, traffic[n], ceilings, graphs),
        )
        for n in graph.nodes
    )
    potentials = []
    for group in groups(ledger):
        after = ledger.kernel(group)
        potentials.append(
            Potential(
                tuple(n.name for n in group),
                total(traffic[n].totals for n in group),
                after.totals,
                sum(times[n] for n in group),
                _time_us(ledger, after, group, ceilings, graphs),
            )
        )
    return Analysis(
        ceilings,
        rows,
        total(t.totals for t in traffic.values()),
        total(p.after for p in potentials),
        tuple(sorted(potentials, key=lambda p: -p.gain_us)),
        whole,
        sum(p.after_us for p in potentials),
        _bound_us(ledger, ceilings),
    )


def _bounds(
    ledger: Ledger, node: Node, traffic: Traffic, ceilings: Ceilings, graphs: bool
) -> tuple[Bound | None, Bound | None]:
    """What limits an operator run alone, and what does while it runs (launches apart). None for a
    view. Without an expression the FLOPs are unknown, and count as none."""
    if not traffic.launches:
        return None, None
    compute = compute_us(ledger, [node], ceilings)
    memory = ceilings.memory_us(traffic.dram_bytes)
    running = Bound.COMPUTE if compute > memory else Bound.MEMORY
    starts = launch_us(ceilings, graphs) > max(compute, memory)
    return (Bound.LAUNCH if starts else running), running


def program_bound_us(graph: Graph, ceilings: Ceilings) -> float:
    """The physical limit of a call: its inputs, outputs and parameters moved once, or its FLOPs
    done at the device's rates, whichever takes longer. No launch is counted."""
    return _bound_us(Ledger(graph), ceilings)


def _bound_us(ledger: Ledger, ceilings: Ceilings) -> float:
    nodes = ledger.graph.nodes
    memory = ceilings.memory_us(ledger.kernel(nodes).dram_bytes)
    return max(memory, compute_us(ledger, nodes, ceilings))


def compute_us(ledger: Ledger, nodes: Iterable[Node], ceilings: Ceilings) -> float:
    """Microseconds that the known FLOPs of operators take at the rates of their types. PyTorch's
    defaults: convolutions in float32 may use TF32, matrix products may not."""
    scalar = matrix = 0.0
    for node in nodes:
        work = ledger.flops(node)
        if not work:
            continue
        if ledger.kind(node) is Kind.CONTRACTION:
            matrix += ceilings.compute_us(work, _dtype(node), True, "conv" in node.op)
        else:
            scalar += ceilings.compute_us(work, _dtype(node))
    return max(matrix, scalar) if ceilings.gpu else matrix + scalar


def _dtype(node: Node) -> DType:
    return node.results[0].dtype if node.results else DType.F32


def _time_us(
    ledger: Ledger, traffic: Traffic, nodes: Iterable[Node], ceilings: Ceilings, graphs: bool
) -> float:
    if not traffic.launches:
        return 0.0
    memory = ceilings.memory_us(traffic.dram_bytes)
    running = max(memory, compute_us(ledger, nodes, ceilings))
    return kernel_us(ceilings, running, traffic.launches, graphs)


def groups(ledger: Ledger) -> list[tuple[Node, ...]]:
    """Operators that one kernel could hold at best: every contraction and every opaque operator
    starts a group, every other one joins the latest group that it reads from. Hence a group reads
    from earlier groups only, and the groups can run in order. Views go with what they look at."""
    place: dict[Node, int] = {}
    found: list[list[Node]] = []
    closed: set[int] = set()
    for node in ledger.graph.nodes:
        if ledger.is_free(node):
            continue
        before = [ledger.producer.get(ledger.stored(t)) for t in node.inputs]
        joins = [place[p] for p in before if p is not None]
        kind = ledger.kind(node)
        alone = kind in (Kind.CONTRACTION, Kind.OPAQUE)
        if alone or not joins or max(joins) in closed:
            found.append([])
            joins = [len(found) - 1]
            if kind is Kind.OPAQUE:
                closed.add(len(found) - 1)
        place[node] = max(joins)
        found[max(joins)].append(node)
    return [tuple(g) for g in found]
