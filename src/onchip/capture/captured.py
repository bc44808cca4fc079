"""The result of capture: a graph, and everything that ties it to the live model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from onchip.capture.containers import Spec
from onchip.ir.expr import Tensor
from onchip.ir.graph import Graph

SlotKind = Literal["parameter", "buffer", "attribute", "value"]


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """Where a constant of the graph lives: `owner`'s parameter, buffer or plain attribute
    `name`, or (kind "value") a tensor that the model holds nowhere by name."""

    kind: SlotKind
    owner: torch.nn.Module | None
    name: str
    value: torch.Tensor | None = None

    @property
    def place(self) -> dict[str, Any]:
        """The dictionary that holds the live tensor under `name`."""
        assert self.owner is not None
        match self.kind:
            case "parameter":
                return self.owner._parameters
            case "buffer":
                return self.owner._buffers
        return self.owner.__dict__

    def fetch(self) -> torch.Tensor:
        """The live tensor."""
        return self.value if self.value is not None else self.place[self.name]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One flat input: a tensor (`tensor` is its position among the graph's inputs), or a Python
    constant guarded by value."""

    tensor: int | None
    value: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """What eager gave for one tensor output.

    alias    None, or ("input", i), ("constant", Tensor), ("output", j): whose storage it shares
    same     it is that very tensor object
    shape, strides, offset   in elements; offset counts from the storage's start
    shift    bytes from the first element of the tensor that it aliases to its own
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    alias: tuple[str, Any] | None = None
    same: bool = False
    shift: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Prepare:
    """A computation on constants alone, done at load and again when one of `sources` changes.

    `compute` takes the sources' torch tensors, in order, and gives one for each of `outputs`.
    """

    name: str
    sources: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    compute: Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One rewriting, for the numerics ledger.

    kind   the rule's name
    nodes  the operator that it stands at, then those that live on in that one
    """

    kind: str
    text: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Captured:
    """A model's program for one set of input shapes, dtypes, strides and Python values.

    module        the user's module (a function is wrapped in one); never changed
    graph         functional; its outputs are the tensor leaves of the result, in order
    input_spec    structure of (args, kwargs); `leaves` describe its flat leaves
    output_spec   structure of the result; `output_constants[i]` is the i-th leaf's Python value,
                  or TENSOR where the next graph output belongs
    slots         constants of the graph -> where they live
    prepare       what depends on constants only, in order; the results are constants of `graph`
                  without a slot (recomputed when one of their sources changes)
    results       eager's strides and aliasing, one per graph output
    python_state  names of module attributes that forward() itself changes
    ledger        what rules rewrote (onchip.algebra)
    """

    module: torch.nn.Module
    graph: Graph
    input_spec: Spec
    leaves: tuple[Leaf, ...]
    output_spec: Spec
    output_constants: tuple[Any, ...]
    slots: dict[Tensor, Slot]
    prepare: tuple[Prepare, ...] = ()
    results: tuple[Result, ...] = ()
    python_state: tuple[str, ...] = ()
    ledger: tuple[LedgerEntry, ...] = field(default=())

    def with_graph(self, graph: Graph, **other: Any) -> Captured:
        return replace(self, graph=graph, **other)


class _TensorMark:
    def __repr__(self) -> str:
        return "TENSOR"


TENSOR = _TensorMark()
