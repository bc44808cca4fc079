"""The library backend: every operator as one ATen call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onchip.capture.schema import aliases, call, fill, flat_results, has_effect, is_random, overload
from onchip.fusion.signature import EXACT
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node

__all__ = [
    "aliases",
    "call",
    "convolutions",
    "fill",
    "flat_results",
    "has_effect",
    "is_random",
    "operator",
    "overload",
    "run",
    "seconds",
]


def operator(node: Node) -> Callable[..., Any]:
    """The ATen operator of a node. A convolution that PyTorch computes in float32 stays so in any
    layout (cuDNN may choose TF32 for another one)."""
    op = overload(node.call.target)
    exact = any(t is not None and EXACT in t.tag for t in node.outputs)
    return _in_float32(op) if exact else op


def _in_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with convolutions("ieee"):
            return op(*args, **kwargs)

    return run


@contextmanager
def convolutions(precision: str) -> Iterator[None]:
    """PyTorch's flag for float32 convolutions on a GPU is "ieee" or "tf32" inside."""
    before = torch._C._get_fp32_precision_getter("cuda", "conv")
    torch._C._set_fp32_precision_setter("cuda", "conv", precision)
    try:
        yield
    finally:
        torch._C._set_fp32_precision_setter("cuda", "conv", before)


def run(node: Node, values: dict[Tensor, torch.Tensor]) -> None:
    """Run one node: reads its inputs from `values`, adds its results."""
    args, kwargs = fill(node.call, values)
    got = flat_results(operator(node)(*args, **kwargs))
    values.update((t, x) for t, x in zip(node.outputs, got, strict=True) if t is not None)


def seconds(node: Node, values: dict[Tensor, torch.Tensor], repeats: int = 5) -> float:
    """Best time of one call, warm, in seconds."""
    args, kwargs = fill(node.call, values)
    op = operator(node)
    best = float("inf")
    device = next((v.device for v in values.values()), torch.device("cpu"))
    for _ in range(repeats + 1):
        start = time.perf_counter()
        op(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
