"""Every intermediate's value, from one eager run: inputs for measuring and references for
checking candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onchip.backends.library import aten
from onchip.capture.captured import Captured
from onchip.capture.observe import clone_storage
from onchip.ir.expr import Tensor
from onchip.planning.plan import GPU_POINTER

Strides = tuple[int, ...]


@dataclass(eq=False)
class Values:
    """Tensors of the graph by name, in the layouts that the program will use."""

    tensors: dict[Tensor, torch.Tensor]

    def __getitem__(self, t: Tensor) -> torch.Tensor:
        return self.tensors[t]


def run_eagerly(
    captured: Captured, inputs: Sequence[torch.Tensor], layouts: dict[Tensor, Strides]
) -> Values:
    """Run the captured graph operator by operator on copies of the inputs."""
    values: dict[Tensor, torch.Tensor] = {}
    for t, s in captured.slots.items():
        values[t] = s.fetch().detach()
    with torch.no_grad():
        for t, x in zip(captured.graph.inputs, inputs, strict=True):
            values[t] = clone_storage(x.detach())  # an expanded input stays expanded
        for p in captured.prepare:
            got = p.compute([values[s] for s in p.sources])
            values.update(zip(p.outputs, got, strict=True))
        for n in captured.graph.nodes:
            aten.run(n, values)
        for t, x in values.items():
            values[t] = in_layout(x, layouts.get(t))
    return Values(values)


def in_layout(x: torch.Tensor, strides: Strides | None) -> torch.Tensor:
    return x if strides is None or same_strides(x, strides) else copied(x, strides)


def torch_dtype(t: Tensor) -> torch.dtype:
    return getattr(torch, t.dtype.label)


def copied(t: torch.Tensor, strides: Strides) -> torch.Tensor:
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def aligned(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy with the same strides where a GPU's kernels can't take its address."""
    return copied(t, t.stride()) if t.data_ptr() % GPU_POINTER else t


def same_strides(x: torch.Tensor, strides: Strides) -> bool:
    return all(n <= 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))
