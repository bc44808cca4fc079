"""Resampling against ATen."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.conformance.aten import check, express, randn

from onchip.backends.interpreter import evaluate
from onchip.errors import OpaqueOperator
from onchip.ir.expr import loads
from onchip.ir.index import bounds
from onchip.ops.resampling import floor_line

NEAREST = ["upsample_nearest", "_upsample_nearest_exact"]
LINEAR = {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}
FACTORS = [2.0, 3.0, 0.5, 1.7, 0.3, 1.0, 2.5]


@pytest.mark.parametrize("name", NEAREST)
@pytest.mark.parametrize("size", [1, 2, 5, 7, 10, 13, 21, 64])
def test_nearest_to_a_size(name, size):
    check(f"aten.{name}1d.default", randn(2, 3, 7), [size])
    check(f"aten.{name}1d.vec", randn(2, 3, 7), [size], None)
    check(f"aten.{name}2d.vec", randn(2, 3, 7, 5), [size, 9], None)
    check(f"aten.{name}3d.default", randn(1, 2, 3, 4, 5), [size, 3, 7])


@pytest.mark.parametrize("name", NEAREST)
@pytest.mark.parametrize("factor", FACTORS)
def test_nearest_by_a_factor(name, factor):
    check(f"aten.{name}1d.vec", randn(2, 3, 11), None, [factor])
    check(f"aten.{name}2d.vec", randn(2, 3, 11, 5), None, [factor, 2.0])
    check(f"aten.{name}3d.vec", randn(1, 2, 4, 5, 6), None, [factor] * 3)
    size = int(11 * factor)
    check(f"aten.{name}1d.default", randn(2, 3, 11), [size], factor)
    check(f"aten.{name}2d.default", randn(2, 3, 11, 5), [size, 9], factor, None)


@pytest.mark.parametrize("name", NEAREST)
def test_nearest_rounds_as_aten(name):
    """Every pair of small sizes and some large ones: the float32 positions of ATen, exactly."""
    pairs = [(n, m) for n in range(1, 24) for m in range(1, 40)]
    for n, m in [*pairs, (1000, 333), (333, 1000), (49, 1023), (4097, 7)]:
        x = torch.arange(n, dtype=torch.float32).reshape(1, 1, n)
        want = getattr(torch.ops.aten, f"{name}1d")(x, [m])
        (out,), values = express(f"aten.{name}1d.default", (x, [m]), {})
        (got,) = evaluate([out], values)
        np.testing.assert_array_equal(got, want.numpy(), err_msg=f"{n} -> {m}")


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 7, 10, 13, 21])
def test_linear_to_a_size(size, align):
    for rank, shape in [(1, (2, 3, 7)), (2, (2, 3, 7, 5)), (3, (1, 2, 7, 3, 4)), (2, (1, 1, 1, 6))]:
        to = [size, 9, 3][:rank]
        check(f"aten.{LINEAR[rank]}.vec", randn(*shape), to, align, None)
        check(f"aten.{LINEAR[rank]}.default", randn(*shape), to, align)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("factor", FACTORS)
def test_linear_by_a_factor(factor, align):
    check("aten.upsample_linear1d.vec", randn(2, 3, 11), None, align, [factor])
    check("aten.upsample_bilinear2d.vec", randn(2, 3, 11, 5), None, align, [factor, 2.0])
    size = int(11 * factor)
    check("aten.upsample_bilinear2d.default", randn(2, 3, 11, 5), [size, 9], align, factor, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded(dtype):
    x = randn(2, 3, 7, 5, dtype=dtype)
    check("aten.upsample_bilinear2d.vec", x, [13, 9], False, None)
    check("aten.upsample_nearest2d.vec", x, [13, 9], None)


def test_indices_stay_in_bounds_that_are_known():
    (out,), _ = express(
        "aten.upsample_bilinear2d.vec", (randn(2, 3, 7, 5), [13, 9], False, None), {}
    )

    for load in loads(out.body):
        for i, n in zip(load.index, load.src.shape, strict=True):
            low, high = bounds(i)
            assert low >= 0
            assert high < n


def test_floor_line():
    table = np.array([0, 0, 1, 1, 2])
    a, b, c = floor_line(table, [Fraction(1, 2)])
    assert [(a * y + b) // c for y in range(5)] == list(table)
    assert floor_line(np.array([0, 3, 4]), [Fraction(1, 2)]) is None


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.upsample_bicubic2d.vec", ([3, 3], False, None)),
        ("aten._upsample_bilinear2d_aa.vec", ([3, 3], False, None)),
        ("aten.grid_sampler.default", (torch.zeros(1, 2, 2, 2), 0, 0, False)),
    ],
)
def test_left_to_the_library(target, args):
    with pytest.raises(OpaqueOperator):
        express(target, (randn(1, 1, 5, 5), *args), {})
