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
from onchip.fusion.contraction import as_contraction
from onchip.fusion.inline import inline
from onchip.fusion.nest import Nest, Span, Stage
from onchip.fusion.refusal import Rule
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Const, Expr, Load, Reduce, Tensor, loads, mentioned, reduces
from onchip.ir.index import structural_key

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
        if st.placement == "global":
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
    if len(set(axes)) != len(axes) or made.staged.store != made.staged.loops:
        return False
    for i, span in zip(ld.index, made.box, strict=True):
        if isinstance(i, Axis):
            if ranges.get(i) != range_of(span):
                return False
        elif not isinstance(i, Const) or range_of(span) != (structural_key(i), 1):
            return False
    return True


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
    """A small window that padding to powers of two would make much larger is a loop."""
    extents = [a.extent for a in r.axes]
    waste = prod(map(power_of_two, extents)) / max(prod(extents), 1)
    if waste <= MOST_WASTE or prod(extents) > LONGEST_WINDOW:
        return False
    own = set(r.axes)
    at = [mentioned(i) for ld in loads(r.body) for i in ld.index]
    return any(a & own and a - own for a in at)


def columns_and_widths(kept: list[Kept]) -> tuple[set[Range], dict[Range, int]]:
    """Ranges that are columns of a product; and the blocks' widths where they are not simply the
    next power of two: rows and columns of a product have a smallest number."""
    columns: set[Range] = set()
    widths: dict[Range, int] = {}
    for k in kept:
        ranges = axis_ranges(k)
        inner = {a for r in reduces(k.body) for a in r.axes}
        for r in reduces(k.body):
            c = as_contraction(r, tuple({**ranges, **dict.fromkeys(inner - set(r.axes))}))
            if c is None:
                continue
            columns |= {ranges[a] for a in c.n_axes if a in ranges and a not in inner}
            for side in (c.n_axes, c.m_axes):
                _widen([ranges[a] for a in side if a in ranges], widths)
    return columns, widths


def _widen(side: list[Range], widths: dict[Range, int]) -> None:
    have = prod(widths.get(x, power_of_two(x[1])) for x in side)
    if side and have < SMALLEST_DOT:
        last = max(side, key=lambda x: x[1])
        widths[last] = widths.get(last, power_of_two(last[1])) * SMALLEST_DOT // have
