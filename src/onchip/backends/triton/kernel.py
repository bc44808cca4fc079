"""A whole Triton kernel: a readable file with one @triton.jit function for one nest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil

from onchip.backends.triton import spelling
from onchip.backends.triton.placement import Kept, columns_and_widths, place, range_of
from onchip.backends.triton.writer import Bound, CannotExpress, Scope, Tile, Writer
from onchip.fusion.nest import Nest, Span
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Tensor, loads, walk
from onchip.ir.index import bounds

Strides = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class TritonSource:
    """Generated text; its function `kernel` takes pointers to inputs, then outputs, and is
    launched with one program per tile."""

    text: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    tiles: int
    warps: int = 4


def emit_kernel(
    nest: Nest, strides: dict[Tensor, Strides], comment: str = ""
) -> TritonSource | Refusal:
    """Triton source of a nest. `strides`: elements, for every tensor that is an input or output."""
    produced = tuple(st.tensor for st in nest.stages if st.placement == "global")
    made = {st.tensor for st in nest.stages}
    read = dict.fromkeys(
        ld.src for st in nest.stages for ld in loads(st.staged.body) if ld.src not in made
    )
    refusal = _unsupported(nest, (*read, *produced), strides)
    if refusal:
        return refusal
    pointers = {t: f"in{n}" for n, t in enumerate(read)}
    pointers |= {t: f"out{n}" for n, t in enumerate(produced)}
    w = Writer(pointers, strides)
    try:
        kept = place(nest)
        columns, w.range_widths = columns_and_widths(kept)
        _bind_tile(w, nest)
        for k in kept:
            _emit_stage(w, k, columns)
    except CannotExpress as problem:
        return problem.refusal
    return TritonSource(_assemble(w, comment), tuple(read), produced, nest.tiles)


def _unsupported(nest: Nest, tensors: tuple[Tensor, ...], strides) -> Refusal | None:
    if nest.before:
        return Refusal(Rule.PHASES, nest.root.tensor.name, f"{len(nest.phases)} phases")
    for t in tensors:
        if t.dtype not in spelling.TYPES:
            return Refusal(Rule.UNSUPPORTED_DTYPE, t.name, f"{t.dtype.label} in Triton")
        if sum((n - 1) * s for n, s in zip(t.shape, strides[t], strict=True)) >= 2**31:
            return Refusal(
                Rule.UNSUPPORTED_EXPRESSION, t.name, "its elements need 64-bit addresses"
            )
    for st in nest.stages:
        for e in walk(st.staged.body):
            if isinstance(e, Call) and e.dtype is not DType.I64 and not spelling.spells(e.fn):
                return Refusal(Rule.UNSUPPORTED_EXPRESSION, st.tensor.name, f"the function {e.fn}")
            if e.dtype not in (DType.F32, DType.BOOL, DType.I64):
                text = f"values of type {e.dtype.label}"
                return Refusal(Rule.UNSUPPORTED_DTYPE, st.tensor.name, text)
    return None


def _bind_tile(w: Writer, nest: Nest) -> None:
    """Origins of the tile along each axis, the last one fastest."""
    w.line("tile = tl.program_id(0)")
    rest, left = "tile", max(nest.tiles, 1)
    for a, o, t in reversed(list(zip(nest.root.loops, nest.tile_axes, nest.tile, strict=True))):
        count = max(ceil(a.extent / t), 1)
        w.env[o] = (0, (count - 1) * t)
        text = "0"
        if count > 1:
            left //= count
            at = f"{rest} % {count}" if left > 1 else rest
            text = w.define("t", at if t == 1 else f"{at} * {t}").text
            rest = w.define("q", f"{rest} // {count}").text if left > 1 else rest
        w.bind(o, Bound(Tile(text)), 0)


def _emit_stage(w: Writer, k: Kept, columns: set) -> None:
    """One block: kept in registers for the later stages, and stored if it is an output."""
    st = k.stage
    w.scopes.append(Scope({}))
    for a, span in zip(st.staged.loops, st.spans, strict=True):
        _bind_loop(w, a, span, 2 if range_of(span) in columns else 0)
    value = w.value(k.body)
    if st.placement == "global":
        _store(w, k, value)
    w.scopes.pop()
    w.kept[st.tensor] = (value, st.staged.loops)


def _bind_loop(w: Writer, a: Axis, span: Span, kind: int) -> None:
    """The part of an axis that the tile covers; what lies outside the tensor is masked."""
    covers = range_of(span)
    lo, hi = bounds(span.origin, w.env)
    tests = [">= 0"] * (lo < 0) + [f"< {a.extent}"] * (hi + span.extent > a.extent)
    w.bind_range(a, w.index(span.origin), covers, tests, kind)


def _store(w: Writer, k: Kept, value: Tile) -> None:
    st = k.stage
    bound = [b for a in st.staged.loops if (b := w.bound(a)) is not None]
    axes = w.union(*(b.tile for b in bound))
    at = w.whole(w.address(st.tensor, st.staged.store), axes, "tl.int32")
    mask = w.all_of([b.mask for b in bound if b.mask is not None])
    guard = f", mask={w.onto(mask, axes)}" if mask is not None else ""
    w.line(f"tl.store({w.pointers[st.tensor]} + {at}, {w.onto(value, axes)}{guard})")


def _assemble(w: Writer, comment: str) -> str:
    body = w.levels[0].lines
    joined = "\n".join(body)
    parts = ["".join(f"# {line}\n" for line in comment.splitlines())]
    parts[0] += "import triton\nimport triton.language as tl"
    for name, statement in spelling.HELPERS.items():
        if re.search(rf"(?<![.\w]){name}\b", joined):
            parts.append(f"@triton.jit\ndef {name}(a, b):\n    {statement}")
    head = f"@triton.jit\ndef kernel({', '.join(w.pointers.values())}):"
    parts.append("\n".join([head, *(f"    {line}" for line in body)]))
    return "\n\n\n".join(parts) + "\n"
