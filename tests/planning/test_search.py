"""The cheapest cover against trying every cover, and its bound."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.planning import search
from onchip.planning.search import Option, find_circle, lower_bound, prices_of_cuts, solve


@st.composite
def problems(draw, intervals=False):
    """(places, options, edges) with an option for each place alone."""
    count = draw(st.integers(1, 6))
    pairs = list(itertools.combinations(range(count), 2))
    edges = [e for e in pairs if draw(st.booleans())]
    price = st.integers(0, 20).map(float)
    options = [Option((p,), draw(price)) for p in range(count)]
    some = [
        c
        for n in range(2, count + 1)
        for c in itertools.combinations(range(count), n)
        if not intervals or c[-1] - c[0] == n - 1
    ]
    for places in some:
        if draw(st.booleans()):
            options.append(Option(places, draw(price)))
    return count, options, edges


def covers(count, options):
    """Every exact cover, as numbers of options."""

    def grow(chosen, left):
        if not left:
            yield chosen
            return
        first = min(left)
        for i, o in enumerate(options):
            if first in o.places and set(o.places) <= left:
                yield from grow((*chosen, i), left - set(o.places))

    return grow((), set(range(count)))


def runs_in_some_order(parts, edges):
    """Whether the parts can be run one after the other, by trying all orders."""
    for order in itertools.permutations(range(len(parts))):
        turn = {p: k for k, n in enumerate(order) for p in parts[n]}
        if all(turn[a] <= turn[b] for a, b in edges):
            return True
    return False


def legal(count, options, edges):
    for c in covers(count, options):
        if runs_in_some_order([options[i].places for i in c], edges):
            yield c, sum(options[i].us for i in c)


@settings(max_examples=60)
@given(problems())
def test_the_cover_is_the_cheapest_legal_one(problem):
    count, options, edges = problem
    found = solve(count, options, edges)
    best = min(us for _, us in legal(count, options, edges))
    assert found.us == pytest.approx(best)
    assert found.proven
    parts = [options[i].places for i in found.options]
    assert sorted(p for part in parts for p in part) == list(range(count))
    assert runs_in_some_order(parts, edges)


@settings(max_examples=60)
@given(problems(intervals=True))
def test_intervals_need_no_program_and_give_the_same(problem):
    count, options, edges = problem
    best = min(us for _, us in legal(count, options, edges))
    before, search.milp = search.milp, None  # it would be called
    try:
        assert solve(count, options, edges).us == pytest.approx(best)
    finally:
        search.milp = before
    picked, _ = search._program(count, options, [])
    assert sum(options[i].us for i in picked) == pytest.approx(best)


@settings(max_examples=60)
@given(problems())
def test_no_cover_is_below_the_bound(problem):
    count, options, _ = problem
    bound = lower_bound(count, options)
    assert bound >= 0
    assert all(bound <= sum(options[i].us for i in c) + 1e-9 for c in covers(count, options))


@settings(max_examples=30)
@given(problems(intervals=True))
def test_the_bound_of_intervals_is_the_cheapest_cover(problem):
    count, options, edges = problem
    assert lower_bound(count, options) == pytest.approx(solve(count, options, edges).us)


@settings(max_examples=60)
@given(problems(intervals=True))
def test_prices_of_cuts(problem):
    """A cut before place n: the cheapest cover without an option on both sides of it."""
    count, options, edges = problem
    for n, us in enumerate(prices_of_cuts(count, options), 1):
        here = [o for o in options if o.places[0] >= n or o.places[-1] < n]
        assert us == pytest.approx(min(us for _, us in legal(count, here, edges)))


def test_a_fraction_may_be_cheaper_than_any_cover():
    """Three pairs of three places: half of each covers all, for less than any cover takes."""
    options = [Option((p,), 10.0) for p in range(3)]
    options += [Option(pair, 10.0) for pair in itertools.combinations(range(3), 2)]
    assert solve(3, options, []).us == 20.0
    assert lower_bound(3, options) == pytest.approx(15.0)


def test_two_joins_that_wait_for_each_other_are_not_both_made():
    """a → b and c → d: {a, d} and {b, c} are legal each, not together."""
    edges = [(0, 1), (2, 3)]
    options = [Option((p,), 10.0) for p in range(4)]
    options += [Option((0, 3), 1.0), Option((1, 2), 2.0)]
    found = solve(4, options, edges)
    assert found.us == 21.0
    assert 4 in found.options
    both = [Option((p,), 10.0) for p in range(4)] + [Option((0, 2), 1.0), Option((1, 3), 2.0)]
    assert solve(4, both, edges).us == 3.0


def test_a_search_that_ends_without_an_answer_takes_single_places(monkeypatch):
    monkeypatch.setattr(search, "MOST_CIRCLES", 1)
    options = [Option((p,), 10.0) for p in range(4)]
    options += [Option((0, 3), 1.0), Option((1, 2), 2.0)]
    found = solve(4, options, [(0, 1), (2, 3)])
    assert (found.us, found.options, found.proven) == (40.0, (0, 1, 2, 3), False)


def test_circles_are_found():
    assert find_circle([[0, 2], [1]], 3, [(0, 1), (1, 2)])
    assert not find_circle([[0, 1], [2]], 3, [(0, 1), (1, 2)])
    long = [(i, i + 1) for i in range(5000)]
    assert not find_circle([[i] for i in range(5001)], 5001, long)
    assert len(find_circle([[i] for i in range(5001)], 5001, [*long, (5000, 0)])) == 5001


def test_a_place_without_an_option_is_an_error():
    with pytest.raises(AssertionError, match="no option of their own"):
        solve(2, [Option((0,), 1.0)], [])
