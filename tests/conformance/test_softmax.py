"""Softmax and the losses made of it against ATen."""

import numpy as np
import pytest
import torch
from tests.conformance.aten import check, express, randn

from onchip.backends.interpreter import evaluate
from onchip.errors import OpaqueOperator


@pytest.mark.parametrize("shape", [(2, 3, 5), (7,), (3, 1), (), (0, 4), (4, 0)])
@pytest.mark.parametrize("dim", [0, -1])
def test_softmax(shape, dim):
    x = randn(*shape) * 30
    for name in ("softmax", "log_softmax"):
        check(f"aten.{name}.int", x, dim)
        check(f"aten.{name}.int", x, dim, dtype=torch.float64)
        check(f"aten._{name}.default", x, dim, False)
    check("aten._safe_softmax.default", x, dim)


def test_middle_dimension_and_conversion():
    x = randn(2, 7, 3)
    for name in ("softmax", "log_softmax"):
        check(f"aten.{name}.int", x, 1)
        check(f"aten.{name}.int", x.bfloat16(), 1, dtype=torch.float32)
        check(f"aten.{name}.int", torch.randint(-3, 3, (4, 5)), -1, dtype=torch.float32)


def test_infinities():
    x = randn(4, 5)
    x[0] = -float("inf")
    x[1, 2] = float("inf")
    x[2, 3] = float("nan")
    x[3, 1] = -float("inf")
    check("aten.softmax.int", x, 1)
    check("aten.log_softmax.int", x, 1)
    check("aten._safe_softmax.default", x, 1)
    check("aten.softmax.int", torch.tensor(float("inf")), 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    x = randn(3, 31, dtype=dtype)
    check("aten.softmax.int", x, 1)
    check("aten.log_softmax.int", x, 1)


def test_integers_are_left_to_the_library():
    with pytest.raises(OpaqueOperator, match="int64"):
        express("aten.softmax.int", (torch.ones(2, 3).long(), 1), {})


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("space", [(), (3, 2)])
def test_class_losses(reduction, weighted, space):
    x = randn(4, 5, *space)
    target = torch.arange(4 * int(np.prod(space))).reshape(4, *space) % 5
    weight = randn(5).abs() if weighted else None
    for ignored in (-100, 2):
        tail = (weight, reduction, ignored)
        check("aten.cross_entropy_loss.default", x, target, *tail)
        check("aten.nll_loss_nd.default", x, target, *tail)
        name = "nll_loss2d" if space else "nll_loss"
        check(f"aten.{name}.default", x, target, *tail)
        check(f"aten.{name}_forward.default", x, target, *tail)
    probabilities = torch.softmax(randn(4, 5, *space, seed=5), 1)
    check("aten.cross_entropy_loss.default", x, probabilities, weight, reduction)
    if not space:
        check("aten.cross_entropy_loss.default", x[0], target[1], weight, reduction)
        check("aten.cross_entropy_loss.default", x[0], probabilities[0], weight, reduction)


def test_ignored_classes():
    target = torch.tensor([0, -100, 4, -100])
    check("aten.cross_entropy_loss.default", randn(4, 5), target)
    check("aten.cross_entropy_loss.default", randn(4, 5), target * 0 - 100)


def test_a_class_out_of_range_gives_nan():
    args = (randn(2, 5), torch.tensor([0, 5]), None, 0)
    (out,), values = express("aten.cross_entropy_loss.default", args, {})
    (got,) = evaluate([out], values)
    assert np.isnan(got[1])
    assert not np.isnan(got[0])
