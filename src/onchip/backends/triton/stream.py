"""A nest as one walk over an axis, a block of it at a time: attention, statistics of long rows.

    top, sums = -inf, 0
    for k in blocks of the axis:
        x = scores of the block                   a product, with whatever changes its elements
        higher = maximum(top, largest x)
        weights = exp(x - higher)
        sums = sums * exp(top - higher) + sum over the block of weights * g
        top = higher

fusion/online.py finds what is carried. A sum of weights times a row of values is a second product;
its weights are rounded to the values' half type, as flash attention does. Blocks that a condition
on positions hides from the whole tile (a causal mask) are left out, and where it hides nothing it
is not tested: the loop is written once for each case.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e as EULER
from math import inf, isfinite, log2

from onchip.backends.triton import spelling
from onchip.backends.triton.indices import outside
from onchip.backends.triton.placement import SMALLEST_DOT, range_of
from onchip.backends.triton.product import rounded
from onchip.backends.triton.steps import HALF
from onchip.backends.triton.writer import Axes, Bound, Range, Scope, Tile, Writer, power_of_two
from onchip.fusion.nest import Span
from onchip.fusion.online import Online, State, free_axes
from onchip.fusion.visible import visible
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Reduce, children

KIND = "tl.float32"
NOTHING = 'float("-inf")'


def emit_walk(w: Writer, online: Online) -> None:
    """The loop over the axis; the states' values are then known. The axes of the outputs are
    bound."""
    walk = _Walk(w, online)
    walk.before()
    for lo, hi, checked in walk.segments():
        walk.loop(lo, hi, checked)
    walk.after()


def grows(online: Online) -> bool:
    """Whether later tiles have longer walks (a causal mask): they start first, so that none of
    them is left for the end."""
    seen = visible(online)
    return seen is not None and seen.some[1] is not None


def walk_loops(online: Online) -> list[tuple[tuple[Axis, Span], int]]:
    """The outputs' axes, what a tile covers of each, and its order as a dimension: rows come before
    the walk's axis, columns (which the maxima don't depend on) after it."""
    rows = {a for s in online.states if s.monoid == "max" for a in free_axes(s.folded)}
    spans: dict[Axis, Span] = {}
    for st in online.outputs:
        spans |= zip(st.staged.loops, st.spans, strict=True)
    return [(item, 0 if item[0] in rows else 3) for item in spans.items()]


def walk_widths(online: Online) -> dict[Range, int]:
    """Widths of the dimensions, as tl.dot needs them."""
    found = (range_of(span) for (_, span), _ in walk_loops(online) if span.extent > 1)
    return {r: max(power_of_two(r[1]), SMALLEST_DOT) for r in found}


@dataclass(eq=False, slots=True)
class _Top:
    """A maximum that is carried: y of x = y * factor, with all conditions and without those that
    hold in the whole block."""

    state: State
    tested: Expr
    seen: Expr
    factor: float
    name: str
    axes: Axes


@dataclass(eq=False, slots=True)
class _Weights:
    """exp(x - top) in a block, and what old sums are multiplied by."""

    text: str
    axes: Axes
    decay: str


class _Walk:
    def __init__(self, w: Writer, online: Online) -> None:
        self.w, self.online, self.axis = w, online, online.axis
        self.width = min(w.options.stream, max(power_of_two(online.axis.extent), SMALLEST_DOT))
        w.widths[self.axis] = self.width
        w.rank(self.axis, 2)
        stored = [st.tensor.dtype for st in online.outputs]
        self.coarse = all(d in HALF for d in stored)
        w.result = stored[0]
        self.seen = visible(online)
        self.tops = {s: self._top(s) for s in online.states if s.monoid == "max" and s.top is None}
        self.sums: dict[State, tuple[str, Axes]] = {}

    def _top(self, s: State) -> _Top:
        x, seen = s.folded, self.seen.without if self.seen else s.folded
        tested, factor = scaled(x) if self.coarse else (x, 1.0)
        seen = scaled(seen)[0] if self.coarse else seen
        return _Top(s, tested, seen, factor, self.w.fresh("top"), self._dimensions(x))

    def _dimensions(self, *parts: Expr | None) -> Axes:
        """Dimensions of a value that the walk has folded."""
        free = {a for p in parts if p is not None for a in free_axes(p)} - {self.axis}
        bound = [self.w.bound(a) for a in free]
        return self.w.union(*(b.tile for b in bound if b is not None))

    # ---- around the loop -------------------------------------------------------------------------

    def before(self) -> None:
        """What no step changes, and the states' first values."""
        w = self.w
        for s in self.online.states:
            for e in (s.body, s.top and s.top.body):
                for r in _outside(e, self.axis) if e is not None else ():
                    w.value(r)
        for t in self.tops.values():
            w.line(f"{t.name} = tl.full({w.shape(t.axes)}, {NOTHING}, {KIND})")
        for s in self.online.states:
            if s not in self.tops:
                over = (s.body, s.top.folded) if s.top is not None else (s.body,)
                name, axes = w.fresh("total"), self._dimensions(*over)
                neutral = spelling.constant(spelling.IDENTITY[s.monoid], DType.F32)
                w.line(f"{name} = tl.full({w.shape(axes)}, {neutral}, {KIND})")
                self.sums[s] = name, axes

    def after(self) -> None:
        w, values = self.w, self.w.scopes[-1].values
        for t in self.tops.values():
            text = t.name if t.factor == 1.0 else f"{t.name} * {t.factor!r}"
            values[t.state.value] = w.define("top", text, t.axes, w.depth)
        for s, (name, axes) in self.sums.items():
            text = name
            if s.top is not None and not s.zeroed:  # x - x of minus infinity is NaN
                top = self.tops[s.top]
                unseen = w.onto(Tile(f"({top.name} == {NOTHING})", top.axes), axes)
                text = f'tl.where({unseen}, float("nan"), {name})'
            values[s.value] = w.define("sum", text, axes, w.depth)

    def segments(self) -> list[tuple[str, str, bool]]:
        """First and last position of each loop, and whether it tests conditions and the axis's
        end."""
        size, width = self.axis.extent, self.width
        whole = size // width * width
        if self.seen is None and not self.coarse and size % width:
            # a last step of its own, being no loop, is scheduled into too many registers
            return [("0", str(size), True)]
        if self.seen is None:
            parts = [("0", str(whole), False), (str(whole), str(size), True)]
            return [p for p in parts if p[0] != p[1]]
        lo, hi, first, last = (self._at(e) for e in self.seen.blocks(size, width))
        parts = [(lo, first, True), (first, last, False), (last, hi, True)]
        return [p for p in parts if p[0] != p[1]]

    def _at(self, e: Expr) -> str:
        if isinstance(e, Const):
            return str(e.value)
        t = self.w.index(e)
        return self.w.define("at", f"{t.text}.to({self.w.integer})", (), t.level).text

    # ---- a step ----------------------------------------------------------------------------------

    def loop(self, lo: str, hi: str, checked: bool) -> None:
        w, start = self.w, self.w.fresh("k")
        w.open(f"for {start} in range({lo}, {hi}, {self.width}):")
        w.scopes.append(Scope({}))
        wide = ".to(tl.int64)" if w.integer == "tl.int64" else ""
        text = f"{start} + tl.arange(0, {self.width})"
        number = w.define("i", f"({text}){wide}" if wide else text, (self.axis,), w.depth)
        ends = checked and self.axis.extent % self.width
        exists = w.tested(number, [f"< {self.axis.extent}"] if ends else [])
        w.bind(self.axis, Bound(number, exists), 2)
        weights: dict[tuple[_Top, tuple[float, ...]], _Weights] = {}
        higher = {t: self._higher(t, checked, exists) for t in self.tops.values()}
        for s, (name, axes) in self.sums.items():
            if s.top is None:
                self._fold(s, name, axes, exists)
                continue
            top = self.tops[s.top]
            base = tuple(sorted({-inf, *s.zeroed}))
            if (top, base) not in weights:
                weights[top, base] = self._weights(top, *higher[top], base)
            self._add(s, name, axes, weights[top, base], exists)
        for t, (_, new, _) in higher.items():
            w.line(f"{t.name} = {new}")
        w.scopes.pop()
        w.close()

    def _higher(self, t: _Top, checked: bool, exists: Tile | None) -> tuple[str, str, Axes]:
        """The block's values, the new maximum, and the values' dimensions."""
        w = self.w
        value = w.value(t.tested if checked else t.seen)
        axes = w.union(Tile("", (*t.axes, self.axis)))
        text = w.whole(value, axes, KIND)
        if exists is not None:
            text = f"tl.where({w.onto(exists, axes)}, {text}, {NOTHING})"
        x = w.define("x", text, axes, w.depth).text
        largest = spelling.fold_axis("max", x, axes.index(self.axis))
        new = w.define("higher", spelling.combine("max", t.name, largest), t.axes, w.depth)
        return x, new.text, axes

    def _weights(self, t: _Top, x: str, new: str, axes: Axes, zeroed: tuple) -> _Weights:
        w, depth = self.w, self.w.depth
        unseen = f'tl.abs({new}) == float("inf")' if inf in zeroed else f"{new} == {NOTHING}"
        base = w.define("base", f"tl.where({unseen}, 0.0, {new})", t.axes, depth)
        if self.coarse:  # exp2 of one fused multiply-add
            scale = spelling.constant(t.factor * log2(EULER), DType.F32)
            base = w.define("base", f"{base.text} * {scale}", t.axes, depth)
            form = f"fast_exp2({{0}} * {scale} - {{1}})"
        else:
            form = spelling.call("exp", ["{0} - {1}"], DType.F32)
        weights = w.define("p", form.format(x, w.onto(base, axes)), axes, depth)
        decay = w.define("decay", form.format(t.name, base.text), t.axes, depth)
        return _Weights(weights.text, axes, decay.text)

    def _fold(self, s: State, name: str, axes: Axes, exists: Tile | None) -> None:
        """A fold that no maximum shifts."""
        w = self.w
        value = w.value(s.folded)
        text = self._masked(w.whole(value, self._over(axes), KIND), self._over(axes), exists, s)
        part = spelling.fold_axis(s.monoid, text, self._over(axes).index(self.axis))
        w.line(f"{name} = {spelling.combine(s.monoid, name, part)}")

    def _over(self, axes: Axes) -> Axes:
        return self.w.union(Tile("", (*axes, self.axis)))

    def _masked(self, text: str, axes: Axes, exists: Tile | None, s: State) -> str:
        if exists is None:
            return text
        neutral = spelling.constant(spelling.IDENTITY[s.monoid], DType.F32)
        text = f"tl.where({self.w.onto(exists, axes)}, {text}, {neutral})"
        return self.w.define("v", text, axes, self.w.depth).text

    def _add(self, s: State, name: str, axes: Axes, p: _Weights, exists: Tile | None) -> None:
        """A sum of weights, or of weights times values: a product where these have columns."""
        w = self.w
        decay = w.onto(Tile(p.decay, self.tops[s.top].axes), axes)  # type: ignore[index]
        weights = Tile(p.text, p.axes, w.depth)
        columns = self._columns(s, p) if s.body is not None else None
        if columns is not None:
            self._multiply(s, name, decay, weights, columns, exists)
            return
        weights = self._rounded(weights, s.rounded)
        over = self._over(axes)
        text = w.whole(weights, over, KIND)
        if s.body is not None:
            text = f"{text} * {w.onto(w.value(s.body), over)}"
            text = self._masked(text, over, exists, s)
        part = spelling.fold_axis("sum", text, over.index(self.axis))
        w.line(f"{name} = {name} * {decay} + {part}")

    def _columns(self, s: State, p: _Weights) -> Axis | None:
        """The one dimension of the values besides the walk's, if tl.dot can take both."""
        assert s.body is not None
        own = [d for d in self._dimensions(s.body)]
        rows = [a for a in p.axes if a is not self.axis]
        if len(rows) != 1 or len(own) != 1 or own[0] in rows:
            return None
        fits = min(self.w.widths[a] for a in (*rows, *own, self.axis)) >= SMALLEST_DOT
        return own[0] if fits else None

    def _multiply(
        self, s: State, name: str, decay: str, weights: Tile, column: Axis, exists: Tile | None
    ) -> None:
        w, e = self.w, s.body
        half = isinstance(e, Load) and e.src.dtype in HALF and not w.options.interpret
        kind = e.src.dtype if half and isinstance(e, Load) else None
        value = w.load(e, widen=False) if half and isinstance(e, Load) else w.value(e)  # type: ignore[arg-type]
        right = w.whole(value, (self.axis, column), KIND)
        if exists is not None and not (isinstance(e, Load) and outside(w, e) == 0):
            right = f"tl.where({w.onto(exists, (self.axis, column))}, {right}, 0.0)"
        if kind is not None:
            w.line(f"# rounded to {kind.label}, the values' type, as flash attention does")
            left, more = f"{weights.text}.to({spelling.TYPES[kind]})", ""
        else:
            left = rounded(w, None, self._rounded(weights, s.rounded).text)
            right = rounded(w, e, right)
            more = f', input_precision="{w.options.precision}"'
        w.line(f"{name} = tl.dot({left}, {right}, {name} * {decay}{more})")

    def _rounded(self, t: Tile, kind: DType | None) -> Tile:
        if kind is None:
            return t
        text = spelling.call(f"cast_{kind.label}", [t.text], DType.F32)
        return self.w.define("p", text, t.axes, t.level)


def scaled(x: Expr) -> tuple[Expr, float]:
    """y and c > 0 with x = y * c."""
    match x:
        case Call(fn="mul", args=(y, Const(value=c)) | (Const(value=c), y)):
            if isfinite(c) and c > 0 and not isinstance(y, Const):
                return y, float(c)
        case Call(fn="where", args=(cond, y, Const(value=v) as low), dtype=d) if v == -inf:
            y, c = scaled(y)
            return Call("where", (cond, y, low), d), c
    return x, 1.0


def _outside(e: Expr, over: Axis) -> list[Reduce]:
    """The outermost folds that don't depend on the walk's axis."""
    if isinstance(e, Reduce) and over not in free_axes(e):
        return [e]
    return [r for k in children(e) for r in _outside(k, over)]
