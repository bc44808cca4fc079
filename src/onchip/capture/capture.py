"""A model and example inputs become a Captured program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import onchip.ops  # noqa: F401  (fills the registry)
from onchip.capture.build import build
from onchip.capture.captured import TENSOR, Captured, Leaf
from onchip.capture.cleanup import clean_up, prepare_constants
from onchip.capture.containers import flatten, is_constant
from onchip.capture.export import FunctionModule
from onchip.capture.observe import observe
from onchip.capture.template import Templates
from onchip.errors import CaptureError, InternalError


def as_module(model: torch.nn.Module | Callable[..., Any]) -> torch.nn.Module:
    return model if isinstance(model, torch.nn.Module) else FunctionModule(model)


def capture(
    model: torch.nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    templates: Templates | None = None,
    merge: bool = True,
) -> Captured:
    """Trace `model` on these inputs into a functional graph.

    The model is run once in eager mode too, on copies of everything that it mutates, to learn
    the strides and the aliasing of its results. `templates` remembers exports of this model in
    this state, so that further shapes need no tracing. With `merge`, operators that are written
    twice are computed once. Neither the model nor the inputs are changed.
    Raises CaptureError in one line if the model can't be traced.
    """
    module = as_module(model)
    leaves, spec = flatten((tuple(args), dict(kwargs or {})))
    tensors, described = describe(leaves)
    exported, bindings = (templates or Templates()).export(module, spec, leaves, tensors)
    graph, slots = build(exported.program, module, bindings)
    graph, ledger = clean_up(graph, merge)
    slots = {t: s for t, s in slots.items() if t in graph.constants}
    results, changed, _ = observe(module, graph, slots, spec, leaves, tensors)
    if [r.shape for r in results] != [t.shape for t in graph.outputs]:
        if templates is None or not bindings:
            raise InternalError(
                "the captured graph gives other shapes than eager mode; report this"
            )
        templates.forget(leaves, spec, tensors)
        return capture(module, args, kwargs, templates, merge)
    for t, r in zip(graph.outputs, results, strict=True):
        if r.alias is None:
            t.tag["strides"] = r.strides  # tracing gives convolutions on a GPU those of NCHW
    constants = tuple(TENSOR if is_tensor else x for x, is_tensor in exported.leaves)
    captured = Captured(
        module=module,
        graph=graph,
        input_spec=spec,
        leaves=described,
        output_spec=exported.output_spec,
        output_constants=constants,
        slots=slots,
        results=results,
        python_state=changed,
        ledger=ledger,
    )
    return prepare_constants(captured)


def describe(leaves: list[Any]) -> tuple[list[torch.Tensor], tuple[Leaf, ...]]:
    """The distinct tensors among flat inputs, and what each leaf is.

    Raises CaptureError for a leaf that is neither a strided tensor nor a plain Python constant.
    """
    tensors: list[torch.Tensor] = []
    position: dict[int, int] = {}
    described = []
    for x in leaves:
        if isinstance(x, torch.Tensor):
            if x.layout is not torch.strided or not _plain(x):
                raise CaptureError(
                    f"an input is a {type(x).__name__} of layout {x.layout}; only plain strided "
                    "tensors can be compiled, so convert it first"
                )
            if id(x) not in position:
                position[id(x)] = len(tensors)
                tensors.append(x)
            described.append(Leaf(position[id(x)]))
        elif is_constant(x):
            described.append(Leaf(None, x))
        else:
            raise CaptureError(
                f"an input is an object of type {type(x).__name__}; pass tensors, numbers, or "
                "containers of them (tuple, list, dict, named tuple, dataclass)"
            )
    return tensors, tuple(described)


def _plain(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
