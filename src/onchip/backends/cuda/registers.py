"""Whose registers are whose. Where operands are split (tf32x3), a thread holds more than its share:
the warps that fetch and split hand theirs on when the kernel starts (PTX ISA, setmaxnreg)."""

from __future__ import annotations

from onchip.backends.cuda.geometry import GROUP, Geometry, up

REGISTERS = 65536  # of a multiprocessor
HELPING = 40  # of a thread that fetches or splits
NAMED = 255  # of a thread, that instructions can name
MOST = 240  # that a thread is given: a multiple of 8
ADDRESSES = 8  # of a thread, where operands are split


def launched(g: Geometry) -> int:
    """Registers of a thread when the kernel starts: four warps' are handed out at a time."""
    return min(REGISTERS // up(g.threads, 128) // 8 * 8, NAMED)


def handed_on(g: Geometry) -> bool:
    """Whether some warps hand registers on: one warpgroup that multiplies needs no more."""
    return g.problem.splits and g.warpgroups > 1


def available(g: Geometry) -> int:
    """Registers of a thread that multiplies."""
    if not handed_on(g):
        return launched(g)
    left = g.threads * launched(g) - 128 * HELPING
    return min(left // (128 * g.warpgroups) // 8 * 8, MOST)


def part_groups(g: Geometry) -> int:
    """Groups of 8 positions that are summed at a time where operands are split: a divisor of an
    instruction's, as near to 8 as there is."""
    divisors = [n for n in range(1, g.groups + 1) if g.groups % n == 0]
    return min(divisors, key=lambda n: max(n / 8, 8 / n))


def held(g: Geometry) -> int:
    """Registers of a thread that hold sums; where operands are split, also those of two parts of a
    step, and a step's weights, twice, and more addresses."""
    if not g.problem.splits:
        return g.accumulators
    parts = 2 * GROUP * part_groups(g) // 2
    return g.accumulators + parts + 2 * 4 * g.k_steps * g.config.blocks + ADDRESSES
