"""Operands of a matrix product for include/onchip/contract.h.

The left operand's rows are read in place where they are contiguous, and otherwise packed block
by block (padding, strides and fused producers are evaluated there). The right operand, unless it
is constant, is packed into panels by the kernel.
"""

from __future__ import annotations

from onchip.backends.cpp.reduce import SIMD, loop_head
from onchip.backends.cpp.roles import Product
from onchip.backends.cpp.writer import Buffer, Writer, stride_along
from onchip.fusion.nest import Stage
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Const, Expr, Load, Tensor, axis, loads, substitute
from onchip.ir.index import bounds, is_affine, simplify


def packed_right_floats(stage: Stage, product: Product) -> str:
    """Floats of the right operand's panels when the kernel packs them itself."""
    spans = dict(zip(stage.staged.loops, stage.spans, strict=True))
    return f"{product.k}l * onchip::round_up({spans[product.n_axis].extent}l, onchip::NR)"


def pack_right(w: Writer, product: Product, panels: str, n_lo: str, n_hi: str) -> None:
    """panels[(n / NR) * K + k][n % NR] = right(k, n), zeros beyond the last column."""
    p, width = w.fresh("p"), w.fresh("width")
    w.open(loop_head(p, n_lo, n_hi, "onchip::NR"), {})
    w.line(f"const int64_t {width} = onchip::least(onchip::NR, {n_hi} - {p});")
    to = w.fresh("to")
    w.line(f"float* const {to} = {panels} + ({p} - {n_lo}) * {product.k}l;")
    w.line(f"if ({width} < onchip::NR) memset({to}, 0, {product.k}l * onchip::NR * sizeof(float));")
    along_n = _contiguous(w, product.right, product.n_axis)
    names = {a: w.fresh("k") for a in product.k_axes}
    flat = flat_index(names, product.k_axes)
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


def flat_index(names: dict[Axis, str], axes: tuple[Axis, ...]) -> str:
    text = ""
    for a in axes:
        text = f"({text}) * {a.extent}l + {names[a]}" if text else names[a]
    return text or "0l"


def decode_rows(
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


def open_rows(
    w: Writer, row: str, count: str, first: str, product: Product, limits: dict, counts: dict
) -> str:
    """Open the loop over rows first .. first + count. The row axes' values are divided out once
    and then counted on; returns the statement that does so, for the end of the loop's body."""
    names = decode_rows(w, first, product, limits, counts)
    moving = {a: w.fresh("m") for a in names}
    for a, name in moving.items():
        w.line(f"int64_t {name} = {names[a]};")
    w.open(f"for (int64_t {row} = 0; {row} < {count}; ++{row})", {})
    bind_rows(w, moving)
    step = ""
    for a in product.m_axes:  # outermost first: the innermost ends up outside
        name, (lo, hi) = moving[a], limits[a]
        if counts[a] == "1l":
            continue
        step = f"if (++{name} == {hi}) {{ {name} = {lo}; {step} }}" if step else f"++{name};"
    return step


def bind_rows(w: Writer, names: dict[Axis, str]) -> None:
    for a, name in names.items():
        w.levels[-1].bound[a] = name
        w.where[name] = w.depth


def direct_form(product: Product, buffers: dict[Tensor, Buffer]) -> tuple[Load, int] | None:
    """The left operand as a plain load whose K elements are contiguous, and the distance between
    neighbouring rows (0 if it varies)."""
    left = _plain_load(product, buffers)
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


def left_operand(
    w: Writer, product: Product, limits: dict, counts: dict[Axis, str]
) -> tuple[str, int]:
    direct = direct_form(product, w.buffers)
    name = w.fresh("left")
    if direct is not None:
        load, step = direct
        w.open(f"auto {name} = [=](long m)", {})
        bind_rows(w, decode_rows(w, "m", product, limits, counts))
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
    step = open_rows(w, row, "mcount", "m0", product, limits, counts)
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


def _plain_load(product: Product, buffers: dict[Tensor, Buffer]) -> Load | None:
    """The left operand as a float load that never leaves its tensor's memory."""
    left = product.left
    if not isinstance(left, Load) or left.src.dtype is not DType.F32:
        return None
    for i, n in zip(left.index, left.src.shape, strict=True):
        lo, hi = bounds(i)
        outside = lo < 0 or hi >= n
        if (outside and not buffers[left.src].margin) or not is_affine(i):
            return None
    return left


def _copy_run(
    product: Product, buffers: dict[Tensor, Buffer]
) -> tuple[Load, tuple[Axis, ...], int] | None:
    """A plain load whose innermost K axes are contiguous: (load, outer K axes, run in floats)."""
    left = _plain_load(product, buffers)
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
    base = flat_index(names, outer) if outer else "0l"
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
    base = flat_index(names, tuple(outer)) if outer else "0l"
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
