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

from onchip.backends.cuda.geometry import BLOCK, GROUP, Geometry, up
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
# Judgements:
TILE = 300.0  # clocks in which a tile's first products wait for its last ones before
STEP = 24.0  # clocks between two steps: a barrier, fences
LEAST_ROW = 64  # bytes that a shorter row of a box costs
ALONE = 1.15  # products of one warpgroup take longer if no other fills the gaps between its steps
EPILOGUE = 1200.0  # clocks of an epilogue's barriers and copies
PER_SUM = 8  # instructions of an epilogue for each sum of a thread
PER_CELL = 12  # the same for each load of a window that is folded from shared memory
SHARING = 1.0 * CLOCKS  # three barriers of programs that share a tile
ELSEWHERE = 16.0  # bytes a clock from and to other programs' shared memory
COUPLED = 1.03  # tiles of programs that wait for each other's copies
SOFT = 16  # power of the norm by which times of a tile that overlap add up
SOFTER = 3  # the same of loop and memory

PART = 18  # multiprocessors that clusters are made of
REGISTERS = 32  # measured: of a thread beside its sums, at least
MOST = 12  # choices handed out
ALIKE = 3  # of them with the same patch
SIZES = (16, 32, 64, 96, 128, 192, 256, 416)  # positions of a patch: the best of each class ...
BEST = 5  # ... so many, are looked at closely
BOX_BYTES = 128  # multiples of which a permuted box starts at (CUDA driver API, tensor maps)
COARSE = 32  # positions: steps in which patches of a line of thousands are tried
STAGES = 12  # chunks of input on their way, at most
READ_AHEAD = 32 << 10  # bytes that the epilogue will read, on their way
W_STAGES = 8  # tiles of weights on their way, at most


def configurations(problem: Problem, gpu: Gpu) -> list[Config] | Refusal:
    """The promising choices for a problem, best first, at most MOST. Each one's geometry is
    possible on the GPU; a Refusal if none's is."""
    if problem.kind not in ("bf16", "fp16", "tf32"):
        text = f"no main loop for {problem.kind}"
        return Refusal(Rule.CONTRACTION_FORM, problem.results[0].tensor.name, text)
    estimates = [Estimate(problem, config, gpu) for config in _choices(problem, gpu)]
    found: list[Config] = []
    refused: Refusal | None = None
    for estimate in sorted(estimates, key=lambda e: e.microseconds):
        config = estimate.config
        same = [c for c in found if c.patch == config.patch]
        if len(same) < ALIKE and not any(_kin(c, config) for c in same):
            wrong = refusal(estimate.geometry, gpu.shared_bytes)
            found += [config] * (wrong is None)
            refused = refused or wrong
        if len(found) == MOST:
            break
    if found:
        return found
    text = "no patch of positions fits registers and shared memory"
    return refused or Refusal(Rule.CONTRACTION_FORM, problem.results[0].tensor.name, text)


def _kin(a: Config, b: Config) -> bool:
    """They differ in teams and stages alone, or in which warpgroups have which features."""
    mine, others = (
        (c.blocks * c.split, c.k_split, c.x_shared, c.w_shared, c.along) for c in (a, b)
    )
    return mine == others


# ---- what a choice takes -----------------------------------------------------------------------


class Estimate:
    """The model's view of one choice; clocks are those of one multiprocessor."""

    def __init__(self, problem: Problem, config: Config, gpu: Gpu) -> None:
        self.problem, self.config, self.gpu = problem, config, gpu
        self.geometry = Geometry(problem, config)

    @cached_property
    def clusters(self) -> int:
        """That run at once; a program each where they share nothing."""
        g, c = self.geometry, self.config
        most = clusters_of(self.gpu, c.cluster)
        if not c.w_stages:
            features = ceil(g.feature_tiles / c.x_shared)
            most = max(most // features, 1) * features
        return min(g.work, most)

    @property
    def programs(self) -> int:
        return self.clusters * self.config.cluster

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
        chunks = inputs(g)
        if c.k_split > 1:  # parts end within a chunk, which both of them fetch
            chunks = min(chunks, ceil(chunks / c.k_split) + (g.chunks % c.k_split > 0))
        fetched = chunks * g.x_bytes * max(1, LEAST_ROW / c.row_bytes)
        weights = self.steps * g.w_bytes * (c.w_stages > 0)
        hot = HOT if g.steps * g.feature_tiles * p.batch * g.w_bytes <= HOT_BYTES else 1.0
        stored = sum(
            prod(g.cells if r.pooled else c.patch) * r.tensor.dtype.size for r in p.results
        ) + sum(prod(g.cells) * r.tensor.dtype.size for r in p.reads if r.kind == "tile")
        share = min(p.features / (g.feature_tiles * g.tile_features), 1.0)
        moved = stored * g.tile_features * share / c.k_split
        clocks = (fetched / c.x_shared + moved + weights / hot / c.w_shared) / self.rate
        # a slot is free again when the products of the step after it have begun
        ring = (c.x_stages - 1) * g.x_slot + max(c.w_stages - 1, 0) * g.w_bytes
        return max(clocks, (fetched + weights) / ring * LATENCY)

    @cached_property
    def epilogue(self) -> float:
        """Clocks of a tile's epilogue."""
        g, p, c = self.geometry, self.problem, self.config
        clocks = EPILOGUE + PER_SUM * g.accumulators * c.split * len(p.results)
        if g.staged:
            loads = prod(g.cells) * prod(x.window for x in p.lines) * g.tile_features / 8
            clocks += PER_CELL * loads / 128 * (2 if g.wide else 1)
        return clocks

    @property
    def together(self) -> bool:
        """Teams multiply at the same time."""
        return self.config.teams > 1 and rings_hold(self.geometry)

    @property
    def shared(self) -> float:
        """Clocks that programs which share a tile take to add up."""
        c = self.config
        if c.k_split == 1:
            return 0.0
        return SHARING + 2 * self.geometry.partial_bytes / ELSEWHERE

    @property
    def memory(self) -> float:
        """Microseconds in which memory moves each tensor once."""
        p = self.problem
        size = p.channels * prod(x.size for x in p.lines) * p.batch * p.size
        size += p.channels * p.taps * p.features * p.batch * p.size
        size += sum(prod(r.tensor.shape) * r.tensor.dtype.size for r in (*p.results, *p.reads))
        return size / MEMORY

    @cached_property
    def microseconds(self) -> float:
        """Of the kernel, behind a launch that costs nothing."""
        g, c = self.geometry, self.config
        busy = self.programs / self.gpu.multiprocessors
        power = self.products / (1 - (1 - POWER) * busy)
        tiles = ceil(g.work / self.clusters)
        lonely = c.split == 1 and not (tiles > 1 and self.together)
        alone = self.products * (ALONE if lonely else 1) + STEP * self.steps + TILE
        turns = (alone + self.epilogue) / min(c.teams, tiles)
        tile = _norm(SOFT, power, alone, self.traffic, turns)
        # the last epilogue is no team's to hide
        if c.x_shared * c.w_shared > 1:
            tile *= COUPLED
        loop = tiles * tile - (self.epilogue if min(c.teams, tiles) == 1 else 0.0)
        first = 0.0 if c.w_stages else g.steps * g.w_bytes / self.rate / 2
        ends = START + first + self.shared + self.epilogue
        return ends / CLOCKS + _norm(SOFTER, loop / CLOCKS, self.memory)


def _norm(power: int, *times: float) -> float:
    """The longest of some times that overlap, and a little of the others."""
    return sum(t**power for t in times) ** (1 / power)


def inputs(g: Geometry) -> int:
    """Chunks of input of a tile."""
    return g.chunks * prod(map(len, g.lines_taps))


def rings_hold(g: Geometry) -> bool:
    """Whether each team keeps to slots of its own: the rings are whole rounds of a tile for each
    team. Only then, or if they take turns, a team that waits for a chunk can't mistake the round
    before for its own: parity tells neighbouring rounds apart, and copies land in any order."""
    c = g.config
    return c.x_stages % (c.teams * inputs(g)) == 0 and c.w_stages % (c.teams * g.steps) == 0


def clusters_of(gpu: Gpu, programs: int) -> int:
    """Clusters of so many programs that run at once. Their multiprocessors are neighbours, of one
    of the GPU's parts, which have 16 and some to themselves (measured: less than 32 of four)."""
    if programs <= 2:
        return gpu.multiprocessors // programs
    return max(gpu.multiprocessors // PART, 1) * (16 // programs)


# ---- the choices -------------------------------------------------------------------------------


def _choices(p: Problem, gpu: Gpu) -> Iterator[Config]:
    blocks = ceil(p.features / BLOCK)
    shapes = [
        (b, s) for b, s in product((1, 2), (1, 2, 3, 4))
        if b * s <= min(max(blocks, 1), 4) and blocks % (b * s) in (0, blocks % 4 or 4)
    ]  # fmt: skip
    for patch, along in _patches(p):
        for (b, split), row, teams in product(shapes, _rows(p), (1, 2, 3, 4)):
            # registers are given to four warps at a time
            registers = min(65536 // (128 * (teams * split + 1)) // 8 * 8, 255)
            if teams * split > 7 or b * prod(patch) // 2 + REGISTERS > registers:
                continue
            plain = Config(patch, along, b, split, teams, row)
            for config in _clusters(p, plain, gpu):
                yield from _rings(p, config, gpu)


def _rows(p: Problem) -> tuple[int, ...]:
    """Bytes of a chunk's channels: as many as possible, and fewer where the last chunk would be
    less than three quarters full."""
    size = p.channels * p.size
    full = [row for row in (128, 64, 32) if size * 4 >= up(size, row) * 3]
    return tuple(full[:2] if full and full[0] < 128 else full[:1]) or (32,)


def _clusters(p: Problem, config: Config, gpu: Gpu) -> Iterator[Config]:
    """The choice, and with programs that share tiles where there are few, or operands where there
    are many."""
    yield config
    g = Geometry(p, config)
    if g.work * 2 <= gpu.multiprocessors:
        for parts in (2, 4, 8, 16):
            if config.teams == 1 and parts <= g.steps and g.work <= clusters_of(gpu, parts):
                yield replace(config, k_split=parts)
    elif g.steps > 4:
        if g.position_tiles > 1:
            yield replace(config, w_shared=2)
        if g.feature_tiles > 1:
            yield replace(config, x_shared=2)


def _rings(p: Problem, config: Config, gpu: Gpu) -> Iterator[Config]:
    """The choice with as many chunks and tiles on their way as fit shared memory: weights that
    stay, if they fit (they are one set: one batch, all channels), else weights that come by."""
    bare = replace(config, x_stages=1, w_stages=1, r_stages=0)
    g = Geometry(p, bare)
    read = g.config.split * g.read_bytes
    if read:  # whole rounds of the teams: each one's tiles keep to the same slots
        ahead = min(max(READ_AHEAD // (read * config.teams), 1), STAGES)
        config = replace(config, r_stages=config.teams * (1 + ahead))
    room = gpu.shared_bytes - (g.shared_bytes - g.w_bytes - g.x_slot) - 32 * STAGES
    room -= config.r_stages * (read + 16) if read else 0
    left = room - g.steps * (g.w_bytes + 16)
    if p.batch == 1 and config.k_split == 1 and left >= 2 * g.x_slot:
        if g.feature_tiles <= gpu.multiprocessors and config.w_shared == 1:
            yield from _safe(p, replace(config, x_stages=left // g.x_slot, w_stages=0))
        return
    if p.taps == 1:
        stages = room // (g.x_slot + g.w_bytes)
        if stages >= 2:
            stages = min(stages, W_STAGES)
            yield from _safe(p, replace(config, x_stages=stages, w_stages=stages))
        return
    for stages in (3, 2):
        tiles = (room - stages * g.x_slot) // g.w_bytes
        if tiles >= (4 if stages == 3 else 2):
            tiles = min(tiles, W_STAGES)
            yield from _safe(p, replace(config, x_stages=stages, w_stages=tiles))
            return


def _safe(p: Problem, config: Config) -> Iterator[Config]:
    """The choice with at most STAGES chunks, if its boxes lie where they may, and no round of a
    ring can be taken for another."""
    config = replace(config, x_stages=min(config.x_stages, STAGES))
    g = Geometry(p, config)
    if g.pieces > 1 and g.x_bytes // g.pieces % BOX_BYTES:
        return
    if config.teams > 1 and not rings_hold(g) and not g.turns:
        whole = config.x_stages // config.teams // inputs(g) * config.teams * inputs(g)
        config = replace(config, x_stages=whole or (config.teams - 1) * inputs(g))
        g = Geometry(p, config)
        if config.x_stages < 2 or not (g.turns or rings_hold(g)):
            return
    yield config


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
            if columns > MOST_COLUMNS or (along == 1 and patch[1] == 1):
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
