"""Whether one of two forms takes less time: the ratio of their times, with a confidence interval.

Forms take turns, so what slows the machine down for a while meets both, and the ratio of the two
times of one round is hardly touched by it. No distribution is assumed: the interval of the median
ratio is between two order statistics, whose places the binomial distribution gives (W. J. Conover,
Practical Nonparametric Statistics, "confidence interval for a quantile"). scipy.stats has it as
quantile_test, but takes 0.8 s to be imported; tests compare the two.

Who stands by default (the library's calls against a kernel, one kernel against two, the fused
program against the model as given) stands unless the interval lies on the other side of 1.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from onchip.analysis.record import Interval
from onchip.planning.timing import Timed, rounds

CONFIDENCE = 0.95
# Of fewer ratios not even the smallest and the largest are such an interval: 1 - 2 / 2^5 = 94 %.
LEAST_ROUNDS = 6
MOST_ROUNDS = 48


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of two forms, round by round."""

    mine: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def ratio(self) -> Interval | None:
        """`mine` over `other`; None of too few rounds."""
        return interval(self.mine, self.other)

    @property
    def faster(self) -> bool:
        """`mine` takes less, beyond noise."""
        return self.ratio is not None and self.ratio.high < 1

    @property
    def slower(self) -> bool:
        """`mine` takes more, beyond noise."""
        return self.ratio is not None and self.ratio.low > 1

    @property
    def best_us(self) -> tuple[float, float]:
        """Microseconds of each in its best round (see timing.fastest)."""
        return min(self.mine) * 1e6, min(self.other) * 1e6

    @property
    def median_us(self) -> tuple[float, float]:
        return statistics.median(self.mine) * 1e6, statistics.median(self.other) * 1e6


def interval(mine: Sequence[float], other: Sequence[float]) -> Interval | None:
    """The ratio of times that were measured in turn; None of fewer than LEAST_ROUNDS."""
    ratios = sorted(a / b for a, b in zip(mine, other, strict=True))
    n = len(ratios)
    if n < LEAST_ROUNDS:
        return None
    # As many ratios are left out at each end as leave the median out in 5 % of all cases at most.
    out, tail = 0, 1.0
    while (tail := tail + math.comb(n, out + 1)) / 2**n <= (1 - CONFIDENCE) / 2:
        out += 1
    return Interval(statistics.median(ratios), ratios[out], ratios[n - 1 - out], n)


def compare(
    mine: Timed,
    other: Timed,
    budget_s: float,
    so_far: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> Comparison:
    """Both in turn, until the interval leaves 1 out, for `budget_s` seconds at most beyond the
    first LEAST_ROUNDS. It is looked at after 6, 12, 24 and 48 rounds only: each look has its own
    chance of an error. so_far: seconds of rounds in which they have taken turns already."""
    end = time.perf_counter() + budget_s
    a, b = map(list, so_far)
    more = rounds((mine, other), max(LEAST_ROUNDS - len(a), 0))
    while True:
        found = Comparison((*a, *more[0]), (*b, *more[1]))
        a, b = list(found.mine), list(found.other)
        left = end - time.perf_counter()
        if found.faster or found.slower or len(a) >= MOST_ROUNDS or left <= 0:
            return found
        more = rounds((mine, other), min(len(a), MOST_ROUNDS - len(a)), left)


def words(ratio: Interval | None) -> str:
    """ "0.71× (0.69–0.73)", "no difference beyond noise (0.98–1.03×)"; "" if there is none."""
    if ratio is None:
        return ""
    if ratio.low <= 1 <= ratio.high:
        return f"no difference beyond noise ({ratio.low:.2f}–{ratio.high:.2f}×)"
    return f"{ratio.median:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"
