"""Tiles for a nest with a matrix product, cheapest first by a simple model of one core."""

from __future__ import annotations

from itertools import product
from math import ceil, prod

from onchip.fusion.machine import Machine
from onchip.fusion.nest import Nest, Stage, build_nest
from onchip.fusion.staging import Staged
from onchip.ir.index import linear

Tile = tuple[int, ...]

# Rough rates of one core, used only to put tiles in order: FLOP, and bytes, per nanosecond.
PRODUCT_RATE = 80.0
CACHED_RATE = 25.0
STREAMED_RATE = 10.0
PACKING_RATE = 12.0
# Weights and intermediates up to this size are taken to stay in the second-level cache.
SECOND_LEVEL = 384 * 1024
TILE_OVERHEAD_NS = 1500.0


def product_tiles(
    staged: tuple[Staged, ...], root: Staged, whole: list[bool], machine: Machine
) -> list[Tile]:
    """Rows cut, outer axes first, into ever smaller pieces; columns whole or cut into one or two
    panels' multiples for each thread; sorted by predicted time."""
    extents = [max(a.extent, 1) for a in root.loops]
    columns = _column_axis(staged, root)
    widths = [extents[columns]] if columns is not None else [0]
    if columns is not None and not whole[columns]:
        for pieces in (machine.threads, 2 * machine.threads):
            width = ceil(extents[columns] / pieces / 32) * 32
            if width < extents[columns]:
                widths.append(width)
    priced: dict[Tile, float] = {}
    for rows, width in product(_ladder(extents, whole, columns), widths):
        tile = rows if columns is None else (*rows[:columns], width, *rows[columns + 1 :])
        nest = build_nest(staged, root, tile)
        if isinstance(nest, Nest) and tile not in priced:
            priced[tile] = predicted_ns(nest, machine)
    return sorted(priced, key=priced.__getitem__)


def predicted_ns(nest: Nest, machine: Machine) -> float:
    """Time of the busiest thread: tiles are handed out whole."""
    one = TILE_OVERHEAD_NS
    for st in nest.stages:
        one += _stage_ns(st)
    rate = CACHED_RATE if nest.scratch_bytes <= SECOND_LEVEL else STREAMED_RATE
    one += 2 * nest.scratch_bytes / rate
    return ceil(nest.tiles / machine.threads) * one


def _stage_ns(st: Stage) -> float:
    elements = prod(s.extent for s in st.spans)
    c = st.contraction
    if c is None:
        return elements * st.tensor.dtype.size / CACHED_RATE
    spans = dict(zip(st.staged.loops, st.spans, strict=True))
    rows, columns = c.m_axes, c.n_axes
    m = prod(spans[a].extent for a in rows)
    n = prod(spans[a].extent for a in columns)
    batch = prod(spans[a].extent for a in c.b_axes)
    k = prod(a.extent for a in c.k_axes)
    weights = 4.0 * n * k
    streaming = weights / (CACHED_RATE if weights <= SECOND_LEVEL else STREAMED_RATE)
    # few rows reuse the weights too little to hide their loading
    products = max(2.0 * m * n * k / PRODUCT_RATE, streaming) + 0.1 * streaming
    packing = 4.0 * m * k / PACKING_RATE if len(c.k_axes) > 1 else 0.0
    return batch * (products + packing)


def _ladder(extents: list[int], whole: list[bool], columns: int | None) -> list[Tile]:
    """The whole, then halves of the outermost row axis until it is one, then of the next."""
    tile = list(extents)
    out = [tuple(tile)]
    for d, e in enumerate(extents):
        if d == columns or whole[d]:
            continue
        pieces = 2
        while tile[d] > 1:
            tile[d] = ceil(e / pieces)
            pieces *= 2
            out.append(tuple(tile))
    return out


def _column_axis(staged: tuple[Staged, ...], root: Staged) -> int | None:
    """The root's axis that becomes the product's columns: the side with fewer axes (a
    convolution's channels; its rows are batch, height and width)."""
    unit = build_nest(staged, root, tuple(1 for _ in root.loops))
    if not isinstance(unit, Nest):
        return None
    for st in unit.stages:
        c = st.contraction
        if c is None:
            continue
        spans = dict(zip(st.staged.loops, st.spans, strict=True))
        for a in c.n_axes if len(c.n_axes) <= len(c.m_axes) else c.m_axes:
            for atom, _ in linear(spans[a].origin).terms:
                if atom in unit.tile_axes:
                    return unit.tile_axes.index(atom)  # type: ignore[arg-type]
    return None
