"""Prefetches of the next tile: where they are, and how far ahead they reach."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.fusion.harness import op

import onchip.ops  # noqa: F401  (declares the operators)
from onchip.backends.cpp.kernel import contiguous
from onchip.backends.cpp.run import kernels_for, region_for
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor, given

FETCH = re.compile(r"__builtin_prefetch\((\w+) \+ \(.*\) \+ (-?\d+)l, 0, 2\);")


def fetches(result: Tensor, x: Tensor, strides: tuple[int, ...] | None = None) -> list[str]:
    """How far ahead the first choice's kernel fetches, in elements, one entry a prefetch."""
    layout = {x: strides or contiguous(x.shape)}
    made = kernels_for(region_for([result], [x]), layout)
    assert isinstance(made, list), str(made)
    found = FETCH.findall(made[0][0].text)
    assert all(name == "in0" for name, _ in found)
    return [shift for _, shift in found]


@pytest.mark.parametrize(
    ("dtype", "step"), [(DType.F32, "16l"), (DType.BF16, "32l"), (DType.F64, "8l")]
)
def test_a_softmax_fetches_the_next_row(dtype, step):
    x = given((4096, 1024), dtype)
    y = op("softmax.int", x, -1)
    assert fetches(y, x) == ["1024"]
    ((source, _), *_) = kernels_for(region_for([y], [x]), {})
    (loop,) = re.findall(r"for \([^)]*\) \{\n\s*__builtin_prefetch", source.text)
    assert f"+= {step}" in loop  # one prefetch a cache line


def test_rows_that_lie_apart():
    x = given((4096, 1024), DType.F32)
    assert fetches(op("softmax.int", x, -1), x, (1500, 1)) == ["1500"]


def test_nothing_is_fetched_without_need():
    small = given((512, 1024), DType.F32)
    assert fetches(op("softmax.int", small, -1), small) == []
    one_stage = given((4096, 1024), DType.F32)
    assert fetches(op("relu", one_stage), one_stage) == []
    scattered = given((4096, 1024), DType.F32)
    assert fetches(op("softmax.int", scattered, -1), scattered, (1, 4096)) == []


def test_rows_too_long_to_keep():
    x = given((64, 32768), DType.F32)
    assert fetches(op("softmax.int", x, -1), x) == []
    assert np.prod(x.shape) * 4 >= 4 << 20


def test_a_tile_of_several_rows_fetches_as_many():
    x = given((65536, 64), DType.F32)
    y = op("softmax.int", x, -1)
    ((_, nest), *_) = kernels_for(region_for([y], [x]), {})
    assert nest.tile[0] > 1
    assert fetches(y, x) == [str(64 * nest.tile[0])]
