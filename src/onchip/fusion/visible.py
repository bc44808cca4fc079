"""What conditions on positions leave of a walk: the blocks of keys that a causal mask hides from a
whole tile are not visited, and those that it leaves alone are not tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from onchip.fusion.nest import Span
from onchip.fusion.online import Online
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, call
from onchip.ir.index import linear


@dataclass(frozen=True, eq=False, slots=True)
class Visible:
    """Positions along the axis that conditions leave a tile: some of its elements see those from
    `some[0]` on and below `some[1]`, all of them those of `all` (None: no condition). without: the
    values without the conditions."""

    some: tuple[Expr | None, Expr | None]
    all: tuple[Expr | None, Expr | None]
    without: Expr

    def blocks(self, size: int, width: int) -> tuple[Expr, Expr, Expr, Expr]:
        """Of the walk in blocks: where it starts, where it ends; where blocks start and end in
        which the conditions hold and all positions exist."""
        (low, high), (first, last) = self.some, self.all
        start = _down(_most(low, _ZERO), width) if low is not None else _ZERO
        end = _least(high, Const(size, DType.I64)) if high is not None else Const(size, DType.I64)
        begin = start
        if first is not None:
            begin = _least(_down(_most(first, start) + (width - 1), width), _most(end, start))
        whole = Const(size // width * width, DType.I64)
        stop = _down(_least(last, whole), width) if last is not None else whole
        if isinstance(begin, Const) and isinstance(stop, Const):
            return start, end, begin, stop
        return start, end, begin, _most(stop, begin)


_ZERO = Const(0, DType.I64)


def _down(e: Expr, width: int) -> Expr:
    return e // width * width


def _most(a: Expr, b: Expr) -> Expr:
    return call("maximum", a, b)


def _least(a: Expr, b: Expr) -> Expr:
    return call("minimum", a, b)


def visible(online: Online) -> Visible | None:
    """What is left of the axis for one tile, where all that is carried is under one maximum, and
    comparisons of positions put minus infinity in the place of its values: those add nothing."""
    tops = [s for s in online.states if s.top is None]
    if len(tops) != 1 or tops[0].monoid != "max":
        return None
    spans: dict[Axis, Span] = {}
    for st in online.outputs:
        spans |= zip(st.staged.loops, st.spans, strict=True)
    x = tops[0].folded
    some: list[list[Expr]] = [[], []]
    everywhere: list[list[Expr]] = [[], []]
    while (parts := _conditional(x)) is not None:
        ends = [_end(test, online.axis, spans) for test in _conjuncts(parts[0])]
        if None in ends:
            break
        x = parts[1]
        for side, near, far in (e for e in ends if e is not None):
            some[side].append(near)
            everywhere[side].append(far)
    if not any(some):
        return None
    both = [
        tuple(_joined(one, _most if n == 0 else _least) for n, one in enumerate(sides))
        for sides in (some, everywhere)
    ]
    return Visible(both[0], both[1], x)  # type: ignore[arg-type]


def _joined(parts: list[Expr], by: Callable[[Expr, Expr], Expr]) -> Expr | None:
    out = None
    for e in parts:
        out = e if out is None else by(out, e)
    return out


def _conditional(x: Expr) -> tuple[Expr, Expr] | None:
    """Condition and value of what is minus infinity elsewhere."""
    match x:
        case Call(fn="where", args=(cond, y, Const(value=v))) if v == -inf:
            return cond, y
        case Call(fn="where", args=(cond, Const(value=v), y)) if v == -inf:
            return Call("logical_not", (cond,), DType.BOOL), y
    return None


def _conjuncts(e: Expr, negated: bool = False) -> list[Expr]:
    """Conditions that all hold where `e` does (or, negated, where it does not)."""
    match e:
        case Call(fn="logical_not" | "bitwise_not", args=(a,)) if a.dtype is DType.BOOL:
            return _conjuncts(a, not negated)
        case Call(fn="logical_or" | "bitwise_or", args=(a, b)) if negated:
            return [*_conjuncts(a, True), *_conjuncts(b, True)]
        case Call(fn="logical_and" | "bitwise_and", args=(a, b)) if not negated:
            return [*_conjuncts(a), *_conjuncts(b)]
    return [Call("logical_not", (e,), DType.BOOL) if negated else e]


_OPPOSITE = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le"}


def _end(test: Expr, over: Axis, spans: dict[Axis, Span]) -> tuple[int, Expr, Expr] | None:
    """A comparison of positions as an end of the axis: 0 (where it starts) or 1 (what it ends
    before), as seen by some and by all elements of a tile."""
    match test:
        case Call(fn="logical_not", args=(Call(fn=fn, args=(a, b)),)) if fn in _OPPOSITE:
            fn = _OPPOSITE[fn]
        case Call(fn=fn, args=(a, b)) if fn in _OPPOSITE:
            pass
        case _:
            return None
    if a.dtype is not DType.I64 or b.dtype is not DType.I64:
        return None
    a, b = (b, a) if fn in ("ge", "gt") else (a, b)
    form = linear(a - b)  # a - b + strict <= 0
    rest = [(atom, c) for atom, c in form.terms if atom is not over]
    k = form.coefficient(over)
    if k not in (1, -1) or any(atom not in spans for atom, _ in rest):
        return None
    constant = form.constant + (fn in ("lt", "gt"))
    least, most = (_extreme(rest, constant, spans, side) for side in (False, True))
    if k == 1:  # position <= -rest
        return 1, Const(1, DType.I64) - least, Const(1, DType.I64) - most
    return 0, least, most


def _extreme(
    terms: list[tuple[Expr, int]], constant: int, spans: dict[Axis, Span], most: bool
) -> Expr:
    """The least or largest value of a linear form in a tile."""
    out: Expr = Const(constant, DType.I64)
    for atom, c in terms:
        span = spans[atom]  # type: ignore[index]
        out = out + (span.origin + (span.extent - 1 if (c > 0) is most else 0)) * c
    return out
