"""The box of an intermediate that a tile computes, against counting by brute force: everything
that is read is inside, and nothing in it could be left away at both ends."""

from __future__ import annotations

import itertools
from math import ceil

from hypothesis import assume, given
from hypothesis import strategies as st
from tests.fusion.harness import value

from onchip.backends.cpp.run import region_for
from onchip.fusion.nest import Nest, build_nest
from onchip.fusion.staging import stage
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Expr, Tensor, call, fold, loads, tensor
from onchip.ir.index import bounds


def number(e: Expr, at: dict[Axis, int]) -> int:
    """The value of an affine index: both ends of its interval when every axis is one point."""
    lo, hi = bounds(e, {a: (v, v) for a, v in at.items()})
    assert lo == hi
    return lo


@st.composite
def windows(draw) -> tuple[Tensor, Tensor]:
    """(result, intermediate): sums over strided, dilated, padded windows of expensive values."""
    rank = draw(st.integers(1, 2))
    taps, steps, dilations, pads = (
        [draw(st.integers(low, high)) for _ in range(rank)]
        for low, high in ((1, 3), (1, 3), (1, 2), (0, 2))
    )
    size = [draw(st.integers(7, 13)) for _ in range(rank)]
    x = value(size)
    inner = tensor(size, DType.F32, lambda *i: call("exp", call("tanh", x[i])))
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(size, pads, dilations, taps, steps, strict=True)
    ]
    assume(all(n > 0 for n in out))

    def element(*i: Expr) -> Expr:
        return fold("sum", taps, lambda *r: inner.padded(0.0)[tuple(
            a * s + b * d - p for a, s, b, d, p in zip(i, steps, r, dilations, pads, strict=True)
        )])  # fmt: skip

    return tensor(out, DType.F32, element), inner


@given(windows(), st.data())
def test_a_box_is_what_the_tile_reads(pair: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    result, inner = pair
    staged = stage(region_for([result, inner][:1], [t for t in _given(result)]))
    assert isinstance(staged, tuple)
    assume(any(s.tensor is inner for s in staged))
    root = staged[-1]
    tile = tuple(data.draw(st.integers(1, a.extent)) for a in root.loops)
    nest = build_nest(staged, root, tile)
    assert isinstance(nest, Nest)
    box = next(s for s in nest.stages if s.tensor is inner).box
    (load,) = [ld for ld in loads(root.body) if ld.src is inner]
    counts = [range(ceil(a.extent / t)) for a, t in zip(root.loops, tile, strict=True)]
    for place in itertools.product(*counts):
        origins = dict(zip(nest.tile_axes, (p * t for p, t in zip(place, tile, strict=True)),
                           strict=True))  # fmt: skip
        read = _elements(load, root.loops, tile, list(origins.values()))
        for d, span in enumerate(box):
            origin = number(span.origin, origins)
            touched = [e[d] for e in read]
            inside = [n for n in touched if 0 <= n < inner.shape[d]]
            assert all(origin <= n < origin + span.extent for n in inside)
            whole = all((p + 1) * t <= a.extent for p, t, a in zip(
                place, tile, root.loops, strict=True))  # fmt: skip
            if whole and span.depends:
                assert (origin, origin + span.extent - 1) == (min(touched), max(touched))


def _given(t: Tensor) -> list[Tensor]:
    """The tensors without an expression below `t`."""
    if t.body is None:
        return [t]
    return [g for ld in loads(t.body) for g in _given(ld.src)]


def _elements(load, loops, tile, origins) -> list[tuple[int, ...]]:
    from onchip.ir.expr import mentioned

    own = [range(o, min(o + t, a.extent)) for o, t, a in zip(origins, tile, loops, strict=True)]
    free = sorted(set().union(*map(mentioned, load.index)) - set(loops), key=lambda a: a.name)
    axes = [*loops, *free]
    out = []
    for point in itertools.product(*own, *(range(a.extent) for a in free)):
        at = dict(zip(axes, point, strict=True))
        out.append(tuple(number(i, at) for i in load.index))
    return out
