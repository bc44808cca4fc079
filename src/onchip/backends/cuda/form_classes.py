"""Classes of a transposed convolution with a stride: its results' positions modulo the stride. What
tells the classes of a line apart is where their input starts, and how many taps they have."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onchip.backends.cuda.form_axes import Strides, Unfit, address, over
from onchip.backends.cuda.form_operands import Draft, Operand
from onchip.backends.cuda.form_results import Product
from onchip.backends.cuda.problem import Problem
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Const, Expr, Load, mentioned, substitute
from onchip.ir.index import Linear, linear, simplify

Shifts = dict[Axis, tuple[int, ...]]  # elements, for each value of a class' axis


def from_the_first(x: Operand, classes: Collection[Axis], subject: str) -> tuple[Operand, Shifts]:
    """x as the class reads it whose input starts first, and how much further on that of each class
    starts. Raises Unfit."""
    name = x.load.src.name
    if any(mentioned(j) & set(classes) for _, j, _ in x.tests):
        raise Unfit(subject, f"{name} is padded in another shape than it is read in")
    shifts: Shifts = {c: (0,) * c.extent for c in classes}
    index: list[Expr] = []
    for i in x.load.index:
        own = [c for c in classes if c in mentioned(i)]
        if not own:
            index.append(i)
            continue
        each = [over(i, {own[0]: Const(n, DType.I64)}) for n in range(own[0].extent)]
        starts = [linear(e).constant for e in each]
        if len(own) > 1 or any(linear(e - each[0]).terms for e in each) or any(shifts[own[0]]):
            raise Unfit(subject, f"{name} is read in another way by each class of positions")
        first = min(starts)
        shifts[own[0]] = tuple(n - first for n in starts)
        index.append(each[starts.index(first)])
    return replace(x, load=Load(x.load.src, tuple(index), x.load.pad)), shifts


def of_line(d: Draft, product: Product, shifts: Shifts) -> tuple[tuple[int, ...], ...]:
    """Line.shifts, Line.skips and Line.lengths."""
    own = product.classes.get(d.position) if d.position else None
    if own is None:
        return (), (), ()
    assert d.position is not None
    left = product.ends[d.position] - d.positions * own.extent  # 0, or none of the last classes
    lengths = tuple(d.positions - (n >= own.extent + left) for n in range(own.extent)) * (left < 0)
    end = product.contraction.ends.get(d.tap) if d.tap else None
    if end is None:
        return shifts[own], (0,) * own.extent, lengths
    counts = [linear(over(end, {own: Const(n, DType.I64)})) for n in range(own.extent)]
    if any(n.terms for n in counts) or not d.flipped:
        raise Unfit(product.maker.name, "taps of a line end where other lines' classes say")
    if any(n.constant < 1 for n in counts):
        raise Unfit(product.maker.name, "a transposed convolution with positions that have no taps")
    return shifts[own], tuple(d.taps - n.constant for n in counts), lengths


def forms_by_class(p: Problem, index: Sequence[Expr], strides: Strides) -> list[Linear]:
    """Where elements of a tensor lie: of each class, over the other axes."""
    if p.classes == 1:
        return [address(index, strides)]
    each = ({p.batch_axis: Const(n, DType.I64)} for n in range(p.classes))
    return [address([simplify(substitute(i, at)) for i in index], strides) for at in each]


def check(product: Product, lines: Collection[Draft]) -> None:
    """Raises Unfit if a class, or an end of taps, belongs to no line of its own."""
    found = {d.position for d in lines}
    if not product.classes.keys() <= found:
        raise Unfit(product.maker.name, "a transposed convolution of one position a class")
    ended: Mapping[Axis, Expr] = product.contraction.ends
    if not ended.keys() <= {d.tap for d in lines if d.position in product.classes}:
        raise Unfit(product.maker.name, "a sum ends early along an axis that slides along no line")
