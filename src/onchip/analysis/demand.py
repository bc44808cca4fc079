"""Which elements of a tensor's inputs a box of the tensor needs (its halo), and what computing a
producer inside a tiled consumer costs in repeated evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

from onchip.ir.expr import Axis, Load, Tensor, loads, mentioned
from onchip.ir.graph import defined_by
from onchip.ir.index import UNKNOWN, Env, Interval, bounds, simplify

Box = tuple[Interval, ...]  # per axis (first, last), inclusive; last < first is empty


def whole(tensor: Tensor) -> Box:
    return tuple((0, n - 1) for n in tensor.shape)


def volume(box: Box) -> int:
    """Number of elements in a box."""
    return prod(max(0, hi - lo + 1) for lo, hi in box)


def hull(a: Box, b: Box) -> Box:
    """The smallest box around two; an empty one adds nothing."""
    if not volume(a):
        return b
    if not volume(b):
        return a
    return tuple((min(p, r), max(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))


def clip(box: Box, tensor: Tensor) -> Box:
    return tuple(
        (max(lo, 0), min(hi, n - 1)) for (lo, hi), n in zip(box, tensor.shape, strict=True)
    )


def demand(tensor: Tensor, region: Box) -> dict[Tensor, Box]:
    """For each tensor that `tensor`'s expression reads: the box of it that the box `region` of
    `tensor` needs, clipped to its shape. Exact for affine indices; a superset otherwise (a
    data-dependent index needs the whole axis). Nothing is needed for an empty region."""
    if tensor.body is None or not volume(region):
        return {}
    env = _environment(tensor, region)
    out: dict[Tensor, Box] = {}
    for ld in loads(tensor.body):
        box = clip(_reach(ld, env), ld.src)
        out[ld.src] = hull(out[ld.src], box) if ld.src in out else box
    return out


def demand_through(tensor: Tensor, region: Box, inputs: Iterable[Tensor]) -> dict[Tensor, Box]:
    """`demand` carried back through every expression between `inputs` and `tensor`: the box of
    each tensor on the way and of each input."""
    order = defined_by([tensor], inputs)
    need: dict[Tensor, Box] = {tensor: region}
    for t in reversed(order):
        for src, box in demand(t, need[t]).items() if t in need else ():
            need[src] = hull(need[src], box) if src in need else box
    return need


def _environment(tensor: Tensor, region: Box) -> Env:
    assert len(region) == tensor.rank, f"{tensor} asked for a box of {len(region)} axes"
    return dict(zip(tensor.axes, region, strict=True))


def _reach(load: Load, env: Env) -> Box:
    """Unclipped bounds of a load's index; empty if one of its axes is."""
    if any(_length(a, env) == 0 for i in load.index for a in mentioned(i)):
        return tuple((0, -1) for _ in load.index)
    return tuple(bounds(simplify(i), env) for i in load.index)


def _length(a: Axis, env: Env) -> int:
    lo, hi = env.get(a, (0, a.extent - 1))
    return hi - lo + 1


# ---- recomputation -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dimension:
    """One axis of the producer: elements evaluated in a tile, and by how much the tile's demand
    moves when the consumer's tile moves one step along each of its tiled axes."""

    evaluated: int
    advance: dict[Axis, int]


def recompute_factor(consumer: Tensor, producer: Tensor, tile: Sequence[int]) -> float:
    """Elements of `producer` evaluated per element needed, when `consumer` is computed in tiles
    of shape `tile` and each tile evaluates what it reads of the producer itself.

    Boundary effects are left out (the figure of an interior tile): a 2x2/2 pooling costs 1.0, a
    3x3/2 pooling 2.25 with single-element tiles and (2t+1)^2/(2t)^2 with t x t tiles. An axis that
    the producer does not see (the columns of a matrix product, for its lhs) costs a factor of the
    number of tiles along it. 1.0 if the consumer does not read the producer.
    """
    assert len(tile) == consumer.rank, f"tile of {len(tile)} axes for {consumer}"
    if consumer.body is None or not consumer.numel or not producer.numel:
        return 1.0
    reads = [ld for ld in loads(consumer.body) if ld.src is producer]
    if not reads:
        return 1.0
    sizes = {a: max(1, min(t, a.extent)) for a, t in zip(consumer.axes, tile, strict=True)}
    steps = {a: ceil(a.extent / t) for a, t in sizes.items() if t < a.extent}
    factor, seen = 1.0, set()
    for d in range(producer.rank):
        dim = _dimension(reads, d, sizes, steps)
        movers = {a: n for a, n in dim.advance.items() if n}
        seen |= set(movers)
        if len(movers) == 1:
            (advance,) = movers.values()
            factor *= dim.evaluated / min(dim.evaluated, advance)
        elif movers:
            tiles = prod(steps[a] for a in movers)
            factor *= max(1.0, dim.evaluated * tiles / producer.shape[d])
    return factor * prod(n for a, n in steps.items() if a not in seen)


def _dimension(
    reads: list[Load], d: int, sizes: dict[Axis, int], steps: dict[Axis, int]
) -> _Dimension:
    env: Env = {a: (0, t - 1) for a, t in sizes.items()}
    lo, hi = _span(reads, d, env)
    extent = reads[0].src.shape[d]
    if lo <= UNKNOWN[0] // 2 or hi >= UNKNOWN[1] // 2:
        return _Dimension(extent, {})
    # dilation and strides leave holes: no more is evaluated than there are taps
    taps = sum(
        prod(sizes.get(a, a.extent) for a in mentioned(simplify(ld.index[d]))) for ld in reads
    )
    advance = {}
    for a in steps:
        moved = env | {a: (sizes[a], 2 * sizes[a] - 1)}
        advance[a] = abs(_span(reads, d, moved)[0] - lo)
    return _Dimension(max(1, min(hi - lo + 1, taps)), advance)


def _span(reads: list[Load], d: int, env: Env) -> Interval:
    spans = [bounds(simplify(ld.index[d]), env) for ld in reads]
    return min(s[0] for s in spans), max(s[1] for s in spans)
