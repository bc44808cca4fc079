"""Which choices of an engine kernel there are: patches that leave few columns empty, features among
warpgroups, rings as long as shared memory allows, programs that share. The model puts them in
order (model.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil, prod

from onchip.backends.cuda.geometry import BLOCK, GROUP, Geometry, up
from onchip.backends.cuda.limits import MOST_CLUSTER, MOST_COLUMNS
from onchip.backends.cuda.parts import part_inputs, part_steps
from onchip.backends.cuda.problem import Config, Line, Problem
from onchip.backends.cuda.registers import NAMED, available, held
from onchip.fusion.machine import Gpu

PART = 18  # multiprocessors that clusters are made of, at most: pairs of them
REGISTERS = 32  # of a thread beside what it holds: no spills with up to three values of a feature
FOLDING = 24  # further ones where positions are folded into totals, and as many beside results
SIZES = (16, 32, 64, 96, 128, 192, 256, 416)  # positions of a patch: the best of each class ...
BEST = 5  # ... so many, are looked at closely
BOX_BYTES = 128  # multiples of which a permuted box starts at (CUDA driver API, tensor maps)
COARSE = 32  # positions: steps in which patches of a line of thousands are tried
STAGES = 12  # chunks of input on their way, at most
READ_AHEAD = 32 << 10  # bytes that the epilogue will read, on their way
W_STAGES = 8  # tiles of weights on their way, at most


def choices(p: Problem, gpu: Gpu) -> Iterator[Config]:
    """Choices that registers and shared memory have room for, in no order."""
    blocks = ceil(p.features / BLOCK)
    shapes = [(b, s) for b, s in product((1, 2), (1, 2, 3, 4)) if b * s <= min(blocks, 4)]
    for patch, along in _patches(p):
        for (b, split), row, teams in product(shapes, _rows(p), (1, 2, 3, 4)):
            plain = Config(patch, along, b, split, teams, row)
            beside = REGISTERS + (FOLDING * (1 + bool(p.results)) if p.totals else 0)
            if teams * split > 7 or b * prod(patch) // 2 + beside > NAMED:
                continue
            g = Geometry(p, plain)
            if held(g) + beside > available(g):
                continue
            for config in _clusters(p, plain, gpu):
                yield from _rings(p, config, gpu)


def _rows(p: Problem) -> tuple[int, ...]:
    """Bytes of a chunk's channels: as many as there are, or fewer where that leaves less empty."""
    size = p.channels * p.size
    rows = [row for row in (128, 64, 32) if row < 2 * size or row == 32]
    return tuple(r for n, r in enumerate(rows) if not n or up(size, r) < up(size, rows[n - 1]))


def _clusters(p: Problem, config: Config, gpu: Gpu) -> Iterator[Config]:
    """The choice, and with programs that share tiles where there are few, or operands where there
    are many."""
    yield config
    g = Geometry(p, config)
    if g.work * 2 <= gpu.multiprocessors:
        for parts in _parts(g.steps) if config.teams == 1 else ():
            if g.work <= clusters_of(gpu, parts):
                yield replace(config, k_split=parts)
    elif g.steps > 4:
        if g.position_tiles > 1:
            yield replace(config, w_shared=2)
        if g.feature_tiles > 1:
            yield replace(config, x_shared=2)


def _parts(steps: int) -> list[int]:
    """Programs that may share a tile's steps: powers of two, and what leaves all with as many."""
    most = min(steps, MOST_CLUSTER)
    return [n for n in range(2, most + 1) if steps % n == 0 or n & (n - 1) == 0]


def _rings(p: Problem, config: Config, gpu: Gpu) -> Iterator[Config]:
    """The choice with as many chunks and tiles on their way as fit shared memory: weights that
    stay, if they fit (they are one set: one batch, all channels), else weights that come by.
    Programs that share a tile's channels are as fast as their bytes come: slots for all of a part,
    if they fit, so that all are asked for at once."""
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
            stages = min(left // g.x_slot, STAGES)
            yield from _safe(p, replace(config, x_stages=stages, w_stages=0))
        return
    if config.k_split > 1:
        whole = replace(config, x_stages=part_inputs(g), w_stages=part_steps(g))
        if Geometry(p, whole).shared_bytes <= gpu.shared_bytes:
            yield from _safe(p, whole)
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
    """The choice, if its boxes lie where they may."""
    g = Geometry(p, config)
    if g.pieces > 1 and g.x_bytes // g.pieces % BOX_BYTES:
        return
    yield config


# ---- what they share -----------------------------------------------------------------------------


def clusters_of(gpu: Gpu, programs: int) -> int:
    """Clusters of so many programs that run at once. Their multiprocessors are neighbours, of one
    of the GPU's parts, whose sizes nothing tells (measured: less than 32 of four): the least that
    any sizes have room for."""
    if programs <= 2:
        return gpu.multiprocessors // programs
    return _least_clusters(gpu.multiprocessors // 2, programs)


@cache
def _least_clusters(pairs: int, programs: int) -> int:
    least = {0: 0}  # clusters, by the pairs of the parts so far
    for _ in range(ceil(2 * pairs / PART)):
        more: dict[int, int] = {}
        for (n, count), size in product(least.items(), range(PART // 2 + 1)):
            found = count + 2 * size // programs
            more[n + size] = min(found, more.get(n + size, found))
        least = more
    return least[pairs]


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
    if line.apart:
        return [1]
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
