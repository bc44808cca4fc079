"""Packed weights: the order that contract.h reads, against plain indexing."""

import numpy as np
import pytest
import torch

from onchip.backends.cpp.roles import Panels
from onchip.ir.dtype import DType
from onchip.ir.expr import given, tensor
from onchip.planning.derive import derived_tensor, packed, to_tf32

WIDTH = 16

# axes of batch, of K and of N; the weight holds them in reversed order, as a convolution's does
SHAPES = [
    ((), (3, 3, 5), (37,)),
    ((), (7,), (32,)),
    ((), (7,), (5,)),
    ((), (1, 1, 5), (1,)),
    ((), (1,), (33,)),
    ((), (3, 4), (17,)),
    ((2,), (3, 4), (17,)),
    ((2, 3), (4,), (16,)),
]


def expected(matrix, width):
    batch, k, n = matrix.shape
    out = np.zeros((batch, -(-n // width), k, width), np.float32)
    for column in range(n):
        out[:, column // width, :, column % width] = matrix[:, :, column]
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("view", [True, False])
def test_panels(shape, view):
    axes = tuple(n for part in shape for n in part)
    weight = given(axes[::-1], DType.F32, "w")
    matrix = tensor(
        axes, DType.F32, lambda *i: weight[i[::-1]] if view else weight[i[::-1]] * 3.0, "matrix"
    )
    batch, k, n = (int(np.prod(part, dtype=int)) for part in shape)
    values = torch.randn(axes[::-1])
    plan = packed(Panels(matrix, batch, k, n, ()), WIDTH, frozenset([weight]))
    got = plan.compute([values])
    dense = values.numpy().transpose() * np.float32(1 if view else 3)
    np.testing.assert_allclose(got, expected(dense.reshape(batch, k, n), WIDTH), rtol=1e-6)


def test_tf32_is_the_nearest_number_of_11_bits():
    random = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    u = 2.0**-11
    halves = torch.tensor([1 + u, -1 - u, 1 + 3 * u, 1 + u - 2**-20, 2 - u / 2])
    x = torch.cat([random, random * 2**-100, halves, torch.tensor([0.0, 1.5, -3.25])])
    fraction, exponent = np.frexp(x.double().numpy())
    scaled = np.abs(fraction) * 2**11
    wanted = np.sign(fraction) * np.floor(scaled + 0.5) * 2.0 ** (exponent - 11)
    np.testing.assert_array_equal(to_tf32(x.clone()).double().numpy(), wanted)
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert to_tf32(odd.clone()).tolist()[:2] == [torch.inf, -torch.inf]
    quiet = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # all bits of NaN
    assert to_tf32(quiet).isnan().all()


def test_tf32_keeps_the_strides_that_a_kernel_asks_for():
    w = given((4, 6), DType.F32, "w")
    value = torch.randn(4, 6)
    d = derived_tensor(w, frozenset([w]), (1, 4), tf32=True)
    got = d.compute([value])
    assert got.stride() == (1, 4)
    assert torch.equal(got, to_tf32(value.clone()))
    assert not torch.equal(got, value)
