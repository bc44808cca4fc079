"""Kernels of the tensor-core engine on this machine's Hopper GPU, against ATen in float64.

A kernel runs on integers (each element must be the rounded one), on integers with NaN and
infinities among them (they must be where ATen has them), and on other values, four times with other
states of the caches (each bit must be the same). Memory around its tensors is NaN.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.gpu import engine_kernels
from tests.gpu.engine_cases import BF16, CASES, FP16, FP32, prepare
from tests.modules import Fn
from torch import nn
from torch.nn import functional as F

import onchip
from onchip.capture import capture
from onchip.fusion.machine import HOPPER
from onchip.planning import planner
from onchip.planning.generators.triton import gpu_of
from onchip.planning.tuner import difference
from onchip.settings import Settings

ROOT = Path(__file__).parents[2]


def hopper() -> bool:
    return torch.cuda.is_available() and gpu_of(torch.device("cuda")).capability == HOPPER


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hopper(), reason="there is no NVIDIA GPU with sm_90 here"),
]


@pytest.fixture(scope="session")
def kernels() -> dict[str, engine_kernels.Ready]:
    """Of all cases, compiled in one call."""
    return engine_kernels.ready([prepare(c) for c in CASES.values()])


@pytest.mark.parametrize("name", CASES)
def test_results_are_atens(name: str, kernels) -> None:
    r = kernels[name]
    wrong = []
    for n, c in enumerate(r.candidates):
        try:
            found = engine_kernels.problems(r, n, engine_kernels.launch, "cuda")
        except RuntimeError as error:  # of CUDA: what runs behind it fails, too
            pytest.fail(f"{name}, {c.choice}: {error}")
        wrong += [f"{c.choice}: {text}" for text in found]
    assert not wrong, f"{name}:\n" + "\n".join(wrong)


# ---- inside the planner --------------------------------------------------------------------------


def pipeline() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(64), nn.MaxPool2d(2)
    )
    x = torch.randn(4, 64, 28, 28, device="cuda", dtype=BF16)
    return model.to("cuda", BF16).eval(), (x.to(memory_format=torch.channels_last),)


def linear() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = Fn(lambda s, x, y: F.gelu(s.m(x)) + y, m=nn.Linear(256, 128)).to("cuda", FP16)
    x, y = (torch.randn(500, n, device="cuda", dtype=FP16) for n in (256, 128))
    return model, (x, y)


def signal() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(nn.Conv1d(64, 64, 9, padding=4), nn.ReLU()).to("cuda", FP32)
    x = torch.randn(3, 200, 64, device="cuda", dtype=FP32)
    return model, (x.mT,)


@pytest.fixture
def tf32() -> Iterator[None]:
    """Convolutions of float32 may use TF32."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    yield
    torch.backends.cudnn.conv.fp32_precision = before


@pytest.mark.parametrize("make", [pipeline, linear, signal])
def test_a_program_of_engine_kernels_alone(
    make: Callable[[], tuple], tf32, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))  # no verdict of another run
    torch.manual_seed(0)
    model, inputs = make()
    settings = Settings(generator="cuda", budget_s=60.0)
    with torch.no_grad():
        planned = planner.plan(capture(model, inputs), list(inputs), settings)
        verdicts = [v for _, _, v, _ in planned.steps_of if v is not None]
        timed = [label for v in verdicts for label in v.times_us]
        refused = [f"{label}: {why}" for v in verdicts for label, why in v.refused]
        assert any(label.startswith("engine") for label in timed), (timed, refused)
        assert not [text for text in refused if "differs" in text], refused
        double = model.double()(*(x.double() for x in inputs))
        program = onchip.compile(model.to(inputs[0].dtype), inputs, settings=settings)
        got = program(*inputs)
    least = 2e-3 if inputs[0].dtype is FP32 else 0.0
    assert not difference(got, double.to(got.dtype), least)


# ---- a kernel that would hang --------------------------------------------------------------------

HANGS = """
import re, sys, time
from dataclasses import replace
import torch
from tests.gpu.engine_cases import CASES, GENERATOR, integers, prepare
from onchip.errors import InternalError
from onchip.planning.tuner import Trial, check

p = prepare(CASES["strided"])
c = p.candidate(p.configs[0])
# a barrier that waits for more bytes than will come
text = re.sub(r"X_BYTES = (\\d+);", lambda m: f"X_BYTES = {int(m[1]) + 16};", c.source.text)
assert text != c.source.text
c = replace(c, source=replace(c.source, text=text))
(built,) = GENERATOR.build_all([c])
values = dict(p.held) | dict(zip(p.inputs, integers(p)))
values |= dict(zip(p.results, (x.to(p.example[0].dtype) for x in p.truth(integers(p)))))
values = {t: x.cuda() for t, x in values.items()}
derived = [d.compute([p.held[t] for t in d.sources]).cuda() for d in c.derived]
trial = Trial.of(c, GENERATOR.kernel(c, built), values, derived)
torch.cuda.synchronize()
start = time.perf_counter()
try:
    print("no error:", check(trial, values))
except InternalError as error:
    print(f"{time.perf_counter() - start:.2f} s: {error}")
    assert c.choice in str(error) and c.region.name in str(error)
    print("NAMED")
"""


def test_a_wait_that_never_ends_is_an_error_that_names_the_kernel() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    said = done.stdout + done.stderr[-3000:]
    assert "NAMED" in done.stdout, said
    waited = float(done.stdout.partition(" s: ")[0])
    assert 0.5 < waited < 4, f"{said}\nafter {time.perf_counter() - start:.1f} s"
