"""What the emitter knows of blocks: values, what axes are bound to, and where both hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from onchip.ir.expr import Axis, Expr, Reduce, Tensor

Axes = tuple[Axis, ...]
Range = tuple[object, int]  # what an axis covers: (structural key of the origin, extent)


@dataclass(frozen=True, slots=True)
class Tile:
    """A value: its text (a name, a number, or bracketed), one dimension per axis (none: a scalar),
    and the loop level at which it is known. literal: the text is a number."""

    text: str
    axes: Axes = ()
    level: int = 0
    literal: bool = False


Held = tuple[Tile, tuple[Expr, ...]]  # a value in registers, and the axes of its dimensions


@dataclass(frozen=True, slots=True)
class Bound:
    """The values of an axis, and which of them exist (None: all). A dimension counts from
    `origin`; `tests` are the conditions of the mask, to be applied to another form of the value;
    `at` is the origin as an expression, where it depends on the tile."""

    tile: Tile
    mask: Tile | None = None
    origin: str = "0"
    tests: tuple[str, ...] = ()
    at: Expr | None = None


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


@dataclass(eq=False, slots=True)
class Pieces:
    """A tile that is written in several blocks, one after the other (strips.py): the elements along
    `strip`, and the parts of `row` (None: it is whole), `chunk` elements long.

    first   the number of the strip's first element
    at      the element at hand, and part: the part of the row
    loops   the loops along the strip, as numbers counted from `first`
    kept    values in registers, of each part of the row
    folds   of windows, for all elements of the strip
    block   dimensions of the fold at hand
    """

    strip: Range
    first: Axis
    row: Range | None = None
    chunk: int = 0
    at: int = 0
    part: int = 0
    loops: dict[Axis, Expr] = field(default_factory=dict)
    kept: tuple[dict[Tensor, Held], ...] = ()
    folds: dict[tuple[Reduce, int], list[Tile]] = field(default_factory=dict)
    block: Axes = ()

    def covered(self, covers: Range) -> tuple[int, int]:
        """Which part of a range the block at hand covers: its start and extent."""
        if covers == self.strip:
            return self.at, 1
        if covers == self.row:
            start = self.part * self.chunk
            return start, min(self.chunk, covers[1] - start)
        return 0, covers[1]
