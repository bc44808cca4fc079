"""Constant weights in the order in which the main loop takes them: a tile is one block."""

from __future__ import annotations

from math import ceil, prod

from onchip.backends.cuda.problem import Problem
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Tensor, axis, substitute, where
from onchip.ir.index import simplify


def packed_weights(p: Problem, chunk: int) -> Tensor:
    """[batch, taps of the last line, ..., of the first, chunks, features, channels of a chunk]:
    the weights of a problem whose w is constant. Channels beyond the last one are zero."""
    e = p.w_element
    assert e is not None, "constant weights say where they lie"
    assert p.channel_axis is not None
    taps = [axis(line.taps, "t") for line in p.lines]
    b, c = axis(p.batch, "b"), axis(ceil(p.channels / chunk), "c")
    f, k = axis(p.features, "f"), axis(chunk, "k")
    channel = c * chunk + k
    at: dict[Axis, Expr] = {p.batch_axis: b, p.feature_axis: f, p.channel_axis: channel}
    at |= dict(zip(p.tap_axes, taps, strict=True))
    index = tuple(simplify(substitute(i, at)) for i in e.index)
    whole = p.channels % chunk == 0
    element: Expr = Load(e.src, index, e.pad if whole else 0)
    if not whole:
        element = where(
            Call("lt", (channel, Const(p.channels, DType.I64)), DType.BOOL), element, 0.0
        )
    axes = (b, *reversed(taps), c, f, k)
    name = f"{e.src.name.rsplit('_', 1)[0]}_packed_{prod(a.extent for a in axes)}"
    return Tensor(name, tuple(a.extent for a in axes), p.w.dtype, axes, element)
