"""Packed weights: the order that contract.h reads, against plain indexing."""

import numpy as np
import pytest
import torch

from onchip.backends.cpp.roles import Panels
from onchip.ir.dtype import DType
from onchip.ir.expr import given, tensor
from onchip.planning.derive import packed

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
