"""Which device a model runs on, and whether it is one that programs can be written for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from onchip.capture.captured import Captured
from onchip.capture.containers import flatten
from onchip.errors import CaptureError


def check_devices(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.device:
    """The device of a model and its arguments: one GPU if any tensor is on it (numbers as tensors
    without axes may stay on the CPU then, as in eager mode), else the CPU. Raises CaptureError,
    naming two tensors, if they are apart, or on another kind of device."""
    first: dict[torch.device, str] = {}
    for name, t in _named(module, args, kwargs):
        if t.device.type not in ("cpu", "cuda"):
            raise CaptureError(
                f"{name} is on {t.device}: kernels are generated for the CPU and NVIDIA GPUs only; "
                "move model and arguments with .cpu() or .cuda()"
            )
        if t.dim() or t.device.type == "cuda":
            first.setdefault(t.device, name)
    if len(first) > 1:
        (one, a), (other, b) = list(first.items())[:2]
        raise CaptureError(
            f"{a} is on {one}, {b} on {other}: move model and arguments to one device with .to()"
        )
    return next(iter(first), torch.device("cpu"))


def _named(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = [x for x in flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    yield from ((f"argument tensor {i}", t) for i, t in enumerate(tensors))
    yield from ((f"parameter {n}", t) for n, t in module.named_parameters())
    yield from ((f"buffer {n}", t) for n, t in module.named_buffers())


def device_of(captured: Captured, inputs: Sequence[torch.Tensor]) -> torch.device:
    """Where a captured program runs: the GPU of its inputs, its constants, or the tensors that it
    makes by itself, if one of them is on any; else the CPU."""
    tensors = [*inputs, *(s.fetch() for s in captured.slots.values())]
    places = [t.device for t in tensors]
    made = (t.tag["device"] for n in captured.graph.nodes for t in n.results if "device" in t.tag)
    places += [torch.device(str(d)) for d in dict.fromkeys(made)]
    return next((d for d in places if d.type != "cpu"), torch.device("cpu"))
