"""Matrix products, recognised from the expression: sum(mul(a, b)) with free axes on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Reduce, mentioned, reduces, walk, where
from onchip.ir.index import bounds


@dataclass(frozen=True, eq=False, slots=True)
class Contraction:
    """`reduce` is sum over k_axes of left * right, where `ends` names some of those axes over
    their values below a number that depends on batch axes only.

    m_axes  free axes only the left operand mentions (rows)
    n_axes  free axes only the right operand mentions (columns)
    b_axes  free axes both mention (batch)
    """

    reduce: Reduce
    left: Expr
    right: Expr
    m_axes: tuple[Axis, ...]
    n_axes: tuple[Axis, ...]
    b_axes: tuple[Axis, ...]
    k_axes: tuple[Axis, ...]
    ends: Mapping[Axis, Expr] = field(default_factory=dict)


def find_contraction(body: Expr, axes: tuple[Axis, ...]) -> Contraction | None:
    """The one contraction of a body over `axes`, or None. A body with further reductions beside
    it (or inside its operands) has none."""
    found = [r for r in reduces(body) if as_contraction(r, axes) is not None]
    if len(found) != 1 or len(reduces(body)) != 1:
        return None
    return as_contraction(found[0], axes)


def as_contraction(r: Reduce, axes: tuple[Axis, ...], ended: bool = False) -> Contraction | None:
    """ended: axes of the sum may end early (see `until`)."""
    if r.monoid != "sum" or r.dtype not in (DType.F32, DType.F64):
        return None
    body, ends = ended_body(r) if ended else (r.body, {})
    if len(ends) == len(r.axes) or not all(_inside(end, a) for a, end in ends.items()):
        body, ends = r.body, {}  # a sum over a padded product
    match body:
        case Call(fn="mul", args=(a, b)):
            pass
        case _:
            return None
    if any(isinstance(x, Reduce) for e in (a, b) for x in walk(e)):
        return None
    left, right = mentioned(a), mentioned(b)
    free = set(axes)
    if not any(isinstance(x, Load) for x in walk(a)) or not any(
        isinstance(x, Load) for x in walk(b)
    ):
        return None
    ka = set(r.axes)
    if not ((left - right) & free and (right - left) & free) or not (ka & left & right):
        return None
    if (ka - left) or (ka - right):
        return None  # a k axis that one side does not read: the other could be summed first
    alike = (left & right).union(*map(mentioned, ends.values()))
    m = tuple(x for x in axes if x in left and x not in alike)
    n = tuple(x for x in axes if x in right and x not in alike)
    both = tuple(x for x in axes if x in alike)
    return Contraction(r, a, b, m, n, both, r.axes, ends)


def _inside(end: Expr, a: Axis) -> bool:
    low, high = bounds(end)
    return low >= 0 and high <= a.extent


def until(body: Expr, ends: Mapping[Axis, Expr]) -> Expr:
    """What is summed, over the values of some axes below an end only."""
    for a, end in ends.items():
        body = where(Call("lt", (a, end), DType.BOOL), body, 0.0)
    return body


def ended_body(r: Reduce) -> tuple[Expr, dict[Axis, Expr]]:
    """The body of a sum without the conditions that `until` puts around it, and the ends."""
    body, ends = r.body, {}
    while True:
        match body:
            case Call(
                fn="where", args=(Call(fn="lt", args=(Axis() as a, end)), inner, Const(value=0))
            ) if a in r.axes and a not in ends and not mentioned(end) & set(r.axes):
                ends[a], body = end, inner
            case _:
                return body, ends
