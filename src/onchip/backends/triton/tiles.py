"""Ways to run a region as one Triton kernel: which axes are cut into tiles, how many tiles a
program computes side by side, and with how many warps. The most promising first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil, prod

from onchip.backends.triton.joined import joined_variants
from onchip.backends.triton.phase_tiles import (
    cutting,
    phased_variants,
    without_values_on_the_way,
)
from onchip.backends.triton.placement import Kept, is_serial, place
from onchip.backends.triton.product_tiles import by_dot, product_variants
from onchip.backends.triton.source import Options, Variant
from onchip.backends.triton.steps import HALF
from onchip.backends.triton.stream_tiles import with_walks
from onchip.backends.triton.strip_tiles import strip_variants
from onchip.backends.triton.writer import CannotExpress, power_of_two
from onchip.fusion.chunks import fold_elements, side_by_side
from onchip.fusion.machine import Gpu
from onchip.fusion.nest import Nest, build_nest
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.residues import by_residue
from onchip.fusion.staging import Staged, operations
from onchip.fusion.tiling import axes_missing_in_outputs, coalesce, in_layout_order, of_first_root
from onchip.ir.expr import Axis, Tensor, loads, reduces
from onchip.ir.index import linear, stride_along

Strides = tuple[int, ...]

# Elements of one program's block, and its warps: 8 to 32 elements a thread, so that several
# 16-byte accesses are in flight, and there are registers for several values an element.
POINTWISE_BLOCKS = ((4096, 8), (2048, 4), (8192, 8), (4096, 16), (1024, 4), (512, 2))
WINDOW_BLOCKS = ((2048, 8), (1024, 4), (2048, 4), (4096, 8), (512, 2))
ROW_BLOCKS = ((4096, 8), (4096, 4), (4096, 16), (8192, 8), (2048, 8))
# The same of folds whose rows nobody keeps: 32 elements a thread read a tenth faster than 16.
FOLD_BLOCKS = ((4096, 4), (4096, 8), (2048, 4), (8192, 8), (4096, 16))
MOST_WARPS = 16
# Operations in the text of a thread, all its elements' together (staging.operations).
MOST_OPERATIONS = 1024
LEAST_PER_THREAD = 8
# Elements of a program at least, even where that leaves multiprocessors idle.
FEW = 512
# Elements that a fold of neighbours takes in one block; more are folded in a loop over such blocks.
HELD = 1 << 14
# Results of one program whose folds lie crosswise: whole lines; a sector of memory at least.
COLUMNS = 1024
SECTOR = 16
# The shortest part of an axis that is a dimension of its own, and how much of it may be empty.
SHORTEST_RUN = 32
MOST_EMPTY = 1.15
# A row is held in registers whole up to this many elements, 64 a thread of 16 warps; packed, twice
# as many by twice the warps.
LONGEST_ROW = 1 << 15
# Side of a tile that transposes; of its long one, where an axis is shorter.
SQUARE, LONGEST_SIDE = 64, 1024


def variants(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides], gpu: Gpu, base: Options = Options()
) -> list[Variant] | Refusal:
    """Ways to run the region, the most promising first; a Refusal says why there is none."""
    staged = by_residue(staged)
    single = _single(staged, strides, gpu, base)
    if isinstance(single, list) and any(v.options.product for v in single):
        return single
    needed = isinstance(single, Refusal)
    staged = without_values_on_the_way(staged)
    how = cutting(gpu, LONGEST_ROW)
    ways = partial(_single, gpu=gpu, base=base)
    phased = phased_variants(staged, strides, gpu, how, needed, ways)
    if not isinstance(phased, list):
        return single
    if not base.interpret:  # which runs one program after the other: none may wait for the next
        joined = joined_variants(staged, strides, gpu, LONGEST_ROW, base)
        phased = joined + phased[:2] if joined else phased
    phased = _packed(staged, strides, gpu, base) + phased
    if isinstance(single, Refusal):
        return phased
    few = single[0].nest.tiles < how.tiles * single[0].options.lanes
    return phased + single[:2] if few else single[:3] + phased


def _packed(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides], gpu: Gpu, base: Options
) -> list[Variant]:
    """A row of up to twice LONGEST_ROW in the registers of one program, if all that is read is of
    half types: it stays as stored between two folds."""
    made = {s.tensor for s in staged}
    read = {ld.src for s in staged for ld in s.loads if ld.src not in made}
    if any(t.dtype not in HALF for t in read):
        return []
    base = replace(base, packed=True)
    found = of_first_root(staged, lambda root: _variants_of(staged, root, strides, gpu, base))
    return [] if isinstance(found, Refusal) else found


def _single(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides], gpu: Gpu, base: Options
) -> list[Variant] | Refusal:
    """Variants of one nest, of the first result that can be its root."""

    def of_root(root: Staged) -> list[Variant] | Refusal:
        found = _variants_of(staged, root, strides, gpu, base)
        return with_walks(found, staged, root, strides, gpu, base)

    return of_first_root(staged, of_root)


def _variants_of(
    staged: tuple[Staged, ...],
    root: Staged,
    strides: dict[Tensor, Strides],
    gpu: Gpu,
    base: Options,
) -> list[Variant] | Refusal:
    staged, root = in_layout_order(staged, root, strides)
    if not any(reduces(s.body) for s in staged):
        staged, root = coalesce(staged, root, strides)
    whole = whole_axes(staged, root)
    extents = [max(a.extent, 1) for a in root.loops]
    unit = tuple(e if w else 1 for e, w in zip(extents, whole, strict=True))
    nest = build_nest(staged, root, unit)
    if isinstance(nest, Refusal):
        return nest
    try:
        kept = place(nest)
    except CannotExpress as problem:
        return problem.refusal
    if by_dot(kept):
        return product_variants(staged, root, nest, kept, strides, gpu, base)
    row = prod(power_of_two(e) for e, w in zip(extents, whole, strict=True) if w)
    if base.packed and LONGEST_ROW < row <= 2 * LONGEST_ROW:
        return [Variant(nest, replace(base, warps=2 * MOST_WARPS, fold_block=row))]
    if row > LONGEST_ROW or base.packed:
        text = f"a row of {row} elements; a program holds {LONGEST_ROW}"
        return Refusal(Rule.SCRATCH, root.tensor.name, text, {"elements": row})
    strips = strip_variants(staged, nest, kept, whole, strides, gpu, base)
    found = _single_elements(staged, root, nest, kept, whole, strides, gpu, base)
    if not strips or isinstance(found, Refusal):
        return strips or found
    if any(len(loads(r.body)) > 1 for k in kept for r in reduces(k.body)):
        return strips + found[:1]
    return found[:3] + strips[:2]  # a pool's windows cost too little for strips to pay, as a rule


def _single_elements(
    staged: tuple[Staged, ...],
    root: Staged,
    nest: Nest,
    kept: list[Kept],
    whole: list[bool],
    strides: dict[Tensor, Strides],
    gpu: Gpu,
    base: Options,
) -> list[Variant] | Refusal:
    """Variants of a nest in which each window is read by itself."""
    extents = [max(a.extent, 1) for a in root.loops]
    row = prod(power_of_two(e) for e, w in zip(extents, whole, strict=True) if w)
    crossed = None if any(whole) else _crossed_axis(root, kept, strides)
    if crossed is not None:
        return _square(staged, root, crossed, base)
    folds = [r for k in kept for r in reduces(k.body)]
    if not any(whole) and all(is_serial(r) for r in folds):
        return _blocks(staged, root, gpu, bool(folds), base)
    tiles = nest.tiles
    length = max((fold_elements(r) for r in folds), default=1)
    if any(side_by_side(r, strides) for r in folds if not is_serial(r)):
        choices = _columns(tiles, row, length, gpu)
    else:
        choices = _rows(tiles, row, length, gpu)
    return [Variant(nest, replace(base, lanes=n, warps=w, fold_block=f)) for n, w, f in choices]


def whole_axes(staged: tuple[Staged, ...], root: Staged) -> list[bool]:
    """Axes along which cutting would compute a fold again for each piece."""
    unit = tuple(1 for _ in root.loops)
    nest = build_nest(staged, root, unit)
    if isinstance(nest, Refusal):
        return axes_missing_in_outputs(staged, root)
    whole = [False] * len(root.loops)
    for st in nest.stages:
        if st.staged is root or not reduces(st.staged.body):
            continue
        seen = {a for sp in st.box for a, _ in linear(sp.origin).terms}
        for d, o in enumerate(nest.tile_axes):
            if o not in seen and root.loops[d].extent > 1:
                whole[d] = True
    return whole


def _rows(tiles: int, row: int, length: int, gpu: Gpu) -> list[tuple[int, int, int]]:
    """Lanes, warps and elements of a fold's block, for tiles of `row` elements, of which each folds
    `length` that lie side by side."""
    out = []
    enough = 1 << max((tiles // (2 * gpu.multiprocessors)).bit_length() - 1, 0)
    for block, warps in FOLD_BLOCKS if row == 1 else ROW_BLOCKS:
        wide = max(row, power_of_two(length) if length <= HELD else block)
        lanes = min(max(block // wide, 1), max(enough, FEW // wide), power_of_two(tiles))
        size = lanes * wide
        if size > block:  # one row alone: as many elements a thread
            warps = min(warps * size // block, MOST_WARPS)
        elif size < block:
            warps = max(warps * size // block, 1)
        if tiles < gpu.multiprocessors:  # nothing else runs while a thread waits for memory
            warps = max(warps, min(size // (32 * LEAST_PER_THREAD), MOST_WARPS))
        out.append((lanes, warps, max(size, LONGEST_ROW if row > 1 else 1)))
    return list(dict.fromkeys(out))


def _columns(tiles: int, row: int, length: int, gpu: Gpu) -> list[tuple[int, int, int]]:
    """The same, where neighbouring results, not neighbours within a fold, lie side by side: as many
    results as are read in whole lines and leave work for every multiprocessor."""
    enough = tiles // (2 * gpu.multiprocessors)
    most = max(min(COLUMNS // row, 1 << max(enough.bit_length() - 1, 0)), SECTOR)
    most = max(min(most, power_of_two(tiles)), 1)
    out = []
    for lanes, block, warps in (
        (most, 8192, 8),
        (most, 16384, 16),
        (most, 4096, 8),
        (max(most // 2, 1), 8192, 8),
        (max(most // 2, 1), 4096, 4),
    ):
        size = lanes * row * min(power_of_two(length), max(block // (lanes * row), 1))
        out.append((lanes, max(min(warps, size // (32 * LEAST_PER_THREAD)), 1), block))
    return list(dict.fromkeys(out))


def _blocks(
    staged: tuple[Staged, ...], root: Staged, gpu: Gpu, windows: bool, base: Options
) -> list[Variant] | Refusal:
    """Blocks of results that are computed by themselves: of as much of the last axis as fills a
    power of two, and of the axes before it."""
    extents = [max(a.extent, 1) for a in root.loops]
    total = prod(extents)
    shapes = WINDOW_BLOCKS if windows else POINTWISE_BLOCKS
    shapes = [s for s in shapes if total >= s[0] * 2 * gpu.multiprocessors] or [shapes[-1]]
    each = _per_thread(staged)
    shapes = list(dict.fromkeys((min(b, 32 * w * each), w) for b, w in shapes))
    out: list[Variant] = []
    for block, warps in shapes:
        width = _width(extents, block)
        tile = (*(1 for _ in extents[1:]), width)[-len(extents) :] if extents else ()
        nest = build_nest(staged, root, tile)
        if isinstance(nest, Refusal):
            return nest
        lanes = min(block // width, power_of_two(nest.tiles))
        out.append(Variant(nest, replace(base, lanes=max(lanes, 1), warps=warps)))
    return out


def _per_thread(staged: tuple[Staged, ...]) -> int:
    """Elements that a thread computes at most: a power of two. Its text holds the operations of
    each, so many of both take the compiler minutes, the instruction cache, and the registers (62
    operators, half of them tanh and cosine: 1,700 instructions for one element, 12,900 for 8)."""
    most = MOST_OPERATIONS / max(sum(operations(s.body) for s in staged), 1.0)
    return 1 << max(int(most).bit_length() - 1, 0)


def _width(extents: list[int], block: int) -> int:
    """Elements of the last axis that one block covers: a power of two that leaves little of it
    empty; 1 where elements are numbered through, since there is none or no other axis."""
    if sum(n > 1 for n in extents) < 2:
        return 1
    n = extents[-1]
    widths = [1 << k for k in range(SHORTEST_RUN.bit_length() - 1, block.bit_length())]
    return max((w for w in widths if ceil(n / w) * w <= MOST_EMPTY * n), default=1)


def _crossed_axis(root: Staged, kept: list[Kept], strides: dict) -> Axis | None:
    """A loop along which some input lies contiguous while the result does not: a transposition
    reads and writes whole lines only if a tile has both axes."""
    last = next((a for a in reversed(root.loops) if a.extent > 1), None)
    for ld in (ld for k in kept for ld in loads(k.body)):
        if ld.src not in strides or last is None:
            continue
        steps = {a: stride_along(ld.index, strides[ld.src], a) for a in root.loops}
        near = [a for a, n in steps.items() if n == 1 and a.extent > 1]
        if steps.get(last) not in (0, 1) and near and near[0] is not last:
            return near[0]
    return None


def _square(
    staged: tuple[Staged, ...], root: Staged, crossed: Axis, base: Options
) -> list[Variant] | Refusal:
    out = []
    last = next(a for a in reversed(root.loops) if a.extent > 1)
    for side, warps in ((SQUARE, 8), (SQUARE, 4), (SQUARE // 2, 4), (2 * SQUARE, 8)):
        short, long = sorted((crossed, last), key=lambda a: a.extent)
        few = min(side, power_of_two(short.extent))
        most = max(side * side // few, side)  # as many elements, where a few channels are one side
        sides = {short: few, long: min(most, power_of_two(long.extent), LONGEST_SIDE)}
        tile = tuple(sides.get(a, 1) for a in root.loops)
        nest = build_nest(staged, root, tile)
        if isinstance(nest, Refusal):
            return nest
        out.append(Variant(nest, replace(base, warps=warps)))
    return out
