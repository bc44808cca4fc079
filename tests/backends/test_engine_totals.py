"""Totals over positions behind a product: parts of tiles, and a second launch. Both run on threads
of this machine, from their own text, against PyTorch on whole numbers, where all sums are exact;
NaN and infinities where PyTorch has them."""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends.cuda_threads import run
from tests.backends.engine_compile import compiled
from tests.gpu.engine_cases import (
    CASES,
    Case,
    Prepared,
    S,
    conv,
    image,
    integers,
    linear,
    odd,
    prepare,
    tokens,
)
from tests.modules import Fn
from torch import nn

from onchip.backends.cuda import model, totals
from onchip.backends.cuda.build import launches_of
from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.limits import refusal
from onchip.backends.cuda.problem import Config
from onchip.backends.nvidia.source import Workspace
from onchip.fusion.machine import GPUS
from onchip.fusion.refusal import Rule
from onchip.planning.values import torch_dtype

# name: the choice of one kernel
RUNS = {
    "statistics": Config((8, 7, 1), 1, teams=2, x_stages=2, w_stages=4),
    "mean_of_pictures": Config((24, 8, 1), 0, x_stages=3, w_stages=3),
    "extremes_of_pictures": Config((8, 5, 1), 1, blocks=2, x_stages=2, w_stages=3),
    "residual_and_its_sums": Config((16, 5, 1), 0, x_stages=2, w_stages=3, r_stages=2),
    "three_channels_statistics": Config((16, 4, 1), 0, teams=2, x_stages=8),
    "sums_of_groups_half": Config((8, 5, 1), 1, x_stages=2, w_stages=3),
    "column_sums": Config((64,), 0, split=2, teams=2, x_stages=3, w_stages=3),
    "mean_of_sequences": Config((64, 1), 0, split=2, x_stages=3, w_stages=3),
    "statistics_finished": Config((8, 5, 1), 1, teams=2, x_stages=2, w_stages=3),
}
ODD = ("statistics", "extremes_of_pictures")  # also with NaN and infinities


def ran(p: Prepared, c: Config, given: Sequence[torch.Tensor], folder: Path) -> list[torch.Tensor]:
    """The results of a kernel, in the module's order. The workspace holds NaN before."""
    k = p.candidate(c)
    held = {**p.held, **dict(zip(p.inputs, given, strict=True))}
    memory = [laid_out(held[t], k.strides[t]) for t in k.inputs]
    for d in k.derived:
        x = d.compute([p.held[t] for t in d.sources])
        memory.append(laid_out(x, x.stride()))
    made = {t: torch.full((t.numel,), math.nan, dtype=torch_dtype(t)) for t in k.source.outputs}
    memory += made.values()
    memory += [torch.full((w.nbytes,), 255, dtype=torch.uint8) for w in k.workspace]
    run(k.source, k.source.inputs.index(p.problem.x), memory, folder)
    return [torch.as_strided(made[t], t.shape, k.strides[t]) for t in p.results]


def laid_out(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Memory in which a tensor lies."""
    n = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    flat = torch.zeros(n, dtype=x.dtype)
    torch.as_strided(flat, x.shape, strides).copy_(x)
    return flat


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("name", "make"), [*((n, integers) for n in RUNS), *((n, odd) for n in ODD)]
)
def test_totals_are_atens(name: str, make, tmp_path: Path) -> None:
    p = prepare(CASES[name])
    given = make(p)
    want = p.truth(given)
    assert make is integers or any(x.isnan().any() for x in want)
    got = ran(p, RUNS[name], given, tmp_path)
    tolerance = 0 if p.case.exact else 1e-6
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w.to(g.dtype), rtol=tolerance, atol=0, equal_nan=True)


# ---- choices, refusals, launches -----------------------------------------------------------------


def large(c: Callable[[], nn.Module], shape: tuple[int, ...]) -> Prepared:
    return prepare(Case("large", lambda: (c(), image(*shape))))


def mean_of_large_pictures() -> Prepared:
    return large(lambda: S(conv(64, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), (32, 64, 58, 58))


def test_tiles_keep_pictures_apart() -> None:
    p = mean_of_large_pictures()
    found = model.configurations(p.problem, GPUS["h200"])
    assert isinstance(found, list), found
    assert {c.patch[2] for c in found} == {1}
    for c in found:
        g = Geometry(p.problem, c)
        assert (totals.kept(g), totals.folded_tiles(g) * 32) == (32, g.position_tiles)
    wrong = replace(found[0], patch=(8, 8, 2), along=1)
    refused = refusal(Geometry(p.problem, wrong), GPUS["h200"].shared_bytes)
    assert refused is not None
    assert refused.text == "a tile of positions that have totals of their own"


def test_totals_that_take_too_much_memory_are_refused() -> None:
    own = linear(16, 2048)
    p = prepare(Case("columns", lambda: (Fn(lambda s, x: s.m(x).sum(0), m=own), tokens(8200, 16))))
    fits, wrong = (
        refusal(Geometry(p.problem, Config((n,), 0, x_stages=2, w_stages=2)), 200_000)
        for n in (16, 8)
    )
    assert fits is None
    assert wrong is not None
    assert (wrong.rule, wrong.text) == (
        Rule.WORKSPACE, "8,396,800 bytes of tiles' totals, of 8,388,608",
    )  # fmt: skip


def test_two_launches_of_one_text() -> None:
    p = prepare(CASES["mean_of_pictures"])
    k = p.candidate(p.configs[0])
    first, second = launches_of(k.source)
    assert (first.waits, second.waits) == (True, True)
    tensors = len(k.source.inputs) + len(k.source.outputs)
    assert second.arguments == tuple(range(tensors + 1))  # the workspace is the last
    assert first.arguments[-tensors - 1 :] == second.arguments
    g = p.geometry(p.configs[0])
    assert second.programs == 3 * 3  # pictures, blocks of 32 of 72 features
    assert second.warps == totals.warps(g)
    assert k.workspace == (Workspace(3 * 9 * 72 * 4),)


@pytest.mark.skipif(importlib.util.find_spec("cuda.bindings") is None, reason="needs NVRTC")
@pytest.mark.parametrize("name", ["statistics", "mean_of_pictures", "residual_and_its_sums"])
def test_both_launches_compile(name: str) -> None:
    p = prepare(CASES[name])
    for c in p.configs[:2]:
        text = p.candidate(c).source.text
        for more in ((), ("--define-macro=ONCHIP_LAUNCH=1",)):
            made = compiled(text, more)
            assert made.spilled == 0, made.log
            assert "serializ" not in made.log
