"""Which strips (strips.py) a region is tried with, ordered by a model of issued instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, log2, prod

from onchip.backends.triton.placement import Kept, is_serial
from onchip.backends.triton.source import Options, Variant
from onchip.backends.triton.strips import UNROLLED, distinct, window_along
from onchip.backends.triton.writer import power_of_two
from onchip.fusion.machine import Gpu
from onchip.fusion.nest import Nest, build_nest
from onchip.fusion.refusal import Refusal
from onchip.fusion.staging import Staged
from onchip.ir.expr import Reduce, Tensor, loads, reduces
from onchip.ir.index import stride_along

Strides = tuple[int, ...]

# Registers of a thread, as the model counts them.
MOST_HELD = 168
MOST_PARTS = 4
SECTOR_BYTES = 32
ACCESS_BYTES = 16
# Instructions a result beyond the windows, those of an access beside the elements it moves, and
# those of each step of a layer norm's two folds across threads.
BEHIND, BESIDE, ACROSS = 8, 2, 4
# The best strip of each length up to these is proposed: what more registers cost, a GPU says.
LENGTHS = (4, 8, 16)


@dataclass(frozen=True, slots=True)
class Window:
    """A fold whose windows overlap along a loop of the root (-1: along none of them), its
    taps there and on all other axes (rows). size: bytes of an element; shifted: the windows slide
    along what is contiguous, too."""

    loop: int
    taps: int
    rows: int
    stride: int
    dilation: int
    size: int
    shifted: bool = False

    def columns(self, results: int) -> int:
        """Distinct positions that the windows of neighbouring results read."""
        at = {t * self.stride + d * self.dilation for t in range(results) for d in range(self.taps)}
        return len(at)

    def registers(self, results: int) -> float:
        """What a row's weights and values take, for one column of the result: of all rows, where
        they are written out."""
        rows = self.rows if results * self.taps * self.rows <= UNROLLED else 1
        return self.taps + rows * self.columns(results) * self.size / 4


def strip_variants(
    staged: tuple[Staged, ...],
    nest: Nest,
    kept: list[Kept],
    whole: list[bool],
    strides: dict[Tensor, Strides],
    gpu: Gpu,
    base: Options,
) -> list[Variant]:
    """Strips of a nest of single elements, the most promising first; none if no windows overlap
    along an axis that is not contiguous, or axes but the last are folded later."""
    windows = [x for k in kept for r in reduces(k.body) if (x := _window(nest, k, r, strides))]
    if not windows or any(whole[:-1]):
        return []
    window = max(windows, key=lambda x: x.taps * x.rows)
    found: list[tuple[float, Variant]] = []
    for tile, options in _choices(nest, window, whole[-1], base):
        cut = build_nest(staged, nest.root, tile)
        if not isinstance(cut, Refusal) and distinct(cut, kept, options):
            found.append((_instructions(cut, window, options, gpu), Variant(cut, options)))
    found.sort(key=lambda x: x[0])
    return _diverse([v for _, v in found])


def _diverse(found: list[Variant]) -> list[Variant]:
    """The best one with each number of warps, and the best ones of other lengths."""
    if not found:
        return []
    best = found[0]
    out: dict[object, Variant] = {_length(best): best}
    for v in found:
        same = _shape(v) == _shape(best)
        out.setdefault(f"{v.options.warps} warps" if same else _length(v), v)
    return list(dict.fromkeys(out.values()))


def _length(v: Variant) -> int:
    assert v.options.strip is not None
    return next(n for n in LENGTHS if v.nest.tile[v.options.strip] <= n)


def _shape(v: Variant) -> tuple[int, ...]:
    """What one thread computes."""
    return (*v.nest.tile, v.options.chunk, v.options.lanes // v.options.warps)


def _window(nest: Nest, k: Kept, r: Reduce, strides: dict[Tensor, Strides]) -> Window | None:
    """The axis of a small fold along which its windows overlap: of several the one whose neighbours
    are nearest in memory, but not contiguous, as neighbours in a thread are a strip."""
    if not is_serial(r):
        return None
    reads = [ld for ld in loads(r.body) if ld.src in strides]
    size = max((ld.src.dtype.size for ld in reads), default=4)
    found: dict[int, Window] = {}
    for a, span in zip(k.stage.staged.loops, k.stage.spans, strict=True):
        slides = window_along(r, (a,))
        if slides is None:
            continue
        _, along, stride, dilation = slides
        steps = [stride_along(ld.index, strides[ld.src], a) or 0 for ld in reads]
        rows = prod(x.extent for x in r.axes) // max(along.extent, 1)
        loop = next((d for d, o in enumerate(nest.tile_axes) if o is span.origin), -1)
        found[max(map(abs, steps), default=0)] = Window(
            loop, along.extent, rows, abs(stride), abs(dilation), size
        )
    shifted = found.pop(1, None) is not None
    for _, window in sorted(found.items()):
        shares = window.columns(LENGTHS[-1]) < LENGTHS[-1] * window.taps
        if shares and 0 <= window.loop < len(nest.tile) - 1:
            return replace(window, shifted=shifted)
    return None


def _choices(
    nest: Nest, window: Window, whole: bool, base: Options
) -> Iterator[tuple[tuple[int, ...], Options]]:
    """Tiles, and lanes, warps and parts of a row for them."""
    extents = [max(a.extent, 1) for a in nest.root.loops]
    last = extents[-1]
    most, least = power_of_two(last), SECTOR_BYTES // window.size
    if whole:
        blocks = [most >> n for n in range(MOST_PARTS) if ceil(last / (most >> n)) <= MOST_PARTS]
    else:
        blocks = [n for n in (8, 16, 32, 64, 128) if least <= n <= most] or [most]
    sizes = range(2, min(LENGTHS[-1], extents[window.loop]) + 1)
    for size, block, each, warps in product(sizes, blocks, (2, 4, 8), (4, 2, 8)):
        tile = [1] * (len(extents) - 1) + [last if whole else block]
        tile[window.loop] = size
        parts = ceil(last / block) if whole else 1
        held = each * (size * parts + window.registers(size))
        lanes = warps * 32 * each // block
        if lanes and held <= MOST_HELD and each * window.size <= ACCESS_BYTES:
            chunk = block if parts > 1 else 0
            own = replace(base, strip=window.loop, chunk=chunk, lanes=lanes, warps=warps)
            yield tuple(tile), own


def _instructions(nest: Nest, x: Window, o: Options, gpu: Gpu) -> float:
    """Issued a result by one thread, in windows and behind them, as far as they fill programs."""
    assert o.strip is not None
    size, row, threads = nest.tile[o.strip], nest.tile[-1], 32 * o.warps
    chunk = o.chunk or row
    widths = [power_of_two(min(chunk, row - at)) for at in range(0, row, chunk)]
    work = 0.0
    for width in widths:
        each = max(o.lanes * width / threads, 1)
        widened = each * (x.size < 4)
        column = widened + (each if x.shifted else 1) * BESIDE + each / 4
        weights = 0 if x.shifted else x.taps * (widened + BESIDE)
        work += x.rows * (size * x.taps * each + x.columns(size) * column + weights)
        work += size * (BEHIND * each + BESIDE)
    if row == nest.root.loops[-1].extent:
        work += len(set(widths)) * size * ACROSS * log2(max(threads / o.lanes, 1))
    results = prod(max(a.extent, 1) for a in nest.root.loops) / max(nest.tiles, 1) * o.lanes
    idle = max(2 * gpu.multiprocessors * o.lanes / max(nest.tiles, 1), 1)
    return work * threads / results * idle
