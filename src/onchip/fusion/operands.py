"""A convolution's input brought into a form that its product can read fast.

A product reads its left operand along K = (taps, channels). Where the input's channels are not
innermost (the user's NCHW), or are so few that runs are short (an RGB image), a tile of it is
first copied to scratch: channels last, padding included. Taps and channels then lie in one run.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from onchip.fusion.contraction import Contraction, find_contraction
from onchip.fusion.layout import channels_last
from onchip.fusion.staging import Staged
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Const, Expr, Load, Tensor, lift, loads, mentioned, rewrite, tensor
from onchip.ir.index import UNKNOWN, bounds, is_affine, linear, simplify

Strides = tuple[int, ...]

SHORT_RUN = 16  # floats: shorter runs of K than this are worth a copy


def stage_operands(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides]
) -> tuple[Staged, ...]:
    """Insert a scratch copy before every product whose input has short runs along K."""
    made = {s.tensor for s in staged}
    out: list[Staged] = []
    for s in staged:
        product = find_contraction(s.body, s.loops)
        load = _windowed_load(product, made, strides) if product is not None else None
        if load is None:
            out.append(s)
            continue
        copy, index = _padded_copy(load)
        new = Load(copy, index)
        body = rewrite(s.body, lambda e, load=load, new=new: new if e is load else None)
        layout = channels_last(copy.shape)
        assert copy.body is not None
        out.append(Staged(copy, copy.body, False, copy.axes, copy.axes, layout))
        out.append(replace(s, body=body))
    return tuple(out)


def _windowed_load(
    c: Contraction, made: set[Tensor], strides: dict[Tensor, Strides]
) -> Load | None:
    """The input load of a convolution-like product, if copying it pays."""
    for side in (c.left, c.right):
        if not isinstance(side, Load) or side.src in made or side.src.rank < 3:
            continue
        if side.src not in strides or side.src.dtype is not DType.F32:
            continue
        taps = [a for a in c.k_axes if _is_window(side, a)]
        if not taps or prod(a.extent for a in taps) == 1:
            continue
        others = [a for a in c.k_axes if a not in taps]
        run = prod(a.extent for a in others if _stride(side, strides[side.src], a) == 1)
        inside = all(bounds(i)[0] > UNKNOWN[0] and bounds(i)[1] < UNKNOWN[1] for i in side.index)
        if run < SHORT_RUN and inside and all(is_affine(i) for i in side.index):
            return side
    return None


def _is_window(load: Load, a: Axis) -> bool:
    """A K axis that slides: it shares an index with a row axis."""
    return any(a in mentioned(i) and len(mentioned(i)) > 1 for i in load.index)


def _stride(load: Load, strides: Strides, a: Axis) -> int:
    return sum(linear(i).coefficient(a) * s for i, s in zip(load.index, strides, strict=True))


def _padded_copy(load: Load) -> tuple[Tensor, tuple[Expr, ...]]:
    """The part of the source that is read, padding included, as a tensor of its own; and the
    index into it that replaces the load's."""
    spans = [bounds(i) for i in load.index]
    shape = tuple(hi - lo + 1 for lo, hi in spans)

    def element(*i: Expr) -> Expr:
        at = tuple(x + lo for x, (lo, _) in zip(i, spans, strict=True))
        return Load(load.src, at, load.pad)

    copy = tensor(shape, load.src.dtype, element, f"{load.src.name.rsplit('_', 1)[0]}_tile")
    index = tuple(
        simplify(lift(i) - Const(lo, DType.I64))
        for i, (lo, _) in zip(load.index, spans, strict=True)
    )
    return copy, index


__all__ = ["loads", "stage_operands"]
