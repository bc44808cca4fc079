"""Constant weights in the order in which the packed form multiplies them."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.backends.cuda.problem import Problem
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Tensor, substitute, tensor, where
from onchip.ir.index import simplify


@dataclass(frozen=True, slots=True)
class Order:
    """part: elements of a part; parts: of a row in a slot; run: elements of a row of the filter,
    after `lead` zeros;
    two_rows: pairs of rows that are multiplied part by part, before the others, which are
    multiplied row by row; one_row: all parts are of one row."""

    part: int
    parts: int
    lead: int
    run: int
    two_rows: int
    one_row: bool


def weights(p: Problem, order: Order, tiles: int, chunk: int) -> Tensor:
    """[tiles, features, chunk]: for each element of the sum the weight of its tap and channel; zero
    where a run is filled up."""
    e, own = p.w_element, p.channel_axis
    assert e is not None, "constant weights say where they lie"
    assert own is not None
    across, down = p.lines[0].taps, p.lines[1].taps if len(p.lines) > 1 else 1
    row_width = order.parts * order.part
    both = order.two_rows * 2 * row_width

    def at(row: Expr, place: Expr, feature: Expr) -> Expr:
        """The weight at a place in the run of a row."""
        place = place - order.lead
        bind: dict[Axis, Expr] = {p.batch_axis: Const(0, DType.I64), p.feature_axis: feature}
        bind[own] = place % p.channels
        bind |= dict.fromkeys(p.tap_axes, Const(0, DType.I64))
        bind[p.tap_axes[0]] = place // p.channels
        if len(p.lines) > 1:
            bind[p.tap_axes[1]] = row
        index = tuple(simplify(substitute(i, bind)) for i in e.index)
        inside = Call("logical_and", (_less(place, order.run), _less(row, down)), DType.BOOL)
        if order.lead:
            after = Call("ge", (place, Const(0, DType.I64)), DType.BOOL)
            inside = Call("logical_and", (inside, after), DType.BOOL)
        return where(inside, Load(e.src, index, 0), 0.0)

    def element(tile: Expr, feature: Expr, own_k: Expr) -> Expr:
        k = tile * chunk + own_k
        if order.one_row:
            return at(Const(0, DType.I64), k, feature)
        late = k - both
        single = at(2 * order.two_rows + late // row_width, late % row_width, feature)
        if not both:
            return single
        row = k // (2 * row_width) * 2 + k // order.part % 2
        part = k % (2 * row_width) // (2 * order.part)
        pair = at(row, part * order.part + k % order.part, feature)
        return where(_less(k, both), pair, single)

    assert across * p.channels == order.run
    shape = (tiles, p.features, chunk)
    return tensor(shape, p.w.dtype, element, f"{e.src.name.rsplit('_', 1)[0]}_packed")


def _less(a: Expr, b: int) -> Expr:
    return Call("lt", (a, Const(b, DType.I64)), DType.BOOL)
