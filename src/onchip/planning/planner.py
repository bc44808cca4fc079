"""From a captured program to a plan: partition, propose, build, measure, choose."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import onchip
from onchip.analysis.record import Decision
from onchip.backends.cpp.compiler import (
    Binary,
    build_all,
    compiler_version,
    find_compiler,
    panel_width,
    target_macros,
)
from onchip.capture.captured import Captured
from onchip.capture.cleanup import constant_tensors
from onchip.capture.schema import is_view
from onchip.errors import CompilerError
from onchip.fusion.layout import choose_layouts
from onchip.fusion.partition import Group, Partition, Partitioner
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import Region
from onchip.fusion.signature import signature
from onchip.fusion.tiling import Machine
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node
from onchip.planning.candidates import Candidate, propose
from onchip.planning.plan import KernelStep, LibraryStep, Plan, Step
from onchip.planning.tuner import Verdict, kernel_of, load_verdict, store_verdict, tune
from onchip.planning.values import Values, run_eagerly
from onchip.settings import Settings

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """One group of the partition with everything known about running it."""

    group: Group
    region: Region
    key: str
    candidates: tuple[Candidate, ...]
    refusal: Refusal | None


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
    layouts = choose_layouts(graph)
    constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
    machine = Machine(settings.threads or torch.get_num_threads(), _panel_width())
    partitioner = Partitioner(graph, layouts, constants, machine, settings.fuel)
    partition = partitioner.run()
    available = frozenset(
        {*graph.inputs, *graph.constants, *(t for n in graph.nodes for t in n.results)}
    )
    units = [
        _unit(g, partitioner, layouts, constants, available, machine) for g in partition.groups
    ]
    verdicts, built, reused = _decide(units, captured, inputs, layouts, settings, progress)
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


def _panel_width() -> int:
    try:
        return panel_width()
    except CompilerError:
        return 16


def have_compiler() -> bool:
    try:
        find_compiler()
    except CompilerError:
        return False
    return True


def _unit(
    group: Group,
    partitioner: Partitioner,
    layouts: dict[Tensor, tuple[int, ...]],
    constants: frozenset[Tensor],
    available: frozenset[Tensor],
    machine: Machine,
) -> Unit:
    region = partitioner.region(group.nodes)
    key = _key(signature(region, layouts, constants), machine)
    if group.opaque or all(is_view(n.call.target) for n in group.nodes) or not have_compiler():
        return Unit(group, region, key, (), None)
    found = propose(region, layouts, constants, available, machine)
    if isinstance(found, Refusal):
        return Unit(group, region, key, (), found)
    return Unit(group, region, key, tuple(found), None)


def _key(text: str, machine: Machine) -> str:
    parts = [text, repr(machine), torch.__version__, _code_version()]
    if have_compiler():
        parts += [compiler_version(), *sorted(target_macros())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _code_version() -> str:
    """Hash of the sources that decide what candidates there are."""
    h = hashlib.sha256()
    root = Path(onchip.__file__).parent
    for folder in ("ir", "ops", "fusion", "backends", "planning"):
        for f in sorted((root / folder).rglob("*")):
            if f.suffix in (".py", ".h"):
                h.update(f.read_bytes())
    return h.hexdigest()


Verdicts = dict[str, tuple[Verdict, Binary | None]]


def _decide(
    units: list[Unit],
    captured: Captured,
    inputs: Sequence[torch.Tensor],
    layouts: dict[Tensor, tuple[int, ...]],
    settings: Settings,
    progress: Progress,
) -> tuple[Verdicts, int, int]:
    """A verdict for every kind of region, from the cache or by building and timing."""
    kinds = {u.key: u for u in reversed(units) if u.candidates}
    known = {k: v for k in kinds if (v := load_verdict(k)) is not None}
    unknown = [k for k in kinds if k not in known]
    sources: list[str] = []
    places: list[tuple[str, int]] = []
    for k, u in kinds.items():
        wanted = range(len(u.candidates)) if k in unknown else [known[k].index]
        if k in known and known[k].kind == "library":
            wanted = []
        for i in wanted:
            sources.append(u.candidates[i].source.text)
            places.append((k, i))
    progress("building kernels", 0, len(sources))
    binaries = dict(zip(places, build_all(sources), strict=True))
    if unknown:
        values = run_eagerly(captured, inputs, layouts)
        share = min(settings.budget_s / max(len(unknown), 1) / 2, 0.15)
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
    unit: Unit, binaries: dict[tuple[str, int], Binary | CompilerError], values: Values, share: float
) -> Verdict:
    mine = [binaries[unit.key, i] for i in range(len(unit.candidates))]
    return tune(unit.region.nodes, unit.candidates, mine, values, share)


def _steps(
    unit: Unit, found: tuple[Verdict, Binary | None] | None
) -> list[tuple[Step, Unit, Verdict | None, Binary | None]]:
    if found is None or found[0].kind == "library" or found[1] is None:
        verdict = found[0] if found else None
        return [(LibraryStep(n), unit, verdict, None) for n in unit.region.nodes]
    verdict, binary = found
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
