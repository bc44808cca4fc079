"""Rows that several programs share: one read and one write of a row that no program holds.

for each row, for each chunk of it:        one program
    partial results of the chunk           (max, sum of exponentials; mean, squares about it)
    wait for the other programs of the row
    combine the partial results of the row (each program for itself)
    compute the chunk from them            its elements are in registers still
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from onchip.backends.triton.phase_tiles import cutting
from onchip.backends.triton.phases import MOST_SHARING, exchangeable
from onchip.backends.triton.source import Options, Variant
from onchip.fusion.chunks import kept_in_order, unravelled, walk_of
from onchip.fusion.inline import inline, substitute_simplified
from onchip.fusion.machine import HOPPER, Gpu
from onchip.fusion.nest import Nest, build_nest
from onchip.fusion.phases import with_scratch
from onchip.fusion.split import split_folds
from onchip.fusion.staging import Staged
from onchip.ir.expr import Axis, Expr, Load, Reduce, Tensor, axis, loads, mentioned, reduces
from onchip.ir.index import linear, simplify, structural_key

Strides = tuple[int, ...]

# Elements of a chunk, and the warps of its program: 64 elements a thread, or 32. What counts is how
# many elements all programs of a multiprocessor hold: 64 a thread take fewer registers each.
SHAPES = ((16384, 8), (8192, 8), (8192, 4), (16384, 16), (4096, 4))


def joined_variants(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides], gpu: Gpu, row: int, base: Options
) -> list[Variant]:
    """Variants with one chunk of a row a program; none where rows don't divide into chunks, or a
    result is something else than a function of rows. row: elements of the longest row that a
    program holds."""
    out: list[Variant] = []
    for size, warps in SHAPES:
        nest = _joined(staged, strides, gpu, row, size)
        if nest is not None:
            cluster = gpu.capability >= HOPPER and exchangeable(nest)
            options = replace(base, warps=warps, fold_block=row, packed=True)
            out.append(Variant(nest, replace(options, joined=True, cluster=cluster)))
    return out


def _joined(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides], gpu: Gpu, row: int, size: int
) -> Nest | None:
    folds = [r for s in staged for r in reduces(s.body) if not s.is_output]
    ends = [s for s in staged if s.is_output]
    if not folds or len(ends) != 1 or reduces(ends[0].body):
        return None
    cut = split_folds(staged, strides, cutting(gpu, row, size))
    partials = [s for s in cut if s.shared and s.tensor not in {x.tensor for x in staged}]
    whole = walk_of(folds[0], strides, {s.tensor for s in staged})
    if not partials or whole is None:
        return None
    chunks, *_ = partials[0].tensor.shape
    inside = _inside(partials[0])
    elements = prod(a.extent for a in whole)
    if chunks > MOST_SHARING or chunks * inside != elements:
        return None
    root = _in_chunks(ends[0], folds[0], whole, (chunks, inside), strides)
    return None if root is None else _nests(cut, partials, root)


def _inside(partial: Staged) -> int:
    """Elements of a chunk, of a partial result with one axis of chunks."""
    (fold,) = [r for r in reduces(partial.body)] or [None]
    return fold.axes[0].extent if fold is not None and len(fold.axes) == 1 else 0


def _in_chunks(
    end: Staged,
    fold: Reduce,
    walk: list[Axis],
    sizes: tuple[int, int],
    strides: Mapping[Tensor, Strides],
) -> Staged | None:
    """The result over rows, chunks of them, and elements of a chunk: its loops are matched with
    the fold's axes by a tensor that both read."""
    found = _matched(end, fold)
    if found is None:
        return None
    chunk, inside = axis(sizes[0], "c"), axis(sizes[1], "r")
    rows = {a: axis(a.extent) for a in kept_in_order(fold, strides)}
    place = unravelled(chunk * sizes[1] + inside, walk) | rows
    new: dict[Axis, Expr] = {a: place[b] for a, b in found.items()}
    return replace(
        end,
        body=substitute_simplified(end.body, new),
        loops=(*rows.values(), chunk, inside),
        store=tuple(simplify(substitute_simplified(i, new)) for i in end.store),
    )


def _matched(end: Staged, fold: Reduce) -> dict[Axis, Axis] | None:
    """Each loop of a result, and the axis of the fold that it is."""
    wanted = {*fold.axes, *(a for a in mentioned(fold.body) if a not in fold.axes)}
    for mine in loads(end.body):
        for theirs in loads(fold.body):
            if mine.src is not theirs.src or mine.pad is not None or theirs.pad is not None:
                continue
            found = _same_place(mine, theirs)
            if found and set(found) == set(end.loops) and set(found.values()) == wanted:
                return found
    return None


def _same_place(mine: Load, theirs: Load) -> dict[Axis, Axis] | None:
    out: dict[Axis, Axis] = {}
    for i, j in zip(mine.index, theirs.index, strict=True):
        a, b = linear(i), linear(j)
        by_step = {c: x for x, c in b.terms}
        if a.constant != b.constant or sorted(c for _, c in a.terms) != sorted(by_step):
            return None
        for x, c in a.terms:
            y = by_step[c]
            if not isinstance(x, Axis) or not isinstance(y, Axis) or x.extent != y.extent:
                return None
            if out.setdefault(x, y) is not y:
                return None
    return out if len(set(out.values())) == len(out) else None


def _nests(cut: tuple[Staged, ...], partials: list[Staged], root: Staged) -> Nest | None:
    """A nest for the partial results of each level, and one for the root; what combines partial
    results is computed by every program."""
    made = {s.tensor for s in partials}
    combined = [replace(s, is_output=False, shared=False) for s in cut if s.tensor not in made]
    stages = [root if s.tensor is root.tensor else s for s in combined]
    ordered = [replace(s, loops=(*s.loops[1:], s.loops[0])) for s in partials]
    if any(not _of_own_rows(s, stages, made, (*root.loops[:-2],)) for s in (root,)):
        return None
    if any(not _reads_the_same(s, root) for s in ordered):
        return None
    levels: dict[int, list[Staged]] = {}
    for s in ordered:
        levels.setdefault(_barriers(s, stages, ordered), []).append(s)
    before = []
    for n in sorted(levels):
        needed = with_scratch(levels[n], (*stages, *levels[n]))
        one = build_nest(needed, levels[n][-1], tuple(1 for _ in levels[n][-1].loops))
        if not isinstance(one, Nest):
            return None
        before.append(one)
    last = replace(root, is_output=True)
    needed = with_scratch([last], (*(s for s in stages if s is not root), last))
    nest = build_nest(needed, last, (*(1 for _ in root.loops[:-1]), root.loops[-1].extent))
    return replace(nest, before=tuple(before)) if isinstance(nest, Nest) else None


def _barriers(s: Staged, stages: list[Staged], partials: list[Staged]) -> int:
    """Barriers that stand before a stage: one behind each partial result that another combines."""
    by_name = {x.tensor: x for x in (*stages, *partials)}
    own = {p.tensor for p in partials}
    most = 0
    for ld in loads(s.body):
        if ld.src in by_name and ld.src is not s.tensor:
            beside = s.tensor in own and ld.src in own
            here = ld.src in own and not beside
            most = max(most, _barriers(by_name[ld.src], stages, partials) + here)
    return most


def _of_own_rows(
    s: Staged, stages: list[Staged], partials: set[Tensor], rows: tuple[Axis, ...]
) -> bool:
    """All partial results that a stage depends on are those of its own row."""
    bodies: dict[Tensor, Expr] = {}
    for x in stages:
        if x.tensor is not s.tensor:
            bodies[x.tensor] = inline(x.body, bodies)
    found = [ld for ld in loads(inline(s.body, bodies)) if ld.src in partials]
    keys = [structural_key(a) for a in rows]
    return bool(found) and all([structural_key(i) for i in ld.index[1:]] == keys for ld in found)


def _reads_the_same(partial: Staged, root: Staged) -> bool:
    """A partial result folds the very elements that the root's tile of the same number reads."""
    fold, *more = reduces(partial.body)
    if more:
        return False
    new: dict[Axis, Expr] = dict(zip((*partial.loops, *fold.axes), root.loops, strict=True))
    body = substitute_simplified(fold.body, new)
    theirs = {structural_key(ld) for ld in loads(root.body)}
    return any(structural_key(ld) in theirs for ld in loads(body))
