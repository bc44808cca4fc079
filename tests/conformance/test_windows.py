"""Pooling against ATen."""

import itertools

import pytest
import torch
from tests.conformance.aten import check, express, randn

from onchip.errors import OpaqueOperator
from onchip.ops.windows import pooled_size

MAX = [
    # kernel, stride, padding, dilation, ceil_mode
    (2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 2, 1, 1, True), (3, 1, 1, 2, False),
    ([3, 2], [1, 2], [1, 0], [2, 1], False), (2, 3, 1, 1, True), (5, 5, 2, 1, True),
]  # fmt: skip


@pytest.mark.parametrize("setting", MAX)
@pytest.mark.parametrize("x", [(2, 3, 7, 11), (1, 1, 8, 5), (3, 9, 7), (0, 3, 7, 7)])
def test_max_pool2d(x, setting):
    kernel, stride, padding, dilation, ceil = setting
    args = [k if isinstance(k, list) else [k] * 2 for k in (kernel, stride, padding, dilation)]
    # all negative: padding with zero would win
    below = -randn(*x).abs() - 1
    for value in (randn(*x), below):
        check("aten.max_pool2d.default", value, *args, ceil)
        check("aten.max_pool2d_with_indices.default", value, *args, ceil)


def test_max_pool1d_and_3d():
    for ceil in (False, True):
        x = randn(2, 3, 11) - 5
        check("aten.max_pool1d.default", x, [3], [2], [1], [1], ceil)
        check("aten.max_pool1d_with_indices.default", x, [3], [2], [1], [2], ceil)
        x = randn(2, 3, 5, 7, 6) - 5
        check("aten.max_pool3d.default", x, [3, 2, 3], [2], [1], [1], ceil)
        check("aten.max_pool3d_with_indices.default", x, [3, 2, 3], [2], [1], [1], ceil)
    check("aten.max_pool2d.default", randn(1, 2, 6, 9), [3])


def test_max_pool_of_ties_and_of_what_is_not_a_number():
    x = torch.randint(-2, 3, (2, 3, 9, 9)).float()
    x[0, 0, 4, 4] = x[0, 0, 4, 5] = x[1, 1, 0, 0] = float("nan")
    x[0, 1] = -float("inf")
    x[1, 2, 3] = float("inf")
    for kernel, stride, padding in [(3, 2, 1), (2, 2, 0), (3, 1, 1)]:
        check("aten.max_pool2d_with_indices.default", x, [kernel], [stride], [padding])
    check("aten.adaptive_max_pool2d.default", x, [4, 5])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("override", [None, 5, -3])
@pytest.mark.parametrize("setting", [(3, 2, 1), (2, 2, 0), (3, 3, 1), (2, 3, 1), (5, 2, 2)])
def test_avg_pool(setting, override, ceil, include):
    k, s, p = setting
    for shape in [(2, 3, 7, 11), (2, 8, 9), (0, 3, 7, 7)]:
        check("aten.avg_pool2d.default", randn(*shape), [k], [s], [p], ceil, include, override)
    check("aten.avg_pool2d.default", randn(2, 3, 7, 8), [k, 3], [s, 1], [p, 0], ceil, include)
    check("aten.avg_pool1d.default", randn(2, 3, 11), [k], [s], [p], ceil, include)
    check("aten.avg_pool3d.default", randn(2, 5, 7, 6), [k], [s], [p], ceil, include, override)


@pytest.mark.parametrize("out", [1, 2, 3, 4, 7, 9])
def test_adaptive(out):
    for kind in ("avg", "max"):
        x = randn(2, 3, 7) - 4
        check(f"aten.adaptive_{kind}_pool1d.default", x, [out])
        for shape in [(2, 3, 7, 12), (3, 8, 5), (0, 3, 8, 8)]:
            check(f"aten.adaptive_{kind}_pool2d.default", randn(*shape) - 4, [out, 3])
        check(f"aten.adaptive_{kind}_pool3d.default", randn(2, 5, 7, 6) - 4, [out, 2, 3])
    check("aten._adaptive_avg_pool2d.default", randn(2, 3, 7, 12), [out, out])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    x = randn(2, 3, 7, 12, dtype=dtype)
    check("aten.avg_pool2d.default", x, [3], [2], [1])
    check("aten.max_pool2d.default", x, [3], [2], [1])
    check("aten.adaptive_avg_pool2d.default", x, [3, 5])


@pytest.mark.parametrize("ceil", [False, True])
def test_pooled_size(ceil):
    settings = itertools.product(range(5, 14), (2, 3, 5), (1, 2, 3, 4), (0, 1, 2))
    for size, kernel, stride, padding in settings:
        if padding > kernel // 2:
            continue
        out = torch.max_pool1d(torch.zeros(1, 1, size), kernel, stride, padding, 1, ceil)
        assert pooled_size(size, kernel, stride, padding, 1, ceil) == out.shape[-1]


@pytest.mark.parametrize("name", ["max_pool2d", "adaptive_max_pool2d", "avg_pool2d"])
def test_integers_are_left_to_the_library(name):
    with pytest.raises(OpaqueOperator, match="int64"):
        express(f"aten.{name}.default", (torch.ones(1, 1, 4, 4).long(), [2, 2]), {})
