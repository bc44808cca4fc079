"""A region as one problem of the tensor-core engine: what is summed, and its epilogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from onchip.backends.cuda.form_axes import (
    Interned,
    Strides,
    Unfit,
    address,
    affine,
    merged,
    over,
)
from onchip.backends.cuda.form_classes import check, forms_by_class, from_the_first, of_line
from onchip.backends.cuda.form_operands import (
    KINDS,
    Draft,
    Layout,
    joined,
    layout,
    operands,
    widened,
)
from onchip.backends.cuda.form_results import (
    Output,
    Outputs,
    Partial,
    Product,
    Window,
    find_classes,
    find_product,
    outputs_of,
)
from onchip.backends.cuda.problem import Line, Problem, Read, Result
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Expr, Load, Tensor, axis, loads, mentioned, walk
from onchip.ir.index import bounds

MOST_WINDOW = 256  # positions of a window that a tile has; of more, tiles have parts
MOST_DIMENSIONS = 5  # of a tensor map, channels and batch included
ALIGNMENT = 16  # bytes: of what the copy engine steps over
MOST_CLASSES = 8  # that each have tensor maps of their own
STORED = (DType.BF16, DType.F16, DType.F32)


def problem_of(
    region: Region,
    strides: Mapping[Tensor, Strides],
    constants: frozenset[Tensor],
    precision: str = "tf32",
) -> Problem | Refusal:
    """The region as one contraction with an epilogue, or why it is none.

    strides: elements, of every tensor that the region reads or returns; constants: what is, or
    depends on, parameters only (weights among them are laid out at load); precision: of float32
    products, "tf32" or anything more exact (three TF32 products)
    """
    how = (region, strides, constants, precision)
    try:
        return _problem(find_product(region), *how)
    except Unfit as unfit:
        try:
            product = find_classes(region)
            return _problem(product, *how) if product else unfit.refusal
        except Unfit as other:
            return other.refusal


def _problem(
    product: Product, region: Region, strides: Mapping[Tensor, Strides],
    constants: frozenset[Tensor], precision: str,
) -> Problem:  # fmt: skip
    outputs = _outputs(region, product)
    try:
        return _Form(strides, constants, product, outputs, True).problem(precision)
    except Unfit:  # windows side by side as lines of their own may be too many
        return _Form(strides, constants, product, outputs, False).problem(precision)


def _outputs(region: Region, product: Product) -> Outputs:
    """The results; folds of more positions than a tile has, or of several values, are totals."""
    try:
        outputs, unfit = outputs_of(region, product), None
        if prod(w.window for w in outputs.windows.values()) <= MOST_WINDOW:
            return outputs
    except Unfit as error:
        outputs, unfit = None, error
    try:
        return outputs_of(region, product, totals=True)
    except Unfit as error:
        if outputs is not None:
            return outputs
        raise (unfit if unfit and isinstance(error, Partial) else error) from None


class _Form:
    """The parts of a problem, from a product and its results."""

    def __init__(
        self, strides: Mapping[Tensor, Strides], constants: frozenset[Tensor], product: Product,
        outputs: Outputs, split: bool,
    ) -> None:  # fmt: skip
        self.strides, self.product, self.found = strides, product, outputs
        self.subject = product.maker.name
        self.back = {cell: a for a, cell in self.found.cells.items()}
        first = self.found.outputs[0]
        self.stored = self._steps(first.index, strides[first.tensor]) or {}
        near = min(self.stored, key=self.stored.__getitem__, default=None)
        x, self.w = operands(product.contraction, constants, near, self.subject)
        self.w_constant = self.w.load.src in constants
        self.classes = frozenset(product.classes.values())
        if self.classes and not self.w_constant:
            raise Unfit(self.subject, f"{self.w.load.src.name} is not constant, and has classes")
        self.x, self.shifts = from_the_first(x, self.classes, self.subject)
        self.positions = [a for a in product.axes if a in self.x.axes]
        if not outputs.windows.keys().isdisjoint(product.classes):
            raise Unfit(self.subject, "a window along positions that are a stride apart")
        x_strides, w_strides = strides[self.x.load.src], strides[self.w.load.src]
        read = layout(self.x, x_strides, product.contraction, self.subject, split)
        self.read: Layout = widened(read, self.w, w_strides, self.w_constant)
        self.w_at = address(tuple(over(i, {}) for i in self.w.load.index), w_strides)

    def _steps(self, index: Sequence[Expr], strides: Strides) -> dict[Axis, int] | None:
        """Elements of memory between two values of each axis of the product."""
        form = address(index, strides)
        if not affine(form):
            return None
        return {self.back.get(a, a): c for a, c in form.terms}  # type: ignore[arg-type]

    def problem(self, precision: str) -> Problem:
        dtype = self.x.load.src.dtype
        kind = KINDS.get(dtype) or ("tf32" if precision == "tf32" else "tf32x3")
        features, w_step, inner = self._features()
        apart = {*self.found.windows, *self.product.classes}
        groups = joined(self.read.lines, apart, self._stays(features))
        batches, x_batch, w_batch = self._batches(groups)
        lines = tuple(map(self._line, groups)) or (Line(1, ALIGNMENT // dtype.size, 1, cells=1),)
        channels = prod(a.extent for a in self.read.channels)
        # rows of few channels are read by threads, element by element if need be
        near = lines[0].step == channels and not batches and self.w_constant
        if not near or channels * dtype.size % ALIGNMENT == 0:
            several = len(batches) > 0 and not self.classes
            self._check_copies(lines, several, x_batch, w_batch, dtype.size)
        feature = axis(prod(a.extent for a in features), "feature")
        batch = axis(prod(a.extent for a in batches), "batch")
        at = tuple(axis(line.positions, "position") for line in lines)
        cell = tuple(axis(line.cells, "cell") for line in lines)
        tap = tuple(axis(line.taps, "tap") for line in lines)
        channel = axis(channels, "channel")
        common = merged(features, feature) | merged(batches, batch)
        places, cells = dict(common), dict(common)
        sums = merged(self.read.channels, channel)
        self._check_folds(lines)
        for group, p, q, t in zip(groups, at, cell, tap, strict=bool(groups)):
            along = [d.position for d in group if d.position]
            places |= merged(along, p)
            if len(group) > 1 or not along or along[0] not in self.found.windows:
                cells |= merged(along, q)
            elif along[0] in self.found.cells:
                cells[self.found.cells[along[0]]] = q
            if group[0].tap:
                sums[group[0].tap] = t.extent - 1 - t if group[0].flipped else t
        interned = Interned()
        before = interned(over(self.found.before, places))
        stored = [
            (t.final, self._result(t, cells if t.pooled else places, interned))
            for t in self.found.outputs
        ]
        totals = tuple(replace(t, value=interned(over(t.value, places))) for t in self.found.totals)
        element = over(self.w.load, common | sums)
        assert isinstance(element, Load)
        problem = Problem(
            kind, self.x.load.src, self.w.load.src, channels, lines, feature.extent, batch.extent,
            self.read.offset, x_batch, self.w_constant, w_step, w_batch, feature, batch, at, cell,
            before, self.found.fold, tuple(r for final, r in stored if not final), (), element,
            tap, channel, 0 if self.w_constant else self.w_at.constant, inner,
            totals, tuple(r for final, r in stored if final),
        )  # fmt: skip
        return self._with_tiles(problem)

    def _result(self, out: Output, places: Mapping[Axis, Expr], interned: Interned) -> Result:
        t = out.tensor
        if t.dtype not in STORED:
            raise Unfit(t.name, f"{t.dtype.label} results are not stored")
        if any(x.dtype is DType.F64 for x in walk(out.value)):
            raise Unfit(t.name, "float64 arithmetic")
        index = tuple(over(i, places) for i in out.index)
        return Result(t, index, interned(over(out.value, places)), out.pooled, False)

    # ---- features and batches ------------------------------------------------------------------

    def _features(self) -> tuple[list[Axis], int, bool]:
        """Axes of the features, the slowest first; elements of w between two (0: laid out), or
        between two channels, if (the last) features lie innermost."""
        own = [a for a in self.product.axes if a in self.w.axes and a not in self.classes]
        if self.w.tests:
            raise Unfit(self.subject, f"{self.w.load.src.name} is read under a condition")
        if self.w_constant:
            return sorted(own, key=lambda a: -self.stored.get(a, 0)), 0, False
        name, at = self.w.load.src.name, self.w_at
        inside = all(
            bounds(i)[0] >= 0 and bounds(i)[1] < n
            for i, n in zip(self.w.load.index, self.w.load.src.shape, strict=True)
        )
        if not affine(at) or not inside:
            raise Unfit(
                self.subject, f"{name} is not constant, and read at an index that is not affine"
            )
        if any(d.tap for d in self.read.lines):
            raise Unfit(self.subject, f"{name} is not constant, and has several taps")
        own.sort(key=lambda a: -at.coefficient(a))
        between = at.coefficient(self.read.channels[-1])
        if between == 1:
            return own, self._step(own, at.coefficient, name), False
        near = bool(own) and at.coefficient(own[-1]) == 1
        if not near or between <= 0 or self.w.load.src.dtype not in KINDS:
            raise Unfit(
                self.subject,
                f"{name} is not constant, and its channels lie {between} elements apart",
            )
        self._step(own, at.coefficient, name)  # they lie as one
        return own, between, True

    def _batches(self, groups: Sequence[Sequence[Draft]]) -> tuple[list[Axis], int, int]:
        """Axes of the batches, the slowest first; elements of x and of w between two."""
        own = [a for a in self.product.axes if a in self.product.contraction.b_axes]
        if self.classes:
            check(self.product, self.read.lines)
            found = [d.position for d, *_ in reversed(groups) if d.position]
            return [self.product.classes[a] for a in found if a in self.product.classes], 0, 0
        if any(a not in self.read.batch for a in own):
            raise Unfit(self.subject, f"{self.x.load.src.name} is the same for several batches")
        own.sort(key=lambda a: -self.read.batch[a])
        x_step = self._step(own, self.read.batch.__getitem__, self.x.load.src.name)
        if self.w_constant:
            return own, x_step, 0
        return own, x_step, self._step(own, self.w_at.coefficient, self.w.load.src.name)

    def _step(self, axes: Sequence[Axis], step: Callable[[Axis], int], name: str) -> int:
        """Elements between neighbours of several axes that lie in memory as one does."""
        width = 1
        for a in reversed(axes):
            if step(a) != width * step(axes[-1]):
                text = f"{name} has {len(axes)} axes of one kind that do not lie as one in memory"
                raise Unfit(self.subject, text)
            width *= a.extent
        return step(axes[-1]) if axes else 0

    # ---- lines ---------------------------------------------------------------------------------

    def _stays(self, features: Sequence[Axis]) -> list[dict[Axis, int]]:
        """Where the product's elements lie in the results, and in what is read by tiles."""
        along = [a for a in self.positions if a not in self.found.windows]
        out = [self._steps(r.index, self.strides[r.tensor]) for r in self.found.outputs]
        read = [r.value for r in self.found.outputs if not r.final]
        for ld in (ld for e in (*read, *(t.value for t in self.found.totals)) for ld in loads(e)):
            if ld.pad is not None or _nested(ld.index):
                continue
            steps = self._steps(ld.index, self.strides[ld.src]) or {}
            near = not features or steps.get(features[-1], 0) == 1
            out += [steps] if near and all(a in steps for a in along) else []
        if self.found.totals:  # what is folded does not join what is kept, wherever finals lie
            out.append({d.along: d.step for d in self.read.lines if self._apart(d)})
        return [steps for steps in out if steps]

    def _apart(self, d: Draft) -> bool:
        """Whether totals are of one position along a line."""
        return bool(self.found.totals) and d.position not in (None, *self.found.summed)

    def _line(self, group: list[Draft]) -> Line:
        d, inner = group[0], group[-1]
        n = prod(x.positions for x in group)
        w = self.found.windows.get(d.position) if d.position else None
        w = w or Window(n, 1, 1, 0)
        size = d.size if len(group) == 1 else n
        return Line(
            size, inner.step, n, d.stride, d.taps, d.dilation, d.pad,
            w.cells, w.window, w.hop, w.lead, *of_line(d, self.product, self.shifts),
            apart=n > 1 and self._apart(d),
        )  # fmt: skip

    def _check_folds(self, lines: Sequence[Line]) -> None:
        folded = {*self.found.summed, *self.found.windows}
        for what, axes in (("features", self.w.axes), ("batches", self.product.contraction.b_axes)):
            if any(a in folded for a in axes):
                raise Unfit(self.subject, f"a fold over {what} behind the product")
        if self.found.totals and self.classes:
            raise Unfit(self.subject, "a fold over all positions of a transposed convolution")
        if lines[0].apart:
            text = "positions side by side in memory are kept, and others folded"
            raise Unfit(self.subject, text)

    def _check_copies(
        self, lines: Sequence[Line], batched: bool, x_batch: int, w_batch: int, size: int
    ) -> None:
        name, every = self.x.load.src.name, ALIGNMENT // size
        dimensions = 1 + len(lines) + batched
        if dimensions > MOST_DIMENSIONS:
            text = f"{name} is read along {dimensions} dimensions, more than {MOST_DIMENSIONS}"
            raise Unfit(self.subject, text)
        for line in lines:
            if line.step % every and line.size > 1:
                raise Unfit(self.subject, _unaligned(name, "a step", line.step * size))
        w_steps = [] if self.w_constant else self._w_steps(w_batch)
        for what, n, tensor in (
            ("a batch", x_batch, name), ("the first element", self.read.offset, name), *w_steps,
        ):  # fmt: skip
            if n % every:
                raise Unfit(self.subject, _unaligned(tensor, what, n * size))

    def _w_steps(self, batch: int) -> list[tuple[str, int, str]]:
        name = self.w.load.src.name
        _, step, inner = self._features()
        return [
            ("a channel" if inner else "a feature", step, name),
            ("a batch", batch, name),
            ("the first element", self.w_at.constant, name),
        ]  # fmt: skip

    # ---- tiles and reads -----------------------------------------------------------------------

    def _with_tiles(self, p: Problem) -> Problem:
        """The problem with what it reads, and which results are stored in tiles."""

        # the copy engine stores no box that starts before its tensor: an illegal instruction on an
        # H200
        early = p.pools and any(x.lead for x in p.lines)

        def tile(r: Result) -> bool:
            return (r.pooled or not early) and self._is_tile(r.tensor, r.index, r.pooled, p)

        results = tuple(
            replace(r, tile=True) if tile(r) else replace(r, tile=False, side=self._side(r, p))
            for r in p.results
        )
        return replace(p, results=results, reads=self._reads(p))

    def _side(self, r: Result, p: Problem) -> int:
        """Result.side."""
        axes = p.cell_axes if r.pooled and p.pools else p.position_axes
        where = address(r.index, self.strides[r.tensor])
        steps = dict(where.terms)
        if p.classes > 1 or not axes or steps.pop(axes[0], 0) != 1:
            return 0
        return 2 if all(n % 2 == 0 for n in (*steps.values(), where.constant)) else 1

    def _is_tile(self, t: Tensor, index: Sequence[Expr], pooled: bool, p: Problem) -> bool:
        """Whether elements lie as the tile's do: features side by side, all else at distances that
        the copy engine takes."""
        at, feature = p.cell_axes if pooled else p.position_axes, p.feature_axis
        if t.dtype not in STORED or p.classes > MOST_CLASSES:
            return False
        every = ALIGNMENT // t.dtype.size
        own = [a for a in (*at, *[p.batch_axis] * (p.matrices > 1)) if a.extent > 1]
        for form in forms_by_class(p, index, self.strides[t]):
            steps = [form.coefficient(a) for a in own]
            near = feature.extent == 1 or form.coefficient(feature) == 1
            whole = near and all(s > 0 and s % every == 0 for s in (*steps, form.constant or every))
            if not (affine(form) and whole and {a for a, _ in form.terms} <= {*own, feature}):
                return False
        return True

    def _reads(self, p: Problem) -> tuple[Read, ...]:
        """What the epilogue reads, each once."""
        early = set(loads(p.before))
        found: dict[Load, Read] = {}
        stored = [(r.value, r.pooled, r.pooled or not p.fold) for r in p.results]
        stored += [(t.value, False, True) for t in p.totals]
        stored += [(r.value, False, False) for r in p.finals]
        for value, pooled, late in ((p.before, False, False), *stored):
            for ld in loads(value):
                if _nested(ld.index):
                    raise Unfit(ld.src.name, "it is read at an index that is data")
                if ld.src.dtype is DType.F64:
                    raise Unfit(ld.src.name, "float64 values")
                kind = "direct"
                used = set().union(*map(mentioned, ld.index))
                if used <= {p.feature_axis, p.batch_axis}:
                    kind = "feature"
                elif late and ld not in early and ld.pad is None and self._is_tile(
                    ld.src, ld.index, pooled, p
                ):  # fmt: skip
                    kind = "tile"
                found.setdefault(ld, Read(ld.src, ld.index, ld.pad, kind))
        return tuple(found.values())


def _nested(index: Sequence[Expr]) -> bool:
    return any(loads(i) for i in index)


def _unaligned(name: str, what: str, nbytes: int) -> str:
    return f"{what} of {name} is {nbytes} bytes, no multiple of {ALIGNMENT}"
