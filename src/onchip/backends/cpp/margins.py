"""Scratch tensors that are read out of bounds get a margin of padding around them.

The windows of a fused kernel (a depthwise convolution, a pool) then read without conditions: the
margin is written once a tile, and a condition would be evaluated once a tap.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

from onchip.backends.cpp import spelling
from onchip.backends.cpp.reduce import SIMD, loop_head
from onchip.backends.cpp.writer import Buffer, Writer
from onchip.fusion.nest import Nest, Span, Stage
from onchip.ir.dtype import DType
from onchip.ir.expr import Const, Expr, Load, Number, Tensor, loads
from onchip.ir.index import UNKNOWN, bounds


@dataclass(frozen=True, eq=False, slots=True)
class Margin:
    """The value around a scratch tensor, and its box with the margin included."""

    pad: Number
    box: tuple[Span, ...]


def margins_of(nest: Nest) -> dict[Tensor, Margin]:
    """The scratch tensors of a nest that are read out of bounds, always with the same padding."""
    out: dict[Tensor, Margin] = {}
    for n, st in enumerate(nest.stages):
        if st.placement != "scratch":
            continue
        read = [x for r in nest.stages[n + 1 :] for x in loads(r.staged.body) if x.src is st.tensor]
        margin = _margin(st, read)
        if margin is not None:
            out[st.tensor] = margin
    return out


def _margin(st: Stage, read: list[Load]) -> Margin | None:
    pads = {x.pad for x in read if x.pad is not None}
    if len(pads) != 1 or any(isinstance(p, float) and isnan(p) for p in pads):
        return None
    box: list[Span] = []
    outside = False
    for d, (span, n) in enumerate(zip(st.box, st.tensor.shape, strict=True)):
        ranges = [bounds(x.index[d]) for x in read]
        lo, hi = min(r[0] for r in ranges), max(r[1] for r in ranges)
        if lo <= UNKNOWN[0] or hi >= UNKNOWN[1]:
            return None  # data-dependent: what it reads is not known before
        outside = outside or lo < 0 or hi >= n
        box.append(_extended(span, lo, hi))
    return Margin(pads.pop(), tuple(box)) if outside else None


def _extended(span: Span, lo: int, hi: int) -> Span:
    """A box that moves with the tile already covers what is read out of bounds (only the loops
    that fill it are clipped); one that is the same for all tiles was clipped."""
    if not isinstance(span.origin, Const):
        return span
    first = min(int(span.origin.value), lo)
    end = max(int(span.origin.value) + span.extent, hi + 1)
    return Span(Const(first, DType.I64), end - first)


def fill_margin(w: Writer, t: Tensor, margin: Margin, buffer: Buffer) -> None:
    """Write the padding: the slabs below and above the tensor, dimension by dimension."""
    for d, (span, n) in enumerate(zip(margin.box, t.shape, strict=True)):
        origin = _number(w, span.origin)
        end = f"{origin} + {span.extent}l"
        if not isinstance(span.origin, Const):
            _slab(w, t, margin, buffer, d, (origin, f"onchip::least(0l, {end})"))
            _slab(w, t, margin, buffer, d, (f"onchip::most({n}l, {origin})", end))
            continue
        first, last = int(span.origin.value), int(span.origin.value) + span.extent
        if first < 0:
            _slab(w, t, margin, buffer, d, (origin, "0l"))
        if last > n:
            _slab(w, t, margin, buffer, d, (f"{n}l", f"{last}l"))


def _number(w: Writer, e: Expr) -> str:
    return f"{int(e.value)}l" if isinstance(e, Const) else w.value(e)


def _slab(
    w: Writer, t: Tensor, margin: Margin, buffer: Buffer, d: int, limits: tuple[str, str]
) -> None:
    """Padding where the index along dimension `d` is in the limits, over the whole box in the
    others; dimensions nearest in memory innermost."""
    order = sorted(range(t.rank), key=lambda e: -buffer.strides[e])
    terms = []
    for e in order:
        name, span = w.fresh("p"), margin.box[e]
        origin = _number(w, span.origin)
        lo, hi = limits if e == d else (origin, f"{origin} + {span.extent}l")
        w.open((SIMD if e == order[-1] else "") + loop_head(name, lo, hi), {})
        terms.append(f"({name} - {origin}) * {buffer.strides[e]}l")
    value = spelling.store(spelling.constant(margin.pad, t.dtype), t.dtype)
    w.line(f"{buffer.pointer}[{' + '.join(terms) or '0'}] = {value};")
    for _ in order:
        w.close()
