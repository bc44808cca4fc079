"""Tiles of a kernel with a matrix product: rows, columns and steps of K of one program.

A model of one multiprocessor puts them in order. It is far from exact, but it tells a tile that
starves the tensor cores, spills, or leaves multiprocessors idle from one that does not; the first
few are built and timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, prod

from onchip.backends.triton import steps
from onchip.backends.triton.placement import (
    SMALLEST_DOT,
    Kept,
    contractions,
    is_serial,
    sides,
)
from onchip.backends.triton.source import Options, Variant
from onchip.backends.triton.writer import power_of_two
from onchip.fusion.contraction import Contraction
from onchip.fusion.machine import HOPPER, Gpu
from onchip.fusion.nest import Nest, build_nest
from onchip.fusion.refusal import Refusal
from onchip.fusion.staging import Staged
from onchip.ir.dtype import DType
from onchip.ir.expr import Load, Tensor, loads, reduces

Strides = tuple[int, ...]

ROWS = (16, 32, 64, 128, 256)
COLUMNS = (16, 32, 64, 128, 256)
DEPTHS = (16, 32, 64, 128)
STAGES = (2, 3, 4, 5)
SPLITS = (2, 4, 8, 16, 32)
MOST = 6
MOST_ALIKE = 2  # of the same rows and columns

# One multiprocessor: bytes a nanosecond from the last cache; nanoseconds until a load is there and
# for the barriers of a step; clocks a nanosecond.
L2_BYTES = 40.0
LATENCY = 700.0
SYNC = 120.0
CLOCK = 1.7

# Judgements. Registers of a thread: for sums, and in all. Multiply-adds of a thread in one step of
# a product without tensor cores: Triton unrolls it.
MOST_SUMS = 128
MOST_REGISTERS = 232
MOST_UNROLLED = 1024
# FLOPs a nanosecond of a multiprocessor without tensor cores.
SCALAR_RATE = 435.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A product as its tiles see it. rows: of one tile of the root; lanes: such tiles; columns:
    that a program holds whole (1: they can be cut); width: columns that can be cut; depth, run:
    elements of K, and those side by side; repeats: how often all of it happens (batches); times:
    how often one program computes it (an overlapping window); size: bytes of an operand's element;
    rate: FLOPs a nanosecond of one multiprocessor's tensor cores; split: operands are split into
    three TF32 products in registers; shared: several programs may share K; branches: loops of which
    a program takes one, with operands of its own each (Triton gives them no common memory)."""

    rows: int
    lanes: int
    columns: int
    width: int
    depth: int
    run: int
    repeats: int
    times: int
    size: int
    rate: float
    split: bool
    shared: bool
    branches: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows, columns and elements of K of one step; warps and pipeline stages of a program;
    programs that share the K of a tile."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    split: int = 1

    def shared_bytes(self, s: Shape) -> int:
        """Of the operands in flight: Triton allocates all stages, however few steps there are."""
        flight = self.stages if s.depth > self.depth else 1
        return flight * (self.rows + self.columns) * self.depth * s.size * s.branches

    def registers(self, s: Shape) -> int:
        """Of one thread: sums (operands that are split have sums of their own small parts, too),
        operands that are split, and addresses."""
        threads = 32 * self.warps
        sums = self.rows * self.columns // threads
        split = sums + 2 * self.rows * self.depth // threads if s.split else 0
        return sums + split + 40


def product_variants(
    staged: tuple[Staged, ...],
    root: Staged,
    unit: Nest,
    kept: list[Kept],
    strides: dict[Tensor, Strides],
    gpu: Gpu,
    base: Options,
) -> list[Variant] | Refusal:
    """Variants of a nest whose tile `unit` is cut into single elements where it can be cut."""
    shape = _shape(unit, kept, strides, gpu, base)
    out: list[Variant] = []
    for c in _best(shape, gpu):
        nest = build_nest(staged, root, _tile(unit, c.columns))
        if isinstance(nest, Refusal):
            return nest
        options = replace(
            base,
            lanes=max(c.rows // shape.rows, 1),
            warps=c.warps,
            stages=c.stages,
            k_block=c.depth,
            product=True,
            split=c.split,
        )
        out.append(Variant(nest, options))
    return out


def _best(shape: Shape, gpu: Gpu) -> list[Choice]:
    """The most promising choices, unlike each other; one of them does not split K."""
    ranked = sorted(_choices(shape, gpu), key=lambda c: (_nanoseconds(shape, c, gpu), c.stages))
    seen: list[Choice] = []
    for c in ranked:
        alike = [x for x in seen if (x.rows, x.columns) == (c.rows, c.columns)]
        if len(alike) == MOST_ALIKE or any(
            (x.depth, x.warps, x.split) == (c.depth, c.warps, c.split) for x in alike
        ):
            continue
        seen.append(c)
        if len(seen) == MOST:
            break
    if all(c.split > 1 for c in seen):
        seen[-1] = next(c for c in ranked if c.split == 1)
    return seen


def by_dot(kept: list[Kept]) -> bool:
    """Whether tl.dot is the way to compute the products of a nest. One row or one column is a fold
    that is bound by memory, so are a few taps of each channel by itself, and there are no tensor
    cores for float64 in Triton."""
    found = contractions(kept)
    return bool(found) and all(
        c.reduce.dtype is DType.F32
        and prod(a.extent for a in c.m_axes) > 1
        and prod(a.extent for a in c.n_axes) > 1
        and not _channel_by_channel(c)
        for _, c in found
    )


def _channel_by_channel(c: Contraction) -> bool:
    """A depthwise transposed convolution: columns are its remainders, K is a small window."""
    small = all(prod(a.extent for a in s) < SMALLEST_DOT for s in (c.n_axes, c.k_axes))
    return small and prod(a.extent for a in c.b_axes) > 1 and is_serial(c.reduce)


def laid_out(
    kept: list[Kept], strides: dict[Tensor, Strides], free: frozenset[Tensor]
) -> dict[Tensor, Strides]:
    """Strides of the constants that products read where others than they have suit them."""
    out: dict[Tensor, Strides] = {}
    for _, c in contractions(kept):
        for t, wanted in steps.laid_out(c, strides, free).items():
            out.setdefault(t, wanted)
    return out


def rounded(kept: list[Kept], free: frozenset[Tensor]) -> frozenset[Tensor]:
    """The float32 constants that are an operand by themselves, and read by nothing else."""
    times = Counter(ld.src for k in kept for ld in loads(k.body))
    sides = (e for _, c in contractions(kept) for e in (c.left, c.right))
    return frozenset(
        e.src
        for e in sides
        if isinstance(e, Load) and e.src in free and e.src.dtype is DType.F32 and times[e.src] == 1
    )


# ---- the shape of a product --------------------------------------------------------------------


def _shape(
    unit: Nest, kept: list[Kept], strides: dict[Tensor, Strides], gpu: Gpu, base: Options
) -> Shape:
    """Of the product of a nest that takes longest."""
    found = contractions(kept)
    k, c = max(
        found, key=lambda x: prod(a.extent for a in (*x[1].m_axes, *x[1].n_axes, *x[1].k_axes))
    )
    what = sides(unit)
    counts = {"rows": 1, "columns": 1, "batch": 1}
    for a, o, t in zip(unit.root.loops, unit.tile_axes, unit.tile, strict=True):
        counts[what.get(o, "rows")] *= ceil(max(a.extent, 1) / t)
    serial = {a for r in reduces(k.body) if is_serial(r) for a in r.axes}
    spans = {a: s.extent for a, s in zip(k.stage.staged.loops, k.stage.spans, strict=True)}
    rows, columns = (
        prod(power_of_two(spans.get(a, a.extent)) for a in side if a not in serial)
        for side in (c.m_axes, c.n_axes)
    )
    _, run = steps.split_k(c, strides)
    kind = steps.operand_type(c, k.stage.tensor.dtype)
    return Shape(
        rows=rows,
        lanes=counts["rows"],
        columns=columns,
        width=counts["columns"],
        depth=max(prod(a.extent for a in c.k_axes), 1),
        run=max(prod(a.extent for a in run), 1),
        repeats=counts["batch"],
        times=prod(a.extent for a in serial),
        size=kind.size,
        rate=_rate(kind, base.precision, gpu),
        split=kind is DType.F32 and base.precision == "tf32x3",
        shared=len(found) == 1 and not serial,
        branches=sum(x is k for x, _ in found),
    )


def _rate(kind: DType, precision: str, gpu: Gpu) -> float:
    """FLOPs a nanosecond of one multiprocessor: dense, at about 1.7 GHz."""
    half = {80: 2900.0, 90: 7000.0, 100: 14000.0}.get(gpu.capability // 10 * 10, 2900.0)
    if kind is not DType.F32:
        return half
    return {"tf32": half / 2, "tf32x3": half / 6}.get(precision, SCALAR_RATE)


def _tile(unit: Nest, columns: int) -> tuple[int, ...]:
    """The tile with so many columns, the last axes first."""
    what, tile, room = sides(unit), list(unit.tile), columns
    places = list(zip(unit.root.loops, unit.tile_axes, strict=True))
    for d in reversed(range(len(tile))):
        a, o = places[d]
        if what.get(o) == "columns" and tile[d] == 1 and room > 1:
            tile[d] = min(room, power_of_two(a.extent))
            room //= tile[d]
    return tuple(tile)


# ---- the model ---------------------------------------------------------------------------------


def _choices(s: Shape, gpu: Gpu) -> Iterator[Choice]:
    """What fits a multiprocessor; at least the smallest tile."""
    fits = False
    for c in _all(s, gpu):
        sums = c.rows * c.columns // (32 * c.warps)
        # from sm_100 on, sums come from tensor memory all at once, beside what becomes of them
        room = MOST_SUMS if gpu.capability < 100 else MOST_SUMS // 2
        if sums > room or c.registers(s) > MOST_REGISTERS:
            continue
        if s.rate == SCALAR_RATE and sums * c.depth > MOST_UNROLLED:
            continue
        if c.stages == 2 and replace(c, stages=3).shared_bytes(s) <= gpu.shared_bytes:
            continue  # hides less, and nothing else needs the memory
        if c.shared_bytes(s) <= gpu.shared_bytes:
            fits = True
            yield c
    if not fits:
        yield min(_all(s, gpu), key=lambda c: (c.registers(s), c.shared_bytes(s)))


def _all(s: Shape, gpu: Gpu) -> Iterator[Choice]:
    least = max(s.rows, SMALLEST_DOT)
    most = max(power_of_two(s.lanes) * s.rows, least)
    rows = [r for r in ROWS if least <= r <= most] or [least]
    width = power_of_two(s.width)
    columns = (
        [c for c in COLUMNS if c <= max(width, SMALLEST_DOT)]
        if s.columns == 1
        else [max(s.columns, SMALLEST_DOT)]
    )
    depth = s.depth if s.run < steps.SHORTEST_RUN else s.run
    depths = sorted({steps.step_width(depth, d) for d in DEPTHS})
    for r in rows:
        for c in columns:
            for k in depths:
                for warps in _warps(r * c):
                    for stages in STAGES:
                        for split in _splits(s, r, c, k, gpu):
                            yield Choice(r, c, k, warps, stages, split)


def _warps(elements: int) -> list[int]:
    """Warps of a program: 32 to 128 sums a thread."""
    return [w for w in (4, 8) if w == 4 or elements >= 32 * 32 * w]


def _splits(s: Shape, rows: int, columns: int, depth: int, gpu: Gpu) -> list[int]:
    """In how many parts K may go where there are too few tiles for the multiprocessors."""
    tiles, count = _tiles(s, rows, columns), ceil(s.depth / depth)
    fewer = [n for n in SPLITS if n * tiles <= 2 * gpu.multiprocessors and 2 * n <= count]
    return [1, *fewer] if s.shared else [1]


def _tiles(s: Shape, rows: int, columns: int) -> int:
    across = s.columns if s.columns > 1 else s.width
    return s.repeats * ceil(s.lanes * s.rows / rows) * ceil(across / columns)


def _nanoseconds(s: Shape, c: Choice, gpu: Gpu) -> float:
    """Of the whole kernel."""
    programs = _tiles(s, c.rows, c.columns) * c.split
    together = _together(s, c, gpu)
    here = min(together, ceil(programs / gpu.multiprocessors))
    busy = 2.0 * c.rows * c.columns * c.depth / (s.rate * _efficiency(c, gpu))
    elements = (c.rows + c.columns) * c.depth
    moving = elements * s.size / L2_BYTES
    # loads in flight hide each other's latency; barriers and waits are hidden by other programs.
    # A warpgroup's products run behind, so that their operands' buffers are not free yet.
    flight = c.stages - 1 if gpu.capability < HOPPER else max(c.stages - 2, 0.5)
    waiting = LATENCY / (flight * here)
    issued = 60 + elements / (32 * c.warps) * (s.size / 16 * 10 + 6 * s.split)
    step = max(busy, moving, waiting, issued * c.warps / 4 / CLOCK) + SYNC / here
    ends = 2 * LATENCY / here + c.rows * c.columns * 4 / L2_BYTES
    share = ceil(programs / (gpu.multiprocessors * here)) * here
    if c.split > 1:  # the last one waits for the others, and reads what all have
        ends += 2 * LATENCY + c.split * (c.rows * c.columns * 4 / L2_BYTES + LATENCY / 8)
    return share * (ceil(ceil(s.depth / c.depth) / c.split) * s.times * step + ends)


def _together(s: Shape, c: Choice, gpu: Gpu) -> int:
    """Programs that a multiprocessor holds at once."""
    by_registers = (1 << 16) // (32 * c.warps * min(c.registers(s) + 30, 255))
    return max(min(by_registers, gpu.shared_bytes // max(c.shared_bytes(s), 1), 16), 1)


def _efficiency(c: Choice, gpu: Gpu) -> float:
    """Share of the tensor cores' rate: a warpgroup multiplies 64 rows, and reads operands from
    shared memory as fast as it multiplies from 128 columns on."""
    if gpu.capability < HOPPER:
        return 0.8 if c.rows * c.columns >= 64 * 64 * c.warps // 4 else 0.5
    if c.rows < 64 or c.rows < 16 * c.warps:
        return 0.3 * min(c.columns, 64) / 64
    return 0.8 * min(c.columns, 128) / 128 if c.columns < 128 else 0.8
