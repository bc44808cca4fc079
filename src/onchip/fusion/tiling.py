"""Tile sizes worth trying for a nest, and the nests they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, prod
from typing import TypeVar

from onchip.fusion.chunks import COLUMNS, fold_elements, side_by_side
from onchip.fusion.inline import substitute_simplified
from onchip.fusion.machine import Machine
from onchip.fusion.nest import Nest, build_nest
from onchip.fusion.operands import stage_operands
from onchip.fusion.product_tiles import product_tiles
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.staging import Staged
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Tensor, axis, loads, reduces
from onchip.ir.index import linear, simplify, used_as_value

Strides = tuple[int, ...]
T = TypeVar("T")

# One tile's intermediates should stay in a core's second-level cache.
SCRATCH_BUDGET = 768 * 1024
# A pass over this many elements takes a few microseconds: about what handing out a tile costs.
POINTWISE_TILE = 16384
# A long chain with many intermediates has room for so many elements of each.
SHORTER_TILES = (4096, 1024)
# A fold of this many elements whose results lie side by side is bound by memory: it walks rows.
LONG = 64
# Computing an intermediate more than this often is not fusion but waste.
RECOMPUTE_BUDGET = 1.6


def single_nests(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides], machine: Machine
) -> list[Nest] | Refusal:
    """Ways to run a region as one nest, best guess first; a Refusal names what none of the tiles
    satisfies."""
    return of_first_root(staged, lambda root: _nests_of_root(staged, root, strides, machine))


def nest_of(
    staged: tuple[Staged, ...], root: Tensor, strides: dict[Tensor, Strides], tile: tuple[int, ...]
) -> Nest | Refusal:
    """The one among `single_nests` with this root and tile, without any others."""
    first = next(s for s in staged if s.tensor is root)
    return build_nest(*_prepared(staged, first, strides), tile)


def of_first_root(staged: tuple[Staged, ...], make: Callable[[Staged], T | Refusal]) -> T | Refusal:
    """What `make` gives for the first result that can be a root, or the first one's refusal."""
    first: Refusal | None = None
    for root in roots(staged):
        found = make(root)
        if not isinstance(found, Refusal):
            return found
        first = first or found
    assert first is not None, "a region has an output"
    return first


def single_root(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides], machine: Machine
) -> Tensor | Refusal:
    """The root of a nest that `single_nests` finds, or its refusal; most often at the price of one
    nest: a single tile has room for everything and computes nothing twice."""
    for root in roots(staged):
        stages, whole = _prepared(staged, root, strides)
        tile = tuple(max(a.extent, 1) for a in whole.loops)
        if isinstance(build_nest(stages, whole, tile), Nest):
            return root.tensor
    found = single_nests(staged, strides, machine)
    return found if isinstance(found, Refusal) else found[0].root.tensor


def roots(staged: tuple[Staged, ...]) -> list[Staged]:
    """Results whose tiles could be the kernel's, largest first."""
    outputs = (s for s in staged if s.is_output)
    return sorted(outputs, key=lambda s: (-s.tensor.numel, -staged.index(s)))


def _prepared(
    staged: tuple[Staged, ...], root: Staged, strides: dict[Tensor, Strides]
) -> tuple[tuple[Staged, ...], Staged]:
    """Stages and root as their loops are tiled."""
    staged = stage_operands(staged, strides)
    root = next(s for s in staged if s.tensor is root.tensor)
    staged, root = in_layout_order(staged, root, strides)
    if not any(reduces(s.body) for s in staged):
        staged, root = coalesce(staged, root, strides)
    return staged, root


def _nests_of_root(
    staged: tuple[Staged, ...], root: Staged, strides: dict[Tensor, Strides], machine: Machine
) -> list[Nest] | Refusal:
    staged, root = _prepared(staged, root, strides)
    first: Refusal | None = None
    for choices in _tiles(staged, root, strides, machine):
        found: list[Nest] = []
        for tile in choices:
            nest = build_nest(staged, root, tile)
            problem = nest if isinstance(nest, Refusal) else over_budget(nest)
            if problem is None:
                assert isinstance(nest, Nest)
                found.append(nest)
            first = first or problem
        if found:  # one tile that spills is a last resort: nothing smaller is possible
            return [n for n in found if n.scratch_bytes <= SCRATCH_BUDGET] or found
    assert first is not None
    return first


def over_budget(nest: Nest) -> Refusal | None:
    if nest.scratch_bytes > SCRATCH_BUDGET and nest.tiles > 1:
        size = nest.scratch_bytes
        return Refusal(Rule.SCRATCH, "", f"{size // 1024} KiB", {"scratch_bytes": size})
    worst = max(nest.recompute().items(), key=lambda x: x[1], default=None)
    if worst is not None and worst[1] > RECOMPUTE_BUDGET:
        return Refusal(Rule.RECOMPUTE, worst[0].name, f"{worst[1]:.2f} times")
    return None


def in_layout_order(
    staged: tuple[Staged, ...], root: Staged, strides: dict[Tensor, Strides]
) -> tuple[tuple[Staged, ...], Staged]:
    """Root loops sorted as the result lies in memory, the contiguous one last."""

    def ordered(s: Staged) -> Staged:
        own = strides.get(s.tensor)
        if own is None:
            return s
        key = {a: -_store_stride(s, own, a) for a in s.loops}
        return replace(s, loops=tuple(sorted(s.loops, key=lambda a: key[a])))

    # siblings of the root's shape follow the root's order, so that they share its tiles
    new_root = ordered(root)
    positions = [root.loops.index(a) for a in new_root.loops]
    out = []
    for s in staged:
        if s is root:
            out.append(new_root)
        elif s.is_output and s.tensor.shape == root.tensor.shape and len(s.loops) == len(positions):
            out.append(replace(s, loops=tuple(s.loops[p] for p in positions)))
        else:
            out.append(s)
    return tuple(out), new_root


def _store_stride(s: Staged, strides: Strides, a: Axis) -> int:
    total = 0
    for i, st in zip(s.store, strides, strict=True):
        total += linear(i).coefficient(a) * st
    return abs(total)


def coalesce(
    staged: tuple[Staged, ...], root: Staged, strides: dict[Tensor, Strides]
) -> tuple[tuple[Staged, ...], Staged]:
    """Merge neighbouring loops that walk memory as one (a contiguous pointwise operator has a
    single loop). Only for nests of outputs that all run over the root's loops."""
    if any(len(s.loops) != len(root.loops) or not s.is_output for s in staged):
        return staged, root
    d = len(root.loops) - 2
    while d >= 0:
        if all(_mergeable(s, d, strides) for s in staged):
            merged = [_merge(s, d) for s in staged]
            root = merged[staged.index(root)]
            staged = tuple(merged)
        d -= 1
    return staged, root


def _mergeable(s: Staged, d: int, strides: dict[Tensor, Strides]) -> bool:
    outer, inner = s.loops[d], s.loops[d + 1]
    reads = loads(s.body)
    if any(ld.pad is not None for ld in reads):  # its bounds are conditions on each axis
        return False
    places = [(ld.index, ld.src) for ld in reads] + [(s.store, s.tensor)]
    for index, src in places:
        if src not in strides:
            return False
        co = ci = 0
        for i, st in zip(index, strides[src], strict=True):
            for atom, c in linear(i).terms:
                if atom is outer:
                    co += c * st
                elif atom is inner:
                    ci += c * st
                elif not isinstance(atom, Axis):
                    return False
        if co != ci * inner.extent:
            return False
    return not used_as_value(s.body, (outer, inner))


def _merge(s: Staged, d: int) -> Staged:
    outer, inner = s.loops[d], s.loops[d + 1]
    whole = axis(outer.extent * inner.extent)
    width = Const(inner.extent, DType.I64)
    mapping: dict[Axis, Expr] = {
        outer: simplify(Call("floordiv", (whole, width), DType.I64)),
        inner: simplify(Call("mod", (whole, width), DType.I64)),
    }
    return replace(
        s,
        body=substitute_simplified(s.body, mapping),
        loops=(*s.loops[:d], whole, *s.loops[d + 2 :]),
        store=tuple(simplify(substitute_simplified(i, mapping)) for i in s.store),
    )


# ---- tile sizes --------------------------------------------------------------------------------


def _tiles(
    staged: tuple[Staged, ...], root: Staged, strides: dict[Tensor, Strides], machine: Machine
) -> list[list[tuple[int, ...]]]:
    """Tiles worth building; and if none of them is possible, the smallest and the largest. Axes
    that some stage does not depend on stay whole; of the others, the outer ones are cut until
    there is enough parallel work."""
    extents = [max(a.extent, 1) for a in root.loops]
    whole = whole_axes(staged, root)
    everything = tuple(extents)
    smallest = tuple(e if w else 1 for e, w in zip(extents, whole, strict=True))
    if any(_is_product(s) for s in staged):
        best = product_tiles(staged, root, whole, machine)
    else:
        best = [_pointwise_tile(extents, whole, machine, staged, strides, POINTWISE_TILE)]
        if prod(extents) * fold_length(staged) <= 4 * POINTWISE_TILE:
            best.append(everything)  # too little work to hand out in pieces
        shorter = [
            _pointwise_tile(extents, whole, machine, staged, strides, n) for n in SHORTER_TILES
        ]
        return [list(dict.fromkeys(best)), *([t] for t in shorter), [smallest, everything]]
    return [list(dict.fromkeys(best)), [smallest, everything]]


def fold_length(staged: tuple[Staged, ...]) -> int:
    """Elements that one element of the result folds, at most."""
    folds = (prod(a.extent for r in reduces(s.body) for a in r.axes) for s in staged)
    return max(max(folds, default=1), 1)


def _is_product(s: Staged) -> bool:
    return s.product is not None


def whole_axes(staged: tuple[Staged, ...], root: Staged) -> list[bool]:
    """Axes along which cutting would compute some stage again for each piece."""
    unit = tuple(1 for _ in root.loops)
    nest = build_nest(staged, root, unit)
    if isinstance(nest, Refusal):
        # an output is shared between tiles somewhere: cut only what every output depends on
        return axes_missing_in_outputs(staged, root)
    whole = [False] * len(root.loops)
    for st in nest.stages:
        if st.staged is root:
            continue
        seen = {a for sp in st.box for a, _ in linear(sp.origin).terms}
        for d, o in enumerate(nest.tile_axes):
            if o not in seen and root.loops[d].extent > 1:
                whole[d] = True
    return whole


def axes_missing_in_outputs(staged: tuple[Staged, ...], root: Staged) -> list[bool]:
    """Axes that can't be cut into single elements: tiles would share another result."""
    result = []
    for d, a in enumerate(root.loops):
        tile = tuple(1 if n == d else max(b.extent, 1) for n, b in enumerate(root.loops))
        result.append(a.extent > 1 and isinstance(build_nest(staged, root, tile), Refusal))
    return result


def _pointwise_tile(
    extents: list[int],
    whole: list[bool],
    machine: Machine,
    staged: tuple[Staged, ...],
    strides: dict[Tensor, Strides],
    most: int,
) -> tuple[int, ...]:
    """Grow the tile from the innermost axis outwards to `most` elements; long folds whose results
    lie side by side in memory walk rows of COLUMNS elements at least."""
    target = max(most // fold_length(staged), 1)
    total = prod(extents)
    target = max(min(target, ceil(total / (4 * machine.threads))), 1)
    long = [r for s in staged for r in reduces(s.body) if fold_elements(r) >= LONG]
    if extents and any(side_by_side(r, strides) for r in long):
        target = max(target, min(COLUMNS, extents[-1]))
    tile = [e if w else 1 for e, w in zip(extents, whole, strict=True)]
    for d in reversed(range(len(extents))):
        if whole[d]:
            continue
        room = target // max(prod(tile), 1)
        tile[d] = max(min(extents[d], room), 1)
        if tile[d] < extents[d]:
            break
    return tuple(tile)
