"""Reductions: a product by tl.dot, whole axes as dimensions of a block, small windows as loops."""

from __future__ import annotations

from onchip.backends.triton import spelling
from onchip.backends.triton.placement import is_serial, whole_range
from onchip.backends.triton.writer import Axes, Bound, CannotExpress, Scope, Tile, Writer
from onchip.fusion.contraction import as_contraction
from onchip.fusion.refusal import Rule
from onchip.ir.expr import Reduce, mentioned, reduces


def emit_reduction(w: Writer, r: Reduce) -> Tile:
    if r.monoid not in spelling.IDENTITY or not r.dtype.is_float:
        text = f"{r.monoid} over {r.body.dtype.label} values"
        raise CannotExpress(Rule.UNSUPPORTED_EXPRESSION, "", text)
    contraction = as_contraction(r, w.bound_axes())
    if contraction is not None:
        from onchip.backends.triton.product import emit_product

        return emit_product(w, contraction)
    return _serial(w, r) if is_serial(r) else _whole(w, r)


def _whole(w: Writer, r: Reduce) -> Tile:
    """The axes are dimensions of the body's block; what padding added is the neutral element."""
    w.scopes.append(Scope({}))
    for a in r.axes:
        w.bind_range(a, Tile("0"), whole_range(a), [] if a.extent else ["< 0"], 1)
    bounds = [b for a in r.axes if (b := w.bound(a)) is not None]
    over = [b.tile for b in bounds]
    body = w.value(r.body)
    axes = w.union(body, *over)
    mask = w.all_of([b.mask for b in bounds if b.mask is not None])
    text = w.whole(body, axes)
    level = max(body.level, 0)
    if mask is not None:
        neutral = spelling.constant(spelling.IDENTITY[r.monoid], r.dtype)
        text = w.define("v", f"tl.where({w.onto(mask, axes)}, {text}, {neutral})", axes, level).text
    w.scopes.pop()
    folded = [a for a in axes if a in r.axes]
    for a in reversed(folded):
        text = spelling.fold_axis(r.monoid, text, axes.index(a))
    return w.define("r", text, tuple(a for a in axes if a not in folded), level)


def _serial(w: Writer, r: Reduce) -> Tile:
    """One step a window element; reductions that do not depend on it are computed before."""
    own = set(r.axes)
    for inner in reduces(r.body):
        if not mentioned(inner) & own:
            w.value(inner)
    axes = _free_axes(w, r)
    total = w.fresh("acc")
    level = w.depth
    neutral = spelling.constant(spelling.IDENTITY[r.monoid], r.dtype)
    w.line(f"{total} = tl.full({w.shape(axes)}, {neutral}, tl.float32)")
    w.scopes.append(Scope({}))
    for a in r.axes:
        name = w.fresh("k")
        w.open(f"for {name} in range(0, {a.extent}):")
        w.bind(a, Bound(Tile(name, (), w.depth)), 1)
    body = w.onto(w.value(r.body), axes)
    w.line(f"{total} = {spelling.combine(r.monoid, total, body)}")
    for _ in r.axes:
        w.close()
    w.scopes.pop()
    return Tile(total, axes, level)


def _free_axes(w: Writer, r: Reduce) -> Axes:
    """Dimensions of the result: of the axes that are bound around it."""
    inner = {a for x in reduces(r) for a in x.axes}
    bounds = [w.bound(a) for a in mentioned(r) if a not in inner]
    return w.union(*(b.tile for b in bounds if b is not None))
