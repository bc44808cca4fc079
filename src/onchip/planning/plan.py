"""What runs, in order: library calls and generated kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from onchip.ir.expr import Tensor
from onchip.ir.graph import Node


class Kernel(Protocol):
    """Compiled code. `run` takes data pointers in the step's order (inputs, derived, outputs)
    and returns 0, or 1 (an index out of range), or 2 (integer division by zero)."""

    def run(self, pointers: list[int]) -> int: ...


@dataclass(frozen=True, eq=False, slots=True)
class Derived:
    """A value computed from constants, once and again whenever one of them changes: a packed
    weight, a folded scale. `compute` takes the sources' torch tensors and returns a torch tensor
    that the kernel reads through its data pointer."""

    name: str
    sources: tuple[Tensor, ...]
    compute: Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False, slots=True)
class LibraryStep:
    """One ATen call."""

    node: Node


@dataclass(frozen=True, eq=False, slots=True)
class KernelStep:
    """One launch. `nodes` are the operators it computes."""

    name: str
    kernel: Kernel
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    derived: tuple[Derived, ...] = ()
    nodes: tuple[Node, ...] = ()


Step = LibraryStep | KernelStep


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Steps in execution order. `layouts` gives the strides (in elements) of tensors that kernels
    write; a tensor without an entry is contiguous. `eager` says why the original module runs
    instead ("" if the steps do)."""

    steps: tuple[Step, ...]
    layouts: dict[Tensor, tuple[int, ...]] = field(default_factory=dict)
    eager: str = ""
