"""First layers with few channels on the engine: the order of weights against a table, and whole
kernels, run on threads of this machine, against PyTorch on whole numbers, where all sums are exact.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.cuda_host import INCLUDE
from tests.backends.cuda_problems import Case, case_of
from tests.backends.cuda_threads import run
from torch import nn
from torch.nn import functional as F

from onchip.backends.cuda import packed_model
from onchip.backends.cuda.kernel import emit
from onchip.backends.cuda.packed import PackedGeometry, narrow
from onchip.backends.cuda.problem import Config, Problem
from onchip.backends.interpreter import evaluate
from onchip.fusion.machine import GPUS, Gpu
from onchip.fusion.refusal import Refusal, Rule

H200 = GPUS["h200"]
FEW = replace(H200, multiprocessors=3)  # programs, which walk over several tiles each


class Layer(nn.Module):
    """A convolution with ReLU and a pool, weights that are whole numbers; padded: what is put
    around the input before."""

    def __init__(self, module: nn.Module, pool: nn.Module | None = None, padded=()) -> None:
        super().__init__()
        self.c, self.pool, self.padded = module, pool or nn.Identity(), padded
        with torch.no_grad():
            for w in module.parameters():
                w.copy_(torch.randint(-2, 3, w.shape))

    def forward(self, x):
        x = F.pad(x, self.padded) if self.padded else x
        return self.pool(torch.relu(self.c(x)))


def image(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    """Whole numbers; channels innermost."""
    x = torch.randint(-2, 3, (shape[0], *shape[2:], shape[1])).to(dtype)
    return x.movedim(-1, 1)


def overlapping(lead: int = 1) -> nn.Module:
    return nn.MaxPool2d(3, 2, lead)


# name: (module, input, choice)
CASES = {
    "rows handed on": (
        lambda: Layer(nn.Conv2d(3, 40, 7, 2, 3), overlapping()), lambda: image(2, 3, 29, 21),
        Config((16, 2, 1), 0, teams=2, x_stages=7),
    ),
    "three teams": (
        lambda: Layer(nn.Conv2d(3, 64, 7, 2, 3), overlapping()), lambda: image(2, 3, 24, 32),
        Config((16, 2, 1), 0, teams=3, x_stages=6),
    ),
    "four rows of one team": (
        lambda: Layer(nn.Conv2d(3, 64, 7, 2, 3), overlapping()), lambda: image(1, 3, 32, 24),
        Config((16, 4), 0, x_stages=8),
    ),
    "disjoint windows, stride 1": (
        lambda: Layer(nn.Conv2d(3, 128, 3, 1, 1), nn.MaxPool2d(2)), lambda: image(2, 3, 12, 16),
        Config((16, 2, 1), 0, split=2, teams=2, x_stages=6),
    ),
    "odd rows, no pool": (
        lambda: Layer(nn.Conv2d(3, 40, 5, 2, 2)), lambda: image(2, 3, 19, 17),
        Config((8, 3, 1), 0, teams=2, x_stages=6),
    ),
    "float32": (
        lambda: Layer(nn.Conv2d(3, 64, 7, 2, 3), overlapping()),
        lambda: image(1, 3, 20, 30, dtype=torch.float32),
        Config((16, 2), 0, teams=2, x_stages=7),
    ),
    "float16, two channels": (
        lambda: Layer(nn.Conv2d(2, 64, 4, 1, 1)), lambda: image(2, 2, 11, 15, dtype=torch.float16),
        Config((16, 2, 1), 0, teams=2, x_stages=6),
    ),
    "chunks that zeros fill up": (  # a run of 100 elements in two chunks
        lambda: Layer(nn.Conv2d(1, 96, (100, 1), (4, 1)), nn.MaxPool2d((2, 1)), (0, 0, 50, 50)),
        lambda: image(2, 1, 288, 1), Config((24, 1), 0, teams=2, x_stages=9),
    ),
    "float16, rows handed on": (
        lambda: Layer(nn.Conv2d(3, 64, 7, 2, 3), overlapping()),
        lambda: image(1, 3, 21, 64, dtype=torch.float16), Config((32, 2), 0, teams=2, x_stages=6),
    ),
    "one channel, a long filter": (
        lambda: Layer(nn.Conv2d(1, 96, (128, 1), (4, 1)), nn.MaxPool2d((2, 1)), (0, 0, 62, 62)),
        lambda: image(3, 1, 256, 1), Config((32, 1), 0, teams=2, x_stages=3),
    ),
}  # fmt: skip


def made(name: str) -> tuple[Case, Config]:
    torch.manual_seed(len(name))
    maker, inputs, config = CASES[name]
    x = inputs()
    case = case_of(maker().to(x.dtype), x)
    assert isinstance(case.problem, Problem), case.problem
    assert narrow(case.problem)
    return case, config


@pytest.mark.parametrize("name", CASES)
def test_weights_lie_in_the_order_of_the_sum(name: str) -> None:
    case, config = made(name)
    p = case.problem
    assert isinstance(p, Problem)
    g = PackedGeometry(p, config)
    held = p.w_element.src  # type: ignore[union-attr]
    packed = evaluate([g.weights()], {held: case.values[held]}, exact=True)[0]
    flat = case.values[held].reshape(p.features, p.channels, p.taps)
    wanted = np.zeros((p.features, len(g.k_order)))
    for k, at in enumerate(g.k_order):
        if at is not None:
            wanted[:, k] = flat[:, at[1], at[0]]
    found = sorted(at for at in g.k_order if at is not None)
    assert found == [(t, c) for t in range(p.taps) for c in range(p.channels)]
    assert np.array_equal(packed.transpose(1, 0, 2).reshape(p.features, -1), wanted)


def ran(case: Case, config: Config, x: torch.Tensor, gpu: Gpu, folder) -> torch.Tensor:
    p = case.problem
    assert isinstance(p, Problem)
    source = emit(p, config, gpu, case.strides)
    assert not isinstance(source, Refusal), source
    memory = []
    for t in source.inputs:
        if t is p.x:
            memory.append(x.permute(0, 2, 3, 1).contiguous())
            continue
        values = case.values
        value = values[t] if t in values else evaluate([t], values, exact=True)[0]
        memory.append(torch.from_numpy(np.array(value)).to(TORCH[t.dtype.label]).contiguous())
    out = p.results[0].tensor
    n, c, h, w = out.shape
    memory.append(torch.full((n, h, w, c), float("nan"), dtype=TORCH[out.dtype.label]))
    run(source, source.inputs.index(p.x), memory, folder)
    return memory[-1].permute(0, 3, 1, 2)


TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_layer(name: str, tmp_path) -> None:
    torch.manual_seed(len(name))
    maker, inputs, config = CASES[name]
    x = inputs()
    module = maker().to(x.dtype)
    case = case_of(module, x)
    # values that a neighbour's zero weights would spread
    x.permute(0, 2, 3, 1).reshape(-1)[17::331] = float("nan")
    x.permute(0, 2, 3, 1).reshape(-1)[5] = float("inf")
    wanted = module.double()(x.double()).to(x.dtype)
    assert wanted.isnan().any()
    assert not wanted.isnan().all()
    got = ran(case, config, x, FEW, tmp_path)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_choices_of_a_stem_hand_rows_on() -> None:
    torch.manual_seed(0)
    layer = Layer(nn.Conv2d(3, 64, 7, 2, 3), overlapping()).to(torch.bfloat16)
    p = case_of(layer, image(32, 3, 224, 224)).problem
    assert isinstance(p, Problem)
    found = packed_model.configurations(p, H200)
    assert isinstance(found, list)
    assert found[0].patch == (112, 2, 1)
    assert PackedGeometry(p, found[0]).carried
    small = replace(H200, shared_bytes=20_000)
    refused = packed_model.configurations(p, small)
    assert isinstance(refused, Refusal)


def test_refusals_say_what_does_not_fit() -> None:
    case, config = made("rows handed on")
    assert isinstance(case.problem, Problem)
    for wrong, text in (
        (replace(config, patch=(12, 2, 1)), "a patch of 12 positions, not a multiple of 8"),
        (replace(config, x_stages=2), "2 slots for tiles of 5"),
        (replace(config, w_stages=2), "streamed weights or clusters with packed input"),
    ):
        found = emit(case.problem, wrong, H200, case.strides)
        assert isinstance(found, Refusal)
        assert (found.rule, found.text) == (Rule.CONTRACTION_FORM, text)


@pytest.mark.parametrize("name", ["rows handed on", "float32", "one channel, a long filter"])
def test_kernels_compile(name: str) -> None:
    from onchip.backends.cuda.worker import headers, run_nvrtc

    case, config = made(name)
    assert isinstance(case.problem, Problem)
    source = emit(case.problem, config, H200, case.strides)
    assert not isinstance(source, Refusal), source
    options = ["--gpu-architecture=sm_90a", "--std=c++17"]
    code, log, *_ = run_nvrtc(source.text, "packed.cu", headers(INCLUDE), options)
    assert not int(code), log
    assert "serializ" not in log
