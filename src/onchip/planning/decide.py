"""How each group of operators runs: candidates are built, checked, timed and chosen, and a group
whose fused kernel loses is cut in two if that is faster."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from onchip.analysis.cost import Pricer
from onchip.analysis.roofline import Ceilings
from onchip.analysis.traffic import Ledger
from onchip.capture.captured import Captured
from onchip.fusion.partition import Group, Partitioner
from onchip.planning import machine
from onchip.planning.building import BUILD_SHARE, build_within
from onchip.planning.candidates import Context, completed
from onchip.planning.choice import Choice, halves
from onchip.planning.cut import (
    DEPTH,
    FAR_FROM_PREDICTED,
    LEAST_OF_PROGRAM,
    MOST_TRIED,
    Cut,
    cheapest_cut,
    launches,
    may_gain,
    promising_cuts,
    undone,
)
from onchip.planning.engine_cut import engine_cut
from onchip.planning.generators import Built, Failure, Generator
from onchip.planning.intervals import compare
from onchip.planning.isolation import Isolation
from onchip.planning.library import Step as LibraryForm
from onchip.planning.library import onednn_steps
from onchip.planning.pool import price_of, ranked_cuts
from onchip.planning.precision import has_product
from onchip.planning.records import about_to_measure
from onchip.planning.relayout import relayout_cut
from onchip.planning.relayout_results import results_cut
from onchip.planning.timing import Clock, clock_for
from onchip.planning.tuner import UNDECIDED, Verdict, load_verdict, store_verdict, tune
from onchip.planning.units import Unit, by_turns, find_units, most_sources, work
from onchip.planning.values import Values, run_eagerly
from onchip.settings import Settings

# Seconds of timing that one kind of region is worth: its candidates and the library's calls.
MEASURE_S = 0.1
# The part of the budget after which no further cut is tried.
CUT_SHARE = 0.5

Progress = Callable[[str, int, int], None]


@dataclass(eq=False)
class Decider:
    """Decides for the groups of one program. built, reused: kernels compiled, or found compiled."""

    captured: Captured
    inputs: Sequence[torch.Tensor]
    settings: Settings
    partitioner: Partitioner
    generator: Generator
    device: torch.device
    progress: Progress
    built: int = 0
    reused: int = 0
    start: float = field(default_factory=time.perf_counter)
    isolation: Isolation | None = None
    _values: Values | None = None

    def __post_init__(self) -> None:
        graph = self.partitioner.graph
        results = (t for n in graph.nodes for t in n.results)
        available = frozenset({*graph.inputs, *graph.constants, *results})
        p = self.partitioner
        self.context = Context(p.strides, p.constants, available)
        self.weights = frozenset(graph.constants)
        self.most = most_sources(self.settings, self.generator)
        if self.device.type == "cuda":
            self.isolation = Isolation(self.device.index or 0)

    @property
    def clock(self) -> Clock | None:
        """What times candidates; None where times say nothing."""
        return clock_for(self.device) if self.generator.timed else None

    @property
    def values(self) -> Values:
        """Every tensor's value, from one eager run when it is first asked for."""
        if self._values is None:
            layouts = self.partitioner.strides
            self._values = run_eagerly(self.captured, self.inputs, layouts)
        return self._values

    @functools.cached_property
    def pricer(self) -> Pricer:
        """Predicted times of regions on this device, whose ceilings are measured if need be."""
        graph, layouts = self.partitioner.graph, self.partitioner.strides
        ceilings = _ceilings(str(self.device), torch.get_num_threads())
        return Pricer(Ledger(graph, layouts), ceilings)

    def choices(self, groups: Sequence[Group]) -> list[Choice]:
        """How the groups run, in order; a group that is cut is two choices or more."""
        return [c for g in self.choose(groups, self.most, DEPTH) for c in g]

    def choose(self, groups: Sequence[Group], most: int, depth: int) -> list[list[Choice]]:
        """The choices for each group. most: kernels worth compiling beyond one for each kind;
        depth: how often a part may be cut again."""
        units, known = find_units(groups, self.partitioner, self.generator, self.context, most)
        if depth < DEPTH:  # parts get one kernel each, whatever the budget
            units = [replace(u, left_out=0) for u in units]
        forms = {u: self._onednn(u) for u in units}
        for u in units:
            if forms[u] and u.key not in known and (v := load_verdict(u.key)) is not None:
                known[u.key] = v
        known |= self._unwritten(units, known)
        verdicts = self._decide(units, forms, known)
        verdicts |= self._failed([u for u in units if u.key not in known], verdicts)
        found = [self._choice(u, verdicts.get(u.key), forms[u]) for u in units]
        if depth:
            found = self._cut(found, known, depth)
        return self._parts(found, max(depth - 1, 0))

    def _onednn(self, u: Unit) -> tuple[LibraryForm, ...]:
        if u.group.opaque or self.device.type != "cpu" or not self.generator.timed:
            return ()
        return onednn_steps(u.region, self.weights)

    def _choice(
        self, u: Unit, found: tuple[Verdict, Built | None] | None, form: tuple[LibraryForm, ...]
    ) -> Choice:
        verdict, built = found or (None, None)
        kernel = None
        if verdict is not None and built is not None:
            u = u.completed(verdict.index, built)
            kernel = self.generator.kernel(u.candidates[verdict.index], built)
        return Choice(u, verdict, built, kernel, form)

    def _unwritten(self, units: Sequence[Unit], known: dict[str, Verdict]) -> dict[str, Verdict]:
        """A cut for each kind of region that can't be written as one kernel after all."""
        kinds = {u.key: u for u in reversed(units) if u.refusal is not None and not u.group.opaque}
        found = {
            k: self._cut_untimed(u, str(u.refusal)) for k, u in kinds.items() if k not in known
        }
        return {k: v for k, v in found.items() if v is not None}

    def _failed(
        self, units: Sequence[Unit], verdicts: dict[str, tuple[Verdict, Built | None]]
    ) -> dict[str, tuple[Verdict, Built | None]]:
        """A cut for each kind of region of which every kernel was refused before it was timed:
        smaller ones may do."""
        out: dict[str, tuple[Verdict, Built | None]] = {}
        for k, u in {u.key: u for u in reversed(units) if u.candidates}.items():
            v, _ = verdicts[k]
            if v.kind == "library" and v.library_us is None and v.refused:
                cut = self._cut_untimed(u, v.refused[0][1])
                out |= {k: (cut, None)} if cut is not None else {}
        return out

    def _cut_untimed(self, u: Unit, why: str) -> Verdict | None:
        cut = undone(u.group, u.region) or relayout_cut(u.region.nodes) or self._engine_cut(u)
        cut = cut or cheapest_cut(u.region, (), launches)
        if cut is None:
            return None
        v = Verdict("split", cut=cut.first, refused=((u.region.name, why),))
        store_verdict(u.key, v)
        return v

    # -- whole groups

    def _decide(
        self,
        units: Sequence[Unit],
        forms: dict[Unit, tuple[LibraryForm, ...]],
        known: dict[str, Verdict],
    ) -> dict[str, tuple[Verdict, Built | None]]:
        """A verdict for every kind of region, from the cache or by building and timing."""
        kinds = {u.key: u for u in reversed(units) if u.candidates or forms[u]}
        unknown = [k for k in kinds if k not in known]
        unknown.sort(key=lambda k: -work(kinds[k].region))  # if time runs out, for the lightest
        if unknown:
            about_to_measure(f"how {kinds[unknown[0]].region.name} runs (region {unknown[0]})")
            if self.isolation is not None:
                self.isolation.prepare()
        built = build_within(
            self.generator,
            [((k, i), c) for k in kinds if k in known for i, c in kinds[k].candidates.items()],
            by_turns({k: kinds[k] for k in unknown}),
            self.start + self.settings.budget_s * BUILD_SHARE,
            lambda done, total: self.progress("building kernels", done, total),
        )
        new = self._measured({k: kinds[k] for k in unknown}, built, forms)
        out: dict[str, tuple[Verdict, Built | None]] = {}
        for k, v in {**known, **new}.items():
            b = built.get((k, v.index)) if v.kind == "kernel" else None
            if isinstance(b, Failure):
                v, b = Verdict("library", refused=((str(b), "could not be built"),)), None
            out[k] = (v, b)
        good = [b for b in built.values() if not isinstance(b, Failure)]
        self.built += sum(not b.reused for b in good)
        self.reused += sum(b.reused for b in good)
        return out

    def _measured(
        self,
        unknown: Mapping[str, Unit],
        built: Mapping[tuple[str, int], Built | Failure],
        forms: dict[Unit, tuple[LibraryForm, ...]],
    ) -> dict[str, Verdict]:
        """Verdicts by timing what was built, as far as the budget goes."""
        new = {}
        for n, (k, u) in enumerate(unknown.items()):
            self.progress("measuring", n, len(unknown))
            mine = {i: built[k, i] for i in u.candidates if (k, i) in built}
            late = time.perf_counter() - self.start > self.settings.budget_s
            if late or not (mine or forms[u]):
                new[k] = _left_out(u)
                store_verdict(k, new[k], lasting=False)
                continue
            seconds = min(self.settings.budget_s / len(unknown) / 2, MEASURE_S)
            new[k] = self._measure(u, mine, forms, seconds)
            store_verdict(k, new[k])
        return new

    def _measure(
        self,
        u: Unit,
        built: dict[int, Built | Failure],
        forms: dict[Unit, tuple[LibraryForm, ...]],
        seconds: float,
    ) -> Verdict:
        kernels = {
            i: b if isinstance(b, Failure) else self.generator.kernel(u.candidates[i], b)
            for i, b in built.items()
        }
        constants, values = self.partitioner.constants, self.values
        candidates = {i: completed(u.candidates[i], built[i]) for i in kernels}
        found = tune(
            u.region,
            candidates,
            kernels,
            forms[u],
            constants,
            values,
            seconds,
            self.clock,
            self.isolation,
        )
        left_out = u.left_out + len(u.candidates) - len(candidates)
        return replace(found, refused=(*found.refused, *u.refused), left_out=left_out)

    # -- parts of groups

    def _cut(self, found: list[Choice], known: dict[str, Verdict], depth: int) -> list[Choice]:
        """The choices with a cut in place of the whole where that was measured faster."""
        worth = self._worth_cutting(found, known)
        verdicts: dict[str, Verdict] = {}
        for turn in range(MOST_TRIED):
            tried = [
                (c, cuts[turn])
                for c, cuts in worth
                if turn < len(cuts) and not (turn and (self._late or _cut_won(c, verdicts)))
            ]
            groups = [g for c, cut in tried for g in halves(c, cut)]
            parts = self.choose(groups, self._most_for([c for c, _ in tried]), depth - 1)
            for i, (c, cut) in enumerate(tried):
                self.progress("trying cuts", i, len(tried))
                runs = [p.run(self.values) for p in (*parts[2 * i], *parts[2 * i + 1])]
                v = self._side_by_side(c, cut, runs, verdicts.get(c.unit.key))
                verdicts[c.unit.key] = v
                store_verdict(c.unit.key, v)
        return [replace(c, verdict=verdicts.get(c.unit.key, c.verdict)) for c in found]

    def _side_by_side(
        self, c: Choice, cut: Cut, runs: list[Callable[[], object]], before: Verdict | None
    ) -> Verdict:
        """The verdict after the whole and the parts were timed in turn; `before`: that of another
        cut, which stays if its parts took less."""
        assert c.verdict is not None
        clock = clock_for(self.device)
        both = clock.ready(c.run(self.values)), clock.ready(lambda: _all(runs))
        found = compare(*both, UNDECIDED * MEASURE_S)
        whole, split = found.best_us
        if before is not None and before.split_us is not None and before.split_us <= split:
            return before
        kind = c.verdict.kind
        times = {"split_us": split, f"{kind}_us": whole}  # measured again, side by side
        v = replace(c.verdict, cut=cut.first, split_ratio=found.ratio, whole=kind, **times)
        return replace(v, kind="split") if found.slower else v

    def _most_for(self, cut: Sequence[Choice]) -> int:
        """Kernels worth compiling for the parts beyond one of each kind: none where one was found
        for the whole, but of joined groups and of a GPU's products (whose favourite may spill)."""
        product = self.device.type == "cuda" and any(has_product(c.unit.region) for c in cut)
        return self.most if product or any(c.unit.group.joined for c in cut) else 0

    @property
    def _late(self) -> bool:
        return time.perf_counter() - self.start > self.settings.budget_s * CUT_SHARE

    def _worth_cutting(
        self, found: list[Choice], known: dict[str, Verdict]
    ) -> list[tuple[Choice, list[Cut]]]:
        """The first of each new kind of region that a cut might make noticeably faster, with the
        cuts to try. Groups that the search has joined are taken apart in any case: only a
        measurement can say that they are better together."""
        total = sum(c.best_us for c in found)
        counts: dict[str, int] = {}
        for c in found:
            counts[c.unit.key] = counts.get(c.unit.key, 0) + 1
        out = []
        for k, c in {c.unit.key: c for c in reversed(found)}.items():
            if k in known or c.verdict is None or c.verdict.kind == "split":  # no kernel runs it
                continue
            nodes = c.unit.region.nodes
            behind = relayout_cut(nodes) or results_cut(nodes)  # what they are there for
            if behind is not None:
                out.append((c, [behind]))
                continue
            if (cut := undone(c.unit.group, c.unit.region)) is not None and c.best_us:
                out.append((c, [cut]))
                continue
            cut = None if self._late else self._engine_cut(c.unit)
            cuts = [cut] if cut is not None else []
            gain = 0.0 if self._late else self._gain(c) * counts[k]
            if gain > 0 and gain >= LEAST_OF_PROGRAM * total:
                cuts += self._promising(c)
            if cuts:
                out.append((c, list(dict.fromkeys(cuts))[:MOST_TRIED]))
        return out

    def _promising(self, c: Choice) -> list[Cut]:
        cut = cheapest_cut(c.unit.region, c.onednn, launches)
        if cut is None:
            return []
        ranked = ranked_cuts(c.unit.region.nodes, price_of(self.pricer))
        return promising_cuts(c.unit.region, cut, ranked, launches)

    def _engine_cut(self, u: Unit) -> Cut | None:
        return engine_cut(u.region, self.partitioner, self.generator, self.context, launches)

    def _gain(self, c: Choice) -> float:
        """See may_gain."""
        assert c.verdict is not None
        region, best = c.unit.region, c.best_us
        floor, parts = self.generator.floor_us(region), 0.0
        price = price_of(self.pricer)
        if len(region.nodes) > 1 and best > FAR_FROM_PREDICTED * price(region.nodes):
            parts = min((r.us for r in ranked_cuts(region.nodes, price)), default=0.0)
        return may_gain(c.verdict, len(region.nodes), self._short_part(c), floor, parts)

    def _short_part(self, c: Choice) -> bool:
        """The region has a convolution that could take Winograd's form, but its kernel has not."""
        if c.verdict is None or c.verdict.kind != "kernel":
            return False
        if c.unit.candidates[c.verdict.index].fewer_products:
            return False
        return self.generator.has_short_form(c.unit.region, self.partitioner.constants)

    def _parts(self, found: list[Choice], depth: int) -> list[list[Choice]]:
        """The choices with the parts of those that are cut in their place."""
        whole = [c for c in found if c.verdict is not None and c.verdict.kind == "split"]
        if not whole:
            return [[c] for c in found]
        groups = [g for c in whole for g in halves(c, c.verdict)]  # type: ignore[arg-type]
        parts = self.choose(groups, self._most_for(whole), depth)
        of = {
            c: [replace(p, cut_from=(c, *p.cut_from)) for p in (*parts[2 * i], *parts[2 * i + 1])]
            for i, c in enumerate(whole)
        }
        return [of.get(c, [c]) for c in found]


def _left_out(u: Unit) -> Verdict:
    """The library runs what there was no time to measure."""
    return Verdict("library", left_out=u.left_out + len(u.candidates))


@functools.cache
def _ceilings(device: str, threads: int) -> Ceilings:
    """Read, or measured, once a process: every compilation prices regions."""
    return machine.measure(device)


def _cut_won(c: Choice, verdicts: dict[str, Verdict]) -> bool:
    return c.unit.key in verdicts and verdicts[c.unit.key].kind == "split"


def _all(runs: Sequence[Callable[[], object]]) -> None:
    for r in runs:
        r()
