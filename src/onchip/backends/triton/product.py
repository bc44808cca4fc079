"""Matrix products: rows and K as flat dimensions (implicit GEMM), tl.dot in a loop over K.

The row axes, a pool's window among them, are numbered as one dimension of tl.dot; the accumulator
is then reshaped to one dimension per axis again, so that a fold over the window is a fold over
consecutive rows.
"""

from __future__ import annotations

from math import ceil, prod

from onchip.backends.nvidia.source import Workspace
from onchip.backends.triton import spelling
from onchip.backends.triton.indices import outside
from onchip.backends.triton.placement import SMALLEST_DOT
from onchip.backends.triton.source import Partial
from onchip.backends.triton.steps import HALF, Steps, operand_type, steps_of
from onchip.backends.triton.writer import (
    Axes,
    Bound,
    CannotExpress,
    Scope,
    Tile,
    Writer,
    power_of_two,
)
from onchip.fusion.contraction import Contraction
from onchip.fusion.refusal import Rule
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Expr, Load, axis, loads


def emit_product(w: Writer, c: Contraction) -> Tile:
    """The product as a block over the dimensions of its row and column axes."""
    rows, columns = _dimensions(w, c.m_axes), _dimensions(w, c.n_axes)
    if _dimensions(w, c.b_axes):
        raise CannotExpress(Rule.CONTRACTION_FORM, "", "a tile of several batches")
    if set(rows) & set(columns):
        raise CannotExpress(Rule.CONTRACTION_FORM, "", "rows and columns in one dimension")
    m, n = (prod(w.widths[a] for a in side) for side in (rows, columns))
    if min(m, n) < SMALLEST_DOT:
        text = f"{m} x {n} elements; tl.dot starts at {SMALLEST_DOT} x {SMALLEST_DOT}"
        raise CannotExpress(Rule.CONTRACTION_FORM, "", text)
    several = len(rows) > 1 or len(columns) > 1
    w.scopes.append(Scope({}, opaque=several))
    row, column = _flatten(w, rows, c.m_axes, 0), _flatten(w, columns, c.n_axes, 2)
    w.shape((row, column))
    total = _loop_over_k(w, c, row, column)
    w.scopes.pop()
    axes = rows + columns
    if (row, column) != axes:
        total = w.define("v", f"tl.reshape({total.text}, {w.shape(axes)})", axes, total.level)
    else:
        total = Tile(total.text, axes, total.level)
    ordered = w.union(total)
    return w.define("v", w.onto(total, ordered), ordered, total.level) if ordered != axes else total


def _dimensions(w: Writer, axes: Axes) -> Axes:
    """The dimensions that the values of some axes have, in order."""
    found = {d for a in axes if (b := w.bound(a)) is not None for d in b.tile.axes}
    return tuple(sorted(found, key=w.ranks.__getitem__))


def _flatten(w: Writer, dimensions: Axes, axes: Axes, kind: int) -> Axis:
    """One dimension for several: `axes` are bound to what its number says."""
    if len(dimensions) == 1:
        return dimensions[0]
    size = prod(w.widths[a] for a in dimensions)
    flat = axis(size, "f")
    w.widths[flat] = size
    w.rank(flat, kind)
    number = w.define("i", f"tl.arange(0, {size})", (flat,))
    outer = {a: b for a in axes if (b := w.bound(a)) is not None}
    step = size
    for d in dimensions:
        step //= w.widths[d]
        at = f"{number.text} // {step}" if step > 1 else number.text
        at = at if step * w.widths[d] == size else f"({at}) % {w.widths[d]}"
        if d is w.lane:
            text = at if w.first_lane.text == "0" else f"{w.first_lane.text} + {at}"
            lane = w.define("lane", text, (flat,))
            w.count_lanes(flat, lane, prod(n for *_, n in w.lanes))
            w.unravel(lane, w.lanes)
            continue
        if d not in outer:
            raise CannotExpress(Rule.SPLIT_PRODUCT, "", "a fold in a loop around a product")
        bound = outer[d]
        text = at if bound.origin == "0" else f"{bound.origin} + {at}"
        tile = w.define("i", text, (flat,))
        w.bind(d, Bound(tile, w.tested(tile, bound.tests)), kind)
    for a, b in outer.items():
        if a not in dimensions and b.at is not None:
            w.bind_range(a, b.at, (None, 1), b.tests, kind)
    return flat


def _loop_over_k(w: Writer, c: Contraction, row: Axis, column: Axis) -> Tile:
    """The accumulator [rows, columns]; one step for all of K where it is short or in registers."""
    kind = DType.F32 if w.options.interpret else operand_type(c, w.result)
    steps = _steps(w, c)
    c = steps.product
    level, shape = w.depth, w.shape((row, column))
    total = w.fresh("acc")
    split = w.options.split
    once = steps.count == 1 and split == 1
    if not once:
        w.line(f"{total} = tl.zeros({shape}, tl.float32)")
    if steps.count == 0:
        return Tile(total, (row, column), level)
    w.scopes.append(Scope({}))
    exists = _open_step(w, steps)
    a = _operand(w, c.left, (row, steps.inner), exists, kind)
    b = _operand(w, c.right, (steps.inner, column), exists, kind)
    w.scopes.pop()
    carried = "" if once else f", {total}"
    precision = f', input_precision="{w.options.precision}"' * (kind is DType.F32)
    w.line(f"{total} = tl.dot({a}, {b}{carried}{precision})")
    if not once:
        w.close()
    return _added_up(w, total, (row, column)) if split > 1 else Tile(total, (row, column), level)


def _added_up(w: Writer, own: str, axes: Axes) -> Tile:
    """What all programs that share a tile have, in their order, for whichever of them is the last:
    it goes on alone. Each counts itself when its sums are in memory; the last one puts zero
    back."""
    if w.depth or w.partial:
        text = "K is split of one product of a kernel, outside of loops"
        raise CannotExpress(Rule.CONTRACTION_FORM, "", text)
    rows, columns = (w.widths[a] for a in axes)
    size, split = rows * columns, w.options.split
    sums = Workspace(4 * size * w.tiles * split)
    w.partial.append(Partial("sums", "*fp32", sums))
    w.partial.append(Partial("arrived", "*i32", Workspace(4 * w.tiles, zeroed=True)))
    number = f"tl.arange(0, {rows})[:, None] * {columns} + tl.arange(0, {columns})[None, :]"
    w.line(f"place = sums + program * {size} + ({number})")
    w.line(f"tl.store(place + part * {size * w.tiles}, {own})")
    w.line("tl.debug_barrier()")
    w.line('ticket = tl.atomic_add(arrived + program, 1, sem="acq_rel")')
    w.open(f"if ticket == {split - 1}:")
    w.line("tl.store(arrived + program, 0)")
    total, other = w.fresh("acc"), w.fresh("other")
    w.line(f"{total} = tl.zeros({w.shape(axes)}, tl.float32)")
    w.line(f"for {other} in range(0, {split}):")
    # past the first cache, which other programs' stores don't reach
    read = f'tl.load(place + {other} * {size * w.tiles}, cache_modifier=".cg")'
    w.line(f"    {total} += {read}")
    return Tile(total, axes, w.depth)


def _steps(w: Writer, c: Contraction) -> Steps:
    """How K is walked. What is in registers is there whole, so that its K is one step; so is that
    of a product in every step of a stream, whose left side then stays on chip."""
    inner, several = c.k_axes[0], len(c.k_axes) > 1
    deep = several or inner.extent > w.options.k_block
    again = w.options.stream and not deep
    if not again and not any(ld.src in w.kept for side in (c.left, c.right) for ld in loads(side)):
        return steps_of(c, w.strides, w.free, w.options.k_block)
    if several:
        text = "a tile in registers cannot be an operand with several K axes"
        raise CannotExpress(Rule.CONTRACTION_FORM, "", text)
    return Steps(c, (), inner, max(power_of_two(inner.extent), SMALLEST_DOT))


def _open_step(w: Writer, steps: Steps) -> Tile | None:
    """Open the loop over the steps, if there are several, and bind the K axes: taps to scalars,
    the inner one to a block. Gives which elements of the block exist."""
    first, inner, width = "", steps.inner, steps.width
    split = w.options.split
    sizes = [_taps(w, steps.product, a) for a in steps.taps]
    if steps.count > 1 or split > 1:
        first = w.fresh("k")
        count = _times([*sizes, str(steps.blocks)])
        if split > 1:
            each = f"(({count} + {split - 1}) // {split})"
            each = each if steps.product.ends else str(ceil(steps.count / split))
            end = f"tl.minimum(part * {each} + {each}, {count})"
            w.open(f"for {first} in range(part * {each}, {end}):")
        elif steps.taps:
            w.open(f"for {first} in range(0, {count}):")
        else:
            w.open(f"for {first} in range(0, {inner.extent}, {width}):")
    for n, (a, size) in enumerate(zip(steps.taps, sizes, strict=True)):
        rest = _times([*sizes[n + 1 :], str(steps.blocks)])
        at = f"{first} // {rest}" if rest != "1" else first
        at = at if n == 0 else f"{at} % {size}"
        tap = w.define("tap", at, (), w.depth) if a.extent > 1 else Tile("0")
        w.bind(a, Bound(tap), 1)
    if steps.taps and first:
        first = f"{first} % {steps.blocks} * {width}" if steps.blocks > 1 else ""
    elif split > 1:
        first = f"{first} * {width}"
    w.widths[inner] = width
    w.rank(inner, 1)
    text = f"{first} + tl.arange(0, {width})" if first else f"tl.arange(0, {width})"
    number = w.define("i", text, (inner,), w.depth if first else 0)
    exists = w.tested(number, [f"< {inner.extent}"] if inner.extent % width else [])
    w.bind(inner, Bound(number, exists), 1)
    return exists


def _taps(w: Writer, c: Contraction, a: Axis) -> str:
    """How many values a scalar K axis has: a number, or a scalar's name."""
    if a not in c.ends:
        return str(a.extent)
    end = w.index(c.ends[a])
    if end.axes:
        raise CannotExpress(Rule.CONTRACTION_FORM, "", "rows that end at different elements of K")
    return w.define("taps", end.text, (), end.level).text


def _times(factors: list[str]) -> str:
    """A product of numbers and names, bracketed."""
    number = prod(int(f) for f in factors if f.isdigit())
    names = [f for f in factors if not f.isdigit()]
    parts = [*names, str(number)] if number > 1 or not names else names
    return parts[0] if len(parts) == 1 else f"({' * '.join(parts)})"


def _operand(w: Writer, e: Expr, axes: Axes, exists: Tile | None, kind: DType) -> str:
    """A side of the product; beyond K both sides are zero (NaN times zero would be NaN)."""
    loaded = isinstance(e, Load) and e.src not in w.kept
    raw = loaded and kind in HALF
    tile = w.load(e, widen=False) if raw and isinstance(e, Load) else w.value(e)
    text = w.whole(tile, axes)
    if exists is not None and not (loaded and isinstance(e, Load) and outside(w, e) == 0):
        text = f"tl.where({w.onto(exists, axes)}, {text}, 0.0)"
    if kind is DType.F32:
        return rounded(w, e, text)
    return text if raw else f"{text}.to({spelling.TYPES[kind]})"


def rounded(w: Writer, e: Expr | None, text: str) -> str:
    """A float32 operand of the matrix unit, which would cut bits off: the nearest TF32, where that
    is the precision and the operand (e: its expression) may have more bits."""
    o = w.options
    if o.precision != "tf32" or o.interpret:
        return text
    if isinstance(e, Load) and (
        e.src in w.rounded or (e.src.dtype in HALF and e.src not in w.kept)
    ):
        return text
    return f"to_tf32({text})"
