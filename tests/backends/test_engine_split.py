"""Programs that share a tile's channels (K split), on threads of this machine: the device text with
the PTX functions of host_cuda/, where programs of a cluster run together."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.cuda_threads import run
from tests.backends.engine_compile import source_of
from tests.backends.engine_problems import Shape, contraction, expected, values_of
from tests.backends.engine_simulator import Simulator

from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.limits import refusal
from onchip.backends.cuda.problem import Config
from onchip.fusion.machine import GPUS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

RINGS = Config((8,), 0, x_stages=2, w_stages=2)
PRODUCTS = {
    "two programs": (Shape(0, 96, (20,), 64, (1,)), replace(RINGS, patch=(24,), k_split=2)),
    "three, two warpgroups": (
        Shape(0, 128, (16,), 136, (1,)), replace(RINGS, patch=(16,), split=2, k_split=3)
    ),
    "eight, two blocks": (Shape(0, 292, (8,), 128, (1,)), replace(RINGS, blocks=2, k_split=8)),
    "a slot for every step": (
        Shape(0, 288, (16,), 64, (1,)), replace(RINGS, x_stages=3, w_stages=3, k_split=4)
    ),
    "sixteen": (Shape(0, 544, (8,), 40, (1,)), replace(RINGS, k_split=16)),
}  # fmt: skip


def in_order(x: np.ndarray, w: np.ndarray, c: Config, chunk: int) -> np.ndarray:
    """Each program's sums in float32, channel by channel, then those of all, in their order."""
    steps = -(-x.shape[1] // chunk)
    total = None
    for part in range(c.k_split):
        sums = np.zeros((len(x), len(w)), np.float32)
        ends = [n * steps // c.k_split * chunk for n in (part, part + 1)]
        for k in range(ends[0], min(ends[1], x.shape[1])):
            sums += x[:, k, None] * w[None, :, k]
        total = sums if total is None else total + sums
    assert total is not None
    return total


@pytest.mark.parametrize("name", PRODUCTS)
def test_parts_are_added_in_the_order_of_programs(name: str, tmp_path: Path) -> None:
    shape, c = PRODUCTS[name]
    p = contraction(replace(shape, kind="tf32", constant=False))
    assert refusal(Geometry(p, c), GPUS["h200"].shared_bytes) is None
    random = np.random.default_rng(0)
    x = random.standard_normal((p.lines[0].size, p.channels), np.float32)
    w = random.standard_normal((p.features, p.channels), np.float32)
    y = torch.full((len(x), len(w)), torch.nan)
    source = source_of(p, c)
    assert source.cluster == c.k_split
    held = {p.x: torch.from_numpy(x), p.w: torch.from_numpy(w), p.results[0].tensor: y}
    run(source, 0, [held[t] for t in (*source.inputs, *source.outputs)], tmp_path)
    wanted = in_order(x, w, c, Geometry(p, c).chunk)
    np.testing.assert_array_equal(y.numpy(), wanted)


SAME, PAIRS = ((1, 1), (1, 1)), ((2, 2, 0), (2, 2, 0))
PICTURE = Shape(1, 128, (7, 7), 64, (3, 3), pads=SAME, pool=PAIRS)
CONVOLUTIONS = {
    "a slot for every step": (
        PICTURE, Config((8, 6, 1), 1, x_stages=1, w_stages=9, k_split=2)
    ),
    "parts that end within a chunk": (
        PICTURE, Config((8, 6, 1), 1, x_stages=2, w_stages=6, k_split=4)
    ),
    "fewer slots than steps": (
        replace(PICTURE, pool=()), Config((8, 4, 1), 1, x_stages=2, w_stages=2, k_split=3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_several_programs(name: str, tmp_path: Path) -> None:
    shape, c = CONVOLUTIONS[name]
    p = contraction(shape)
    assert refusal(Geometry(p, c), GPUS["h200"].shared_bytes) is None
    values = values_of(p)
    wanted = torch.from_numpy(expected(p, values)).bfloat16()
    source = source_of(p, c)
    (packed,) = (t for t in source.inputs if t is not p.x)
    y = torch.full(wanted.shape, torch.nan, dtype=torch.bfloat16)
    laid_out = Simulator(p, c, 132, values).memory_of_weights
    held = {p.x: values.x, packed: laid_out}
    memory = [torch.from_numpy(held[t]).bfloat16() for t in source.inputs]
    run(source, source.inputs.index(p.x), [*memory, y], tmp_path)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)
