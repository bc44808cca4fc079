"""Matrix products, recognised from the expression: sum(mul(a, b)) with free axes on both sides."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Expr, Load, Reduce, mentioned, reduces, walk


@dataclass(frozen=True, eq=False, slots=True)
class Contraction:
    """`reduce` is sum over k_axes of left * right.

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


def find_contraction(body: Expr, axes: tuple[Axis, ...]) -> Contraction | None:
    """The one contraction of a body over `axes`, or None. A body with further reductions beside
    it (or inside its operands) has none."""
    found = [r for r in reduces(body) if as_contraction(r, axes) is not None]
    if len(found) != 1 or len(reduces(body)) != 1:
        return None
    return as_contraction(found[0], axes)


def as_contraction(r: Reduce, axes: tuple[Axis, ...]) -> Contraction | None:
    if r.monoid != "sum" or r.dtype not in (DType.F32, DType.F64):
        return None
    match r.body:
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
    order = [x for x in axes]
    m = tuple(x for x in order if x in left and x not in right)
    n = tuple(x for x in order if x in right and x not in left)
    both = tuple(x for x in order if x in left and x in right)
    return Contraction(r, a, b, m, n, both, r.axes)
