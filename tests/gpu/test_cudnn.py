"""cuDNN's plans on this machine's GPU, against float64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.cudnn_cases import CASES, TOLERANCE, Nothing, Ready, inputs_of, ready, wide
from tests.modules import Follow

import onchip
from onchip.backends.cudnn.build import Plan
from onchip.planning import generators
from onchip.planning.generators import cudnn
from onchip.planning.generators.cudnn import WithCudnn
from onchip.planning.isolation import Isolation
from onchip.planning.library import planted, run_of
from onchip.planning.plan import LibraryStep
from onchip.planning.recording import record
from onchip.planning.tuner import memory_of, poison
from onchip.settings import Settings

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda", 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("cudnn") is None,
        reason="there is no NVIDIA GPU, or no nvidia-cudnn-frontend, here",
    ),
]


@pytest.fixture(scope="module")
def plans() -> dict[str, Ready]:
    """Of all cases, built in one call."""
    generator = cudnn.beside(Nothing(), CUDA)  # type: ignore[arg-type]
    assert isinstance(generator, WithCudnn), "cuDNN can't be used here: see onchip doctor"
    return ready(CASES, generator)


def missing(name: str, r: Ready) -> None:
    """Skips a case that this cuDNN has no plan for (9.19: depthwise ones)."""
    if name == "depthwise" and not r.plans:
        pytest.skip(f"no plan was built: {r.built}")


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("name", CASES)
def test_results_are_float64s(name, plans):
    r = plans[name]
    missing(name, r)
    assert r.plans, f"no plan was built: {r.built}"
    for n in r.plans:
        trial = r.trial(n)
        for _ in range(2):
            for x in (*trial.outputs, *trial.workspace):
                poison(x)
            assert trial.run() == 0
            found = distance(trial.outputs[0], r.want)
            assert found < TOLERANCE[CASES[name].dtype], f"{r.candidates[n].choice}: {found:.1e}"


@pytest.mark.parametrize("name", ["relu", "residual", "gelu", "depthwise", "hardswish", "fp32"])
def test_nan_and_infinities_are_where_aten_has_them(name, plans):
    """Or else the check before timing refuses the plan; here: which engines keep them."""
    r = plans[name]
    missing(name, r)
    odd = planted(r.whole.region, r.whole.constants, r.values)
    (out,) = r.whole.region.outputs
    want = run_of([LibraryStep(n) for n in r.whole.region.nodes], odd)()[out]
    kept = []
    for n in r.plans:
        trial = r.trial(n, odd)
        trial.run()
        got = trial.outputs[0]
        if torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf()):
            kept.append(r.candidates[n].choice)
    assert kept, f"none of {[r.candidates[n].choice for n in r.plans]}"


@pytest.mark.parametrize("name", ["relu", "residual", "first", "fp32"])
def test_a_cuda_graph_records_a_plan(name, plans):
    r = plans[name]
    for n in r.plans:
        trial = r.trial(n)
        trial.run()
        graph = record(trial.run, CUDA)
        poison(trial.outputs[0])
        graph.replay()
        torch.cuda.synchronize()
        assert distance(trial.outputs[0], r.want) < TOLERANCE[CASES[name].dtype]


def test_a_plan_follows_the_current_stream(plans):
    r = plans["relu"]
    trial, stream = r.trial(r.plans[0]), torch.cuda.Stream()
    poison(trial.outputs[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        trial.run()
        done = stream.record_event()
    assert not done.query(), "the plan ran elsewhere, or the wait was too short"
    stream.synchronize()
    assert distance(trial.outputs[0], r.want) < TOLERANCE[CASES["relu"].dtype]


def test_a_plan_runs_in_a_process_of_its_own_first(plans):
    r, isolation = plans["residual"], Isolation(0)
    for n in r.plans:
        c, built = r.candidates[n], r.built[n]
        assert isinstance(built, Plan)
        derived = [d.compute([r.values[s] for s in d.sources]) for d in c.derived]
        assert isolation.first_run(c.choice, built, memory_of(c, r.values, derived)) is None
    assert isolation.notes == []


AGAIN = """
import torch
from tests.gpu.cudnn_cases import CASES, TOLERANCE, Nothing, ready
from onchip.backends.nvidia import pool
from onchip.planning.generators import cudnn
def asked(*_):
    raise AssertionError("a plan was built again")
pool.run_all = asked
generator = cudnn.beside(Nothing(), torch.device("cuda", 0))
r = ready({"residual": CASES["residual"]}, generator)["residual"]
for n in r.plans:
    assert r.built[n].reused
    trial = r.trial(n)
    trial.run()
    d = (trial.outputs[0].double() - r.want).norm() / r.want.norm()
    assert d < TOLERANCE[torch.bfloat16], d
    print(r.built[n].name)
"""


def test_another_process_takes_plans_from_the_cache(plans):
    r = plans["residual"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [r.built[n].name for n in r.plans]  # type: ignore[attr-defined]


@pytest.fixture
def only_cudnn(monkeypatch):
    """Programs whose only kernels are cuDNN's."""

    def alone(device: torch.device, settings: Settings):
        other = generators._for_gpu(device, False)
        monkeypatch.setattr(type(other), "variants", Nothing.variants)
        return cudnn.beside(other, device)

    monkeypatch.setattr("onchip.planning.planner.generator_for", alone)


@torch.no_grad()
def test_a_program_and_its_lock_file(only_cudnn, tmp_path):
    """Whole: chosen or not, the program's results are right; with the lock file the choices stay,
    plan and all."""
    case = CASES["residual"]
    model = Follow(wide(), lambda y, r: F.relu(y + r)).to("cuda", case.dtype).eval()
    model = model.to(memory_format=torch.channels_last)
    inputs = inputs_of(case)
    lock = str(tmp_path / "plan.lock")
    program = onchip.compile(model, tuple(inputs), settings=Settings(lock=lock))
    want = model.double()(*(x.double() for x in inputs))
    model.to(case.dtype)
    assert distance(program(*inputs), want) < TOLERANCE[case.dtype]
    again = onchip.compile(model, tuple(inputs), settings=Settings(lock=lock))
    assert again.sources == program.sources
    assert distance(again(*inputs), want) < TOLERANCE[case.dtype]
    text = Path(lock).read_text()
    assert "cuDNN, plan" in text, "its plans are among the times of the verdict"
