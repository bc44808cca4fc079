"""From a compiled program and what was measured to the Report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onchip.analysis.cost import Pricer
from onchip.analysis.record import (
    Contest,
    Decision,
    GraphCoverage,
    KernelRow,
    LedgerEntry,
    Totals,
    total,
)
from onchip.analysis.roofline import Ceilings
from onchip.analysis.summary import program_bound_us
from onchip.analysis.traffic import Ledger, Traffic, account
from onchip.backends.cpp.compiler import Binary
from onchip.backends.cudnn.build import Plan as CudnnPlan
from onchip.backends.nvidia.build import Built
from onchip.capture.captured import Captured
from onchip.fusion.refusal import Rule
from onchip.ir.expr import reduces
from onchip.ir.graph import Node
from onchip.planning.assess import EAGER, FUSED, Compiled, Measured
from onchip.planning.plan import CallStep, KernelStep, LibraryStep
from onchip.planning.tuner import Verdict
from onchip.report.report import (
    CompileSummary,
    LaunchCost,
    Numerics,
    PlanSummary,
    Report,
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a report says about a run that no graph knows. error, eager_error: against float64,
    None if not verified; ceilings: None if the machine was not measured; coverage: of a CUDA graph,
    None on a CPU."""

    model: str
    device: str
    dtype: str
    versions: Mapping[str, str] = field(default_factory=dict)
    error: float | None = None
    eager_error: float | None = None
    ceilings: Ceilings | None = None
    notes: tuple[str, ...] = ()
    coverage: GraphCoverage | None = None


def build_report(facts: Facts, compiled: Compiled, measured: Measured | None) -> Report:
    """The report of one specialisation. Without `measured`, latencies are those by which the
    form of the program was chosen."""
    outcome, ceilings = compiled.outcome, facts.ceilings
    graph = _shipped(compiled).graph
    times = outcome.times_us
    eager_us = measured.eager_us if measured else times.get(EAGER)
    program_us = measured.program_us if measured else times.get(outcome.form)
    rows = list(_rows(compiled, measured, ceilings))
    kernels = tuple(k for k, _ in rows)
    plan = _plan(compiled, kernels, ceilings, _compared_us(measured, program_us))
    return Report(
        model=facts.model,
        device=facts.device,
        dtype=facts.dtype,
        unfused=replace(account(compiled.original.graph), latency_us=eager_us),
        fused=replace(total(t for _, t in rows), latency_us=program_us),
        versions=facts.versions,
        baselines=measured.baselines if measured else {},
        bound_us=program_bound_us(graph, ceilings) if ceilings else None,
        launch=LaunchCost(
            ceilings.launch_us if ceilings else None, _fused_launch_us(facts, measured)
        ),
        numerics=Numerics(facts.error, facts.eager_error, tuple(_ledger(compiled))),
        plan=plan,
        compile=compile_summary(compiled, eager_us, program_us),
        cuda_graph=facts.coverage or GraphCoverage(),
        kernels=kernels,
        decisions=tuple(_decisions(compiled)),
        notes=(*facts.notes, *_notes(compiled), *(measured.notes if measured else ())),
        ratio=measured.ratio if measured else outcome.ratios.get(outcome.form),
        contests=tuple(_contests(compiled)),
    )


def _contests(compiled: Compiled) -> Iterator[Contest]:
    """The program's own first, then those of its regions, folded operators with their layers."""
    outcome = compiled.outcome
    times = outcome.times_us
    if FUSED in times and EAGER in times:
        won, ratio = outcome.form == FUSED, outcome.ratios.get(FUSED)
        ops = tuple(n.name for n in compiled.original.graph.nodes)
        yield Contest(ops, "eager", times[FUSED], times[EAGER], ratio, won)
    folded = _folded(compiled)
    for c in compiled.planned.contests:
        ops, first = (
            tuple(o for n in some for o in (n, *folded.get(n, ()))) for some in (c.ops, c.first)
        )
        yield replace(c, ops=ops, first=first)


def compile_summary(
    compiled: Compiled, eager_us: float | None, program_us: float | None
) -> CompileSummary:
    """What compiling took, and what for."""
    planned = compiled.planned
    verdicts = {u.key: v for _, u, v, _ in planned.steps_of if v is not None}
    left_out = sum(v.left_out for v in verdicts.values())
    each = pays = None
    if eager_us is not None and program_us is not None and program_us < eager_us:
        each = compiled.seconds / (eager_us - program_us)
        pays = math.ceil(each * 1e6)
    return CompileSummary(compiled.seconds, planned.built, planned.reused, left_out, each, pays)


def predicted_us(compiled: Compiled, ceilings: Ceilings) -> float | None:
    """The predicted time of a call; None if a kernel's is not known."""
    return _sum(k.predicted_us for k, _ in _rows(compiled, None, ceilings))


def _plan(
    compiled: Compiled,
    kernels: Sequence[KernelRow],
    ceilings: Ceilings | None,
    measured_us: float | None,
) -> PlanSummary:
    predicted = _sum(k.predicted_us for k in kernels)
    found = compiled.planned.bound(ceilings) if ceilings is not None else None
    if found is None or compiled.outcome.form == EAGER:
        return PlanSummary(predicted)
    bound = found.lower_bound_us
    gap = measured_us / bound - 1 if measured_us is not None and bound > 0 else None
    return PlanSummary(predicted, bound, gap)


def _compared_us(measured: Measured | None, program_us: float | None) -> float | None:
    """What the bound is compared with: on a GPU the time of the program as one CUDA graph, where
    that was taken, as the bound prices launches as nodes of one."""
    graph = measured.baselines.get("onchip_graph") if measured else None
    return graph if graph is not None else program_us


def _fused_launch_us(facts: Facts, measured: Measured | None) -> float | None:
    """What one more kernel of the program costs: a node of its CUDA graph, or a call."""
    if facts.coverage is not None and facts.coverage.graphed and facts.ceilings is not None:
        return facts.ceilings.graph_launch_us
    return measured.call_us if measured else None


def _shipped(compiled: Compiled) -> Captured:
    return compiled.original if compiled.outcome.form == EAGER else compiled.captured


def _sum(parts: Iterable[float | None]) -> float | None:
    known = list(parts)
    return None if None in known else sum(p for p in known if p is not None)


def _notes(compiled: Compiled) -> Iterator[str]:
    yield from compiled.notes
    if compiled.outcome.text:
        yield compiled.outcome.text


# ---- kernels -----------------------------------------------------------------------------------


def _rows(
    compiled: Compiled, measured: Measured | None, ceilings: Ceilings | None
) -> Iterator[tuple[KernelRow, Totals]]:
    """One row for each launch, in execution order; views launch nothing."""
    layouts = compiled.planned.plan.layouts if compiled.outcome.form == FUSED else None
    ledger = Ledger(_shipped(compiled).graph, layouts)
    pricer = Pricer(ledger, ceilings) if ceilings is not None else None
    folded = _folded(compiled)
    node_us = measured.node_us if measured else {}
    if compiled.outcome.form != FUSED:
        for node in ledger.graph.nodes:
            if not ledger.is_free(node):
                yield _library_row(node, ledger, folded, node_us, pricer)
        return
    own = {n.name: n for n in ledger.graph.nodes}  # planning may have put a copy in a node's place
    for step, unit, verdict, built in compiled.planned.steps_of:
        if isinstance(step, LibraryStep):
            node = own[step.node.name]
            if not ledger.is_free(node):
                yield _library_row(node, ledger, folded, node_us, pricer)
            continue
        nodes = tuple(own[n.name] for n in step.nodes)
        traffic = launched(ledger.kernel(nodes), built)
        row = kernel_row(step.name, nodes, traffic, ledger, folded, pricer)
        if isinstance(step, CallStep):
            alone = verdict is not None and step.nodes == unit.region.nodes
            row = replace(row, choice=step.call.target)
            if verdict is not None and alone:
                row = replace(row, measured_us=verdict.onednn_us, **_against(verdict))
            yield row, traffic.totals
            continue
        choice = next(iter(verdict.times_us), "") if verdict else ""
        if verdict is not None and verdict.times_us:
            choice = min(verdict.times_us, key=verdict.times_us.__getitem__)
        yield (
            replace(
                row,
                backend=_backend(built) or compiled.planned.generator,
                choice=choice,
                measured_us=verdict.kernel_us if verdict else None,
                **(_against(verdict) if verdict else {}),
                **built_figures(built),
            ),
            traffic.totals,
        )


def _backend(built: object) -> str:
    """What wrote a kernel for a GPU; "" for others."""
    return built.backend if isinstance(built, (Built, CudnnPlan)) else ""


def _against(verdict: Verdict) -> dict[str, Any]:
    """What a row says of its operators as library calls."""
    return {"unfused_us": verdict.library_us, "ratio": verdict.library_ratio}


def _library_row(
    node: Node,
    ledger: Ledger,
    folded: Mapping[str, tuple[str, ...]],
    node_us: Mapping[str, float],
    pricer: Pricer | None,
) -> tuple[KernelRow, Totals]:
    traffic = ledger.operator(node)
    row = kernel_row(node.name, (node,), traffic, ledger, folded, None)
    us = pricer.call_us(node) if pricer is not None else None
    row = replace(row, choice=node.call.target, predicted_us=us)
    return replace(row, measured_us=node_us.get(node.name)), traffic.totals


def kernel_row(
    name: str,
    nodes: tuple[Node, ...],
    traffic: Traffic,
    ledger: Ledger,
    folded: Mapping[str, tuple[str, ...]],
    pricer: Pricer | None,
) -> KernelRow:
    """What analysis knows of one generated kernel. folded: operators that live on in a layer's
    weights."""
    ops = tuple(o for n in nodes for o in (n.name, *folded.get(n.name, ())))
    position = min(ledger.position[n] for n in nodes)
    return KernelRow(
        f"k{position} {name}",
        ops,
        "library",
        dram_bytes=traffic.dram_bytes,
        flops=traffic.flops,
        predicted_us=pricer.kernel_us(nodes) if pricer is not None else None,
    )


def launched(traffic: Traffic, built: object) -> Traffic:
    """A kernel's traffic with the number of functions that it launches."""
    match built:
        case Built(launches=launches):
            return replace(traffic, launches=sum(n.programs > 0 for n in launches))
    return traffic


def built_figures(built: object) -> dict[str, Any]:
    """A row's figures of a compiled kernel. Of several functions the worst of each, and the code
    and seconds of all; spilled bytes are those of local memory, where code accesses it."""
    match built:
        case Binary():
            found: dict[str, Any] = {"code_bytes": built.code_bytes}
        case CudnnPlan():
            found = {}
        case Built(resources=()):  # Triton's interpreter compiles nothing
            return {}
        case Built(resources=parts):
            found = {
                "registers": max(r.registers for r in parts),
                "spills": max(r.stack_bytes if r.spills else 0 for r in parts),
                "shared_bytes": max(r.shared_bytes for r in parts),
                "occupancy": min(r.occupancy for r in parts),
                "code_bytes": built.code_bytes,
            }
        case _:
            return {}
    return {**found, "compile_s": 0.0 if built.reused else built.seconds}


# ---- decisions and numerics, in the names of the model as given --------------------------------


def _folded(compiled: Compiled) -> dict[str, tuple[str, ...]]:
    """Operators that live on in another one: layer -> what rules took into it, in order."""
    if compiled.outcome.form == EAGER:
        return {}
    out: dict[str, tuple[str, ...]] = {}
    for e in compiled.captured.ledger:
        if len(e.nodes) > 1:
            out[e.nodes[0]] = out.get(e.nodes[0], ()) + e.nodes[1:]
    return out


def _decisions(compiled: Compiled) -> Iterator[Decision]:
    """One for each edge of the model as given: a folded operator is fused with its layer, and
    stands at its consumers' edges."""
    folded = _folded(compiled)
    texts = {n: e.text for e in compiled.captured.ledger for n in e.nodes[1:]}
    for layer, taken in folded.items():
        chain = (layer, *taken)
        for edge in zip(chain, taken, strict=False):
            yield Decision(edge, True, "", "fused", texts[edge[1]])
    for d in compiled.planned.decisions:
        producer = folded.get(d.edge[0], (d.edge[0],))[-1]
        d = replace(d, edge=(producer, d.edge[1]))
        if compiled.outcome.form != FUSED and d.fused:
            rule = Rule.SLOWER
            d = replace(
                d, fused=False, rule=rule.name, family=rule.family.value,
                text=compiled.outcome.text,
            )  # fmt: skip
        yield d


def _ledger(compiled: Compiled) -> Iterator[LedgerEntry]:
    if compiled.outcome.form == EAGER:
        return
    for e in compiled.captured.ledger:
        yield LedgerEntry(e.kind, e.nodes[0], e.text)
    if compiled.outcome.form != FUSED:
        return
    ledger = Ledger(compiled.captured.graph, compiled.planned.plan.layouts)
    own = {n.name: n for n in ledger.graph.nodes}
    for step, unit, verdict, _ in compiled.planned.steps_of:
        if isinstance(step, LibraryStep):
            continue
        stored = frozenset()
        if verdict is not None and isinstance(step, KernelStep):
            chosen = unit.candidates[verdict.index]
            stored = chosen.stored
            if chosen.fewer_products:
                text = "3-tap filters in Winograd's form: differences of inputs are multiplied"
                yield LedgerEntry("winograd", ", ".join(n.name for n in step.nodes), text)
            if chosen.precision == "tf32x3":
                text = "each float32 product is three TF32 products, added in float32"
                yield LedgerEntry("tf32x3", ", ".join(n.name for n in step.nodes), text)
        kept = [
            t for t, _ in ledger.kernel(own[n.name] for n in step.nodes).on_chip if t not in stored
        ]
        if halves := [t for t in kept if t.dtype.is_float and t.dtype.size < 4]:
            names = ", ".join(t.name for t in halves)
            text = f"stays in float32 instead of being rounded to {halves[0].dtype.label}"
            yield LedgerEntry("rounding_removed", names, text)
        # oneDNN computes eager's sums too
        sums = [n.name for n in step.nodes if _sums(n) and isinstance(step, KernelStep)]
        if sums:
            yield LedgerEntry(
                "reassociated", ", ".join(sums), "sums are added in another order than eager's"
            )


def _sums(node: Node) -> bool:
    """Whether the operator adds floating-point numbers up."""
    found = [r for t in node.tensors if t.body is not None for r in reduces(t.body)]
    return any(r.monoid in ("sum", "prod") and r.dtype.is_float for r in found)
