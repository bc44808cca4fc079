"""Is the program right? Compared with eager, and both with a float64 run of the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onchip.capture.containers import flatten, rebuild
from onchip.capture.observe import clone_storage
from onchip.errors import VerificationError


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor. `error` and `eager_error` are ||o - r|| / ||r|| against the float64 run (NaN
    where there is none: integers, or a model that can't run in float64); `difference` is the
    program's distance from eager in the same norm."""

    what: str
    difference: float
    error: float
    eager_error: float


@dataclass(frozen=True, slots=True)
class Verification:
    """All tensors that a call gives or changes."""

    comparisons: tuple[Comparison, ...]
    reference: str  # "float64", or why there is none

    @property
    def error(self) -> float:
        return _worst([c.error for c in self.comparisons])

    @property
    def eager_error(self) -> float:
        return _worst([c.eager_error for c in self.comparisons])

    @property
    def difference(self) -> float:
        return _worst([c.difference for c in self.comparisons])


def _worst(values: list[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return max(known, default=math.nan)


# Elements that are compared at once: in float64, several times over, they fit any GPU.
_AT_ONCE = 1 << 26


def relative_error(o: torch.Tensor, r: torch.Tensor) -> float:
    """||o - r|| / ||r|| in float64. Equal non-finite elements count as equal, others as
    infinite; against a reference of zeros the norm of `o` itself."""
    o, r = o.detach().reshape(-1), r.detach().reshape(-1)
    parts = [
        _distance(o[i : i + _AT_ONCE], r[i : i + _AT_ONCE]) for i in range(0, len(o), _AT_ONCE)
    ]
    distance, norm = (math.hypot(*x) for x in zip(*parts, strict=True)) if parts else (0.0, 0.0)
    return distance / norm if norm else distance


def _distance(o: torch.Tensor, r: torch.Tensor) -> tuple[float, float]:
    """||o - r|| and ||r||."""
    if o.dtype.is_complex or r.dtype.is_complex:
        o, r = (torch.view_as_real(x.resolve_conj().to(torch.complex128)) for x in (o, r))
    o, r = o.double(), r.double()
    odd = ~(torch.isfinite(o) & torch.isfinite(r))
    same = (o == r) | (torch.isnan(o) & torch.isnan(r))
    if bool((odd & ~same).any()):
        return math.inf, 1.0
    o, r = o.masked_fill(odd, 0), r.masked_fill(odd, 0)
    return float((o - r).norm()), float(r.norm())


def verify(
    program: Callable[..., Any],
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Verification:
    """Run the program and eager on copies of the inputs, and compare results, mutated inputs and
    buffers. Buffers of `module` are restored. Raises VerificationError if they differ in
    structure, shape or dtype; the size of the errors is for the caller to judge.
    """
    call = (tuple(args), dict(kwargs or {}))
    own = _run(program, module, call)
    eager = _run(module, module, call)
    if own.keys() != eager.keys():
        raise VerificationError(
            f"the program gives {sorted(own)}, eager gives {sorted(eager)}: report this"
        )
    reference, why = _reference(module, call)
    return Verification(tuple(_compare(k, own[k], eager[k], reference.get(k)) for k in eager), why)


def _compare(what: str, own: Any, eager: Any, reference: Any) -> Comparison:
    if not isinstance(eager, torch.Tensor):
        if type(own) is not type(eager) or own != eager:
            raise VerificationError(f"{what} is {own!r}, in eager mode {eager!r}")
        return Comparison(what, 0.0, math.nan, math.nan)
    if own.shape != eager.shape or own.dtype != eager.dtype:
        raise VerificationError(
            f"{what} is {own.dtype}{list(own.shape)}, in eager mode "
            f"{eager.dtype}{list(eager.shape)}"
        )
    if reference is None or not isinstance(reference, torch.Tensor):
        return Comparison(what, relative_error(own, eager), math.nan, math.nan)
    return Comparison(
        what, relative_error(own, eager), relative_error(own, reference),
        relative_error(eager, reference),
    )  # fmt: skip


def _run(
    call: Callable[..., Any], module: torch.nn.Module, inputs: tuple[Any, Any]
) -> dict[str, Any]:
    """Everything one call gives or changes, by name. Inputs are copied, buffers put back."""
    args, kwargs, copies = _copies(inputs, lambda t: t)
    saved = {n: b.detach().clone() for n, b in module.named_buffers()}
    devices = sorted({t.device.index or 0 for t in copies if t.device.type == "cuda"})
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        out, _ = flatten(call(*args, **kwargs))
        seen = {f"output {i}": x for i, x in enumerate(out)}
        seen |= {f"input {i}": t for i, t in enumerate(copies)}
        seen |= {f"buffer {n}": b.detach().clone() for n, b in module.named_buffers()}
        for n, b in module.named_buffers():
            if not torch.equal(b, saved[n]):  # an unchanged buffer keeps its version
                b.copy_(saved[n])
    return seen


def _copies(
    inputs: tuple[Any, Any], convert: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Any, Any, list[torch.Tensor]]:
    leaves, spec = flatten(inputs)
    memo: dict[int, torch.Tensor] = {}
    new = []
    for x in leaves:
        if isinstance(x, torch.Tensor):
            x = memo.setdefault(id(x), convert(clone_storage(x.detach())))
        new.append(x)
    args, kwargs = rebuild(spec, new)
    return args, kwargs, list(memo.values())


def _reference(module: torch.nn.Module, inputs: tuple[Any, Any]) -> tuple[dict[str, Any], str]:
    """The same call in float64; or nothing, and why."""
    try:
        double = copy.deepcopy(module).double()
        args, kwargs, _ = _copies(inputs, lambda t: t.double() if t.is_floating_point() else t)
        return _run(double, double, (args, kwargs)), "float64"
    except Exception as error:
        return {}, f"the model does not run in float64 ({type(error).__name__}: {error})"[:200]
