"""Convolutions against ATen."""

import itertools

import pytest
import torch
from tests.conformance.aten import check, express, randn

from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Const, Load, reduces
from onchip.ops.convolution import phases, tap_of

CONV2D = [
    # x, weight, stride, padding, dilation, groups
    ((2, 3, 7, 11), (5, 3, 3, 3), 1, 0, 1, 1),
    ((2, 3, 7, 11), (5, 3, 3, 3), 2, 1, 1, 1),
    ((2, 3, 7, 11), (5, 3, 3, 2), [2, 3], [1, 0], [1, 2], 1),
    ((1, 3, 13, 13), (4, 3, 7, 7), 2, 3, 1, 1),
    ((2, 6, 7, 5), (6, 1, 3, 3), 1, 1, 1, 6),
    ((2, 6, 7, 5), (12, 1, 3, 3), 1, 1, 1, 6),
    ((2, 6, 7, 5), (4, 3, 3, 3), 1, 1, 1, 2),
    ((2, 6, 7, 5), (3, 2, 3, 3), 1, 1, 2, 3),
    ((2, 4, 1, 1), (5, 4, 1, 1), 1, 0, 1, 1),
    ((2, 1, 5, 5), (3, 1, 3, 3), 1, 1, 1, 1),
    ((0, 3, 7, 7), (5, 3, 3, 3), 1, 1, 1, 1),
    ((3, 7, 7), (5, 3, 3, 3), 1, 1, 1, 1),
    ((6, 7, 7), (4, 3, 3, 3), 1, 1, 1, 2),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("x", "w", "stride", "padding", "dilation", "groups"), CONV2D)
def test_conv2d(x, w, stride, padding, dilation, groups, bias):
    b = randn(w[0]) if bias else None
    check(
        "aten.conv2d.default", randn(*x), randn(*w), b, *_pairs(stride, padding, dilation), groups
    )


def _pairs(*values):
    return [v if isinstance(v, list) else [v] for v in values]


@pytest.mark.parametrize(("groups", "dilation", "stride"), [(1, 1, 1), (2, 3, 1), (4, 1, 2)])
def test_conv1d_and_3d(groups, dilation, stride):
    w = (8, 4 // groups, 3)
    check(
        "aten.conv1d.default",
        randn(2, 4, 17),
        randn(*w),
        randn(8),
        [stride],
        [2],
        [dilation],
        groups,
    )
    check("aten.conv3d.default", randn(1, 4, 7, 9, 8), randn(*w, 2, 3), randn(8),
          [stride] * 3, [2, 0, 1], [dilation] * 3, groups)  # fmt: skip


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [(3, 4), (2, 5), (1, 1)])
@pytest.mark.parametrize("dilation", [1, 3])
def test_padding_by_name(padding, kernel, dilation):
    w = randn(5, 3, *kernel)
    check("aten.conv2d.padding", randn(2, 3, 11, 13), w, randn(5), [1], padding, [dilation], 1)
    check("aten.conv1d.padding", randn(2, 3, 11), w[..., 0], None, [1], padding, [dilation], 1)
    check("aten.conv3d.padding", randn(1, 3, 11, 13, 5), w[..., None], None, [1], padding,
          [dilation], 1)  # fmt: skip


TRANSPOSED = [
    # kernel, stride, padding, output padding, dilation
    (3, 1, 0, 0, 1), (3, 2, 1, 1, 1), (4, 2, 1, 0, 1), (2, 2, 0, 0, 1), (1, 2, 0, 1, 1),
    (5, 3, 2, 2, 1), (3, 1, 1, 0, 2), (3, 2, 0, 1, 2), (3, 3, 1, 0, 2), (4, 4, 3, 1, 6),
    (2, 5, 0, 3, 1), (5, 2, 4, 0, 3),
]  # fmt: skip


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("setting", TRANSPOSED)
def test_conv_transpose(setting, groups):
    k, s, p, o, d = setting
    for width in (1, 3):
        w = (4, width, k)
        b = randn(width * groups) if width == 3 else None
        tail = ([s], [p], [o], groups, [d])
        check("aten.conv_transpose1d.default", randn(2, 4, 7), randn(*w), b, *tail)
        check("aten.conv_transpose2d.input", randn(2, 4, 5, 6), randn(*w, 3), b,
              [s, 2], [p, 1], [o, 1], groups, [d, 1])  # fmt: skip


def test_conv_transpose_other_forms():
    x, w = randn(2, 4, 3, 4, 5), randn(4, 2, 3, 2, 3)
    check("aten.conv_transpose3d.input", x, w, randn(2), [2, 2, 1], [1, 0, 1], [1, 0, 0], 1, [1])
    check("aten.conv_transpose2d.input", randn(4, 5, 5), randn(4, 2, 3, 3), None, [2], [1], [1])
    check("aten.conv_transpose2d.input", randn(0, 4, 5, 5), randn(4, 2, 3, 3), None, [2])
    out = (randn(2, 4, 5, 5), randn(4, 2, 3, 3), randn(4), [2, 2], [1, 1], [1, 1])
    check("aten.convolution.default", *out, True, [1, 1], 2)
    straight = (randn(2, 4, 5, 5), randn(6, 2, 3, 3), randn(6), [2, 2], [1, 1], [1, 1])
    check("aten.convolution.default", *straight, False, [0, 0], 2)


def test_a_transposed_convolution_reads_nothing_beside_its_taps():
    """An infinite input reaches exactly the outputs that ATen gives it to."""
    for k, s, d in [(3, 2, 1), (5, 3, 1), (3, 2, 2), (2, 4, 1), (3, 3, 2)]:
        x = randn(1, 2, 9)
        x[0, 1, 4] = float("inf")
        check("aten.conv_transpose1d.default", x, randn(2, 3, k), None, [s], [1], [0], 1, [d])


@pytest.mark.parametrize(
    ("k", "s", "d"), list(itertools.product(range(1, 7), range(1, 6), range(1, 5)))
)
def test_phases_cover_every_tap_once(k, s, d):
    """Brute force: output y reads input j through tap t exactly when y == j * s + t * d."""
    reads = set()
    for y in range(40):
        q, r = divmod(y, s)
        (group,) = [g for g in phases(k, s, d) if g.first <= r < g.first + g.count]
        for t in range(group.taps):
            tap = tap_of(Const(r, DType.I64), Const(t, DType.I64), s, d)
            assert isinstance(tap, Const)
            reads.add((y, q + group.offset - group.reach * t, tap.value))
    wanted = {(y, (y - t * d) // s, t) for y in range(40) for t in range(k) if (y - t * d) % s == 0}
    assert reads == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    x, w, b = (randn(*s, dtype=dtype) for s in [(2, 4, 7, 5), (6, 2, 3, 3), (6,)])
    check("aten.conv2d.default", x, w / 4, b, [1, 1], [1, 1], [1, 1], 2)
    x, w, b = (randn(*s, dtype=dtype) for s in [(2, 4, 5, 5), (4, 3, 3, 3), (3,)])
    check("aten.conv_transpose2d.input", x, w / 4, b, [2, 2], [1, 1], [1, 1])


def test_products_of_two_loads():
    args = (randn(2, 4, 7, 7), randn(6, 4, 3, 3), randn(6))
    (out,), _ = express("aten.conv2d.default", args, {})
    (total,) = reduces(out.body)
    assert total.body.fn == "mul"
    assert all(isinstance(a, Load) for a in total.body.args)
    assert total.body.args[0].pad is None, "no padding where no index can leave the input"
    (out,), _ = express("aten.conv2d.default", (*args, [1, 1], [1, 1]), {})
    assert reduces(out.body)[0].body.args[0].pad == 0


def test_left_to_the_library():
    with pytest.raises(OpaqueOperator, match="int64"):
        express("aten.conv2d.default", (randn(1, 1, 3, 3).long(), randn(1, 1, 3, 3).long()), {})
