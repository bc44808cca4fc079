"""Index algebra: simplified indices have the same values, and bounds hold, by brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, axis, call, index_arithmetic, substitute
from onchip.ir.index import bounds, from_linear, linear, simplify, structural_key

EXTENTS = (3, 4, 5)


def value(e: Expr, at: dict[Axis, int]) -> int:
    """An independent evaluation in Python's integers."""
    match e:
        case Axis():
            return at[e]
        case Const(value=v):
            return int(v)
        case Call(fn=fn, args=args):
            x = [value(a, at) for a in args]
            return {
                "add": lambda: x[0] + x[1], "sub": lambda: x[0] - x[1],
                "mul": lambda: x[0] * x[1], "floordiv": lambda: x[0] // x[1],
                "mod": lambda: x[0] % x[1], "neg": lambda: -x[0], "abs": lambda: abs(x[0]),
                "maximum": lambda: max(x), "minimum": lambda: min(x),
            }[fn]()  # fmt: skip
    raise AssertionError(e)


def points(axes: list[Axis]):
    for p in itertools.product(*(range(a.extent) for a in axes)):
        yield dict(zip(axes, p, strict=True))


def random_index(rng: random.Random, axes: list[Axis], depth: int) -> Expr:
    if depth == 0 or rng.random() < 0.15:
        return rng.choice([*axes, Const(rng.randint(-7, 12), DType.I64)])
    a = random_index(rng, axes, depth - 1)
    match rng.choice(["add", "sub", "mul", "floordiv", "mod", "abs", "maximum", "minimum", "neg"]):
        case "mul":
            return index_arithmetic("mul", a, Const(rng.randint(-4, 12), DType.I64))
        case "floordiv" | "mod" as fn:
            return index_arithmetic(fn, a, Const(rng.randint(1, 12), DType.I64))
        case "abs" | "neg" as fn:
            return call(fn, a)
        case fn:
            b = random_index(rng, axes, depth - 1)
            if fn in ("add", "sub"):
                return index_arithmetic(fn, a, b)
            return call(fn, a, b)


@pytest.mark.parametrize("seed", range(300))
def test_simplify_and_bounds_agree_with_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    axes = [axis(n) for n in EXTENTS]
    e = random_index(rng, axes, 5)
    simple, form = simplify(e), from_linear(linear(e))
    low, high = bounds(e)
    simple_low, simple_high = bounds(simple)
    for at in points(axes):
        want = value(e, at)
        assert value(simple, at) == want, f"{at}"
        assert value(form, at) == want
        assert low <= want <= high
        assert simple_low <= want <= simple_high


@pytest.mark.parametrize("seed", range(60))
def test_simplify_within_a_narrower_range(seed: int) -> None:
    rng = random.Random(seed)
    axes = [axis(n) for n in EXTENTS]
    e = random_index(rng, axes, 4)
    env = {}
    for a in axes:
        low = rng.randrange(a.extent)
        env[a] = (low, rng.randrange(low, a.extent))
    simple = simplify(e, env)
    low, high = bounds(e, env)
    for at in points(axes):
        if all(env[a][0] <= at[a] <= env[a][1] for a in axes):
            assert value(simple, at) == value(e, at)
            assert low <= value(e, at) <= high


def test_a_flattened_index_splits_into_its_axes() -> None:
    i, j, k = (axis(n) for n in EXTENTS)
    flat = (i * 4 + j) * 5 + k
    assert simplify(flat // 20) is i
    assert simplify(flat // 5 % 4) is j
    assert simplify(flat % 5) is k


def test_division_and_remainder_recombine() -> None:
    (x,) = (axis(60),)
    assert simplify(x // 12 * 12 + x % 12) is x
    whole = simplify(x // 20 * 20 + x % 20 // 5 * 5 + x % 5)
    for at in points([x]):
        assert value(whole, at) == at[x]


def test_nested_divisions_recombine() -> None:
    """Three dimensions walked by one index, whose middle one was divided in two steps; a quotient
    of something else stays."""
    c, i = axis(7), axis(300)
    whole = c * 300 + i
    y = Call("floordiv", (whole, Const(5, DType.I64)), DType.I64)
    upper = Call("floordiv", (whole, Const(20, DType.I64)), DType.I64)
    middle = Call("mod", (y, Const(4, DType.I64)), DType.I64)
    lower = Call("mod", (whole, Const(5, DType.I64)), DType.I64)
    form = linear(simplify(upper * 20 + middle * 5 + lower))
    assert {(a, k) for a, k in form.terms} == {(c, 300), (i, 1)}
    assert form.constant == 0
    other = Call("floordiv", (whole + 1, Const(20, DType.I64)), DType.I64)
    kept = other * 20 + middle * 5
    for at in ({c: n // 300, i: n % 300} for n in range(2100)):
        assert value(simplify(kept), at) == value(kept, at)


def test_a_part_of_a_divisor_leaves_the_division() -> None:
    """Chunks of 8 walk rows of 16: which row it is depends on the chunk alone."""
    c, i = axis(6), axis(8)
    row, place = simplify((c * 8 + i + 1) // 16), simplify((c * 8 + i) % 16)
    assert structural_key(simplify((c * 8 + i) // 16)) == structural_key(c // 2)
    assert i in [atom for atom, _ in linear(place).terms]
    whole = linear(simplify((c * 8 + i) // 16 * 16 + (c * 8 + i) % 16))
    assert set(whole.terms) == {(c, 8), (i, 1)}
    for at in points([c, i]):
        assert value(row, at) == (at[c] * 8 + at[i] + 1) // 16
        assert value(place, at) == (at[c] * 8 + at[i]) % 16


def test_bounds_of_absolute_values() -> None:
    (x,) = (axis(10),)
    assert bounds(call("abs", x - 3)) == (0, 6)
    assert bounds(call("abs", x + 2)) == (2, 11)
    assert bounds(call("abs", x - 20)) == (11, 20)
    assert bounds(call("neg", x)) == (-9, 0)


def test_structural_keys_merge_equal_terms() -> None:
    (x,) = (axis(10),)
    assert structural_key(x // 3) == structural_key(x // 3)
    assert structural_key(x // 3) != structural_key(x // 4)
    form = linear(x // 3 + x // 3 * 2)
    assert [c for _, c in form.terms] == [3]


def test_substitution_folds_constants() -> None:
    x, y = axis(4), axis(5)
    assert substitute(x * 5 + 2, {x: Const(3, DType.I64)}).value == 17
    assert substitute(x + 0, {x: y}) is y
