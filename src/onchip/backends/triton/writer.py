"""Expressions to Triton statements: each value is a block over exactly the axes it mentions.

Loops form levels, and a value is written at the shallowest level at which all that it is made of
is known. Values with the same text are the same value: that is how a row that three stages of a
softmax read is loaded once and stays in registers.

A program computes several tiles of its nest side by side: `lane` is the dimension that numbers
them, and the origin of a tile along an axis is then a block over it, like any other value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod

from onchip.backends.triton import spelling
from onchip.backends.triton.source import Options, Partial
from onchip.backends.triton.values import Axes, Bound, Held, Level, Pieces, Range, Scope, Tile
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    mentioned,
    reduces,
    substitute,
)
from onchip.ir.index import Env, simplify

Strides = tuple[int, ...]
Place = tuple[Axis, int, int]  # the origin of a tile along an axis: its name, step, and count

# Triton itself ends at 2**20 elements; far below that a block no longer fits the registers.
BLOCK_LIMIT = 2**16
LOG2_E = 1.4426950408889634


class CannotExpress(Exception):
    """Raised inside the emitter, caught by emit_kernel: the refusal it carries is the result."""

    def __init__(self, rule: Rule, subject: str, text: str, **costs: int) -> None:
        super().__init__(text)
        self.refusal = Refusal(rule, subject, text, costs)


class Writer:
    """pointers: name of each tensor in memory; strides: elements; kept: values in registers, over
    the axes of each of its dimensions; widths: block width of a dimension's axis; range_widths:
    of a range that needs more than the next power of two; ranks: order of dimensions; pieces: of
    a tile that is no single block; lane: the dimension of tiles side by side (None: one tile a
    program), first_lane the number of its first, `lanes` the axes that it counts; numbers:
    dimensions that number tiles (lane, and what it is part of in a product); integer: the type of
    addresses; free: constants that are laid out as products read them; result: the type of what
    the stage at hand computes; tiles: that programs compute; partial: where several of them add up
    one; uncached: tensors that other programs of this launch wrote, which the first-level cache
    knows nothing of; coarse: all results are of half types (see spelling.py)."""

    def __init__(
        self, pointers: dict[Tensor, str], strides: dict[Tensor, Strides], options: Options
    ) -> None:
        self.pointers, self.strides, self.options = pointers, strides, options
        self.lane: Axis | None = None
        self.lanes: Sequence[Place] = ()
        self.first_lane = Tile("0")
        self.numbers: set[Axis] = set()
        self.integer = "tl.int32"
        self.leaving: list[str] = []  # what a program does last
        self.entering = False  # programs of a cluster have not yet waited for each other's start
        self.backwards = False  # programs take their tiles from the last to the first
        self.packed: dict[str, str] = {}  # blocks of half types as stored, and how they are widened
        self.free: frozenset[Tensor] = frozenset()
        self.rounded: frozenset[Tensor] = frozenset()  # constants that are TF32 numbers already
        self.result = DType.F32
        self.tiles = 1
        self.partial: list[Partial] = []
        self.kept: dict[Tensor, Held] = {}
        self.pieces: Pieces | None = None
        self.uncached: set[Tensor] = set()
        self.widths: dict[Axis, int] = {}
        self.range_widths: dict[Range, int] = {}
        self.ranks: dict[Axis, tuple[int, int]] = {}
        self.levels = [Level()]
        self.branch = 0  # the level of the innermost branch: what it needs is computed there
        self.scopes = [Scope({})]
        self.env: Env = {}
        self.counted: dict[Expr, bool] = {}  # see indices.py
        self.coarse = False
        self.counts: dict[str, int] = {}

    # ---- names, levels, scopes -----------------------------------------------------------------

    @property
    def depth(self) -> int:
        return len(self.levels) - 1

    def fresh(self, stem: str) -> str:
        self.counts[stem] = self.counts.get(stem, -1) + 1
        return f"{stem}{self.counts[stem]}"

    def define(self, stem: str, text: str, axes: Axes = (), level: int = 0) -> Tile:
        """A name for a text, written once at its level (or in the branch at hand)."""
        level = max(level, self.branch)
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

    def bind_range(self, a: Axis, at: Expr, covers: Range, tests: Sequence[str], kind: int) -> None:
        """Bind an axis to `covers[1]` values from `origin` on, as a dimension (a scalar where the
        width is 1); `tests` are what its values must satisfy besides being in the range."""
        start, extent = self.pieces.covered(covers) if self.pieces else (0, covers[1])
        at = simplify(at + start)
        if self.pieces and covers == self.pieces.strip:
            self.pieces.loops[a] = self.pieces.first + start
        origin = self.index(at)
        width = self.range_widths.get(covers, power_of_two(extent))
        self.widths[a] = width
        self.rank(a, kind)
        if width > extent:
            end = str(extent) if origin.text == "0" else f"{origin.text} + {extent}"
            tests = [*tests, f"< {end}"]
        if width == 1:
            tile = origin
        elif origin.axes:
            text = "tiles side by side have windows of their own"
            raise CannotExpress(Rule.UNSUPPORTED_EXPRESSION, "", text)
        else:
            text = f"tl.arange(0, {width})"
            text = text if origin.text == "0" else f"{origin.text} + {text}"
            tile = self.define("i", text, (a,), origin.level)
        masks = [m for m in (self.tested(tile, tests), self.lane_mask(tile)) if m is not None]
        self.bind(a, Bound(tile, self.all_of(masks), origin.text, tuple(tests), at), kind)

    def lane_mask(self, tile: Tile) -> Tile | None:
        """Which of the tiles side by side exist, if `tile` differs between them."""
        found = [self.bound(a) for a in tile.axes if a in self.numbers]
        return self.all_of([b.mask for b in found if b is not None and b.mask is not None])

    def unravel(self, number: Tile, places: Sequence[Place]) -> None:
        """Bind the origins of a tile along some axes to what its number says, last axis fastest."""
        rest, left = number, prod(n for *_, n in places)
        for origin, step, count in reversed(places):
            self.env[origin] = (0, (count - 1) * step)
            tile = Tile("0")
            if count > 1:
                left //= count
                at = f"{rest.text} % {count}" if left > 1 else rest.text
                text = at if step == 1 else f"({at}) * {step}" if "%" in at else f"{at} * {step}"
                tile = self.define("t", text, number.axes, number.level)
                if left > 1:
                    rest = self.define("q", f"{rest.text} // {count}", number.axes, number.level)
            self.bind(origin, Bound(tile), 0)

    def count_lanes(self, dimension: Axis, number: Tile, total: int) -> None:
        """Bind a dimension to the numbers of tiles side by side, of which there are `total`."""
        self.numbers.add(dimension)
        width = self.widths[dimension]
        exists = self.tested(number, [f"< {total}"] if total % width else [])
        self.bind(dimension, Bound(number, exists), 0)

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
        """The same, broadcast to the full shape. kind: the type of a literal."""
        if set(t.axes) == set(axes):
            return self.onto(t, axes)
        if t.literal:
            return f"tl.full({self.shape(axes)}, {t.text}, {kind})"
        return f"tl.broadcast_to({self.onto(t, axes)}, {self.shape(axes)})"

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
        from onchip.backends.triton.indices import counted

        if e.dtype is DType.I64 and counted(self, e):
            return self.index(e)
        match e:
            case Const(value=v, dtype=d):
                return Tile(spelling.constant(v, d), literal=True)
            case Call():
                return self._call(e)
            case Load():
                return self._kept(e) if e.src in self.kept else self.load(e)
            case Reduce():
                from onchip.backends.triton.reduce import emit_reduction

                return emit_reduction(self, e)
        raise CannotExpress(Rule.UNSUPPORTED_EXPRESSION, "", f"a {type(e).__name__.lower()}")

    def _call(self, e: Call) -> Tile:
        from onchip.backends.triton.branch import emit_branch
        from onchip.backends.triton.indices import counted, wide

        stem = re.sub(r"\W|^_+", "", e.label) or "v"
        match e:
            case Call(fn="exp", args=(Call(fn="sub", args=(a, b)),), dtype=DType.F32) if (
                self.coarse
            ):
                x, y = self.value(a), self.value(b)
                base = self.define("base", f"{y.text} * {LOG2_E}", y.axes, y.level)
                axes = self.union(x, base)
                text = f"coarse_exp_above({self.onto(x, axes)}, {self.onto(base, axes)})"
                return self.define(stem, text, axes, max(x.level, y.level))
            case Call(fn="where", args=(test, yes, no)) if reduces(yes) or reduces(no):
                if not self.value(test).axes:
                    return emit_branch(self, stem, self.value(test), (yes, no))
        tiles = [self.value(a) for a in e.args]
        counts = [counted(self, a) for a in e.args if a.dtype is DType.I64]
        if e.dtype is DType.I64 or not all(counts):
            tiles = [wide(self, a, t) for a, t in zip(e.args, tiles, strict=True)]
        axes = self.union(*tiles)
        texts = [self.onto(t, axes) for t in tiles]
        text = spelling.call(e.fn, texts, e.dtype, e.args[-1].dtype, self.coarse)
        return self.define(stem, text, axes, max(t.level for t in tiles))

    def _kept(self, e: Load) -> Tile:
        """A value in registers, its dimensions renamed to the reader's axes."""
        tile, own = self.kept[e.src]
        names = dict(zip(own, e.index, strict=True))
        axes = []
        for a in tile.axes:
            if a is self.lane:
                if any(s.opaque for s in self.scopes):
                    text = "a value in registers can't be an operand whose rows hold windows"
                    raise CannotExpress(Rule.CONTRACTION_FORM, e.src.name, text)
                axes.append(a)
                continue
            reader = names[a]
            if not isinstance(reader, Axis):
                text = f"one element of a dimension that tl.dot widened to {self.widths[a]} is read"
                raise CannotExpress(Rule.CONTRACTION_FORM, e.src.name, text)
            bound = self.bound(reader)
            if bound is None or bound.tile.axes != (reader,):
                text = "a tile in registers cannot be an operand with several row or K axes"
                raise CannotExpress(Rule.CONTRACTION_FORM, e.src.name, text)
            if not self.pieces and self.widths[reader] != self.widths[a]:
                text = f"a product reads {a.extent} values in registers; it needs 16"
                raise CannotExpress(Rule.CONTRACTION_FORM, e.src.name, text)
            axes.append(reader)
        return Tile(tile.text, tuple(axes), tile.level)

    def load(self, e: Load, widen: bool = True) -> Tile:
        """What a load reads from memory, in the type that arithmetic happens in, or as stored."""
        from onchip.backends.triton.indices import moving, outside

        base, address = moving(self, self.offset(e.src, e.index))
        mask = self.mask(e)
        block = Tile("", self.pieces.block if self.pieces else ())
        if block.axes and block.axes[-1] not in address.axes:
            block = Tile("")
        # loads of one layout, which no conversion has to make the same
        axes = self.union(address, block, *([mask] if mask else []))
        pointer = self.pointers[e.src] + (f" + {base.text}" if base.text != "0" else "")
        text = f"{pointer} + {self.whole(address, axes, self.integer)}"
        if mask is not None:
            other = spelling.constant(outside(self, e), e.src.dtype)
            text += f", mask={self.onto(mask, axes)}, other={other}"
        text += ', cache_modifier=".cg"' * (e.src in self.uncached)
        widen = widen and e.src.dtype.compute is not e.src.dtype
        level = max(base.level, address.level, mask.level if mask else 0)
        if widen and self.options.packed and axes:
            stored = self.define("x", f"tl.load({text})", axes, level)
            self.packed[stored.text] = f"{stored.text}.to(tl.float32)"
            return self.define("x", self.packed[stored.text], axes, level)
        if widen and block.axes and e.src.dtype is DType.BF16 and not self.options.interpret:
            return self.define("x", f"widen_bfloat16(tl.load({text}))", axes, level)
        widened = ".to(tl.float32)" * widen
        return self.define("x", f"tl.load({text}){widened}", axes, level)

    def address(self, t: Tensor, index: tuple[Expr, ...]) -> Tile:
        """The offset of an element in memory."""
        return self.index(self.offset(t, index))

    def offset(self, t: Tensor, index: tuple[Expr, ...]) -> Expr:
        """The same as an expression."""
        place: Expr = Const(0, DType.I64)
        for i, stride in zip(index, self.strides[t], strict=True):
            place = place + i * stride
        return simplify(substitute(place, self.pieces.loops) if self.pieces else place)

    def mask(self, e: Load) -> Tile | None:
        """Which elements exist: those of existing axis values, inside the tensor where the index is
        padded or data."""
        from onchip.backends.triton.indices import inside

        found = {a for i in e.index for a in mentioned(i) if a in self.ranks}
        axes = sorted(found, key=self.ranks.__getitem__)
        bounds_of = [self.bound(a) for a in axes]
        parts = [b.mask for b in bounds_of if b is not None and b.mask is not None]
        return self.all_of(parts + inside(self, e))

    def all_of(self, masks: list[Tile]) -> Tile | None:
        masks = list(dict.fromkeys(masks))
        if len(masks) < 2:
            return masks[0] if masks else None
        axes = self.union(*masks)
        text = " & ".join(self.onto(m, axes) for m in masks)
        return self.define("m", text, axes, max(m.level for m in masks))

    def index(self, e: Expr) -> Tile:
        """An int64 expression as part of an address."""
        from onchip.backends.triton.indices import index

        return index(self, e)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n (1 for nothing)."""
    return 1 << max(n - 1, 0).bit_length()
