"""Folds over all positions of some lines behind a product: parts of tiles, and a second launch. Both
run on threads of this machine, from their own text, against PyTorch on whole numbers, where all sums
are exact; NaN and infinities where PyTorch has them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.cuda_threads import run
from tests.gpu.engine_cases import CASES, Prepared, integers, odd, prepare

from onchip.backends.cuda.problem import Config
from onchip.planning.values import torch_dtype

# name: the choice of one kernel
RUNS = {
    "statistics": Config((8, 7, 1), 1, teams=2, x_stages=2, w_stages=4),
    "mean_of_pictures": Config((24, 8, 1), 0, x_stages=3, w_stages=3),
    "extremes_of_pictures": Config((8, 5, 1), 1, blocks=2, x_stages=2, w_stages=3),
    "residual_and_its_sums": Config((16, 5, 1), 0, x_stages=2, w_stages=3, r_stages=2),
    "three_channels_statistics": Config((16, 4, 1), 0, teams=2, x_stages=8),
    "column_sums": Config((64,), 0, split=2, teams=2, x_stages=3, w_stages=3),
    "mean_of_sequences": Config((64, 1), 0, split=2, x_stages=3, w_stages=3),
}


def ran(p: Prepared, c: Config, given: Sequence[torch.Tensor], folder: Path) -> list[torch.Tensor]:
    """The results of a kernel, in the module's order. The workspace holds NaN before."""
    k = p.candidate(c)
    held = p.held | dict(zip(p.inputs, given, strict=True))
    memory = [_as_it_lies(held[t], k.strides[t]) for t in k.inputs]
    memory += [_as_it_lies(x, x.stride()) for x in _derived(p, k)]
    outputs = {
        t: torch.full((t.numel,), float("nan"), dtype=torch_dtype(t)) for t in k.source.outputs
    }
    memory += outputs.values()
    memory += [torch.full((w.nbytes,), 255, dtype=torch.uint8) for w in k.workspace]
    run(k.source, k.source.inputs.index(p.problem.x), memory, folder)
    return [torch.as_strided(outputs[t], t.shape, k.strides[t]) for t in p.results]


def _derived(p: Prepared, k) -> list[torch.Tensor]:
    return [d.compute([p.held[t] for t in d.sources]) for d in k.derived]


def _as_it_lies(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    flat = torch.full((1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)),), 0).to(x.dtype)
    torch.as_strided(flat, x.shape, strides).copy_(x)
    return flat


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("make", [integers, odd])
@pytest.mark.parametrize("name", RUNS)
def test_totals_are_atens(name: str, make, tmp_path: Path) -> None:
    p = prepare(CASES[name])
    given = make(p)
    want = p.truth(given)
    got = ran(p, RUNS[name], given, tmp_path)
    for t, g, w in zip(p.results, got, want, strict=True):
        np.testing.assert_array_equal(g.double().numpy(), w.to(g.dtype).double().numpy(), t.name)
