"""Confidence intervals of times measured in turn, against scipy's and by simulation."""

from itertools import cycle

import numpy as np
import pytest
from scipy.stats import quantile_test

from onchip.analysis.record import Interval
from onchip.planning.intervals import LEAST_ROUNDS, MOST_ROUNDS, compare, interval, words


@pytest.mark.parametrize("n", [6, 7, 8, 9, 12, 17, 24, 25, 48, 60])
def test_the_interval_is_scipys(n):
    rng = np.random.default_rng(n)
    a, b = rng.lognormal(size=n), rng.lognormal(size=n)
    found = interval(a.tolist(), b.tolist())
    expected = quantile_test(a / b, q=1.0, p=0.5).confidence_interval(0.95)
    assert (found.low, found.high, found.rounds) == (expected.low, expected.high, n)
    assert found.median == np.median(a / b)


def test_too_few_rounds_have_none():
    assert interval([1.0] * 5, [2.0] * 5) is None
    assert interval([1.0] * 6, [2.0] * 6) == Interval(0.5, 0.5, 0.5, 6)


def test_the_interval_holds_the_median_in_95_percent_of_all_cases():
    """Also of ratios with a long tail; 2,000 trials: 2.5 standard deviations are 1.2 %."""
    rng = np.random.default_rng(0)
    for n in (6, 12, 48):
        hits = 0
        for _ in range(2000):
            found = interval(rng.lognormal(sigma=0.5, size=n).tolist(), [1.0] * n)
            hits += found.low <= 1 <= found.high
        assert hits / 2000 > 0.95 - 0.012


def told(seconds):
    """Times in turn, and how often they were asked for."""
    left, asked = cycle(seconds), []

    def timed():
        asked.append(1)
        return next(left)

    return timed, asked


def test_a_clear_difference_is_known_after_six_rounds():
    (a, asked), (b, _) = told([1.0, 1.1]), told([2.0])
    found = compare(a, b, 60.0)
    assert (len(asked), found.faster, found.slower) == (LEAST_ROUNDS, True, False)
    assert found.best_us == (1e6, 2e6)
    assert found.median_us == (pytest.approx(1.05e6), 2e6)


def test_a_tie_is_measured_to_the_end():
    (a, asked), (b, _) = told([1.0, 1.1, 0.9]), told([1.0])
    found = compare(a, b, 60.0)
    assert len(asked) == MOST_ROUNDS
    assert not found.faster
    assert not found.slower


def test_no_longer_than_the_budget():
    (a, asked), (b, _) = told([1.0, 1.1, 0.9]), told([1.0])
    compare(a, b, 0.0)
    assert len(asked) == LEAST_ROUNDS


def test_earlier_rounds_count():
    (a, asked), (b, _) = told([1.0]), told([2.0])
    found = compare(a, b, 60.0, ([1.0] * 4, [2.0] * 4))
    assert len(asked) == 2
    assert found.ratio == Interval(0.5, 0.5, 0.5, 6)
    (a, asked), (b, _) = told([1.0]), told([2.0])
    compare(a, b, 60.0, ([1.0] * 9, [2.0] * 9))
    assert asked == []


def test_a_few_disturbed_rounds_decide_nothing():
    """Two of twelve rounds were ten times as long for one of the two: the median ratio is 0.9."""
    (a, _), (b, _) = told([0.9] * 5 + [9.0]), told([1.0])
    found = compare(a, b, 60.0)
    assert found.faster
    assert found.ratio.rounds == 12


def test_words():
    assert words(Interval(0.712, 0.69, 0.731, 12)) == "0.71× (0.69–0.73)"
    assert words(Interval(1.01, 0.98, 1.03, 48)) == "no difference beyond noise (0.98–1.03×)"
    assert words(None) == ""
