"""Constant weights in the order in which the main loop takes them: a tile is one block."""

from __future__ import annotations

from math import ceil

from onchip.backends.cuda.problem import Problem
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Tensor, substitute, tensor, where
from onchip.ir.index import simplify


def packed_weights(p: Problem, chunk: int) -> Tensor:
    """[batch, taps of the last line, ..., of the first, chunks, features, channels of a chunk]:
    the weights of a problem whose w is constant. Channels beyond the last one are zero."""
    e, own = p.w_element, p.channel_axis
    assert e is not None, "constant weights say where they lie"
    assert own is not None
    channels = Const(p.channels, DType.I64)
    whole = p.channels % chunk == 0
    taps = [line.taps for line in reversed(p.lines)]

    def element(*axes: Expr) -> Expr:
        b, *t, c, f, k = axes
        channel = c * chunk + k
        at: dict[Axis, Expr] = {p.batch_axis: b, p.feature_axis: f, own: channel}
        at |= dict(zip(p.tap_axes, reversed(t), strict=True))
        index = tuple(simplify(substitute(i, at)) for i in e.index)
        if whole:
            return Load(e.src, index, e.pad)
        return where(Call("lt", (channel, channels), DType.BOOL), Load(e.src, index, 0), 0.0)

    shape = (p.batch, *taps, ceil(p.channels / chunk), p.features, chunk)
    return tensor(shape, p.w.dtype, element, f"{e.src.name.rsplit('_', 1)[0]}_packed")
