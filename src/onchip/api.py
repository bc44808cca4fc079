"""What `import onchip` offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onchip.capture import Captured, capture, fold_batch_norm
from onchip.capture.capture import as_module
from onchip.planning.plan import LibraryStep, Plan
from onchip.runtime.program import Program
from onchip.settings import Settings


def compile(
    model: torch.nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    settings: Settings = Settings(),
) -> Program:
    """A program with the model's own signature and outputs, specialised for these inputs (and,
    by itself, for others when they come).

    Raises CaptureError if the model can't be captured, InputError if the arguments do not fit it.
    """

    def build(module: torch.nn.Module, a: tuple[Any, ...], k: dict[str, Any]) -> Any:
        captured = capture(module, a, k)
        if settings.fold_batch_norm and settings.numerics == "fast":
            captured = fold_batch_norm(captured)
        return captured, library_plan(captured)

    return Program(as_module(model), tuple(args), dict(kwargs or {}), build, settings)


def library_plan(captured: Captured) -> Plan:
    """Every operator as its library call: what is always possible."""
    return Plan(tuple(LibraryStep(n) for n in captured.graph.nodes))
