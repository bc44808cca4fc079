"""How a fold of many elements is cut into chunks: which folds, how many chunks, which elements.

The choice depends on sizes and strides alone, never on the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    axis,
    loads,
    mentioned,
    reduces,
    walk,
)
from onchip.ir.index import linear, simplify, stride_along, used_as_value

Strides = tuple[int, ...]

# A chunk of this many elements takes some ten microseconds, so handing it out costs nothing, and
# it stays in the second-level cache for a second fold over the same elements.
CHUNK_ELEMENTS = 1 << 16
# A chunk is read at this many places at once: prefetching stops at every page, and one stream of
# loads alone does not keep the memory busy (measured on 2 cores, in 4 KiB pages: 14.7 GB/s with
# one, 16.3 with two, 18.8 with four; in 2 MiB pages 23.5, 28.2, 31.2). Shorter folds have none.
STRANDS = 4
SHORTEST_STRANDS = 512
# Less than this is done before the threads are awake.
SMALLEST_FOLD = 1 << 16
# With this many tiles without a cut there is work for every thread...
MANY_TILES = 64
# ...but a fold longer than this leaves the cache between two passes over it.
LONG_FOLD = 1 << 17
# Where results lie side by side, a chunk is this many rows at least, and there are at most so many
# work items: partial results are written and read again.
SHORTEST_CHUNK = 512
MOST_ITEMS = 1024
COLUMNS = 512  # results that one vector loop folds side by side


@dataclass(frozen=True, eq=False, slots=True)
class Chunks:
    """How the axes of a fold are cut.

    chunks  axes that number the chunks        inside  axes folded within a chunk
    place   each axis of the fold, of the elements of a chunk
    kept    axes of the results, as they lie in memory
    tail    axes that run over the elements that no chunk covers (none: there are none)
    rest    each axis of the fold, of those elements
    count   elements of a chunk
    """

    chunks: tuple[Axis, ...]
    inside: tuple[Axis, ...]
    kept: tuple[Axis, ...]
    place: dict[Axis, Expr]
    tail: tuple[Axis, ...]
    rest: dict[Axis, Expr]
    count: int


# ---- which folds -------------------------------------------------------------------------------


def kept_axes(r: Reduce) -> tuple[Axis, ...]:
    """The axes that a fold's value depends on, as they are met in its body."""
    own = {a for x in reduces(r) for a in x.axes}
    return tuple(x for x in walk(r.body) if isinstance(x, Axis) and x not in own)


def fold_elements(r: Reduce) -> int:
    """Elements that one result folds."""
    return prod(a.extent for a in r.axes)


def worth_cutting(r: Reduce, weight: int, strides: Mapping[Tensor, Strides]) -> bool:
    """Whether chunks would keep the threads busier, or the caches warmer. weight: elements that
    have to be read for all of its results."""
    elements, results = fold_elements(r), prod(a.extent for a in kept_axes(r))
    if r.monoid in ("any", "all") and r.body.dtype is not DType.BOOL:
        return False
    if elements < 2 or max(elements * results, weight) < SMALLEST_FOLD:
        return False
    heavy = max(weight / (elements * results), 1.0)
    tiles = -(-results // COLUMNS) if side_by_side(r, strides) else results
    return tiles < MANY_TILES or elements * heavy >= LONG_FOLD


def side_by_side(r: Reduce, strides: Mapping[Tensor, Strides]) -> bool:
    """Neighbouring results, not neighbours within a fold, lie side by side in memory."""
    score = 0
    for ld in loads(r.body):
        if ld.src not in strides:
            continue
        own = min((s for a in r.axes if (s := _stride(ld, strides, a))), default=0)
        kept = min((s for a in kept_axes(r) if (s := _stride(ld, strides, a))), default=0)
        if kept and own:
            score += ld.src.numel if kept < own else -ld.src.numel
    return score > 0


def _stride(ld: Load, strides: Mapping[Tensor, Strides], a: Axis) -> int:
    """Elements between neighbours along an axis (0 where it is not affine, or has extent 1)."""
    return abs(stride_along(ld.index, strides[ld.src], a) or 0) if a.extent > 1 else 0


def _step(r: Reduce, a: Axis, strides: Mapping[Tensor, Strides]) -> int:
    """The widest stride along an axis of all that a fold reads."""
    return max((_stride(ld, strides, a) for ld in loads(r.body) if ld.src in strides), default=0)


# ---- how they are cut --------------------------------------------------------------------------


def cut_fold(
    r: Reduce, strides: Mapping[Tensor, Strides], inside: set[Tensor], weight: float = 1.0
) -> Chunks | None:
    """Chunks of a fold; None if it is too short to be cut."""
    groups = _merged(r, strides, inside)
    left = _chunk_count(r, weight, strides)
    chunks: list[Axis] = []
    within: list[Axis] = []
    place: dict[Axis, Expr] = {}
    rest: dict[Axis, Expr] = {}
    tail: list[Axis] = []
    for group in groups:
        n = prod(a.extent for a in group)
        pieces, length = (n, 1) if left >= n else _pieces(n, left)
        index: Expr = Const(0, DType.I64)
        if pieces > 1:
            chunks.append(axis(pieces, "c"))
            index = chunks[-1] * length
        if length > 1:
            within.append(axis(length, "r"))
            index = index + within[-1]
        place |= _unravelled(index, group)
        over = n - pieces * length
        left = -(-left // pieces)
        # at most one group is cut with elements left over: of the others all belong to the tail
        tail.append(axis(over or n, "r"))
        rest |= _unravelled(tail[-1] + (pieces * length if over else 0), group)
    total = prod(a.extent for a in r.axes)
    count = prod(a.extent for a in within)
    if prod(a.extent for a in chunks) < 2:
        return None
    covered = count * prod(a.extent for a in chunks) == total
    kept = tuple(sorted(kept_axes(r), key=lambda a: -_step(r, a, strides)))
    last = () if covered else tuple(tail)
    return Chunks(tuple(chunks), tuple(within), kept, place, last, rest, count)


def _chunk_count(r: Reduce, weight: float, strides: Mapping[Tensor, Strides]) -> int:
    elements, results = fold_elements(r), prod(a.extent for a in kept_axes(r))
    heavy = max(weight / (elements * results), 1.0)
    if not side_by_side(r, strides):
        evenly = int(elements * heavy) * results // MANY_TILES
        return max(
            int(elements * heavy) // min(max(evenly, CHUNK_ELEMENTS // 8), CHUNK_ELEMENTS), 1
        )
    rows = max(int(CHUNK_ELEMENTS / heavy) // results, SHORTEST_CHUNK)
    items = max(MOST_ITEMS // -(-results // COLUMNS), 16)
    return max(min(elements // rows, items), 1)


def _pieces(n: int, wanted: int) -> tuple[int, int]:
    """How many pieces, from `wanted` up to twice as many, and their length: one that the strands
    share evenly, if pieces are that long, and that leaves nothing over, if one does."""
    if wanted == 1:
        return 1, n
    several = STRANDS if n // wanted >= SHORTEST_STRANDS else 1
    pieces = next((k for k in range(wanted, 2 * wanted) if n % (several * k) == 0), wanted)
    length = n // pieces
    return pieces, length - length % several


def _unravelled(index: Expr, group: Sequence[Axis]) -> dict[Axis, Expr]:
    """The axes of a group, outermost first, from the one index that walks them."""
    out: dict[Axis, Expr] = {}
    width = prod(a.extent for a in group)
    for a in group:
        at = index
        if width > a.extent or a is not group[0]:
            width //= a.extent
            at = Call("floordiv", (index, Const(width, DType.I64)), DType.I64)
        if a is not group[0]:
            at = Call("mod", (at, Const(a.extent, DType.I64)), DType.I64)
        out[a] = simplify(at)
    return out


def _merged(r: Reduce, strides: Mapping[Tensor, Strides], inside: set[Tensor]) -> list[list[Axis]]:
    """The fold's axes as they lie in memory, slowest first; neighbours that walk memory as one
    axis stand together."""
    order = sorted(r.axes, key=lambda a: -_step(r, a, strides))
    groups: list[list[Axis]] = []
    for a in order:
        if groups and _one_walk(r, groups[-1][-1], a, strides, inside):
            groups[-1].append(a)
        else:
            groups.append([a])
    return groups


def _one_walk(
    r: Reduce, outer: Axis, inner: Axis, strides: Mapping[Tensor, Strides], inside: set[Tensor]
) -> bool:
    for ld in loads(r.body):
        if not {outer, inner} & mentioned(ld):
            continue
        if ld.src in inside or ld.src not in strides or ld.pad is not None:
            return False
        atoms = [x for i in ld.index for x, _ in linear(i).terms]
        if any(not isinstance(x, Axis) and {outer, inner} & mentioned(x) for x in atoms):
            return False
        far, near = (stride_along(ld.index, strides[ld.src], a) or 0 for a in (outer, inner))
        if far != near * inner.extent:
            return False
    return not used_as_value(r.body, (outer, inner))
