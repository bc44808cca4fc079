"""Kernels of several phases in whole programs: results, written buffers, and calls side by side."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onchip
from onchip.planning.plan import KernelStep


class Normalised(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(x))


class Loss(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.tanh(x), y)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_in_training(layout: torch.memory_format) -> None:
    """Outputs and running statistics are eager's in float64, call after call."""
    torch.manual_seed(0)
    model = Normalised(5)
    exact = copy.deepcopy(model).double()
    inputs = [torch.randn(7, 5, 61, 67).add(3).to(memory_format=layout) for _ in range(3)]
    program = onchip.compile(model, (inputs[0],))
    for x in inputs:
        with torch.no_grad():
            torch.testing.assert_close(program(x).double(), exact(x.double()), rtol=1e-4, atol=1e-4)
    for name, b in exact.named_buffers():
        found = dict(model.named_buffers())[name]
        torch.testing.assert_close(found.double(), b.double(), rtol=1e-5, atol=1e-5)


def test_callers_side_by_side_have_their_own_workspace() -> None:
    """Each calling thread's partial results are its own."""
    torch.manual_seed(0)
    pairs = [(torch.randn(509, 401) + k, torch.randn(509, 401)) for k in range(8)]
    program = onchip.compile(Loss(), pairs[0])
    steps = program.latest.plan.steps  # type: ignore[union-attr]
    if not any(isinstance(s, KernelStep) for s in steps):
        pytest.skip("the library was measured to be faster here")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda p: float(program(*p)), pairs * 20))
    for got, (x, y) in zip(found, pairs * 20, strict=True):
        want = float(F.mse_loss(torch.tanh(x.double()), y.double()))
        assert got == pytest.approx(want, rel=1e-5)
