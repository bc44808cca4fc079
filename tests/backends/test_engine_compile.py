"""Engine kernels compile for sm_90a, each branch of the device text in one of them: nothing is
spilled, and the matrix unit's instructions follow each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.backends.engine_compile import compiled, source_of
from tests.backends.engine_problems import Shape, contraction

from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.model import configurations
from onchip.backends.cuda.problem import ACC, Config, Problem
from onchip.backends.cuda.registers import handed_on, launched
from onchip.fusion.machine import GPUS
from onchip.ir.expr import call

SAME = ((1, 1), (1, 1))
PAIRS = ((2, 2, 0), (2, 2, 0))
OVERLAP = ((3, 2, 1), (3, 2, 1))
A = Shape(32, 64, (56, 56), 64, (3, 3), pads=SAME, pool=PAIRS)
D = Shape(32, 128, (56, 56), 128, (3, 3), pads=SAME)
SMALL = Shape(32, 512, (7, 7), 512, (3, 3), pads=SAME)
ONE = Shape(1, 512, (7, 7), 512, (3, 3), pads=SAME, pool=PAIRS)
PLAIN = Shape(0, 64, (100352,), 256, (1,), residual=True)

KERNELS = {
    "weights stay, four teams": (A, Config((8, 14, 1), 1, teams=4, x_stages=6)),
    "most sums of four teams": (A, Config((8, 8, 2), 1, teams=4, x_stages=4)),
    "weights come by, two teams of two": (
        D, Config((8, 14, 1), 1, split=2, teams=2, x_stages=3, w_stages=5)
    ),
    "most sums of two teams": (D, Config((8, 16, 1), 1, blocks=2, teams=2, x_stages=3, w_stages=4)),
    "most sums of one team": (
        Shape(0, 8192, (8192,), 8192, (1,)), Config((208,), 0, blocks=2, x_stages=3, w_stages=3)
    ),
    "windows from shared memory": (
        Shape(8, 64, (56, 56), 64, (3, 3), pads=SAME, pool=OVERLAP), Config((8, 9, 1), 1, teams=2)
    ),
    "the same, float32, down the rows": (
        Shape(8, 32, (56, 56), 64, (3, 3), pads=SAME, pool=OVERLAP, kind="tf32", fold="min"),
        Config((16, 7, 1), 0, x_stages=3, w_stages=4),
    ),
    "sum of windows": (
        Shape(8, 64, (56, 56), 64, (3, 3), pads=SAME, pool=PAIRS, fold="sum", kind="fp16"),
        Config((8, 8, 1), 1, teams=2),
    ),
    "residual": (PLAIN, Config((64,), 0, split=4, x_stages=4, r_stages=4)),
    "residual, float32": (
        Shape(4, 64, (14, 14), 64, (3, 3), pads=SAME, residual=True, kind="tf32"),
        Config((8, 14, 1), 1, x_stages=3, w_stages=4),
    ),
    "element by element": (
        Shape(4, 64, (14, 14), 33, (3, 3), pads=SAME, tile=False), Config((8, 7, 1), 1)
    ),
    "stride": (
        Shape(4, 64, (29, 29), 64, (3, 3), strides=(2, 2), pads=SAME), Config((8, 15, 1), 1)
    ),
    "channels shared": (SMALL, Config((8, 7, 1), 1, x_stages=3, w_stages=8, k_split=8)),
    "channels shared, tf32": (  # its products were serialized: sums that had no value on a path
        replace(ONE, pool=(), kind="tf32"),
        Config((8, 7, 1), 1, x_stages=2, w_stages=18, k_split=8),
    ),
    "channels shared by sixteen": (
        SMALL, Config((8, 7, 1), 1, split=2, x_stages=2, w_stages=4, k_split=16)
    ),
    "input shared": (SMALL, Config((8, 7, 2), 1, x_stages=3, w_stages=8, x_shared=2)),
    "weights shared": (SMALL, Config((8, 7, 2), 1, x_stages=3, w_stages=8, w_shared=2)),
    "batches, weights as they lie": (
        Shape(0, 64, (512,), 128, (1,), batch=3, constant=False),
        Config((128,), 0, split=2, x_stages=3, w_stages=3),
    ),
    "groups, short rows": (
        Shape(8, 16, (14, 14), 64, (3, 3), pads=SAME, batch=2),
        Config((8, 14, 1), 1, row_bytes=32, x_stages=3, w_stages=4),
    ),
    "3-d": (
        Shape(2, 32, (16, 16, 8), 64, (3, 3, 3), pads=((1, 1),) * 3, pool=((2, 2, 0),) * 3),
        Config((8, 4, 2, 1), 1, row_bytes=64, x_stages=3, w_stages=4),
    ),
    "1-d, many taps": (
        Shape(64, 1024, (191,), 128, (64,), pool=((2, 2, 0),)),
        Config((128, 1), 0, split=2, x_stages=3, w_stages=6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_spills(name):
    shape, config = KERNELS[name]
    check(shape, config)


@pytest.mark.parametrize("shape", [A, D, PLAIN, ONE], ids=["A", "D", "1x1", "one picture"])
def test_the_first_choice_compiles_without_spills(shape):
    found = configurations(contraction(shape), GPUS["h200"])
    assert isinstance(found, list)
    check(shape, found[0])


SPLIT = {
    "linear": Shape(0, 8192, (1024,), 8192, (1,), residual=True, kind="tf32x3"),
    "3x3": replace(D, kind="tf32x3"),
    "3x3, pool": replace(A, kind="tf32x3"),
    "3x3, overlapping pool": Shape(
        8, 64, (56, 56), 64, (3, 3), pads=SAME, pool=OVERLAP, kind="tf32x3"
    ),
    "1x1": replace(PLAIN, kind="tf32x3"),
    "stride 2": Shape(
        32, 128, (56, 56), 256, (3, 3), strides=(2, 2), pads=SAME, kind="tf32x3"
    ),
    "7x7 pictures": replace(SMALL, kind="tf32x3"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_the_first_choices_of_split_operands_compile_without_spills(name):
    p = replace(contraction(SPLIT[name]), before=call("maximum", ACC, 0))
    found = configurations(p, GPUS["h200"])
    assert isinstance(found, list)
    for c in found[:2]:
        got = compiled(source_of(p, c).text)
        assert got.spilled == 0, c.label
        assert "C75" not in got.log, got.log  # as in test_engine_operands
        g = Geometry(p, c)
        assert handed_on(g), c.label
        assert got.registers == launched(g), "all that there are are handed on"


def test_the_first_choice_for_features_innermost_compiles_without_spills():
    p = contraction(Shape(0, 512, (1024,), 512, (1,), batch=4, constant=False))
    p = replace(p, w_features_inner=True, w_step=512, w_batch=512 * 512)
    found = configurations(p, GPUS["h200"])
    assert isinstance(found, list)
    check_problem(p, found[0])


def check(shape: Shape, config: Config) -> None:
    check_problem(contraction(shape), config)


def check_problem(p: Problem, config: Config) -> None:
    p = replace(p, before=call("maximum", ACC, 0))
    got = compiled(source_of(p, config).text)
    warps = -(-Geometry(p, config).threads // 128) * 4  # registers are given to four at a time
    assert got.registers <= min(65536 // (32 * warps), 255)
    assert got.spilled == 0, got.log
    # C7510 and others of its kind: "wgmma.mma_async instructions are serialized"
    assert "serialized" not in got.log, got.log
