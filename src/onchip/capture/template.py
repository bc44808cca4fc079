"""One export for many shapes: the second shape of a structure is traced with symbolic sizes in
the axes that changed, and later shapes are filled in without tracing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from onchip.capture.containers import Spec
from onchip.capture.export import Exported, export
from onchip.errors import CaptureError

Bindings = dict[sympy.Symbol, sympy.Integer]  # the size that each symbol stands for


def evaluate(x: Any, bindings: Bindings) -> Any:
    """A size as a number. Raises CaptureError if it depends on tensor data."""
    if not isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return x
    value: Any = sympy.sympify(x.node.expr).xreplace(bindings)
    if isinstance(x, torch.SymBool) and value in (sympy.true, sympy.false):
        return bool(value)
    if not value.is_number:
        raise CaptureError(
            "a shape depends on tensor data, which a compiled program can't know in advance; "
            "compute it outside the model, or use masks of a fixed size"
        )
    return float(value) if isinstance(x, torch.SymFloat) else int(value)


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """An export with symbolic sizes."""

    exported: Exported

    def bind(self, tensors: list[torch.Tensor]) -> Bindings | None:
        """The symbols' values for these inputs; None if a condition found in tracing fails."""
        fakes = self.exported.fake_inputs()
        bindings: Bindings = {}
        for fake, t in zip(fakes, tensors, strict=True):
            for symbol, size in zip(fake.shape, t.shape, strict=True):
                if isinstance(symbol, torch.SymInt) and isinstance(symbol.node.expr, sympy.Symbol):
                    bindings.setdefault(symbol.node.expr, sympy.Integer(size))
        try:
            same = all(_fits(f, t, bindings) for f, t in zip(fakes, tensors, strict=True))
        except CaptureError:
            return None
        environment = _shape_environment(fakes)
        if not same or environment is None:
            return None
        guards = [g.expr.xreplace(bindings) for g in environment.guards]
        ranges = [
            environment.var_to_range[s].lower <= v <= environment.var_to_range[s].upper
            for s, v in bindings.items()
        ]
        return bindings if all(g == sympy.true for g in guards) and all(ranges) else None


def _fits(fake: torch.Tensor, t: torch.Tensor, bindings: Bindings) -> bool:
    shape = tuple(evaluate(s, bindings) for s in fake.shape)
    strides = tuple(evaluate(s, bindings) for s in fake.stride())
    return shape == tuple(t.shape) and strides == tuple(t.stride())


def _shape_environment(fakes: list[torch.Tensor]) -> Any:
    sizes = [s for f in fakes for s in f.shape if isinstance(s, torch.SymInt)]
    return sizes[0].node.shape_env if sizes else None


@dataclass(eq=False)
class Templates:
    """Exports of one module in one state. Not thread-safe (the caller holds a lock)."""

    known: dict[Any, Template] = field(default_factory=dict)
    seen: dict[Any, list[tuple[int, ...]]] = field(default_factory=dict)
    attempts: dict[Any, int] = field(default_factory=dict)

    ATTEMPTS = 3  # symbolic traces tried for one structure

    def export(
        self,
        module: torch.nn.Module,
        spec: Spec,
        leaves: list[Any],
        tensors: list[torch.Tensor],
    ) -> tuple[Exported, Bindings]:
        """The program for these inputs, from a template where one fits. Raises CaptureError."""
        key = _structure(spec, leaves, tensors)
        shapes = [tuple(t.shape) for t in tensors]
        template = self.known.get(key)
        bindings = template.bind(tensors) if template is not None else None
        if template is not None and bindings is not None:
            return template.exported, bindings
        before = self.seen.setdefault(key, [*shapes])
        found = self._symbolic(key, before, module, spec, leaves, tensors)
        return found if found is not None else (export(module, spec, leaves, tensors), {})

    def _symbolic(
        self, key: Any, before: list[tuple[int, ...]], module: torch.nn.Module, spec: Spec,
        leaves: list[Any], tensors: list[torch.Tensor],
    ) -> tuple[Exported, Bindings] | None:  # fmt: skip
        shapes = [tuple(t.shape) for t in tensors]
        if shapes == before or self.attempts.get(key, 0) >= self.ATTEMPTS:
            return None
        varying = [
            {i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b}
            for old, new in zip(before, shapes, strict=True)
        ]
        if any(new[i] < 2 for axes, new in zip(varying, shapes, strict=True) for i in axes):
            return None  # tracing takes sizes 0 and 1 for constants
        self.attempts[key] = self.attempts.get(key, 0) + 1
        try:
            template = Template(export(module, spec, leaves, tensors, varying))
        except CaptureError:
            return None  # a model that needs its sizes as numbers
        bindings = template.bind(tensors)
        if bindings is None:
            return None
        self.known[key] = template
        return template.exported, bindings

    def forget(self, leaves: list[Any], spec: Spec, tensors: list[torch.Tensor]) -> None:
        """Drop a template that turned out wrong for these inputs."""
        key = _structure(spec, leaves, tensors)
        self.known.pop(key, None)
        self.attempts[key] = self.ATTEMPTS


def _structure(spec: Spec, leaves: list[Any], tensors: list[torch.Tensor]) -> Any:
    place = {id(t): i for i, t in enumerate(tensors)}
    parts = [
        ("tensor", place[id(x)]) if isinstance(x, torch.Tensor) else (type(x).__name__, repr(x))
        for x in leaves
    ]
    kinds = [(t.dim(), t.dtype, t.device, t.requires_grad) for t in tensors]
    return (spec, tuple(parts), tuple(kinds))
