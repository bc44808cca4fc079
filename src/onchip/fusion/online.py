"""Folds that one walk over an axis can carry: the online softmax, found by algebra.

A sum over k of exp(x(k) - M) * g(k), where M is the maximum of the same x over k, needs M before it
starts. It is carried all the same: with the maximum m of what was seen so far, a step of the walk
multiplies the old sum by exp(m - m') and adds exp(x(k) - m') * g(k) for the new maximum m'
(Milakov and Gimelshein; with g(k) a row of values: attention as in Rabe and Staats, Dao et al.).
So softmax(Q K') V, or the statistics of a row in a cross entropy, need what they fold once and
never keep it whole.

Everything between the outputs and memory is put into the outputs' expressions; equal parts of them
become one object, so that "the same x" is `is`. What is found stands as a Var in the expressions:
the backend gives it its value after the walk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from onchip.fusion.inline import inline, substitute_simplified
from onchip.fusion.nest import Nest, Stage
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.staging import Staged
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    Var,
    axis,
    children,
    rebuild,
    reduces,
    rewrite,
    walk,
)
from onchip.ir.index import linear

HALVES = {f"cast_{d.label}": d for d in (DType.F16, DType.BF16)}
MONOIDS = ("sum", "prod", "max", "min")


@dataclass(frozen=True, eq=False, slots=True)
class State:
    """What is carried for one fold over the stream's axis.

    value    stands for the result in what reads it
    body     what is folded; under a maximum: g of exp(x - top) * g, None for 1
    top      the maximum that the sum is under, None of other folds
    zeroed   maxima for which the exponent is x - 0 and not x - top: minus infinity, as x - x would
             be NaN (a query that sees no key); infinity
    rounded  the half type to which the program rounds the exponential times what is taken out of
             the sum: here the exponential alone is rounded to it
    """

    value: Var
    monoid: str
    body: Expr | None
    top: State | None = None
    zeroed: tuple[float, ...] = ()
    rounded: DType | None = None

    @property
    def folded(self) -> Expr:
        """The body of a fold that is not a bare sum of exponentials."""
        assert self.body is not None
        return self.body


@dataclass(frozen=True, eq=False, slots=True)
class Online:
    """A nest as one walk over `axis`. outputs: the nest's results as stages over axes that they
    share, their bodies expressions of memory and of the states' values."""

    axis: Axis
    states: tuple[State, ...]
    outputs: tuple[Stage, ...]


class _Unfit(Exception):
    """A fold that the walk can't carry."""


def as_online(nest: Nest) -> Online | Refusal:
    """The nest as one walk over the axis of its longest maximum."""
    name = nest.root.tensor.name
    made = _outputs(nest)
    if isinstance(made, Refusal):
        return made
    folds = [r for st in made for r in reduces(st.staged.body)]
    sizes = {r.axes[0].extent for r in folds if r.monoid == "max" and len(r.axes) == 1}
    reason = "it has no maximum to carry sums under"
    for size in sorted(sizes, reverse=True):
        finder = _Finder(axis(size, "s"), {a for st in made for a in st.staged.loops})
        try:
            done = tuple(_with_body(st, finder.outer(st.staged.body)) for st in made)
        except _Unfit as problem:
            reason = str(problem)
            continue
        if size and any(s.top is not None for s in finder.states.values()):
            return Online(finder.axis, tuple(finder.states.values()), done)
    return Refusal(Rule.UNSUPPORTED_EXPRESSION, name, f"no stream: {reason}")


def _with_body(st: Stage, body: Expr) -> Stage:
    return replace(st, staged=replace(st.staged, body=body))


def merged(staged: tuple[Staged, ...]) -> tuple[Staged, ...] | Refusal:
    """The results alone, with what lies between them and memory in their bodies."""
    bodies: dict[Tensor, Expr] = {}
    out = []
    for s in staged:
        body = inline(s.body, bodies)
        if s.is_output:
            out.append(replace(s, body=body))
            continue
        whole = _over_dimensions(s, body)
        if isinstance(whole, Refusal):
            return whole
        bodies[s.tensor] = whole
    return tuple(out)


def _outputs(nest: Nest) -> list[Stage] | Refusal:
    """The results, each over the root's axes where it covers what they cover, and all that lies
    between them and memory in their bodies."""
    bodies: dict[Tensor, Expr] = {}
    out = []
    for st in nest.stages:
        s = st.staged
        body = inline(s.body, bodies)
        whole = _over_dimensions(s, body)
        if isinstance(whole, Refusal):
            return whole
        bodies[s.tensor] = whole
        if st.placement != "scratch":
            alone: dict[Axis, Expr] = {a: Const(0, DType.I64) for a in s.loops if a.extent == 1}
            body = substitute_simplified(body, alone)
            out.append(_over_root(_with_body(st, body), nest))
    return out


def _over_dimensions(s: Staged, body: Expr) -> Expr | Refusal:
    """A stage's body over its tensor's own axes, where these were split."""
    mapping: dict[Axis, Expr] = {}
    for i, own in zip(s.store, s.tensor.axes, strict=True):
        for a, c in linear(i).terms:
            if not isinstance(a, Axis) or a in mapping or linear(i).constant:
                return Refusal(Rule.UNSUPPORTED_EXPRESSION, s.tensor.name, "its axes are merged")
            mapping[a] = own if i is a else own // c % a.extent
    return substitute_simplified(body, mapping)


def _over_root(st: Stage, nest: Nest) -> Stage:
    """Its loops renamed to those of the root that cover the same range, each one once."""
    s = st.staged
    if s.tensor is nest.root.tensor:
        return st
    root = next(x for x in nest.stages if x.tensor is nest.root.tensor)
    left = list(zip(root.staged.loops, root.spans, strict=True))
    mapping: dict[Axis, Expr] = {}
    for a, span in zip(s.loops, st.spans, strict=True):
        for n, (b, other) in enumerate(left):
            same = span.origin is other.origin if span.depends else not other.depends
            if same and span.extent == other.extent and a.extent == b.extent:
                mapping[a] = b
                del left[n]
                break
    loops = tuple(mapping.get(a, a) for a in s.loops)
    body = substitute_simplified(s.body, mapping)
    store = tuple(rewrite(i, _renaming(mapping)) for i in s.store)
    return replace(st, staged=replace(s, body=body, loops=loops, store=store))  # type: ignore[arg-type]


def _renaming(mapping: dict[Axis, Expr]):
    return lambda e: mapping.get(e) if isinstance(e, Axis) else None


# ---- the folds ---------------------------------------------------------------------------------


class _Finder:
    """axis: of the walk; free: axes that values outside of it may depend on; states: by what they
    fold."""

    def __init__(self, over: Axis, free: set[Axis]) -> None:
        self.axis, self.free = over, free
        self.states: dict[object, State] = {}
        self.table: dict[object, Expr] = {}
        self.inner: dict[tuple[int, int, int], Axis] = {}
        self.found: dict[Expr, Expr] = {}

    def outer(self, e: Expr) -> Expr:
        """An expression outside of the walk, its folds over the axis replaced by values."""
        return rewrite(self.interned(e), self._folded, self.found)

    def _folded(self, e: Expr) -> Expr | None:
        if not isinstance(e, Reduce) or len(e.axes) != 1:
            return None
        if e.axes[0].extent != self.axis.extent or e.monoid not in MONOIDS:
            return None
        if e.dtype is not DType.F32:
            raise _Unfit(f"a fold of {e.dtype.label} values")
        own = e.axes[0]
        body = rewrite(e.body, lambda x: self._within(x, own))
        body = self.interned(substitute_simplified(body, {own: self.axis}))
        beyond = free_axes(body) - self.free - {self.axis}
        if beyond:
            raise _Unfit("a fold inside another fold's values")
        return self._under_maximum(e.monoid, body) or self._plain(e.monoid, body)

    def _within(self, e: Expr, own: Axis) -> Expr | None:
        """Folds in a fold's body: those that don't depend on its axis stand outside of the walk."""
        if not isinstance(e, Reduce):
            return None
        return e if own in free_axes(e) else self.outer(e)

    def _plain(self, monoid: str, body: Expr) -> Expr:
        if _vars(body):
            raise _Unfit("a fold needs the result of another one, which is not a maximum's shift")
        return self._state(monoid, body).value

    def _state(self, monoid: str, body: Expr | None, **more: object) -> State:
        key = (monoid, body, more.get("top"), more.get("zeroed"), more.get("rounded"))
        if key not in self.states:
            value = Var(f"{monoid}{len(self.states)}", DType.F32)
            self.states[key] = State(value, monoid, body, **more)  # type: ignore[arg-type]
        return self.states[key]

    def _under_maximum(self, monoid: str, body: Expr) -> Expr | None:
        """A sum of exp(x - M) * g, with what does not depend on the axis taken out of it."""
        parts = _Factors([], [], None)
        _flatten(body, self.axis, parts)
        tops = [(f, t) for f in parts.factors if (t := self._top_of(f)) is not None]
        if monoid != "sum" or len(tops) != 1:
            return None
        weight, (top, zeroed) = tops[0]
        rest = [f for f in parts.factors if f is not weight]
        inside = [f for f in rest if self.axis in free_axes(f)]
        if any(_vars(f) for f in inside):
            raise _Unfit("a factor under a maximum depends on another fold")
        g = self.interned(_product(inside)) if inside else None
        made = self._state("sum", g, top=top, zeroed=zeroed, rounded=parts.rounded)
        out: Expr = made.value
        for f in rest:
            out = out if f in inside else Call("mul", (out, f), DType.F32)
        for d in parts.divisors:
            out = Call("div", (out, d), DType.F32)
        return self.interned(out)

    def _top_of(self, e: Expr) -> tuple[State, tuple[float, ...]] | None:
        """The maximum M of x in exp(x - M), and the values of it that count as 0."""
        match e:
            case Call(fn="exp", args=(Call(fn="sub", args=(x, m)),)):
                value, zeroed = _shift(m)
                for s in self.states.values():
                    if s.value is value and s.monoid == "max" and s.body is x:
                        return s, zeroed
        return None

    # ---- equal expressions become one object -----------------------------------------------------

    def interned(self, e: Expr) -> Expr:
        """The one object for all expressions like this one; reductions have the same axes at the
        same depth."""
        return self._interned(e, {})

    def _interned(self, e: Expr, memo: dict[Expr, Expr]) -> Expr:
        if e in memo:
            return memo[e]
        whole = e
        if isinstance(e, Reduce):
            depth = _depth(e)
            axes = tuple(self._inner_axis(depth, n, a.extent) for n, a in enumerate(e.axes))
            if axes != e.axes:
                renamed = substitute_simplified(e.body, dict(zip(e.axes, axes, strict=True)))
                e = Reduce(e.monoid, axes, renamed)
        kids = tuple(self._interned(k, memo) for k in children(e))
        key = (_head(e), kids)
        if key not in self.table:
            self.table[key] = rebuild(e, kids) if kids else e
        memo[whole] = self.table[key]
        return self.table[key]

    def _inner_axis(self, *key: int) -> Axis:
        if key not in self.inner:
            self.inner[key] = axis(key[2], "r")  # type: ignore[index]
        return self.inner[key]  # type: ignore[index]


def _shift(m: Expr) -> tuple[Expr, tuple[float, ...]]:
    """What M is a maximum of, and its values that count as 0."""
    match m:
        case Call(fn="where", args=(Call(fn="eq", args=(a, Const(value=c))), Const(value=0), b)):
            match a:
                case Call(fn="abs", args=(inner,)) if inner is b and c == inf:
                    return b, (-inf, inf)
            if a is b and c == -inf:
                return b, (-inf,)
    return m, ()


def _head(e: Expr) -> object:
    match e:
        case Const(value=v, dtype=d):
            return ("const", repr(v), d)
        case Call(fn=fn, dtype=d):
            return (fn, d)
        case Load(src=src, pad=pad):
            return ("load", src, repr(pad))
        case Reduce(monoid=monoid, axes=axes):
            return ("fold", monoid, axes)
    return e


def _depth(e: Expr) -> int:
    """Folds inside each other."""
    return max((_depth(k) for k in children(e)), default=0) + isinstance(e, Reduce)


@dataclass(slots=True)
class _Factors:
    factors: list[Expr]
    divisors: list[Expr]
    rounded: DType | None


def _flatten(e: Expr, over: Axis, parts: _Factors) -> None:
    match e:
        case Call(fn="mul", args=(a, b)):
            _flatten(a, over, parts)
            _flatten(b, over, parts)
        case Call(fn="div", args=(a, b)) if _vars(a) and over not in free_axes(b):
            _flatten(a, over, parts)
            parts.divisors.append(b)
        case Call(fn=fn, args=(a,)) if fn in HALVES and _vars(a):
            parts.rounded = HALVES[fn]
            _flatten(a, over, parts)
        case _:
            parts.factors.append(e)


def _product(factors: list[Expr]) -> Expr:
    out = factors[0]
    for f in factors[1:]:
        out = Call("mul", (out, f), DType.F32)
    return out


def _vars(e: Expr) -> bool:
    return any(isinstance(x, Var) for x in walk(e))


def free_axes(e: Expr) -> set[Axis]:
    """Axes that an expression's value depends on: those that no fold in it runs over."""
    memo: dict[Expr, frozenset[Axis]] = {}

    def visit(x: Expr) -> frozenset[Axis]:
        if x not in memo:
            below = frozenset().union(*(visit(k) for k in children(x)))
            own = frozenset(x.axes) if isinstance(x, Reduce) else frozenset()
            memo[x] = frozenset([x]) if isinstance(x, Axis) else below - own
        return memo[x]

    return set(visit(e))
