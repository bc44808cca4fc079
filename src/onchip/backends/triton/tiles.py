"""One tile size for a nest: a short rule, until the planner tunes it."""

from __future__ import annotations

from math import prod

from onchip.backends.triton.writer import power_of_two
from onchip.fusion.contraction import find_contraction
from onchip.fusion.nest import Nest, build_nest
from onchip.fusion.refusal import Refusal
from onchip.fusion.staging import Staged
from onchip.fusion.tiling import whole_axes
from onchip.ir.expr import reduces
from onchip.ir.index import linear

ROWS = 16  # of the root's tile, for a product
COLUMNS = 32
ELEMENTS = 2048  # of a pointwise tile, whole and reduced axes included


def choose_tile(staged: tuple[Staged, ...], root: Staged) -> tuple[int, ...] | Refusal:
    """Whole axes stay whole. A product's columns get up to COLUMNS, its rows ROWS from the
    innermost outwards, its batches 1; without a product the tile grows to ELEMENTS."""
    whole = whole_axes(staged, root)
    extents = [max(a.extent, 1) for a in root.loops]
    tile = [e if w else 1 for e, w in zip(extents, whole, strict=True)]
    unit = build_nest(staged, root, tuple(tile))
    if isinstance(unit, Refusal):
        return unit
    sides = _sides(unit)
    room = ROWS if any(sides) else _room(staged, tile)
    for d in reversed(range(len(extents))):
        if whole[d] or sides[d] == "batch":
            continue
        if sides[d] == "columns":
            tile[d] = min(power_of_two(extents[d]), COLUMNS)
            continue
        tile[d] = min(power_of_two(extents[d]), room)
        room = max(room // tile[d], 1)
    return tuple(tile)


def _room(staged: tuple[Staged, ...], tile: list[int]) -> int:
    folded = (prod(a.extent for r in reduces(s.body) for a in r.axes) for s in staged)
    most = max(prod(tile), *folded, 1)
    return max(ELEMENTS // power_of_two(most), 1)


def _sides(unit: Nest) -> list[str]:
    """What each axis of the root is to a product of the nest: "rows", "columns", "batch" or ""."""
    out = ["" for _ in unit.tile_axes]
    for st in unit.stages:
        c = find_contraction(st.staged.body, st.staged.loops)
        if c is None:
            continue
        spans = dict(zip(st.staged.loops, st.spans, strict=True))
        for side, axes in (("rows", c.m_axes), ("columns", c.n_axes), ("batch", c.b_axes)):
            for a in axes:
                for atom, _ in linear(spans[a].origin).terms:
                    if atom in unit.tile_axes:
                        out[unit.tile_axes.index(atom)] = side  # type: ignore[arg-type]
    return out
