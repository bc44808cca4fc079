"""Runs in a process of its own, with TRITON_INTERPRET=1: whole programs of Triton kernels.

    python -m tests.planning.generators_child FILE

compiles each program of `CASES`, calls it, and writes to FILE (JSON) what test_generators.py asks
about.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.backends.triton_interpreter import repair
from torch import nn

import onchip
from onchip.planning.plan import KernelStep
from onchip.settings import Settings

TRITON = Settings(generator="triton")


class Softmax(nn.Module):
    def forward(self, x, y):
        return torch.softmax((x + y) * 1.7, -1) * torch.relu(y)


class Residual(nn.Module):
    """Two results of one kernel, one of them read by the other."""

    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n)

    def forward(self, x, y):
        total = x + y
        return self.norm(total), total


class Pipeline(nn.Module):
    """Convolution, ReLU, batch norm (behind the ReLU: its scale is derived at load), pooling."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)
        self.norm.weight.data.uniform_(-1.0, 1.0)

    def forward(self, x):
        return F.max_pool2d(self.norm(F.relu(self.conv(x))), 2)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(19, 33), nn.Linear(33, 5)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


def transposed(x, y):
    return x.t() * 2 + y[:, 3:20]


def columns(x):
    return (x * x).sum(0) - x.amax(0)


def gather(table, i):
    return table[i] + 1


def nothing(x):
    return torch.relu(x) + 1


def image(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


CASES: dict[str, Callable[[], tuple[Any, tuple[torch.Tensor, ...]]]] = {
    "softmax": lambda: (Softmax(), (torch.randn(5, 37), torch.randn(5, 37))),
    "broadcast": lambda: (Softmax(), (torch.randn(5, 37), torch.randn(37))),
    "bfloat16": lambda: (Softmax().bfloat16(), (torch.randn(5, 37).bfloat16(),) * 2),
    "residual": lambda: (Residual(29), (torch.randn(3, 5, 29), torch.randn(3, 5, 29))),
    "pipeline": lambda: (Pipeline().eval(), (torch.randn(1, 3, 10, 14),)),
    "channels last": lambda: (Pipeline().eval(), (image(2, 3, 6, 10),)),
    "mlp": lambda: (Mlp(), (torch.randn(11, 19),)),
    "batch norm": lambda: (nn.BatchNorm2d(5).train(), (torch.randn(3, 5, 7, 9),)),
    "transposed": lambda: (transposed, (torch.randn(17, 33), torch.randn(33, 24))),
    "columns": lambda: (columns, (torch.randn(613, 7),)),
    "gather": lambda: (gather, (torch.randn(11, 6), torch.tensor([[3, -1], [0, 10]]))),
    "empty": lambda: (nothing, (torch.randn(0, 4),)),
}


def wide(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def results(x: Any) -> list[torch.Tensor]:
    return list(x) if isinstance(x, tuple) else [x]


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    size = want.double().norm().item()
    return (got.double() - want).norm().item() / (size or 1.0)


def facts(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, args = CASES[name]()
    reference = copy.deepcopy(model)
    reference = reference.double() if isinstance(reference, nn.Module) else reference
    program = onchip.compile(model, args, settings=TRITON)
    books = program.compiled[-1]
    want = results(reference(*map(wide, args)))
    errors = [error_of(g, w) for g, w in zip(results(program(*args)), want, strict=True)]
    if isinstance(model, nn.Module):  # what the model writes itself
        pairs = zip(model.buffers(), reference.buffers(), strict=True)
        errors += [error_of(b, w) for b, w in pairs]
    kernels = [s for s in books.planned.plan.steps if isinstance(s, KernelStep)]
    return {
        "errors": errors,
        "form": books.outcome.form,
        "steps": [[type(s).__name__, *(n.op for n in s.nodes)] for s in books.planned.plan.steps],
        "derived": sum(len(k.derived) for k in kernels),
        "workspace": sum(len(k.workspace) for k in kernels),
        "refused": [list(v.refused) for _, _, v, _ in books.planned.steps_of if v is not None],
        "sources": list(program.sources.values()),
        "generator": books.planned.generator,
        "backends": sorted({k.backend for k in program.report().kernels}),
        "ledger": [e.kind for e in program.report().numerics.ledger],
        "times": [v.kernel_us for _, _, v, _ in books.planned.steps_of if v is not None],
    }


def main(file: Path) -> None:
    repair()
    with torch.no_grad():
        first = {name: facts(name) for name in CASES}
        again = {name: facts(name)["steps"] for name in ("softmax", "pipeline")}
    file.write_text(json.dumps({"first": first, "again": again}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
