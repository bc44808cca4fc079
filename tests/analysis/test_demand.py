"""Demand against brute force: the index of every load evaluated at every point."""

import itertools

import pytest

from onchip.analysis.demand import demand, demand_through, hull, recompute_factor, volume, whole
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, call, given, loads, mentioned, tensor, where

from .builders import binary, conv2d, matmul, max_pool, relu

F32 = DType.F32


def value(e, at):
    match e:
        case Axis():
            return at[e]
        case Const(value=v):
            return int(v)
        case Call(fn=fn, args=(a, b)):
            x, y = value(a, at), value(b, at)
            return {"add": x + y, "sub": x - y, "mul": x * y, "floordiv": x // y if y else 0,
                    "mod": x % y if y else 0}[fn]  # fmt: skip
    raise AssertionError(e)


def touched(t, region):
    """source -> set of in-bounds index tuples that a box of t reads."""
    out = {}
    env = dict(zip(t.axes, region, strict=True))
    for ld in loads(t.body):
        axes = sorted({a for i in ld.index for a in mentioned(i)}, key=lambda a: a.name)
        ranges = [range(env[a][0], env[a][1] + 1) if a in env else range(a.extent) for a in axes]
        for point in itertools.product(*ranges):
            at = dict(zip(axes, point, strict=True))
            where_ = tuple(value(i, at) for i in ld.index)
            if all(0 <= p < n for p, n in zip(where_, ld.src.shape, strict=True)):
                out.setdefault(ld.src, set()).add(where_)
    return out


X = given((2, 4, 7, 9), F32)
CASES = [
    (relu(X), ((0, 1), (1, 2), (3, 3), (2, 8))),
    (max_pool(X, 3, 2, 1), ((1, 1), (0, 3), (0, 0), (1, 3))),
    (max_pool(X, 3, 2, 1), ((0, 0), (0, 0), (3, 3), (4, 4))),
    (max_pool(X, 2, 2), ((0, 1), (0, 3), (0, 2), (0, 3))),
    (conv2d(X, given((6, 4, 3, 3), F32), 2, 1), ((0, 0), (2, 4), (1, 2), (0, 1))),
    (
        tensor((4, 2, 9, 7), F32, lambda a, b, c, d: X[b, a, d, 8 - c]),
        ((1, 2), (0, 0), (2, 4), (6, 6)),
    ),
    (tensor((8, 63), F32, lambda i, j: X[i // 4, i % 4, j // 9, j % 9]), ((0, 3), (9, 17))),
    (tensor((7, 7), F32, lambda i, j: X[0, 0, i, j] * X[1, 3, j, i]), ((1, 2), (5, 6))),
]


@pytest.mark.parametrize(("t", "region"), CASES)
def test_demand_is_the_hull_of_what_is_read(t, region):
    found = demand(t, region)
    expected = touched(t, region)
    assert set(found) == set(expected)
    for src, points in expected.items():
        box = tuple((min(p), max(p)) for p in zip(*points, strict=True))
        assert found[src] == box


def test_data_dependent_and_conditional_reads_are_supersets():
    table, ids = given((10, 4), F32), given((6,), DType.I64)
    t = tensor((6, 4), F32, lambda i, j: table[ids[i], j])
    assert demand(t, ((2, 3), (1, 1))) == {table: ((0, 9), (1, 1)), ids: ((2, 3),)}
    c = tensor((6,), F32, lambda i: where(call("lt", i, 3, dtype=DType.BOOL), table[i, 0], 0.0))
    assert demand(c, ((4, 5),)) == {table: ((4, 5), (0, 0))}


def test_empty():
    x = given((0, 4), F32)
    y = relu(x)
    assert demand(y, whole(y)) == {}
    assert demand(relu(X), ((0, 1), (2, 1), (0, 0), (0, 0))) == {}
    assert volume(()) == 1
    assert hull(((2, 1),), ((4, 5),)) == ((4, 5),)
    assert recompute_factor(y, x, (1, 1)) == 1.0
    # a reduction over nothing reads nothing
    m = matmul(given((3, 0), F32, "a"), given((0, 2), F32, "b"))
    assert all(volume(b) == 0 for b in demand(m, whole(m)).values())


def test_demand_through_a_chain_grows_by_each_halo():
    x, w = given((1, 1, 32, 32), F32), given((1, 1, 3, 3), F32)
    a = conv2d(x, w, padding=1)
    b = conv2d(a, w, padding=1)
    c = max_pool(b, 2, 2)
    need = demand_through(c, ((0, 0), (0, 0), (4, 4), (5, 6)), [x, w])
    assert need[b][2:] == ((8, 9), (10, 13))
    assert need[a][2:] == ((7, 10), (9, 14))
    assert need[x][2:] == ((6, 11), (8, 15))


@pytest.mark.parametrize(
    ("k", "s", "p", "dilation", "tile", "expected"),
    [
        (2, 2, 0, 1, 1, 1.0),
        (3, 2, 1, 1, 1, 2.25),
        (3, 2, 1, 1, 2, (5 / 4) ** 2),
        (3, 2, 1, 1, 8, (17 / 16) ** 2),
        (3, 1, 1, 1, 1, 9.0),
        (3, 1, 2, 2, 1, 9.0),
        (1, 2, 0, 1, 4, 1.0),
        (3, 2, 1, 1, 56, 1.0),
    ],
)
def test_recompute_of_a_window(k, s, p, dilation, tile, expected):
    x = given((1, 1, 112, 112), F32)
    pool = max_pool(x, k, s, p, dilation)
    assert recompute_factor(pool, x, (1, 1, tile, tile)) == pytest.approx(expected)


def test_recompute_of_operands_that_do_not_see_an_axis():
    a, b = given((64, 32), F32), given((32, 48), F32)
    mm = matmul(a, b)
    assert recompute_factor(mm, a, (16, 16)) == 3.0
    assert recompute_factor(mm, b, (16, 16)) == 4.0
    assert recompute_factor(mm, a, (1, 48)) == 1.0
    y = binary("add", a, a)
    assert recompute_factor(y, a, (1, 1)) == 1.0
    assert recompute_factor(y, b, (1, 1)) == 1.0  # not read


def test_recompute_through_a_reshape():
    x = given((8, 6), F32)
    flat = tensor((48,), F32, lambda i: call("exp", x[i // 6, i % 6]))
    assert recompute_factor(flat, x, (6,)) == pytest.approx(1.0)


def test_demand_through_a_diamond_is_the_hull_of_both_ways():
    x, w = given((1, 1, 16, 16), F32), given((1, 1, 3, 3), F32)
    a = relu(x)
    b = conv2d(a, w, padding=1)
    for c in (binary("add", a, b), binary("add", b, a)):
        need = demand_through(c, ((0, 0), (0, 0), (4, 6), (5, 5)), [x, w])
        assert need[a][2:] == need[x][2:] == ((3, 7), (4, 6))
