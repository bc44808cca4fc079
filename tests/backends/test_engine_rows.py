"""Results that lie channels-first leave the engine by rows of positions: whole kernels, run on
threads of this machine, on whole numbers, where all sums are exact."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends import cuda_threads
from tests.backends.engine_compile import source_of
from tests.backends.engine_problems import Shape, contraction, expected, values_of
from tests.backends.engine_simulator import Simulator

from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.limits import refusal
from onchip.backends.cuda.problem import Config, Problem
from onchip.fusion.machine import GPUS
from onchip.ir.expr import given

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SAME = ((1, 1), (1, 1))
PLAIN, POOLED = ((1, 1, 0), (1, 1, 0)), ((2, 2, 0), (2, 2, 0))
PICTURE = Shape(2, 64, (9, 7), 64, (3, 3), pads=SAME, tile=False)
RINGS = Config((16, 2, 1), 1, x_stages=2, w_stages=2)
# name: (shape, choice, elements that leave at once)
CASES = {
    "odd rows": (PICTURE, RINGS, 1),
    "even rows, two at once": (replace(PICTURE, sizes=(14, 7)), RINGS, 2),
    "a row of two tiles": (replace(PICTURE, sizes=(20, 5)), replace(RINGS, patch=(16, 3, 1)), 2),
    "longer than a pass": (
        replace(PICTURE, n=1, sizes=(50, 3)), replace(RINGS, patch=(40, 1, 1)), 2
    ),
    "features that end within a block": (replace(PICTURE, features=40), RINGS, 1),
    "two teams": (
        replace(PICTURE, sizes=(16, 6), features=128), replace(RINGS, split=2), 2
    ),
    "float32": (replace(PICTURE, channels=32, kind="tf32"), RINGS, 1),
    "windows": (replace(PICTURE, sizes=(14, 8), pool=POOLED), RINGS, 1),
    "windows, two at once": (replace(PICTURE, sizes=(16, 8), pool=POOLED), RINGS, 2),
    "one line": (
        Shape(2, 64, (70,), 64, (5,), pads=((2, 2),), tile=False),
        Config((64, 1), 1, x_stages=2, w_stages=2), 2,
    ),
}  # fmt: skip


def channels_first(p: Problem, side: int) -> Problem:
    """The problem with its result, [pictures, features, outer ... inner], which leaves by rows."""
    (r,) = p.results
    batch, picture, *places, feature = r.index
    shape = [r.tensor.shape[i] for i in (0, 1, -1, *range(2, len(r.index) - 1))]
    y = given(tuple(shape), r.tensor.dtype, "y")
    index = (batch, picture, feature, *places)
    return replace(p, results=(replace(r, tensor=y, index=index, side=side),))


@pytest.mark.parametrize("name", CASES)
def test_rows_of_positions(name: str, tmp_path: Path) -> None:
    shape, c, side = CASES[name]
    plain = contraction(shape)
    values = values_of(plain)
    y = plain.results[0].tensor
    p = channels_first(plain, side)
    assert refusal(Geometry(p, c), GPUS["h200"].shared_bytes) is None
    source = source_of(p, c)
    dtype = torch.float32 if shape.kind == "tf32" else torch.bfloat16
    wanted = torch.from_numpy(expected(plain, values)).to(dtype).view(y.shape).movedim(-1, 2)
    (packed,) = (t for t in source.inputs if t is not p.x)
    held = {p.x: values.x, packed: Simulator(p, c, 132, values).memory_of_weights}
    memory = [torch.from_numpy(held[t]).to(dtype) for t in source.inputs]
    got = torch.full(p.results[0].tensor.shape, torch.nan, dtype=dtype)
    cuda_threads.run(source, source.inputs.index(p.x), [*memory, got], tmp_path)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


# name: (a piece of the device text, what stands in its place, a case that must show it)
FAULTS = {
    "positions behind the row": ("column < COLUMNS && left > 0", "column < COLUMNS", "odd rows"),
    "every pass stores the first columns": (
        "V::first(t, 0) + start * V::UNIT + column", "V::first(t, 0) + column", "longer than a pass"
    ),
    "features that there are not": (
        "if (!here || p.feature >= cfg::FEATURES) continue;", "if (!here) continue;",
        "features that end within a block",
    ),
    "a row of the next picture": (
        "const bool here = there && ", "const bool here = ", "a row of two tiles"
    ),
    "rows are not as far apart as they were written": (
        "own + (row * PITCH + column) * 4", "own + (row * COLUMNS + column) * 4", "odd rows"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, case = FAULTS[fault]
    include = tmp_path / "include"
    shutil.copytree(cuda_threads.INCLUDE, include)
    edited = include / "onchip" / "epilogue.cuh"
    text = edited.read_text()
    assert text.count(old) == 1
    edited.write_text(text.replace(old, new))
    monkeypatch.setattr(cuda_threads, "INCLUDE", include)
    with pytest.raises(AssertionError):
        test_rows_of_positions(case, tmp_path)
