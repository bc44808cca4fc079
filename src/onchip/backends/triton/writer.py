"""Expressions to Triton statements: each value is a block over exactly the axes it mentions.

Loops form levels, and a value is written at the shallowest level at which all that it is made of
is known. Values with the same text are the same value: that is how a row that three stages of a
softmax read is loaded once and stays in registers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from onchip.backends.triton import spelling
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Reduce, Tensor, mentioned
from onchip.ir.index import UNKNOWN, Env, bounds, linear

Axes = tuple[Axis, ...]
Strides = tuple[int, ...]
Range = tuple[object, int]  # what an axis covers: (structural key of the origin, extent)

# Triton itself ends at 2**20 elements; far below that a block no longer fits the registers.
BLOCK_LIMIT = 2**15


class CannotExpress(Exception):
    """Raised inside the emitter, caught by emit_kernel: the refusal it carries is the result."""

    def __init__(self, rule: Rule, subject: str, text: str, **costs: int) -> None:
        super().__init__(text)
        self.refusal = Refusal(rule, subject, text, costs)


@dataclass(frozen=True, slots=True)
class Tile:
    """A value: its text (a name, a number, or bracketed), one dimension per axis (none: a scalar),
    and the loop level at which it is known."""

    text: str
    axes: Axes = ()
    level: int = 0


@dataclass(frozen=True, slots=True)
class Bound:
    """The values of an axis, and which of them exist (None: all). A dimension counts from
    `origin`; `tests` are the conditions of the mask, to be applied to another form of the value."""

    tile: Tile
    mask: Tile | None = None
    origin: str = "0"
    tests: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class Scope:
    """Axes bound here and values known here; `opaque` hides the values of the scopes around it,
    because it binds their axes anew."""

    bound: dict[Axis, Bound]
    opaque: bool = False
    values: dict[Expr, Tile] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Level:
    head: str = ""
    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)


class Writer:
    """pointers: name of each tensor in memory; strides: elements; kept: values in registers, over
    the axes of the stage that made them; widths: block width of a dimension's axis; range_widths:
    of a range that needs more than the next power of two; ranks: order of dimensions."""

    def __init__(self, pointers: dict[Tensor, str], strides: dict[Tensor, Strides]) -> None:
        self.pointers, self.strides = pointers, strides
        self.kept: dict[Tensor, tuple[Tile, Axes]] = {}
        self.widths: dict[Axis, int] = {}
        self.range_widths: dict[Range, int] = {}
        self.ranks: dict[Axis, tuple[int, int]] = {}
        self.levels = [Level()]
        self.scopes = [Scope({})]
        self.env: Env = {}
        self.counts: dict[str, int] = {}

    # ---- names, levels, scopes -----------------------------------------------------------------

    @property
    def depth(self) -> int:
        return len(self.levels) - 1

    def fresh(self, stem: str) -> str:
        self.counts[stem] = self.counts.get(stem, -1) + 1
        return f"{stem}{self.counts[stem]}"

    def define(self, stem: str, text: str, axes: Axes = (), level: int = 0) -> Tile:
        """A name for a text, written once at its level."""
        for lv in self.levels[: level + 1]:
            if text in lv.names:
                return Tile(lv.names[text], axes, level)
        name = self.fresh(stem)
        self.levels[level].names[text] = name
        self.line(f"{name} = {text}", level)
        return Tile(name, axes, level)

    def line(self, text: str, level: int | None = None) -> None:
        self.levels[self.depth if level is None else level].lines.append(text)

    def open(self, head: str) -> None:
        self.levels.append(Level(head))

    def close(self) -> None:
        done = self.levels.pop()
        self.line(done.head)
        self.levels[-1].lines += [f"    {line}" for line in done.lines]

    def bound(self, a: Axis) -> Bound | None:
        return next((s.bound[a] for s in reversed(self.scopes) if a in s.bound), None)

    def bound_axes(self) -> Axes:
        return tuple(dict.fromkeys(a for s in self.scopes for a in s.bound))

    def bind(self, a: Axis, bound: Bound, kind: int) -> None:
        """kind orders dimensions: 0 rows, 1 reduction axes, 2 columns."""
        self.scopes[-1].bound[a] = bound
        self.rank(a, kind)

    def rank(self, a: Axis, kind: int) -> None:
        self.ranks.setdefault(a, (kind, len(self.ranks)))

    def bind_range(self, a: Axis, origin: Tile, covers: Range, tests: list[str], kind: int) -> None:
        """Bind an axis to `covers[1]` values from `origin` on, as a dimension (a scalar where the
        width is 1); `tests` are what its values must satisfy besides being in the range."""
        width = self.range_widths.get(covers, power_of_two(covers[1]))
        self.widths[a] = width
        self.rank(a, kind)
        if width > covers[1]:
            end = str(covers[1]) if origin.text == "0" else f"{origin.text} + {covers[1]}"
            tests = [*tests, f"< {end}"]
        if width == 1:
            tile = origin
        else:
            text = f"tl.arange(0, {width})"
            text = text if origin.text == "0" else f"{origin.text} + {text}"
            tile = self.define("i", text, (a,), origin.level)
        self.bind(a, Bound(tile, self.tested(tile, tests), origin.text, tuple(tests)), kind)

    def tested(self, t: Tile, tests: Iterable[str]) -> Tile | None:
        return self.all_of([self.define("m", f"{t.text} {x}", t.axes, t.level) for x in tests])

    # ---- shapes --------------------------------------------------------------------------------

    def shape(self, axes: Axes) -> str:
        sizes = [self.widths[a] for a in axes]
        if prod(sizes) > BLOCK_LIMIT:
            text = f"a block of {' x '.join(map(str, sizes))} elements; at most {BLOCK_LIMIT}"
            raise CannotExpress(Rule.SCRATCH, "", text, elements=prod(sizes))
        return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"

    def union(self, *tiles: Tile) -> Axes:
        found = dict.fromkeys(a for t in tiles for a in t.axes)
        axes = tuple(sorted(found, key=self.ranks.__getitem__))
        self.shape(axes)
        return axes

    def onto(self, t: Tile, axes: Axes) -> str:
        """The text of `t` with a dimension for each of `axes` (size 1 where it has none)."""
        if not t.axes or t.axes == axes:
            return t.text
        text, have = t.text, tuple(a for a in axes if a in t.axes)
        if have != t.axes:
            text = f"tl.permute({text}, {tuple(t.axes.index(a) for a in have)})"
        if have == axes:
            return text
        return f"{text}[{', '.join(':' if a in have else 'None' for a in axes)}]"

    def whole(self, t: Tile, axes: Axes, kind: str = "tl.float32") -> str:
        """The same, broadcast to the full shape."""
        if set(t.axes) == set(axes):
            return self.onto(t, axes)
        return f"({self.onto(t, axes)} + tl.zeros({self.shape(axes)}, {kind}))"

    # ---- values --------------------------------------------------------------------------------

    def value(self, e: Expr) -> Tile:
        for scope in reversed(self.scopes):
            if e in scope.values:
                return scope.values[e]
            if scope.opaque:
                break
        tile = self._compute(e)
        self.scopes[-1].values[e] = tile
        return tile

    def _compute(self, e: Expr) -> Tile:
        if e.dtype is DType.I64:
            return self.index(e)
        match e:
            case Const(value=v, dtype=d):
                return Tile(spelling.constant(v, d))
            case Call(fn=fn, args=args):
                tiles = [self.value(a) for a in args]
                axes = self.union(*tiles)
                text = spelling.call(fn, [self.onto(t, axes) for t in tiles])
                return self.define("v", text, axes, max(t.level for t in tiles))
            case Load():
                return self._kept(e) if e.src in self.kept else self._load(e)
            case Reduce():
                from onchip.backends.triton.reduce import emit_reduction

                return emit_reduction(self, e)
        raise CannotExpress(Rule.UNSUPPORTED_EXPRESSION, "", f"a {type(e).__name__.lower()}")

    def _kept(self, e: Load) -> Tile:
        """A value in registers, its dimensions renamed to the reader's axes."""
        tile, own = self.kept[e.src]
        names = dict(zip(own, e.index, strict=True))
        axes = []
        for a in tile.axes:
            reader = names[a]
            if not isinstance(reader, Axis):
                text = f"one element of a dimension that tl.dot widened to {self.widths[a]} is read"
                raise CannotExpress(Rule.CONTRACTION_FORM, e.src.name, text)
            bound = self.bound(reader)
            if bound is None or bound.tile.axes != (reader,):
                text = "a tile in registers cannot be an operand with several row or K axes"
                raise CannotExpress(Rule.CONTRACTION_FORM, e.src.name, text)
            if self.widths[reader] != self.widths[a]:
                text = f"a product reads {a.extent} values in registers; it needs 16"
                raise CannotExpress(Rule.CONTRACTION_FORM, e.src.name, text)
            axes.append(reader)
        return Tile(tile.text, tuple(axes), tile.level)

    def _load(self, e: Load) -> Tile:
        address, mask = self.address(e.src, e.index), self.mask(e)
        axes = self.union(address, *([mask] if mask else []))
        text = f"{self.pointers[e.src]} + {self.whole(address, axes, 'tl.int32')}"
        if mask is not None:
            zero = False if e.src.dtype is DType.BOOL else 0.0
            other = spelling.constant(zero if e.pad is None else e.pad, e.src.dtype)
            text += f", mask={self.onto(mask, axes)}, other={other}"
        widened = "" if e.src.dtype.compute is e.src.dtype else ".to(tl.float32)"
        level = max(address.level, mask.level if mask else 0)
        return self.define("x", f"tl.load({text}){widened}", axes, level)

    def address(self, t: Tensor, index: tuple[Expr, ...]) -> Tile:
        place: Expr = Const(0, DType.I64)
        for i, stride in zip(index, self.strides[t], strict=True):
            place = place + i * stride
        return self.index(place)

    def mask(self, e: Load) -> Tile | None:
        """Which elements exist: those of existing axis values, inside the tensor if padded."""
        axes = sorted({a for i in e.index for a in mentioned(i)}, key=self.ranks.__getitem__)
        bounds_of = [self.bound(a) for a in axes]
        parts = [b.mask for b in bounds_of if b is not None and b.mask is not None]
        if e.pad is not None:
            parts += self._inside(e)
        return self.all_of(parts)

    def _inside(self, e: Load) -> list[Tile]:
        out = []
        for i, n in zip(e.index, e.src.shape, strict=True):
            lo, hi = bounds(i)
            tests = [f">= {0}"] * (lo < 0) + [f"< {n}"] * (hi >= n)
            if tests and (inside := self.tested(self.index(i), tests)) is not None:
                out.append(inside)
        return out

    def all_of(self, masks: list[Tile]) -> Tile | None:
        masks = list(dict.fromkeys(masks))
        if len(masks) < 2:
            return masks[0] if masks else None
        axes = self.union(*masks)
        text = " & ".join(self.onto(m, axes) for m in masks)
        return self.define("m", text, axes, max(m.level for m in masks))

    # ---- indices -------------------------------------------------------------------------------

    def index(self, e: Expr) -> Tile:
        """An int64 expression in 32-bit arithmetic: terms over the same axes are added first."""
        form = linear(e)
        groups: dict[Axes, list[str]] = {}
        level = 0
        for atom, c in form.terms:
            t = self._atom(atom)
            level = max(level, t.level)
            groups.setdefault(t.axes, []).append(t.text if c == 1 else f"{t.text} * {c}")
        if form.constant or not groups:
            scalar = groups.setdefault((), [])
            scalar.append(str(form.constant))
        axes = self.union(*(Tile("", g) for g in groups))
        parts = [
            self.onto(Tile(_bracketed(terms), g), axes) if g and g != axes else _sum(terms)
            for g, terms in groups.items()
        ]
        return Tile(_bracketed(parts), axes, level)

    def _atom(self, e: Expr) -> Tile:
        match e:
            case Axis():
                bound = self.bound(e)
                assert bound is not None, f"axis {e} is not bound"
                return bound.tile
            case Call(fn="floordiv" | "mod" as fn, args=(a, Const(value=c))) if int(c) > 0:
                return self._divided(fn, a, int(c))
            case Call(fn="maximum" | "minimum" as fn, args=(a, b)):
                x, y = self.index(a), self.index(b)
                axes = self.union(x, y)
                text = f"tl.{fn}({self.onto(x, axes)}, {self.onto(y, axes)})"
                return Tile(text, axes, max(x.level, y.level))
            case Call(fn="mul", args=(a, b)):
                x, y = self.index(a), self.index(b)
                axes = self.union(x, y)
                text = f"({self.onto(x, axes)} * {self.onto(y, axes)})"
                return Tile(text, axes, max(x.level, y.level))
        what = e.fn if isinstance(e, Call) else type(e).__name__.lower()
        raise CannotExpress(
            Rule.UNSUPPORTED_EXPRESSION, "", f"{what} in integer arithmetic or an index"
        )

    def _divided(self, fn: str, a: Expr, c: int) -> Tile:
        """Triton's // and % truncate, so a dividend that can be negative is shifted first."""
        lo, _ = bounds(a)
        if lo <= UNKNOWN[0]:
            text = "a data-dependent index divided"
            raise CannotExpress(Rule.UNSUPPORTED_EXPRESSION, "", text)
        shift = max(-(lo // c), 0)
        x = self.index(a + Const(shift * c, DType.I64))
        if fn == "mod":
            return Tile(f"({x.text} % {c})", x.axes, x.level)
        back = f" - {shift}" if shift else ""
        return Tile(f"({x.text} // {c}{back})", x.axes, x.level)


def _sum(parts: list[str]) -> str:
    return " + ".join(parts).replace("+ -", "- ")


def _bracketed(parts: list[str]) -> str:
    text = _sum(parts)
    return text if len(parts) == 1 and " " not in text else f"({text})"


def power_of_two(n: int) -> int:
    """The least power of two that is not below n (1 for nothing)."""
    return 1 << max(n - 1, 0).bit_length()
