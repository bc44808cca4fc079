"""Reductions: a product by tl.dot, whole axes as dimensions of a block, small windows as loops."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from onchip.backends.triton import spelling
from onchip.backends.triton.indices import wide
from onchip.backends.triton.placement import LONGEST_WINDOW, is_serial, whole_range
from onchip.backends.triton.writer import (
    Axes,
    Bound,
    Scope,
    Tile,
    Writer,
    power_of_two,
)
from onchip.fusion.chunks import fold_elements
from onchip.fusion.contraction import as_contraction
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Const, Reduce, axis, loads, mentioned, reduces
from onchip.ir.index import stride_along

ZERO = Const(0, DType.I64)


LAST_POSITION = 2**31 - 1


def emit_reduction(w: Writer, r: Reduce) -> Tile:
    product = w.options.product and r.dtype is DType.F32
    contraction = as_contraction(r, w.bound_axes()) if product else None
    if contraction is not None:
        from onchip.backends.triton.product import emit_product

        return emit_product(w, contraction)
    return _serial(w, r) if is_serial(r) else _whole(w, r)


def _whole(w: Writer, r: Reduce) -> Tile:
    """The axes are dimensions of the body's block; what padding added is the neutral element. Of a
    row in several parts, each part is folded, and then what they give."""
    block = prod(w.widths[a] for a in free_axes(w, r)) * power_of_two(fold_elements(r))
    kept = any(ld.src in w.kept and mentioned(ld) & set(r.axes) for ld in loads(r.body))
    if block > w.options.fold_block and not kept:
        return _looped(w, r)
    if w.pieces and any(whole_range(a) == w.pieces.row for a in r.axes):
        from onchip.backends.triton.strips import fold_parts

        return fold_parts(w, r)
    body = bind_and_mask(w, r)
    return fold_block(w, r, body)


def bind_and_mask(w: Writer, r: Reduce) -> Tile:
    """What a fold over whole axes takes in; of argmax and argmin "values, positions"."""
    w.scopes.append(Scope({}))
    for a in r.axes:
        w.bind_range(a, ZERO, whole_range(a), [] if a.extent else ["< 0"], 1)
    own = [b for a in r.axes if (b := w.bound(a)) is not None]
    body, axes, level = _masked_body(w, r, own)
    if is_position(r):
        body += f", {w.whole(own[0].tile, axes)}"
    w.scopes.pop()
    return Tile(body, axes, level)


def fold_block(w: Writer, r: Reduce, body: Tile) -> Tile:
    return _fold(w, r, body.text, body.axes, [a for a in body.axes if a in r.axes], body.level)


def _masked_body(w: Writer, r: Reduce, own: list[Bound]) -> tuple[str, Axes, int]:
    """The body over all axes of the fold, the neutral element where there is nothing to fold."""
    body = wide(w, r.body, w.value(r.body))
    axes = w.union(body, *(b.tile for b in own))
    mask = w.all_of([b.mask for b in own if b.mask is not None])
    kind, neutral = accumulated(r)
    text = w.whole(body, axes, kind)
    level = max([body.level, *(b.tile.level for b in own)])
    if mask is not None:
        text = w.define("v", f"tl.where({w.onto(mask, axes)}, {text}, {neutral})", axes, level).text
    return text, axes, level


def accumulated(r: Reduce) -> tuple[str, str]:
    """The type of what is folded, and its neutral element."""
    dtype = r.body.dtype
    return spelling.TYPES[dtype], spelling.identity(r.monoid, dtype)


def is_position(r: Reduce) -> bool:
    """Whether values are folded with their positions."""
    return r.monoid in ("argmax", "argmin")


def _fold(w: Writer, r: Reduce, text: str, axes: Axes, folded: Sequence[Axis], level: int) -> Tile:
    """text: the values; of argmax and argmin "values, positions"."""
    for a in sorted(folded, key=axes.index, reverse=True):
        text = spelling.fold_axis(r.monoid, text, axes.index(a), r.body.dtype)
    if is_position(r):
        text = f"{text}[1].to(tl.int64)"
    return w.define("r", text, tuple(a for a in axes if a not in folded), level)


def _looped(w: Writer, r: Reduce) -> Tile:
    """A fold too long for one block: a block of it at a time, element on element, folded at the
    end. The axes are numbered as one, in the order in which they lie in memory."""
    free, level = free_axes(w, r), w.depth
    size = fold_elements(r)
    room = max(w.options.fold_block // prod(w.widths[a] for a in free), 1)
    width = min(1 << (room.bit_length() - 1), power_of_two(size))
    flat = axis(size, "f")
    w.widths[flat] = width
    w.rank(flat, 1)
    axes = tuple(sorted((*free, flat), key=w.ranks.__getitem__))
    start, total = w.fresh("k"), begin_fold(w, r, axes)
    w.open(f"for {start} in range(0, {size}, {width}):")
    w.scopes.append(Scope({}))
    number = w.define("i", f"{start} + tl.arange(0, {width})", (flat,), w.depth)
    exists = w.tested(number, [f"< {size}"] if size % width else [])
    step = size
    for a in sorted(r.axes, key=lambda a: -_stride(w, r, a)):
        step //= a.extent
        at = f"{number.text} // {step}" if step > 1 else number.text
        at = at if step * a.extent == size else f"({at}) % {a.extent}"
        tile = w.define("i", at, (flat,), w.depth)
        w.bind(a, Bound(tile, exists), 1)
    body, have, _ = _masked_body(w, r, [Bound(number, exists)])
    fold_step(w, r, total, w.whole(Tile(body, have), axes), w.whole(number, axes))
    w.close()
    w.scopes.pop()
    return _fold(w, r, total, axes, [flat], level)


def begin_fold(w: Writer, r: Reduce, axes: Axes) -> str:
    """What a loop folds into: a name, or the names of values and positions."""
    total = w.fresh("acc")
    kind, neutral = accumulated(r)
    w.line(f"{total} = tl.full({w.shape(axes)}, {neutral}, {kind})")
    if not is_position(r):
        return total
    position = w.fresh("at")
    w.line(f"{position} = tl.full({w.shape(axes)}, {LAST_POSITION}, tl.int32)")
    return f"{total}, {position}"


def fold_step(w: Writer, r: Reduce, total: str, body: str, position: str) -> None:
    if is_position(r):
        body += f", {position}"
    w.line(f"{total} = {spelling.combine(r.monoid, total, body, r.body.dtype)}")


def _stride(w: Writer, r: Reduce, a: Axis) -> int:
    """The widest step in memory along an axis of all that a fold reads."""
    reads = [ld for ld in loads(r.body) if ld.src in w.strides]
    steps = (stride_along(ld.index, w.strides[ld.src], a) or 0 for ld in reads)
    return max(map(abs, steps), default=0)


def _serial(w: Writer, r: Reduce) -> Tile:
    """One step a window element; reductions that do not depend on it are computed before."""
    if w.pieces:
        from onchip.backends.triton.strips import fold_along_strip

        tile = fold_along_strip(w, r)
        if tile is not None:
            return tile
    own = set(r.axes)
    for inner in reduces(r.body):
        if not mentioned(inner) & own:
            w.value(inner)
    axes = free_axes(w, r)
    level, total = w.depth, begin_fold(w, r, axes)
    w.scopes.append(Scope({}))
    # unrolled: the loads of all window elements are in flight together
    steps = "tl.static_range" if fold_elements(r) <= LONGEST_WINDOW else "range"
    for a in r.axes:
        name = w.fresh("k")
        w.open(f"for {name} in {steps}(0, {a.extent}):")
        w.bind(a, Bound(Tile(name, (), w.depth)), 1)
    body = wide(w, r.body, w.value(r.body))
    fold_step(w, r, total, w.whole(body, axes, accumulated(r)[0]), name)
    for _ in r.axes:
        w.close()
    w.scopes.pop()
    if is_position(r):
        return w.define("r", f"{total.split(', ')[1]}.to(tl.int64)", axes, level)
    return Tile(total, axes, level)


def free_axes(w: Writer, r: Reduce) -> Axes:
    """Dimensions of the result: of the axes that are bound around it."""
    inner = {a for x in reduces(r) for a in x.axes}
    bounds = [w.bound(a) for a in mentioned(r) if a not in inner]
    return w.union(*(b.tile for b in bounds if b is not None))
