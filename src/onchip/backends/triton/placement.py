"""Which stages of a nest stay in registers, and which are evaluated where they are read.

A block in registers cannot be read with shifts. So a tensor stays there only if every reader reads
it in place: each dimension along an axis that covers the same range. Any other (an overlapping or
a disjoint window) is evaluated at the reader's index: over the window's axes too, which for
disjoint windows computes each element once, its rows ordered so that a window is consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onchip.backends.triton.writer import CannotExpress, Range, power_of_two
from onchip.fusion.contraction import Contraction, as_contraction
from onchip.fusion.inline import inline
from onchip.fusion.nest import Nest, Span, Stage
from onchip.fusion.refusal import Rule
from onchip.fusion.residues import selected
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Const, Expr, Load, Reduce, Tensor, loads, mentioned, reduces
from onchip.ir.index import linear, structural_key

SMALLEST_DOT = 16  # rows, columns and K of tl.dot
LONGEST_WINDOW = 64
MOST_WASTE = 1.5


@dataclass(frozen=True, eq=False, slots=True)
class Kept:
    """A stage that is computed as one block, its body reading only memory and kept stages."""

    stage: Stage
    body: Expr


def place(nest: Nest) -> list[Kept]:
    """The kept stages in order; raises CannotExpress."""
    inlined: set[Tensor] = set()
    on_chip = {st.tensor: st for st in nest.stages}
    while True:
        bodies: dict[Tensor, Expr] = {}
        kept = []
        for st in nest.stages:
            body = inline(st.staged.body, bodies)
            if st.tensor in inlined:
                bodies[st.tensor] = body
            else:
                kept.append(Kept(st, body))
        moved = next((t for k in kept for t in _read_elsewhere(k, on_chip)), None)
        if moved is None:
            return kept
        st = on_chip[moved]
        if st.staged.store != st.staged.loops or st.staged.loops != st.tensor.axes:
            text = "a tensor with split axes is read with shifts"
            raise CannotExpress(Rule.UNSUPPORTED_EXPRESSION, moved.name, text)
        if st.placement != "scratch":
            text = "an output is read with shifts by the same kernel"
            raise CannotExpress(Rule.UNSUPPORTED_EXPRESSION, moved.name, text)
        inlined.add(moved)


def _read_elsewhere(k: Kept, on_chip: dict[Tensor, Stage]) -> list[Tensor]:
    """Tensors of the kernel that a stage does not read in place."""
    ranges = axis_ranges(k)
    return [
        ld.src
        for ld in loads(k.body)
        if ld.src in on_chip and not _in_place(ld, on_chip[ld.src], ranges)
    ]


def _in_place(ld: Load, made: Stage, ranges: dict[Axis, Range]) -> bool:
    axes = [i for i in ld.index if isinstance(i, Axis)]
    if len(set(axes)) != len(axes) or not _over_its_loops(made):
        return False
    for i, span in zip(ld.index, made.box, strict=True):
        if isinstance(i, Axis):
            if ranges.get(i) != range_of(span):
                return False
        elif not isinstance(i, Const) or range_of(span) != (structural_key(i), 1):
            return False
    return True


def _over_its_loops(made: Stage) -> bool:
    """Each dimension is a loop of its own, in whatever order."""
    loops = made.staged.loops
    return len(made.staged.store) == len(loops) and all(i in loops for i in made.staged.store)


def range_of(span: Span) -> Range:
    return structural_key(span.origin), span.extent


def whole_range(a: Axis) -> Range:
    return structural_key(Const(0, DType.I64)), a.extent


def axis_ranges(k: Kept) -> dict[Axis, Range]:
    """What the axes that are dimensions of a block cover: loops, and reductions over whole axes."""
    out = {a: range_of(s) for a, s in zip(k.stage.staged.loops, k.stage.spans, strict=True)}
    for r in reduces(k.body):
        if not is_serial(r):
            out |= {a: whole_range(a) for a in r.axes}
    return out


def is_serial(r: Reduce) -> bool:
    """A small window is a loop if padding to powers of two would make it much larger, or if windows
    overlap: as dimensions they would be loaded across the threads, once for each window."""
    extents = [a.extent for a in r.axes]
    if prod(extents) > LONGEST_WINDOW:
        return False
    own = set(r.axes)
    inner = {a for x in reduces(r.body) for a in x.axes}
    at = [i for ld in loads(r.body) for i in ld.index if mentioned(i) & own and mentioned(i) - own]
    waste = prod(map(power_of_two, extents)) / max(prod(extents), 1)
    return bool(at) and (waste > MOST_WASTE or any(_overlaps(i, own, inner) for i in at))


def laid_along(
    kept: list[Kept], strides: dict[Tensor, tuple[int, ...]], free: frozenset[Tensor]
) -> dict[Tensor, tuple[int, ...]]:
    """Strides of the constants that a window's loop reads (a depthwise convolution's weights), so
    that what one step reads lies side by side: the window's axes slowest."""
    out: dict[Tensor, tuple[int, ...]] = {}
    for r in (r for k in kept for r in reduces(k.body) if is_serial(r)):
        for ld in (ld for ld in loads(r.body) if ld.src in free and ld.pad is None):
            axes = [i if isinstance(i, Axis) else None for i in ld.index]
            order = sorted(range(len(axes)), key=lambda d: -strides[ld.src][d])
            window = [d for d in order if axes[d] in r.axes]
            rest = [d for d in order if axes[d] not in r.axes]
            plain = all(a or n == 1 for a, n in zip(axes, ld.src.shape, strict=True))
            wanted = _strides_of([*window, *rest], ld.src.shape)
            if window and rest and plain and wanted != strides[ld.src]:
                out[ld.src] = wanted
    return out


def _strides_of(order: list[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of an array whose dimensions lie in memory in this order, the slowest first."""
    step, out = 1, [0] * len(shape)
    for d in reversed(order):
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)


def _overlaps(i: Expr, own: set[Axis], inner: set[Axis]) -> bool:
    """Neighbouring windows share elements along a dimension; inner: axes of folds in the window's
    elements, which are no neighbours of it."""
    terms = linear(i).terms
    width = 1 + sum(abs(c) * (a.extent - 1) for a, c in terms if isinstance(a, Axis) and a in own)
    steps = [abs(c) for a, c in terms if a not in own and a not in inner]
    return bool(steps) and min(steps) < width


def products(nest: Nest) -> list[tuple[Stage, Contraction]]:
    """The matrix products of a nest, with the stages that hold them: one, or several of which
    each program selects one."""
    out: list[tuple[Stage, Contraction]] = []
    for st in nest.stages:
        found = [as_contraction(r, st.staged.loops, ended=True) for r in reduces(st.staged.body)]
        out += [(st, c) for c in found if c is not None and None not in found]
    return out


def sides(nest: Nest) -> dict[Axis, str]:
    """What the tile's origin along an axis of the root is to a product of the nest: "rows",
    "columns" or "batch"."""
    out: dict[Axis, str] = {}
    for st, c in products(nest):
        spans = dict(zip(st.staged.loops, st.spans, strict=True))
        for side, axes in (("rows", c.m_axes), ("columns", c.n_axes), ("batch", c.b_axes)):
            for atom in (x for a in axes for x, _ in linear(spans[a].origin).terms):
                if atom in nest.tile_axes:
                    out[atom] = side  # type: ignore[index]
        for atom in (x for a in selected(st.staged.body) for x, _ in linear(spans[a].origin).terms):
            out[atom] = "batch"  # type: ignore[index]
    return out


def contractions(kept: list[Kept]) -> list[tuple[Kept, Contraction]]:
    """The products of the kept stages, over their loops and the windows around them."""
    out = []
    for k in kept:
        inner = {a for r in reduces(k.body) for a in r.axes}
        ranges = axis_ranges(k)
        for r in reduces(k.body):
            free = tuple({**ranges, **dict.fromkeys(inner - set(r.axes))})
            c = as_contraction(r, free, ended=True)
            if c is not None:
                out.append((k, c))
    return out


def columns_and_widths(kept: list[Kept], lanes: int) -> tuple[set[Range], dict[Range, int]]:
    """Ranges that are columns of a product; and the blocks' widths where they are not simply the
    next power of two: rows and columns of a product have a smallest number."""
    columns: set[Range] = set()
    widths: dict[Range, int] = {}
    for k, c in contractions(kept):
        ranges = axis_ranges(k)
        inner = {a for r in reduces(k.body) for a in r.axes}
        columns |= {ranges[a] for a in c.n_axes if a in ranges and a not in inner}
        for side in (c.n_axes, c.m_axes):
            if side is c.n_axes or lanes == 1:
                _widen([ranges[a] for a in side if a in ranges], widths)
    return columns, widths


def _widen(side: list[Range], widths: dict[Range, int]) -> None:
    have = prod(widths.get(x, power_of_two(x[1])) for x in side)
    if side and have < SMALLEST_DOT:
        last = max(side, key=lambda x: x[1])
        widths[last] = widths.get(last, power_of_two(last[1])) * SMALLEST_DOT // have
