"""Where everything of a tile lies: its input in shared memory, taps as shifts of it, the matrix
unit's columns as positions, results. Plain arithmetic on a Problem and a Config, read by
kernel.py's text, by the model that chooses (model.py), and by the simulator of the tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, gcd, prod

from onchip.backends.cuda.problem import Config, Line, Problem, Read

GROUP = 8  # positions that lie side by side, row by row, for one instruction
BLOCK = 64  # features of one instruction
STEP_BYTES = 32  # of channels that one instruction multiplies
LINE_BYTES = 128  # of a row of a tile of results
BUNDLE = 512  # bytes of sums, 16 of each thread of a warp
ROW_COLUMNS = 32  # of results that lie side by side, which leave a warp at once, 16 rows of them
ROW_PITCH = ROW_COLUMNS + 8  # words from one of these rows to the next, so that no banks meet
ROW_BYTES = 4 * 16 * ROW_PITCH * 4  # of a warpgroup
ALIGNED = 1024  # bytes, where a permuted tile may start
MOST_BOX = 256  # elements of one copy along a dimension


def up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@dataclass(frozen=True, slots=True)
class Taps:
    """The taps of one line that read inputs of one residue modulo its stride.

    residue  of the inputs; first: the tap's number, then every `every`-th
    count    how many; shift: of the first, in positions; each further one is `apart` on
    """

    residue: int
    first: int
    every: int
    count: int
    shift: int
    apart: int


def taps_of(line: Line) -> tuple[Taps, ...]:
    """The line's taps by residue: one class where the stride is 1."""
    common = gcd(line.dilation, line.stride)
    every, apart = line.stride // common, line.dilation // common
    found = []
    for first in range(min(every, line.taps)):
        at = first * line.dilation - line.pad
        count = len(range(first, line.taps, every))
        found.append(Taps(at % line.stride, first, every, count, at // line.stride, apart))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Phase:
    """A copy of the input: elements of one residue along each line. start: of the first element of
    a tile whose positions begin at 0; taps: (rows of shared memory to shift by, number)."""

    start: tuple[int, ...]
    taps: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Geometry:
    """One kernel's tile. All orders are innermost first."""

    problem: Problem
    config: Config

    # ---- input ---------------------------------------------------------------------------------

    @property
    def chunk(self) -> int:
        """Channels of a chunk."""
        return self.config.row_bytes // self.problem.size

    @property
    def chunks(self) -> int:
        return ceil(self.problem.channels / self.chunk)

    @property
    def k_steps(self) -> int:
        """Instructions along a chunk's channels."""
        return self.config.row_bytes // STEP_BYTES

    @cached_property
    def lines_taps(self) -> tuple[tuple[Taps, ...], ...]:
        return tuple(map(taps_of, self.problem.lines))

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Elements of each line in shared memory: the patch and what its taps shift by."""
        return tuple(
            p + max((t.count - 1) * t.apart for t in taps)
            for p, taps in zip(self.config.patch, self.lines_taps, strict=True)
        )

    @cached_property
    def row_steps(self) -> tuple[int, ...]:
        """Rows of shared memory between two elements of each line."""
        return tuple(prod(self.extents[:n]) for n in range(len(self.extents)))

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """A tile's copies of the input for one chunk of channels, with their taps."""
        lines = self.problem.lines
        numbers = [prod(line.taps for line in lines[:n]) for n in range(len(lines))]
        found = []
        # innermost line fastest
        for outer in product(*reversed(self.lines_taps)):
            mine = outer[::-1]
            start = tuple(
                t.shift * line.stride + t.residue for t, line in zip(mine, lines, strict=True)
            )
            taps = []
            for places in product(*(range(t.count) for t in reversed(mine))):
                own = list(zip(places[::-1], mine, strict=True))
                rows = sum(k * t.apart * s for (k, t), s in zip(own, self.row_steps, strict=True))
                number = sum(
                    (t.first + k * t.every) * n for (k, t), n in zip(own, numbers, strict=True)
                )
                taps.append((rows, number))
            found.append(Phase(start, tuple(taps)))
        return tuple(found)

    @property
    def steps(self) -> int:
        """Weight tiles that a tile of results multiplies, of the class with the most taps."""
        return self.chunks * self.problem.taps

    @cached_property
    def outermost(self) -> int:
        """The line that the copies of a chunk divide: the last one with more than one element."""
        return max((n for n, e in enumerate(self.extents) if e > 1), default=0)

    @property
    def pieces(self) -> int:
        """Copies of a chunk: one, unless programs share them or a line is longer than a copy."""
        shared = self.config.x_shared
        return shared * ceil(self.extents[self.outermost] / (MOST_BOX * shared))

    @property
    def piece(self) -> int:
        """Elements of the outermost line in a copy."""
        return ceil(self.extents[self.outermost] / self.pieces)

    @cached_property
    def copied(self) -> tuple[int, ...]:
        """Elements of each line in one copy."""
        return tuple(self.piece if n == self.outermost else e for n, e in enumerate(self.extents))

    @property
    def x_bytes(self) -> int:
        """Of a chunk of input, as the copies count them."""
        return self.pieces * prod(self.copied) * self.config.row_bytes

    @property
    def x_box(self) -> tuple[int, ...]:
        """Elements that a copy spans along each line."""
        lines = zip(self.copied, self.problem.lines, strict=True)
        return tuple((n - 1) * line.stride + 1 for n, line in lines)

    # ---- columns: positions --------------------------------------------------------------------

    @property
    def groups(self) -> int:
        """Groups of 8 positions in one instruction."""
        return self.config.patch[0] // GROUP if self.config.along == 0 else self.config.patch[1]

    @property
    def columns(self) -> int:
        """Of one instruction."""
        return GROUP * self.groups

    @property
    def group_rows(self) -> int:
        """Rows of shared memory between two groups of an instruction."""
        return GROUP if self.config.along == 0 else self.row_steps[1]

    @cached_property
    def strips(self) -> tuple[int, ...]:
        """The first row of shared memory of each instruction that covers the patch."""
        patch, steps = self.config.patch, self.row_steps
        if self.config.along == 0:
            free = [(range(p), s) for p, s in zip(patch[1:], steps[1:], strict=True)]
        else:
            across = (range(0, patch[0], GROUP), 1)
            free = [across, *((range(p), s) for p, s in zip(patch[2:], steps[2:], strict=True))]
        return tuple(
            sum(n * s for n, (_, s) in zip(at[::-1], free, strict=True))
            for at in product(*(r for r, _ in reversed(free)))
        )

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold sums."""
        return self.config.blocks * len(self.strips) * self.columns // 2

    # ---- results -------------------------------------------------------------------------------

    @property
    def carried(self) -> bool:
        """Windows that reach into the tile before are folded from what it hands on."""
        return False

    @cached_property
    def staged(self) -> bool:
        """Windows are folded from shared memory, since no thread holds all of one."""
        if not self.problem.pools or self.carried:
            return False
        for n, (line, p) in enumerate(zip(self.problem.lines, self.config.patch, strict=True)):
            disjoint = line.hop == line.window and line.lead == 0
            inside = line.hop * (line.cells - 1) + line.window <= line.positions
            if not disjoint or not inside or p % line.window or (n == 0 and line.window > 2):
                return True
        return False

    @cached_property
    def cells(self) -> tuple[int, ...]:
        """Cells of a tile along each line; positions where nothing is pooled."""
        return tuple(
            p // line.hop if self.carried else (p - line.window) // line.hop + 1
            for p, line in zip(self.config.patch, self.problem.lines, strict=True)
        )

    @cached_property
    def tiles(self) -> tuple[int, ...]:
        """Of results along each line: all cells, and all positions if some result has those."""
        p, found = self.problem, []
        for line, n, c in zip(p.lines, self.cells, self.config.patch, strict=True):
            tiles = ceil((line.cells if p.pools else line.positions) / n)
            if self.positions_stored:
                left = line.positions + (0 if self.carried else line.lead) - c
                tiles = max(tiles, ceil(max(left, 0) / (n * line.hop)) + 1)
            found.append(tiles)
        return tuple(found)

    @property
    def positions_stored(self) -> bool:
        """A result of positions beside one of windows."""
        return self.problem.pools and not all(r.pooled for r in self.problem.results)

    @property
    def tile_features(self) -> int:
        return BLOCK * self.config.blocks * self.config.split

    @property
    def feature_tiles(self) -> int:
        return ceil(self.problem.features / self.tile_features)

    @property
    def position_tiles(self) -> int:
        return prod(self.tiles)

    @property
    def work(self) -> int:
        """Tiles, or groups of tiles, that a cluster takes at a time."""
        features = ceil(self.feature_tiles / self.config.x_shared)
        return features * ceil(self.position_tiles / self.config.w_shared) * self.problem.batch

    @property
    def threads(self) -> int:
        """Of a program: warpgroups, a warp for operands, one for reads; two more that split."""
        if self.problem.splits:
            return 128 * (self.warpgroups + 1)
        return 128 * self.warpgroups + 32 * (1 + bool(self.tile_reads))

    @property
    def warpgroups(self) -> int:
        """That multiply."""
        return self.config.teams * self.config.split

    # ---- shared memory -------------------------------------------------------------------------

    @property
    def w_bytes(self) -> int:
        """Of a tile of weights: the tile's features times a chunk of channels."""
        return self.tile_features * self.config.row_bytes

    @property
    def w_tiles(self) -> int:
        return self.config.w_stages or self.steps

    @property
    def w_copies(self) -> int:
        """Of a tile of weights: each block of features, if they lie innermost."""
        return self.tile_features // BLOCK if self.problem.w_features_inner else 1

    @property
    def w_row(self) -> int:
        """Bytes of a row of weights in shared memory: a chunk's channels, or a block's features."""
        inner = self.problem.w_features_inner
        return BLOCK * self.problem.size if inner else self.config.row_bytes

    @property
    def w_k_step(self) -> int:
        """Bytes between the weights of two instructions along a chunk's channels."""
        inner = self.problem.w_features_inner
        return STEP_BYTES // self.problem.size * self.w_row if inner else STEP_BYTES

    @property
    def x_slot(self) -> int:
        """Of a chunk of input; where operands are split, the low parts lie in its second half."""
        return up(self.x_bytes, ALIGNED) * (2 if self.problem.splits else 1)

    @property
    def wide(self) -> bool:
        """Results are staged in float32, not in a half type."""
        kinds = {r.tensor.dtype.size for r in self.problem.results}
        return max(kinds, default=0) > 2 or self.problem.fold == "sum"

    def result_bytes(self, rows: int, size: int) -> int:
        """Of one block of features of a tile of results (or of what is folded)."""
        return up(rows, GROUP) * LINE_BYTES * (1 if size == 2 else 2)

    @cached_property
    def tile_reads(self) -> tuple[Read, ...]:
        """What the epilogue reads by tiles; element by element where windows are `staged`."""
        if self.staged:
            return ()
        return tuple(r for r in self.problem.reads if r.kind == "tile")

    @cached_property
    def in_place(self) -> bool:
        """The one result takes the place of the first read; totals read it after that."""
        sizes = [r.tensor.dtype.size for r in self.problem.results if r.tile]
        first = [r.tensor.dtype.size for r in self.tile_reads[:1] if not self.problem.totals]
        return len(self.problem.results) == 1 and sizes == first != []

    @cached_property
    def tile_bytes(self) -> int:
        """Of a warpgroup's results on their way out, all blocks of features."""
        c = self.config
        sizes = [
            self.result_bytes(prod(self.cells if r.pooled else c.patch), r.tensor.dtype.size)
            for r in self.problem.results
            if r.tile and not (r.pooled and self.staged) and not self.in_place
        ]
        if self.staged:
            sizes.append(self.result_bytes(prod(c.patch), 4 if self.wide else 2))
        rows = ROW_BYTES * any(r.side > 0 for r in self.problem.results)
        return max(c.blocks * max(sizes, default=0), rows)

    @cached_property
    def read_bytes(self) -> int:
        """Of a warpgroup's tiles that the epilogue reads."""
        return self.config.blocks * sum(
            self.result_bytes(prod(self.cells), r.tensor.dtype.size) for r in self.tile_reads
        )

    @property
    def r_stages(self) -> int:
        return self.config.r_stages if self.tile_reads else 0

    @property
    def turns(self) -> bool:
        """Teams wait for each other: a ring's slots go from team to team, and a barrier can't tell
        a team that the round before the last has been."""
        c = self.config
        chunks = c.teams * self.chunks * len(self.phases)
        own = c.x_stages % chunks == 0 == c.w_stages % (c.teams * self.steps)
        return c.teams > 1 and (self.problem.unlike or not own)

    @property
    def barriers(self) -> int:
        """Of 8 bytes each: two a slot, a turn for each team; two where programs add up; where
        operands are split, one for each chunk and each warpgroup's turn."""
        c = self.config
        rings = 2 * (c.x_stages + self.w_tiles + self.r_stages)
        split = c.x_stages + self.warpgroups if self.problem.splits else 0
        return rings + c.teams + 2 * (c.k_split > 1) + split

    @property
    def shared_bytes(self) -> int:
        """What a program asks for, with what alignment may cost."""
        c = self.config
        own = ALIGNED + self.exchange_bytes + 8 * self.barriers
        operands = self.w_tiles * self.w_bytes + c.x_stages * self.x_slot
        reads = self.r_stages * c.split * self.read_bytes
        return own + operands + c.teams * c.split * self.tile_bytes + reads

    @property
    def sums_bytes(self) -> int:
        """Of a program's sums of a tile."""
        return self.config.split * self.accumulators * 128 * 4

    @property
    def exchange_bytes(self) -> int:
        """Where programs share a tile: of the sums that each sends a program, its share of a tile's
        in bundles of a warp, and of all shares when they have been added up."""
        parts, bundles = self.config.k_split, self.sums_bytes // BUNDLE
        return BUNDLE * (parts * ceil(bundles / parts) + bundles) if parts > 1 else 0
