"""The one way of timing on the CPU: warm up, interleave, compare."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

# Threads of an OpenMP or ONNX Runtime pool spin for some milliseconds after their work, and would
# take a core from another library's function that is timed next.
SETTLE_S = 0.03


def samples(
    functions: Sequence[Callable[[], object]],
    budget_s: float,
    most: int = 50,
    least: int = 3,
    settle: bool = False,
) -> list[list[float]]:
    """Seconds of each function in every round, measured in turn so that drift of the machine's
    speed meets all alike. Each is called once before, unmeasured. Stops after `budget_s` seconds in
    total, but not before `least` rounds. settle: functions of different libraries, each given a
    pause and an unmeasured call before its turn."""
    for f in functions:
        f()
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + budget_s
    while len(times[0]) < most and (len(times[0]) < least or time.perf_counter() < end):
        for f, mine in zip(functions, times, strict=True):
            if settle:
                time.sleep(SETTLE_S)
                f()
            start = time.perf_counter()
            f()
            mine.append(time.perf_counter() - start)
    return times


def measurably_slower(mine: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `mine` took longer than `other` in rounds measured side by side: by more than 2 % in
    the median, and in so many rounds that chance alone would give that less than once in 20."""
    if statistics.median(mine) <= 1.02 * statistics.median(other):
        return False
    lost = sum(a > b for a, b in zip(mine, other, strict=True))
    n = len(mine)
    return sum(math.comb(n, k) for k in range(lost, n + 1)) / 2**n < 0.05


def fastest(
    functions: Sequence[Callable[[], object]], budget_s: float, keep: float = 1.5
) -> list[float]:
    """Seconds of each function in its best round: kernels do the same work every time, so whatever
    took longer was something else on the machine, and a choice must not depend on that. Functions
    clearly slower in the first rounds (by more than `keep`) are not timed again."""
    first = [min(t) for t in samples(functions, 0.0, least=3)]
    limit = min(first) * keep
    again = [i for i, t in enumerate(first) if t <= limit]
    second = samples([functions[i] for i in again], budget_s)
    out = list(first)
    for i, t in zip(again, second, strict=True):
        out[i] = min(out[i], *t)
    return out
