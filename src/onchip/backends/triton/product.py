"""Matrix products: rows and K as flat dimensions (implicit GEMM), tl.dot in a loop over K.

The row axes, a pool's window among them, are numbered as one dimension of tl.dot; the accumulator
is then reshaped to one dimension per axis again, so that a fold over the window is a fold over
consecutive rows.
"""

from __future__ import annotations

from math import prod

from onchip.backends.triton.placement import SMALLEST_DOT
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
from onchip.ir.expr import Axis, Expr, Load, axis, loads

K_BLOCK = 32


def emit_product(w: Writer, c: Contraction) -> Tile:
    """The product as a block over its row and column axes."""
    rows, columns = _dimensions(w, c.m_axes), _dimensions(w, c.n_axes)
    if _dimensions(w, c.b_axes):
        raise CannotExpress(Rule.CONTRACTION_FORM, "", "a tile of several batches")
    m, n = (prod(w.widths[a] for a in side) for side in (rows, columns))
    if min(m, n) < SMALLEST_DOT:
        text = f"{m} x {n} elements; tl.dot starts at {SMALLEST_DOT} x {SMALLEST_DOT}"
        raise CannotExpress(Rule.CONTRACTION_FORM, "", text)
    w.scopes.append(Scope({}, opaque=True))
    row, column = _flatten(w, rows, 0), _flatten(w, columns, 2)
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
    """The axes that are dimensions here (others are scalars), in order."""
    bounds = [(a, w.bound(a)) for a in axes]
    found = [a for a, b in bounds if b is not None and b.tile.axes == (a,)]
    return tuple(sorted(found, key=w.ranks.__getitem__))


def _flatten(w: Writer, axes: Axes, kind: int) -> Axis:
    """One dimension for all of `axes`: they are bound to what their flat number says."""
    if len(axes) == 1:
        return axes[0]
    size = prod(w.widths[a] for a in axes)
    flat = axis(size, "f")
    w.widths[flat] = size
    number = w.define("i", f"tl.arange(0, {size})", (flat,))
    w.bind(flat, Bound(number), kind)
    step = size
    for a in axes:
        step //= w.widths[a]
        outer = w.bound(a)
        assert outer is not None
        at = f"{number.text} // {step}" if step > 1 else number.text
        at = f"{at} % {w.widths[a]}"
        tile = w.define("i", at if outer.origin == "0" else f"{outer.origin} + {at}", (flat,))
        w.bind(a, Bound(tile, w.tested(tile, outer.tests)), kind)
    return flat


def _loop_over_k(w: Writer, c: Contraction, row: Axis, column: Axis) -> Tile:
    """The accumulator [rows, columns]; one step for all of K where it is short or in registers."""
    size = prod(a.extent for a in c.k_axes)
    in_registers = any(ld.src in w.kept for side in (c.left, c.right) for ld in loads(side))
    width = max(power_of_two(size), SMALLEST_DOT)
    if not in_registers:
        width = min(width, K_BLOCK)
    level, shape = w.depth, w.shape((row, column))
    once = size <= width
    total = w.fresh("acc")
    if not once:
        start = w.fresh("k")
        w.line(f"{total} = tl.zeros({shape}, tl.float32)")
        w.open(f"for {start} in range(0, {size}, {width}):")
    w.scopes.append(Scope({}))
    first = f"{start} + " if not once else ""
    k, exists = _bind_k(w, c.k_axes, size, width, first)
    a = _operand(w, c.left, (row, k), exists)
    b = _operand(w, c.right, (k, column), exists)
    w.scopes.pop()
    carried = "" if once else f"{total}, "
    w.line(f'{total} = tl.dot({a}, {b}, {carried}input_precision="ieee")')
    if not once:
        w.close()
    return Tile(total, (row, column), level)


def _bind_k(w: Writer, axes: Axes, size: int, width: int, first: str) -> tuple[Axis, Tile | None]:
    level = w.depth if first else 0
    k = axes[0] if len(axes) == 1 else axis(size, "k")
    w.widths[k] = width
    number = w.define("i", f"{first}tl.arange(0, {width})", (k,), level)
    w.rank(k, 1)
    beyond = size % width or not size
    exists = w.tested(number, [f"< {size}"] if beyond else [])
    w.bind(k, Bound(number, exists), 1)
    step = size
    for n, a in enumerate(axes if len(axes) > 1 else ()):
        step //= max(a.extent, 1)
        at = f"{number.text} // {step}" if step > 1 else number.text
        text = at if n == 0 else f"{at} % {a.extent}"
        w.bind(a, Bound(w.define("i", text, (k,), level), exists), 1)
    return k, exists


def _operand(w: Writer, e: Expr, axes: Axes, exists: Tile | None) -> str:
    """A side of the product; beyond K both sides are zero (NaN times zero would be NaN)."""
    tile = w.value(e)
    text = w.whole(tile, axes)
    is_zero = isinstance(e, Load) and e.src not in w.kept and not e.pad
    if exists is None or is_zero:
        return text
    return f"tl.where({w.onto(exists, axes)}, {text}, 0.0)"
