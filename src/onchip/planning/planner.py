"""From a captured program to a plan: partition, propose, build, measure, choose."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from onchip.analysis.record import Decision
from onchip.backends.cpp.compiler import (
    Binary,
    build_all,
    panel_width,
)
from onchip.capture.captured import Captured
from onchip.capture.cleanup import constant_tensors
from onchip.capture.schema import is_view
from onchip.errors import CompilerError
from onchip.fusion.layout import choose_layouts
from onchip.fusion.machine import Machine
from onchip.fusion.partition import Partition, Partitioner
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.expr import Tensor
from onchip.ir.graph import Graph, Node
from onchip.planning.plan import KernelStep, LibraryStep, Plan, Step
from onchip.planning.tuner import Verdict, kernel_of, store_verdict, tune
from onchip.planning.units import Unit, find_units, most_sources
from onchip.planning.values import Values, run_eagerly
from onchip.settings import Settings

# Seconds of timing that one kind of region is worth: its candidates and the library's calls.
MEASURE_S = 0.1

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False, slots=True)
class Planned:
    """A plan and its books."""

    plan: Plan
    steps_of: tuple[tuple[Step, Unit, Verdict | None, Binary | None], ...]
    decisions: tuple[Decision, ...]
    built: int
    reused: int
    seconds: float
    partition: Partition
    times: dict[str, float] = field(default_factory=dict)


def plan(
    captured: Captured,
    inputs: Sequence[torch.Tensor],
    settings: Settings,
    progress: Progress = lambda *_: None,
) -> Planned:
    """Decide how the program runs. Without a C++ compiler every operator is a library call."""
    start = time.perf_counter()
    graph = captured.graph
    layouts = choose_layouts(graph, lambda n: is_view(n.call.target))
    graph = copying_views(graph, layouts)
    constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
    machine = Machine(settings.threads or torch.get_num_threads(), _panel_width())
    partitioner = Partitioner(graph, layouts, constants, machine, settings.fuel)
    partition = partitioner.run()
    available = frozenset(
        {*graph.inputs, *graph.constants, *(t for n in graph.nodes for t in n.results)}
    )
    units, known = find_units(
        partition.groups, partitioner, available, machine, most_sources(settings)
    )
    verdicts, built, reused = _decide(units, known, captured, inputs, layouts, settings, progress)
    steps: list[tuple[Step, Unit, Verdict | None, Binary | None]] = []
    for u in units:
        steps += _steps(u, verdicts.get(u.key))
    decisions = _decisions(partition, partitioner, units, verdicts)
    result = Plan(tuple(s for s, *_ in steps), layouts)
    return Planned(
        result,
        tuple(steps),
        decisions,
        built,
        reused,
        time.perf_counter() - start,
        partition,
    )


def copying_views(graph: Graph, layouts: dict[Tensor, tuple[int, ...]]) -> Graph:
    """`view` needs eager's strides; where the layout is another one, `reshape` does the same and
    copies if it must."""
    nodes = []
    for n in graph.nodes:
        moved = n.inputs and layouts[n.inputs[0]] != n.inputs[0].tag.get("strides")
        if moved and n.op in ("view", "_unsafe_view"):
            n = replace(n, call=replace(n.call, target="aten.reshape.default"))
        nodes.append(n)
    return graph.with_nodes(nodes)


def _panel_width() -> int:
    try:
        return panel_width()
    except CompilerError:
        return 16


Verdicts = dict[str, tuple[Verdict, Binary | None]]


def _decide(
    units: list[Unit],
    known: dict[str, Verdict],
    captured: Captured,
    inputs: Sequence[torch.Tensor],
    layouts: dict[Tensor, tuple[int, ...]],
    settings: Settings,
    progress: Progress,
) -> tuple[Verdicts, int, int]:
    """A verdict for every kind of region, from the cache or by building and timing."""
    kinds = {u.key: u for u in reversed(units) if u.candidates}
    unknown = [k for k in kinds if k not in known]
    places = [(k, i) for k, u in kinds.items() for i in u.candidates]
    progress("building kernels", 0, len(places))
    sources = [kinds[k].candidates[i].source.text for k, i in places]
    binaries = dict(zip(places, build_all(sources), strict=True))
    known = dict(known)
    if unknown:
        values = run_eagerly(captured, inputs, layouts)
        share = min(settings.budget_s / len(unknown) / 2, MEASURE_S)
        for n, k in enumerate(unknown):
            progress("measuring", n, len(unknown))
            known[k] = _tune(kinds[k], binaries, values, share)
            store_verdict(k, known[k])
    out: Verdicts = {}
    for k, v in known.items():
        b = binaries.get((k, v.index)) if v.kind == "kernel" else None
        if v.kind == "kernel" and not isinstance(b, Binary):
            v, b = Verdict("library", refused=((str(b), "could not be built"),)), None
        out[k] = (v, b)  # type: ignore[assignment]
    new = [b for b in binaries.values() if isinstance(b, Binary)]
    fresh = sum(1 for b in new if not b.reused)
    return out, fresh, len(new) - fresh


def _tune(
    unit: Unit,
    binaries: dict[tuple[str, int], Binary | CompilerError],
    values: Values,
    share: float,
) -> Verdict:
    numbers = list(unit.candidates)
    mine = [binaries[unit.key, i] for i in numbers]
    found = tune(unit.region.nodes, list(unit.candidates.values()), mine, values, share)
    return replace(found, index=numbers[found.index])


def _steps(
    unit: Unit, found: tuple[Verdict, Binary | None] | None
) -> list[tuple[Step, Unit, Verdict | None, Binary | None]]:
    verdict, binary = found or (None, None)
    if verdict is None or verdict.kind == "library" or binary is None:
        return [(LibraryStep(n), unit, verdict, None) for n in unit.region.nodes]
    c = unit.candidates[verdict.index]
    step = KernelStep(
        unit.region.name,
        kernel_of(c, binary),
        c.inputs,
        c.source.outputs,
        c.derived,
        unit.region.nodes,
    )
    return [(step, unit, verdict, binary)]


def _decisions(
    partition: Partition, partitioner: Partitioner, units: list[Unit], verdicts: Verdicts
) -> tuple[Decision, ...]:
    """One decision for every edge between two operators."""
    fused_as = {}
    for u in units:
        found = verdicts.get(u.key)
        for n in u.region.nodes:
            fused_as[n] = (u, found[0] if found else None)
    out = []
    for n in partitioner.graph.nodes:
        for p in dict.fromkeys(
            partitioner.producer[t] for t in n.inputs if t in partitioner.producer
        ):
            out.append(_decision(p, n, partition, partitioner, fused_as))
    return tuple(out)


def _decision(
    p: Node, n: Node, partition: Partition, partitioner: Partitioner, fused_as: dict
) -> Decision:
    saved = sum(t.nbytes for t in p.results if t in n.inputs)
    costs: dict[str, object] = {"bytes_saved": 2 * saved}
    (a, verdict), (b, _) = fused_as[p], fused_as[n]
    edge = (p.name, n.name)
    if a is b:
        if verdict is not None and verdict.kernel_us is not None:
            costs |= {"kernel_us": verdict.kernel_us, "library_us": verdict.library_us}
        if verdict is not None and verdict.kind == "kernel":
            return Decision(edge, True, "", "fused", "one kernel", costs)
        if verdict is None:
            text = a.refusal or Refusal(Rule.OPAQUE, p.name)
            return Decision(edge, False, text.rule.name, text.family.value, str(text), costs)
        rule = Rule.LIBRARY_BETTER if verdict.kernel_us is not None else Rule.WRONG
        why = Refusal(rule, a.region.name, "; ".join(r[1] for r in verdict.refused))
        return Decision(edge, False, rule.name, rule.family.value, str(why), costs)
    refusal = partition.refusals.get((p, n)) or partitioner.merge_refusal(
        partitioner.group_of[p], partitioner.group_of[n]
    )
    if refusal is None:
        refusal = Refusal(Rule.RECOMPUTE, n.name, "its group had grown by then")
    return Decision(
        edge, False, refusal.rule.name, refusal.family.value, str(refusal), costs | refusal.costs
    )
