"""Losses of two tensors against ATen."""

import pytest
import torch
from tests.conformance.aten import check, randn

LOSSES = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(3, 7), (11,), (), (2, 0)])
@pytest.mark.parametrize("name", LOSSES)
def test_distances(name, shape, reduction):
    check(f"aten.{name}.default", randn(*shape), randn(*shape, seed=1), reduction)


@pytest.mark.parametrize("name", ["smooth_l1_loss", "huber_loss"])
@pytest.mark.parametrize("bend", [0.25, 2.5])
def test_bends(name, bend):
    x, y = randn(5, 9), randn(5, 9, seed=1)
    x[0, 0] = y[0, 0] + bend
    check(f"aten.{name}.default", x, y, 0, bend)


def test_smooth_l1_without_a_bend():
    check("aten.smooth_l1_loss.default", randn(5, 9), randn(5, 9, seed=1), 1, 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_types(name, dtype):
    check(f"aten.{name}.default", randn(4, 31, dtype=dtype), randn(4, 31, dtype=dtype, seed=1))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("positive", [False, True])
def test_binary_cross_entropy_with_logits(reduction, weighted, positive):
    x, target = randn(4, 6) * 20, randn(4, 6, seed=1).sigmoid()
    weight = randn(6, seed=2).abs() if weighted else None
    pos_weight = randn(6, seed=3).abs() if positive else None
    check("aten.binary_cross_entropy_with_logits.default", x, target, weight, pos_weight, reduction)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_divergence(reduction, log_target):
    x, target = randn(4, 6).log_softmax(-1), randn(4, 6, seed=1).log_softmax(-1)
    if not log_target:
        target = target.exp()
        target[1, 2] = 0.0
    check("aten.kl_div.default", x, target, reduction, log_target=log_target)
