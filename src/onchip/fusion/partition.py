"""Which operators become one kernel: greedy merging along data edges, each refusal kept.

Producers are merged into consumers in execution order, most saved bytes first. A merge is legal
if no other kernel would have to run between the two, and possible if the merged region has a
loop nest within budget. Whether the fused kernel is also faster is decided later, by measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from onchip.fusion.contraction import as_contraction
from onchip.fusion.machine import Machine
from onchip.fusion.phases import nest_root
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import Region, region_of
from onchip.fusion.signature import signature
from onchip.fusion.staging import operations, stage, unsupported
from onchip.ir.expr import Load, Reduce, Stream, Tensor, loads, reduces, walk
from onchip.ir.graph import Graph, Node, addressed

Strides = tuple[int, ...]
# The root of a nest of a region, None if it takes several nests; or why it can't be one kernel.
RootOf = Callable[[Region, dict[Tensor, Strides], frozenset[Tensor]], Tensor | Refusal | None]

# Operations per element, of all operators together: what a kernel of more gains by being one (a
# tensor written and read, a launch) is a percent of its time, and the C++ compiler takes seconds.
SIZE_LIMIT = 512.0


@dataclass(eq=False)
class Group:
    nodes: list[Node]
    opaque: bool
    products: int = 0  # matrix products with constant weights
    inner_products: int = 0  # matrix products of two activations
    size: float = 0.0  # operations per element
    root: Tensor | None = None  # a tensor over whose tiles the whole group could run
    joined: tuple[tuple[Node, ...], ...] = ()  # groups that the search made one, in their order


@dataclass(frozen=True, eq=False, slots=True)
class Partition:
    """groups in an order that respects dependencies; refusals by (producer, consumer) node."""

    groups: tuple[Group, ...]
    refusals: dict[tuple[Node, Node], Refusal]
    merges: int


@dataclass(eq=False)
class Partitioner:
    """root_of: the code generator's answer to whether it can write a region as one kernel.
    pads_operands: its products read beyond their operands for free, so that zeros around a tensor
    belong to the product that reads them, not to what writes the tensor."""

    graph: Graph
    strides: dict[Tensor, Strides]
    constants: frozenset[Tensor]
    root_of: RootOf
    fuel: int | None = None
    pads_operands: bool = False
    group_of: dict[Node, Group] = field(default_factory=dict)
    refusals: dict[tuple[Node, Node], Refusal] = field(default_factory=dict)
    memo: dict[str, Refusal | int | None] = field(default_factory=dict)
    merges: int = 0

    def __post_init__(self) -> None:
        self.position = {n: i for i, n in enumerate(self.graph.nodes)}
        self.producer = self.graph.producer()
        self.users = self.graph.users()
        self.addressed = addressed(self.graph)
        for n in self.graph.nodes:
            self.group_of[n] = self._single(n)

    def _single(self, n: Node) -> Group:
        group = Group([n], bool(n.opaque) or not supported(n) or n in self.addressed)
        kinds: set[bool] = set()
        for t in n.tensors:
            group.size += operations(t.body)  # type: ignore[arg-type]
            for r in reduces(t.body):  # type: ignore[arg-type]
                if as_contraction(r, t.axes) is None:
                    continue
                sides = [loads(a) for a in r.body.args]  # type: ignore[attr-defined]
                fixed = any(all(ld.src in self.constants for ld in side) for side in sides)
                kinds.add(fixed)
        # parts of one operator, such as a transposed convolution's, count once
        group.products, group.inner_products = int(True in kinds), int(False in kinds)
        return group

    def region(self, nodes: list[Node]) -> Region:
        return region_of(nodes, self.graph, self.constants, self.position, self.users)

    def run(self) -> Partition:
        for n in self.graph.nodes:
            if self.pads_operands and self._is_operand_padding(n):
                continue  # its reader comes first
            for p in self._producers(n):
                self.try_merge(p, n)
                if self.pads_operands and self._is_operand_padding(p):
                    for before in self._producers(p):
                        self.try_merge(before, p)
            for p in self._producers(n):
                refused = self.refusals.get((p, n))
                if refused is not None and refused.rule is Rule.CYCLE:
                    self.try_merge(p, n)  # what was between (x * sigmoid(x)) may be part of n's now
        return Partition(self._ordered(), self.refusals, self.merges)

    def _producers(self, n: Node) -> list[Node]:
        """Those of most bytes first."""
        producers = [self.producer[t] for t in n.inputs if t in self.producer]
        return sorted(dict.fromkeys(producers), key=lambda p: -_edge_bytes(p, n))

    def _is_operand_padding(self, n: Node) -> bool:
        """It puts zeros around a tensor, for one product to read."""
        if len(n.results) != 1 or len(n.tensors) != 1 or n.results[0] in self.graph.output_tensors:
            return False
        body, users = n.tensors[0].body, self.users.get(n.results[0], ())
        if not isinstance(body, Load) or body.pad != 0 or len(users) != 1:
            return False
        return self.group_of[users[0]].products == 1

    def try_merge(self, p: Node, n: Node) -> None:
        a, b = self.group_of[p], self.group_of[n]
        if a is b:
            return
        root = self._merged(a, b)
        if not isinstance(root, Refusal) and self.fuel is not None and self.merges >= self.fuel:
            root = Refusal(Rule.FUEL, f"{p.name} -> {n.name}", f"fuel is {self.fuel}")
        if isinstance(root, Refusal):
            self.refusals[p, n] = root
            return
        self.merges += 1
        self.refusals.pop((p, n), None)
        a.root = root
        a.nodes += b.nodes
        a.products += b.products
        a.inner_products += b.inner_products
        a.size += b.size
        for x in b.nodes:
            self.group_of[x] = a

    def _merged(self, a: Group, b: Group) -> Tensor | Refusal | None:
        """The root of both groups as one, or why they can't be one kernel."""
        for g in (a, b):
            if g.opaque:
                return self.own_refusal(g.nodes[0])
        if a.products + b.products > 1 or (
            a.products + b.products and a.inner_products + b.inner_products
        ):
            return Refusal(
                Rule.RECOMPUTE,
                b.nodes[0].name,
                "two matrix products with weights: each tile would stream both weights again",
            )
        if a.size + b.size > SIZE_LIMIT:
            text = f"{a.size + b.size:.0f} operations per element of at most {SIZE_LIMIT:.0f}"
            return Refusal(Rule.TOO_LARGE, b.nodes[0].name, text)
        between = self._circle_through((a, b))
        if between is not None:
            return Refusal(Rule.CYCLE, between.name, f"through {between.name}")
        return self._root(a, b)

    def _root(self, a: Group, b: Group) -> Tensor | Refusal | None:
        """The root of a nest of both groups, None if it takes several; or why there is none."""
        if self._in_step(a, b):
            return b.nodes[0].results[0]
        return self._staged_root(self.region(a.nodes + b.nodes))

    def _staged_root(self, region: Region) -> Tensor | Refusal | None:
        """What the code generator says, once for each kind of region."""
        key = signature(region, self.strides, self.constants)
        if key not in self.memo:
            found = self.root_of(region, self.strides, self.constants)
            self.memo[key] = region.tensors.index(found) if isinstance(found, Tensor) else found
        known = self.memo[key]
        return region.tensors[known] if isinstance(known, int) else known

    def _in_step(self, a: Group, b: Group) -> bool:
        """`b` is one operator that reads the elements of `a` that it computes itself, over the
        shape of a's root: a nest of `a` becomes a nest of both with b's result for its root, since
        no box grows. (Staging the region anew for each operator of a long chain would take time
        in the square of its length.)"""
        if a.root is None or len(b.nodes) > 1 or len(b.nodes[0].tensors) != 1:
            return False
        (t,) = b.nodes[0].tensors
        if t.body is None or t.shape != a.root.shape:
            return False
        made = {x for n in a.nodes for x in n.tensors}
        for x in walk(t.body):
            if isinstance(x, (Reduce, Stream)):
                return False
            if isinstance(x, Load) and x.src in made and (x.index != t.axes or x.pad is not None):
                return False
        return True

    # -- groups joined by the search (planning/pool.py)

    def union_refusal(self, groups: Sequence[Group]) -> Refusal | None:
        """Why these groups, in the partition's order, can't be one kernel; None if they can.
        Several matrix products can if none reads from another: a tile has its part of each."""
        for g in groups:
            if g.opaque:
                return self.own_refusal(g.nodes[0])
        size = sum(g.size for g in groups)
        last = groups[-1].nodes[0].name
        if size > SIZE_LIMIT:
            text = f"{size:.0f} operations per element of at most {SIZE_LIMIT:.0f}"
            return Refusal(Rule.TOO_LARGE, last, text)
        between = self._circle_through(groups)
        if between is not None:
            return Refusal(Rule.CYCLE, between.name, f"through {between.name}")
        connected = any(self._reads(b, a) for a, b in combinations(groups, 2))
        products = sum(g.products + g.inner_products for g in groups)
        if products > 1 and (connected or any(g.inner_products for g in groups)):
            return Refusal(
                Rule.RECOMPUTE,
                last,
                "two matrix products: each tile would stream both weights again",
            )
        found = self._staged_root(self.region([n for g in groups for n in g.nodes]))
        return found if isinstance(found, Refusal) else None

    def joined(self, sets: Iterable[Sequence[Group]]) -> Partition:
        """The partition with each of these sets of groups as one."""
        for groups in sets:
            whole = Group(
                [n for g in groups for n in g.nodes],
                False,
                sum(g.products for g in groups),
                sum(g.inner_products for g in groups),
                sum(g.size for g in groups),
                joined=tuple(tuple(g.nodes) for g in groups),
            )
            for n in whole.nodes:
                self.group_of[n] = whole
        return Partition(self._ordered(), self.refusals, self.merges)

    def _reads(self, b: Group, a: Group) -> bool:
        made = {t for n in a.nodes for t in n.results}
        return any(made.intersection(n.inputs) for n in b.nodes)

    def _circle_through(self, groups: Sequence[Group]) -> Node | None:
        """A node outside of all the groups on a path from one to another."""
        inside = {id(g) for g in groups}
        last = max(self.position[n] for g in groups for n in g.nodes)
        stack = [n for g in groups for n in g.nodes]
        seen: set[int] = set()
        while stack:
            n = stack.pop()
            for t in n.results:
                for u in self.users.get(t, ()):
                    g = self.group_of[u]
                    if id(g) in inside:
                        if id(self.group_of[n]) not in inside:
                            return n
                    elif id(g) not in seen and min(map(self.position.__getitem__, g.nodes)) <= last:
                        seen.add(id(g))
                        stack += g.nodes
        return None

    def own_refusal(self, n: Node) -> Refusal:
        """Why only the library can run this operator."""
        if n in self.addressed:
            return Refusal(Rule.ADDRESSED, n.name)
        return Refusal(Rule.OPAQUE, n.name, unsupported_reason(n))

    def _ordered(self) -> tuple[Group, ...]:
        """Topological order of the groups (Kahn's algorithm, earliest node first)."""
        import heapq

        groups = list(dict.fromkeys(self.group_of[n] for n in self.graph.nodes))
        for g in groups:
            g.nodes.sort(key=self.position.__getitem__)
        needs = {id(g): set() for g in groups}
        feeds: dict[int, set[int]] = {id(g): set() for g in groups}
        for g in groups:
            for n in g.nodes:
                for t in n.inputs:
                    p = self.producer.get(t)
                    if p is not None and self.group_of[p] is not g:
                        needs[id(g)].add(id(self.group_of[p]))
                        feeds[id(self.group_of[p])].add(id(g))
        by_id = {id(g): g for g in groups}
        ready = [(self.position[g.nodes[0]], id(g)) for g in groups if not needs[id(g)]]
        heapq.heapify(ready)
        out = []
        while ready:
            _, key = heapq.heappop(ready)
            out.append(by_id[key])
            for other in feeds[key]:
                needs[other].discard(key)
                if not needs[other]:
                    heapq.heappush(ready, (self.position[by_id[other].nodes[0]], other))
        assert len(out) == len(groups), "the partition has a cycle"
        return tuple(out)


def _edge_bytes(p: Node, n: Node) -> int:
    return sum(t.nbytes for t in p.results if t in n.inputs)


def region_root(
    region: Region, strides: dict[Tensor, Strides], machine: Machine
) -> Tensor | Refusal | None:
    """The root of a nest of the region, None if it takes several nests; or why there is none."""
    staged = stage(region)
    return staged if isinstance(staged, Refusal) else nest_root(staged, strides, machine)


def supported(n: Node) -> bool:
    return unsupported_reason(n) == ""


def unsupported_reason(n: Node) -> str:
    """What keeps an operator with an expression out of generated kernels."""
    if n.opaque:
        return n.opaque
    return next((reason for t in n.tensors if (reason := unsupported(t))), "")
