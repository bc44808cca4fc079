"""Which regions the search prices: parts of the greedy groups, and groups joined.

A greedy group is cut along two orders of its operators, as executed and depth first (which keeps
the operators of a branch together), at MOST_CUTS places at most; each stretch between two places is
a region. Equal groups are priced once. Groups are joined where the greedy order was the only reason
against it, and where siblings read the same tensor in the same loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from onchip.analysis.cost import Pricer
from onchip.fusion.partition import Group, Partition, Partitioner
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.signature import signature
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node
from onchip.planning.search import Option, lower_bound, prices_of_cuts, solve

# Places at which a group may be cut: some 300 regions a kind of group, however long it is.
MOST_CUTS = 24
# Readers of one tensor that are joined at once, at most.
MOST_SIBLINGS = 4
# By how much the model is wrong in the median (docs/benchmarks.md): predictions that differ by
# less don't decide anything.
MODEL_ERROR = 0.25
# Joining must be predicted to save this part of what the groups take apart: less is not measurable.
LEAST_SAVED = 0.1

Price = Callable[[Sequence[Node]], float]


@dataclass(frozen=True, eq=False, slots=True)
class Blocks:
    """A group in pieces between the places where it may be cut. orders: of pieces' numbers, two or
    one; options: stretches of them, by pieces' numbers; edges between pieces."""

    pieces: tuple[tuple[Node, ...], ...]
    orders: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]

    def nodes(self, pieces: Sequence[int]) -> list[Node]:
        return [n for p in pieces for n in self.pieces[p]]

    def stretches(self) -> list[tuple[int, ...]]:
        """Pieces of each region, ascending."""
        found = {
            tuple(sorted(order[i:j]))
            for order in self.orders
            for i, j in combinations(range(len(order) + 1), 2)
        }
        return sorted(found)


def blocks_of(nodes: Sequence[Node]) -> Blocks:
    """The pieces of a group whose operators come in an order of execution."""
    pieces = tuple(tuple(p) for p in _pieces(nodes))
    place = {n: i for i, p in enumerate(pieces) for n in p}
    producer = {t: n for n in nodes for t in n.results}
    edges = {
        (place[producer[t]], place[n])
        for n in nodes
        for t in n.inputs
        if t in producer and place[producer[t]] != place[n]
    }
    first = tuple(range(len(pieces)))
    second = _depth_first(len(pieces), sorted(edges))
    orders = (first,) if second == first else (first, second)
    return Blocks(pieces, orders, tuple(sorted(edges)))


def _pieces(nodes: Sequence[Node]) -> list[list[Node]]:
    """Single operators; of a long group, stretches of about equal length that end where the fewest
    bytes cross."""
    if len(nodes) <= MOST_CUTS:
        return [[n] for n in nodes]
    crossing = _crossing(nodes)
    out, start = [], 0
    for k in range(1, MOST_CUTS):
        low, high = k * len(nodes) // MOST_CUTS, (k + 1) * len(nodes) // MOST_CUTS
        end = min(range(max(low, start + 1), high + 1), key=lambda i: (crossing[i], i), default=0)
        if end:
            out.append(list(nodes[start:end]))
            start = end
    return [*out, list(nodes[start:])] if start < len(nodes) else out


def _crossing(nodes: Sequence[Node]) -> list[int]:
    """Bytes that what comes after the first n operators reads of them, for each n."""
    made = {t: i for i, n in enumerate(nodes) for t in n.results}
    last: dict[Tensor, int] = {}
    for i, n in enumerate(nodes):
        for t in n.inputs:
            if t in made:
                last[t] = i
    steps = [0] * (len(nodes) + 2)
    for t, end in last.items():
        steps[made[t] + 1] += t.nbytes
        steps[end + 1] -= t.nbytes
    total, out = 0, []
    for s in steps:
        total += s
        out.append(total)
    return out


def _depth_first(count: int, edges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """An order of execution in which a branch is finished before the next is begun."""
    needs: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        needs[b].append(a)
    read = {a for a, _ in edges}
    out: list[int] = []
    seen: set[int] = set()
    stack = [(p, False) for p in reversed(range(count)) if p not in read]
    while stack:
        p, done = stack.pop()
        if done:
            out.append(p)
        elif p not in seen:
            seen.add(p)
            stack += [(p, True), *((q, False) for q in reversed(needs[p]) if q not in seen)]
    return tuple(out)


# ---- prices of whole groups --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Priced:
    """A kind of group. us: its cheapest cover; whole_us: as one region; floor_us: no cover takes
    less; regions: how many were priced."""

    us: float
    whole_us: float
    floor_us: float
    regions: int


def price_of(pricer: Pricer) -> Price:
    """The predicted time of a region by its better form: one kernel, or library calls."""
    return lambda nodes: min(pricer.kernel_us(nodes), pricer.library_us(nodes))


def price_group(group: Group, price: Price, floor: Price) -> Priced:
    """The cheapest cover of one group by its stretches."""
    if group.opaque or len(group.nodes) == 1:
        us = price(group.nodes)
        return Priced(us, us, floor(group.nodes), 1)
    blocks = blocks_of(group.nodes)
    some = blocks.stretches()
    nodes = [blocks.nodes(s) for s in some]
    options = [Option(s, price(n)) for s, n in zip(some, nodes, strict=True)]
    floors = [Option(s, floor(n)) for s, n in zip(some, nodes, strict=True)]
    count = len(blocks.pieces)
    cover = solve(count, options, blocks.edges)
    whole = next(o.us for o in options if len(o.places) == count)
    return Priced(cover.us, whole, lower_bound(count, floors), len(options))


@dataclass(frozen=True, slots=True)
class RankedCut:
    """first: the first part's operators; us: predicted for the cheapest cover with this cut."""

    first: tuple[Node, ...]
    us: float


def ranked_cuts(nodes: Sequence[Node], price: Price) -> list[RankedCut]:
    """Cuts of a group in two, the most promising first: for each order and place, the price of the
    cheapest cover along that order that has a cut there."""
    blocks = blocks_of(nodes)
    prices: dict[tuple[int, ...], float] = {}
    found: dict[frozenset[Node], RankedCut] = {}
    for order in blocks.orders:
        options = []
        for i, j in combinations(range(len(order) + 1), 2):
            own = tuple(sorted(order[i:j]))
            if own not in prices:
                prices[own] = price(blocks.nodes(own))
            options.append(Option(tuple(range(i, j)), prices[own]))
        for n, us in enumerate(prices_of_cuts(len(order), options), 1):
            first = tuple(blocks.nodes(sorted(order[:n])))
            known = found.get(frozenset(first))
            if known is None or us < known.us:
                found[frozenset(first)] = RankedCut(first, us)
    return sorted(found.values(), key=lambda c: c.us)


# ---- joined groups -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Pool:
    """What the search chooses from, beside stretches of the groups. greedy: the partition before;
    joins: groups, by their numbers, that one kernel could run and that are predicted to save
    noticeably as one, with its price; apart: what stands against others of which that is predicted,
    by their last operators."""

    greedy: Partition
    joins: tuple[Option, ...]
    apart: dict[tuple[Node, Node], Refusal]
    alone: dict[int, float]


def pool_of(partition: Partition, partitioner: Partitioner, price: Price) -> Pool:
    """The joins that are legal and promising."""
    number = {id(g): i for i, g in enumerate(partition.groups)}
    sets = [*_late(partition, partitioner, number), *_siblings(partitioner, number)]
    alone: dict[int, float] = {}
    joins, apart = [], {}
    for some in dict.fromkeys(sets):
        groups = [partition.groups[i] for i in some]
        for i, g in zip(some, groups, strict=True):
            if i not in alone:
                alone[i] = price(g.nodes)
        us = price([n for g in groups for n in g.nodes])
        if us > (1 - LEAST_SAVED) * sum(alone[i] for i in some):
            continue
        refusal = partitioner.union_refusal(groups)
        if refusal is None:
            joins.append(Option(some, us))
        elif len(some) == 2:
            apart[groups[0].nodes[-1], groups[1].nodes[-1]] = refusal
    return Pool(partition, tuple(joins), apart, alone)


def join(pool: Pool, partitioner: Partitioner) -> Partition:
    """The partition with the joins that are cheapest together: candidates until they are measured
    against their groups."""
    groups = pool.greedy.groups
    if not pool.joins:
        return pool.greedy
    alone = [Option((i,), pool.alone.get(i, 0.0)) for i in range(len(groups))]
    cover = solve(len(groups), [*alone, *pool.joins], _edges(pool.greedy, partitioner))
    chosen = [pool.joins[i - len(groups)] for i in cover.options if i >= len(groups)]
    return partitioner.joined([[groups[n] for n in o.places] for o in chosen])


def _late(
    partition: Partition, partitioner: Partitioner, number: dict[int, int]
) -> list[tuple[int, ...]]:
    """Pairs with an edge that was not refused, or refused for a kernel between the two that may
    have joined them since."""
    out = []
    for n in partitioner.graph.nodes:
        for t in n.inputs:
            p = partitioner.producer.get(t)
            if p is None or partitioner.group_of[p] is partitioner.group_of[n]:
                continue
            a, b = partitioner.group_of[p], partitioner.group_of[n]
            refusal = partition.refusals.get((p, n))
            late = refusal is None or refusal.rule is Rule.CYCLE
            if late and not a.opaque and not b.opaque:
                out.append((number[id(a)], number[id(b)]))
    return [tuple(sorted(pair)) for pair in out]


def _siblings(partitioner: Partitioner, number: dict[int, int]) -> list[tuple[int, ...]]:
    """Sets of groups that read one tensor and have results of one shape: all of them, and each two
    neighbours."""
    out: list[tuple[int, ...]] = []
    for t, users in partitioner.users.items():
        if t in partitioner.constants:
            continue
        by_shape: dict[tuple[int, ...], dict[int, None]] = {}
        for g in (partitioner.group_of[n] for n in users):
            shape = _shape(g)
            if shape is not None:
                by_shape.setdefault(shape, {})[number[id(g)]] = None
        for some in by_shape.values():
            mine = tuple(sorted(some))[:MOST_SIBLINGS]
            if len(mine) > 1:
                out += [mine, *pairwise(mine)]
    return out


def _shape(g: Group) -> tuple[int, ...] | None:
    """The shape of a group's last result; None where a kernel can't run it."""
    return None if g.opaque or not g.nodes[-1].results else g.nodes[-1].results[0].shape


# ---- the whole program -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """predicted_us: the cheapest cover of the pool; lower_bound_us: what no cover of it can fall
    below, each region at its floor; regions: how many were priced, equal ones once."""

    predicted_us: float
    lower_bound_us: float
    regions: int


def bound_of(pool: Pool, partitioner: Partitioner, pricer: Pricer, fewer: float) -> Bound:
    """The cheapest cover of a program and its bound. fewer: see Pricer.floor_us."""
    price = price_of(pricer)

    def floor(nodes: Sequence[Node]) -> float:
        return pricer.floor_us(nodes, fewer)

    groups = pool.greedy.groups
    kinds: dict[str, Priced] = {}
    priced = []
    for g in groups:
        region = partitioner.region(g.nodes)
        key = f"{g.opaque} {signature(region, partitioner.strides, partitioner.constants)}"
        if key not in kinds:
            kinds[key] = price_group(g, price, floor)
        priced.append(kinds[key])
    alone = [Option((i,), p.us) for i, p in enumerate(priced)]
    cover = solve(len(groups), [*alone, *pool.joins], _edges(pool.greedy, partitioner))
    floors = [Option((i,), p.floor_us) for i, p in enumerate(priced)]
    floors += [
        Option(o.places, floor([n for i in o.places for n in groups[i].nodes])) for o in pool.joins
    ]
    regions = sum(p.regions for p in kinds.values()) + len(pool.joins)
    return Bound(cover.us, lower_bound(len(groups), floors), regions)


def _edges(partition: Partition, partitioner: Partitioner) -> list[tuple[int, int]]:
    place = {n: i for i, g in enumerate(partition.groups) for n in g.nodes}
    found = {
        (place[partitioner.producer[t]], place[n])
        for n in partitioner.graph.nodes
        for t in n.inputs
        if t in partitioner.producer
    }
    return sorted((a, b) for a, b in found if a != b)
