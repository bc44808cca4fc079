"""Running a region with the library: each operator as its ATen call, or with oneDNN's calls in
place of those that it can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from onchip.backends.library import aten, onednn
from onchip.capture.schema import overload
from onchip.fusion.region import Region
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node
from onchip.planning.plan import CallStep, Derived, LibraryStep
from onchip.planning.values import Values, in_layout

Step = LibraryStep | CallStep
Local = dict[Tensor, torch.Tensor]

# Pointwise operators that need no memory of their own behind a call whose result nobody else reads.
IN_PLACE = {
    "aten.relu.default": "aten.relu_.default",
    "aten.hardtanh.default": "aten.hardtanh_.default",
    "aten.relu6.default": "aten.relu6_.default",
    "aten.clamp.default": "aten.clamp_.default",
    "aten.clamp_min.default": "aten.clamp_min_.default",
}


def aten_steps(nodes: Sequence[Node]) -> tuple[Step, ...]:
    return tuple(LibraryStep(n) for n in nodes)


def onednn_steps(region: Region, weights: frozenset[Tensor]) -> tuple[Step, ...]:
    """The region with oneDNN's convolutions and linear layers, the other operators as ATen calls;
    empty if there is nothing for oneDNN. `weights`: constants that exist at load."""
    calls = onednn.fused_calls(region, weights)
    if not calls:
        return ()
    last = {c.nodes[-1]: c for c in calls}
    inside = {n for c in calls for n in c.nodes}
    fresh = {c.output for c in calls}
    steps: list[Step] = []
    for n in region.nodes:
        if n in last:
            c = last[n]
            args = tuple(_derived(a) if isinstance(a, onednn.Packed) else a for a in c.call.args)
            steps.append(CallStep(replace(c.call, args=args), c.output, c.nodes))
        elif n not in inside:
            steps.append(LibraryStep(_in_place(n, fresh, region)))
    return tuple(steps)


def _derived(p: onednn.Packed) -> Derived:
    return Derived(f"{p.weight.name} for oneDNN", (p.weight,), lambda v: p.compute(v[0]))


def _in_place(n: Node, fresh: set[Tensor], region: Region) -> Node:
    """The operator writing over its argument, if that is fresh and nobody else reads it."""
    target = IN_PLACE.get(n.call.target)
    first = n.call.args[0] if n.call.args else None
    if target is None or first not in fresh or first in region.outputs:
        return n
    alone = [x for x in region.nodes if first in x.inputs] == [n]
    same = n.results[0].dtype is first.dtype and n.results[0].shape == first.shape
    return replace(n, call=replace(n.call, target=target)) if alone and same else n


def run_of(steps: Sequence[Step], values: Values) -> Callable[[], Local]:
    """A closure that runs the steps once on the program's tensors and returns every result.
    Derived values are computed now."""
    calls = {s: _ready(s, values) for s in steps if isinstance(s, CallStep)}
    strides = {s.output: values[s.output].stride() for s in calls}
    inputs = dict.fromkeys(t for s in steps for t in s.inputs if t in values.tensors)
    for s in steps:  # what a step computes is not read from before
        for t in s.outputs:
            inputs.pop(t, None)
    start = {t: values[t] for t in inputs}

    def run() -> Local:
        local = dict(start)
        with torch.no_grad():
            for s in steps:
                match s:
                    case LibraryStep(node=node):
                        aten.run(node, local)
                    case CallStep():
                        op, args = calls[s]
                        got = op(*_filled(args, local))
                        local[s.output] = in_layout(got, strides[s.output])
        return local

    return run


def _ready(step: CallStep, values: Values) -> tuple[Any, tuple[Any, ...]]:
    """The operator and its arguments with every derived value computed."""
    args = tuple(
        a.compute([values[t] for t in a.sources]) if isinstance(a, Derived) else a
        for a in step.call.args
    )
    return overload(step.call.target), args


def _filled(args: tuple[Any, ...], values: Local) -> tuple[Any, ...]:
    return tuple(values[a] if isinstance(a, Tensor) else a for a in args)


def planted(region: Region, constants: frozenset[Tensor], values: Values) -> Values:
    """The same values with NaN and both infinities at places of each input that is computed."""
    tensors = dict(values.tensors)
    for t in region.inputs:
        x = tensors.get(t)
        if t in constants or x is None or not x.is_floating_point() or x.numel() < 3:
            continue
        y = x.clone()  # dense: an expanded input has no elements of its own
        marks = (float("nan"), float("inf"), -float("inf"))
        for i, mark in enumerate(marks):
            place = torch.tensor(i * (y.numel() - 1) // 2)
            y[torch.unravel_index(place, y.shape)] = mark
        tensors[t] = y
    return Values(tensors)
