"""Which choices of a kernel of the packed form are promising: the model of model.py, of its tiles.

A tile takes the longest of its products, what shared memory moves for it (operands, rows as they
come and as they are laid out, results), what the loaders execute, and the turn of a team.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil, prod

from onchip.backends.cuda.geometry import BLOCK, GROUP, up
from onchip.backends.cuda.limits import MOST_COLUMNS, MOST_THREADS, refusal
from onchip.backends.cuda.model import (
    ALIKE,
    CLOCKS,
    EPILOGUE,
    LATENCY,
    MOST,
    MULTIPLIED,
    PER_CELL,
    PER_SUM,
    SHARED_BYTES,
    START,
    TILE,
)
from onchip.backends.cuda.packed import PackedGeometry
from onchip.backends.cuda.problem import Config, Line, Problem
from onchip.fusion.machine import Gpu
from onchip.fusion.refusal import Refusal, Rule

# Judgements:
MOST_ROWS = 9  # of a patch
AHEAD = 4  # tiles whose further slots are filled beyond those that a tile reads
ROW = 350.0  # clocks of a warp for a row beside what it lays out: two waits, fences, the next copy
PER_PAIR = 8.0  # instructions of an epilogue for each two sums whose windows are folded in halves
PER_PART = 30.0  # clocks of a warp that lays out one part of 32 positions


def configurations(problem: Problem, gpu: Gpu) -> list[Config] | Refusal:
    """The promising choices for a problem of few channels, best first, at most MOST."""
    name = problem.subject
    if problem.kind not in ("bf16", "fp16", "tf32"):
        return Refusal(Rule.CONTRACTION_FORM, name, f"no main loop for {problem.kind}")
    timed: list[tuple[float, Config]] = []
    refused: Refusal | None = None
    for config in _choices(problem, gpu):
        g = PackedGeometry(problem, config)
        wrong = refusal(g, gpu.shared_bytes)
        if wrong is None:
            timed.append((microseconds(g, gpu), config))
        refused = refused or wrong
    timed.sort(key=lambda pair: pair[0])  # of equals the one with fewer teams
    found: list[Config] = []
    for _, config in timed:
        if sum(c.patch == config.patch for c in found) < ALIKE:
            found.append(config)
    text = "no patch of positions fits registers and shared memory"
    return found[:MOST] or refused or Refusal(Rule.CONTRACTION_FORM, name, text)


def microseconds(g: PackedGeometry, gpu: Gpu) -> float:
    """Of the kernel, behind a launch that costs nothing."""
    p, c = g.problem, g.config
    count = len(g.pairs) * g.run_chunks * c.blocks * c.split * len(g.strips)
    products = count * BLOCK * g.columns * 32 / MULTIPLIED
    rows = g.advance * g.row_step * g.run_chunks  # bytes that are laid out for a tile
    out = c.split * (g.tile_bytes + g.carry_bytes) * 2
    shared = count * (BLOCK * (not g.w_held) + g.columns) * 32 + 2 * rows + out
    loaders = g.advance * g.run_chunks * _row(g) / g.loaders
    per_sum = PER_PAIR / 2 if g.carried and not g.wide else PER_SUM
    epilogue = EPILOGUE + per_sum * g.accumulators * c.split * (len(p.results) + len(p.totals))
    if g.staged:
        loads = prod(g.cells) * prod(x.window for x in p.lines) * g.tile_features / 8
        epilogue += PER_CELL * loads / 128 * (2 if g.wide else 1)
    tiles = _most_tiles(g, gpu)
    turns = (products + TILE + epilogue) / min(c.teams, tiles)
    tile = max(products, shared / SHARED_BYTES, loaders, turns)
    first = LATENCY + ceil(g.units * g.slot_rows * g.run_chunks / g.loaders) * _row(g)
    waves = ceil(g.feature_tiles / gpu.multiprocessors)
    return (START + first + epilogue + waves * tiles * tile) / CLOCKS


def _row(g: PackedGeometry) -> float:
    """Clocks in which a warp lays out a row, for one chunk of its runs."""
    return ROW + PER_PART * g.parts * ceil(g.columns / 32)


def _most_tiles(g: PackedGeometry, gpu: Gpu) -> int:
    """Tiles of the busiest program, for one tile of features."""
    share = min(max(gpu.multiprocessors // g.feature_tiles, 1), g.position_tiles)
    return ceil(g.position_tiles / share) + g.carried


def _choices(p: Problem, gpu: Gpu) -> Iterator[Config]:
    blocks = ceil(p.features / BLOCK)
    shapes = [(b, s) for b, s in product((1, 2), (1, 2, 4)) if b * s <= min(max(blocks, 1), 4)]
    first, *further = p.lines
    down = further[0] if further else None
    rows = _rows(down, p.pools) if down else [1]
    for across, high in product(_across(first, p.pools), rows):
        patch = (across, *[high] * (down is not None), *[1] * len(further[1:]))
        for (b, split), teams in product(shapes, (1, 2, 3, 4)):
            config = Config(patch, 0, b, split, teams)
            g = PackedGeometry(p, config)
            if min(g.cells) < 1 or g.threads > MOST_THREADS or teams > _most_tiles(g, gpu):
                continue
            if g.needed > g.registers:
                continue
            room = gpu.shared_bytes - PackedGeometry(p, replace(config, x_stages=0)).shared_bytes
            stages = min(room // (g.x_slot + 16), (g.units + AHEAD * g.spent) * g.run_chunks)
            if stages > g.units:
                yield replace(config, x_stages=stages)


def _across(line: Line, pools: bool) -> list[int]:
    """Positions of a patch along the first line, multiples of 8: the least for each number of
    tiles."""
    whole = up(line.positions, GROUP)
    found = {ceil(whole / n): n for n in range(GROUP, min(whole, MOST_COLUMNS) + 1, GROUP)}
    least: dict[int, int] = {}
    for tiles, n in found.items():
        if not pools or n >= line.window:
            least[tiles] = min(n, least.get(tiles, n))
    return sorted(least.values(), reverse=True)


def _rows(line: Line, pools: bool) -> list[int]:
    """Rows of a patch: whole windows, or an even number (which hands on the last one)."""
    most = 1 if line.apart else min(line.positions + line.positions % 2, MOST_ROWS)
    rows = range(1, most + 1)
    if not pools or not line.pools:
        return list(rows)
    return [
        n for n in rows if n % 2 == 0 or (n >= line.window and (n - line.window) % line.hop == 0)
    ]
