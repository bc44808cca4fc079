"""The one way of timing on the CPU: warm up, interleave, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def interleaved(
    functions: Sequence[Callable[[], object]], budget_s: float, most: int = 50, least: int = 3
) -> list[float]:
    """Median seconds of each function, measured in turn so that drift of the machine's speed
    meets all alike. Stops after `budget_s` seconds in total, but not before `least` rounds."""
    for f in functions:
        f()
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + budget_s
    while len(times[0]) < most and (len(times[0]) < least or time.perf_counter() < end):
        for f, mine in zip(functions, times, strict=True):
            start = time.perf_counter()
            f()
            mine.append(time.perf_counter() - start)
    return [statistics.median(t) for t in times]


def fastest(
    functions: Sequence[Callable[[], object]], budget_s: float, keep: float = 1.5
) -> list[float]:
    """Like `interleaved`, but functions that were clearly slower in a first round (by more than
    `keep`) are not timed again."""
    first = interleaved(functions, 0.0, least=2)
    limit = min(first) * keep
    again = [i for i, t in enumerate(first) if t <= limit]
    second = interleaved([functions[i] for i in again], budget_s)
    out = list(first)
    for i, t in zip(again, second, strict=True):
        out[i] = t
    return out
