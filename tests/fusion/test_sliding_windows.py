"""Depthwise convolutions that read what their kernel has just computed, borders included: every
stride, dilation, padding and channel count, against the interpreter in float64."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fusion.harness import Program, Programs, jobs_of, op, program, value

from onchip.fusion.layout import channels_last
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor

PROGRAMS = Programs("-O1")


def inverted(
    shape: tuple[int, ...],
    channels: int,
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    activation: str = "relu6",
    multiplier: int = 1,
) -> Program:
    """1x1 convolution, activation, depthwise convolution, activation; channels last."""
    x = value(shape)
    w1, b1 = value((channels, shape[1], 1, 1), seed=1), value((channels,), seed=2)
    out = channels * multiplier
    w2, b2 = value((out, 1, *kernel), seed=3), value((out,), seed=4)
    wide = op("conv2d", x, w1, b1)
    inner = act(activation, wide)
    deep = op("conv2d", inner, w2, b2, list(stride), list(padding), list(dilation), channels)
    t = act(activation, deep)
    strides = {u: channels_last(u.shape) for u in (x, wide, inner, deep, t)}
    return program([t], [w1, b1, w2, b2], strides=strides, tolerance=1e-4)


def act(name: str, t: Tensor) -> Tensor:
    return op("hardtanh", t, 0.0, 6.0) if name == "relu6" else op(name, t)


CASES = {
    "plain": ((1, 8, 14, 14), 32, {}),
    "odd channels": ((1, 5, 9, 11), 37, {}),
    "few channels": ((1, 4, 9, 9), 3, {}),
    "many channels": ((1, 4, 7, 7), 401, {}),
    "one column": ((1, 4, 9, 1), 16, {}),
    "two columns": ((2, 4, 5, 2), 16, {}),
    "primes": ((2, 3, 13, 17), 19, {}),
    "stride 2": ((1, 8, 15, 13), 24, {"stride": (2, 2)}),
    "stride 2 even": ((1, 8, 16, 16), 24, {"stride": (2, 2)}),
    "stride 3, 5x5": ((1, 8, 17, 19), 24, {"stride": (3, 3), "kernel": (5, 5), "padding": (2, 2)}),
    "strides differ": ((1, 8, 12, 13), 24, {"stride": (1, 2)}),
    "dilated": ((1, 8, 13, 14), 24, {"dilation": (2, 2), "padding": (2, 2)}),
    "dilated with stride": ((1, 8, 13, 14), 24, {"dilation": (1, 3), "stride": (1, 2)}),
    "4x4, dilation 2, stride 2": (
        (1, 8, 16, 15),
        24,
        {"kernel": (4, 4), "dilation": (2, 2), "stride": (2, 2), "padding": (3, 3)},
    ),
    "7x7": ((1, 6, 11, 12), 24, {"kernel": (7, 7), "padding": (3, 3)}),
    "1x5": ((1, 6, 11, 12), 24, {"kernel": (1, 5), "padding": (0, 2)}),
    "5x1": ((1, 6, 11, 12), 24, {"kernel": (5, 1), "padding": (2, 0)}),
    "no padding": ((1, 6, 11, 12), 24, {"padding": (0, 0)}),
    "wide padding": ((1, 6, 5, 4), 24, {"padding": (2, 2)}),
    "padding one way": ((1, 6, 10, 9), 24, {"padding": (0, 1)}),
    "not zero at zero": ((1, 6, 10, 9), 24, {"activation": "sigmoid"}),
    "multiplier": ((1, 6, 10, 9), 8, {"multiplier": 2}),
}
for _name, (_shape, _channels, _more) in CASES.items():
    PROGRAMS.add(lambda s=_shape, c=_channels, m=_more: inverted(s, c, **m), name=_name)


@PROGRAMS.add
def pools_with_different_padding() -> Program:
    """One scratch tensor, read with minus infinity and with zero around it."""
    x = value((1, 6, 9, 10))
    w = value((8, 6, 1, 1), seed=1)
    # below zero, which would win if it were the padding
    t = op("neg", op("sigmoid", op("conv2d", x, w)))
    low = op("max_pool2d", t, [3, 3], [1, 1], [1, 1])
    return program([op("add.Tensor", low, op("avg_pool2d", t, [3, 3], [1, 1], [1, 1]))], [w])


@PROGRAMS.add
def stored_as_bfloat16() -> Program:
    x = value((1, 6, 9, 10), DType.BF16)
    w1, w2 = value((8, 6, 1, 1), DType.BF16, seed=1), value((8, 1, 3, 3), DType.BF16, seed=2)
    t = op("conv2d", op("relu", op("conv2d", x, w1)), w2, None, [1, 1], [1, 1], [1, 1], 8)
    return program([t], [w1, w2])


@PROGRAMS.add
def limits_keep_nan() -> Program:
    """relu6, clamp and their like with NaN, infinities and signed zeros."""
    row = [np.nan, np.inf, -np.inf, -0.0, 0.0, 6.0, 7.0, -3.0]
    x = value((6, 8), like=np.array([row] * 6))
    return program([op("hardtanh", x, 0.0, 6.0), op("relu", x), op("clamp", x, None, 2.0)])


@pytest.mark.parametrize("name", PROGRAMS.names())
def test_program(name: str) -> None:
    PROGRAMS.check(name)


@pytest.mark.parametrize("name", [n for n in CASES if n != "multiplier"])
def test_the_sums_come_from_the_shared_loop_and_have_no_conditions(name: str) -> None:
    shape, channels, more = CASES[name]
    jobs = jobs_of(inverted(shape, channels, **more))
    assert isinstance(jobs, list)
    text = jobs[0].source.text
    loops = text.split("onchip::contract(")[-1]
    assert "onchip::window_sums<" in loops
    assert "padding0" not in text
