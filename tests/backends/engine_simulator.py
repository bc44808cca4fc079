"""The tensor-core engine, element by element, in numpy: boxes of the copy engine in a permuted
shared memory that is addressed in bytes, operands by start address and distance of groups, sums as
they lie in registers, tiles of results, and the boxes in which they leave.

It follows the geometry and the PTX ISA, not the text of the kernel. Whatever has not been written
is NaN, so that a row that matters and is stale shows in the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from tests.backends.engine_problems import Values

from onchip.backends.cuda.classes import class_taps
from onchip.backends.cuda.geometry import BLOCK, GROUP, LINE_BYTES, Geometry
from onchip.backends.cuda.problem import Config, Problem

START = 1024 + 48  # of a program's shared memory: any multiple of 16


def permuted(address: np.ndarray, row: int) -> np.ndarray:
    """Where a byte lies if rows of `row` bytes are permuted (PTX ISA, swizzling modes)."""
    mask = {128: 7, 64: 3, 32: 1}[row]
    return address ^ (((address >> 7) & mask) << 4)


class Shared:
    """Shared memory of one program, in elements of `size` bytes."""

    def __init__(self, nbytes: int, size: int) -> None:
        self.size, self.values = size, np.full(nbytes // size, np.nan)

    def write(self, address: np.ndarray, values: np.ndarray) -> None:
        self.values[address // self.size] = values

    def read(self, address: np.ndarray) -> np.ndarray:
        return self.values[address // self.size]


@dataclass(frozen=True)
class Box:
    """A copy's place: inside of the tensor or not, and which elements, for each dimension."""

    indices: tuple[np.ndarray, ...]
    sizes: tuple[int, ...]

    def inside(self) -> np.ndarray:
        """Outermost first."""
        there = np.ones((), bool)
        for n, (index, size) in enumerate(zip(self.indices, self.sizes, strict=True)):
            mine = (index >= 0) & (index < size)
            there = there & mine.reshape(-1, *(1,) * n)
        return there

    def at(self, steps: tuple[int, ...]) -> np.ndarray:
        where = np.zeros((), int)
        for n, (index, step) in enumerate(zip(self.indices, steps, strict=True)):
            where = where + (index * step).reshape(-1, *(1,) * n)
        return where


def fetched(memory: np.ndarray, box: Box, steps: tuple[int, ...], offset: int = 0) -> np.ndarray:
    """A box as rows of its innermost dimension; zero outside of the tensor."""
    there = box.inside()
    at = np.where(there, offset + box.at(steps), 0)
    return np.where(there, memory[at], 0.0).reshape(-1, len(box.indices[0]))


@dataclass(frozen=True)
class Tile:
    part: int
    feature: int
    batch: int
    cell: tuple[int, ...]
    position: tuple[int, ...]


class Simulator:
    """One kernel. Results are summed into `results` and counted in `stored`: [batch, lines
    outermost first, features]."""

    def __init__(self, p: Problem, c: Config, multiprocessors: int, v: Values) -> None:
        self.p, self.c, self.v, self.g = p, c, v, Geometry(p, c)
        self.multiprocessors = multiprocessors
        shape = p.results[0].tensor.shape
        self.results, self.stored = np.zeros(shape), np.zeros(shape, int)
        self.memory_of_weights = self._packed() if p.w_constant else v.w[:, :, 0].ravel()
        self.pooled = p.results[0].pooled and p.pools
        self.view, self.whole = View(self.g, self.pooled), View(self.g, False)
        g = self.g
        strips, row = np.array(g.strips), np.arange(GROUP)
        groups = np.arange(g.groups) * g.group_rows
        self.rows_of_columns = (strips[:, None, None] + groups[:, None] + row).ravel()
        # as instructions read them: 32 bytes each
        self.bytes_of_channels = np.arange(g.chunk) * p.size

    def _packed(self) -> np.ndarray:
        p, g = self.p, self.g
        w = np.zeros((p.batch, p.features, p.taps, g.chunks * g.chunk))
        w[..., : p.channels] = self.v.w
        w = w.reshape(p.batch, p.features, p.taps, g.chunks, g.chunk)
        return w.transpose(0, 2, 3, 1, 4).ravel()

    # ---- tiles ---------------------------------------------------------------------------------

    @property
    def clusters(self) -> int:
        """Of the launch."""
        g, c = self.g, self.c
        if c.k_split > 1:
            return g.work
        most = self.multiprocessors // c.cluster
        if not c.w_stages:
            features = -(-g.feature_tiles // c.x_shared)
            most = max(most // features, 1) * features
        return min(g.work, most)

    def tile(self, n: int, rank: int) -> Tile:
        """A cluster's n-th tile, as its program of this rank has it."""
        g, p, c = self.g, self.p, self.c
        features = -(-g.feature_tiles // c.x_shared)
        positions = -(-prod(g.tiles) // c.w_shared)
        near = features
        if c.w_stages:
            near = max(k for k in range(1, 17) if features % k == 0)
        rest, feature = divmod(n, near)
        rest, mine = divmod(rest, p.classes)
        rest, place = divmod(rest, positions)
        batch, group = divmod(rest, features // near)
        if p.classes > 1:
            turn = max(self.clusters // (near * p.classes), 1)
            batch = (mine + place // turn) % p.classes
        feature = (group * near + feature) * c.x_shared + rank * (c.x_shared > 1)
        place = place * c.w_shared + rank * (c.w_shared > 1)
        at = []
        for tiles in g.tiles[:-1]:
            place, mine = divmod(place, tiles)
            at.append(mine)
        cell = tuple(a * k for a, k in zip([*at, place], g.cells, strict=True))
        position = tuple(q * x.hop - x.lead for q, x in zip(cell, p.lines, strict=True))
        part = rank * (c.k_split > 1)
        return Tile(part, feature * g.tile_features, batch, cell, position)

    def steps(self, t: Tile) -> list[tuple[int, int, tuple[int, int], bool]]:
        """(chunk of channels, phase, tap, the first of its chunk) of a tile's part."""
        g, p = self.g, self.p
        first = t.part * g.steps // self.c.k_split
        last = (t.part + 1) * g.steps // self.c.k_split
        found = []
        for c in range(g.chunks):
            number = c * p.taps
            for phase, has in enumerate(g.phases):
                fresh = True
                for tap in class_taps(g)[t.batch] if p.unlike else has.taps:
                    if first <= number < last:
                        found.append((c, phase, tap, fresh))
                        fresh = False
                    number += 1
        return found

    # ---- one program ---------------------------------------------------------------------------

    def run(self) -> None:
        for cluster in range(self.clusters):
            mine = range(cluster, self.g.work, self.clusters)
            sums = [list(self.products(mine, rank)) for rank in range(self.c.cluster)]
            for n, *parts in zip(mine, *sums, strict=True):
                if self.c.k_split > 1:
                    parts = [np.sum(parts, 0)]
                for rank, total in enumerate(parts):
                    self.finish(self.tile(n, rank), total)

    def products(self, mine: range, rank: int) -> Iterator[np.ndarray]:
        """The sums of one program's tiles."""
        shared = Shared(START + self.g.shared_bytes, self.p.size)
        kept: dict[tuple[int, int], int] = {}
        x_slot = w_slot = slot = 0
        for n in mine:
            t = self.tile(n, rank)
            sums = np.zeros((self.g.tile_features, len(self.rows_of_columns)))
            for c, phase, (rows, tap), first in self.steps(t):
                if first:
                    slot, x_slot = x_slot, (x_slot + 1) % self.c.x_stages
                    self.fetch_input(shared, n, rank, c, phase, slot)
                if self.c.w_stages:
                    weights, w_slot = w_slot, (w_slot + 1) % self.c.w_stages
                    self.fetch_weights(shared, n, rank, c, tap, weights)
                elif (c, tap) not in kept:
                    weights = kept[c, tap] = len(kept)
                    self.fetch_weights(shared, n, rank, c, tap, weights)
                else:
                    weights = kept[c, tap]
                self.multiply(shared, sums, weights, slot, rows)
            yield sums

    @property
    def w_start(self) -> int:
        return -(-START // 1024) * 1024

    @property
    def x_start(self) -> int:
        return self.w_start + self.g.w_tiles * self.g.w_bytes

    @property
    def out_start(self) -> int:
        return self.x_start + self.c.x_stages * self.g.x_slot

    def place(self, shared: Shared, to: int, values: np.ndarray) -> None:
        """A box's rows to shared memory, from address `to` on."""
        assert to % 128 == 0, f"a permuted box at {to}: the copy engine wants multiples of 128"
        row = self.c.row_bytes
        at = to + np.arange(len(values))[:, None] * row + self.bytes_of_channels
        shared.write(permuted(at, row), values)

    def fetch_input(self, shared: Shared, n: int, rank: int, c: int, phase: int, slot: int) -> None:
        """A chunk: each program that shares it fetches some of its pieces for all."""
        g, p = self.g, self.p
        to = self.x_start + slot * g.x_slot
        shared.write(to + np.arange(g.x_slot // p.size) * p.size, np.array(np.nan))
        start, nbytes = g.phases[phase].start, 0
        each = g.pieces // self.c.x_shared
        assert each * self.c.x_shared == g.pieces
        for piece in range(g.pieces):
            t = self.tile(n, piece // each if self.c.x_shared > 1 else rank)
            indices = [c * g.chunk + np.arange(g.chunk)]
            for k, (q, x, s, box) in enumerate(
                zip(t.position, p.lines, start, g.x_box, strict=True)
            ):
                assert box <= 256, "a box is at most 256 elements long"
                first = q * x.stride + s + piece * g.piece * (k == g.outermost)
                first += x.shifts[p.class_of(t.batch)[k]] if x.shifts else 0
                indices.append(first + np.arange(0, box, x.stride))
            steps = (1, *(x.step for x in p.lines))
            box = Box(tuple(indices), (p.channels, *(x.size for x in p.lines)))
            values = fetched(self.v.x, box, steps, p.x_offset + t.batch * p.x_batch)
            self.place(shared, to + piece * (g.x_bytes // g.pieces), values)
            nbytes += values.size * p.size
        assert nbytes == g.x_bytes, "the barrier waits for other bytes than are copied"
        assert nbytes <= g.x_slot

    def fetch_weights(self, shared: Shared, n: int, rank: int, c: int, tap: int, slot: int) -> None:
        """A tile of weights: each program that shares it fetches some features for all."""
        g, p = self.g, self.p
        shares, nbytes = self.c.w_shared, 0
        each = g.tile_features // shares
        for share in range(shares):
            t = self.tile(n, share if shares > 1 else rank)
            features = t.feature + share * each + np.arange(each)
            if p.w_constant:
                rows = p.batch * p.taps * g.chunks * p.features
                features = features + ((t.batch * p.taps + tap) * g.chunks + c) * p.features
                box = Box((np.arange(g.chunk), features), (g.chunk, rows))
                values = fetched(self.memory_of_weights, box, (1, g.chunk))
            else:
                box = Box((c * g.chunk + np.arange(g.chunk), features), (p.channels, p.features))
                offset = p.w_offset + t.batch * p.w_batch
                values = fetched(self.memory_of_weights, box, (1, p.w_step), offset)
            to = self.w_start + slot * g.w_bytes + share * (g.w_bytes // shares)
            self.place(shared, to, values)
            nbytes += values.size * p.size
        assert slot < g.w_tiles
        assert nbytes == g.w_bytes

    def multiply(self, shared: Shared, sums: np.ndarray, w: int, x: int, tap_rows: int) -> None:
        """One step: the operands of all instructions, as their addresses say."""
        g, row = self.g, self.c.row_bytes
        a_rows = np.arange(g.tile_features)
        a = self.w_start + w * g.w_bytes + a_rows[:, None] * row + self.bytes_of_channels
        start = self.x_start + x * g.x_slot
        b_rows = tap_rows + self.rows_of_columns
        b = start + b_rows[:, None] * row + self.bytes_of_channels
        assert b.max() < start + g.x_bytes, "a column reads behind its chunk"
        assert g.group_rows * row < 1 << 18, "a distance of groups has 14 bits of 16 bytes"
        left, right = shared.read(permuted(a, row)), shared.read(permuted(b, row))
        sums += left @ right.T

    # ---- epilogue ------------------------------------------------------------------------------

    def finish(self, t: Tile, total: np.ndarray) -> None:
        size = self.p.results[0].tensor.dtype.size
        for group in range(self.c.split):
            blocks = []
            for m in range(self.c.blocks):
                first = (group * self.c.blocks + m) * BLOCK
                blocks.append(registers(total[first : first + BLOCK], self.g))
            base = self.out_start + group * self.g.tile_bytes
            for m, block in enumerate(blocks):
                feature = t.feature + (group * self.c.blocks + m) * BLOCK
                if self.g.staged and self.pooled:
                    self.fold_staged(t, feature, block, base)
                elif self.p.results[0].tile:
                    self.store_tile(t, feature, block, base, size, m)
                else:
                    self.store_each(t, feature, block)

    def values(self, view: View, block: np.ndarray) -> np.ndarray:
        """[thread, slot, h, e]: what each thread holds of a view."""
        return FOLDS[self.p.fold if view.pooled else ""](block[:, view.sources], -1)

    def read_tile(self, t: Tile, feature: int, base: int, size: int) -> Shared:
        """What the epilogue reads, in shared memory."""
        view, shared = self.view, Shared(base + 2 * self.view.padded * LINE_BYTES, size)
        wide = LINE_BYTES // size
        for half in range(size // 2):
            box = self.result_box(t, view, feature + half * wide, wide)
            values = fetched(self.v.residual.ravel(), box, self.result_steps, self.result_at(t))
            to = base + half * view.padded * LINE_BYTES
            at = to + np.arange(len(values))[:, None] * LINE_BYTES + np.arange(wide) * size
            shared.write(permuted(at, 128), values)
        return shared

    def result_box(self, t: Tile, view: View, feature: int, wide: int) -> Box:
        first = t.cell if view.pooled else t.position
        ranges = [f + np.arange(n) for f, n in zip(first, view.extents, strict=True)]
        return Box((feature + np.arange(wide), *ranges), (self.p.features, *self.sizes(t, view)))

    def sizes(self, t: Tile, view: View) -> tuple[int, ...]:
        """Cells along each line, or the positions that a tile's class has."""
        return view.totals if view.pooled else self.p.lengths_of(t.batch)

    @property
    def result_steps(self) -> tuple[int, ...]:
        """Elements between two features, and two positions along each line: of a class, if there
        are some."""
        classes = (1, *(x.classes for x in self.p.lines))
        return tuple(s * n for s, n in zip(self.whole_steps, classes, strict=True))

    @property
    def whole_steps(self) -> tuple[int, ...]:
        shape = self.results.shape[:0:-1]
        return tuple(prod(shape[:n]) for n in range(len(shape)))

    def result_at(self, t: Tile) -> int:
        if self.p.classes == 1:
            return t.batch * prod(self.results.shape[1:])
        places = zip(self.p.class_of(t.batch), self.whole_steps[1:], strict=True)
        return sum(c * s for c, s in places)

    def store_tile(
        self, t: Tile, feature: int, block: np.ndarray, base: int, size: int, m: int
    ) -> None:
        """A block of features through shared memory, by boxes."""
        view, wide = self.view, LINE_BYTES // size
        base += m * self.g.result_bytes(view.rows, size)
        shared = Shared(base + 2 * view.padded * LINE_BYTES, size)
        where = base + (view.halves if size == 2 else view.words)
        values = self.values(view, block)
        if self.p.reads:
            values = values + self.read_tile(t, feature, base, size).read(where)
        shared.write(where, values)
        for half in range(size // 2):
            if feature + half * wide >= self.p.features:
                continue
            box = self.result_box(t, view, feature + half * wide, wide)
            start = base + half * view.padded * LINE_BYTES
            rows = np.arange(prod(view.extents))[:, None]
            at = permuted(start + rows * LINE_BYTES + np.arange(wide) * size, 128)
            there = box.inside()
            to = (self.result_at(t) + box.at(self.result_steps))[there]
            self.store(to, shared.read(at).reshape(there.shape)[there])

    def store_each(self, t: Tile, feature: int, block: np.ndarray) -> None:
        view = self.view
        first = t.cell if view.pooled else t.position
        there = feature + view.features < self.p.features
        to = self.result_at(t) + feature + view.features
        for n, local in enumerate(view.locals):
            at = first[n] + local
            there = there & (at >= 0) & (at < self.sizes(t, view)[n])
            to = to + at * self.result_steps[n + 1]
        self.store(to[there], self.values(view, block)[there])

    def store(self, to: np.ndarray, values: np.ndarray) -> None:
        np.add.at(self.stored.ravel(), to, 1)
        self.results.ravel()[to] = values

    def fold_staged(self, t: Tile, feature: int, block: np.ndarray, base: int) -> None:
        """Positions to shared memory, then each cell from its window."""
        g, p, view = self.g, self.p, self.whole
        size = 4 if g.wide else 2
        wide = LINE_BYTES // size
        shared = Shared(base + 2 * view.padded * LINE_BYTES, size)
        shared.write(base + (view.words if g.wide else view.halves), self.values(view, block))
        columns = np.arange(min(BLOCK, p.features - feature))
        for cell in np.ndindex(*g.cells[::-1]):
            at = [q + o for q, o in zip(cell[::-1], t.cell, strict=True)]
            if any(q >= x.cells for q, x in zip(at, p.lines, strict=True)):
                continue
            found = []
            for i in product(*(range(x.window) for x in p.lines)):
                local = [q * x.hop + k for q, x, k in zip(cell[::-1], p.lines, i, strict=True)]
                real = [o + q for o, q in zip(t.position, local, strict=True)]
                if all(0 <= q < x.positions for q, x in zip(real, p.lines, strict=True)):
                    row = sum(q * prod(self.c.patch[:n]) for n, q in enumerate(local))
                    start = base + (columns // wide) * view.padded * LINE_BYTES
                    found.append(
                        shared.read(permuted(start + row * LINE_BYTES + columns % wide * size, 128))
                    )
            to = self.result_at(t) + feature + columns
            to = to + sum(q * s for q, s in zip(at, self.result_steps[1:], strict=True))
            if len(columns):
                self.store(to, FOLDS[p.fold](np.stack(found), 0))


FOLDS = {"max": np.max, "min": np.min, "sum": np.sum, "": lambda x, axis: x.squeeze(axis)}


# ---- registers ---------------------------------------------------------------------------------


def registers(block: np.ndarray, g: Geometry) -> np.ndarray:
    """[thread, register] of 64 features by all columns (PTX ISA, wgmma's accumulator): strips one
    after the other, each with 4 registers for each group of 8 columns."""
    thread = np.arange(128)[:, None]
    register = np.arange(g.columns // 2)
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    strips = np.arange(len(g.strips))[:, None] * g.columns
    return block[row[:, None], strips + column[:, None]].reshape(128, -1)


class View:
    """What threads hold of the positions of a tile, or of its cells: slots of 8 neighbours along
    the first line (two a thread, `e`), or of 4, each folded from a pair; features 8 apart (`h`).

    sources    [slot, h, e, window]: registers
    halves, words   [thread, slot, h, e]: bytes from a tile's start, of 2 and 4 byte elements
    features, locals   the same: which feature, and where along each line
    """

    def __init__(self, g: Geometry, pooled: bool) -> None:
        p, patch = g.problem, g.config.patch
        self.pooled = pooled
        self.extents = g.cells if pooled else patch
        self.totals = tuple(x.cells if pooled else x.positions for x in p.lines)
        self.rows = prod(self.extents)
        self.padded = -(-self.rows // GROUP) * GROUP
        if pooled and g.staged:
            return
        windows = [x.window if pooled else 1 for x in p.lines]
        pairs = windows[0] == 2
        unit, across = (4, patch[0] // 8) if pairs else (8, patch[0] // 8)
        slots = self.rows // unit
        outer = list(np.ndindex(*self.extents[:0:-1]))
        per_strip = g.columns // 2
        sources = np.zeros((slots, 2, unit // 4, prod(windows)), int)
        for slot in range(slots):
            place = outer[slot // across][::-1]
            inner = slot % across
            for number, i in enumerate(np.ndindex(*windows[::-1])):
                i0, *more = i[::-1]
                at = [q * w + k for q, w, k in zip(place, windows[1:], more, strict=True)]
                row = sum(q * prod(patch[1:n]) for n, q in enumerate(at, 1))
                if g.config.along == 0:
                    strip, group = row, inner
                else:
                    strip, group = row // patch[1] * across + inner, at[0]
                for h, e in product(range(2), range(unit // 4)):
                    register = 4 * group + 2 * h + (i0 if pairs else e)
                    sources[slot, h, e, number] = strip * per_strip + register
        self.sources = sources
        thread = np.arange(128)[:, None, None, None]
        slot = np.arange(slots)[:, None, None]
        h, e = np.arange(2)[:, None], np.arange(unit // 4)
        lane, warp = thread % 32, thread // 32
        self.features = 16 * warp + 8 * h + lane // 4 + 0 * (slot + e)
        row = unit * slot + unit // 4 * (lane % 4) + e + 0 * h
        rest, locals_ = (
            slot // across,
            [unit * (slot % across) + unit // 4 * (lane % 4) + e + 0 * h],
        )
        for extent in self.extents[1:]:
            locals_.append(rest % extent + 0 * row)
            rest = rest // extent
        self.locals = locals_
        assert np.array_equal(row, sum(q * prod(self.extents[:n]) for n, q in enumerate(locals_)))
        half = self.features // 32 * (self.padded * LINE_BYTES)
        self.words = half + permuted(row * LINE_BYTES + self.features % 32 * 4, 128)
        self.halves = self._matrices(slots, unit)

    def _matrices(self, slots: int, unit: int) -> np.ndarray:
        """Through transposing stores of 8x8 matrices: row r's address comes from one thread, its
        element c from thread 4 c + r / 2, the low or high half of its word."""
        where = np.full((128, slots, 2, unit // 4), -1)
        for matrix, h in product(range(self.padded // 8), range(2)):
            for r, c in product(range(8), range(8)):
                row = 8 * matrix + (r if unit == 8 else 4 * (r & 1) + (r >> 1))
                slot, e = (matrix, r & 1) if unit == 8 else (2 * matrix + (r & 1), 0)
                if slot >= slots:
                    continue  # what fills up the last matrix
                for warp in range(4):
                    part = 2 * warp + h
                    to = row * LINE_BYTES + ((part ^ (row & 7)) << 4) + 2 * c
                    where[32 * warp + 4 * c + r // 2, slot, h, e] = to
        assert where.min() >= 0, "an element that no matrix stores"
        return where
