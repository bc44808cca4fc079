"""Which choices of an engine kernel are promising: a model of one multiprocessor's time.

A program goes through its tiles; what a tile takes is the most of

    products    the matrix unit's clocks, or those in which shared memory hands it its operands;
                where operands are split, three products for each, and warpgroups multiply in turn.
                Whatever the schedule, the chip can't multiply longer at full clock than its power
                allows
    traffic     bytes of input, weights, results and what the epilogue reads, between the last cache
                and shared memory; no faster than what is on its way in the rings allows
    turns       products and epilogue, over the teams that take turns

and a kernel takes its start, the tiles of its busiest program (or all bytes of memory, if those
take longer), a last epilogue, and what sharing a tile's channels costs: the sums twice between
programs' memories, a share to each and all to one. Columns of a patch that lie outside, positions
that neighbouring patches compute again, rows of the matrix unit without a feature and channels that
fill up a chunk are paid for.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil, prod

from onchip.backends.cuda.choices import choices, clusters_of
from onchip.backends.cuda.geometry import BLOCK, Geometry
from onchip.backends.cuda.limits import refusal
from onchip.backends.cuda.parts import at_once, part_inputs, part_steps
from onchip.backends.cuda.problem import Config, Problem, Result
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
ROW_STORES = 2  # times as many where a result leaves by rows of positions
SECTOR = 32  # bytes of memory that are written as one
PER_CELL = 12  # the same for each load of a window that is folded from shared memory
SHARING = 1400.0  # clocks of two exchanges between programs, the first wait for the last one
INTO = 32.0  # bytes a clock that come to a program's shared memory from others
COUPLED = 1.03  # tiles of programs that wait for each other's copies
SOFT = 16  # power of the norm by which times of a tile that overlap add up
SOFTER = 3  # the same of loop and memory
# Judgements, where operands are split:
SPLIT_BYTES = 40.0  # of input that two warps split in a clock
PER_STEP = 250.0  # clocks in which a step's block of weights is read and split
SOONER = 200.0  # clocks that a slot is free sooner: its step waits for its own products

MOST = 12  # choices handed out
ALIKE = 3  # of them with the same patch


def configurations(problem: Problem, gpu: Gpu) -> list[Config] | Refusal:
    """The promising choices for a problem, best first, at most MOST. Each one's geometry is
    possible on the GPU; a Refusal if none's is."""
    estimates = [Estimate(problem, config, gpu) for config in choices(problem, gpu)]
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
    return refused or Refusal(Rule.CONTRACTION_FORM, problem.subject, text)


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
    def products(self) -> float:
        """Clocks of a tile's products."""
        g, c = self.geometry, self.config
        times = 3 if self.problem.splits else 1  # that input is read; weights are once
        unit = times * BLOCK * g.columns * 32 / MULTIPLIED
        fed = (BLOCK + times * g.columns) * 32 / SHARED_BYTES
        count = part_steps(g) * g.k_steps * c.blocks * c.split * len(g.strips)
        return count * max(unit, fed)

    @property
    def splitting(self) -> float:
        """Clocks in which the low parts of a chunk of input are written, where there are some."""
        return self.geometry.x_bytes / SPLIT_BYTES if self.problem.splits else 0.0

    @property
    def between(self) -> float:
        """Clocks of a tile in which a warpgroup does not multiply, but its steps begin; where
        operands are split, it splits its weights and adds a step's sums."""
        g = self.geometry
        own = self.config.blocks * PER_STEP + g.accumulators if self.problem.splits else 0.0
        return (STEP + own) * part_steps(g) + TILE

    @cached_property
    def traffic(self) -> float:
        """Clocks of a tile's bytes."""
        g, p, c = self.geometry, self.problem, self.config
        fetched = part_inputs(g) * g.x_bytes * max(1, LEAST_ROW / c.row_bytes)
        weights = part_steps(g) * g.w_bytes * (c.w_stages > 0)
        hot = HOT if g.steps * g.feature_tiles * p.batch * g.w_bytes <= HOT_BYTES else 1.0
        stored = sum(
            prod(g.cells if r.pooled else c.patch) * r.tensor.dtype.size * self.spread(r)
            for r in p.results
        ) + sum(prod(g.cells) * r.tensor.dtype.size for r in p.reads if r.kind == "tile")
        share = min(p.features / (g.feature_tiles * g.tile_features), 1.0)
        moved = stored * g.tile_features * share / c.k_split
        clocks = (fetched / c.x_shared + moved + weights / hot / c.w_shared) / self.rate
        # a slot is free again when the products of the step after it have begun
        copied = g.x_slot // (1 + p.splits)  # low parts are not fetched
        ring = (c.x_stages - 1) * copied + max(c.w_stages - 1, 0) * g.w_bytes
        late = LATENCY + (self.splitting - SOONER) * p.splits
        if at_once(g):
            return max(clocks, part_inputs(g) * self.splitting)
        return max(clocks, (fetched + weights) / ring * late, part_inputs(g) * self.splitting)

    @cached_property
    def epilogue(self) -> float:
        """Clocks of a tile's epilogue."""
        g, p, c = self.geometry, self.problem, self.config
        stores = sum(ROW_STORES if r.side else 1 for r in p.results) + len(p.totals)
        clocks = EPILOGUE + PER_SUM * g.accumulators * c.split * stores
        if g.staged:
            loads = prod(g.cells) * prod(x.window for x in p.lines) * g.tile_features / 8
            clocks += PER_CELL * loads / 128 * (2 if g.wide else 1)
        return clocks

    @property
    def together(self) -> bool:
        """Teams multiply at the same time: none waits until another's weights have come."""
        return self.config.teams > 1 and not (self.config.w_stages and self.geometry.turns)

    @property
    def shared(self) -> float:
        """Clocks that programs which share a tile take to add up."""
        if self.config.k_split == 1:
            return 0.0
        return SHARING + 2 * self.geometry.sums_bytes / INTO

    @property
    def memory(self) -> float:
        """Microseconds in which memory moves each tensor once."""
        p = self.problem
        size = p.channels * prod(x.size for x in p.lines) * p.matrices * p.size
        size += p.channels * p.taps * p.features * p.batch * p.size
        size += sum(prod(r.tensor.shape) * r.tensor.dtype.size for r in (*p.finals, *p.reads))
        size += sum(prod(r.tensor.shape) * r.tensor.dtype.size * self.spread(r) for r in p.results)
        return size / MEMORY

    def spread(self, r: Result) -> float:
        """Bytes of sectors that a result's rows touch, over its own: rows of positions begin and
        end within a sector that others write, too."""
        if not r.side:
            return 1.0
        cells = self.geometry.cells if r.pooled else self.config.patch
        return 1 + SECTOR / (cells[0] * r.tensor.dtype.size)

    @cached_property
    def microseconds(self) -> float:
        """Of the kernel, behind a launch that costs nothing."""
        g, p, c = self.geometry, self.problem, self.config
        busy = self.programs / self.gpu.multiprocessors
        power = self.products / (1 - (1 - POWER) * busy)
        tiles = ceil(g.work / self.clusters)
        lonely = c.split == 1 and not (tiles > 1 and self.together)
        if p.splits:  # warpgroups take turns: one multiplies, another one splits and adds
            alone = _norm(SOFT, self.products, self.products / c.split + self.between)
        else:
            alone = self.products * (ALONE if lonely else 1) + self.between
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
