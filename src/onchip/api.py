"""What `import onchip` offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onchip.capture import Captured, Templates, capture, fold_batch_norm
from onchip.capture.capture import as_module
from onchip.capture.containers import flatten
from onchip.planning.plan import LibraryStep, Plan
from onchip.planning.planner import Planned, plan
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

    last: list[Planned] = []

    def build(
        module: torch.nn.Module, a: tuple[Any, ...], k: dict[str, Any], templates: Templates
    ) -> tuple[Captured, Plan]:
        captured = capture(module, a, k, templates)
        if settings.fold_batch_norm and settings.numerics == "fast":
            captured = fold_batch_norm(captured)
        inputs = graph_inputs(captured, a, k)
        planned = plan(captured, inputs, settings)
        last[:] = [planned]
        return captured, planned.plan

    program = Program(as_module(model), tuple(args), dict(kwargs or {}), build, settings)
    program.planned = last
    return program


def graph_inputs(captured: Captured, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The distinct tensors among the arguments, in the order of the graph's inputs."""
    leaves, _ = flatten((args, kwargs))
    found: dict[int, torch.Tensor] = {}
    for leaf, x in zip(captured.leaves, leaves, strict=True):
        if leaf.tensor is not None:
            found.setdefault(leaf.tensor, x)
    return [found[i] for i in range(len(found))]


def library_plan(captured: Captured) -> Plan:
    """Every operator as its library call: what is always possible."""
    return Plan(tuple(LibraryStep(n) for n in captured.graph.nodes))
