"""Reductions in C++: unrolled windows, vectorised folds, and one accumulator per vector lane."""

from __future__ import annotations

from math import prod

from onchip.backends.cpp import spelling
from onchip.backends.cpp.writer import Writer, stride_along
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Reduce,
    children,
    loads,
    mentioned,
    substitute,
)

UNROLL_LIMIT = 64  # window taps written out one by one
SUM_BLOCK = 1024  # floats added in float32 before the sum goes on in float64

# The vector reduction of each monoid; the largest of truth values is their disjunction.
_OPERATOR = {"sum": "+", "prod": "*", "any": "|", "all": "&", "max": "|", "min": "&"}
# Integers of the width of a float's lane.
_LANE_MASK = {DType.F32: "int32_t", DType.F64: "int64_t"}
_AS_CALL = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
_AS_CALL |= {"any": "logical_or", "all": "logical_and"}


def unrolled(e: Reduce) -> Expr | None:
    """A short fold as an expression of its taps (None: too long, or it needs positions)."""
    taps = prod(a.extent for a in e.axes)
    if e.monoid not in _AS_CALL or not 0 < taps <= UNROLL_LIMIT:
        return None
    points: list[dict[Axis, Expr]] = [{}]
    for a in e.axes:
        points = [p | {a: Const(k, DType.I64)} for p in points for k in range(a.extent)]
    out: Expr | None = None
    for p in points:
        tap = substitute(e.body, p)
        out = tap if out is None else Call(_AS_CALL[e.monoid], (out, tap), e.dtype)
    return out


def emit_reduction(w: Writer, e: Reduce) -> str:
    """The value of a fold whose free axes are bound; its loops stand at the level it needs."""
    if prod(a.extent for a in e.axes) <= 8:
        flat = unrolled(e)
        if flat is not None:
            name = w.value(flat)
            w.levels[w.level_of_name(name)].values[e] = name
            return name
    level = w.level_of(e)
    deeper = w.levels[level + 1 :]
    del w.levels[level + 1 :]
    name = _argument(w, e) if e.monoid in ("argmax", "argmin") else _folded(w, e)
    w.where[name] = level
    w.levels[level].values[e] = name
    w.levels.extend(deeper)
    return name


def order_axes(w: Writer, e: Reduce) -> list[Axis]:
    """Outermost first: the innermost is the one along which most loads are contiguous."""

    def score(a: Axis) -> tuple[int, int]:
        strides = [stride_along(ld.index, w.buffers[ld.src].strides, a) for ld in loads(e.body)]
        good = sum(1 for s in strides if s == 1) - sum(1 for s in strides if s not in (0, 1))
        far = max((abs(s) for s in strides if s), default=0)
        return (good, -far)

    return sorted(e.axes, key=score)


# A pragma belongs to the loop's head: hoisted statements must not come between the two.
SIMD = "#pragma omp simd\n"


def loop_head(name: str, lo: str, hi: str, step: str = "1") -> str:
    advance = f"++{name}" if step == "1" else f"{name} += {step}"
    return f"for (int64_t {name} = {lo}; {name} < {hi}; {advance})"


def _folded(w: Writer, e: Reduce) -> str:
    kind = spelling.value_type(e.dtype)
    wide = "double" if e.monoid == "sum" and e.dtype is DType.F32 else kind
    total = w.fresh("total")
    w.line(f"{wide} {total} = {spelling.identity(e.monoid, e.dtype)};")
    extreme = e.monoid in ("max", "min") and e.dtype is not DType.BOOL
    if extreme and e.dtype.is_float:
        w.line(f"{_LANE_MASK[e.dtype]} {total}_nan = 0;")
    *outer, inner = order_axes(w, e)
    for a in outer:
        name = w.fresh("r")
        w.open(loop_head(name, "0", f"{a.extent}l"), {a: name})
    if extreme:
        _fold_extreme(w, e, inner, total)
    else:
        _fold_blocks(w, e, inner, total, kind)
    for _ in outer:
        w.close()
    if extreme and e.dtype.is_float:
        return _named(w, kind, f"{total}_nan ? {kind}(NAN) : {total}")
    return total if wide == kind else _named(w, kind, f"{kind}({total})")


def _named(w: Writer, kind: str, text: str) -> str:
    name = w.fresh()
    w.line(f"const {kind} {name} = {text};")
    return name


def _fold_blocks(w: Writer, e: Reduce, inner: Axis, total: str, kind: str) -> None:
    """Blocks folded by a vector loop, the blocks one after the other in the wider type."""
    part, name = w.fresh("part"), w.fresh("r")
    blocked = inner.extent > SUM_BLOCK
    lo, hi = "0", f"{inner.extent}l"
    if blocked:
        start = w.fresh("b")
        w.open(loop_head(start, "0", hi, f"{SUM_BLOCK}l"), {})
        lo, hi = start, f"onchip::least({start} + {SUM_BLOCK}l, {hi})"
    else:
        w.open("", {})
    w.line(f"{kind} {part} = {spelling.identity(e.monoid, e.dtype)};")
    operator = _OPERATOR[e.monoid]
    w.line(f"const int64_t {part}_end = {hi};")
    simd = f"#pragma omp simd reduction({operator}:{part})\n"
    w.open(simd + loop_head(name, lo, f"{part}_end"), {inner: name})
    value = w.value(e.body)
    w.line(f"{part} = {spelling.combine(e.monoid, part, value, e.dtype)};")
    w.close()
    w.line(f"{total} = {spelling.combine(e.monoid, total, part, e.dtype)};")
    w.close()


def _fold_extreme(w: Writer, e: Reduce, inner: Axis, total: str) -> None:
    """max and min as a vector reduction. One instruction folds numbers and drops NaN, so NaN is
    remembered beside (`nan`, as wide as the lanes; integers have none)."""
    name, nan = w.fresh("r"), f"{total}_nan"
    sign = ">" if e.monoid == "max" else "<"
    simd = f"#pragma omp simd reduction({e.monoid}:{total})"
    if e.body.dtype.is_float:
        simd += f" reduction(|:{nan})"
    w.open(simd + "\n" + loop_head(name, "0", f"{inner.extent}l"), {inner: name})
    value = w.value(e.body)
    w.line(f"{total} = {value} {sign} {total} ? {value} : {total};")
    if e.body.dtype.is_float:
        w.line(f"{nan} |= {value} != {value} ? -1 : 0;")
    w.close()


def _argument(w: Writer, e: Reduce) -> str:
    """Position of the first NaN, else of the first extreme value."""
    (a,) = e.axes
    kind = spelling.value_type(e.body.dtype)
    best, at, name = w.fresh("best"), w.fresh("at"), w.fresh("r")
    w.line(f"{kind} {best} = {spelling.identity(e.monoid, e.body.dtype)};")
    w.line(f"int64_t {at} = -1;")
    w.open(loop_head(name, "0", f"{a.extent}l"), {a: name})
    value = w.value(e.body)
    better = f"{value} {'>' if e.monoid == 'argmax' else '<'} {best}"
    nan = f"({value} != {value} && {best} == {best})" if e.body.dtype.is_float else "false"
    w.open(f"if ({at} < 0 || {better} || {nan})", {})
    guard = f"({best} != {best} && {at} >= 0)" if e.body.dtype.is_float else "false"
    w.line(f"if (!{guard}) {{ {best} = {value}; {at} = {name}; }}")
    w.close()
    w.close()
    return at


def lane_reductions(body: Expr, v: Axis) -> list[Reduce]:
    """Folds whose value differs along the vector axis, innermost first. A fold that changes with
    an outer one's axes is left to that one's loops."""
    out: list[Reduce] = []
    seen: set[Expr] = set()

    def visit(e: Expr, around: frozenset[Axis]) -> None:
        if e in seen:
            return
        seen.add(e)
        inside = around | frozenset(e.axes) if isinstance(e, Reduce) else around
        for c in children(e):
            visit(c, inside)
        if isinstance(e, Reduce):
            axes = mentioned(e)
            if v in axes and not axes & around:
                out.append(e)

    visit(body, frozenset())
    return out
