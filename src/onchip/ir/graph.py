"""A model as data: tensors, and the operators that define them, in execution order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from onchip.ir.expr import Tensor, loads


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an operator comes from, in the user's terms."""

    module: str = ""  # path in the model, e.g. "layer1.0.conv2"
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else ""
        return " ".join(p for p in (self.module, f"({place})" if place else "") if p) or "model"


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """The operator as PyTorch runs it: `target` ("aten.relu.default"), with Tensor objects in
    place of tensors inside args and kwargs (also nested in lists)."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        return list(_tensors_in((self.args, self.kwargs)))


def _tensors_in(x: Any) -> Iterable[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from _tensors_in(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from _tensors_in(y)


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One operator.

    name     unique, readable ("layer1.0.conv2", "add_3")
    call     how PyTorch computes it
    tensors  every tensor its expressions define, in order, outputs included; empty if opaque
    outputs  its results, one per result of the call (a result nobody can read is None)
    opaque   why it has no expression ("" if it has one)
    """

    name: str
    call: LibraryCall
    tensors: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]
    origin: Origin = Origin()
    opaque: str = ""

    @property
    def op(self) -> str:
        """Short operator name: "conv2d"."""
        return self.call.target.split(".")[1] if "." in self.call.target else self.call.target

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(dict.fromkeys(self.call.tensors()))

    @property
    def results(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.outputs if t is not None)

    def __repr__(self) -> str:
        outs = ", ".join(map(repr, self.results))
        ins = ", ".join(t.name for t in self.inputs)
        return f"{outs} = {self.op}({ins})  # {self.name}"


@dataclass(frozen=True, slots=True)
class Mutation:
    """After the call, `value` is copied into the parameter, buffer or input `target`."""

    target: Tensor
    value: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Graph:
    """A functional program.

    inputs     user arguments (tensors), in call order
    constants  parameters, buffers and lifted constants (tensor -> its name in the model)
    nodes      operators in execution order
    outputs    the results, flat (a Tensor, or a Python constant)
    mutations  writes that eager would have made in place
    """

    inputs: tuple[Tensor, ...]
    constants: dict[Tensor, str]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    mutations: tuple[Mutation, ...] = ()

    def with_nodes(self, nodes: Iterable[Node], **other: Any) -> Graph:
        return replace(self, nodes=tuple(nodes), **other)

    @property
    def output_tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that must exist when the program ends (outputs and mutated values)."""
        outs = [t for t in self.outputs if isinstance(t, Tensor)]
        return tuple(dict.fromkeys(outs + [m.value for m in self.mutations]))

    def producer(self) -> dict[Tensor, Node]:
        return {t: n for n in self.nodes for t in n.results}

    def users(self) -> dict[Tensor, list[Node]]:
        out: dict[Tensor, list[Node]] = {}
        for n in self.nodes:
            for t in n.inputs:
                out.setdefault(t, []).append(n)
        return out


def addressed(graph: Graph) -> frozenset[Node]:
    """Nodes whose results, or what follows from them, as_strided reads by address, and the
    as_strided nodes: these results must lie in memory exactly as in PyTorch."""
    producer = graph.producer()
    found: set[Node] = set()
    stack = [n for n in graph.nodes if n.op.startswith("as_strided")]
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += [producer[t] for t in n.inputs if t in producer]
    return frozenset(found)


def reads(t: Tensor) -> list[Tensor]:
    """Tensors that the expression of `t` reads, each once, in order."""
    return list(dict.fromkeys(ld.src for ld in loads(t.body))) if t.body is not None else []


def defined_by(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Tensors with expressions between `inputs` (excluded) and `outputs`, in dependency order."""
    stop, order, state = set(inputs), [], {}

    def visit(t: Tensor) -> None:
        if t in stop or t.body is None or state.get(t):
            return
        state[t] = True
        for s in reads(t):
            visit(s)
        order.append(t)

    for t in outputs:
        visit(t)
    return tuple(order)
