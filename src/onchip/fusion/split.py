"""Folds of many elements into few results, cut into chunks that are folded side by side.

    t[k] = finish(fold over r of body(k, r))        one tile, or as many tiles as there are results
becomes
    partial[c, k] = fold over the r of chunk c      as many tiles as there are chunks
    t[k] = finish(fold over c of partial[c, k], and over the few r that no chunk covers)

Both are ordinary tensors: the second reads the first whole, so a barrier stands between them
(fusion/phases.py). How a fold is cut depends on sizes and strides alone, never on the number of
threads, and so do the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, prod

from onchip.fusion.chunks import (
    CPU,
    Chunks,
    Cutting,
    cut_fold,
    kept_axes,
    worth_cutting,
)
from onchip.fusion.inline import substitute_simplified
from onchip.fusion.staging import Staged
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
    call,
    children,
    lift,
    loads,
    mentioned,
    reduces,
    rewrite,
    where,
)
from onchip.ir.index import structural_key

Strides = tuple[int, ...]

_COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
_COMBINE |= {"any": "logical_or", "all": "logical_and"}


@dataclass(frozen=True, eq=False, slots=True)
class _Centre:
    """A mean whose sum, or a maximum, `fold`, was cut; partial: the folds of its chunks."""

    cut: Chunks
    fold: Reduce
    partial: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class _Cutter:
    """How the folds of one stage are cut. weight: see worth_cutting; again: means and maxima about
    which their elements are folded once more."""

    how: Cutting
    strides: Mapping[Tensor, Strides]
    inside: set[Tensor]
    weight: int
    again: set[Tensor]

    def cut(self, r: Reduce, result: Tensor) -> Chunks | None:
        twice = result in self.again
        return cut_fold(r, self.strides, self.inside, self.weight, self.how, twice)


def split_folds(
    staged: tuple[Staged, ...], strides: Mapping[Tensor, Strides], how: Cutting = CPU
) -> tuple[Staged, ...]:
    """The stages with their large folds cut. Partial results and what is combined of them are
    `shared`: kept in memory for the phases after their own."""
    inside = {s.tensor for s in staged}
    centres: dict[Tensor, _Centre] = {}
    again = {m.src for s in staged for r in reduces(s.body) if (m := _centre_of(r)) is not None}
    behind: dict[Tensor, int] = {}  # elements that have to be read for one that is not stored
    out: list[Staged] = []
    for s in staged:
        weight = max((behind.get(ld.src, _elements_read(ld)) for ld in loads(s.body)), default=1)
        large = [r for r in _outermost(s.body) if worth_cutting(r, weight, strides, how)]
        out += _split(s, large, _Cutter(how, strides, inside, weight, again), centres)
        behind[s.tensor] = s.tensor.numel if out[-1].is_output else weight
    return tuple(out)


def _elements_read(ld: Load) -> int:
    """Of a tensor: all of it, or one for each combination of the axes (a lookup)."""
    return min(ld.src.numel, prod(a.extent for a in mentioned(ld)))


def _split(
    s: Staged,
    large: list[Reduce],
    cutter: _Cutter,
    centres: dict[Tensor, _Centre],
) -> list[Staged]:
    """The partial results of the folds of one stage, and the stage that combines them."""
    out: list[Staged] = []
    new: dict[Expr, Expr] = {}
    for r in large:
        about = _about_centre(r, centres)
        if about is not None:
            made = _recentred(r, *about, cutter.how)
        else:
            cut = cutter.cut(r, s.tensor)
            if cut is None or (r.monoid.startswith("arg") and not cut.inside):
                continue
            find = _argument if r.monoid.startswith("arg") else _partial
            made = find(r, cut, cutter.how)
            _note_centre(s, r, cut, made[0][0].tensor, centres)
        parts, new[r] = made
        out += parts
    if not out:
        return [s]
    return [*out, shared(replace(s, body=rewrite(s.body, new.get)))]


def shared(s: Staged) -> Staged:
    """A stage whose values later phases read: if it is no output, they lie in the workspace."""
    return s if s.is_output else replace(s, is_output=True, shared=True)


def _outermost(e: Expr) -> list[Reduce]:
    """Folds that stand in no other fold and in no index."""
    out, stack, seen = [], [e], set()
    while stack:
        x = stack.pop()
        if x in seen or isinstance(x, Load):
            continue
        seen.add(x)
        if isinstance(x, Reduce):
            out.append(x)
        else:
            stack.extend(reversed(children(x)))
    return out


# ---- what they become --------------------------------------------------------------------------


def _stored(name: str, over: tuple[Axis, ...], kept: tuple[Axis, ...], body: Expr) -> Staged:
    """A tensor of partial results over fresh axes."""
    old = (*over, *kept)
    fresh = tuple(axis(a.extent) for a in old)
    body = substitute_simplified(body, dict(zip(old, fresh, strict=True)))
    t = Tensor(f"{name}_0", tuple(a.extent for a in fresh), body.dtype, fresh, body)
    return Staged(t, body, True, fresh, fresh, shared=True)


def _folded(monoid: str, axes: tuple[Axis, ...], body: Expr, how: Cutting) -> Expr:
    """A fold within a chunk, in strands where its longest axis has them."""
    long = max(axes, key=lambda a: a.extent, default=None)
    if long is None:
        return body
    strands = how.strands
    if strands < 2 or long.extent < how.shortest_strands or long.extent % strands:
        return Reduce(monoid, axes, body)
    strand, step = axis(strands, "s"), axis(long.extent // strands, "r")
    body = substitute_simplified(body, {long: strand * step.extent + step})
    own = tuple(step if a is long else a for a in axes)
    return Reduce(monoid, own, Reduce(monoid, (strand,), body))


def _with_tail(r: Reduce, cut: Chunks, whole: Expr) -> Expr:
    if not cut.tail:
        return whole
    rest = Reduce(r.monoid, cut.tail, substitute_simplified(r.body, cut.rest))
    return Call(_COMBINE[r.monoid], (whole, rest), r.dtype)


def _partial(r: Reduce, cut: Chunks, how: Cutting) -> tuple[list[Staged], Expr]:
    body = _folded(r.monoid, cut.inside, substitute_simplified(r.body, cut.place), how)
    part = _stored("partial", cut.chunks, cut.kept, body)
    whole = Reduce(r.monoid, cut.chunks, Load(part.tensor, (*cut.chunks, *cut.kept)))
    return [part], _with_tail(r, cut, whole)


def _argument(r: Reduce, cut: Chunks, how: Cutting) -> tuple[list[Staged], Expr]:
    """The extreme value of each chunk; the first chunk that has the extreme of all; its position
    in there. Only that chunk is read again."""
    extreme, kept = r.monoid.removeprefix("arg"), cut.kept
    body = substitute_simplified(r.body, cut.place)
    part = _stored("extreme", cut.chunks, kept, _folded(extreme, cut.inside, body, how))
    best = Load(part.tensor, (*cut.chunks, *kept))
    winner = _stored("winner", (), kept, Reduce(r.monoid, cut.chunks, best))
    (c,), (i,) = cut.chunks, cut.inside
    at = Load(winner.tensor, kept)
    found = Reduce(r.monoid, (i,), substitute_simplified(body, {c: at}))
    position: Expr = at * i.extent + found
    if not cut.tail:
        return [part, winner], position
    last = substitute_simplified(r.body, cut.rest)
    ours, theirs = Reduce(extreme, cut.chunks, best), Reduce(extreme, cut.tail, last)
    better = Call("gt" if extreme == "max" else "lt", (theirs, ours), DType.BOOL)
    if r.body.dtype.is_float:
        nan, number = Call("ne", (theirs, theirs), DType.BOOL), Call("eq", (ours, ours), DType.BOOL)
        first_nan = Call("logical_and", (nan, number), DType.BOOL)
        better = Call("logical_or", (better, first_nan), DType.BOOL)
    beyond = Reduce(r.monoid, cut.tail, last) + c.extent * i.extent
    return [part, winner], Call("where", (better, beyond, position), DType.I64)


# ---- variances and softmax: one pass over memory -----------------------------------------------


def _note_centre(
    s: Staged, r: Reduce, cut: Chunks, partial: Tensor, centres: dict[Tensor, _Centre]
) -> None:
    match s.body:
        case Call(fn="div", args=(fold, Const(value=n))) if (
            fold is r and r.monoid == "sum" and n == prod(a.extent for a in r.axes)
        ):
            centres[s.tensor] = _Centre(cut, r, partial)
        case Call(
            fn="where", args=(Call(fn="eq", args=(a, Const(value=v))), Const(value=0), b)
        ) if a is b is r and r.monoid == "max" and v == -inf:
            centres[s.tensor] = _Centre(cut, r, partial)
        case Reduce(monoid="max") if s.body is r:
            centres[s.tensor] = _Centre(cut, r, partial)


def _centre_of(r: Reduce) -> Load | None:
    """The load of the mean in `sum (x - mean)^2`, or of the maximum in `sum exp(x - max)`."""
    found = _deviation(r)
    return found[1] if found else None


def _deviation(r: Reduce) -> tuple[Expr, Load, str] | None:
    """x, the load of its centre, and the fold that the centre must be."""
    if r.monoid != "sum":
        return None
    match r.body:
        case Call(fn="mul", args=(Call(fn="sub", args=(x, Load() as mean)) as a, b)) if (
            structural_key(a) == structural_key(b)
        ):
            return x, mean, "sum"
        case Call(fn="exp", args=(Call(fn="sub", args=(x, Load() as mean)),)):
            return x, mean, "max"
    return None


def _about_centre(r: Reduce, centres: dict[Tensor, _Centre]) -> tuple[Load, _Centre] | None:
    """The load of the mean or maximum that r is about (see _deviation), if that is the mean or
    maximum of the same x over the same elements; None otherwise."""
    found = _deviation(r)
    if found is None:
        return None
    x, mean, of = found
    m = centres.get(mean.src)
    if m is None or m.fold.monoid != of:
        return None
    if [a.extent for a in m.fold.axes] != [a.extent for a in r.axes]:
        return None
    if mentioned(mean) & set(r.axes) or len(m.cut.kept) != len(kept_axes(r)):
        return None
    same = substitute_simplified(m.fold.body, _same_axes(m.fold, r))
    return (mean, m) if structural_key(same) == structural_key(x) else None


def _same_axes(a: Reduce, b: Reduce) -> dict[Axis, Expr]:
    """The axes of one fold as those of another, in the order in which they are met."""
    old, new = (*a.axes, *kept_axes(a)), (*b.axes, *kept_axes(b))
    return dict(zip(old, new, strict=True))


def _recentred(r: Reduce, centre: Load, m: _Centre, how: Cutting) -> tuple[list[Staged], Expr]:
    """Squares about each chunk's own mean, or exponentials under its own maximum, while the chunk
    is in the cache; shifted to that of all when they are combined (Chan, Golub, LeVeque; the online
    softmax of Milakov and Gimelshein).

        sum (x - M)^2 = sum (x - m)^2 + n (m - M)^2     sum exp(x - M) = sum exp(x - m) exp(m - M)
    """
    cut, same = m.cut, _same_axes(m.fold, r)
    kept = tuple(a for k in cut.kept if isinstance(a := same[k], Axis))
    own: dict[Axis, Expr] = dict(zip(r.axes, m.fold.axes, strict=True))
    part_at = (*cut.chunks, *kept)
    own_fold = Load(m.partial, part_at)
    near = _near(r, own_fold, cut)
    about = rewrite(r.body, lambda x: near if _loads(x, centre.src) else None)
    about = substitute_simplified(substitute_simplified(about, own), cut.place)
    part = _stored("partial", cut.chunks, kept, _folded("sum", cut.inside, about, how))
    moved = _moved(m, Load(part.tensor, part_at), own_fold, near, centre)
    tail = Reduce("sum", r.axes, substitute_simplified(r.body, own))
    return [part], _with_tail(tail, cut, Reduce("sum", cut.chunks, moved))


def _loads(e: Expr, t: Tensor) -> bool:
    return isinstance(e, Load) and e.src is t


def _near(r: Reduce, fold: Load, cut: Chunks) -> Expr:
    """What a chunk's elements are seen from, given the chunk's own sum or maximum: 0 where all of
    them are minus infinity, as minus infinity minus itself is no number."""
    match r.body:
        case Call(fn="exp"):
            return where(Call("eq", (fold, lift(-inf, r.dtype)), DType.BOOL), 0.0, fold)
    return Call("div", (fold, lift(float(cut.count), r.dtype)), r.dtype)


def _moved(m: _Centre, part: Expr, fold: Load, near: Expr, centre: Load) -> Expr:
    """A chunk's partial sum as it is about the centre of all elements."""
    if m.fold.monoid == "max":
        return part * call("exp", fold - centre)
    shift = near - centre
    return part + lift(float(m.cut.count), part.dtype) * (shift * shift)
