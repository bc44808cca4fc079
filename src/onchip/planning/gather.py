"""Values that are moved, not computed, by torch indexing where they lie: a weight in the order that
a kernel reads it. (The interpreter takes ten times as long, and a copy from the GPU.)"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from onchip.ir.expr import Axis, Call, Const, Expr, Load, Tensor
from onchip.ir.index import bounds

# What indices and conditions are made of; torch's functions mean the same for integers.
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "floordiv": torch.floor_divide,
    "mod": torch.remainder, "minimum": torch.minimum, "maximum": torch.maximum,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_not": torch.logical_not, "where": torch.where,
}  # fmt: skip
_FLOATS = ("cast_float16", "cast_bfloat16", "cast_float32", "cast_float64")


def is_gather(t: Tensor) -> bool:
    """Whether each element is an element of another tensor, or a constant that every type of
    floating point has, at a place that depends on the element's own alone."""
    return t.body is not None and t.dtype.is_float and _moves(t.body)


def _moves(e: Expr) -> bool:
    match e:
        case Load(src=src, index=index, pad=pad):
            if not src.dtype.is_float or not src.numel or not all(map(_is_place, index)):
                return False
            if pad is None:
                return all(_inside(i, n) for i, n in zip(index, src.shape, strict=True))
            return _everywhere(pad)
        case Const(value=v, dtype=d):
            return d.is_float and _everywhere(v)
        case Call(fn="where", args=(c, a, b)):
            return _is_place(c) and _moves(a) and _moves(b)
        case Call(fn=fn, args=(a,)):
            return fn in _FLOATS and a.dtype.is_float and _moves(a)
    return False


def _everywhere(value: float) -> bool:
    return value in (0, 1) or not math.isfinite(value)


def _is_place(e: Expr) -> bool:
    match e:
        case Axis():
            return True
        case Const(dtype=d):
            return not d.is_float
        case Call(fn="floordiv" | "mod", args=(a, Const(value=c))):
            return c != 0 and _is_place(a)
        case Call(fn=fn, args=args):
            return fn in _FUNCTIONS and fn not in ("floordiv", "mod") and all(map(_is_place, args))
    return False


def _inside(i: Expr, n: int) -> bool:
    low, high = bounds(i)
    return low >= 0 and high < n


def gathered(
    t: Tensor, values: Mapping[Tensor, torch.Tensor], device: torch.device | str
) -> torch.Tensor:
    """The elements of `t` (for which `is_gather` holds), on `device`, in a type that holds them
    exactly; values: of the tensors that it reads."""
    assert t.body is not None
    made = _Gather(t, values, torch.device(device)).value(t.body)
    return made.expand(t.shape)


@dataclass(eq=False, slots=True)
class _Gather:
    """Evaluates expressions to tensors with a dimension for each axis of `t`, of one element where
    they don't mention it; constants have none (so that they widen no tensor that they meet)."""

    t: Tensor
    values: Mapping[Tensor, torch.Tensor]
    device: torch.device
    known: dict[Expr, torch.Tensor] = field(default_factory=dict)

    def value(self, e: Expr) -> torch.Tensor:
        if e not in self.known:
            self.known[e] = self._compute(e)
        return self.known[e]

    def _compute(self, e: Expr) -> torch.Tensor:
        match e:
            case Axis():
                shape = [e.extent if a is e else 1 for a in self.t.axes]
                return torch.arange(e.extent, device=self.device).view(shape)
            case Const(value=v, dtype=d):
                return torch.tensor(v, dtype=getattr(torch, d.label), device=self.device)
            case Call(fn=fn, args=(a,)) if fn in _FLOATS:
                return self.value(a)
            case Call(fn=fn, args=args):
                return _FUNCTIONS[fn](*map(self.value, args))
            case Load():
                return self._load(e)
        raise TypeError(f"{type(e).__name__} is no part of a gather")

    def _load(self, e: Load) -> torch.Tensor:
        source = self.values[e.src].detach().to(self.device)
        index, inside = [], None
        for i, n in zip(e.index, e.src.shape, strict=True):
            place = self.value(i)
            if e.pad is not None and not _inside(i, n):
                here = (place >= 0) & (place < n)
                inside = here if inside is None else inside & here
                place = place.clamp(0, n - 1)
            index.append(place)
        found = source[tuple(index)]
        if inside is None:
            return found
        pad = torch.tensor(e.pad, dtype=found.dtype, device=self.device)
        return torch.where(inside, found, pad)
