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

COLUMNS = 512  # results that one vector loop folds side by side


@dataclass(frozen=True, slots=True)
class Cutting:
    """Which folds are cut, and how; the defaults are a CPU's.

    elements   of a chunk: one of this many takes some ten microseconds, so handing it out costs
               nothing, and it stays in the second-level cache for a second fold over it
    strands    places at which a chunk is read at once: prefetching stops at every page, and one
               stream of loads alone does not keep the memory busy (measured on 2 cores, in 4 KiB
               pages: 14.7 GB/s with one, 16.3 with two, 18.8 with four; in 2 MiB pages 23.5, 28.2,
               31.2); folds shorter than `shortest_strands` have none
    smallest   less than this is done before the threads are awake, or in one program's time
    tiles      with this many tiles without a cut there is work for every thread...
    longest    ...but a fold longer than this leaves the cache between two passes over it
    rows       where results lie side by side: of a chunk at least,
    items      work items at most (partial results are written and read again),
    columns    and results of one item
    programs   of a GPU that share a fold that is read once; 0: a chunk has its `elements` then, too
    """

    elements: int = 1 << 16
    strands: int = 4
    shortest_strands: int = 512
    smallest: int = 1 << 16
    tiles: int = 64
    longest: int = 1 << 17
    rows: int = 512
    items: int = 1024
    columns: int = COLUMNS
    programs: int = 0


CPU = Cutting()


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


def worth_cutting(
    r: Reduce, weight: int, strides: Mapping[Tensor, Strides], how: Cutting = CPU
) -> bool:
    """Whether chunks would keep the threads busier, or the caches warmer. weight: elements that
    have to be read for all of its results."""
    elements, results = fold_elements(r), prod(a.extent for a in kept_axes(r))
    if r.monoid in ("any", "all") and r.body.dtype is not DType.BOOL:
        return False
    if elements < 2 or not results or max(elements * results, weight) < how.smallest:
        return False
    heavy = max(weight / (elements * results), 1.0)
    tiles = -(-results // how.columns) if side_by_side(r, strides) else results
    return tiles < how.tiles or elements * heavy >= how.longest


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
    r: Reduce,
    strides: Mapping[Tensor, Strides],
    inside: set[Tensor],
    weight: float = 1.0,
    how: Cutting = CPU,
    again: bool = False,
) -> Chunks | None:
    """Chunks of a fold; None if it is too short to be cut. again: each chunk is folded twice."""
    groups = _merged(r, strides, inside)
    left = _chunk_count(r, weight, strides, how, again)
    inner = fold_elements(r)
    chunks: list[Axis] = []
    within: list[Axis] = []
    place: dict[Axis, Expr] = {}
    rest: dict[Axis, Expr] = {}
    tail: list[Axis] = []
    for group in groups:
        n = prod(a.extent for a in group)
        inner //= n
        # of a GPU's chunks, one walk through memory is enough
        alone = again and how.programs and inner >= how.elements // 4
        pieces, length = (n, 1) if left >= n or alone else _pieces(n, left, how)
        index: Expr = Const(0, DType.I64)
        if pieces > 1:
            chunks.append(axis(pieces, "c"))
            index = chunks[-1] * length
        if length > 1:
            within.append(axis(length, "r"))
            index = index + within[-1]
        place |= unravelled(index, group)
        over = n - pieces * length
        left = max(-(-left // pieces), 1)
        # at most one group is cut with elements left over: of the others all belong to the tail
        tail.append(axis(over or n, "r"))
        rest |= unravelled(tail[-1] + (pieces * length if over else 0), group)
    total = prod(a.extent for a in r.axes)
    count = prod(a.extent for a in within)
    if prod(a.extent for a in chunks) < 2:
        return None
    covered = count * prod(a.extent for a in chunks) == total
    kept = kept_in_order(r, strides)
    last = () if covered else tuple(tail)
    return Chunks(tuple(chunks), tuple(within), kept, place, last, rest, count)


def _chunk_count(
    r: Reduce, weight: float, strides: Mapping[Tensor, Strides], how: Cutting, again: bool
) -> int:
    elements, results = fold_elements(r), prod(a.extent for a in kept_axes(r))
    heavy = max(weight / (elements * results), 1.0)
    if not side_by_side(r, strides):
        evenly = int(elements * heavy) * results // how.tiles
        size = min(max(evenly, how.elements // 8), how.elements)
        if how.programs:  # what is folded twice is held in registers
            size = how.elements if again or elements > how.elements else size
            size = size if again else max(size, int(elements * heavy) * results // how.programs)
        return max(int(elements * heavy) // size, 1)
    rows = max(int(how.elements / heavy) // results, how.rows)
    items = max(how.items // -(-results // how.columns), 16)
    return max(min(elements // rows, items), 1)


def _pieces(n: int, wanted: int, how: Cutting) -> tuple[int, int]:
    """How many pieces, from `wanted` up to twice as many, and their length: one that the strands
    share evenly, if pieces are that long, and that leaves nothing over, if one does."""
    if wanted == 1:
        return 1, n
    several = how.strands if n // wanted >= how.shortest_strands else 1
    pieces = next((k for k in range(wanted, 2 * wanted) if n % (several * k) == 0), wanted)
    length = n // pieces
    return pieces, length - length % several


def unravelled(index: Expr, group: Sequence[Axis]) -> dict[Axis, Expr]:
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


def kept_in_order(r: Reduce, strides: Mapping[Tensor, Strides]) -> tuple[Axis, ...]:
    """The axes of a fold's results as they lie in memory, slowest first."""
    return tuple(sorted(kept_axes(r), key=lambda a: -_step(r, a, strides)))


def walk_of(r: Reduce, strides: Mapping[Tensor, Strides], inside: set[Tensor]) -> list[Axis] | None:
    """A fold's axes, outermost first, if they walk memory as one axis."""
    groups = _merged(r, strides, inside)
    return groups[0] if len(groups) == 1 else None


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
