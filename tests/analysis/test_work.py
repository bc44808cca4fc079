"""FLOPs against hand formulas and against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from onchip.analysis.work import flops, node_flops
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Reduce,
    Stream,
    Var,
    call,
    cast,
    fold,
    given,
    tensor,
    where,
)

from .builders import batch_norm, binary, conv2d, matmul, max_pool, node, relu

F32 = DType.F32


@pytest.mark.parametrize(("m", "k", "n"), [(3, 5, 7), (1, 8, 4), (13, 1, 2), (0, 3, 4)])
def test_matmul_counts_two_operations_a_product(m, k, n):
    assert flops(matmul(given((m, k), F32), given((k, n), F32))) == 2 * m * n * k


@pytest.mark.parametrize(
    ("shape", "weight", "stride", "padding", "groups"),
    [
        ((2, 3, 9, 9), (4, 3, 3, 3), 1, 1, 1),
        ((1, 4, 11, 7), (6, 4, 1, 1), 2, 0, 1),
        ((2, 6, 8, 8), (6, 1, 3, 3), 1, 1, 6),
        ((1, 6, 8, 8), (9, 2, 3, 3), 1, 0, 3),
    ],
)
def test_convolution_agrees_with_torch(shape, weight, stride, padding, groups):
    x, w = torch.randn(shape), torch.randn(weight)
    with FlopCounterMode(display=False) as counter:
        out = torch.nn.functional.conv2d(x, w, stride=stride, padding=padding, groups=groups)
    ours = conv2d(given(shape, F32), given(weight, F32), stride, padding, groups)
    assert ours.shape == tuple(out.shape)
    assert flops(ours) == counter.get_total_flops()


def test_work_on_a_channel_is_hoisted():
    x = given((2, 3, 4, 5), F32)
    y = batch_norm(x, *(given((3,), F32) for _ in range(4)))
    # x - mean, * scale, + bias for each element; var + eps, rsqrt, * weight for each channel
    assert flops(y) == 3 * x.numel + 3 * 3


def test_elementwise_casts_and_selection():
    x = given((7, 11), DType.BF16)
    assert flops(relu(x)) == 77
    assert flops(tensor(x.shape, F32, lambda i, j: cast(x[i, j], F32))) == 0
    picked = tensor(x.shape, F32, lambda i, j: where(call("gt", x[i, j], 0.0), x[i, j], 1.0))
    assert flops(picked) == 77  # the comparison; the selection is free


def test_index_arithmetic_is_free():
    x = given((8, 8), F32)
    causal = tensor(
        (8, 8), F32, lambda i, j: where(call("le", j, i, dtype=DType.BOOL), x[i, j] * 2.0, 0.0)
    )
    assert flops(causal) == 64
    assert flops(tensor((4, 16), F32, lambda i, j: x[(i * 16 + j) // 8, (i * 16 + j) % 8])) == 0
    assert flops(tensor((9,), DType.I64, lambda i: i * 3 + 1)) == 0


def test_integer_work_on_tensors_counts():
    x = given((5,), DType.I64)
    assert flops(tensor((5,), DType.I64, lambda i: Call("add", (x[i], x[i]), DType.I64))) == 5


def test_windows_count_their_taps_and_padding_is_dense():
    x = given((1, 2, 8, 8), F32)
    assert flops(max_pool(x, 3, 2, 1)) == 2 * 4 * 4 * 9


def test_reduction_body_that_misses_an_axis_is_evaluated_once_per_binding():
    x = given((4, 6), F32)
    y = tensor((4,), F32, lambda i: fold("sum", (6,), lambda r: call("exp", x[i, 0]) * x[i, r]))
    assert flops(y) == 4 * 1 + 24 + 24  # exp a row; mul and one add for each element


def test_stream_counts_each_element_of_its_axis():
    x = given((4, 32), F32)

    def element(i):
        ax = Axis("s", 32)
        m, total = Var("m", F32), Var("l", F32)
        top = call("maximum", m, Reduce("max", (ax,), x[i, ax]))
        part = Reduce("sum", (ax,), call("exp", x[i, ax] - top))
        step = total * call("exp", m - top) + part
        zero, low = Const(0.0, F32), Const(float("-inf"), F32)
        return Stream(ax, (m, total), (low, zero), (top, step), total * 2.0)

    # each element: max, sub, exp, sum; each row: maximum, sub, exp, mul, add, and the last mul
    assert flops(tensor((4,), F32, element)) == 4 * (4 * 32) + 4 * 6


def test_opaque_work_is_unknown():
    x, y = given((4,), F32), given((4,), F32)
    assert node_flops(node("aten.sort.default", (x,), y)) is None
    z = binary("add", x, y)
    assert node_flops(node("aten.add.Tensor", (x, y), z)) == 4
    assert flops(x) == 0
