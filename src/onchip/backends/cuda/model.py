"""Which choices of an engine kernel are promising: a model of one multiprocessor's time.

A program goes through its tiles; what a tile takes is the most of

    products    the matrix unit's clocks, or those in which shared memory hands it its operands.
                Whatever the schedule, the chip can't multiply longer at full clock than its power
                allows
    traffic     bytes of input, weights, results and what the epilogue reads, between the last cache
                and shared memory; no faster than what is on its way in the rings allows
    turns       products and epilogue, over the teams that take turns

and a kernel takes its start, the tiles of its busiest program (or all bytes of memory, if those
take longer), a last epilogue, and what sharing a tile's channels costs: partial sums written, and
read by one of the programs. Columns of a patch that lie outside, positions that neighbouring
patches compute again, rows of the matrix unit without a feature and channels that fill up a chunk
are paid for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import ceil, prod

from onchip.backends.cuda.geometry import ALIGNED, BLOCK, GROUP, Geometry, up
from onchip.backends.cuda.limits import MOST_COLUMNS, refusal
from onchip.backends.cuda.problem import Config, Line, Problem
from onchip.fusion.machine import Gpu
from onchip.fusion.refusal import Refusal, Rule

# Of an H200; a clock is one of a multiprocessor. "Fitted": so that the times of some thirty kernels
# measured there (3x3, 1x1 and 1-d convolutions, bf16 and TF32) come out, most within a sixth.
CLOCKS = 1750.0  # a microsecond
MULTIPLIED = 4096  # bytes of channels, of pairs of elements, a clock (data sheet)
SHARED_BYTES = 128  # that shared memory hands out in a clock (CUDA C++ Programming Guide)
POWER = 0.92  # fitted: of the matrix units' rate, all of them busy for tens of microseconds
CACHE_BYTES = 22.0  # measured: a clock and multiprocessor, all of them reading the last cache
FASTEST = 48.0  # fitted: the same if few of them read
HOT, HOT_BYTES = 1.7, 1 << 20  # fitted: how much faster so few bytes come again and again
MEMORY = 4.2e6 * 0.9  # measured: bytes a microsecond that a kernel gets of 4.2 TB/s
LATENCY = 1400.0  # fitted: clocks from asking for a box until it is there, under load
START = 3.0 * CLOCKS  # measured: until the first products, and from the last store to the end
SHARING = 2.0 * CLOCKS  # fitted: fences and counters of programs that share a tile
# Judgements:
TILE = 300.0  # clocks in which a tile's first products wait for its last ones before
STEP = 24.0  # clocks between two steps: a barrier, fences
LEAST_ROW = 64  # bytes that a shorter row of a box costs
ALONE = 1.15  # products of one warpgroup take longer if no other fills the gaps between its steps
EPILOGUE = 1200.0  # clocks of an epilogue's barriers and copies
PER_SUM = 8  # instructions of an epilogue for each sum of a thread
PER_CELL = 12  # the same for each load of a window that is folded from shared memory
SOFT = 16  # power of the norm by which times of a tile that overlap add up
SOFTER = 3  # the same of loop and memory

REGISTERS = 45  # measured: of a thread beside its sums
MOST = 12  # choices handed out
ALIKE = 3  # of them with the same patch
SIZES = (16, 32, 64, 96, 128, 192, 256, 416)  # positions of a patch: the best of each class ...
BEST = 5  # ... so many, are looked at closely
COARSE = 32  # positions: steps in which patches of a line of thousands are tried
STAGES = 12  # chunks of input on their way, at most
W_STAGES = 8  # tiles of weights on their way, at most


def configurations(problem: Problem, gpu: Gpu) -> list[Config] | Refusal:
    """The promising choices for a problem, best first, at most MOST. Each one's geometry is
    possible on the GPU; a Refusal if none's is."""
    if problem.kind not in ("bf16", "fp16", "tf32"):
        text = f"no main loop for {problem.kind}"
        return Refusal(Rule.CONTRACTION_FORM, problem.results[0].tensor.name, text)
    timed: list[tuple[float, Config]] = []
    refused: Refusal | None = None
    for config in _choices(problem, gpu):
        estimate = Estimate(problem, config, gpu)
        wrong = refusal(estimate.geometry, gpu.shared_bytes)
        if wrong is None:
            timed.append((estimate.microseconds, config))
        refused = refused or wrong
    timed.sort(key=lambda pair: pair[0])
    found: list[Config] = []
    for _, config in timed:
        same = [c for c in found if c.patch == config.patch]
        known = any(
            (c.blocks * c.split, c.k_split) == (config.blocks * config.split, config.k_split)
            for c in same
        )
        if not known and len(same) < ALIKE:
            found.append(config)
    if found:
        return found[:MOST]
    text = "no patch of positions fits registers and shared memory"
    return refused or Refusal(Rule.CONTRACTION_FORM, problem.results[0].tensor.name, text)


# ---- what a choice takes -----------------------------------------------------------------------


class Estimate:
    """The model's view of one choice; clocks are those of one multiprocessor."""

    def __init__(self, problem: Problem, config: Config, gpu: Gpu) -> None:
        self.problem, self.config, self.gpu = problem, config, gpu
        self.geometry = Geometry(problem, config)

    @cached_property
    def programs(self) -> int:
        most = self.gpu.multiprocessors
        if not self.config.w_stages:
            most = max(most // self.geometry.feature_tiles, 1) * self.geometry.feature_tiles
        return min(self.geometry.work, most)

    @property
    def rate(self) -> float:
        """Bytes a clock that each program gets of the last cache."""
        return min(FASTEST, CACHE_BYTES * self.gpu.multiprocessors / self.programs)

    @cached_property
    def steps(self) -> int:
        """Of the program that has most of a tile."""
        return ceil(self.geometry.steps / self.config.k_split)

    @cached_property
    def products(self) -> float:
        """Clocks of a tile's products."""
        g, c = self.geometry, self.config
        unit = BLOCK * g.columns * 32 / MULTIPLIED
        fed = (BLOCK + g.columns) * 32 / SHARED_BYTES
        count = self.steps * g.k_steps * c.blocks * c.split * len(g.strips)
        return count * max(unit, fed)

    @cached_property
    def traffic(self) -> float:
        """Clocks of a tile's bytes."""
        g, p, c = self.geometry, self.problem, self.config
        phases = prod(map(len, g.lines_taps))
        chunks = g.chunks * phases
        if c.k_split > 1:  # parts end within a chunk, which both of them fetch
            chunks = min(chunks, ceil(chunks / c.k_split) + (g.chunks % c.k_split > 0))
        inputs = chunks * g.x_bytes * max(1, LEAST_ROW / c.row_bytes)
        weights = self.steps * g.w_bytes * (c.w_stages > 0)
        hot = HOT if g.steps * g.feature_tiles * p.batch * g.w_bytes <= HOT_BYTES else 1.0
        stored = sum(
            prod(g.cells if r.pooled else c.patch) * r.tensor.dtype.size for r in p.results
        ) + sum(prod(g.cells) * r.tensor.dtype.size for r in p.reads if r.kind == "tile")
        share = min(p.features / (g.feature_tiles * g.tile_features), 1.0)
        moved = stored * g.tile_features * share / c.k_split
        clocks = (inputs + moved + weights / hot) / self.rate
        # a slot is free again when the products of the step after it have begun
        ring = (c.x_stages - 1) * g.x_slot + max(c.w_stages - 1, 0) * g.w_bytes
        return max(clocks, (inputs + weights) / ring * LATENCY)

    @cached_property
    def epilogue(self) -> float:
        """Clocks of a tile's epilogue."""
        g, p, c = self.geometry, self.problem, self.config
        clocks = EPILOGUE + PER_SUM * g.accumulators * c.split * len(p.results)
        if g.staged:
            loads = prod(g.cells) * prod(x.window for x in p.lines) * g.tile_features / 8
            clocks += PER_CELL * loads / 128 * (2 if g.wide else 1)
        if any(r.kind == "tile" for r in p.reads):  # asked for when the products begin
            clocks += max(LATENCY - self.products, 0.0)
        return clocks

    @property
    def together(self) -> bool:
        """Teams multiply at the same time: the rings hold a tile for each."""
        g, c = self.geometry, self.config
        return c.teams > 1 and rings_hold(g, c.teams)

    @property
    def shared(self) -> float:
        """Clocks that programs which share a tile take to add up."""
        c = self.config
        if c.k_split == 1:
            return 0.0
        sums = 4 * 128 * c.split * self.geometry.accumulators
        return SHARING + sums / self.rate + c.k_split * sums / FASTEST

    @property
    def memory(self) -> float:
        """Microseconds in which memory moves each tensor once."""
        p = self.problem
        size = p.channels * prod(x.size for x in p.lines) * p.batch * p.size
        size += p.channels * p.taps * p.features * p.batch * p.size
        size += sum(prod(r.tensor.shape) * r.tensor.dtype.size for r in (*p.results, *p.reads))
        return size / MEMORY

    @property
    def microseconds(self) -> float:
        """Of the kernel, behind a launch that costs nothing."""
        g, c = self.geometry, self.config
        busy = self.programs / self.gpu.multiprocessors
        power = self.products / (1 - (1 - POWER) * busy)
        tiles = ceil(g.work / self.programs)
        lonely = c.split == 1 and not (tiles > 1 and self.together)
        alone = self.products * (ALONE if lonely else 1) + STEP * self.steps + TILE
        turns = (alone + self.epilogue) / min(c.teams, tiles)
        tile = _norm(SOFT, power, alone, self.traffic, turns)
        # the last epilogue is no team's to hide
        loop = tiles * tile - (self.epilogue if min(c.teams, tiles) == 1 else 0.0)
        first = 0 if c.w_stages else g.steps * g.w_bytes / self.rate / 2
        ends = START + first + self.shared + self.epilogue
        return ends / CLOCKS + _norm(SOFTER, loop / CLOCKS, self.memory)


def _norm(power: int, *times: float) -> float:
    """The longest of some times that overlap, and a little of the others."""
    return sum(t**power for t in times) ** (1 / power)


def rings_hold(g: Geometry, tiles: int) -> bool:
    """Whether the rings hold all of so many tiles' input, and weights if they come by. Only then a
    team that waits for its chunk can't mistake the fullness of a slot two rounds before for its
    own: the parity of a barrier tells neighbouring rounds apart."""
    c = g.config
    chunks = g.chunks * prod(map(len, g.lines_taps))
    return c.x_stages >= tiles * chunks and (not c.w_stages or c.w_stages >= tiles * g.steps)


# ---- the choices -------------------------------------------------------------------------------


def _choices(p: Problem, gpu: Gpu) -> Iterator[Config]:
    blocks = ceil(p.features / BLOCK)
    shapes = [
        (b, s) for b, s in product((1, 2), (1, 2, 3, 4))
        if b * s <= min(max(blocks, 1), 4) and blocks % (b * s) in (0, blocks % 4 or 4)
    ]  # fmt: skip
    for patch, along in _patches(p):
        for (b, split), row, teams in product(shapes, _rows(p), (1, 2, 3, 4)):
            threads = 128 * teams * split + 32
            registers = min(65536 // threads // 8 * 8, 255)
            if threads > 1024 or b * prod(patch) // 2 + REGISTERS > registers:
                continue
            plain = Config(patch, along, b, split, teams, row)
            for config in _splits(p, plain, gpu):
                yield from _rings(p, config, gpu)


def _rows(p: Problem) -> tuple[int, ...]:
    """Bytes of a chunk's channels: as many as possible, and fewer where the last chunk would be
    less than three quarters full."""
    size = p.channels * p.size
    full = [row for row in (128, 64, 32) if size * 4 >= up(size, row) * 3]
    return tuple(full[:2] if full and full[0] < 128 else full[:1]) or (32,)


def _splits(p: Problem, config: Config, gpu: Gpu) -> Iterator[Config]:
    """The choice, and with programs that share tiles where there are few tiles."""
    yield config
    g = Geometry(p, config)
    if g.work * 2 > gpu.multiprocessors or config.teams > 1:
        return
    most = min(gpu.multiprocessors // g.work, g.steps // 2)
    for parts in sorted({2, 4, 8, most // 2, most}):
        if 1 < parts <= most:
            yield replace(config, k_split=parts)


def _rings(p: Problem, config: Config, gpu: Gpu) -> Iterator[Config]:
    """The choice with as many chunks and tiles on their way as fit shared memory: weights that
    stay, if they fit (they are one set: one batch, all channels), else weights that come by."""
    g = Geometry(p, replace(config, x_stages=1, w_stages=1))
    room = gpu.shared_bytes - (g.shared_bytes - g.w_bytes - g.x_slot) - 16 * 2 * STAGES
    if p.batch == 1 and config.k_split == 1 and g.feature_tiles <= gpu.multiprocessors:
        left = room - g.steps * (g.w_bytes + 16)
        if left >= 2 * g.x_slot:
            yield replace(config, x_stages=min(left // g.x_slot, STAGES), w_stages=0)
            return
    chunk = max(g.x_slot, ALIGNED)
    if p.taps == 1:
        both = room // (chunk + g.w_bytes)
        if both >= 2:
            stages = min(both, W_STAGES)
            yield replace(config, x_stages=stages, w_stages=stages)
        return
    for stages in (3, 2):
        tiles = (room - stages * chunk) // g.w_bytes
        if tiles >= (4 if stages == 3 else 2):
            yield replace(config, x_stages=stages, w_stages=min(tiles, W_STAGES))
            return


# ---- patches -----------------------------------------------------------------------------------


def _patches(p: Problem) -> list[tuple[tuple[int, ...], int]]:
    """(patch, along): of each class of sizes those with the largest share of useful columns, the
    fewest bytes of operands a column, and the least that neighbours fetch again."""
    lines = p.lines
    classes: dict[int, list[tuple[float, tuple[int, ...], int]]] = {}
    for patch in _within(p, 0, SIZES[-1]):
        size = prod(patch)
        tiles = [_tiles(p, x, n) for x, n in zip(lines, patch, strict=True)]
        useful = prod(_used(p, x) for x in lines) / (prod(tiles) * size)
        again = prod(
            (n + (x.taps - 1) * x.dilation / x.stride) / n
            for x, n in zip(lines, patch, strict=True)
        )
        for along in range(min(len(patch), 2)):
            columns = patch[0] if along == 0 else GROUP * patch[1]
            if columns > MOST_COLUMNS:
                continue
            fed = min(2 * columns / (BLOCK + columns), 1.0)
            score = useful * fed / (1 + again / 20)
            at = next(n for n in SIZES if size <= n)
            classes.setdefault(at, []).append((-score, patch, along))
    return [
        (patch, along) for found in classes.values() for _, patch, along in sorted(found)[:BEST]
    ]


def _within(p: Problem, n: int, room: int) -> Iterator[tuple[int, ...]]:
    """Patches of the lines from the n-th on, of at most `room` positions."""
    if n == len(p.lines):
        yield ()
        return
    for extent in _extents(p, p.lines[n], GROUP if n == 0 else 1, room):
        for rest in _within(p, n + 1, room // extent):
            yield (extent, *rest)


def _extents(p: Problem, line: Line, unit: int, most: int) -> list[int]:
    """Positions of a tile along a line, whole windows: the least for each number of tiles."""
    found: dict[int, int] = {}
    whole = up(_used(p, line), unit)
    for extent in range(unit, min(whole, most) + 1, unit):
        if extent % COARSE and whole > 8 * MOST_COLUMNS:
            continue
        if extent >= line.window and (unit > 1 or (extent - line.window) % line.hop == 0):
            found.setdefault(_tiles(p, line, extent), extent)
    if not found:
        least = up(line.window, unit)
        found = {1: least} if least <= most else {}
    return list(found.values())


def _used(p: Problem, line: Line) -> int:
    """Positions along a line of which anything is wanted."""
    return (
        min((line.cells - 1) * line.hop + line.window, line.positions)
        if p.pools
        else line.positions
    )


def _tiles(p: Problem, line: Line, extent: int) -> int:
    cells = (extent - line.window) // line.hop + 1
    return ceil((line.cells if p.pools else line.positions) / max(cells, 1))
