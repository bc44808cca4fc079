"""A stage that is a matrix product: operands for include/onchip/contract.h, epilogue generated.

The left operand's rows are read in place where they are contiguous, and otherwise packed block
by block (padding, strides and fused producers are evaluated there). The right operand is packed
into panels: at load time if it depends on constants only, else by the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onchip.backends.cpp import spelling
from onchip.backends.cpp.loops import clip
from onchip.backends.cpp.reduce import SIMD, loop_head
from onchip.backends.cpp.writer import Buffer, Writer, stride_along
from onchip.fusion.contraction import Contraction
from onchip.fusion.nest import Stage
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Const,
    Expr,
    Load,
    Tensor,
    axis,
    loads,
    mentioned,
    substitute,
)
from onchip.ir.index import bounds, linear, simplify


@dataclass(frozen=True, eq=False, slots=True)
class Panels:
    """The right operand as a matrix: element (batch..., k..., n) of `matrix`, to be packed as
    [batch][ceil(N / NR)][K][NR]. K runs over `matrix`'s axes in the order given."""

    matrix: Tensor
    batch: int
    k: int
    n: int
    packed: tuple[Load, ...]  # the loads of the stage's expression that the panels replace

    def floats(self, nr: int) -> int:
        return self.batch * self.k * (-(-self.n // nr) * nr)


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """A contraction with its roles fixed: rows m_axes, one column axis, K in memory order."""

    contraction: Contraction
    left: Expr
    right: Expr
    m_axes: tuple[Axis, ...]
    n_axis: Axis
    b_axes: tuple[Axis, ...]
    k_axes: tuple[Axis, ...]
    constant: bool
    swapped: bool  # the contraction's own left operand is the right one here

    @property
    def k(self) -> int:
        return prod(a.extent for a in self.k_axes)


def assign_roles(
    stage: Stage, target: Buffer, buffers: dict[Tensor, Buffer], constants: frozenset[Tensor]
) -> Product | None:
    """Columns are the constant operand's side, else the side along which the result is stored
    contiguously. None: no matrix form (several column axes, other element types)."""
    c = stage.contraction
    if c is None or c.reduce.dtype is not DType.F32:
        return None
    sides = [(c.left, c.right, c.m_axes, c.n_axes), (c.right, c.left, c.n_axes, c.m_axes)]
    best = None
    zero: Expr = Const(0, DType.I64)
    for left, right, rows, columns in sides:
        wide = [a for a in columns if a.extent > 1] or list(columns[:1])
        if len(wide) != 1:
            continue
        fixed = all(ld.src in constants for ld in loads(right))
        contiguous = stride_along(stage.staged.store, target.strides, wide[0]) == 1
        score = (fixed, contiguous, wide[0].extent)
        if best is None or score > best[0]:
            # rows are, besides: axes of extent 1 among the columns, which are all zero, and axes
            # that neither operand mentions
            ones = {a: zero for a in columns if a is not wide[0]}
            bound = {*c.m_axes, *c.n_axes, *c.b_axes}
            rest = tuple(a for a in stage.staged.loops if a not in bound)
            best = (
                score, left, substitute(right, ones), rows + tuple(ones) + rest, wide[0], fixed,
            )  # fmt: skip
    if best is None:
        return None
    _, left, right, rows, column, fixed = best
    k_axes = _k_order(c.k_axes, left, buffers)
    layout = sorted(
        rows, key=lambda a: -abs(stride_along(stage.staged.store, target.strides, a) or 0)
    )
    swapped = left is c.right
    return Product(c, left, right, tuple(layout), column, c.b_axes, k_axes, fixed, swapped)


def columns_aligned(stage: Stage, product: Product) -> bool:
    """Constant panels start every NR columns; a tile must not begin inside one. 32 is a multiple
    of NR for every vector width."""
    span = dict(zip(stage.staged.loops, stage.spans, strict=True))[product.n_axis]
    return not product.constant or not span.depends or span.extent % 32 == 0


def _k_order(k_axes: tuple[Axis, ...], left: Expr, buffers: dict[Tensor, Buffer]) -> tuple:
    """Slowest first in the left operand's memory, so that packing reads runs."""
    reads = loads(left)

    def stride(a: Axis) -> int:
        found = [stride_along(ld.index, buffers[ld.src].strides, a) for ld in reads]
        return max((abs(s) for s in found if s), default=0)

    return tuple(sorted(k_axes, key=lambda a: -stride(a)))


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
        _pack_right(w, product, panels, n_lo, n_hi)
        base, n0, n1, shift = panels, "0l", f"{n_hi} - {n_lo}", n_lo
    operand, row_stride = _left_operand(w, product, limits, counts)
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


def workspace_call(stage: Stage, product: Product, buffers: dict[Tensor, Buffer]) -> str:
    """C++ expression of the workspace's floats, for allocation before the tile loop."""
    spans = dict(zip(stage.staged.loops, stage.spans, strict=True))
    m = prod(spans[a].extent for a in product.m_axes)
    n = spans[product.n_axis].extent
    direct = _direct_form(product, buffers)
    stride = direct[1] if direct else 0
    k = product.k
    blocking = f"onchip::choose_blocking({m}l, {n}l, {k}l, {stride}l)"
    return f"onchip::workspace_floats({m}l, {n}l, {k}l, {blocking})"


def packed_right_floats(stage: Stage, product: Product) -> str:
    """Floats of the right operand's panels when the kernel packs them itself."""
    spans = dict(zip(stage.staged.loops, stage.spans, strict=True))
    return f"{product.k}l * onchip::round_up({spans[product.n_axis].extent}l, onchip::NR)"


def panels_of(product: Product) -> Panels:
    """The constant right operand as a tensor over (batch, k, n), for packing at load time."""
    old = (*product.b_axes, *product.k_axes, product.n_axis)
    new = tuple(axis(a.extent) for a in old)
    body = substitute(product.right, dict(zip(old, new, strict=True)))
    zero = {a: Const(0, DType.I64) for a in mentioned(body) - set(new)}
    matrix = Tensor("panels", tuple(a.extent for a in new), DType.F32, new, substitute(body, zero))
    batch = prod(a.extent for a in product.b_axes)
    c = product.contraction
    packed = c.left if product.swapped else c.right
    return Panels(matrix, batch, product.k, product.n_axis.extent, tuple(loads(packed)))


# ---- pieces ------------------------------------------------------------------------------------


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


def _pack_right(w: Writer, product: Product, panels: str, n_lo: str, n_hi: str) -> None:
    """panels[(n / NR) * K + k][n % NR] = right(k, n), zeros beyond the last column."""
    p, width = w.fresh("p"), w.fresh("width")
    w.open(loop_head(p, n_lo, n_hi, "onchip::NR"), {})
    w.line(f"const int64_t {width} = onchip::least(onchip::NR, {n_hi} - {p});")
    to = w.fresh("to")
    w.line(f"float* const {to} = {panels} + ({p} - {n_lo}) * {product.k}l;")
    w.line(f"if ({width} < onchip::NR) memset({to}, 0, {product.k}l * onchip::NR * sizeof(float));")
    along_n = _contiguous(w, product.right, product.n_axis)
    names = {a: w.fresh("k") for a in product.k_axes}
    flat = _flat_index(names, product.k_axes)
    n = w.fresh("n")
    if along_n:
        for a in product.k_axes:
            w.open(loop_head(names[a], "0", f"{a.extent}l"), {a: names[a]})
        w.open(SIMD + loop_head(n, p, f"{p} + {width}"), {product.n_axis: n})
        w.line(f"{to}[({flat}) * onchip::NR + {n} - {p}] = {w.value(product.right)};")
    else:
        w.open(loop_head(n, p, f"{p} + {width}"), {product.n_axis: n})
        for a in product.k_axes:
            w.open(loop_head(names[a], "0", f"{a.extent}l"), {a: names[a]})
        w.line(f"{to}[({flat}) * onchip::NR + {n} - {p}] = {w.value(product.right)};")
    for _ in range(len(product.k_axes) + 1):
        w.close()
    w.close()


def _contiguous(w: Writer, e: Expr, a: Axis) -> bool:
    strides = [stride_along(ld.index, w.buffers[ld.src].strides, a) for ld in loads(e)]
    return any(s == 1 for s in strides) and all(s in (0, 1) for s in strides)


def _flat_index(names: dict[Axis, str], axes: tuple[Axis, ...]) -> str:
    text = ""
    for a in axes:
        text = f"({text}) * {a.extent}l + {names[a]}" if text else names[a]
    return text or "0l"


def _decode(
    w: Writer, m: str, product: Product, limits: dict, counts: dict[Axis, str]
) -> dict[Axis, str]:
    """Names of the row axes' values for row number `m`, written at the innermost level."""
    names = {}
    rest = m
    for pos, a in enumerate(reversed(product.m_axes)):
        name = w.fresh("m")
        lo = limits[a][0]
        start = "" if lo == "0l" else f"{lo} + "
        if pos == len(product.m_axes) - 1:
            w.line(f"const int64_t {name} = {start}{rest};")
        elif counts[a] == "1l":
            w.line(f"const int64_t {name} = {start}0l;")
        else:
            # 32-bit division is several times faster than 64-bit
            w.line(f"const int64_t {name} = {start}int32_t({rest}) % int32_t({counts[a]});")
            quotient = w.fresh("q")
            w.line(f"const int64_t {quotient} = int32_t({rest}) / int32_t({counts[a]});")
            rest = quotient
        names[a] = name
    return names


def _open_rows(
    w: Writer, row: str, count: str, first: str, product: Product, limits: dict, counts: dict
) -> str:
    """Open the loop over rows first .. first + count. The row axes' values are divided out once
    and then counted on; returns the statement that does so, for the end of the loop's body."""
    names = _decode(w, first, product, limits, counts)
    moving = {a: w.fresh("m") for a in names}
    for a, name in moving.items():
        w.line(f"int64_t {name} = {names[a]};")
    w.open(f"for (int64_t {row} = 0; {row} < {count}; ++{row})", {})
    _bind_rows(w, moving)
    step = ""
    for a in product.m_axes:  # outermost first: the innermost ends up outside
        name, (lo, hi) = moving[a], limits[a]
        if counts[a] == "1l":
            continue
        step = f"if (++{name} == {hi}) {{ {name} = {lo}; {step} }}" if step else f"++{name};"
    return step


def _bind_rows(w: Writer, names: dict[Axis, str]) -> None:
    for a, name in names.items():
        w.levels[-1].bound[a] = name
        w.where[name] = w.depth


def _direct_form(product: Product, buffers: dict[Tensor, Buffer]) -> tuple[Load, int] | None:
    """The left operand as a plain load whose K elements are contiguous, and the distance between
    neighbouring rows (0 if it varies)."""
    left = _plain_load(product)
    if left is None:
        return None
    strides = buffers[left.src].strides
    run = 1
    for a in reversed(product.k_axes):
        if a.extent == 1:
            continue
        if stride_along(left.index, strides, a) != run:
            return None
        run *= a.extent
    last = [a for a in product.m_axes if a.extent > 1][-1:]
    step = stride_along(left.index, strides, last[0]) if last else 0
    return left, step or 0


def _left_operand(
    w: Writer, product: Product, limits: dict, counts: dict[Axis, str]
) -> tuple[str, int]:
    direct = _direct_form(product, w.buffers)
    name = w.fresh("left")
    if direct is not None:
        load, step = direct
        w.open(f"auto {name} = [=](long m)", {})
        _bind_rows(w, _decode(w, "m", product, limits, counts))
        zero = {a: Const(0, DType.I64) for a in product.k_axes}
        index = tuple(simplify(substitute(i, zero)) for i in load.index)
        text, _, _ = w.address(load.src, index, w.buffers[load.src])
        w.line(f"return (const float*){w.buffers[load.src].pointer} + ({text});")
        w.close()
        w.line(";")
        return f"onchip::direct_rows({name})", step
    w.open(
        f"auto {name} = [=, &status](long m0, long mcount, long k0, long kc, float* to, long ld)",
        {},
    )
    row = w.fresh("i")
    step = _open_rows(w, row, "mcount", "m0", product, limits, counts)
    w.line(f"float* const line = to + {row} * ld;")
    run = _copy_run(product, w.buffers)
    if run is not None:
        _copy_rows(w, product, *run)
        w.line(step)
        w.close()
        w.close()
        w.line(";")
        return f"onchip::packed_rows({name})", 0
    w.open(f"if (k0 == 0 && kc == {product.k}l)", {})
    _pack_whole_row(w, product)
    w.close()
    w.open("else", {})
    _pack_part_of_row(w, product)
    w.close()
    w.line(step)
    w.close()
    w.close()
    w.line(";")
    return f"onchip::packed_rows({name})", 0


def _plain_load(product: Product) -> Load | None:
    """The left operand as a float load that never leaves its tensor."""
    left = product.left
    if not isinstance(left, Load) or left.src.dtype is not DType.F32:
        return None
    for i, n in zip(left.index, left.src.shape, strict=True):
        lo, hi = bounds(i)
        if lo < 0 or hi >= n or not is_linear(i):
            return None
    return left


def _copy_run(
    product: Product, buffers: dict[Tensor, Buffer]
) -> tuple[Load, tuple[Axis, ...], int] | None:
    """A plain load whose innermost K axes are contiguous: (load, outer K axes, run in floats)."""
    left = _plain_load(product)
    if left is None:
        return None
    strides = buffers[left.src].strides
    run, outer = 1, list(product.k_axes)
    while outer and stride_along(left.index, strides, outer[-1]) == run:
        run *= outer.pop().extent
    return (left, tuple(outer), run) if run >= 8 else None


def _copy_rows(w: Writer, product: Product, left: Load, outer: tuple[Axis, ...], run: int) -> None:
    """Runs of contiguous floats: the whole row unrolled where K is not cut, else the runs'
    intersections with [k0, k0 + kc)."""
    zero: dict[Axis, Expr] = {a: Const(0, DType.I64) for a in product.k_axes if a not in outer}
    index = tuple(simplify(substitute(i, zero)) for i in left.index)
    w.open(f"if (k0 == 0 && kc == {product.k}l)", {})
    names = {a: w.fresh("k") for a in outer}
    for a in outer:
        w.open(loop_head(names[a], "0", f"{a.extent}l"), {a: names[a]})
    text, _, _ = w.address(left.src, index, w.buffers[left.src])
    base = _flat_index(names, outer) if outer else "0l"
    source = f"{w.buffers[left.src].pointer} + ({text})"
    w.line(f"memcpy(line + ({base}) * {run}l, {source}, {run} * sizeof(float));")
    for _ in outer:
        w.close()
    w.close()
    w.open("else", {})
    k, first, count = w.fresh("k"), w.fresh("first"), w.fresh("count")
    w.open(f"for (long {k} = k0, {count}; {k} < k0 + kc; {k} += {count})", {})
    w.line(f"const int64_t {first} = int32_t({k}) % {run};")
    w.line(f"{count} = onchip::least({run}l - {first}, k0 + kc - {k});")
    _decode_outer(w, outer, f"int32_t({k}) / {run}")
    text, _, _ = w.address(left.src, index, w.buffers[left.src])
    source = f"{w.buffers[left.src].pointer} + ({text}) + {first}"
    w.line(f"memcpy(line + ({k} - k0), {source}, {count} * sizeof(float));")
    w.close()
    w.close()


def _decode_outer(w: Writer, outer: tuple[Axis, ...], rest: str) -> None:
    """Bind the outer K axes from their flat number."""
    for pos, a in enumerate(reversed(outer)):
        name = w.fresh("k")
        if pos == len(outer) - 1:
            w.line(f"const int64_t {name} = {rest};")
        else:
            quotient = w.fresh("q")
            w.line(f"const int64_t {name} = ({rest}) % {a.extent};")
            w.line(f"const int32_t {quotient} = ({rest}) / {a.extent};")
            rest = quotient
        w.levels[-1].bound[a] = name
        w.where[name] = w.depth


def _pack_whole_row(w: Writer, product: Product) -> None:
    names = {a: w.fresh("k") for a in product.k_axes}
    *outer, inner = product.k_axes
    for a in outer:
        w.open(loop_head(names[a], "0", f"{a.extent}l"), {a: names[a]})
    base = _flat_index(names, tuple(outer)) if outer else "0l"
    _run(w, product, inner, names[inner], "0l", f"{inner.extent}l", f"({base}) * {inner.extent}l")
    for _ in outer:
        w.close()


def _pack_part_of_row(w: Writer, product: Product) -> None:
    """Runs along the innermost K axis, from k0 to k0 + kc."""
    *outer, inner = product.k_axes
    k, first, run = w.fresh("k"), w.fresh("first"), w.fresh("run")
    w.open(f"for (long {k} = k0, {run}; {k} < k0 + kc; {k} += {run})", {})
    w.line(f"const int64_t {first} = int32_t({k}) % {inner.extent};")
    w.line(f"{run} = onchip::least({inner.extent}l - {first}, k0 + kc - {k});")
    _decode_outer(w, tuple(outer), f"int32_t({k}) / {inner.extent}")
    _run(w, product, inner, w.fresh("k"), first, f"{first} + {run}", f"{k} - k0 - {first}")
    w.close()


def _run(w: Writer, product: Product, inner: Axis, name: str, lo: str, hi: str, base: str) -> None:
    """One run of the innermost K axis: line[base + k] = left(k), in chunks for the padding row."""
    c, end = w.fresh("c"), w.fresh("end")
    start = axis(inner.extent, "c")
    chunk = 512
    if inner.extent > chunk:
        w.open(loop_head(c, lo, hi, f"{chunk}l"), {start: c})
        w.line(f"const int64_t {end} = onchip::least({c} + {chunk}l, {hi});")
    else:
        w.open("", {start: c})
        w.line(f"const int64_t {c} = {lo}, {end} = {hi};")
    saved = (w.vector_axis, w.vector_chunk, w.chunk_start)
    w.vector_axis, w.vector_chunk, w.chunk_start = inner, chunk, start
    w.open(SIMD + loop_head(name, c, end), {inner: name})
    w.line(f"line[{base} + {name}] = {w.value(product.left)};")
    w.close()
    w.vector_axis, w.vector_chunk, w.chunk_start = saved
    w.close()


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
    step = _open_rows(w, i, "mcount", "m", product, limits, counts)
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
    return name


def is_linear(e: Expr) -> bool:
    return all(isinstance(a, Axis) for a, _ in linear(e).terms)
