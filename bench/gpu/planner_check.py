"""The planner on a GPU: its clock, its generator, and verdicts for a few groups of operators.

    PYTHONPATH=src python bench/gpu/planner_check.py [CASE ...]

One line a case: what was chosen, its time and the library's (microseconds of the GPU), how many
candidates were timed and refused. Fails (exit code 1) if the clock is off, a candidate was refused
as wrong or could not be built, or a whole program differs from eager mode.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onchip
from onchip.capture import capture
from onchip.planning import planner, timing
from onchip.planning.generators import generator_for
from onchip.planning.tuner import difference
from onchip.settings import Settings

GPU = torch.device("cuda", 0)
HALF = torch.bfloat16
failures: list[str] = []


def expect(good: bool, what: str) -> None:
    print(("ok    " if good else "FAIL  ") + what, flush=True)
    if not good:
        failures.append(what)


# ---- the clock -----------------------------------------------------------------------------------


def check_clock() -> None:
    clock = timing.clock_for(GPU)
    x, y = (torch.empty(1 << 28, device=GPU) for _ in range(2))
    rate = 2 * x.nbytes / timing.fastest([lambda: torch.neg(x, out=y)], 0.2, clock=clock)[0] / 1e9
    expect(3000 < rate < 5500, f"a copy of 1 GiB: {rate:,.0f} GB/s (4,275 was measured before)")
    small = torch.zeros(16, device=GPU)
    one, three = timing.fastest(
        [lambda: small.add_(1), lambda: small.add_(1).mul_(2).sub_(3)], 0.1, 100.0, clock
    )
    text = f"one tiny operator {one * 1e6:.2f} us, three {three * 1e6:.2f} us"
    expect(0.3e-6 < one < 4e-6 and 2 < three / one < 4.5, text)
    waits = timing.fastest([lambda: small.sum().item()], 0.05, clock=clock)[0]
    text = f"what can't be captured is timed by its calls: {waits * 1e6:.1f} us"
    expect(one < waits < 1e-3, text)
    again = timing.fastest([lambda: small.add_(1)], 0.1, clock=clock)[0]
    expect(again < 3 * one, f"capturing works behind a failed capture: {again * 1e6:.2f} us")


# ---- groups --------------------------------------------------------------------------------------


class Pipeline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)
        assert self.norm.running_var is not None
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(self.norm(F.relu(self.conv(x))), 2)


class Linear(nn.Module):
    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.layer = nn.Linear(k, n)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.layer(x)) + y


class Norm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(n)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.norm(F.gelu(x) + y)


class Pointwise(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) * 2


class Turned(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.t() + y


class Columns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


def on(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    x = torch.randn(shape, device=GPU, dtype=dtype)
    return x.to(memory_format=torch.channels_last) if len(shape) == 4 else x


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "pointwise": lambda: (Pointwise(), (on(HALF, 1 << 26), on(HALF, 1 << 26))),
    "softmax": lambda: (nn.Softmax(-1), (on(HALF, 16384, 4096),)),
    "norm": lambda: (Norm(4096).to(GPU, HALF), (on(HALF, 16384, 4096), on(HALF, 16384, 4096))),
    "odd norm": lambda: (
        Norm(997).to(GPU),
        (on(torch.float32, 333, 997), on(torch.float32, 333, 997)),
    ),
    "transpose": lambda: (Turned(), (on(HALF, 8192, 4096), on(HALF, 4096, 8192))),
    "columns": lambda: (Columns(), (on(HALF, 65536, 4096),)),
    "pipeline": lambda: (Pipeline().to(GPU, HALF).eval(), (on(HALF, 32, 64, 56, 56),)),
    "pipeline fp32": lambda: (Pipeline().to(GPU).eval(), (on(torch.float32, 8, 64, 28, 28),)),
    "linear": lambda: (
        Linear(2048, 2048).to(GPU, HALF), (on(HALF, 4096, 2048), on(HALF, 4096, 2048)),
    ),
    "linear fp32": lambda: (
        Linear(2048, 2048).to(GPU),
        (on(torch.float32, 1024, 2048), on(torch.float32, 1024, 2048)),
    ),
    "batch norm": lambda: (nn.BatchNorm2d(64).to(GPU, HALF), (on(HALF, 32, 64, 56, 56),)),
}  # fmt: skip


def check_case(name: str) -> None:
    model, inputs = CASES[name]()
    start = time.perf_counter()
    planned = planner.plan(capture(model, inputs), list(inputs), Settings(budget_s=30.0))
    seconds = time.perf_counter() - start
    for kind, ops, v in dict.fromkeys(map(described, planned.steps_of)):
        print(f"      {name}: {kind} {ops}: {v}")
    refused = [r for _, _, v, _ in planned.steps_of if v is not None for r in v.refused]
    for choice, why in dict.fromkeys(refused):
        print(f"      refused: {choice}: {why[:300]}")
    bad = [why for _, why in refused if "differs from the reference" in why or "compiler" in why]
    expect(not bad, f"{name}: planned in {seconds:.1f} s, {planned.built} kernels built")


def described(step: tuple[Any, ...]) -> tuple[str, str, str]:
    made, unit, verdict, _ = step
    text = str(unit.refusal) if verdict is None else " ".join(
        f"{k} {t:,.1f}" for k, t in verdict.costs.items()
    )  # fmt: skip
    if verdict is not None and verdict.times_us:
        best = min(verdict.times_us, key=lambda c: verdict.times_us[c])
        text += f" ({len(verdict.times_us)} timed; {best})"
    return type(made).__name__, "+".join(n.op for n in made.nodes), text


def check_program(name: str) -> None:
    """The same through onchip.compile, twice: results, and buffers that the model writes."""
    model, inputs = CASES[name]()
    want = model(*inputs)
    program = onchip.compile(model, inputs)
    for _ in range(2):
        problem = difference(program(*inputs), want, 2e-3)
        expect(not problem, f"{name}: program, {program.compiled[-1].outcome.form} {problem}")


def main(names: list[str]) -> int:
    print(f"{torch.cuda.get_device_name(GPU)}, torch {torch.__version__}, onchip {onchip.__file__}")
    print(generator_for(GPU, Settings()))
    torch.manual_seed(0)
    with torch.no_grad():
        check_clock()
        for check in (check_case, check_program):
            for name in names or CASES:
                try:
                    check(name)
                except Exception as error:  # the other cases say more
                    expect(False, f"{name}: {type(error).__name__}: {str(error)[:500]}")
    print(f"{len(failures)} failures" + "".join(f"\n  {f}" for f in failures))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
