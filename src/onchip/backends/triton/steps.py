"""How the loop over K of a matrix product goes: which of the K axes are scalars that the loop
counts (the taps of a window), and which one is a dimension of the blocks that it loads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod

from onchip.fusion.contraction import Contraction
from onchip.fusion.inline import substitute_simplified
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Tensor, axis, loads, mentioned
from onchip.ir.index import bounds, simplify, stride_along, used_as_value

Strides = tuple[int, ...]

HALF = (DType.F16, DType.BF16)
SMALLEST_STEP = 16  # elements of K that one tl.dot takes, at least
# Below this many elements side by side, a step over several taps at once is worth its divisions.
SHORTEST_RUN = 32
MOST_WASTE = 1.34


@dataclass(frozen=True, eq=False, slots=True)
class Steps:
    """product: with `inner` as its last K axis; taps: the K axes before it, outermost first.
    One step takes `width` elements of `inner` for one value of each of the taps."""

    product: Contraction
    taps: tuple[Axis, ...]
    inner: Axis
    width: int

    @property
    def blocks(self) -> int:
        """Steps along `inner`."""
        return ceil(self.inner.extent / self.width)

    @property
    def count(self) -> int:
        return prod(a.extent for a in self.taps) * self.blocks


def operand_type(c: Contraction, result: DType) -> DType:
    """The type in which tl.dot gets the operands: a half type where PyTorch multiplies in it (both
    operands are, or would have been stored, in that type; `result`: of the tensor that is
    computed). Products of half types are exact in float32, so that an operand which is loaded as
    it is loses nothing."""
    plain = [e.src.dtype for e in (c.left, c.right) if isinstance(e, Load)]
    half = bool(plain) and plain[0] in HALF and all(d is plain[0] for d in plain)
    if not half or (len(plain) < 2 and result is not plain[0]):
        return DType.F32
    return plain[0]


def steps_of(
    c: Contraction, strides: dict[Tensor, Strides], free: frozenset[Tensor], most: int
) -> Steps:
    """The steps of a product whose step takes `most` elements of K at most; `free`: constants
    that are laid out in the order in which the steps read them."""
    taps, run = split_k(c, strides, free)
    size = prod(a.extent for a in run)
    if (
        taps
        and not c.ends
        and (size < SHORTEST_RUN or _waste(size, step_width(size, most)) > MOST_WASTE)
    ):
        taps, run = (), (*taps, *run)
    merged, inner = _merged(c, run)
    width = step_width(inner.extent, most)
    return Steps(replace(merged, k_axes=(*taps, inner)), taps, inner, width)


def step_width(size: int, most: int) -> int:
    """A power of two: the widest with which the last step is not mostly empty."""
    widths = [w for n in range(13) if SMALLEST_STEP <= (w := 1 << n) <= max(most, SMALLEST_STEP)]
    full = [w for w in widths if _waste(size, w) <= MOST_WASTE]
    return max(full) if full else min(widths, key=lambda w: (_waste(size, w), -w))


def _waste(size: int, width: int) -> float:
    return ceil(size / width) * width / max(size, 1)


def split_k(
    c: Contraction, strides: dict[Tensor, Strides], free: frozenset[Tensor] = frozenset()
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The K axes as (taps, run), each outermost first: the run lies side by side in memory, in
    both operands; where the axis that does is short (the width of an image), the run is the
    longest axis."""
    order = k_order(c, strides, free)
    if len(order) < 2:
        return (), order
    if c.ends:
        longest = max((a for a in order if a not in c.ends), key=lambda a: a.extent)
        return tuple(a for a in order if a is not longest), (longest,)
    first = len(order) - 1
    while first and _follows(c, order[first - 1], order[first:], strides, free):
        first -= 1
    if prod(a.extent for a in order[first:]) >= SMALLEST_STEP:
        return order[:first], order[first:]
    longest = max(order, key=lambda a: a.extent)
    if longest.extent < SMALLEST_STEP:
        return order[:first], order[first:]
    return tuple(a for a in order if a is not longest), (longest,)


def k_order(
    c: Contraction, strides: dict[Tensor, Strides], free: frozenset[Tensor]
) -> tuple[Axis, ...]:
    """The K axes as the operands that can't be laid out anew lie in memory, the fastest last;
    where both can't, the left one decides."""

    def steps(a: Axis) -> tuple[int, ...]:
        both = [_steps(e, strides, a) for e in (c.left, c.right)]
        return tuple(
            max((n for t, n in s if (t in free) is f), default=0)
            for f in (False, True)
            for s in both
        )

    return tuple(sorted(c.k_axes, key=steps, reverse=True))


def _steps(e: Expr, strides: dict[Tensor, Strides], a: Axis) -> list[tuple[Tensor, int]]:
    """Elements between neighbours along an axis in what an operand reads."""
    reads = [ld for ld in loads(e) if ld.src in strides]
    return [(ld.src, abs(stride_along(ld.index, strides[ld.src], a) or 0)) for ld in reads]


def _follows(
    c: Contraction,
    outer: Axis,
    run: tuple[Axis, ...],
    strides: dict[Tensor, Strides],
    free: frozenset[Tensor],
) -> bool:
    """Whether an axis and the run behind it are one axis in memory and in all conditions."""
    size = prod(a.extent for a in run)
    if used_as_value(c.left, (outer, *run)) or used_as_value(c.right, (outer, *run)):
        return False
    for ld in (*loads(c.left), *loads(c.right)):
        if ld.src not in strides or _tested(ld) & {outer, *run}:
            return False
        if ld.src in free and free_order(c, ld) is not None:
            continue
        steps = [stride_along(ld.index, strides[ld.src], a) for a in (outer, run[-1])]
        if None in steps or steps[0] != steps[1] * size:  # type: ignore[operator]
            return False
    return True


def _tested(ld: Load) -> set[Axis]:
    """Axes on which it depends whether an element lies inside of the tensor."""
    if ld.pad is None:
        return set()
    found: set[Axis] = set()
    for i, n in zip(ld.index, ld.src.shape, strict=True):
        lo, hi = bounds(i)
        if lo < 0 or hi >= n:
            found |= mentioned(i)
    return found


def _merged(c: Contraction, run: tuple[Axis, ...]) -> tuple[Contraction, Axis]:
    """The product with one axis in place of several."""
    if len(run) == 1:
        return c, run[0]
    step = prod(a.extent for a in run)
    inner = axis(step, "k")
    mapping: dict[Axis, Expr] = {}
    for a in run:
        step //= max(a.extent, 1)
        at = Call("floordiv", (inner, Const(max(step, 1), DType.I64)), DType.I64)
        mapping[a] = simplify(Call("mod", (at, Const(max(a.extent, 1), DType.I64)), DType.I64))
    left, right = (substitute_simplified(e, mapping) for e in (c.left, c.right))
    return replace(c, left=left, right=right), inner


def free_order(c: Contraction, ld: Load) -> tuple[Axis, ...] | None:
    """The axes of a constant operand's dimensions, if each is one axis: it can then be laid out
    in any order of them."""
    own = [i for i in ld.index if isinstance(i, Axis)]
    plain = all(isinstance(i, (Axis, Const)) for i in ld.index) and len(set(own)) == len(own)
    known = {*c.m_axes, *c.n_axes, *c.b_axes, *c.k_axes}
    return tuple(own) if plain and ld.pad is None and known.issuperset(own) else None


def laid_out(
    c: Contraction, strides: dict[Tensor, Strides], free: frozenset[Tensor]
) -> dict[Tensor, Strides]:
    """Strides of the constants that a product reads where others than they have suit its steps:
    (batch, columns, taps, run), so that K is contiguous."""
    taps, run = split_k(c, strides, free)
    out: dict[Tensor, Strides] = {}
    for side, own in ((c.left, c.m_axes), (c.right, c.n_axes)):
        for ld in loads(side):
            if ld.src not in free or free_order(c, ld) is None:
                continue
            wanted = _dense(ld, (*c.b_axes, *own, *taps, *run))
            if not _equal(wanted, strides[ld.src], ld.src.shape):
                out[ld.src] = wanted
    return out


def _dense(ld: Load, order: tuple[Axis, ...]) -> Strides:
    """Strides of a dense tensor whose dimensions lie in memory in the order of their axes."""
    rank = {a: n for n, a in enumerate(order)}
    place = [rank[i] if isinstance(i, Axis) else -1 for i in ld.index]
    out, step = [0] * len(place), 1
    for d in sorted(range(len(place)), key=lambda d: -place[d]):
        out[d] = step
        step *= max(ld.src.shape[d], 1)
    return tuple(out)


def _equal(a: Strides, b: Strides, shape: tuple[int, ...]) -> bool:
    """The same places for all elements."""
    return all(x == y or n <= 1 for x, y, n in zip(a, b, shape, strict=True))
