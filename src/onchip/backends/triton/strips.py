"""Strips: the windows of neighbouring results share what they read.

A program computes T neighbours along one axis of the result, one after the other in its text, each
a block over the program's other dimensions. What a row of overlapping windows reads is loaded and
widened once and added to every result that it is part of: T + 6 loads for a 7x7 window's row in
place of 7 T. Everything behind the windows is then written for each of the T.

A row that a later fold needs whole (a layer norm over the channels) may come in parts of a power of
two, so that 96 channels are three blocks of 32 and not one of 128.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod

from onchip.backends.triton import spelling
from onchip.backends.triton.indices import wide
from onchip.backends.triton.placement import Kept, is_serial, range_of, whole_range
from onchip.backends.triton.reduce import (
    accumulated,
    begin_fold,
    bind_and_mask,
    fold_block,
    fold_step,
    free_axes,
    is_position,
)
from onchip.backends.triton.source import Options
from onchip.backends.triton.writer import Bound, CannotExpress, Pieces, Scope, Tile, Writer
from onchip.fusion.nest import Nest
from onchip.fusion.refusal import Rule
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Const, Reduce, axis, loads, mentioned, reduces, substitute
from onchip.ir.index import bounds, linear

# Window elements of all results of a strip that are written out; more are a loop over their rows.
UNROLLED = 128


# ---- text --------------------------------------------------------------------------------------


def emit_pieces(w: Writer, nest: Nest, stages: list[Kept], emit: Callable[[Kept], None]) -> None:
    """The stages of a nest for each element of its strips, and each part of its rows."""
    assert w.options.strip is not None
    if not distinct(nest, stages, w.options):
        text = "another axis covers the same range as a strip, or a row in parts"
        raise CannotExpress(Rule.UNSUPPORTED_EXPRESSION, nest.root.tensor.name, text)
    root = next(st for st in nest.stages if st.staged is nest.root)
    along, last = root.spans[w.options.strip], root.spans[-1]
    covers, row = range_of(along), range_of(last)
    first = axis(nest.root.loops[w.options.strip].extent, "first")
    origin = w.index(along.origin)
    w.env[first] = bounds(along.origin, w.env)
    w.bind(first, Bound(origin, w.lane_mask(origin)), 0)
    parts = ceil(last.extent / w.options.chunk) if w.options.chunk else 1
    w.pieces = Pieces(covers, first, row if parts > 1 else None, w.options.chunk)
    w.pieces.kept = tuple({} for _ in range(parts))
    for at in range(along.extent):
        w.pieces.at = at
        for k in stages:
            cut = any(range_of(s) == w.pieces.row for s in k.stage.spans)
            for part in range(parts if cut else 1):
                _enter(w, part)
                emit(k)
            for kept in w.pieces.kept if not cut else ():
                kept[k.stage.tensor] = w.kept[k.stage.tensor]


def distinct(nest: Nest, kept: list[Kept], o: Options) -> bool:
    """Whether the strip's range, and the row's if it comes in parts, are no other axes', which
    would be taken for them."""
    assert o.strip is not None
    root = next(st for st in nest.stages if st.staged is nest.root)
    ranges = [range_of(s) for s in root.spans]
    strip, row = ranges[o.strip], ranges[-1]
    groups = [[range_of(s) for s in st.spans] for st in nest.stages]
    folds = [
        [whole_range(a) for a in r.axes] for k in kept for r in reduces(k.body) if not is_serial(r)
    ]
    once = all(g.count(strip) <= 1 and g.count(row) <= 1 for g in (*groups, *folds))
    return once and strip != row and not any(strip in g for g in folds)


def fold_parts(w: Writer, r: Reduce) -> Tile:
    """A fold over a row that comes in parts: parts of one width element on element, then across."""
    assert w.pieces is not None
    if is_position(r):
        text = "positions in a row that comes in parts"
        raise CannotExpress(Rule.UNSUPPORTED_EXPRESSION, "", text)
    here = w.pieces.part
    bodies: dict[tuple[int, ...], Tile] = {}
    for part in range(len(w.pieces.kept)):
        _enter(w, part)
        body = bind_and_mask(w, r)
        widths = tuple(w.widths[a] for a in body.axes)
        bodies[widths] = _combined(w, r, bodies[widths], body) if widths in bodies else body
    _enter(w, here)
    first, *rest = (fold_block(w, r, body) for body in bodies.values())
    for tile in rest:
        both = _combined(w, r, first, tile)
        first = w.define("r", both.text, both.axes, both.level)
    return first


def _combined(w: Writer, r: Reduce, a: Tile, b: Tile) -> Tile:
    assert a.axes == b.axes
    text = spelling.combine(r.monoid, a.text, b.text, r.body.dtype)
    return Tile(text, a.axes, max(a.level, b.level))


def _enter(w: Writer, part: int) -> None:
    assert w.pieces is not None
    w.pieces.part, w.kept = part, w.pieces.kept[part]


def fold_along_strip(w: Writer, r: Reduce) -> Tile | None:
    """The window's fold of the element at hand, once those of the whole strip are written; None
    if they don't share what they read."""
    pieces = w.pieces
    assert pieces is not None
    key = r, pieces.part
    if w.depth:  # in a loop around the fold, whose values end with it
        return None
    if any(ld.src in w.kept for ld in loads(r.body)):  # values of the element at hand alone
        return None
    if key not in pieces.folds:
        found = window_along(r, tuple(pieces.loops))
        if found is None or is_position(r):
            return None
        pieces.folds[key] = _fold_all(w, r, pieces, *found)
    return pieces.folds[key][pieces.at]


def window_along(r: Reduce, loops: tuple[Axis, ...]) -> tuple[Axis, Axis, int, int] | None:
    """The loop along the strip and the window's axis along it, with what a step along each of them
    is to an index that has both; None if there is no single such pair."""
    found = {}
    for ld in loads(r.body):
        for i in ld.index:
            form = linear(i)
            for a in mentioned(i) & set(loops):
                for k in mentioned(i) & set(r.axes):
                    found[a, k] = form.coefficient(a), form.coefficient(k)
    if len(found) != 1 or reduces(r.body):
        return None
    (((a, k), (stride, dilation)),) = found.items()
    return (a, k, stride, dilation) if stride and dilation else None


def _fold_all(
    w: Writer, r: Reduce, pieces: Pieces, a: Axis, along: Axis, stride: int, dilation: int
) -> list[Tile]:
    """Column by column: what elements read of it has the same text, and so is one value."""
    axes = free_axes(w, r)
    size = pieces.strip[1]
    level, totals = w.depth, [begin_fold(w, r, axes) for _ in range(size)]
    w.scopes.append(Scope({}))
    others = [k for k in r.axes if k is not along]
    unrolled = size * prod(k.extent for k in r.axes) <= UNROLLED
    for k in others:
        name = w.fresh("k")
        w.open(f"for {name} in {'tl.static_range' if unrolled else 'range'}(0, {k.extent}):")
        w.bind(k, Bound(Tile(name, (), w.depth)), 1)
    steps = [(t, d) for t in range(size) for d in range(along.extent)]
    pieces.block = axes
    for t, d in sorted(steps, key=lambda s: (s[0] * stride + s[1] * dilation, s)):
        body = substitute(r.body, {a: pieces.first + t, along: Const(d, DType.I64)})
        value = w.value(body)
        fold_step(w, r, totals[t], w.whole(wide(w, body, value), axes, accumulated(r)[0]), "")
    pieces.block = ()
    for _ in others:
        w.close()
    w.scopes.pop()
    return [Tile(total, axes, level) for total in totals]
