"""A stage that is a matrix product: one call of include/onchip/contract.h, epilogue generated."""

from __future__ import annotations

from math import prod

from onchip.backends.cpp import spelling
from onchip.backends.cpp.loops import clip
from onchip.backends.cpp.pack import (
    direct_form,
    left_operand,
    open_rows,
    pack_right,
)
from onchip.backends.cpp.reduce import SIMD, loop_head
from onchip.backends.cpp.roles import Product
from onchip.backends.cpp.writer import Buffer, Writer, stride_along
from onchip.fusion.nest import Span, Stage
from onchip.ir.expr import Axis, Expr, Tensor, loads, mentioned
from onchip.ir.index import is_affine

# Tensors below this are in the second-level cache anyway (0.5 MiB: the smallest now in use).
PREFETCH_BYTES = 512 * 1024


def emit_product(
    w: Writer, stage: Stage, target: Buffer, product: Product, panels: str, work: str
) -> None:
    """Emit the call of contract for the stage's box. `panels` is the packed right operand (or the
    memory to pack it into), `work` the workspace."""
    spans = dict(zip(stage.staged.loops, stage.spans, strict=True))
    limits = {a: clip(w, a, spans[a]) for a in stage.staged.loops}
    opened = 0
    for a in product.b_axes:
        lo, hi = limits[a]
        name = w.fresh("g")
        w.open(loop_head(name, lo, hi), {a: name})
        opened += 1
    if not opened:
        w.open("", {})
    n_lo, n_hi = limits[product.n_axis]
    counts = {a: _count(w, limits[a]) for a in product.m_axes}
    rows = w.fresh("rows")
    w.line(f"const int64_t {rows} = {' * '.join(counts.values()) or '1'};")
    if product.constant:
        size = f"{product.k}l * onchip::round_up({product.n_axis.extent}l, onchip::NR)"
        batch = _batch_offset(w, product)
        base, n0, n1 = f"{panels} + {batch} * {size}" if batch else panels, n_lo, n_hi
        shift = "0l"
    else:
        _pack_once(w, product, spans, target.level, panels, limits[product.n_axis])
        base, n0, n1, shift = panels, "0l", f"{n_hi} - {n_lo}", n_lo
    operand, row_stride = left_operand(w, product, limits, counts)
    epilogue = _epilogue(w, stage, target, product, limits, counts, shift)
    extent = prod(spans[a].extent for a in product.m_axes)
    width = spans[product.n_axis].extent
    w.line(
        f"const onchip::Blocking {rows}_blocking = "
        f"onchip::choose_blocking({extent}l, {width}l, {product.k}l, {row_stride}l);"
    )
    w.line(
        f"onchip::contract({rows}, {width}l, {product.k}l, {n0}, {n1}, {base}, "
        f"{rows}_blocking, {operand}, {epilogue}, {work});"
    )
    for _ in range(max(opened, 1)):
        w.close()


def _pack_once(
    w: Writer,
    product: Product,
    spans: dict[Axis, Span],
    tile_level: int,
    panels: str,
    limit: tuple[str, str],
) -> None:
    """Pack the right operand, unless the thread's last tile had the same one: the keys of a head
    serve all of its queries."""
    inside = any(w.buffers[ld.src].level >= tile_level for ld in loads(product.right))
    if inside or any(spans[a].extent > 1 for a in product.b_axes):
        pack_right(w, product, panels, *limit)
        return
    key, held = _batch_offset(w, product) or "0l", f"{panels}_holds"
    w.line(f"int64_t {held} = -1;", tile_level - 2)  # of the thread, outside the loop over tiles
    which = w.define(None, f"{key} * {product.n_axis.extent}l + {limit[0]}", "int64_t", w.depth)
    w.open(f"if ({held} != {which})", {})
    pack_right(w, product, panels, *limit)
    w.line(f"{held} = {which};")
    w.close()


def workspace_call(stage: Stage, product: Product, buffers: dict[Tensor, Buffer]) -> str:
    """C++ expression of the workspace's floats, for allocation before the tile loop."""
    spans = dict(zip(stage.staged.loops, stage.spans, strict=True))
    m = prod(spans[a].extent for a in product.m_axes)
    n = spans[product.n_axis].extent
    direct = direct_form(product, buffers)
    stride = direct[1] if direct else 0
    k = product.k
    blocking = f"onchip::choose_blocking({m}l, {n}l, {k}l, {stride}l)"
    return f"onchip::workspace_floats({m}l, {n}l, {k}l, {blocking})"


def _count(w: Writer, limit: tuple[str, str]) -> str:
    lo, hi = limit
    if lo.endswith("l") and hi.endswith("l") and lo[:-1].isdigit() and hi[:-1].isdigit():
        return f"{int(hi[:-1]) - int(lo[:-1])}l"
    return w.define(None, f"onchip::most({hi} - {lo}, 0l)", "int64_t", w.depth)


def _batch_offset(w: Writer, product: Product) -> str:
    if not product.b_axes:
        return ""
    text = ""
    for a in product.b_axes:
        name = w.value(a)
        text = f"({text}) * {a.extent}l + {name}" if text else name
    return f"({text})"


def _epilogue(
    w: Writer,
    stage: Stage,
    target: Buffer,
    product: Product,
    limits: dict,
    counts: dict[Axis, str],
    shift: str,
) -> str:
    s = stage.staged
    name, i, j = w.fresh("epilogue"), w.fresh("i"), w.fresh("j")
    w.open(
        f"auto {name} = [=, &status](long m, int mcount, long n, int ncount, const float* tile, "
        "long ld) __attribute__((always_inline))",
        {},
    )
    step = open_rows(w, i, "mcount", "m", product, limits, counts)
    column = w.fresh("n")
    w.open(f"{SIMD}for (int {j} = 0; {j} < ncount; ++{j})", {})
    origin = "n" if shift == "0l" else f"{shift} + n"
    w.line(f"const int64_t {column} = {origin} + {j};")
    w.levels[-1].bound[product.n_axis] = column
    w.where[column] = w.depth
    w.bind(product.contraction.reduce, f"tile[{i} * ld + {j}]")
    value = spelling.store(w.value(s.body), target.dtype)
    _, _, place = w.address(s.tensor, s.store, target)
    w.line(f"{place} = {value};")
    w.close()
    w.line(step)
    w.close()
    w.close()
    w.line(";")
    ahead = _places_ahead(w, stage, target, product)
    if not ahead:
        return name
    fetch = _prefetch(w, product, limits, counts, shift, ahead)
    return f"onchip::prefetching({name}, {fetch})"


def _places_ahead(
    w: Writer, stage: Stage, target: Buffer, product: Product
) -> list[tuple[Tensor, tuple[Expr, ...], Buffer, bool]]:
    """What the epilogue reads and writes of large tensors, row by row, one cache line a row: jumps
    that the hardware does not foresee. (tensor, index, buffer, written)."""
    s = stage.staged
    places = [(s.tensor, s.store, target, True)]
    places += [
        (ld.src, ld.index, w.buffers[ld.src], False)
        for ld in loads(s.body)
        if ld not in loads(product.contraction.reduce) and ld.pad is None
    ]
    rows = set(product.m_axes)
    return [
        (t, index, buffer, written)
        for t, index, buffer, written in places
        if t.nbytes >= PREFETCH_BYTES
        and not buffer.origins
        and stride_along(index, buffer.strides, product.n_axis) == 1
        and any(mentioned(i) & rows for i in index)
        and all(is_affine(i) for i in index)
    ]


def _prefetch(
    w: Writer,
    product: Product,
    limits: dict,
    counts: dict[Axis, str],
    shift: str,
    places: list[tuple[Tensor, tuple[Expr, ...], Buffer, bool]],
) -> str:
    name, i, column = w.fresh("fetch"), w.fresh("i"), w.fresh("n")
    w.open(
        f"auto {name} = [=](long m, int mcount, long n) __attribute__((always_inline))",
        {},
    )
    step = open_rows(w, i, "mcount", "m", product, limits, counts)
    w.line(f"const int64_t {column} = {'n' if shift == '0l' else f'{shift} + n'};")
    w.levels[-1].bound[product.n_axis] = column
    w.where[column] = w.depth
    for t, index, buffer, written in places:
        _, _, place = w.address(t, index, buffer)
        w.line(f"__builtin_prefetch(&{place}, {int(written)});")
    w.line(step)
    w.close()
    w.close()
    w.line(";")
    return name
