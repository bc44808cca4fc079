"""Tiles of a walk over an axis: queries of one program, and keys of one step."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from math import prod

from onchip.backends.triton.placement import SMALLEST_DOT
from onchip.backends.triton.source import Options, Variant
from onchip.backends.triton.writer import power_of_two
from onchip.fusion.contraction import as_contraction
from onchip.fusion.machine import Gpu
from onchip.fusion.nest import build_nest
from onchip.fusion.online import Online, as_online, free_axes, merged
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.staging import Staged
from onchip.fusion.tiling import in_layout_order
from onchip.ir.expr import Axis, Tensor, loads, reduces

Strides = tuple[int, ...]

Shape = tuple[int, int, int, int]  # queries, keys, warps, stages
SHAPES = ((128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (64, 128, 4, 2), (64, 32, 4, 3))
# Of rows of 256 values and more, whose sums fill the registers.
WIDE = ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2))
# Of queries that are few anyway (the heads that read the same keys).
FEW = ((16, 128, 4, 3), (16, 64, 4, 4), (16, 128, 8, 2), (16, 64, 2, 3))
# In float32, whose products take several instructions an element.
SINGLE = ((64, 32, 8, 2), (32, 32, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2))
# Of walks without a product: elements of a step, warps.
BLOCKS = ((4096, 8), (2048, 4), (8192, 8), (1024, 4))
FEW_KEYS = 128  # so few that holding the scores of all may be better
DEEPEST = 256  # elements of a query that one product takes


def with_walks(
    held: list[Variant] | Refusal,
    staged: tuple[Staged, ...],
    root: Staged,
    strides: dict[Tensor, Strides],
    gpu: Gpu,
    base: Options,
) -> list[Variant] | Refusal:
    """Variants that hold what is folded in registers whole, and those that walk over it. Scores
    of many keys are not held: such kernels compile for minutes, and spill."""
    walks = walk_variants(*in_layout_order(staged, root, strides), gpu, base)
    if isinstance(walks, Refusal):
        return held
    if isinstance(held, Refusal):
        return walks
    online = as_online(walks[0].nest)
    length = online.axis.extent if isinstance(online, Online) else 0
    if held[0].options.product:
        return [*walks[:3], *held] if length <= FEW_KEYS else walks
    room = prod(power_of_two(t) for t in walks[0].nest.tile)
    pairs = (walks, held) if length * room > base.fold_block else (held, walks)
    return [v for pair in zip_longest(*pairs) for v in pair if v is not None]


def walk_variants(
    staged: tuple[Staged, ...], root: Staged, gpu: Gpu, base: Options
) -> list[Variant] | Refusal:
    """Walks for the region's nest, over its longest maximum's axis."""
    alone = merged(staged)
    if isinstance(alone, Refusal):
        return alone
    root = next(s for s in alone if s.tensor is root.tensor)
    nest = build_nest(alone, root, tuple(1 for _ in root.loops))
    online = nest if isinstance(nest, Refusal) else as_online(nest)
    if isinstance(online, Refusal):
        return online
    columns = _columns(online)
    used = set().union(*(free_axes(s.body) for s in online.states if s.body is not None))
    lone = [a for a in root.loops if a.extent > 1 and a not in used]
    if lone:
        text = f"a result for each of {lone[0].extent} positions beside the walk"
        return Refusal(Rule.UNSUPPORTED_EXPRESSION, root.tensor.name, text)
    row = max(_rows(online), key=lambda a: a.extent, default=None)
    room = prod(power_of_two(a.extent) for a in columns)
    out: list[Variant] = []
    shapes = _blocks(room) if row is None else _shapes(online, row, room, gpu)
    for queries, keys, warps, stages in shapes:
        tile = tuple(queries if a is row else a.extent if a in columns else 1 for a in root.loops)
        made = build_nest(alone, root, tuple(map(min, tile, (a.extent for a in root.loops))))
        if isinstance(made, Refusal):
            return made
        step = min(keys, max(power_of_two(online.axis.extent), SMALLEST_DOT))
        options = replace(base, stream=step, warps=warps, stages=stages, k_block=DEEPEST)
        options = replace(options, product=row is not None)
        if not any(v.nest.tile == made.tile and v.options == options for v in out):
            out.append(Variant(made, options))
    return out


def _shapes(online: Online, row: Axis, room: int, gpu: Gpu) -> list[Shape]:
    """Shapes for queries of which there are `row`, and keys and values of `room` elements. What
    does not fit into shared memory has fewer steps in flight: a step's keys and values lie there,
    and the queries."""
    bodies = [s.folded for s in online.states if s.top is None]
    size = max((ld.src.dtype.size for e in bodies for ld in loads(e)), default=4)
    few = row.extent <= SMALLEST_DOT
    shapes = FEW if few else SINGLE if size > 2 else WIDE if room >= 256 else SHAPES
    out = []
    for queries, keys, warps, stages in shapes:
        free = gpu.shared_bytes - queries * room * size
        fits = min(stages, free // (2 * keys * room * size))
        if fits >= 1:
            out.append((queries, keys, warps, fits))
    return out or [(SMALLEST_DOT, SMALLEST_DOT, 4, 1)]


def _blocks(room: int) -> list[Shape]:
    """Steps and warps where no product has rows; `room`: elements of a position's row."""
    return [(1, max(n // room, SMALLEST_DOT), warps, 2) for n, warps in BLOCKS]


def _rows(online: Online) -> set[Axis]:
    """Axes that only the side of the scores has which is no key: one of them is cut into rows."""
    found: set[Axis] = set()
    loops = tuple(a for st in online.outputs for a in st.staged.loops)
    for s in online.states:
        for r in reduces(s.folded) if s.top is None else ():
            c = as_contraction(r, (*loops, online.axis))
            if c is not None:
                found |= set(c.m_axes if online.axis in c.n_axes else c.n_axes)
    return found & set(loops)


def _columns(online: Online) -> set[Axis]:
    """Axes of what is summed, which the maximum does not depend on: whole in each tile."""
    tops = set().union(*(free_axes(s.folded) for s in online.states if s.top is None))
    sums = set().union(*(free_axes(s.body) for s in online.states if s.body is not None))
    return sums - tops - {online.axis}
