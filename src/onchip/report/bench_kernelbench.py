"""KernelBench's level 2 as a suite: one row for each of its problems, checked more strictly.

The problems stay where the user has them: a clone of github.com/ScalingIntelligence/KernelBench
(MIT; ids, and what is said of them here, as of commit 423217d). Kept of its protocol are shapes,
float32 with PyTorch's default flags (TF32 for convolutions, IEEE for matrix products), the training
mode in which problems stay (batch statistics; running ones are updated) and a cold last cache. Its
inputs are from [0, 1), its norms have weights 1 and biases 0, and results may be off by 1e-4 in
each element, which zeros pass where results are small. Here inputs are signed and not those that a
program was compiled on, parameters and buffers that are constant are perturbed, and all results and
buffers are compared with a float64 run in the Euclidean norm, against eager's own error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from onchip.errors import OnchipError, VerificationError
from onchip.models import resolve
from onchip.planning import peers
from onchip.report import bench_gpu
from onchip.report import bench_once as once
from onchip.report.bench_engine import unseen
from onchip.report.bench_suites import KERNELBENCH, Case
from onchip.runtime.verify import Verification
from onchip.settings import Settings

# Problems that measure nothing, and why.
LEFT_OUT = {
    9: "its results are all zeros for the inputs and weights that it comes with",
    23: "its results are zero, whatever the input, until its norm is trained",
    36: "its results are its bias for the inputs and weights that it comes with",
    66: "it draws random numbers: live dropout",
    80: "its results are zero for any parameters",
    83: "its results are zero for any parameters",
}
IDS = tuple(n for n in range(1, 101) if n not in LEFT_OUT)
# Problems whose contraction algebra makes smaller (a mean of a convolution, a sum over a linear
# layer's features ...): what they gain is not fusion's, so they have a geometric mean of their own.
SHORTENED = frozenset({13, 14, 18, 42, 44, 50, 51, 65, 72, 98})
GROUPS = {False: "fusion alone", True: "algebra can shorten the product"}

# A result's error may be so many times eager's. Both run the same arithmetic, so errors differ by
# the order of summation: up to about twice (float32 sums of 8192 products in other orders: 3e-7 to
# 15e-7 in the worst case, 3e-7 to 5e-7 by pairs). TF32 where eager has IEEE is 1000 times as much,
# operands cut off to TF32 instead of rounded 3 times, bfloat16 for TF32 4 to 8 times.
ERROR_FACTOR = 2.0
# What eager gets exactly may be off by float32's rounding.
LEAST_ERROR = 2.0**-23
PERTURBATION = 0.1
BUDGET_S = 8.0  # of searching and measuring, for one problem
TIMED_S = 2.0  # of taking times, about, for one problem
ROUNDS = 10, 50  # at least, at most

PROTOCOL = (
    "KernelBench level 2 (423217d) as its problems are: float32, PyTorch's default flags, training "
    "mode. A CUDA graph of one call (a form that can't be captured is launched), 256 MiB written "
    "before each, medians of {least} to {most} rounds in which all forms take turns. Signed inputs "
    "that the program was not compiled on, constant parameters and buffers perturbed; results and "
    "buffers at most {factor:g} times as far from float64 as eager's"
)


# ---- which problems ----------------------------------------------------------------------------


def cases(path: str, ids: str = "", every: int = 1, skip: int = 0) -> tuple[Case, ...]:
    """The problems in a clone, or in its folder of level 2: those of `ids` ("1,4,7-9"; "" is all
    that measure something), of which the first `skip` are left out and then all but every
    `every`-th. OnchipError if there are none, or not these."""
    wanted = _ids(ids)
    if every < 1 or skip < 0:
        raise OnchipError(f"every {every}, skip {skip}: they must be at least 1 and 0")
    for n in wanted:
        if n in LEFT_OUT:
            raise OnchipError(f"KernelBench's problem {n} is left out: {LEFT_OUT[n]}")
    files = _files(Path(path))
    missing = [n for n in wanted if n not in files]
    if missing:
        raise OnchipError(f"{path} has no problem {missing[0]}: it has {len(files)} problems")
    found = tuple(_case(n, files[n]) for n in wanted[skip::every])
    if not found:
        raise OnchipError(f"skip {skip} leaves none of {len(wanted)} problems")
    return found


def _ids(text: str) -> list[int]:
    out: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not found:
            raise OnchipError(f"ids {text!r}: {part!r} is no number and no range such as 7-9")
        first, last = int(found[1]), int(found[2] or found[1])
        out += range(first, last + 1)
    return list(dict.fromkeys(out)) or list(IDS)


def _files(path: Path) -> dict[int, Path]:
    """Problem files by id."""
    for folder in (path, path / "level2", path / "KernelBench" / "level2"):
        named = {f: re.match(r"(\d+)_", f.name) for f in folder.glob("*.py")}
        found = {int(m[1]): f for f, m in named.items() if m}
        if found:
            return found
    raise OnchipError(
        f"{path} has no problems (files such as 1_NAME.py): give a clone of "
        "github.com/ScalingIntelligence/KernelBench, or its folder KernelBench/level2"
    )


def _case(n: int, file: Path) -> Case:
    return Case(
        f"{file}:Model",
        dtype=torch.float32,
        device="cuda",
        protocol=KERNELBENCH,
        title=file.stem,
        group=GROUPS[n in SHORTENED],
    )


# ---- rows --------------------------------------------------------------------------------------


class KernelBench(bench_gpu.DeviceBench):
    """Runs problems on the GPU at hand, each call with a cold cache."""

    settings = Settings(budget_s=BUDGET_S)

    def __init__(self, with_peers: bool, without: Sequence[str] = ()) -> None:
        super().__init__(with_peers, without)
        self.empty_us = once.empty_us()  # before a case can break the GPU's context

    def conditions(self) -> dict[str, Any]:
        least, most = ROUNDS
        text = PROTOCOL.format(least=least, most=most, factor=ERROR_FACTOR)
        return {"protocol": text, "empty_us": self.empty_us}

    def model(self, case: Case) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        # made on the device: gigabytes of random numbers take a CPU seconds
        with torch.random.fork_rng(), torch.device(bench_gpu.DEVICE):
            torch.manual_seed(0)
            found = resolve(case.model, batch=case.batch, dtype=case.dtype)
        module = perturbed(found.module.train().to(bench_gpu.DEVICE))
        return module, tuple(signed(x.to(bench_gpu.DEVICE)) for x in found.example_inputs)

    def _measured_on(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return unseen(inputs)

    def _judge(self, verified: Verification, case: Case) -> None:
        strict(verified, case.name)

    def _times(
        self,
        case: Case,
        program: Callable[..., Any],
        module: torch.nn.Module,
        inputs: tuple[torch.Tensor, ...],
        nbytes: int,
    ) -> tuple[dict[str, float], dict[str, str]]:
        forms: dict[str, Callable[[], object]] = {
            "onchip": lambda: program(*inputs),
            "eager": lambda: module(*inputs),
        }
        notes: dict[str, str] = {}
        if self._wants("inductor"):
            with self._stage("peers"):
                made, notes = peers.make_peers(module, inputs, ("inductor",))
            forms |= made
        with self._stage("time"):
            times, launched = _medians(forms)
        why = {n: f"timed without a CUDA graph: {w}" for n, w in launched.items()}
        return times, {**notes, **why}


def _medians(
    forms: dict[str, Callable[[], object]],
) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds of a call of each form, and why some were launched without a graph."""
    graphs, failed = once.recorded(forms)
    calls = {n: graphs.get(n, f) for n, f in forms.items()}
    first = once.timed(calls, 1)
    least, most = ROUNDS
    rounds = math.ceil(TIMED_S * 1e6 / max(sum(first.values()), 1.0))
    return once.timed(calls, max(least, min(rounds, most))), failed


def signed(x: torch.Tensor) -> torch.Tensor:
    """Of [0, 1) to [-1, 1); integers as they are."""
    return x * 2 - 1 if x.is_floating_point() else x


@torch.no_grad()
def perturbed(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself: parameters whose elements are all the same (a norm's weights and biases)
    and floating buffers (running statistics, which must stay positive) no longer are, by a fixed
    seed."""
    generator = torch.Generator().manual_seed(1)

    def noise(t: torch.Tensor, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        return (make(t.shape, generator=generator) * PERTURBATION).to(t)

    for p in module.parameters():
        if p.numel() and bool((p == p.reshape(-1)[0]).all()):
            p.add_(noise(p, torch.randn))
    for b in module.buffers():
        if b.is_floating_point():
            b.add_(noise(b, torch.rand))
    return module


def strict(verified: Verification, name: str) -> None:
    """VerificationError if a result or a buffer is further from float64 than eager's allows for
    (ERROR_FACTOR), where there is no float64 run, or if one of integers is another."""
    if verified.reference != "float64":
        raise VerificationError(f"{name}: no float64 reference: {verified.reference}")
    for c in verified.comparisons:
        if math.isnan(c.error):  # no tensor: compared by verify
            continue
        limit = ERROR_FACTOR * max(c.eager_error, LEAST_ERROR)
        if not c.error <= limit:
            raise VerificationError(
                f"{name}: {c.what} has relative error {c.error:.1e}, more than {ERROR_FACTOR:g} "
                f"times eager's {c.eager_error:.1e}"
            )
