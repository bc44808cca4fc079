"""A stage as plain loops: outer loops in the output's layout order, one vector axis innermost."""

from __future__ import annotations

from math import prod

from onchip.backends.cpp import spelling
from onchip.backends.cpp.reduce import (
    SIMD,
    lane_reductions,
    loop_head,
    order_axes,
    unrolled,
)
from onchip.backends.cpp.window import emit_window, find_window
from onchip.backends.cpp.writer import Buffer, Writer, stride_along
from onchip.fusion.nest import Span, Stage
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    axis,
    children,
    loads,
    mentioned,
    reduces,
    rewrite,
)

CHUNK = 512  # elements of the vector axis handled at a time; bounds the stack arrays


def emit_stage(w: Writer, stage: Stage, target: Buffer, stream: bool = False) -> None:
    """Loops that evaluate the stage's expression over its box and store it to `target`."""
    s = stage.staged
    spans = dict(zip(s.loops, stage.spans, strict=True))
    limits = {a: clip(w, a, sp) for a, sp in spans.items()}
    v = vector_axis(w, stage, target)
    outer = sorted(
        (a for a in s.loops if a is not v),
        key=lambda a: -abs(stride_along(s.store, target.strides, a) or 0),
    )
    window = None
    if v is not None and outer and not stream:
        window = find_window(w, stage, target, v, outer[-1])
    opened = 0
    for a in outer[:-1] if window else outer:
        lo, hi = limits[a]
        name = w.fresh("i")
        w.open(loop_head(name, lo, hi), {a: name})
        opened += 1
    if v is not None and window is not None:
        emit_window(w, stage, target, window, v, limits)
    elif v is None:
        value = w.value(s.body)
        _, _, place = w.address(s.tensor, s.store, target)
        w.line(f"{place} = {spelling.store(value, target.dtype)};")
    else:
        _emit_vector(w, stage, target, v, limits[v], spans[v], stream)
    for _ in range(opened):
        w.close()


def clip(w: Writer, a: Axis, span: Span) -> tuple[str, str]:
    """First and end of a loop, clipped to the axis."""
    if isinstance(span.origin, Const):
        lo = max(int(span.origin.value), 0)
        return f"{lo}l", f"{min(int(span.origin.value) + span.extent, a.extent)}l"
    origin = w.value(span.origin)
    level = w.level_of_name(origin)
    lo = w.define(None, f"onchip::most({origin}, 0l)", "int64_t", level)
    hi = w.define(None, f"onchip::least({origin} + {span.extent}l, {a.extent}l)", "int64_t", level)
    return lo, hi


def vector_axis(w: Writer, stage: Stage, target: Buffer) -> Axis | None:
    """The own axis along which accesses are contiguous; None if a reduction axis (or nothing)
    is better, in which case reductions vectorise inside."""
    s = stage.staged
    if any(r.monoid in ("argmax", "argmin") for r in reduces(s.body)):
        return None
    own = [a for a in s.loops if a.extent > 1]
    if not own:
        return None
    weights = _load_weights(s.body)

    def score(a: Axis, is_own: bool) -> float:
        total = 0.0
        for ld, weight in weights:
            stride = stride_along(ld.index, w.buffers[ld.src].strides, a)
            if stride == 1:
                total += weight
            elif stride != 0:
                total -= weight
        if is_own:
            total += 1.0 if stride_along(s.store, target.strides, a) == 1 else -1.0
        return total

    best = max(own, key=lambda a: (score(a, True), a.extent))
    inner = [a for r in reduces(s.body) for a in r.axes if a.extent > 1]
    if inner and max(score(a, False) for a in inner) > score(best, True):
        return None
    if inner and score(best, True) < 0:
        return None
    return best


def lay_out_constants(w: Writer, stages: list[Stage], constants: frozenset[Tensor]) -> None:
    """Give a constant that a vector loop would gather (a depthwise filter, channels outermost) a
    layout of its own with the vector axis innermost. Only where a single stage reads it."""
    readers = [ld.src for st in stages for ld in {x.src: x for x in loads(st.staged.body)}.values()]
    for st in stages:
        v = vector_axis(w, st, w.buffers[st.tensor])
        for ld in loads(st.staged.body):
            t = ld.src
            if t not in constants or t in w.laid_out or readers.count(t) != 1 or v is None:
                continue
            if stride_along(ld.index, w.buffers[t].strides, v) in (0, 1, None):
                continue
            inner = [d for d, i in enumerate(ld.index) if v in mentioned(i)]
            if len(inner) == 1 and ld.index[inner[0]] is v:
                w.buffers[t].strides = _innermost(t, inner[0])
                w.laid_out.add(t)


def _innermost(t: Tensor, d: int) -> tuple[int, ...]:
    """Strides of a dense tensor with dimension `d` contiguous."""
    order = [*(x for x in range(t.rank) if x != d), d]
    out, step = [0] * t.rank, 1
    for x in reversed(order):
        out[x] = step
        step *= max(t.shape[x], 1)
    return tuple(out)


def _load_weights(body: Expr) -> list[tuple[Load, float]]:
    """Loads with the number of times each is evaluated per element."""
    out: list[tuple[Load, float]] = []

    def visit(e: Expr, times: float, seen: dict[Expr, float]) -> None:
        if seen.get(e, 0.0) >= times:
            return
        seen[e] = times
        if isinstance(e, Load):
            out.append((e, times))
        inside = times * prod(a.extent for a in e.axes) if isinstance(e, Reduce) else times
        for c in children(e):
            visit(c, inside, seen)

    visit(body, 1.0, {})
    return out


def _emit_vector(
    w: Writer,
    stage: Stage,
    target: Buffer,
    v: Axis,
    limit: tuple[str, str],
    span: Span,
    stream: bool,
) -> None:
    s = stage.staged
    body = _unroll_windows(s.body, v)
    c, end, name = w.fresh("c"), w.fresh("end"), w.fresh("v")
    start = axis(v.extent, "c")
    if span.extent > CHUNK:
        w.open(loop_head(c, limit[0], limit[1], f"{CHUNK}l"), {start: c})
        w.line(f"const int64_t {end} = onchip::least({c} + {CHUNK}l, {limit[1]});")
    else:
        w.open("", {start: c})
        w.line(f"const int64_t {c} = {limit[0]}, {end} = {limit[1]};")
    saved = (w.vector_axis, w.vector_chunk, w.chunk_start)
    w.vector_axis, w.vector_chunk, w.chunk_start = v, CHUNK, start
    level = w.depth
    for r in lane_reductions(body, v):
        array = _accumulate(w, r, v, name, c, end)
        w.levels[level].values[r] = array
        w.follows[array] = name
    temporary = None
    if stream and stride_along(s.store, target.strides, v) == 1:
        temporary = w.fresh("line")
        w.line(f"alignas(64) {spelling.STORAGE[target.dtype]} {temporary}[{CHUNK}];")
    w.open(SIMD + loop_head(name, c, end), {v: name})
    value = spelling.store(w.value(body), target.dtype)
    if temporary is None:
        _, _, place = w.address(s.tensor, s.store, target)
        w.line(f"{place} = {value};")
    else:
        w.line(f"{temporary}[{name} - {c}] = {value};")
    w.close()
    if temporary is not None:
        at = tuple(rewrite(i, lambda x: start if x is v else None) for i in s.store)
        text, _, _ = w.address(s.tensor, at, target)
        w.line(f"onchip::stream({target.pointer} + ({text}), {temporary}, {end} - {c});")
    w.vector_axis, w.vector_chunk, w.chunk_start = saved
    w.close()


def _unroll_windows(body: Expr, v: Axis) -> Expr:
    """Short folds that differ along the vector axis become straight-line code."""

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Reduce) and v in mentioned(e):
            flat = unrolled(e)
            return None if flat is None else rewrite(flat, leaf)
        return None

    return rewrite(body, leaf)


def _accumulate(w: Writer, r: Reduce, v: Axis, name: str, c: str, end: str) -> str:
    """One accumulator per element of the chunk; the vector loop runs inside the fold's loops."""
    kind = spelling.value_type(r.dtype)
    long = prod(a.extent for a in r.axes) > 64
    wide = "double" if r.monoid == "sum" and r.dtype is DType.F32 and long else kind
    array = w.fresh("lane")
    w.line(f"{wide} {array}[{CHUNK}];")
    fill = spelling.identity(r.monoid, r.dtype)
    count = f"{end} - {c}"
    w.line(f"for (int64_t j = 0; j < {count}; ++j) {array}[j] = {fill};")
    axes = order_axes(w, r)
    for a in axes:
        k = w.fresh("r")
        w.open(loop_head(k, "0", f"{a.extent}l"), {a: k})
    w.open(SIMD + loop_head(name, c, end), {v: name})
    slot = f"{array}[{name} - {c}]"
    step = spelling.combine(r.monoid, slot, w.value(r.body), r.dtype)
    w.line(f"{slot} = {step};")
    w.close()
    for _ in axes:
        w.close()
    return f"{kind}({array}[{name} - {c}])"
