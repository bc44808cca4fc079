"""The operands of a region's product: which holds positions and which features, and how the first
lies in memory, as lines and channels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from onchip.backends.cuda.form_axes import (
    Strides,
    Unfit,
    address,
    affine,
    apart,
    conditions,
    over,
)
from onchip.fusion.contraction import Contraction
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load
from onchip.ir.index import bounds, linear

KINDS = {DType.BF16: "bf16", DType.F16: "fp16"}


@dataclass(frozen=True, eq=False, slots=True)
class Operand:
    """A load, and conditions on its indices beyond which it counts as zero."""

    load: Load
    tests: tuple[tuple[str, Expr, int], ...]
    axes: tuple[Axis, ...]  # free axes that it alone mentions


@dataclass(frozen=True, eq=False, slots=True)
class Draft:
    """A line: the axis of the product that its positions are, and the axis of the sum that its
    taps are (flipped: they count down). What they are of is in `Line`'s terms."""

    position: Axis | None
    tap: Axis | None
    size: int
    step: int
    stride: int = 1
    dilation: int = 1
    pad: int = 0
    flipped: bool = False

    @property
    def positions(self) -> int:
        return self.position.extent if self.position else 1

    @property
    def taps(self) -> int:
        return self.tap.extent if self.tap else 1

    @property
    def dense(self) -> bool:
        """Whether it is positions that lie at equal distances, and no more."""
        return self.tap is None and self.stride == 1 and self.pad == 0

    @property
    def along(self) -> Axis:
        """The axis of a line that is positions or taps alone."""
        a = self.position or self.tap
        assert a is not None
        return a


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """How x is read. channels: axes of the sum, the slowest first; batch: elements of memory
    between two values of each batch axis."""

    lines: tuple[Draft, ...]
    channels: tuple[Axis, ...]
    batch: Mapping[Axis, int]
    offset: int


def operands(
    c: Contraction, constants: frozenset, innermost: Axis | None, subject: str
) -> tuple[Operand, Operand]:
    """(x, w): weights are the constant side, or else the one whose axes the result's innermost
    axis is of. Raises Unfit."""
    left = _operand(c.left, c.m_axes, subject)
    right = _operand(c.right, c.n_axes, subject)
    types = (left.load.src.dtype, right.load.src.dtype)
    if types[0] is not types[1] or types[0] not in (*KINDS, DType.F32):
        raise Unfit(subject, f"a product of {types[0].label} and {types[1].label} values")
    fixed = [o.load.src in constants for o in (left, right)]
    if fixed[0] != fixed[1]:
        return (right, left) if fixed[0] else (left, right)
    return (right, left) if innermost in left.axes else (left, right)


def _operand(e: Expr, axes: tuple[Axis, ...], subject: str) -> Operand:
    tests: list[tuple[str, Expr, int]] = []
    while True:
        match e:
            case Call(fn="where", args=(condition, value, Const(value=0))):
                found = conditions(condition)
                if found is None:
                    raise Unfit(subject, "an operand is chosen by a condition on values")
                tests += found
                e = value
            case Call(fn=fn, args=(Load() as value,)) if fn == f"cast_{value.src.dtype.label}":
                e = value
            case Load():
                return Operand(e, tuple(tests), axes)
            case _:
                what = e.fn if isinstance(e, Call) else type(e).__name__.lower()
                raise Unfit(subject, f"an operand is computed ({what}), not read from memory")


def layout(x: Operand, strides: Strides, c: Contraction, subject: str, split: bool) -> Layout:
    """Lines, channels and batches of x. split: positions and taps whose windows share nothing are
    lines of their own. Raises Unfit."""
    index, name = tuple(over(i, {}) for i in x.load.index), x.load.src.name
    for i in index:
        if not affine(linear(i)):
            raise Unfit(subject, f"{name} is read at an index that is not affine")
    for _, j, _ in x.tests:
        if all(apart(i, over(j, {})) is None for i in index):
            raise Unfit(subject, f"{name} is padded in another shape than it is read in")
    steps = address(index, strides)
    k_axes = [a for a in c.k_axes if a.extent > 1]
    ranges = [_range(x, i, n, subject) for i, n in zip(index, x.load.src.shape, strict=True)]
    inside = [
        bounds(i)[0] >= lo and bounds(i)[1] < hi for i, (lo, hi) in zip(index, ranges, strict=True)
    ]
    free = {a for i, ok in zip(index, inside, strict=True) if ok for a, _ in linear(i).terms}
    channel = _channel(index, k_axes, free, steps.coefficient)
    lines: list[Draft] = []
    batch: dict[Axis, int] = {}
    offset = 0
    for i, stride, (lo, hi), ok in zip(index, strides, ranges, inside, strict=True):
        form = linear(i)
        terms = [(a, k) for a, k in form.terms if isinstance(a, Axis)]
        p = [(a, k) for a, k in terms if a in x.axes]
        t = [(a, k) for a, k in terms if a in c.k_axes and a is not channel]
        b = [(a, k) for a, k in terms if a in c.b_axes]
        if any(k < 0 for _, k in (*p, *b)):
            raise Unfit(subject, f"{name} is read backwards")
        more = len(p) > 1 or len(t) > 1 or bool(b) or channel in dict(terms)
        if not ok and more:
            raise Unfit(subject, f"a padded dimension of {name} is several axes")
        side_by_side = split and p and t and p[0][1] >= abs(t[0][1]) * t[0][0].extent
        if not ok or (p and t and not more and not side_by_side):
            line, start = _slides((p or [(None, 1)])[0], (t or [(None, 1)])[0],
                                  form.constant, lo, hi, stride)  # fmt: skip
            lines.append(line)
            offset += start
            continue
        offset += form.constant * stride
        for a, k in b:
            batch[a] = batch.get(a, 0) + k * stride
        lines += [Draft(a, None, a.extent, k * stride) for a, k in p]
        for a, k in t:
            offset += min(k, 0) * (a.extent - 1) * stride
            lines.append(Draft(None, a, a.extent, abs(k) * stride, flipped=k < 0))
    # one channel: taps of a line whose elements lie side by side
    slides = all(d.position for d in lines if d.tap) and any(d.tap and d.step == 1 for d in lines)
    if channel is None and not slides:
        text = ", ".join(f"{abs(steps.coefficient(a))} for {a.extent} values" for a in k_axes)
        raise Unfit(subject, f"no axis of the sum lies side by side in {name}: steps are {text}")
    used = [a for d in lines for a in (d.position, d.tap) if a]
    wanted = [a for a in (*x.axes, *k_axes) if a.extent > 1 and a is not channel]
    if sorted(map(id, used)) != sorted(map(id, wanted)):
        raise Unfit(subject, f"an axis of {name} lies along a diagonal, or repeats elements")
    return Layout(tuple(lines), (channel,) if channel else (), batch, offset)


def _range(x: Operand, i: Expr, n: int, subject: str) -> tuple[int, int]:
    """The indices along a dimension of size n that may be other than zero."""
    low, high = bounds(i)
    if (low < 0 or high >= n) and x.load.pad not in (None, 0):
        raise Unfit(subject, f"{x.load.src.name} is padded with {x.load.pad}")
    lo, hi = 0, n
    for fn, j, limit in x.tests:
        shift = apart(i, over(j, {}))
        if shift is not None:
            lo, hi = (max(lo, shift), hi) if fn == "ge" else (lo, min(hi, limit + shift))
    return lo, hi


def _channel(index: Sequence[Expr], k_axes: list[Axis], free: set, step) -> Axis | None:
    """The axis of the sum whose neighbours lie side by side, not padded: one that has a dimension
    of its own, if there is; the longest."""
    own = {linear(i).terms[0][0] for i in index if len(linear(i).terms) == 1}
    found = [a for a in k_axes if a in free and step(a) == 1]
    return max(found, key=lambda a: (a in own, a.extent), default=None)


def _slides(
    p: tuple[Axis | None, int],
    t: tuple[Axis | None, int],
    constant: int,
    lo: int,
    hi: int,
    step: int,
) -> tuple[Draft, int]:
    """The line of one dimension, whose elements lo to hi are read; and the elements of memory
    before its first one."""
    flipped = t[1] < 0
    if flipped:
        assert t[0] is not None
        constant += t[1] * (t[0].extent - 1)
    first = max(lo, constant)
    return (
        Draft(p[0], t[0], max(hi - first, 1), step, p[1], abs(t[1]), first - constant, flipped),
        first * step,
    )


# ---- fewer lines ---------------------------------------------------------------------------------


def widened(found: Layout, weights: Operand, w_strides: Strides, w_constant: bool) -> Layout:
    """Taps that lie behind the channels as further channels: of a flattened picture, of heads. (Of
    weights read as they lie, only if they lie on there, too.)"""
    at = address(tuple(over(i, {}) for i in weights.load.index), w_strides)
    lines, channels = list(found.lines), list(found.channels)
    while True:
        width = 1
        for a in channels:
            width *= a.extent
        more = [d for d in lines if d.position is None and not d.flipped and d.pad == 0]
        more = [d for d in more if d.step == width and d.size == d.taps and d.dilation == 1]
        step = at.coefficient(channels[-1]) if channels else 1
        more = [d for d in more if w_constant or at.coefficient(d.along) == width * step]
        if not more:
            return replace(found, lines=tuple(lines), channels=tuple(channels))
        lines.remove(more[0])
        channels.insert(0, more[0].along)


def in_order(lines: Iterable[Draft]) -> list[Draft]:
    """Innermost in memory first, those of one position behind the others."""
    return sorted(lines, key=lambda d: (d.positions == 1, d.step))


def joined(
    lines: Sequence[Draft], whole: Collection[Axis], stays: Sequence[Mapping[Axis, int]]
) -> list[list[Draft]]:
    """Lines in groups, the slowest first of each, that can be walked as one: they lie as one in x,
    and so they do in all of `stays` (elements of memory between two positions, for each result
    and what is copied in tiles). whole: axes that windows lie along, or that have classes, which
    stay apart."""
    groups: list[list[Draft]] = []
    for d in in_order(lines):
        alone = not d.dense or d.position is None or d.position in whole
        last = groups[-1] if groups else None
        if last and not alone and last[0].dense and last[0].position not in (None, *whole):
            outer, inner, size = d.along, last[0].along, last[0].positions
            if d.step == size * last[0].step and all(
                s.get(outer, 0) == size * s.get(inner, 0) for s in stays
            ):
                last.insert(0, d)
                continue
        groups.append([d])
    return groups
