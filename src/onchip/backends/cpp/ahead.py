"""Fetching the next tile's input while this one is computed.

A tile of several stages (a softmax: maximum, exponentials, quotient) reads memory in its first
stage and computes in the others. The hardware fetches ahead only while a loop runs through memory,
and not beyond a page; so the first stage is followed by prefetches of what it will read next time.
"""

from __future__ import annotations

from math import ceil, prod

from onchip.backends.cpp.loops import clip
from onchip.backends.cpp.reduce import loop_head
from onchip.backends.cpp.writer import Buffer, Writer
from onchip.fusion.nest import Nest, Stage
from onchip.ir.expr import Axis, Load, loads, reduces
from onchip.ir.index import is_affine, linear, stride_along

LINE = 64  # bytes
# Smaller inputs stay in the caches.
LARGE = 4 << 20
# More would evict what the tile is working on.
MOST = 64 << 10


def fetch_next_tile(w: Writer, nest: Nest, stage: Stage) -> None:
    """Emit prefetches of the elements that `stage` reads of large inputs in the next tile."""
    moving = [d for d, a in enumerate(nest.root.loops) if ceil(a.extent / nest.tile[d]) > 1]
    if not moving or len(nest.stages) < 2 or nest.tiles < 8:
        return
    seen = set()
    for ld in loads(stage.staged.body):
        buffer = w.buffers[ld.src]
        if ld.src in seen or ld.pad is not None or buffer.origins or ld.src.nbytes < LARGE:
            continue
        if not all(is_affine(i) for i in ld.index):
            continue
        shift = _shift(nest, stage, ld, buffer, moving[-1])
        if shift and _fetch(w, stage, ld, buffer, shift):
            seen.add(ld.src)


def _shift(nest: Nest, stage: Stage, ld: Load, buffer: Buffer, d: int) -> int:
    """Elements between what this tile reads and what the next one does."""
    origin, step = nest.tile_axes[d], nest.tile[d]
    total = 0
    for a, span in zip(stage.staged.loops, stage.spans, strict=True):
        stride = stride_along(ld.index, buffer.strides, a) or 0
        total += stride * linear(span.origin).coefficient(origin) * step
    return total


def _fetch(w: Writer, stage: Stage, ld: Load, buffer: Buffer, shift: int) -> bool:
    spans = dict(zip(stage.staged.loops, stage.spans, strict=True))
    extents: dict[Axis, int] = {a: sp.extent for a, sp in spans.items()}
    extents |= {a: a.extent for r in reduces(stage.staged.body) for a in r.axes}
    strides = {a: stride_along(ld.index, buffer.strides, a) or 0 for a in extents}
    run = next((a for a in extents if strides[a] == 1 and extents[a] > 1), None)
    size = ld.src.dtype.size
    read = [a for a in extents if strides[a]]
    if run is None or prod(extents[a] for a in read) * size > MOST:
        return False
    order = sorted((a for a in read if a is not run), key=lambda a: -abs(strides[a]))
    for a in (*order, run):
        lo, hi = clip(w, a, spans[a]) if a in spans else ("0l", f"{a.extent}l")
        name = w.fresh("p")
        w.open(loop_head(name, lo, hi, f"{LINE // size}l" if a is run else "1"), {a: name})
    text, _, _ = w.address(ld.src, ld.index, buffer)
    w.line(f"__builtin_prefetch({buffer.pointer} + ({text}) + {shift}l, 0, 2);")
    for _ in read:
        w.close()
    return True
