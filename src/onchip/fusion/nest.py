"""The loop nest: a parallel loop over tiles of one root tensor, and stages inside each tile.

    for tile in root:                    # parallel
        stage 1 over the box that the later stages need of it   -> scratch
        ...
        root over the tile                                      -> global

A kernel may have several nests, one after the other with a barrier between (fusion/phases.py); what
one hands on to the next is "shared" memory of all threads.

Boxes follow from the index expressions by interval arithmetic (the halo of an overlapping pool,
the whole row of a softmax). Both code generators read this structure.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from onchip.fusion.contraction import Contraction
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.staging import Staged
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Tensor, axis, substitute
from onchip.ir.index import UNKNOWN, bounds, linear, simplify, structural_key


@dataclass(frozen=True, eq=False, slots=True)
class Span:
    """origin <= i < origin + extent along one axis; the origin is affine in the tile's origins.
    Loops clip it to the tensor."""

    origin: Expr
    extent: int

    @property
    def depends(self) -> bool:
        return not isinstance(self.origin, Const)


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """A stored tensor of the nest and the box of it that one tile computes (over `loops`, and
    over the tensor's dimensions in `box`)."""

    staged: Staged
    placement: str  # "scratch" | "shared" | "global"
    spans: tuple[Span, ...]
    box: tuple[Span, ...]
    contraction: Contraction | None

    @property
    def tensor(self) -> Tensor:
        return self.staged.tensor


@dataclass(frozen=True, eq=False, slots=True)
class Nest:
    """tile_axes[d] is the origin of the tile along root.loops[d]; it steps by tile[d]. before:
    nests of the same kernel that are complete before this one starts."""

    root: Staged
    tile_axes: tuple[Axis, ...]
    tile: tuple[int, ...]
    stages: tuple[Stage, ...]
    before: tuple[Nest, ...] = ()

    @property
    def phases(self) -> tuple[Nest, ...]:
        """All nests of the kernel, in order."""
        return (*self.before, self)

    @property
    def tiles(self) -> int:
        return prod(ceil(a.extent / t) for a, t in zip(self.root.loops, self.tile, strict=True))

    @property
    def scratch_bytes(self) -> int:
        return sum(
            prod(s.extent for s in st.box) * st.tensor.dtype.size
            for st in self.stages
            if st.placement == "scratch"
        )

    def recompute(self) -> dict[Tensor, float]:
        """Elements computed over elements there are, for every stage."""
        out = {}
        for st in self.stages:
            volume = prod(s.extent for s in st.spans)
            repeats = prod(
                ceil(a.extent / t) for a, t in zip(self.root.loops, self.tile, strict=True)
            )
            out[st.tensor] = repeats * volume / max(st.tensor.numel, 1)
        return out


def build_nest(staged: tuple[Staged, ...], root: Staged, tile: tuple[int, ...]) -> Nest | Refusal:
    """Boxes of all stages for one tile size of `root`."""
    tile_axes = tuple(axis(a.extent, "t") for a in root.loops)
    root_spans = tuple(
        Span(Const(0, DType.I64) if t >= a.extent else o, min(t, max(a.extent, 1)))
        for o, t, a in zip(tile_axes, tile, root.loops, strict=True)
    )
    need: dict[Tensor, list[Span]] = {}
    stages: list[Stage] = []
    inside = {s.tensor for s in staged}
    for s in reversed(staged):
        beside = s.is_output and _parallel(s, root) and _read_in_step(s, stages, root_spans)
        if s is root or beside:
            spans = root_spans
            box = _box_of(s, spans)
        elif s.tensor in need:
            box = tuple(need[s.tensor])
            if s.is_output:
                refusal = _partition(s, box, root_spans)
                if refusal:
                    return refusal
            got = _loop_spans(s, box)
            if isinstance(got, Refusal):
                return got
            spans = got
        else:
            return Refusal(Rule.SECOND_OUTPUT, s.tensor.name, "it has no tile in common")
        _demand(s, spans, need, inside)
        placement = "shared" if s.shared else "global" if s.is_output else "scratch"
        stages.append(Stage(s, placement, spans, box, s.product))
    return Nest(root, tile_axes, tile, tuple(reversed(stages)))


def _parallel(s: Staged, root: Staged) -> bool:
    return [a.extent for a in s.loops] == [a.extent for a in root.loops] and (
        s.tensor.shape == root.tensor.shape
    )


def _read_in_step(s: Staged, readers: list[Stage], root: tuple[Span, ...]) -> bool:
    """Every reader runs over the same tile, and reads of `s` the element that it computes itself
    (or nobody reads it)."""
    for r in readers:
        mapping: dict[Axis, Expr] = dict(zip(s.loops, r.staged.loops, strict=False))
        for ld in r.staged.loads:
            if ld.src is not s.tensor:
                continue
            if r.spans is not root or any(
                structural_key(i) != structural_key(substitute(own, mapping))
                for i, own in zip(ld.index, s.store, strict=True)
            ):
                return False
    return True


def _box_of(s: Staged, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Dimensions' spans from the loops' spans."""
    env = dict(zip(s.loops, spans, strict=True))
    return tuple(span_of(i, env, n) for i, n in zip(s.store, s.tensor.shape, strict=True))


def span_of(index: Expr, env: dict[Axis, Span], size: int) -> Span:
    """The span of an index expression when each axis covers its span (others: their extent)."""
    form = linear(index)
    origin: Expr = Const(form.constant, DType.I64)
    extent = 1
    for atom, c in form.terms:
        if isinstance(atom, Axis):
            s = env.get(atom, Span(Const(0, DType.I64), atom.extent))
            low = s.origin * c + (min(0, c * (s.extent - 1)))
            width = abs(c) * (s.extent - 1)
        else:
            lo, hi = bounds(atom)
            if lo <= UNKNOWN[0] or hi >= UNKNOWN[1]:
                return Span(Const(0, DType.I64), size)
            low = Const(min(lo * c, hi * c), DType.I64)
            width = abs(c) * (hi - lo)
        origin = simplify(origin + low)
        extent += width
    if isinstance(origin, Const) and extent >= size:
        return Span(Const(0, DType.I64), size)
    return Span(origin, extent)


def _union(a: Span, b: Span, size: int) -> Span:
    difference = simplify(b.origin - a.origin)
    if not isinstance(difference, Const):
        return Span(Const(0, DType.I64), size)
    d = int(difference.value)
    first = a.origin if d >= 0 else b.origin
    extent = max(a.extent, d + b.extent) if d >= 0 else max(b.extent, a.extent - d)
    if isinstance(first, Const):
        lo = max(int(first.value), 0)
        hi = min(int(first.value) + extent, size)
        return Span(Const(lo, DType.I64), max(hi - lo, 0))
    return Span(first, extent)


def _demand(
    s: Staged, spans: tuple[Span, ...], need: dict[Tensor, list[Span]], inside: set[Tensor]
) -> None:
    env = dict(zip(s.loops, spans, strict=True))
    for ld in s.loads:
        if ld.src not in inside:
            continue
        box = [span_of(i, env, n) for i, n in zip(ld.index, ld.src.shape, strict=True)]
        old = need.get(ld.src)
        need[ld.src] = (
            box
            if old is None
            else [_union(a, b, n) for a, b, n in zip(old, box, ld.src.shape, strict=True)]
        )


def _partition(s: Staged, box: tuple[Span, ...], root: tuple[Span, ...]) -> Refusal | None:
    """An output computed on the way must be computed exactly once: each tiled axis of the root
    appears in exactly one dimension, with the tile's own extent."""
    tiled = {id(r.origin): r for r in root if r.depends}
    used = set()
    for span, n in zip(box, s.tensor.shape, strict=True):
        if not span.depends:
            if span.extent < n:
                return Refusal(Rule.SECOND_OUTPUT, s.tensor.name, "only a part of it is read")
            continue
        form = linear(span.origin)
        if len(form.terms) != 1 or form.constant:
            return Refusal(Rule.SECOND_OUTPUT, s.tensor.name, "tiles of it overlap")
        atom, c = form.terms[0]
        match = [r for r in tiled.values() if r.origin is atom]
        if not match or span.extent != c * match[0].extent:
            return Refusal(Rule.SECOND_OUTPUT, s.tensor.name, "tiles of it overlap or leave gaps")
        used.add(id(atom))
    if used != set(tiled):
        return Refusal(Rule.SECOND_OUTPUT, s.tensor.name, "several tiles would write it")
    return None


def _loop_spans(s: Staged, box: tuple[Span, ...]) -> tuple[Span, ...] | Refusal:
    """Loops' spans from the dimensions' spans, for stages whose axes were split."""
    out: dict[Axis, Span] = {}
    for index, span in zip(s.store, box, strict=True):
        if isinstance(index, Axis):
            out[index] = span
            continue
        terms = sorted(linear(index).terms, key=lambda t: -t[1])
        if not all(isinstance(atom, Axis) for atom, _ in terms):
            return Refusal(Rule.NOT_VECTORISABLE, s.tensor.name, "its axes are merged")
        rest_origin, rest_extent = span.origin, span.extent
        full = not span.depends and rest_extent >= prod(a.extent for a, _ in terms)  # type: ignore[attr-defined]
        for atom, c in terms:
            assert isinstance(atom, Axis)
            if full:
                out[atom] = Span(Const(0, DType.I64), atom.extent)
                continue
            quotient = simplify(Call("floordiv", (rest_origin, Const(c, DType.I64)), DType.I64))
            remainder = simplify(Call("mod", (rest_origin, Const(c, DType.I64)), DType.I64))
            if not isinstance(remainder, Const) or int(remainder.value) or rest_extent % c:
                return Refusal(Rule.NOT_VECTORISABLE, s.tensor.name, "tiles cut a split axis")
            out[atom] = Span(quotient, rest_extent // c)
            rest_origin, rest_extent, full = Const(0, DType.I64), c, True
    return tuple(out[a] for a in s.loops)


__all__ = ["Nest", "Span", "Stage", "build_nest", "span_of", "substitute"]
