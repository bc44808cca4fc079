"""Convolution with activation, normalisation, pooling and residual in one kernel, any order."""

from __future__ import annotations

import itertools

import pytest
from tests.fusion.harness import Program, Programs, op, program, value

from onchip.fusion.layout import channels_last
from onchip.ir.expr import Tensor

# Unoptimised: these are many kernels, and the main loop of each product is a template.
PROGRAMS = Programs("-O0")

POOLS = {
    "max2": lambda x: op("max_pool2d", x, [2, 2]),
    "max3": lambda x: op("max_pool2d", x, [3, 3], [2, 2], [1, 1]),
    "avg2": lambda x: op("avg_pool2d", x, [2, 2]),
    "avg3": lambda x: op("avg_pool2d", x, [3, 3], [2, 2], [1, 1], False, False),
    "avg3pad": lambda x: op("avg_pool2d", x, [3, 3], [2, 2], [1, 1]),
    "avg3ceil": lambda x: op("avg_pool2d", x, [3, 3], [2, 2], [0, 0], True),
    "max3ceil": lambda x: op("max_pool2d", x, [3, 3], [2, 2], [0, 0], [1, 1], True),
    "global": lambda x: op("adaptive_avg_pool2d", x, [1, 1]),
}


def batch_norm(x: Tensor, constants: list[Tensor]) -> Tensor:
    c = (x.shape[1],)
    weight, bias, mean = (value(c, seed=s) for s in (3, 4, 5))
    variance = value(c, seed=6, low=0.3, high=2.0)
    constants += [weight, bias, mean, variance]
    target = "_native_batch_norm_legit_no_training"
    return op(target, x, weight, bias, mean, variance, 0.1, 1e-5)


def pipeline(
    order: tuple[str, ...], pool: str = "max2", shape=(2, 5, 13, 11), channels: int = 9,
    kernel: int = 3, stride: int = 1, padding: int = 1, groups: int = 1, last: bool = False,
    negative: bool = False,
) -> Program:  # fmt: skip
    """conv2d, then `order`; `negative`: everything that the pool sees is below zero."""
    x = value(shape)
    w = value((channels, shape[1] // groups, kernel, kernel), seed=1)
    b = value((channels,), seed=2, low=-90 if negative else -3, high=-80 if negative else 3)
    constants, residual = [w, b], []
    t = op("conv2d", x, w, b, stride, padding, 1, groups)
    for step in order:
        if step == "relu":
            t = op("relu", t)
        elif step == "bn":
            t = batch_norm(t, constants)
        elif step == "pool":
            t = POOLS[pool](t)
        elif step == "add":
            residual.append(value(t.shape, seed=7))
            t = op("add.Tensor", t, residual[-1])
        else:
            t = op(step, t)
    strides = {y: channels_last(y.shape) for y in (x, t, *residual)} if last else {}
    return program([t], constants, strides=strides, tolerance=1e-4)


def add(name: str, *args, **kwargs) -> None:
    PROGRAMS.add(lambda: pipeline(*args, **kwargs), name)


for order in itertools.permutations(("relu", "bn", "pool")):
    for pool in ("max2", "max3"):
        add("-".join(order).replace("pool", pool), order, pool)
for pool in POOLS:
    add(f"negative {pool}", ("pool",), pool, negative=True)
    add(f"channels-last {pool}", ("relu", "bn", "pool"), pool, last=True)
for pool in ("avg2", "avg3", "avg3pad", "avg3ceil"):
    add(f"bn-relu-{pool}", ("bn", "relu", "pool"), pool)
add("bn-add-relu", ("bn", "add", "relu"))
add("bn-add-relu channels-last", ("bn", "add", "relu"), last=True)
add("silu-add", ("silu", "add"))
add("1x1", ("bn", "relu"), kernel=1, padding=0)
add("1x1 strided", ("bn", "relu"), kernel=1, padding=0, stride=2)
add("7x7 strided on three channels", ("bn", "relu", "pool"), "max3", (1, 3, 23, 19), 8, 7, 2, 3)
add("wide", ("bn", "relu"), "max2", (1, 64, 7, 7), 70)
add("depthwise", ("bn", "relu"), "max2", (2, 6, 9, 9), 6, groups=6)
add("grouped", ("relu", "pool"), "max3", (2, 6, 9, 9), 8, groups=2)
add("one channel out", ("relu",), "max2", (2, 3, 9, 9), 1)
add("one channel in", ("relu",), "max2", (2, 1, 9, 9), 7)
add("one pixel", ("bn", "relu"), "max2", (2, 5, 1, 1), 7)
add("large", ("add", "relu"), "", (1, 16, 65, 64), 40, 1, padding=0, last=True)
add("large, three taps", ("add", "relu"), "", (1, 16, 65, 64), 40, last=True)
add("empty batch", ("relu", "pool"), "max2", (0, 5, 9, 9), 7)


@pytest.mark.parametrize("name", PROGRAMS.names())
def test_pipeline_is_one_right_kernel(name: str) -> None:
    PROGRAMS.check(name)


def test_large_results_and_residuals_are_fetched_ahead() -> None:
    for job in PROGRAMS.check("large"):
        assert job.source.text.count("__builtin_prefetch(&out0[") == 1
        assert job.source.text.count("__builtin_prefetch(&in") == 1
    for job in PROGRAMS.check("bn-add-relu channels-last"):
        assert "__builtin_prefetch" not in job.source.text


def test_a_pool_of_negative_values_is_not_padded_with_zeros() -> None:
    """The case that a padding of 0 instead of minus infinity would pass unseen."""
    p, _, results = PROGRAMS.made["negative max3"] if PROGRAMS.made else (None, None, None)
    if p is None:
        PROGRAMS.check("negative max3")
        p, _, results = PROGRAMS.made["negative max3"]
    assert (results[0][0] < 0).all()
