"""A non-decreasing operator behind a maximum: max(f(x)) = f(max(x)), once a pooled element.

f is one of the operators below, or adds a constant, or multiplies by a positive number. It gives
NaN for NaN alone, and a maximum gives NaN where there is one. Padding counts as minus infinity, of
which f may make something that wins (relu(-inf) = 0), so each window must hold an element of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from onchip.algebra.layers import affine
from onchip.algebra.rewriting import Facts, Rewrite, again, made, pays, rewrite
from onchip.capture.captured import Captured, LedgerEntry
from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node
from onchip.ops.geometry import per_dimension
from onchip.ops.promotion import normalize_dims
from onchip.ops.windows import Window

Argument = Callable[[int, str, Any], Any]


def _always(_: Argument) -> bool:
    return True


def _slope(argument: Argument) -> bool:
    """(A slope of 0 makes NaN of minus infinity.)"""
    return 0 < argument(1, "negative_slope", 0.01) < math.inf


def _ordered(argument: Argument) -> bool:
    """Numbers for bounds, in order: min(max(x, low), high) is non-decreasing in any case, but
    ATen calls low > high an error of the caller's."""
    bounds = (argument(1, "min", None), argument(2, "max", None))
    return all(b is None or (isinstance(b, (int, float)) and not math.isnan(b)) for b in bounds)


def _elu(argument: Argument) -> bool:
    factors = ((1, "alpha"), (2, "scale"), (3, "input_scale"))
    return all(0 < argument(i, name, 1) < math.inf for i, name in factors)


def _softplus(argument: Argument) -> bool:
    """Above its threshold softplus(x) is x, which is less than it is just below by
    log(1 + exp(-threshold)): nothing for float32 at 20, a step down at 3 and for float64."""
    exact = argument(0, "self", None).dtype is DType.F64
    return not exact and argument(1, "beta", 1) > 0 and argument(2, "threshold", 20) >= 20


# Non-decreasing as ATen rounds it: comparisons, and sums and products with constants.
STEPS = {
    "relu": _always, "relu6": _always, "hardtanh": _always, "hardsigmoid": _always,
    "leaky_relu": _slope, "clamp": _ordered, "clamp_min": _ordered, "clamp_max": _ordered,
}  # fmt: skip
# Non-decreasing but for the last bit, in which a function may fall where it should stand still.
CURVES = {
    "sigmoid": _always, "tanh": _always, "exp": _always, "elu": _elu, "selu": _always,
    "celu": lambda argument: argument(1, "alpha", 1) > 0, "softplus": _softplus,
}  # fmt: skip


def max_before_steps(captured: Captured, _: frozenset[str]) -> Captured:
    return rewrite(captured, lambda facts, n: _match(facts, n, STEPS, "max_before_steps"))


def max_before_curves(captured: Captured, _: frozenset[str]) -> Captured:
    return rewrite(captured, lambda facts, n: _match(facts, n, CURVES, "max_before_curves"))


def _match(facts: Facts, n: Node, allowed: dict[str, Any], rule: str) -> Rewrite | None:
    dims = _reduced(n)
    f = facts.source(n.call.args[0], n) if dims else None
    if f is None or dims is None or not _commutes(f, facts, dims, allowed, n):
        return None
    source, result = f.call.args[0], n.results[0]
    if not isinstance(source, Tensor) or source in facts.fixed:
        source = f.call.args[1]
    try:
        first = again(n, source, *n.call.args[1:])
        moved = [first.results[0] if a is source else a for a in f.call.args]
        then = made(f, f.name, f.call.target, *moved, **f.call.kwargs)
    except OpaqueOperator:
        return None
    same = then.results[0].shape == result.shape and then.results[0].dtype is result.dtype
    if not same or not pays((f, n), (first, then)):
        return None
    text = f"{f.name} does not decrease, so {n.name} takes the maximum before it"
    entry = LedgerEntry(rule, text, (n.name,))
    return Rewrite((f, n), (first, then), result, then.results[0], (entry,))


def _commutes(
    f: Node, facts: Facts, dims: frozenset[int], allowed: dict[str, Any], n: Node
) -> bool:
    given, result = f.call.args[0], f.results[0]

    def argument(i: int, name: str, otherwise: Any) -> Any:
        return f.call.args[i] if len(f.call.args) > i else f.call.kwargs.get(name, otherwise)

    if f.op in allowed and f.call.target.endswith(".default"):
        same = given.shape == result.shape and given.dtype is result.dtype
        return same and given.dtype.is_float and bool(allowed[f.op](argument))
    e = affine(f, facts) if allowed is STEPS else None
    if e is None or e.varies & dims:
        return False
    if isinstance(e.c, Tensor) and e.c.rank and n.results[0].rank != e.x.rank:
        return False  # the constant's axes would meet other ones
    return not e.scales or (not isinstance(e.c, Tensor) and e.c > 0)


def _reduced(n: Node) -> frozenset[int] | None:
    """The axes over which `n` takes the maximum and nothing else; None if it does not, somebody
    reads the positions too, or a window may hold nothing but padding."""
    if n.opaque or len(n.results) != 1 or n.outputs[0] is None or n.call.kwargs:
        return None
    x, args = n.call.args[0], n.call.args
    if not isinstance(x, Tensor) or not x.dtype.is_float:
        return None
    match n.call.target.split(".")[1:]:
        case ["amax", _]:
            return frozenset(normalize_dims(args[1] if len(args) > 1 else None, x.rank))
        case ["max", "dim"]:
            return frozenset(normalize_dims(args[1], x.rank))
        case ["max", "default"]:
            return frozenset(range(x.rank))
        case [name, "default"] if name.startswith("adaptive_max_pool"):
            return frozenset(range(x.rank - int(name[-2]), x.rank))
        case [name, "default"] if name.startswith("max_pool"):
            spatial = int(name[8])
            filled = _windows_filled(spatial, *args)
            return frozenset(range(x.rank - spatial, x.rank)) if filled else None
    return None


def _windows_filled(
    spatial: int, x: Tensor, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> bool:  # fmt: skip
    """Whether each window of a max pool holds an element of x. (Without dilation it always does:
    the padding is at most half a window, and none starts behind the last element.)"""
    w = Window(x, spatial, kernel, stride, padding, dilation, ceil_mode)
    pads = per_dimension(padding, spatial)
    return all(
        any(0 <= y * s - p + t * d < size for t in range(k))
        for size, out, k, s, p, d in zip(
            w.space, w.out, w.kernel, w.stride, pads, w.dilation, strict=True
        )
        for y in range(out)
    )
