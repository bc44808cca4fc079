"""What a generated CUDA C++ kernel is: text, parameters, and the size of its launch."""

from __future__ import annotations

from dataclasses import dataclass, field

from onchip.backends.nvidia.source import Workspace
from onchip.ir.expr import Tensor

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pointer:
    """A parameter: the address of the kernel's n-th tensor or workspace."""

    n: int


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A parameter: how the copy engine sees the kernel's n-th tensor (a CUtensorMap by value).

    kind             element type: "bf16", "fp16" or "fp32"
    offset           elements from the tensor's address to the first one of the map
    sizes            innermost first, at most five; strides: bytes between two elements of each
                     dimension but the first, which lie side by side (multiples of 16)
    box              elements that one copy spans along each dimension, those that it leaves out
                     included; every: it takes one in so many of them (strides of a convolution)
    swizzle          bytes of a row in shared memory whose 16-byte parts are permuted: 128, 64 or
                     32; 0: none
    """

    n: int
    kind: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    every: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True, eq=False, slots=True)
class CudaSource:
    """Generated text (what it includes lies in `include/`) and how to run it: one launch of the
    function `name`. The kernel's pointers are those of `inputs`, `outputs` and `workspace`, in this
    order; `parameters` say what the function takes.

    programs, threads, shared_bytes   of the launch (shared memory is asked for at run time)
    waits       before its first access to memory it waits for the launch before it
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
