"""The one product of a region, and its results as expressions of the product's elements.

The product is taken out of the expressions as a tensor of its own, over the axes that its operands
mention. What lies between it and the results is put into the results' expressions; each result then
reads one element of the product, or folds a window of them, or all along some axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onchip.backends.cuda.form_axes import Interned, Unfit, apart, conditions, inverse, over
from onchip.backends.cuda.problem import ACC, Total
from onchip.fusion.contraction import Contraction, as_contraction
from onchip.fusion.inline import inline, without_unit_axes
from onchip.fusion.region import Region
from onchip.fusion.residues import by_class, places_of, reading_classes
from onchip.fusion.staging import (
    Staged,
    labelled,
    split_own_axes,
    split_reduction_axes,
    unsupported,
)
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    Var,
    axis,
    given,
    loads,
    mentioned,
    reduces,
    rewrite,
)
from onchip.ir.index import bounds, linear, simplify

NEUTRAL = {"max": -math.inf, "min": math.inf, "sum": 0.0}


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """tensor: the sums, read by the bodies of `results`; axes: its dimensions, those of more than
    one element that `contraction` is over; maker: the tensor whose expression held it; classes: of
    axes whose neighbours in a result are a step apart, the axis of what lies between; ends: of
    these axes, how many elements the maker has along both. The last ones of an axis are beyond that
    for some classes, where the step does not divide it."""

    tensor: Tensor
    axes: tuple[Axis, ...]
    contraction: Contraction
    maker: Tensor
    bodies: Mapping[Tensor, Expr]
    classes: Mapping[Axis, Axis] = field(default_factory=dict)
    ends: Mapping[Axis, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    """Cell q of `cells` folds the positions hop * q + i - lead, i < window, that exist."""

    cells: int
    window: int
    hop: int
    lead: int


@dataclass(frozen=True, eq=False, slots=True)
class Output:
    """A result: its element at `index` is `value` (of ACC). Both are over the product's axes; if
    it is pooled, over those of the cells in place of those that windows lie along; if it is
    `final`, of totals and over the axes that they leave."""

    tensor: Tensor
    index: tuple[Expr, ...]
    value: Expr
    pooled: bool
    final: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Outputs:
    """windows: of the product's axes that are folded; cells: the axis in place of each. totals:
    folds over all of the product's axes in `summed`."""

    outputs: tuple[Output, ...]
    fold: str
    before: Expr
    windows: Mapping[Axis, Window]
    cells: Mapping[Axis, Axis]
    totals: tuple[Total, ...]
    summed: frozenset[Axis]


def find_product(region: Region) -> Product:
    """The product. Raises Unfit where there is none, or another one."""
    operators = {t: n.op for n in region.nodes for t in n.results}
    inlined: dict[Tensor, Expr] = {}
    memo: dict[Expr, Expr] = {}
    found: tuple[Tensor, tuple[Axis, ...], Contraction, Tensor] | None = None
    for t in region.tensors:
        reason = unsupported(t)
        if reason:
            raise Unfit(t.name, reason)
        assert t.body is not None
        body = split_reduction_axes(without_unit_axes(inline(t.body, inlined, memo)))
        body = labelled(body, operators.get(t, "") or t.name.rpartition("_")[0])
        sums = [r for r in reduces(body) if as_contraction(r, t.axes) is not None]
        if len(sums) > 1 or (sums and found):
            raise Unfit(t.name, "the region holds more than one product")
        if sums:
            s = split_own_axes(Staged(t, body, False, t.axes, t.axes))
            (r,) = (r for r in reduces(s.body) if as_contraction(r, s.loops) is not None)
            contraction = as_contraction(r, s.loops)
            assert contraction is not None
            axes = tuple(a for a in s.loops if a.extent > 1)
            tensor = given([a.extent for a in axes], DType.F32, "product")
            element = Load(tensor, axes)
            body = rewrite(s.body, lambda x, r=r, element=element: element if x is r else None)
            places = inverse(s.store, t.axes, t.shape)
            assert places is not None, f"{t} is not over its own axes"
            body = over(body, places)
            found = (tensor, axes, contraction, t)
        inlined[t] = body
    if found is None:
        raise Unfit(region.name, "it has no sum of products with axes of its own on both sides")
    return Product(*found, inlined)


def find_classes(region: Region) -> Product | None:
    """The product of a transposed convolution with a stride, whose positions modulo the stride are
    classes: axes of the product. None if there is none. Raises Unfit."""
    inlined: dict[Tensor, Expr] = {}
    memo: dict[Expr, Expr] = {}
    found: Product | None = None
    for t in region.tensors:
        if unsupported(t):
            return None
        assert t.body is not None
        body = split_reduction_axes(without_unit_axes(inline(t.body, inlined, memo)))
        whole = Staged(t, body, False, t.axes, t.axes)
        places = places_of(whole) if reduces(body) and not found else {}
        if places:
            s, classes = by_class(whole, places)
            made = [as_contraction(r, s.loops, ended=True) for r in reduces(s.body)]
            if len(made) != 1 or made[0] is None:
                raise Unfit(t.name, "positions modulo its stride differ in more than their taps")
            if not classes.keys().isdisjoint(made[0].b_axes):
                raise Unfit(t.name, "groups of a transposed convolution with a stride")
            axes = tuple(a for a in s.loops if a.extent > 1)
            tensor = given([a.extent for a in axes], DType.F32, "product")
            r, element = made[0].reduce, Load(tensor, axes)
            body = rewrite(s.body, lambda x, r=r, element=element: element if x is r else None)
            own = inverse(s.store, t.axes, [bounds(i)[1] + 1 for i in s.store])
            assert own is not None, f"{t} is not over its own axes"
            body = over(body, own)
            ends = dict(zip(classes, (a.extent for a in places), strict=True))
            found = Product(tensor, axes, made[0], t, inlined, classes, ends)
        inlined[t] = body
    return found


def outputs_of(region: Region, product: Product, totals: bool = False) -> Outputs:
    """The results, in ACC. totals: folds are over all positions along some axes, else over windows
    that a tile has. Raises Unfit."""
    reader = _Totals(product) if totals else _Reader(product)
    made = [reader.output(t) for t in region.outputs]
    return Outputs(
        tuple(made), reader.fold, reader.before, reader.windows, reader.cells,
        tuple(reader.totals.values()), reader.summed,
    )  # fmt: skip


class _Reader:
    """Rewrites results; what they fold must be alike."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.interned = Interned()
        self.fold, self.before = "", ACC
        self.windows: dict[Axis, Window] = {}
        self.cells: dict[Axis, Axis] = {}
        self.totals: dict[object, Total] = {}
        self.summed: frozenset[Axis] = frozenset()

    def output(self, t: Tensor) -> Output:
        s = reading_classes(split_own_axes(Staged(t, self.product.bodies[t], True, t.axes, t.axes)))
        body = over(s.body, {})
        folds = [r for r in reduces(body) if self._elements(r)]
        if len(folds) < len(reduces(body)):
            raise Unfit(t.name, "it folds values that are not of the product")
        alone = self._elements(rewrite(body, lambda x: ACC if x in folds else None))
        if folds and alone:
            raise Unfit(t.name, "it reads the product both element by element and folded")
        if not folds and not alone:
            raise Unfit(t.name, "it does not depend on the product")
        if folds:
            value = rewrite(body, lambda x: self._folds_to(t, x) if x in folds else None)
            places, *_ = [self._places(t, r, s.loops) for r in folds]  # they must be alike
        else:
            index = self._common(t, alone)
            places = inverse(index, self.product.axes, self.product.tensor.shape)
            value = rewrite(body, lambda x: ACC if x in alone else None)
        if places is None:
            raise Unfit(t.name, "it does not hold each element of the product once")
        left = [a for a in s.loops if a.extent > 1 and a not in places]
        if left:
            raise Unfit(
                t.name, f"it repeats the product's elements along an axis of {left[0].extent}"
            )
        stored = tuple(simplify(over(i, places)) for i in s.store)
        beyond = max((c.extent for c in self.product.classes.values()), default=1) - 1
        for i, n in zip(stored, t.shape, strict=True):
            low, high = bounds(i)
            assert 0 <= low <= high < n + beyond, f"{t} is stored outside of its {n} elements"
        return Output(t, stored, self.interned(over(value, places)), *self._kind(bool(folds)))

    def _kind(self, folds: bool) -> tuple[bool, bool]:
        """(pooled, final) of a result."""
        return folds, False

    def _folds_to(self, t: Tensor, r: Expr) -> Var:
        """What stands for a fold in a result."""
        return ACC

    def _elements(self, e: Expr) -> list[Load]:
        return [ld for ld in loads(e) if ld.src is self.product.tensor]

    def _common(self, t: Tensor, elements: Sequence[Load]) -> tuple[Expr, ...]:
        """The one index of all loads of the product."""
        first, *rest = elements
        for other in rest:
            if any(apart(i, j) != 0 for i, j in zip(first.index, other.index, strict=True)):
                raise Unfit(t.name, "it reads several elements of the product")
        return first.index

    def _places(self, t: Tensor, r: Reduce, loops: tuple[Axis, ...]) -> dict[Axis, Expr] | None:
        """The result's axes in those of cells, or of the product where no window lies."""
        if r.monoid not in NEUTRAL:
            raise Unfit(t.name, f"a fold by {r.monoid} behind the product")
        if reduces(r.body):
            raise Unfit(t.name, "it folds the product twice")
        body, tests = self._unpadded(t, r)
        index = self._common(t, self._elements(body))
        windows: dict[Axis, Window] = {}
        before: dict[Axis, Expr] = {}  # axes of result and window, in the product's
        after: dict[Axis, Expr] = {}  # axes of the result, in those of cells
        plain: list[tuple[Expr, Axis]] = []
        for i, a in zip(index, self.product.axes, strict=True):
            form = linear(i)
            own = [(x, c) for x, c in form.terms if x in r.axes]
            if not own:
                plain.append((i, a))
                continue
            rest = [(x, c) for x, c in form.terms if x not in r.axes]
            if len(own) > 1 or len(rest) > 1 or own[0][1] != 1 or any(
                c < 1 or x not in loops for x, c in rest
            ):  # fmt: skip
                raise Unfit(t.name, "a window's elements are not neighbours along one axis")
            (w, _), (q, hop) = own[0], (rest or [(None, 0)])[0]
            assert isinstance(w, Axis)
            assert isinstance(q, Axis | None)
            if w in before or q in before:
                raise Unfit(t.name, "a window lies along a diagonal")
            cells = q.extent if q else 1
            windows[a] = Window(cells, w.extent, hop or w.extent, -form.constant)
            start = q * hop + form.constant if q else Const(form.constant, DType.I64)
            before[w] = a - start
            if q:
                before[q] = q
                after[q] = self.cells.setdefault(a, axis(cells, "cell"))
            self._covered(t, i, a, tests)
        if set(r.axes) - before.keys():
            raise Unfit(t.name, "a fold over an axis that the product does not have")
        if tests:
            raise Unfit(
                t.name, "a fold leaves out other elements than those outside of the product"
            )
        known = inverse([i for i, _ in plain], [a for _, a in plain], [a.extent for _, a in plain])
        if known is None:
            return None
        value = rewrite(
            body, lambda x: ACC if isinstance(x, Load) and x.src is self.product.tensor else None
        )
        value = self.interned(over(value, before | known))
        if mentioned(value) - set(self.product.axes):
            raise Unfit(t.name, "what a window folds depends on the window")
        if not self.fold:
            self.fold, self.before, self.windows = r.monoid, value, windows
        if (r.monoid, value, windows) != (self.fold, self.before, self.windows):
            raise Unfit(t.name, "two folds of the product differ")
        return known | after

    def _unpadded(self, t: Tensor, r: Reduce) -> tuple[Expr, list[tuple[str, Expr, int]]]:
        """What is folded, without the condition that it exists; and the terms of that."""
        body, tests = r.body, []
        while True:
            match body:
                case Call(fn="where", args=(condition, value, Const(value=pad))):
                    found = conditions(condition)
                    if found is None or not self._elements(value):
                        return body, tests
                    if pad != NEUTRAL[r.monoid]:
                        raise Unfit(t.name, f"{r.monoid} over windows padded with {pad}")
                    body, tests = value, tests + found
                case _:
                    return body, tests

    def _covered(self, t: Tensor, i: Expr, a: Axis, tests: list[tuple[str, Expr, int]]) -> None:
        """Check that indices outside of the product are left out, and strike out the terms of the
        condition that say so."""
        low, high = bounds(i)
        for fn, limit, outside in (("ge", 0, low < 0), ("lt", a.extent, high >= a.extent)):
            fitting = [x for x in tests if (x[0], x[2]) == (fn, limit) and apart(x[1], i) == 0]
            if outside and not fitting:
                raise Unfit(
                    t.name, "a window reads outside of the product, or weights its elements"
                )
            for x in fitting:
                tests.remove(x)


class Partial(Unfit):
    """A fold is not over all positions along some axes: a window, if anything."""


class _Totals(_Reader):
    """Folds over all positions along some axes of the product, the same ones for all."""

    def _kind(self, folds: bool) -> tuple[bool, bool]:
        return False, folds

    def _folds_to(self, t: Tensor, r: Expr) -> Var:
        assert isinstance(r, Reduce)
        value, index = self._value(t, r)
        pairs = zip(index, self.product.axes, strict=True)
        own = {a: i for i, a in pairs if mentioned(i) & set(r.axes)}
        summed = frozenset(own)
        if self.totals and summed != self.summed:
            raise Unfit(t.name, "folds of the product are over other axes than another's")
        self.summed = summed
        inside = inverse(list(own.values()), list(own), [a.extent for a in own])
        if inside is None or set(r.axes) != inside.keys():
            raise Partial(t.name, "a fold of some of the positions along an axis")
        kept = self._kept(index)
        if kept is None:
            raise Unfit(t.name, "it does not hold each element of the product once")
        value = self.interned(over(value, inside | kept))
        if mentioned(value) - set(self.product.axes):
            raise Unfit(t.name, "what is folded depends on more than the product's axes")
        if value.dtype is not DType.F32:
            raise Unfit(t.name, f"a fold of {value.dtype.label} values behind the product")
        key = (r.monoid, value)
        if key not in self.totals:
            var = Var(f"total{len(self.totals)}", DType.F32)
            self.totals[key] = Total(var, r.monoid, value)
        return self.totals[key].var

    def _value(self, t: Tensor, r: Reduce) -> tuple[Expr, tuple[Expr, ...]]:
        """What is folded, in ACC, and the index of the product's element."""
        if r.monoid not in NEUTRAL:
            raise Unfit(t.name, f"a fold by {r.monoid} behind the product")
        if reduces(r.body):
            raise Unfit(t.name, "it folds the product twice")
        elements = self._elements(r.body)
        return rewrite(r.body, lambda x: ACC if x in elements else None), self._common(t, elements)

    def _kept(self, index: Sequence[Expr]) -> dict[Axis, Expr] | None:
        """The result's axes in those of the product that are not summed."""
        pairs = zip(index, self.product.axes, strict=True)
        plain = [(i, a) for i, a in pairs if a not in self.summed]
        return inverse([i for i, _ in plain], [a for _, a in plain], [a.extent for _, a in plain])

    def _places(self, t: Tensor, r: Reduce, loops: tuple[Axis, ...]) -> dict[Axis, Expr] | None:
        return self._kept(self._value(t, r)[1])
