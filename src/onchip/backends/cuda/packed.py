"""Geometry of the packed form: inputs of few channels, as the first layer of a network has.

The taps of one row of a filter, all channels of each, are one run of memory: 7 taps of 3 channels
are 21 elements. The run of each position is laid out in parts of 16 bytes, the last one filled up
with zeros. A part of 8 neighbouring positions is the matrix unit's 8 by 16 bytes, not permuted:

    shared memory of a slot: [rows of input][parts of a run][positions] of 16 bytes

An instruction multiplies two parts, wherever they lie: two of one row, or the same part of two
rows where a row has an odd number of them. Rows are laid out once and read by every position whose
filter covers them: slots hold the rows by which a tile goes on from the one above it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd, prod

from onchip.backends.cuda.geometry import (
    ALIGNED,
    Geometry,
    up,
)
from onchip.backends.cuda.packed_weights import Order, weights
from onchip.backends.cuda.problem import Config, Line, Problem
from onchip.backends.cuda.registers import MOST, launched
from onchip.ir.expr import Tensor

PART_BYTES = 16
STEPS_OF_ROW = 4  # instructions that a row of 128 bytes of weights feeds
MOST_PARTS = 8  # of a run in a slot
LOADER_WARPS = 4  # lay out input; twice as many if they hand registers on to few warpgroups
# Registers of their threads, if they hand on the others: the copy engine brings their rows, or not
LOADING = (56, 64)
OTHERS = 40  # registers, at least, of a thread that multiplies, beside what it holds
RAW_STAGES = 2  # rows that each of them has, one on its way while it lays out the other
PER_ITEM = 4  # parts, at most, of an item that a thread lays out
AT_ONCE = 2  # items

# Two parts that an instruction multiplies: (row of the filter, part) each; None: zeros.
Place = tuple[int, int]
Pair = tuple[Place, Place | None]


@dataclass(frozen=True)
class PackedGeometry(Geometry):
    """One kernel's tile of the packed form. Lines beyond the second have one position a tile."""

    @cached_property
    def line(self) -> Line:
        return self.problem.lines[0]

    @cached_property
    def down(self) -> Line:
        """The line of rows; one row where there is none."""
        lines = self.problem.lines
        return lines[1] if len(lines) > 1 else Line(1, 0, 1, cells=1)

    @property
    def patch_rows(self) -> int:
        return self.config.patch[1] if len(self.config.patch) > 1 else 1

    # ---- a run in parts ------------------------------------------------------------------------

    @property
    def part(self) -> int:
        """Elements of 16 bytes."""
        return PART_BYTES // self.problem.size

    @property
    def run(self) -> int:
        """Elements that one row of the filter reads for a position."""
        return self.line.taps * self.problem.channels

    @cached_property
    def lead(self) -> int:
        """Elements laid out before a run, as zeros, so that it starts with a whole word."""
        odd = self.problem.size == 2 and self.origin % 2 == 1 and self.step_bytes % 4 == 0
        room = self.run % self.part > 0 and self.copy_bytes >= 4
        return int(odd and room)

    @property
    def run_parts(self) -> int:
        return ceil(self.run / self.part)

    @property
    def run_chunks(self) -> int:
        """Slots that the parts of a row take, one after the other: several only where rows are not
        read again."""
        return ceil(self.run_parts / MOST_PARTS) if self.units == 1 else 1

    @cached_property
    def across_rows(self) -> bool:
        """A pair is the same part of two rows, which lie side by side in one slot."""
        odd = self.run_parts % 2 == 1 and self.down.taps > 1
        even_rows = self.advance % 2 == 0 and self.down.stride % 2 == 0
        return odd and even_rows and self.down.dilation == 1

    @cached_property
    def parts(self) -> int:
        """Of a run in a slot."""
        if self.run_chunks > 1:
            return MOST_PARTS
        return self.run_parts if self.across_rows else up(self.run_parts, 2)

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """What the instructions of a slot's chunk multiply, in order."""
        rows, inside = range(self.down.taps), range(self.parts)
        if not self.across_rows:
            return tuple(((r, j), (r, j + 1)) for r in rows for j in inside[::2])
        found: list[Pair] = [
            ((r, j), (r + 1, j)) for r in rows[: len(rows) // 2 * 2 : 2] for j in inside
        ]
        if len(rows) % 2:
            last = rows[-1]
            found += [
                ((last, j), (last, j + 1) if j + 1 < self.parts else None) for j in inside[::2]
            ]
        return tuple(found)

    @cached_property
    def k_order(self) -> tuple[tuple[int, int] | None, ...]:
        """For each element along the sum, in the order of the weights: its tap (number along the
        first line, then the second) and channel; None: zero, up to whole rows of 128 bytes."""
        found: list[tuple[int, int] | None] = []
        for chunk in range(self.run_chunks):
            for place in (p for pair in self.pairs for p in pair):
                for e in range(self.part):
                    if place is None:
                        found.append(None)
                        continue
                    row, j = place
                    at = (chunk * self.parts + j) * self.part + e - self.lead
                    tap, channel = divmod(at, self.problem.channels)
                    inside = 0 <= at < self.run
                    found.append((row * self.line.taps + tap, channel) if inside else None)
        return (*found, *[None] * (self.w_tiles * self.chunk - len(found)))

    def weights(self) -> Tensor:
        """The problem's constant weights in this order: [rows of 128 bytes, features, elements]."""
        shared = self.down.taps // 2 if self.across_rows else 0
        order = Order(self.part, self.parts, self.lead, self.run, shared, self.run_chunks > 1)
        return weights(self.problem, order, self.w_tiles, self.chunk)

    # ---- rows ----------------------------------------------------------------------------------

    @cached_property
    def hops(self) -> tuple[int, int]:
        """Positions between two tiles along the first line and down."""
        n = [c * line.hop for c, line in zip(self.cells, self.problem.lines, strict=True)]
        return n[0], n[1] if len(n) > 1 else 1

    @property
    def advance(self) -> int:
        """Rows of input by which a tile goes on."""
        return self.hops[1] * self.down.stride

    @property
    def slot_rows(self) -> int:
        """Rows of a slot: two, so that few are filled that a tile does not read."""
        return 2 if self.extent > self.advance and self.advance % 2 == 0 else self.advance

    @property
    def spent(self) -> int:
        """Slots by which a tile goes on."""
        return self.advance // self.slot_rows

    @property
    def extent(self) -> int:
        """Rows of input that a tile reads."""
        d = self.down
        return (self.patch_rows - 1) * d.stride + (d.taps - 1) * d.dilation + 1

    @property
    def units(self) -> int:
        """Slots that a tile reads."""
        return ceil(self.extent / self.slot_rows)

    @property
    def part_step(self) -> int:
        """Bytes between two parts of a row."""
        return self.columns * PART_BYTES

    @property
    def row_step(self) -> int:
        return self.parts * self.part_step

    @property
    def x_slot(self) -> int:
        return up(self.slot_rows * self.row_step, 128)

    @property
    def zero_bytes(self) -> int:
        """Of zeros that are the other half of a pair."""
        return self.part_step if any(second is None for _, second in self.pairs) else 0

    # ---- rows as they lie in memory ------------------------------------------------------------

    @cached_property
    def origin(self) -> int:
        """Element of a row of memory that the first position's run begins with."""
        lead = 0 if self.carried else self.line.lead
        return (-self.line.pad - lead * self.line.stride) * self.problem.channels

    @cached_property
    def copy_bytes(self) -> int:
        """Of one copy of a row from memory; less than 4: element by element."""
        p, size = self.problem, self.problem.size
        steps = [p.x_offset, self.line.size * p.channels, *(x.step for x in p.lines[1:])]
        if self.tiles[0] > 1:
            steps.append(self.hops[0] * self.line.stride * p.channels)
        for n in (16, 8, 4):
            if all(s * size % n == 0 for s in steps):
                return n
        return size

    @property
    def raw_before(self) -> int:
        """Elements of a raw row before the first position's run, its lead included in the run."""
        return (self.origin - self.lead) % (self.copy_bytes // self.problem.size)

    @property
    def step_bytes(self) -> int:
        """Between the runs of two positions."""
        return self.line.stride * self.problem.channels * self.problem.size

    @property
    def raw_row(self) -> int:
        """Bytes of a row of input: what a patch's runs (of one chunk) cover, and what is read past
        the last."""
        chunk = min(self.run_parts, self.parts) * PART_BYTES
        runs = (self.config.patch[0] - 1) * self.step_bytes + chunk
        read = self.raw_before * self.problem.size + runs + 4
        if self.whole_rows:
            read = max(
                read, self.line.size * self.problem.channels * self.problem.size - self.start
            )
        return up(read, 16)

    @property
    def start(self) -> int:
        """Bytes from a row's first element to a raw row's."""
        return (self.origin - self.lead - self.raw_before) * self.problem.size

    @property
    def whole_rows(self) -> bool:
        """The copy engine brings rows: tiles are as wide as the input, which begins and ends with
        whole parts."""
        whole = self.tiles[0] == 1 and self.run_chunks == 1
        return whole and self.copy_bytes == PART_BYTES and self.start <= 0

    @property
    def raw_aligned(self) -> int:
        """Bytes that the runs of all positions are aligned to."""
        return gcd(self.raw_before * self.problem.size, self.step_bytes, PART_BYTES)

    @cached_property
    def per_item(self) -> int:
        return max(n for n in range(1, PER_ITEM + 1) if self.parts % n == 0)

    # ---- pooling -------------------------------------------------------------------------------

    @property
    def carried(self) -> bool:
        """Windows of 3, every 2, from one before: folded in registers, the last row's part of the
        next window handed from tile to tile."""
        p, patch = self.problem, self.config.patch
        wanted = [(3, 2, 1), (3, 2, 1), *[(1, 1, 0)] * (len(p.lines) - 2)]
        return (
            [(x.window, x.hop, x.lead) for x in p.lines] == wanted
            and p.fold in ("max", "min")
            and all(r.pooled for r in p.results)
            and patch[0] >= p.lines[0].positions
            and patch[1] % 2 == 0
        )

    @property
    def carry_bytes(self) -> int:
        """That a warpgroup hands on: of each group of positions the two that a thread has, for two
        features, in parts of 16 bytes."""
        words = self.groups * 2 * (2 if self.wide else 1)
        several = self.carried and self.config.teams > 1
        return self.config.blocks * up(words, 4) * 128 * 4 if several else 0

    # ---- sizes ---------------------------------------------------------------------------------

    @property
    def w_tiles(self) -> int:
        return ceil(self.run_chunks * len(self.pairs) / STEPS_OF_ROW)

    @property
    def loader_warps(self) -> int:
        return LOADER_WARPS * (
            2 if self.carried and self.warpgroups <= 2 and self.problem.size == 2 else 1
        )

    @property
    def loaders(self) -> int:
        """Warps that take turns at rows: no more than the ring has, since a slot's barrier tells
        one round from the next only."""
        return min(self.loader_warps, self.config.x_stages * self.slot_rows)

    @property
    def raw_rows(self) -> int:
        """Of all warps, as they lie in memory."""
        return self.loader_warps * RAW_STAGES

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + 32 * self.loader_warps

    @property
    def needed(self) -> int:
        """Registers of a thread that multiplies, at least: its sums, the row above in float32 (in
        halves it takes the place of sums), and others."""
        above = 4 * self.groups * self.config.blocks * (self.carried and self.wide)
        return self.accumulators + above + OTHERS

    @property
    def loading(self) -> int:
        """Registers of a thread that loads, if it hands on others."""
        return LOADING[not self.whole_rows]

    @property
    def registers(self) -> int:
        """Of a thread that multiplies, with what those that load hand on: where rows are handed on,
        since ptxas gives other forms' epilogues no more than a kernel starts with."""
        if not self.carried:
            return launched(self)
        left = self.threads * launched(self) - 32 * self.loader_warps * self.loading
        return max(min(left // (128 * self.warpgroups) // 8 * 8, MOST), launched(self))

    @property
    def w_held(self) -> bool:
        """Weights stay in registers: shared memory then hands out the input only. Where rows are
        handed on: other epilogues leave too few registers."""
        words = 4 * len(self.pairs) * self.config.blocks
        return self.carried and self.run_chunks == 1 and self.needed + words <= self.registers

    @property
    def work(self) -> int:
        return prod(self.tiles) * self.feature_tiles

    @property
    def barriers(self) -> int:
        return self.w_tiles + 2 * self.config.x_stages + self.raw_rows + 3 * self.warpgroups

    @property
    def shared_bytes(self) -> int:
        return (
            ALIGNED
            + self.w_tiles * self.w_bytes
            + self.config.x_stages * self.x_slot
            + self.warpgroups * (up(self.tile_bytes, 128) + self.carry_bytes)
            + up(self.zero_bytes, 128)
            + self.raw_rows * self.raw_row
            + 8 * self.barriers
        )


def narrow(problem: Problem) -> bool:
    """Channels too few for the copy engine, which fetches 16 bytes at a time, and rows without gaps
    between them."""
    p = problem
    return p.channels * p.size % PART_BYTES > 0 and p.lines[0].step == p.channels


def geometry(problem: Problem, config: Config) -> Geometry:
    """The tile of a kernel, in the form that its channels allow."""
    return PackedGeometry(problem, config) if narrow(problem) else Geometry(problem, config)
