"""Analyse first: where a model's time goes, what limits it, and what fusion can gain at best.

Predictions from the roofline: they run nothing and need no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onchip.analysis.kind import Kind, node_kind
from onchip.analysis.record import Totals, total
from onchip.analysis.roofline import Bound, Ceilings, classify, kernel_us, launch_us
from onchip.analysis.traffic import Ledger, Traffic
from onchip.analysis.work import node_flops
from onchip.ir.dtype import DType
from onchip.ir.graph import Graph, Node


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator run alone. predicted_us includes its launch; share is of the whole, 0..1;
    bound is None for a view."""

    name: str
    op: str
    kind: Kind
    totals: Totals
    predicted_us: float
    share: float
    bound: Bound | None


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


def analyze(graph: Graph, ceilings: Ceilings) -> Analysis:
    """The analysis of a captured model on a device's ceilings."""
    ledger = Ledger(graph)
    traffic = {n: ledger.operator(n) for n in graph.nodes}
    times = {n: _time_us(t, [n], ceilings) for n, t in traffic.items()}
    whole = sum(times.values())
    rows = tuple(
        OperatorRow(
            n.name,
            n.op,
            node_kind(n),
            traffic[n].totals,
            times[n],
            times[n] / whole if whole else 0.0,
            operator_bound(n, traffic[n], ceilings),
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
                _time_us(after, group, ceilings),
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
        program_bound_us(graph, ceilings),
    )


def operator_bound(node: Node, traffic: Traffic, ceilings: Ceilings) -> Bound | None:
    """What limits an operator run alone; None for a view. Without an expression the FLOPs are
    unknown, and only memory and launch can be told apart."""
    if not traffic.launches:
        return None
    compute, memory = compute_us([node], ceilings), ceilings.memory_us(traffic.dram_bytes)
    if launch_us(ceilings) > max(compute, memory):
        return Bound.LAUNCH
    return Bound.COMPUTE if compute > memory else Bound.MEMORY


def program_bound_us(graph: Graph, ceilings: Ceilings) -> float:
    """The physical limit of a call: its inputs, outputs and parameters moved once, or its FLOPs
    done at the device's rates, whichever takes longer. No launch is counted."""
    every = Ledger(graph).kernel(graph.nodes)
    return max(ceilings.memory_us(every.dram_bytes), compute_us(graph.nodes, ceilings))


def compute_us(nodes: Iterable[Node], ceilings: Ceilings) -> float:
    """Microseconds that the known FLOPs of operators take at the rates of their types. PyTorch's
    defaults: convolutions in float32 may use TF32, matrix products may not."""
    scalar = matrix = 0.0
    for node in nodes:
        work = node_flops(node)
        if not work:
            continue
        if node_kind(node) is Kind.CONTRACTION:
            matrix += ceilings.compute_us(work, _dtype(node), True, "conv" in node.op)
        else:
            scalar += ceilings.compute_us(work, _dtype(node))
    return max(matrix, scalar) if ceilings.gpu else matrix + scalar


def _dtype(node: Node) -> DType:
    return node.results[0].dtype if node.results else DType.F32


def _time_us(traffic: Traffic, nodes: Iterable[Node], ceilings: Ceilings) -> float:
    running = max(ceilings.memory_us(traffic.dram_bytes), compute_us(nodes, ceilings))
    return kernel_us(ceilings, running, traffic.launches) if traffic.launches else 0.0


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
        kind = node_kind(node)
        alone = kind in (Kind.CONTRACTION, Kind.OPAQUE)
        if alone or not joins or max(joins) in closed:
            found.append([])
            joins = [len(found) - 1]
            if kind is Kind.OPAQUE:
                closed.add(len(found) - 1)
        place[node] = max(joins)
        found[max(joins)].append(node)
    return [tuple(g) for g in found]


def classify_totals(totals: Totals, ceilings: Ceilings, dtype: DType = DType.F32) -> Bound | None:
    """The roofline class of a kernel of which only the totals are known; None without bytes."""
    if totals.dram_bytes is None or not totals.launches:
        return None
    return classify(ceilings, totals.dram_bytes, totals.flops or 0, dtype)
