"""What generated kernels for NVIDIA GPUs are launched with, whatever language they are in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A parameter: how the copy engine sees the kernel's n-th tensor (a CUtensorMap by value).

    kind             element type: "bf16", "fp16", "fp32" or "tf32" (float32, rounded to it)
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


@dataclass(frozen=True, slots=True)
class Launch:
    """One function of the text: its name, the number of programs (a one-dimensional grid), what it
    takes (which of the kernel's pointers, or a tensor map), its warps and (in Triton) pipeline
    stages, and how many neighbouring programs are a cluster (which run at the same time, near each
    other). waits: before its first access to memory it waits for the launch before it."""

    name: str
    programs: int
    arguments: tuple[int | TensorMap, ...]
    warps: int = 4
    stages: int = 3
    cluster: int = 1
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that the launches hand to each other. zeroed: it holds zeros before the first launch
    and is left so; barrier: programs of a launch wait for each other by it."""

    nbytes: int
    zeroed: bool = False
    barrier: bool = False
