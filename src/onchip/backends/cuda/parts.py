"""What each of the programs that share a tile (`Config.k_split`) has of it: steps from one place of
the walk over channels and taps to another, wherever that is. One program has all."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from onchip.backends.cuda.geometry import Geometry


def part_steps(g: Geometry) -> int:
    """Steps of the program that has most."""
    return ceil(g.steps / g.config.k_split)


def part_inputs(g: Geometry) -> int:
    """Copies of the input that one program fetches for a tile, at most."""
    taps, phases, parts = g.problem.taps, len(g.phases), g.config.k_split
    of_tap = [n for n, phase in enumerate(g.phases) for _ in phase.taps]
    ends = [n * g.steps // parts for n in range(parts + 1)]

    def copy(step: int) -> int:
        return step // taps * phases + of_tap[step % taps]

    return max(copy(b - 1) - copy(a) + 1 for a, b in pairwise(ends))


def at_once(g: Geometry) -> bool:
    """Programs share a tile, and each has slots for all that it fetches."""
    c = g.config
    return c.k_split > 1 and c.x_stages >= part_inputs(g) and c.w_stages >= part_steps(g)
