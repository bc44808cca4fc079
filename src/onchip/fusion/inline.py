"""Placement `inline` and `register`: put a tensor's expression where it is read."""

from __future__ import annotations

from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    axis,
    cast,
    lift,
    rewrite,
    substitute,
)
from onchip.ir.index import bounds, simplify


def inline(body: Expr, inlined: dict[Tensor, Expr], memo: dict | None = None) -> Expr:
    """`body` with every load of an inlined tensor replaced by that tensor's (already inlined)
    expression at the load's index."""
    memo = {} if memo is None else memo

    def leaf(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or e.src not in inlined:
            return None
        index = tuple(simplify(rewrite(i, leaf, memo)) for i in e.index)
        return _at(e.src, inlined[e.src], index, e.pad)

    return rewrite(body, leaf, memo)


def _at(t: Tensor, body: Expr, index: tuple[Expr, ...], pad: object) -> Expr:
    value = substitute_simplified(fresh_reductions(body), dict(zip(t.axes, index, strict=True)))
    if pad is None:
        return value
    inside = in_bounds(index, t.shape)
    if inside is None:
        return value
    return Call("where", (inside, value, cast(lift(pad, value.dtype), value.dtype)), value.dtype)  # type: ignore[arg-type]


def fresh_reductions(e: Expr) -> Expr:
    """A copy whose reductions have axes of their own, so that two copies never share a loop."""

    def leaf(x: Expr) -> Expr | None:
        if not isinstance(x, Reduce):
            return None
        mapping: dict[Axis, Expr] = {a: axis(a.extent, "r") for a in x.axes}
        body = fresh_reductions(substitute(x.body, mapping))
        return Reduce(x.monoid, tuple(mapping.values()), body)  # type: ignore[arg-type]

    return rewrite(e, leaf)


def substitute_simplified(e: Expr, mapping: dict[Axis, Expr]) -> Expr:
    """Substitute axes, and simplify every index on the way."""
    memo: dict[Expr, Expr] = {}

    def leaf(x: Expr) -> Expr | None:
        if isinstance(x, Axis):
            return mapping.get(x)
        if isinstance(x, Load):
            return Load(x.src, tuple(simplify(rewrite(i, leaf, memo)) for i in x.index), x.pad)
        return None

    return rewrite(e, leaf, memo)


def in_bounds(index: tuple[Expr, ...], shape: tuple[int, ...]) -> Expr | None:
    """Condition that an index lies inside a tensor; None if the bounds prove it."""
    cond: Expr | None = None
    for i, n in zip(index, shape, strict=True):
        lo, hi = bounds(i)
        tests = []
        if lo < 0:
            tests.append(Call("ge", (i, Const(0, DType.I64)), DType.BOOL))
        if hi >= n:
            tests.append(Call("lt", (i, Const(n, DType.I64)), DType.BOOL))
        for test in tests:
            cond = test if cond is None else Call("logical_and", (cond, test), DType.BOOL)
    return cond
