"""Code generators: what the planner asks of one, and which one a device gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from onchip.errors import CompilerError, InputError
from onchip.fusion.machine import HOPPER, Gpu, Machine
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate, Context, Strides
from onchip.planning.plan import Kernel
from onchip.settings import Settings


class Built(Protocol):
    """A candidate after its compiler. path: the binary, or the text, in the cache; reused: it was
    found there."""

    @property
    def path(self) -> Path: ...
    @property
    def reused(self) -> bool: ...


Failure = CompilerError | Refusal

# Variants of a generator that come before the first of what stands beside it: its favourites.
LEADING = 2


@dataclass(frozen=True, eq=False, slots=True)
class NoVariant:
    """Stands for the variants of a backend that has none, so that the reason is kept."""

    refusal: Refusal
    label: str


def in_turn(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """The first ones' favourites, then one of the second ones and one of the first in turn."""
    out, rest = [*first[:LEADING]], first[LEADING:]
    for n in range(max(len(rest), len(second))):
        out += [*second[n : n + 1], *rest[n : n + 1]]
    return out


class Generator(Protocol):
    """Writes and builds kernels for one device.

    name      "cpp", "triton", or "cuda" (the tensor-core engine, with or without Triton)
    machine   what it writes for
    timed     whether a kernel's time says anything; where it does not (an interpreter), a kernel
              that is correct ships
    """

    @property
    def name(self) -> str: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def timed(self) -> bool: ...

    @property
    def problem(self) -> str:
        """Why it can build nothing here ("no C++ compiler was found"); "" if it can."""
        ...

    @property
    def key(self) -> tuple[str, ...]:
        """What a verdict about its kernels depends on beyond region, machine and onchip's code:
        the compiler's and the driver's versions, the processor, settings, PyTorch's flags for
        precision."""
        ...

    @property
    def seconds_per_kernel(self) -> float:
        """What one kernel takes to compile, on one core."""
        ...

    @property
    def pads_operands(self) -> bool:
        """See Partitioner."""
        ...

    def root_of(
        self, region: Region, strides: dict[Tensor, Strides], constants: frozenset[Tensor]
    ) -> Tensor | Refusal | None:
        """The root of a nest of the region, None if it takes several; or why it can't be one
        kernel."""
        ...

    def variants(self, region: Region, context: Context) -> Sequence[Any] | Refusal:
        """Ways to run a region before any text is written, most promising first; each has a
        `label`, which says how it differs from the others."""
        ...

    def write(self, region: Region, variant: Any, context: Context) -> Candidate | Refusal:
        """The kernel of one of `variants`."""
        ...

    def again(self, region: Region, token: Mapping[str, Any], context: Context) -> Any | None:
        """The variant of the candidate with this token; None if that can't be told."""
        ...

    def build_all(self, candidates: Sequence[Candidate]) -> Sequence[Built | Failure]:
        """Compile many, in parallel, cached; or why one could not be compiled, or is not worth
        running."""
        ...

    def kernel(self, candidate: Candidate, built: Any) -> Kernel:
        """The runnable kernel of what `build_all` made of the candidate."""
        ...

    def has_short_form(self, region: Region, constants: frozenset[Tensor]) -> bool:
        """Whether a convolution of the region could do with fewer products in a kernel alone."""
        ...

    def engine_takes(self, region: Region, context: Context) -> bool:
        """Whether there is a tensor-core engine, and it computes the region as one kernel."""
        ...

    def floor_us(self, region: Region) -> float:
        """Microseconds that moving the region's inputs and results, or its products, take at the
        data sheet's rates; 0 where that says nothing about its kernels."""
        ...


def _for_gpu(device: torch.device, engine_alone: bool) -> Generator:
    """The generator for a GPU: the tensor-core engine and Triton where there is an engine."""
    from onchip.planning.generators import triton

    gpu = triton.gpu_of(device)
    if gpu.capability == HOPPER:
        from onchip.planning.generators import cuda

        return cuda.for_device(device, engine_alone)
    if engine_alone:
        raise InputError(
            f'Settings(generator="cuda") writes kernels for sm_{HOPPER}, and {device} is '
            f'sm_{gpu.capability}: use generator="auto"'
        )
    return triton.for_device(device)


def generator_for_gpu(gpu: Gpu) -> Generator:
    """The generator for a GPU that need not be here: its kernels can be written and compiled."""
    from onchip.planning.generators import cuda, triton

    return cuda.for_gpu(gpu) if gpu.capability == HOPPER else triton.for_gpu(gpu)


def generator_for(device: torch.device, settings: Settings) -> Generator:
    """The generator for tensors on `device`. Raises InputError if settings name one that can't
    write for it."""
    from onchip.planning.generators import cpp, triton

    match device.type, settings.generator:
        case "cpu", "auto" | "cpp":
            return cpp.for_cpu(settings)
        case "cpu", "triton":
            return triton.interpreted()
        case "cuda", "triton":
            return triton.for_device(device)
        case "cuda", "cuda":
            return _for_gpu(device, True)
        case "cuda", "auto":
            from onchip.planning.generators import cudnn

            return cudnn.beside(_for_gpu(device, False), device)
    raise InputError(
        f'Settings(generator="{settings.generator}") can\'t write kernels for tensors on {device}: '
        'use generator="auto"'
    )
