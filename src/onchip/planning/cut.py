"""Where a group of operators is cut in two when its fused kernel loses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onchip.analysis.kind import Kind, node_kind
from onchip.capture.schema import is_view
from onchip.fusion.partition import Group
from onchip.fusion.region import Region
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node
from onchip.planning.library import Step
from onchip.planning.plan import CallStep
from onchip.planning.pool import MODEL_ERROR, RankedCut
from onchip.planning.tuner import Verdict

# A group may be cut in two, and its parts once more.
DEPTH = 2
# A cut is tried if it could save this share of the group's time, and of the whole program's.
LEAST_SHARE, LEAST_OF_PROGRAM = 0.1, 0.02
# A kernel that takes so many times its floor may do worse than two that each do one thing well; so
# may one that takes so many times what the model predicts for it, if parts are predicted faster.
FAR_FROM_FLOOR = 2.5
FAR_FROM_PREDICTED = 1.5
# Cuts of one kind of region that are built and measured: the second only where the first lost.
MOST_TRIED = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """first: places (in the region's order) of the operators of the first part; nbytes: what the
    second part reads of it, written and read again, that would not be written otherwise."""

    first: tuple[int, ...]
    nbytes: int


def cheapest_cut(
    region: Region, onednn: Sequence[Step], launches: Callable[[Node], bool]
) -> Cut | None:
    """The legal cut with the fewest bytes over it; of equal ones, one that leaves pointwise
    operators with what they read, then that right behind what oneDNN computes in one call, then
    the most even one. None if one part would launch nothing.

    Legal: nothing in the first part reads from the second. Then no order of the kernels is
    impossible that was possible before, as no path leaves a region and comes back to it.
    """
    places = {n: i for i, n in enumerate(region.nodes)}
    ends = [frozenset(s.nodes) for s in onednn if isinstance(s, CallStep)]
    found: dict[frozenset[Node], tuple[int, bool, bool, int]] = {}
    for first in closed(region):
        second = [n for n in region.nodes if n not in first]
        if not any(map(launches, first)) or not any(map(launches, second)):
            continue
        behind = any(e <= first and first <= _before(e, region) for e in ends)
        even = abs(len(second) - len(first))
        found[first] = (crossing_bytes(region, first), _severs(first, second), not behind, even)
    if not found:
        return None
    best = min(found, key=lambda f: (found[f], sorted(places[n] for n in f)))
    return Cut(tuple(sorted(places[n] for n in best)), found[best][0])


def undone(group: Group, region: Region) -> Cut | None:
    """The cut that takes the first of the groups apart which the search has joined; None if it
    joined none. (Whole groups are sets that read nothing from the later ones.)"""
    if not group.joined:
        return None
    first = frozenset(group.joined[0])
    places = tuple(i for i, n in enumerate(region.nodes) if n in first)
    return Cut(places, crossing_bytes(region, first))


def cut_in_two(group: Group, region: Region, first: Sequence[int]) -> tuple[Group, Group]:
    """The group's operators at the places `first` of its region, and the others, which keep what
    the search has joined of them."""
    one = [region.nodes[i] for i in first]
    two = Group([n for n in region.nodes if n not in set(one)], False)
    left = [g for g in group.joined if not set(g) <= set(one)]
    if len(left) > 1 and set(two.nodes) == {n for g in left for n in g}:
        two.joined = tuple(left)
    return Group(one, False), two


def promising_cuts(
    region: Region, cheapest: Cut, ranked: Sequence[RankedCut], launches: Callable[[Node], bool]
) -> list[Cut]:
    """The cuts to measure, first to last: that with the fewest bytes, unless the model is sure of a
    better one, then the others that it can't tell from its best."""
    places = {n: i for i, n in enumerate(region.nodes)}
    found: dict[tuple[int, ...], float] = {}
    for r in ranked:
        second = [n for n in region.nodes if n not in set(r.first)]
        if any(map(launches, r.first)) and any(map(launches, second)):
            found[tuple(sorted(places[n] for n in r.first))] = r.us
    if not found:
        return [cheapest]
    best = min(found.values())
    near = [f for f, us in found.items() if us <= best * (1 + MODEL_ERROR)]
    if found.get(cheapest.first, best) * (1 - MODEL_ERROR) <= best:
        near = [cheapest.first, *(f for f in near if f != cheapest.first)]
    cuts = (Cut(f, crossing_bytes(region, frozenset(region.nodes[i] for i in f))) for f in near)
    return list(cuts)[:MOST_TRIED]


def closed(region: Region) -> set[frozenset[Node]]:
    """Sets of operators that read nothing from the rest, as the first part of a legal cut: each
    operator with all before it in the region's order, with only those that it needs, and all that
    do not need it."""
    needs = _needs(region)
    out: set[frozenset[Node]] = set()
    for i, n in enumerate(region.nodes):
        out.add(frozenset(region.nodes[: i + 1]))
        out.add(frozenset({n, *needs[n]}))
        out.add(frozenset(m for m in region.nodes if m is not n and n not in needs[m]))
    return out - {frozenset(), frozenset(region.nodes)}


def _needs(region: Region) -> dict[Node, set[Node]]:
    """The operators of the region that each one reads from, directly or through others."""
    producer = {t: n for n in region.nodes for t in n.results}
    out: dict[Node, set[Node]] = {}
    for n in region.nodes:
        direct = {producer[t] for t in n.inputs if t in producer}
        out[n] = direct.union(*(out[p] for p in direct))
    return out


def _before(end: frozenset[Node], region: Region) -> frozenset[Node]:
    """The operators and everything that they need."""
    needs = _needs(region)
    return end.union(*(needs[n] for n in end))


def _severs(first: frozenset[Node], second: Sequence[Node]) -> bool:
    """A pointwise operator of the second part reads from the first: it would cost nothing there."""
    made = {t for n in first for t in n.results}
    return any(node_kind(n) is Kind.POINTWISE and made.intersection(n.inputs) for n in second)


def crossing_bytes(region: Region, first: frozenset[Node]) -> int:
    """See Cut.nbytes."""
    made = {t for n in first for t in n.results}
    read = {t for n in region.nodes if n not in first for t in n.inputs}
    crossing: set[Tensor] = made & read
    return sum(t.nbytes * (1 if t in region.outputs else 2) for t in crossing)


def may_gain(
    verdict: Verdict,
    operators: int,
    short_part: bool = False,
    floor_us: float = 0.0,
    parts_us: float = 0.0,
) -> float:
    """Microseconds that a cut of this group could save at most, as far as is known: what the best
    form takes beyond oneDNN's calls if there are any, else anything if the generated kernel lost;
    half the time if a part, but not the whole, could have Winograd's form (short_part); what it
    takes beyond its floor if that is far away, or beyond what is predicted for parts of it (0: not
    known). 0 if that is too little to try."""
    best = verdict.best_us
    if operators < 2 or best is None:
        return 0.0
    if verdict.calls_us is not None:
        gain = best - verdict.calls_us
    else:
        gain = 0.0 if verdict.kind == "kernel" else best
    if short_part:
        gain = max(gain, best / 2)
    if 0 < FAR_FROM_FLOOR * floor_us < best:
        gain = max(gain, best - floor_us)
    if 0 < FAR_FROM_PREDICTED * parts_us < best:
        gain = max(gain, best - parts_us)
    return gain if gain >= LEAST_SHARE * best else 0.0


def launches(node: Node) -> bool:
    """Whether the library starts a kernel for it."""
    return not is_view(node.call.target)
