"""What was measured against what, in words: where fusion lost, and where one kernel met two."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.analysis.record import Contest
from onchip.planning.intervals import words
from onchip.report.report import Report

SHOWN = 6  # operators of a region that are named


def lost(r: Report) -> list[str]:
    """Each place where fusion was tried and lost, with both times and the interval."""
    forms = {"operators": "as library calls", "two kernels": "as two kernels", "eager": "unfused"}
    return [
        f"{named(c)}: {us(c.fused_us)} fused, {us(c.unfused_us)} {forms[c.against]}{ratio(c)}"
        for c in r.contests
        if not c.won
    ]


def one_or_two(contests: Sequence[Contest]) -> list[str]:
    """Each group that was measured as one kernel and as two, with what won."""
    lines = []
    for c in contests:
        if c.against == "two kernels":
            winner = "one kernel" if c.won else "two kernels"
            times = f"{us(c.fused_us)} as one, {us(c.unfused_us)} as two"
            lines.append(f"{named(c)}: {winner}: {times} (cut behind {c.first[-1]}){ratio(c)}")
    return lines


def named(c: Contest) -> str:
    """The operators of a contest; of many the first and the last."""
    if c.against == "eager":
        return "the whole program"
    if len(c.ops) <= SHOWN:
        return " + ".join(c.ops)
    ends = " + ".join((*c.ops[: SHOWN // 2], "…", *c.ops[-(SHOWN // 2) :]))
    return f"{ends} ({len(c.ops)} operators)"


def us(t: float) -> str:
    return f"{t / 1e3:,.2f} ms" if t >= 1e3 else f"{t:.3g} µs"


def ratio(c: Contest) -> str:
    found = words(c.ratio)
    return f": {found}" if found else ""
