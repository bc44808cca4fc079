"""Axes of a region's product and of its results: one in terms of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Reduce, loads, rewrite
from onchip.ir.index import Linear, linear, simplify

Strides = tuple[int, ...]
ZERO = Const(0, DType.I64)


class Unfit(Exception):
    """The region has no form that the engine computes."""

    def __init__(self, subject: str, text: str) -> None:
        super().__init__(text)
        self.refusal = Refusal(Rule.CONTRACTION_FORM, subject, text)


def over(e: Expr, mapping: Mapping[Axis, Expr]) -> Expr:
    """An expression over other axes, with every index in it simplified. Axes of one element are
    their only value."""
    memo: dict[Expr, Expr] = {}

    def axis_value(a: Axis) -> Expr:
        return mapping.get(a) or (ZERO if a.extent == 1 else a)

    def leaf(x: Expr) -> Expr | None:
        if isinstance(x, Axis):
            return axis_value(x)
        if isinstance(x, Call) and x.dtype is DType.I64 and not loads(x):
            return simplify(rewrite(x, lambda y: axis_value(y) if isinstance(y, Axis) else None))
        if isinstance(x, Load):
            return Load(x.src, tuple(simplify(rewrite(i, leaf, memo)) for i in x.index), x.pad)
        return None

    return rewrite(e, leaf, memo)


def inverse(
    index: Sequence[Expr], known: Sequence[Expr], extents: Sequence[int]
) -> dict[Axis, Expr] | None:
    """The axes that `index` mentions in terms of `known`, which are its values: index[d] counts
    axes as digits of a number below extents[d]. None if some value belongs to no or to several
    elements, or an axis is read twice."""
    out: dict[Axis, Expr] = {}
    for i, value, extent in zip(index, known, extents, strict=True):
        form = linear(i)
        digits = sorted(form.terms, key=lambda t: t[1])
        width = 1
        for a, c in digits:
            if not isinstance(a, Axis) or c != width or a in out:
                return None
            digit = simplify(Call("floordiv", (value, Const(c, DType.I64)), DType.I64))
            out[a] = simplify(Call("mod", (digit, Const(a.extent, DType.I64)), DType.I64))
            width *= a.extent
        if width != extent or form.constant:
            return None
    return out


def merged(axes: Sequence[Axis], whole: Expr) -> dict[Axis, Expr]:
    """Axes, the slowest first, as digits of one number."""
    out, width = {}, 1
    for a in reversed(axes):
        digit = simplify(Call("floordiv", (whole, Const(width, DType.I64)), DType.I64))
        out[a] = simplify(Call("mod", (digit, Const(a.extent, DType.I64)), DType.I64))
        width *= a.extent
    return out


def address(index: Sequence[Expr], strides: Strides) -> Linear:
    """Where in memory an element lies, in elements from the tensor's first."""
    total: Expr = ZERO
    for i, s in zip(index, strides, strict=True):
        total = total + i * s
    return linear(simplify(total))


def affine(form: Linear) -> bool:
    return all(isinstance(a, Axis) for a, _ in form.terms)


class Interned:
    """One object for all expressions alike, so that "the same value" is `is`."""

    def __init__(self) -> None:
        self.known: dict[object, Expr] = {}
        self.memo: dict[Expr, Expr] = {}

    def __call__(self, e: Expr) -> Expr:
        if e in self.memo:
            return self.memo[e]
        match e:
            case Const(value=v, dtype=d):
                out, key = e, ("const", repr(v), d)
            case Load(src=src, index=index, pad=pad):
                kids = tuple(map(self, index))
                out, key = Load(src, kids, pad), ("load", src, repr(pad), *kids)
            case Call(fn=fn, args=args, dtype=d, label=label):
                kids = tuple(map(self, args))
                out, key = Call(fn, kids, d, label), (fn, d, *kids)
            case Reduce():
                raise TypeError("a fold has axes of its own")
            case _:
                out, key = e, e
        self.memo[e] = self.known.setdefault(key, out)
        return self.memo[e]


def conditions(e: Expr) -> list[tuple[str, Expr, int]] | None:
    """The terms of a conjunction of `index >= 0` and `index < n`, or None."""
    match e:
        case Call(fn="logical_and", args=(a, b)):
            left, right = conditions(a), conditions(b)
            return None if left is None or right is None else left + right
        case Call(fn="ge", args=(i, Const(value=0))) if i.dtype is DType.I64:
            return [("ge", i, 0)]
        case Call(fn="lt", args=(i, Const(value=n))) if i.dtype is DType.I64:
            return [("lt", i, int(n))]
    return None


def apart(i: Expr, j: Expr) -> int | None:
    """i - j, if that is a number."""
    form = linear(simplify(i - j))
    return None if form.terms else form.constant
