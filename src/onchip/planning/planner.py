"""From a captured program to a plan: partition, propose, build, measure, choose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from onchip.analysis.cost import Pricer
from onchip.analysis.record import Contest, Decision
from onchip.analysis.roofline import Ceilings
from onchip.analysis.traffic import Ledger
from onchip.capture.captured import Captured
from onchip.capture.cleanup import constant_tensors
from onchip.capture.devices import device_of
from onchip.capture.schema import is_view
from onchip.fusion.layout import choose_layouts
from onchip.fusion.partition import Partition, Partitioner
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.expr import Tensor
from onchip.ir.graph import Graph, Node
from onchip.planning.contests import contests, lost
from onchip.planning.decide import Choice, Decider, Progress
from onchip.planning.generators import Built, generator_for
from onchip.planning.intervals import words
from onchip.planning.plan import CallStep, Plan, Step
from onchip.planning.pool import Bound, Pool, Price, bound_of, join, pool_of, price_of
from onchip.planning.tuner import Verdict
from onchip.planning.units import Unit
from onchip.settings import Settings

# Multiplications of a convolution over those of its short form: 36 to 16 for 2 × 2 results of 3 × 3
# taps (fusion/winograd.py).
WINOGRAD_SAVES = 2.25


@dataclass(frozen=True, eq=False, slots=True)
class Planned:
    """A plan and its books. generator: its name; timed: whether its kernels' times say
    anything; problem: why it could build nothing ("" if it could); notes: what a user should know
    of how it was made; contests: what was measured against what; pool: what the search chose from;
    short_forms: convolutions may be computed with fewer products."""

    plan: Plan
    steps_of: tuple[tuple[Step, Unit, Verdict | None, Built | None], ...]
    decisions: tuple[Decision, ...]
    built: int
    reused: int
    seconds: float
    partition: Partition
    generator: str = "cpp"
    timed: bool = True
    problem: str = ""
    notes: tuple[str, ...] = ()
    contests: tuple[Contest, ...] = ()
    partitioner: Partitioner | None = None
    pool: Pool | None = None
    short_forms: bool = False

    def bound(self, ceilings: Ceilings) -> Bound | None:
        """The cheapest cover of the regions that the search knew, and its lower bound, by
        prediction; None where nothing could be timed, or every fusion came in its order (fuel)."""
        if self.pool is None or self.partitioner is None:
            return None
        graph, layouts = self.partitioner.graph, self.partitioner.strides
        pricer = Pricer(Ledger(graph, layouts), ceilings)
        fewer = WINOGRAD_SAVES if self.short_forms else 1.0
        return bound_of(self.pool, self.partitioner, pricer, fewer)


def plan(
    captured: Captured,
    inputs: Sequence[torch.Tensor],
    settings: Settings,
    progress: Progress = lambda *_: None,
) -> Planned:
    """Decide how the program runs. Without a compiler every operator is a library call. Raises
    InputError if the settings name a generator that can't write for the inputs' device."""
    start = time.perf_counter()
    graph = captured.graph
    layouts = choose_layouts(graph, lambda n: is_view(n.call.target))
    graph = copying_views(graph, layouts)
    constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
    device = device_of(captured, inputs)
    generator = generator_for(device, settings)
    partitioner = Partitioner(
        graph, layouts, constants, generator.root_of, settings.fuel, generator.pads_operands
    )
    partition = partitioner.run()
    decider = Decider(captured, inputs, settings, partitioner, generator, device, progress)
    pool, price = None, None
    if decider.clock is not None and not generator.problem and settings.fuel is None:
        price = price_of(decider.pricer)
        pool = pool_of(partition, partitioner, price)
        partition = join(pool, partitioner)
    choices = decider.choices(partition.groups)
    steps = tuple((s, c.unit, c.verdict, c.built) for c in choices for s in c.steps)
    return Planned(
        Plan(tuple(s for s, *_ in steps), layouts),
        steps,
        _decisions(partition, partitioner, choices, price),
        decider.built,
        decider.reused,
        time.perf_counter() - start,
        partition,
        generator.name,
        generator.timed,
        generator.problem,
        tuple(decider.isolation.notes) if decider.isolation is not None else (),
        contests(choices),
        partitioner,
        pool,
        generator.name == "cpp" and settings.winograd and settings.numerics == "fast",
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


def _decisions(
    partition: Partition,
    partitioner: Partitioner,
    choices: Sequence[Choice],
    price: Price | None,
) -> tuple[Decision, ...]:
    """One decision for every edge between two operators. price: None where nothing was priced."""
    choice_of = {n: c for c in choices for n in c.unit.region.nodes}
    out = []
    for n in partitioner.graph.nodes:
        for p in dict.fromkeys(
            partitioner.producer[t] for t in n.inputs if t in partitioner.producer
        ):
            saved = sum(t.nbytes for t in p.results if t in n.inputs)
            a, b = choice_of[p], choice_of[n]
            if a is b:
                found = _inside(a, p, n)
            elif partitioner.group_of[p] is partitioner.group_of[n]:
                found = _cut(a, b, price)
            else:
                found = _apart(p, n, partition, partitioner, price)
            costs = {"bytes_saved": 2 * saved, **found.costs}
            out.append(replace(found, edge=(p.name, n.name), costs=costs))
    return tuple(out)


NO_EDGE = ("", "")


def _refused(r: Refusal) -> Decision:
    return Decision(NO_EDGE, False, r.rule.name, r.family.value, str(r), r.costs)


def _inside(c: Choice, p: Node, n: Node) -> Decision:
    """Two operators of one unit."""
    v = c.verdict
    if v is None:
        return _refused(c.unit.refusal or Refusal(Rule.OPAQUE, p.name))
    if v.kind == "kernel":
        return Decision(NO_EDGE, True, "", "fused", f"one kernel{_measured(v)}", v.costs)
    if any(isinstance(s, CallStep) and p in s.nodes and n in s.nodes for s in c.steps):
        text = f"one library call (oneDNN){_measured(v)}"
        return Decision(NO_EDGE, True, "", "fused", text, v.costs)
    if v.kernel_us is None and not v.refused and c.unit.refusal is not None:
        return _refused(c.unit.refusal)
    if v.left_out and v.library_us is None and not v.refused:
        variants = f"{v.left_out} variants" if v.left_out > 1 else "1 variant"
        return _refused(Refusal(Rule.NO_TIME, c.unit.region.name, f"{variants} left out"))
    rule = Rule.LIBRARY_BETTER if v.kernel_us is not None else Rule.WRONG
    if v.kind == "library" and v.library_ratio is not None and v.library_ratio.low <= 1:
        rule = Rule.NO_GAIN
    why = "; ".join(filter(None, (lost(v), *(r[1] for r in v.refused))))
    return _refused(Refusal(rule, c.unit.region.name, why, dict(v.costs)))


def _measured(v: Verdict) -> str:
    """How a fused form compares with the library's calls, and with two kernels."""
    parts = [
        f"{words(r)} against {what}"
        for r, what in ((v.library_ratio, "the library's calls"), (v.split_ratio, "two kernels"))
        if r is not None
    ]
    return f": {', '.join(parts)}" if parts else ""


def _cut(a: Choice, b: Choice, price: Price | None) -> Decision:
    """Two operators of one group that was cut between them."""
    whole = [x for x, y in zip(a.cut_from, b.cut_from, strict=False) if x is y][-1]
    v = whole.verdict
    assert v is not None
    if v.split_us is None:
        return _refused(Refusal(Rule.NOT_WHOLE, whole.unit.region.name, v.refused[0][1]))
    text = f"{_whole(v)}, the parts take {v.split_us:,.0f} µs"
    text += f": whole over parts {words(v.split_ratio)}" if v.split_ratio else ""
    nodes = whole.unit.region.nodes
    first = [nodes[i] for i in v.cut]
    costs = v.costs | _predicted(price, first, [n for n in nodes if n not in first])
    return _refused(Refusal(Rule.SLOWER, whole.unit.region.name, text, costs))


def _predicted(
    price: Price | None, first: Sequence[Node], second: Sequence[Node]
) -> dict[str, float]:
    """Predicted microseconds of two parts as one kernel, and of each on its own."""
    if price is None:
        return {}
    return {
        "predicted_us": price([*first, *second]),
        "predicted_split_us": price(first) + price(second),
    }


def _whole(v: Verdict) -> str:
    """What a group took before it was cut: as one kernel, and as what took less."""
    text = "no kernel runs it whole"
    if v.kernel_us is not None:
        text = f"one kernel takes {v.kernel_us:,.0f} µs"
    if v.whole == "kernel":
        return text
    calls = {"onednn": "oneDNN's calls", "library": "library calls"}[v.whole]
    return f"{text}, {calls} take {v.best_of_whole_us:,.0f} µs"


def _apart(
    p: Node, n: Node, partition: Partition, partitioner: Partitioner, price: Price | None
) -> Decision:
    """Two operators of different groups. What stood between the two when the groups were made may
    be part of one of them by now."""
    a, b = partitioner.group_of[p], partitioner.group_of[n]
    refusal = partition.refusals.get((p, n))
    if refusal is None or refusal.rule is Rule.CYCLE:
        refusal = partitioner.union_refusal([a, b])
    if refusal is not None:
        return _refused(refusal)
    costs = _predicted(price, a.nodes, b.nodes)
    text = "nothing was priced"
    if costs:
        text = f"predicted {costs['predicted_us']:,.0f} µs, {costs['predicted_split_us']:,.0f} µs"
        text += " apart"
    return _refused(Refusal(Rule.NOT_CHOSEN, n.name, text, costs))
