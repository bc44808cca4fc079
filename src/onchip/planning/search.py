"""The cheapest cover of operators by regions that could be kernels, and its lower bound.

Each place (an operator, or a whole group) is covered by exactly one chosen option, and no circle of
options waits for itself. Options that share no place don't meet: each connected part is solved on
its own, by dynamic programming where its options are intervals of one order, else as a binary
program (HiGHS, through scipy). A circle that shows in a solution is forbidden and the part solved
again. The bound is the linear relaxation of the same program, without the rule about circles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

# Seconds that one binary program may take; what it has found by then is used, or single places.
SOLVE_S = 2.0
# How often a solution with a circle is solved again before options of one place are taken.
MOST_CIRCLES = 20


@dataclass(frozen=True, slots=True)
class Option:
    """A region: its places, ascending, and its price in microseconds."""

    places: tuple[int, ...]
    us: float


@dataclass(frozen=True, slots=True)
class Cover:
    """options: numbers of the chosen ones, ascending; us: their price; proven: no cover of the
    options is cheaper (a time limit may end the search before that is known)."""

    options: tuple[int, ...]
    us: float
    proven: bool = True


def solve(count: int, options: Sequence[Option], edges: Sequence[tuple[int, int]]) -> Cover:
    """The cheapest cover of places 0 … count−1, numbered in an order of execution. edges:
    (producer, consumer). Every place needs an option of its own, so that there is a cover."""
    alone = _alone(count, options)
    forbidden: list[frozenset[int]] = []
    for _ in range(MOST_CIRCLES):
        cover = _without_circles(count, options, forbidden)
        circle = find_circle([options[i].places for i in cover.options], count, edges)
        if not circle:
            return cover
        forbidden.append(frozenset(cover.options[c] for c in circle))
    us = sum(options[i].us for i in alone)
    return Cover(tuple(sorted(alone)), us, False)


def lower_bound(count: int, options: Sequence[Option]) -> float:
    """No cover of the options is cheaper, and none that mixes covers."""
    total = 0.0
    for places, mine in _parts(count, options, ()):
        own = _renumbered(places, [options[i] for i in mine])
        if _intervals(own):
            total += _chain(len(places), own)[1]
            continue
        found = linprog(
            [o.us for o in own], A_eq=_incidence(len(places), own), b_eq=np.ones(len(places))
        )
        # the solver's tolerance must not lift the bound
        total += max(0.0, float(found.fun) * (1 - 1e-9)) if found.success else 0.0
    return total


def _alone(count: int, options: Sequence[Option]) -> list[int]:
    """The cheapest option of each place alone."""
    best: dict[int, int] = {}
    for i, o in enumerate(options):
        if len(o.places) == 1 and (o.places[0] not in best or o.us < options[best[o.places[0]]].us):
            best[o.places[0]] = i
    missing = set(range(count)) - set(best)
    assert not missing, f"places {sorted(missing)} have no option of their own"
    return [best[p] for p in range(count)]


def _without_circles(
    count: int, options: Sequence[Option], forbidden: Sequence[frozenset[int]]
) -> Cover:
    """The cheapest cover in which no set of `forbidden` is chosen whole."""
    chosen: list[int] = []
    proven = True
    for places, mine in _parts(count, options, forbidden):
        own = _renumbered(places, [options[i] for i in mine])
        rules = [f for f in forbidden if f <= set(mine)]
        if not rules and _intervals(own):
            picked, _ = _chain(len(places), own)
        else:
            number = {i: k for k, i in enumerate(mine)}
            limits = [[number[i] for i in f] for f in rules]
            picked, done = _program(len(places), own, limits)
            proven = proven and done
        chosen += [mine[k] for k in picked]
    return Cover(tuple(sorted(chosen)), sum(options[i].us for i in chosen), proven)


def _parts(
    count: int, options: Sequence[Option], together: Sequence[frozenset[int]]
) -> list[tuple[list[int], list[int]]]:
    """(places, options) of each part that can be solved on its own. together: options that one rule
    names."""
    root = list(range(count))

    def find(p: int) -> int:
        while root[p] != p:
            root[p] = root[root[p]]
            p = root[p]
        return p

    for o in options:
        for p in o.places[1:]:
            root[find(p)] = find(o.places[0])
    for rule in together:
        first, *rest = (options[i].places[0] for i in rule)
        for p in rest:
            root[find(p)] = find(first)
    places: dict[int, list[int]] = {}
    mine: dict[int, list[int]] = {}
    for p in range(count):
        places.setdefault(find(p), []).append(p)
    for i, o in enumerate(options):
        mine.setdefault(find(o.places[0]), []).append(i)
    return [(places[r], mine.get(r, [])) for r in places]


def _renumbered(places: Sequence[int], options: Sequence[Option]) -> list[Option]:
    number = {p: k for k, p in enumerate(places)}
    return [Option(tuple(number[p] for p in o.places), o.us) for o in options]


def _intervals(options: Sequence[Option]) -> bool:
    return all(o.places[-1] - o.places[0] == len(o.places) - 1 for o in options)


def _chain(count: int, options: Sequence[Option]) -> tuple[list[int], float]:
    """The cheapest cover by intervals, and its price."""
    best, last = _table(count, options)
    chosen, end = [], count
    while end:
        chosen.append(last[end])
        end = options[last[end]].places[0]
    return chosen[::-1], best[count]


def _table(count: int, options: Sequence[Option]) -> tuple[list[float], list[int]]:
    """Of the first n places, for each n: the price of the cheapest cover by intervals, and its last
    option."""
    ending: dict[int, list[int]] = {}
    for i, o in enumerate(options):
        ending.setdefault(o.places[-1] + 1, []).append(i)
    best, last = [0.0], [-1]
    for end in range(1, count + 1):
        us, i = min((best[options[i].places[0]] + options[i].us, i) for i in ending[end])
        best.append(us)
        last.append(i)
    return best, last


def prices_of_cuts(count: int, options: Sequence[Option]) -> list[float]:
    """The price of the cheapest cover by intervals that has a cut before place 1, 2, … count−1."""
    before, _ = _table(count, options)
    turned = [Option(tuple(count - 1 - p for p in reversed(o.places)), o.us) for o in options]
    behind, _ = _table(count, turned)
    return [before[n] + behind[count - n] for n in range(1, count)]


def _program(
    count: int, options: Sequence[Option], limits: Sequence[Sequence[int]]
) -> tuple[list[int], bool]:
    """The cheapest exact cover as a binary program; none of `limits` may be chosen whole. False: it
    was not proven in time; then perhaps every place alone."""
    rules = [LinearConstraint(_incidence(count, options), 1.0, 1.0)]
    for limit in limits:
        row = np.zeros(len(options))
        row[list(limit)] = 1.0
        rules.append(LinearConstraint(row, -np.inf, len(limit) - 1))
    found = milp(
        [o.us for o in options],
        constraints=rules,
        integrality=np.ones(len(options)),
        bounds=Bounds(0, 1),
        options={"time_limit": SOLVE_S},
    )
    if found.x is None:
        return _alone(count, options), False
    return [i for i, x in enumerate(found.x) if x > 0.5], found.status == 0


def _incidence(count: int, options: Sequence[Option]) -> csr_array:
    rows = [p for o in options for p in o.places]
    columns = [i for i, o in enumerate(options) for _ in o.places]
    return csr_array((np.ones(len(rows)), (rows, columns)), shape=(count, len(options)))


def find_circle(
    parts: Sequence[Sequence[int]], count: int, edges: Sequence[tuple[int, int]]
) -> list[int]:
    """Numbers of parts that wait for each other in a circle; empty if there is none."""
    part = [-1] * count
    for n, places in enumerate(parts):
        for p in places:
            part[p] = n
    following: dict[int, set[int]] = {}
    for a, b in edges:
        if part[a] != part[b]:
            following.setdefault(part[a], set()).add(part[b])
    return _circle(len(parts), following)


def _circle(count: int, following: Mapping[int, set[int]]) -> list[int]:
    """A circle of a directed graph, by depth-first search without recursion."""
    state = [0] * count  # 0 not seen, 1 on the way, 2 done
    for start in range(count):
        if state[start]:
            continue
        way = [start]
        state[start] = 1
        stack = [iter(sorted(following.get(start, ())))]
        while stack:
            n = next(stack[-1], None)
            if n is None:
                state[way.pop()] = 2
                stack.pop()
            elif state[n] == 1:
                return way[way.index(n) :]
            elif state[n] == 0:
                state[n] = 1
                way.append(n)
                stack.append(iter(sorted(following.get(n, ()))))
    return []
