"""What a generated CUDA C++ kernel is: text, parameters, and the size of its launch."""

from __future__ import annotations

from dataclasses import dataclass, field

from onchip.backends.nvidia.source import TensorMap, Workspace
from onchip.ir.expr import Tensor

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pointer:
    """A parameter: the address of the kernel's n-th tensor or workspace."""

    n: int


@dataclass(frozen=True, slots=True)
class Further:
    """A launch behind the first one, of a plain function of the same text. Each launch is compiled
    by itself, with ONCHIP_LAUNCH set to its number (behind the first: 1, 2, ...)."""

    name: str
    parameters: tuple[Pointer, ...]
    programs: int
    threads: int
    shared_bytes: int = 0
    cluster: int = 1


@dataclass(frozen=True, eq=False, slots=True)
class CudaSource:
    """Generated text (what it includes lies in `include/`) and how to run it: a launch of the
    function `name`, then those of `further`. The kernel's pointers are those of `inputs`, `outputs`
    and `workspace`, in this order; `parameters` say what the function takes.

    programs, threads, shared_bytes   of the launch (shared memory is asked for at run time)
    waits       before its first access to memory that launches write each launch waits for the one
                before it
    laid_out    constants among the inputs that the kernel wants with other strides than they have;
                inputs that are derived at load (these among them) come after the others
    """

    text: str
    name: str
    parameters: tuple[Pointer | TensorMap, ...]
    programs: int
    threads: int
    shared_bytes: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    workspace: tuple[Workspace, ...] = ()
    waits: bool = True
    cluster: int = 1
    laid_out: dict[Tensor, Strides] = field(default_factory=dict)
    further: tuple[Further, ...] = ()
