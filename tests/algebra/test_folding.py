"""Batch-norm folding: right against float64, and only where it is legal."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.modules import Fn, interpret, targets
from torch import nn

from onchip.algebra import fold_batch_norm
from onchip.algebra.folding import scaled
from onchip.capture import capture

NORM = "aten._native_batch_norm_legit_no_training.default"


def randomize(m):
    for b in m.modules():
        if isinstance(b, nn.modules.batchnorm._BatchNorm) and b.running_mean is not None:
            b.running_mean.normal_()
            b.running_var.uniform_(0.3, 2.0)
            if b.affine:
                nn.init.uniform_(b.weight, -1.5, 1.5)
                nn.init.normal_(b.bias)
    return m


LAYERS = [
    (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), (2, 3, 7, 7)),
    (nn.Conv2d(4, 6, 3, bias=False, groups=2, stride=2), nn.BatchNorm2d(6, eps=1e-2), (2, 4, 9, 7)),
    (nn.Conv2d(4, 5, 3, padding="same"), nn.BatchNorm2d(5, affine=False), (1, 4, 6, 5)),
    (nn.Conv1d(3, 5, 3, dilation=2), nn.BatchNorm1d(5), (2, 3, 11)),
    (nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), (1, 2, 3, 4, 5)),
    (nn.Linear(5, 7), nn.BatchNorm1d(7), (3, 5)),
    (nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), (3, 5)),
]


@pytest.mark.parametrize(("layer", "norm", "shape"), LAYERS, ids=lambda x: str(x)[:30])
@torch.no_grad()
def test_folded_result_is_as_accurate_as_eager(layer, norm, shape):
    m = randomize(nn.Sequential(layer, norm)).eval()
    x = torch.randn(shape)
    c = fold_batch_norm(capture(m, (x,)))
    assert NORM not in targets(c)
    assert len(c.graph.nodes) == 1
    assert c.ledger[0].nodes == ("0", "1")
    exact = copy.deepcopy(m).double()(x.double())
    error = (interpret(c, [x])[0] - exact).norm() / exact.norm()
    # ATen's convolutions start their sums with the bias, which folding makes larger
    assert error < 3e-7
    assert error <= 4 * (m(x) - exact).norm() / exact.norm()


@pytest.mark.parametrize(
    "f",
    [
        lambda s, x: s.bn(F.relu(s.conv(x))),  # an activation between
        lambda s, x: s.bn(s.conv(x)) + s.conv(x).sum(),  # another user of the same result
        lambda s, x: (lambda y: (s.bn(y), y))(s.conv(x)),  # the result leaves
        lambda s, x: s.bn(s.line(x)),  # channels are not the last axis
        lambda s, x: s.bn(F.conv2d(x, x[:4])),  # the weight is no constant
    ],
)
def test_not_folded(f):
    m = Fn(f, conv=nn.Conv2d(4, 4, 3), bn=nn.BatchNorm2d(4), line=nn.Linear(6, 6))
    m = randomize(m).eval()
    x = torch.randn(5, 4, 6, 6)
    c = fold_batch_norm(capture(m, (x,)))
    assert NORM in targets(c)
    assert {e.kind for e in c.ledger} <= {"computed_once"}


def test_training_is_not_folded():
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    c = fold_batch_norm(capture(m, (torch.randn(2, 3, 5, 5),)))
    assert {e.kind for e in c.ledger} <= {"computed_once"}


@torch.no_grad()
def test_a_shared_layer_is_folded_once_for_each_norm():
    m = Fn(
        lambda s, x: s.b1(s.conv(x)) + s.b2(s.conv(x + 1)),
        conv=nn.Conv2d(3, 8, 3),
        b1=nn.BatchNorm2d(8),
        b2=nn.BatchNorm2d(8),
    )
    m = randomize(m).eval()
    x = torch.randn(2, 3, 8, 8)
    c = fold_batch_norm(capture(m, (x,)))
    assert len(c.ledger) == 2
    torch.testing.assert_close(interpret(c, [x])[0], m(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_chain_is_folded_everywhere():
    m = nn.Sequential(
        *[k for _ in range(3) for k in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())]
    )
    m = randomize(m).eval()
    x = torch.randn(2, 3, 4, 4)
    c = fold_batch_norm(capture(m, (x,)))
    assert len(c.ledger) == 3
    assert NORM not in targets(c)
    torch.testing.assert_close(interpret(c, [x])[0], m(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_half_precision_is_rounded_once():
    m = randomize(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))).eval().bfloat16()
    x = torch.randn(5, 8).bfloat16()
    c = fold_batch_norm(capture(m, (x,)))
    exact = copy.deepcopy(m).double()(x.double())
    got = interpret(c, [x])[0]
    assert got.dtype is torch.bfloat16
    assert (got - exact).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("shape", [(70, 33, 5, 5), (3, 40000), (1, 1), (5, 0)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_weights_are_scaled_block_by_block_and_rounded_once(shape, channels_last):
    weight, scale = torch.randn(shape), torch.randn(shape[0], dtype=torch.float64)
    if channels_last and len(shape) == 4:
        weight = weight.to(memory_format=torch.channels_last)
    exact = weight.numpy().astype("f8") * scale.numpy().reshape(-1, *[1] * (len(shape) - 1))
    got = scaled(weight, scale)
    assert got.stride() == weight.stride()
    assert torch.equal(got, torch.from_numpy(exact.astype("f4")))
