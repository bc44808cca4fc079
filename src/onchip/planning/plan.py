"""What runs, in order: library calls and generated kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from onchip.backends.nvidia.source import Workspace
from onchip.ir.expr import Tensor
from onchip.ir.graph import LibraryCall, Node

# Generated kernels for GPUs load 16 bytes at a time: their pointers are multiples of that.
GPU_POINTER = 16


class Kernel(Protocol):
    """Compiled code. `run` takes data pointers in the step's order (inputs, derived, outputs,
    workspace) and returns 0, or 1 (an index out of range), or 2 (integer division by zero). On a
    GPU it enqueues the work on PyTorch's current stream."""

    def run(self, pointers: list[int]) -> int: ...


class DeviceCode(Kernel, Protocol):
    """A kernel on a GPU. `enqueue(pointers, stream)` is `run` without what a program knows already:
    pointers that are multiples of GPU_POINTER, and the current stream's handle. The code is loaded
    when it is first asked for."""

    @property
    def enqueue(self) -> Callable[[Sequence[int], int], None]: ...


@dataclass(frozen=True, eq=False, slots=True)
class Derived:
    """A value computed from constants, once and again whenever one of them changes: a packed
    weight, a folded scale. `compute` takes the sources' torch tensors and returns a torch tensor:
    a dense one, which a kernel reads through its data pointer, or one in oneDNN's own layout."""

    name: str
    sources: tuple[Tensor, ...]
    compute: Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False, slots=True)
class LibraryStep:
    """One ATen call, in place on its first argument if its target says so."""

    node: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.node.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return self.node.results


@dataclass(frozen=True, eq=False, slots=True)
class CallStep:
    """One call of another library operator than the node's own. `nodes` are the operators it
    computes; its arguments hold Tensors, and a Derived for each value computed from constants.
    The result, `output`, is in fresh memory."""

    call: LibraryCall
    output: Tensor
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        return " + ".join(n.op for n in self.nodes)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(dict.fromkeys(self.call.tensors()))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.output,)

    @property
    def derived(self) -> tuple[Derived, ...]:
        return tuple(a for a in self.call.args if isinstance(a, Derived))


@dataclass(frozen=True, eq=False, slots=True)
class KernelStep:
    """One call of a generated kernel. `nodes` are the operators it computes; `workspace` is memory
    of the step's own, whose pointers follow the outputs'. waits: it may start before the GPU's work
    so far is done (launcher.early_starts), since it waits for that by itself. text: what was
    generated."""

    name: str
    kernel: Kernel
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    derived: tuple[Derived, ...] = ()
    nodes: tuple[Node, ...] = ()
    workspace: tuple[Workspace, ...] = ()
    waits: bool = False
    text: str = ""


Step = LibraryStep | CallStep | KernelStep


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Steps in execution order. `layouts` gives the strides (in elements) of tensors that kernels
    write; a tensor without an entry is contiguous. `eager` says why the original module runs
    instead ("" if the steps do)."""

    steps: tuple[Step, ...]
    layouts: dict[Tensor, tuple[int, ...]] = field(default_factory=dict)
    eager: str = ""
