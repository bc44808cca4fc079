"""How exact float32 convolutions are on this machine's GPU: those in TF32 have operands that are
rounded to the nearest, and those that PyTorch computes in float32 are as exact as PyTorch's."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onchip
from onchip.planning.derive import to_tf32
from onchip.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here"),
]

# Of operands that are rounded to the nearest: what float32 additions in another order do (Triton's
# kernels: below 3e-6), and the copy engine's own rounding (9e-6). Cut off they give 2e-4.
ROUNDED = 2e-5


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("generator", ["triton", "cuda"])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_operands_are_rounded_not_cut(generator: Literal["triton", "cuda"], last: bool) -> None:
    torch.manual_seed(0)
    form = torch.channels_last if last else torch.contiguous_format
    conv = nn.Conv2d(64, 128, 3, padding=1).cuda().requires_grad_(False)
    model = nn.Sequential(conv, nn.ReLU()).to(memory_format=form)  # type: ignore[call-overload]
    x = torch.randn(16, 64, 56, 56, device="cuda").contiguous(memory_format=form)
    program = onchip.compile(model, (x,), settings=Settings(generator=generator))
    got, eager = program(x), model(x)
    w, bias = to_tf32(conv.weight.clone()).double(), conv.bias
    rounded = F.conv2d(to_tf32(x.clone()).double(), w, padding=1) + bias.double()[:, None, None]  # type: ignore[union-attr]
    exact = model.double()(x.double())
    assert relative(got, exact) < 2 * relative(eager, exact)
    if not program.sources:
        pytest.skip("the library's convolution is faster here")
    assert relative(got, rounded.relu()) < ROUNDED


@pytest.mark.parametrize("channels", [3, 8, 16])
def test_convolutions_are_as_exact_as_pytorchs(channels: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, 64, 3), nn.Hardswish(), nn.ReLU()).cuda().eval()
    x = torch.randn(64, channels, 96, 96, device="cuda")
    with torch.no_grad():
        program = onchip.compile(model, (x,))
        got, eager = program(x), model(x)
        exact = model.double()(x.double())
    assert relative(got, exact) <= 2 * relative(eager, exact) + 2**-23
