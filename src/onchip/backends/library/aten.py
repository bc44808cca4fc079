"""The library backend: every operator as one ATen call."""

from __future__ import annotations

import time

import torch

from onchip.capture.schema import aliases, call, fill, flat_results, has_effect, is_random, overload
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node

__all__ = [
    "aliases",
    "call",
    "fill",
    "flat_results",
    "has_effect",
    "is_random",
    "overload",
    "run",
    "seconds",
]


def run(node: Node, values: dict[Tensor, torch.Tensor]) -> None:
    """Run one node: reads its inputs from `values`, adds its results."""
    got = call(node.call, values)
    values.update((t, x) for t, x in zip(node.outputs, got, strict=True) if t is not None)


def seconds(node: Node, values: dict[Tensor, torch.Tensor], repeats: int = 5) -> float:
    """Best time of one call, warm, in seconds."""
    args, kwargs = fill(node.call, values)
    op = overload(node.call.target)
    best = float("inf")
    device = next((v.device for v in values.values()), torch.device("cpu"))
    for _ in range(repeats + 1):
        start = time.perf_counter()
        op(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
