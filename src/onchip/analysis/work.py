"""How many operations an expression costs, by the evaluation rule: a sub-expression is evaluated
once per binding of the axes that it depends on, so what depends on a channel alone costs one
evaluation a channel.

Index arithmetic is not work: neither the index of a Load, nor an integer or boolean expression
that reads no tensor (masks, window sizes). Padded taps count as dense, as usual for convolutions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from onchip.ir.expr import Axis, Call, Expr, Load, Reduce, Stream, Tensor, Var, children, walk
from onchip.ir.functions import flops_of
from onchip.ir.graph import Node

_LOGICAL_MONOIDS = frozenset(("any", "all"))


class Dependence:
    """The axes that each sub-expression of one expression depends on (its own reduction and
    stream axes excluded, since those are bound inside it)."""

    def __init__(self, root: Expr) -> None:
        self._memo: dict[Expr, frozenset[Axis]] = {}
        self._state: dict[Var, frozenset[Axis]] = {}
        self._solve([s for s in walk(root) if isinstance(s, Stream)])

    def _solve(self, streams: list[Stream]) -> None:
        """A state depends on what its start and its step depend on: the least fixed point."""
        self._state = {v: frozenset() for s in streams for v in s.state}
        changed = bool(streams)
        while changed:
            changed = False
            self._memo.clear()
            for s in streams:
                for var, init, step in zip(s.state, s.init, s.step, strict=True):
                    axes = (self.of(init) | self.of(step)) - {s.axis}
                    if axes != self._state[var]:
                        self._state[var], changed = axes, True
        self._memo.clear()

    def of(self, e: Expr) -> frozenset[Axis]:
        if e not in self._memo:
            self._memo[e] = self._compute(e)
        return self._memo[e]

    def _compute(self, e: Expr) -> frozenset[Axis]:
        match e:
            case Axis():
                return frozenset((e,))
            case Var():
                return self._state.get(e, frozenset())
        below: frozenset[Axis] = frozenset().union(*(self.of(c) for c in children(e)))
        match e:
            case Reduce(axes=axes):
                return below - set(axes)
            case Stream(axis=ax):
                return below - {ax}
        return below


def values(e: Expr) -> Iterator[Expr]:
    """Sub-expressions in value positions: the index of a Load and pure index arithmetic are left
    out. Each once, parents before children."""
    seen: set[Expr] = set()
    stack = [e]
    while stack:
        x = stack.pop()
        if x in seen or is_index_arithmetic(x):
            continue
        seen.add(x)
        yield x
        if not isinstance(x, Load):
            stack.extend(reversed(children(x)))


def is_index_arithmetic(e: Expr) -> bool:
    """An integer or boolean computed from axes and constants alone."""
    if e.dtype.is_float or not isinstance(e, (Axis, Call)):
        return False
    return not any(isinstance(x, (Load, Var, Reduce, Stream)) for x in walk(e))


def bindings(axes: Iterable[Axis]) -> int:
    """Number of index values of a set of axes (1 for none)."""
    return prod(a.extent for a in axes)


def flops(tensor: Tensor) -> int:
    """Operations to compute every element of `tensor` once, its reads already in memory.

    A Call costs flops_of(fn) an evaluation; a Reduce costs its body and one step of the monoid at
    each point of its axes (so sum(mul(a, b)) is 2*M*N*K); a Stream's state update is counted once,
    as for a single block. 0 for a tensor given from outside.
    """
    if tensor.body is None:
        return 0
    depends = Dependence(tensor.body)
    total = 0
    for e in values(tensor.body):
        match e:
            case Call(fn=fn):
                total += flops_of(fn) * bindings(depends.of(e))
            case Reduce(monoid=monoid, axes=axes, body=body) if monoid not in _LOGICAL_MONOIDS:
                total += bindings(depends.of(body) | set(axes))
    return total


def node_flops(node: Node) -> int | None:
    """Operations of one operator, all of its tensors together; None if it is opaque (unknown)."""
    return None if node.opaque else sum(flops(t) for t in node.tensors)
