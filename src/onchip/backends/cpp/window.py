"""Depthwise convolutions over channels-last data: include/onchip/window.h computes the sums of a
block of neighbouring positions, the rest of the stage is generated."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd, prod

from onchip.backends.cpp import spelling
from onchip.backends.cpp.reduce import SIMD, loop_head
from onchip.backends.cpp.writer import Buffer, Writer
from onchip.fusion.nest import Stage
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Reduce, reduces, substitute
from onchip.ir.index import simplify, stride_along

# AVX2 has 16 registers: a sum for each position, a weight for each tap of a row, and an input.
REGISTERS = 15
MOST_POSITIONS = 8
# Rows and taps are unrolled: more would make code that compiles slowly.
MOST_TAPS = 64
CHANNELS = 192  # of a block's sums at a time: 6 KiB, which stay in L1


@dataclass(frozen=True, eq=False, slots=True)
class Window:
    """sum over `rows` and `taps` of inputs * weights; `slide` is the loop along which it slides.

    Strides in floats: `row` between input rows, `step` the common divisor of the distances between
    positions (stride * step) and between taps (dilation * step), `tap` between weights.
    """

    reduce: Reduce
    inputs: Load
    weights: Load
    slide: Axis
    rows: int
    taps: int
    row: int
    step: int
    stride: int
    dilation: int
    tap: int


def find_window(w: Writer, stage: Stage, target: Buffer, v: Axis, slide: Axis) -> Window | None:
    """The stage as a window sliding along its loop `slide`; None if it is anything else, or if
    what it reads is not in memory (borders without a margin)."""
    s = stage.staged
    found = reduces(s.body)
    if len(found) != 1 or stride_along(s.store, target.strides, v) != 1:
        return None
    match found[0]:
        case Reduce(monoid="sum", dtype=DType.F32, body=Call(fn="mul", args=(Load(), Load()))):
            pass
        case _:
            return None
    e = found[0]
    for inputs, weights in (e.body.args, e.body.args[::-1]):  # type: ignore[attr-defined]
        if _along(w, inputs, slide) and _along(w, weights, slide) == 0:
            return _window(w, e, inputs, weights, v, slide)
    return None


def _along(w: Writer, load: Load, a: Axis) -> int | None:
    return stride_along(load.index, w.buffers[load.src].strides, a)


def _window(
    w: Writer, e: Reduce, inputs: Load, weights: Load, v: Axis, slide: Axis
) -> Window | None:
    for load in (inputs, weights):
        plain = load.src.dtype is DType.F32 and w.in_memory(load) and _along(w, load, v) == 1
        if not plain or any(_along(w, load, a) is None for a in (*e.axes, slide)):
            return None
    # the taps along `slide` are the ones nearest to each other
    *outer, taps = sorted(e.axes, key=lambda a: -(_along(w, inputs, a) or 0))
    if len(outer) > 1 or taps.extent > REGISTERS - 4 or prod(a.extent for a in e.axes) > MOST_TAPS:
        return None
    stride, dilation = _along(w, inputs, slide) or 0, _along(w, inputs, taps) or 0
    tap = _along(w, weights, taps) or 0
    rows = outer[0].extent if outer else 1
    if stride <= 0 or dilation <= 0 or tap <= 0:
        return None
    if outer and _along(w, weights, outer[0]) != taps.extent * tap:
        return None
    row = (_along(w, inputs, outer[0]) or 0) if outer else 0
    step = gcd(stride, dilation)
    return Window(
        e, inputs, weights, slide, rows, taps.extent, row, step,
        stride // step, dilation // step, tap,
    )  # fmt: skip


def emit_window(
    w: Writer,
    stage: Stage,
    target: Buffer,
    window: Window,
    v: Axis,
    limits: dict[Axis, tuple[str, str]],
) -> None:
    """The loops over the window's positions, in blocks of equal size and what is left over, and
    over the channels `v`."""
    lo, hi = limits[window.slide]
    span = dict(zip(stage.staged.loops, stage.spans, strict=True))[window.slide]
    most = min(MOST_POSITIONS, REGISTERS - window.taps)
    count = ceil(span.extent / ceil(span.extent / most))
    if lo[:-1].isdigit() and hi[:-1].isdigit():
        end, rest = int(hi[:-1]), (int(hi[:-1]) - int(lo[:-1])) % count
        _block(w, stage, target, window, v, (lo, f"{end - rest}l"), count, limits[v])
        if rest:
            _block(w, stage, target, window, v, (f"{end - rest}l", hi), rest, limits[v])
        return
    middle = w.fresh("middle")
    w.line(f"const int64_t {middle} = {hi} - ({hi} - {lo}) % {count};")
    _block(w, stage, target, window, v, (lo, middle), count, limits[v])
    if count > 1:
        _block(w, stage, target, window, v, (middle, hi), 1, limits[v])


def _block(
    w: Writer,
    stage: Stage,
    target: Buffer,
    window: Window,
    v: Axis,
    positions: tuple[str, str],
    count: int,
    channels: tuple[str, str],
) -> None:
    s, x = stage.staged, window.slide
    start, c, width, sums = w.fresh("i"), w.fresh("c"), w.fresh("width"), w.fresh("sums")
    w.open(loop_head(start, *positions, str(count)), {x: start})
    w.open(loop_head(c, *channels, f"{CHANNELS}l"), {v: c})
    w.line(f"const int64_t {width} = onchip::least({CHANNELS}l, {channels[1]} - {c});")
    w.line(f"alignas(64) float {sums}[{count * CHANNELS}];")
    template = f"{window.rows}, {window.taps}, {count}, {window.stride}, {window.dilation}"
    w.line(
        f"onchip::window_sums<{template}>({_first(w, window.inputs, window)}, {window.row}l, "
        f"{window.step}l, {_first(w, window.weights, window)}, {window.tap}l, {width}, "
        f"{sums}, {CHANNELS}l);"
    )
    q, at, j, channel = w.fresh("q"), w.fresh("i"), w.fresh("j"), w.fresh("v")
    w.open(loop_head(q, "0", str(count)), {})
    w.line(f"const int64_t {at} = {start} + {q};")
    w.levels[-1].bound[x] = at
    w.where[at] = w.depth
    w.open(SIMD + loop_head(j, "0", width), {})
    w.line(f"const int64_t {channel} = {c} + {j};")
    w.levels[-1].bound[v] = channel
    w.where[channel] = w.depth
    w.bind(window.reduce, f"{sums}[{q} * {CHANNELS}l + {j}]")
    value = spelling.store(w.value(s.body), target.dtype)
    _, _, place = w.address(s.tensor, s.store, target)
    w.line(f"{place} = {value};")
    for _ in range(4):
        w.close()


def _first(w: Writer, load: Load, window: Window) -> str:
    """Address of the window's first tap, at the bound position and channel."""
    zero: dict[Axis, Expr] = {a: Const(0, DType.I64) for a in window.reduce.axes}
    index = tuple(simplify(substitute(i, zero)) for i in load.index)
    buffer = w.buffers[load.src]
    text, _, _ = w.address(load.src, index, buffer)
    return f"{buffer.pointer} + ({text})"
