"""How each group of operators runs: candidates are built, checked, timed and chosen, and a group
whose fused kernel loses is cut in two if that is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from onchip.backends.cpp.compiler import Binary, build_all
from onchip.capture.captured import Captured
from onchip.capture.schema import is_view
from onchip.fusion.machine import Machine
from onchip.fusion.partition import Group, Partitioner
from onchip.ir.graph import Node
from onchip.planning.candidates import has_short_form
from onchip.planning.cut import (
    DEPTH,
    LEAST_GAIN,
    LEAST_OF_PROGRAM,
    Cut,
    cheapest_cut,
    may_gain,
)
from onchip.planning.library import Step as LibraryForm
from onchip.planning.library import aten_steps, onednn_steps, run_of
from onchip.planning.plan import KernelStep, Step
from onchip.planning.timing import fastest
from onchip.planning.tuner import (
    Verdict,
    kernel_of,
    kernel_run,
    load_verdict,
    store_verdict,
    tune,
)
from onchip.planning.units import Unit, find_units, most_sources
from onchip.planning.values import Values, run_eagerly
from onchip.settings import Settings

# Seconds of timing that one kind of region is worth: its candidates and the library's calls.
MEASURE_S = 0.1
# The part of the budget after which no further cut is tried.
CUT_SHARE = 0.5

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """How one unit runs. onednn: its form with oneDNN's calls (empty: there is none); cut_from:
    the choices for the larger regions that it is a part of, outermost first."""

    unit: Unit
    verdict: Verdict | None
    binary: Binary | None
    onednn: tuple[LibraryForm, ...]
    cut_from: tuple[Choice, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        nodes = self.unit.region.nodes
        match self.verdict:
            case Verdict(kind="kernel", index=i) if self.binary is not None:
                c = self.unit.candidates[i]
                kernel, name = kernel_of(c, self.binary), self.unit.region.name
                return (KernelStep(name, kernel, c.inputs, c.source.outputs, c.derived, nodes),)
            case Verdict(kind="onednn") if self.onednn:
                return self.onednn
        return aten_steps(nodes)

    def run(self, values: Values) -> Callable[[], object]:
        """A closure that runs it once on the program's tensors."""
        if self.verdict is not None and self.verdict.kind == "kernel" and self.binary is not None:
            return kernel_run(self.unit.candidates[self.verdict.index], self.binary, values)
        return run_of([s for s in self.steps if not isinstance(s, KernelStep)], values)

    @property
    def best_us(self) -> float:
        """What the verdict measured for it; 0 if it was not timed."""
        return (self.verdict.best_us if self.verdict is not None else None) or 0.0


@dataclass(eq=False)
class Decider:
    """Decides for the groups of one program. built, reused: kernels compiled, or found compiled."""

    captured: Captured
    inputs: Sequence[torch.Tensor]
    settings: Settings
    partitioner: Partitioner
    machine: Machine
    progress: Progress
    built: int = 0
    reused: int = 0
    start: float = field(default_factory=time.perf_counter)
    _values: Values | None = None

    def __post_init__(self) -> None:
        graph = self.partitioner.graph
        results = (t for n in graph.nodes for t in n.results)
        self.available = frozenset({*graph.inputs, *graph.constants, *results})
        self.weights = frozenset(graph.constants)

    @property
    def values(self) -> Values:
        """Every tensor's value, from one eager run when it is first asked for."""
        if self._values is None:
            layouts = self.partitioner.strides
            self._values = run_eagerly(self.captured, self.inputs, layouts)
        return self._values

    @property
    def _fewer_products(self) -> bool:
        return self.settings.winograd and self.settings.numerics == "fast"

    def choices(self, groups: Sequence[Group]) -> list[Choice]:
        """How the groups run, in order; a group that is cut is two choices or more."""
        return [c for g in self.choose(groups, most_sources(self.settings), DEPTH) for c in g]

    def choose(self, groups: Sequence[Group], most: int, depth: int) -> list[list[Choice]]:
        """The choices for each group. most: kernels worth compiling beyond one for each kind;
        depth: how often a part may be cut again."""
        units, known = find_units(
            groups, self.partitioner, self.available, self.machine, most, self._fewer_products
        )
        forms = {u: () if u.group.opaque else onednn_steps(u.region, self.weights) for u in units}
        for u in units:
            if forms[u] and u.key not in known and (v := load_verdict(u.key)) is not None:
                known[u.key] = v
        verdicts = self._decide(units, forms, known)
        nothing = (None, None)
        found = [Choice(u, *verdicts.get(u.key, nothing), forms[u]) for u in units]
        if depth:
            found = self._cut(found, known, depth)
        return self._parts(found, max(depth - 1, 0))

    # -- whole groups

    def _decide(
        self,
        units: Sequence[Unit],
        forms: dict[Unit, tuple[LibraryForm, ...]],
        known: dict[str, Verdict],
    ) -> dict[str, tuple[Verdict, Binary | None]]:
        """A verdict for every kind of region, from the cache or by building and timing."""
        kinds = {u.key: u for u in reversed(units) if u.candidates or forms[u]}
        unknown = [k for k in kinds if k not in known]
        places = [(k, i) for k, u in kinds.items() for i in u.candidates]
        self.progress("building kernels", 0, len(places))
        sources = [kinds[k].candidates[i].source.text for k, i in places]
        binaries = dict(zip(places, build_all(sources), strict=True))
        new = {}
        for n, k in enumerate(unknown):
            self.progress("measuring", n, len(unknown))
            u = kinds[k]
            mine = {i: binaries[k, i] for i in u.candidates}
            share = min(self.settings.budget_s / len(unknown) / 2, MEASURE_S)
            constants = self.partitioner.constants
            new[k] = tune(u.region, u.candidates, mine, forms[u], constants, self.values, share)
            store_verdict(k, new[k])
        out: dict[str, tuple[Verdict, Binary | None]] = {}
        for k, v in {**known, **new}.items():
            b = binaries.get((k, v.index)) if v.kind == "kernel" else None
            if v.kind == "kernel" and not isinstance(b, Binary):
                v, b = Verdict("library", refused=((str(b), "could not be built"),)), None
            out[k] = (v, b if isinstance(b, Binary) else None)
        built = [b for b in binaries.values() if isinstance(b, Binary)]
        self.built += sum(not b.reused for b in built)
        self.reused += sum(b.reused for b in built)
        return out

    # -- parts of groups

    def _cut(self, found: list[Choice], known: dict[str, Verdict], depth: int) -> list[Choice]:
        """The choices with a cut in place of the whole where that was measured faster."""
        tried = [(c, cut) for c, cut in self._worth_cutting(found, known)]
        if not tried:
            return found
        parts = self.choose([g for c, cut in tried for g in halves(c, cut)], 0, depth - 1)
        verdicts: dict[str, Verdict] = {}
        for i, (c, cut) in enumerate(tried):
            self.progress("trying cuts", i, len(tried))
            assert c.verdict is not None
            runs = [p.run(self.values) for p in (*parts[2 * i], *parts[2 * i + 1])]
            whole, split = fastest([c.run(self.values), lambda r=runs: _all(r)], MEASURE_S)
            v = replace(c.verdict, split_us=split * 1e6, cut=cut.first)
            # measured again, side by side with the parts
            v = replace(v, **{f"{v.kind}_us": whole * 1e6})
            if split < whole * (1 - LEAST_GAIN):
                v = replace(v, kind="split")
            verdicts[c.unit.key] = v
            store_verdict(c.unit.key, v)
        return [replace(c, verdict=verdicts.get(c.unit.key, c.verdict)) for c in found]

    def _worth_cutting(
        self, found: list[Choice], known: dict[str, Verdict]
    ) -> list[tuple[Choice, Cut]]:
        """The first of each new kind of region that a cut might make noticeably faster."""
        total = sum(c.best_us for c in found)
        counts: dict[str, int] = {}
        for c in found:
            counts[c.unit.key] = counts.get(c.unit.key, 0) + 1
        out = []
        for k, c in {c.unit.key: c for c in reversed(found)}.items():
            late = time.perf_counter() - self.start > self.settings.budget_s * CUT_SHARE
            if k in known or c.verdict is None or late:
                continue
            operators = len(c.unit.region.nodes)
            gain = may_gain(c.verdict, operators, self._short_part(c)) * counts[k]
            if gain <= 0 or gain < LEAST_OF_PROGRAM * total:
                continue
            cut = cheapest_cut(c.unit.region, c.onednn, launches)
            if cut is not None:
                out.append((c, cut))
        return out

    def _short_part(self, c: Choice) -> bool:
        """The region has a convolution that could take Winograd's form, but its kernel has not."""
        if c.verdict is None or c.verdict.kind != "kernel" or not self._fewer_products:
            return False
        chosen = c.unit.candidates[c.verdict.index]
        return not chosen.fewer_products and has_short_form(
            c.unit.region, self.partitioner.constants
        )

    def _parts(self, found: list[Choice], depth: int) -> list[list[Choice]]:
        """The choices with the parts of those that are cut in their place."""
        whole = [c for c in found if c.verdict is not None and c.verdict.kind == "split"]
        if not whole:
            return [[c] for c in found]
        groups = [g for c in whole for g in halves(c, c.verdict)]  # type: ignore[arg-type]
        parts = self.choose(groups, 0, depth)
        of = {
            c: [replace(p, cut_from=(c, *p.cut_from)) for p in (*parts[2 * i], *parts[2 * i + 1])]
            for i, c in enumerate(whole)
        }
        return [of.get(c, [c]) for c in found]


def halves(choice: Choice, cut: Cut | Verdict) -> tuple[Group, Group]:
    """The two parts of a region as groups of their own."""
    places = cut.first if isinstance(cut, Cut) else cut.cut
    nodes = choice.unit.region.nodes
    first = [nodes[i] for i in places]
    return Group(first, False), Group([n for n in nodes if n not in first], False)


def launches(node: Node) -> bool:
    return not is_view(node.call.target)


def _all(runs: Sequence[Callable[[], object]]) -> None:
    for r in runs:
        r()
