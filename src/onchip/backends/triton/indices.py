"""int64 expressions: index arithmetic in 32 bits, and values in 64.

What is made of axes alone, and fits, is computed in the type of addresses (32 bits, unless a tensor
needs more). Everything else that is int64 (loaded, folded, converted) has its 64 bits; where it is
part of an address, the load tests that it is inside the tensor, and the address takes its low 32
bits.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan

from onchip.backends.triton import spelling
from onchip.backends.triton.writer import Axes, CannotExpress, Tile, Writer
from onchip.fusion.refusal import Rule
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Number, mentioned, walk
from onchip.ir.index import Linear, bounds, from_linear, linear

_COUNTING = frozenset(("add", "sub", "mul", "neg", "floordiv", "mod", "maximum", "minimum"))


def counted(w: Writer, e: Expr) -> bool:
    """Whether an int64 expression is index arithmetic: made of axes, none of its parts too large
    for the type of addresses."""
    if e not in w.counted:
        w.counted[e] = all(_counts(w, x) for x in walk(e))
    return w.counted[e]


def _counts(w: Writer, e: Expr) -> bool:
    match e:
        case Axis() | Const(dtype=DType.I64):
            pass
        case Call(fn="floordiv" | "mod", args=(_, Const(value=c)), dtype=DType.I64) if c > 0:
            pass
        case Call(fn=fn, dtype=DType.I64) if fn in _COUNTING - {"floordiv", "mod"}:
            pass
        case _:
            return False
    lo, hi = bounds(e, w.env)
    return w.integer == "tl.int64" or (lo >= -(2**31) and hi < 2**31)


def wide(w: Writer, e: Expr, t: Tile) -> Tile:
    """The value of an expression, in 64 bits if it is int64."""
    if e.dtype is not DType.I64 or not counted(w, e) or w.integer == "tl.int64":
        return t
    if spelling.is_literal(t.text):
        return replace(t, literal=True)
    return w.define("n", f"tl.cast({t.text}, tl.int64)", t.axes, t.level)


def stored(w: Writer, e: Expr, dtype: DType) -> Tile:
    """The value of an expression in the type that a tensor of `dtype` computes in."""
    t = wide(w, e, w.value(e))
    if e.dtype is dtype.compute:
        return t
    text = spelling.call(f"cast_{dtype.compute.label}", [t.text], dtype.compute, e.dtype)
    return w.define("v", text, t.axes, t.level)


def index(w: Writer, e: Expr) -> Tile:
    """An int64 expression in the type of addresses: terms over the same axes are added first."""
    form = linear(e)
    groups: dict[Axes, list[str]] = {}
    level = 0
    for x, c in form.terms:
        t = atom(w, x)
        level = max(level, t.level)
        groups.setdefault(t.axes, []).append(t.text if c == 1 else f"{t.text} * {c}")
    if form.constant or not groups:
        scalar = groups.setdefault((), [])
        scalar.append(str(form.constant))
    axes = w.union(*(Tile("", g) for g in groups))
    parts = [
        w.onto(Tile(_bracketed(terms), g), axes) if g and g != axes else _sum(terms)
        for g, terms in groups.items()
    ]
    literal = not form.terms
    return Tile(_bracketed(parts), axes, level, literal)


def atom(w: Writer, e: Expr) -> Tile:
    """A term of an index without its factor."""
    match e:
        case Axis():
            bound = w.bound(e)
            assert bound is not None, f"axis {e} is not bound"
            return bound.tile
        case Call(fn="floordiv" | "mod" as fn, args=(a, Const(value=c))) if int(c) > 0 and counted(
            w, a
        ):
            return _divided(w, fn, a, int(c))
        case Call(fn="maximum" | "minimum" | "mul" as fn, args=(a, b)):
            x, y = index(w, a), index(w, b)
            axes = w.union(x, y)
            text = spelling.call(fn, [w.onto(x, axes), w.onto(y, axes)], DType.I64)
            return Tile(f"({text})", axes, max(x.level, y.level))
    if counted(w, e):
        raise CannotExpress(Rule.UNSUPPORTED_EXPRESSION, "", f"the index {e!r}")
    t = w.value(e)
    return w.define("j", f"tl.cast({t.text}, {w.integer})", t.axes, t.level)


def _divided(w: Writer, fn: str, a: Expr, c: int) -> Tile:
    """Triton's // and % truncate, so a dividend that can be negative is shifted first."""
    shift = max(-(bounds(a)[0] // c), 0)
    x = index(w, a + Const(shift * c, DType.I64))
    if fn == "mod":
        return Tile(f"({x.text} % {c})", x.axes, x.level)
    back = f" - {shift}" if shift else ""
    return Tile(f"({x.text} // {c}{back})", x.axes, x.level)


def outside(w: Writer, e: Load) -> Number:
    """What a load gives where it does not read: its padding; NaN for an index that is data and
    wrong (0 in types that have none); else zero."""
    if e.pad is not None:
        return e.pad
    data = not all(counted(w, i) for i in e.index)
    return nan if data and e.src.dtype.is_float else 0


def moving(w: Writer, offset: Expr) -> tuple[Tile, Tile]:
    """An offset as the sum of a scalar that the loop at hand counts (a window's tap; "0" if
    there is none) and the rest, which is then the same in all steps; in the pieces of a tile a
    constant counts as such a scalar."""
    form = linear(offset)
    tiles = {a: atom(w, a) for a, _ in form.terms}
    scalar = {a: not t.axes and t.level > 0 for a, t in tiles.items()}
    if not any(scalar.values()) and w.pieces is None:
        return Tile("0"), w.index(offset)
    parts = [tuple(x for x in form.terms if scalar[x[0]] is s) for s in (True, False)]
    constants = (form.constant, 0)
    base, rest = (w.index(from_linear(Linear(p, c))) for p, c in zip(parts, constants, strict=True))
    return base, rest


def inside(w: Writer, e: Load) -> list[Tile]:
    """Whether the indices of a load are in its tensor: those that are padded, or data, or counted
    from the start of a strip that may end outside, or leave it where the value is not used."""
    out = []
    first = w.pieces.first if w.pieces else None
    for i, n in zip(e.index, e.src.shape, strict=True):
        counts = counted(w, i)
        low, high = bounds(i)
        if counts and e.pad is None and first not in mentioned(i) and low >= 0 and high < n:
            continue
        lo, hi = bounds(i, w.env)
        tests = [">= 0"] * (lo < 0) + [f"< {n}"] * (hi >= n)
        value = w.index(i) if counts else w.value(i)
        if tests and (test := w.tested(value, tests)) is not None:
            out.append(test)
    return out


def _sum(parts: list[str]) -> str:
    return " + ".join(parts).replace("+ -", "- ")


def _bracketed(parts: list[str]) -> str:
    text = _sum(parts)
    return text if len(parts) == 1 and " " not in text else f"({text})"
