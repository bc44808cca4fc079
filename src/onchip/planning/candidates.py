"""Generated kernels that could run a region, whatever language they are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from onchip.backends.cudnn.build import Plan as CudnnPlan
from onchip.backends.nvidia.source import Workspace
from onchip.fusion.region import Region
from onchip.ir.expr import Tensor
from onchip.planning.plan import Derived, Kernel
from onchip.planning.values import aligned

Strides = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Context:
    """What a generator must know of a program.

    strides    in elements, of every tensor that kernels read or write
    constants  tensors that are, or depend on, constants only
    available  tensors that exist when the program runs; the rest of the constants that a kernel
               reads are derived at load
    """

    strides: dict[Tensor, Strides]
    constants: frozenset[Tensor]
    available: frozenset[Tensor]


class Source(Protocol):
    """Generated text, with the tensors that it takes. A kernel's pointers: `inputs` (those that
    are derived at load last), values derived beyond them, `outputs`, workspace. laid_out:
    constants among the inputs that it wants with other strides than they have."""

    @property
    def text(self) -> str: ...
    @property
    def inputs(self) -> tuple[Tensor, ...]: ...
    @property
    def outputs(self) -> tuple[Tensor, ...]: ...
    @property
    def laid_out(self) -> dict[Tensor, Strides]: ...


@dataclass(frozen=True, eq=False, slots=True)
class Candidate:
    """One generated kernel.

    stored     tensors that it keeps in memory, scratch or the program's, rather than in registers
    choice     how it differs from its siblings, readable
    derived    what it reads that is computed from constants at load; inputs: the rest
    strides    of the inputs and outputs
    workspace  memory behind the outputs, for what its launches hand on
    precision  of its float32 products, where that is a choice: "ieee", "tf32x3" or "tf32"
    waits      see KernelStep
    foreign    a library's: it is compared with ATen where inputs are NaN or infinite, too
    token      what its generator makes its variant from without looking for others (`again`); {}:
               it has to look
    """

    region: Region
    source: Any  # a Source; its generator knows which
    stored: frozenset[Tensor]
    choice: str
    derived: tuple[Derived, ...]
    inputs: tuple[Tensor, ...]
    strides: Mapping[Tensor, Strides]
    workspace: tuple[Workspace, ...] = ()
    precision: str = ""
    waits: bool = False
    fewer_products: bool = False  # Winograd's form
    foreign: bool = False
    token: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return self.source.outputs

    def moved(self, region: Region, same: dict[Tensor, Tensor]) -> Candidate:
        """This kernel for an isomorphic region; `same` maps each tensor to its counterpart. The
        source keeps the names that it has: names are comments."""
        source = replace(
            self.source,
            inputs=tuple(same.get(t, t) for t in self.source.inputs),
            outputs=tuple(same[t] for t in self.source.outputs),
            laid_out={same.get(t, t): s for t, s in self.source.laid_out.items()},
        )
        return replace(
            self,
            region=region,
            source=source,
            stored=frozenset(same.get(t, t) for t in self.stored),
            derived=tuple(_moved(d, same) for d in self.derived),
            inputs=tuple(same[t] for t in self.inputs),
            strides={same.get(t, t): s for t, s in self.strides.items()},
        )


def _moved(d: Derived, same: dict[Tensor, Tensor]) -> Derived:
    sources = tuple(same[s] for s in d.sources)
    name = d.name
    for old, new in zip(d.sources, sources, strict=True):
        name = name.replace(old.name, new.name)
    return replace(d, name=name, sources=sources)


def completed(candidate: Candidate, built: object) -> Candidate:
    """The candidate with what is known when it is built: the name and the workspace of cuDNN's
    plan."""
    if not isinstance(built, CudnnPlan):
        return candidate
    workspace = (Workspace(built.workspace),) if built.workspace else ()
    return replace(candidate, choice=f"{candidate.choice}: {built.name}", workspace=workspace)


def comment_of(region: Region, note: str = "") -> str:
    """What a generated text says about itself: each operator with its place in the model."""
    lines = [note] if note else []
    return "\n".join(lines + [f"{n.name} = {n.op}   {n.origin}" for n in region.nodes])


def runner(
    candidate: Candidate,
    kernel: Kernel,
    value: Callable[[Tensor], torch.Tensor],
    derived: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    workspace: Sequence[torch.Tensor] = (),
) -> Callable[[], int]:
    """A closure that runs the kernel on these tensors once, and returns its status."""
    given = [value(t) for t in candidate.inputs]
    tensors = [aligned(x) if x.is_cuda else x for x in given]
    tensors += [*derived, *outputs, *workspace]
    pointers = [x.data_ptr() for x in tensors]

    def run(_alive: object = tensors) -> int:  # or the memory could go to others
        return kernel.run(pointers)

    return run
