"""A whole Triton kernel: a readable file with one @triton.jit function for each phase of a nest,
or one for all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import ceil, prod

from onchip.backends.nvidia.source import Launch, Workspace
from onchip.backends.triton import spelling
from onchip.backends.triton.indices import inside, stored
from onchip.backends.triton.phases import (
    counters,
    emit_barrier,
    handed_on,
    handed_on_strides,
    narrowed,
    reads_again,
    same_tiles,
    sharing,
)
from onchip.backends.triton.placement import (
    SMALLEST_DOT,
    Kept,
    columns_and_widths,
    laid_along,
    place,
    range_of,
    sides,
)
from onchip.backends.triton.product_tiles import laid_out, rounded
from onchip.backends.triton.source import Options, TritonSource
from onchip.backends.triton.steps import HALF
from onchip.backends.triton.stream import emit_walk, grows, walk_loops, walk_widths
from onchip.backends.triton.strips import emit_pieces
from onchip.backends.triton.writer import CannotExpress, Place, Scope, Tile, Writer, power_of_two
from onchip.fusion.layout import extent
from onchip.fusion.nest import Nest, Span
from onchip.fusion.online import as_online
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.expr import Axis, Load, Tensor, axis, loads
from onchip.ir.index import bounds

Strides = tuple[int, ...]

NAME_LIMIT = 80
# Groups of rows that read the same columns one after the other.
ROWS_IN_TURN = 8


def emit_kernel(
    nest: Nest,
    strides: dict[Tensor, Strides],
    options: Options = Options(),
    comment: str = "",
    late: frozenset[Tensor] = frozenset(),
    name: str = "kernel",
    constants: frozenset[Tensor] = frozenset(),
) -> TritonSource | Refusal:
    """Triton source of a nest. `strides`: elements, for every tensor that is an input or output;
    late: inputs that are derived at load; name: of the function, made an identifier; constants:
    inputs that may be laid out anew (see TritonSource.laid_out)."""
    stages = [st for phase in nest.phases for st in phase.stages]
    produced = tuple(st.tensor for st in stages if st.placement == "global")
    handed = () if options.cluster else handed_on(nest)
    made = {st.tensor for st in stages}
    read = dict.fromkeys(
        ld.src for st in stages for ld in loads(st.staged.body) if ld.src not in made
    )
    refusal = _unsupported((*read, *produced, *handed))
    if refusal:
        return refusal
    try:
        walked = {p for p, o in zip(nest.phases, options.each, strict=False) if o.stream}
        kept = [[] if phase in walked else place(phase) for phase in nest.phases]
    except CannotExpress as problem:
        return problem.refusal
    free = late | (constants & read.keys())
    every = [k for phase in kept for k in phase]
    laid = laid_along(every, strides, free) | laid_out(every, strides, free)
    early = frozenset[Tensor]()
    if options.precision == "tf32" and not options.interpret:
        phases = zip(kept, options.each, strict=False)
        early = rounded([k for stages, own in phases if own.product for k in stages], free)
        laid = {t: strides[t] for t in early} | laid
    shared = (st.staged for st in stages if st.placement == "shared")
    strides = strides | laid | handed_on_strides(shared, strides)
    read = dict.fromkeys(sorted(read, key=lambda t: t in late or t in laid))
    pointers = {t: f"in{n}" for n, t in enumerate(read)}
    pointers |= {t: f"out{n}" for n, t in enumerate(produced)}
    pointers |= {t: f"part{n}" for n, t in enumerate(handed)}
    workspace = [Workspace(t.nbytes) for t in handed]
    workspace += counters(nest) if options.joined and not options.cluster else []

    def writer(own: Options) -> Writer:
        w = Writer(pointers, strides, own)
        w.free, w.rounded = free, early
        w.coarse = all(t.dtype in HALF for t in produced)
        if any(extent(t.shape, strides[t]) > 2**31 for t in (*read, *produced)):
            w.integer = "tl.int64"
        return w

    try:
        functions = _functions(nest, kept, options, writer)
    except CannotExpress as problem:
        return problem.refusal
    if not any(t.numel for t in produced):  # memory without elements may have no address
        functions = [(w, 0) for w, _ in functions]
    name = identifier(name)
    types = tuple(spelling.POINTERS[t.dtype] for t in pointers)
    types += ("*i32",) * (len(workspace) - len(handed))
    text, launches = _assemble(functions, nest, comment, name, len(types) - len(pointers))
    partial = [p for w, _ in functions for p in w.partial]
    types += tuple(p.pointer for p in partial)
    workspace += [p.memory for p in partial]
    return TritonSource(text, launches, tuple(read), produced, types, tuple(workspace), laid, early)


def _functions(
    nest: Nest, kept: list[list[Kept]], options: Options, writer: Callable[[Options], Writer]
) -> list[tuple[Writer, int]]:
    """The functions of a kernel, written, with their numbers of programs."""
    if not options.joined:
        out = []
        for n, (phase, stages, own) in enumerate(zip(nest.phases, kept, options.each, strict=True)):
            w = writer(own)
            w.backwards = reads_again(nest.phases[:n], phase)
            if own.stream:
                out.append((w, _emit_walk(w, phase)))
                continue
            columns: set = set()
            if own.product:
                columns, w.range_widths = columns_and_widths(stages, own.lanes)
            out.append((w, _bind_tiles(w, phase)))
            if own.strip is not None:
                emit_pieces(w, phase, stages, lambda k, w=w: _emit_stage(w, k, set()))
                continue
            for k in stages:
                narrowed(w)
                _emit_stage(w, k, columns)
            while w.depth:
                w.close()
        return out
    w = writer(options)
    programs = _bind_tiles(w, nest)
    for n, stages in enumerate(kept):
        if n < len(nest.before):
            same_tiles(w, nest.before[n], nest)
        for k in stages:
            narrowed(w)
            _emit_stage(w, k, set())
        if n < len(nest.before):
            emit_barrier(w, f"counters{n}", nest, stages)
    return [(w, programs)]


def identifier(name: str) -> str:
    """A function's name: what is no letter or digit becomes one underscore, and it is cut short."""
    return re.sub(r"\W+|_+", "_", name).strip("_")[:NAME_LIMIT] or "kernel"


def _unsupported(tensors: tuple[Tensor, ...]) -> Refusal | None:
    for t in tensors:
        if t.dtype not in spelling.TYPES:
            return Refusal(Rule.UNSUPPORTED_DTYPE, t.name, f"{t.dtype.label} in Triton")
    return None


def _bind_tiles(w: Writer, nest: Nest, last_first: bool = False) -> int:
    """Origins of the program's tiles along each axis; gives the number of programs. Axes that are
    cut into single elements, or strips of them, are counted by `lane`, the last one fastest; the
    others, and those along which tiles can't lie side by side, by the program's number. last_first:
    their tiles count down."""
    loops = zip(nest.root.loops, nest.tile_axes, nest.tile, strict=True)
    places = [(o, t, max(ceil(a.extent / max(t, 1)), 1)) for a, o, t in loops]
    side = sides(nest) if w.options.product else {}
    strip = None if w.options.strip is None else nest.tile_axes[w.options.strip]
    single = [p for p in places if p[2] > 1 and (p[1] == 1 or p[0] is strip)]
    lanes = [p for p in single if side.get(p[0], "rows") == "rows"]
    batch = [p for p in places if side.get(p[0]) == "batch"]
    blocks = [p for p in places if p not in lanes and p not in batch]
    repeats, count, total = (prod(n for *_, n in part) for part in (batch, blocks, lanes))
    least = SMALLEST_DOT if w.options.product else 1
    width = min(w.options.lanes, max(power_of_two(total), least))
    groups = ceil(total / width)
    w.tiles = repeats * groups * count
    program = _begin(w)
    if repeats > 1:
        whole = groups * count
        w.unravel(program if whole == 1 else w.define("batch", f"program // {whole}"), batch)
        program = w.define("program", f"program % {whole}") if whole > 1 else Tile("0")
    else:
        w.unravel(Tile("0"), batch)
    group, block = _in_order(w, program, groups, count)
    if last_first and count > 1:
        block = w.define("block", f"{count - 1} - {block.text}")
    w.unravel(block, blocks)
    outer, lanes = _whole_groups(lanes, width, w.options.product)
    if outer:
        inner = prod(n for *_, n in lanes)
        each = inner // width
        w.unravel(group if each == 1 else w.define("q", f"{group.text} // {each}"), outer)
        group = w.define("g", f"{group.text} % {each}") if each > 1 else Tile("0")
        groups, total = each, inner
    if width > 1:
        w.lane, w.lanes = axis(width, "lane"), lanes
        w.widths[w.lane] = width
        w.first_lane = Tile(f"{group.text} * {width}" if groups > 1 else "0")
        start = f"{w.first_lane.text} + " if groups > 1 else ""
        # a name of its own: columns of the same width are no lanes
        number = Tile(w.fresh("lane"), (w.lane,))
        w.line(f"{number.text} = {start}tl.arange(0, {width})")
        w.count_lanes(w.lane, number, total)
        group = number
    w.unravel(group, lanes)
    return w.tiles * w.options.split


def _begin(w: Writer) -> Tile:
    """How a program begins: what it waits for, and which of the w.tiles tiles it computes."""
    if w.options.cluster:
        w.line("cluster_arrive()")
        w.entering = True
    if w.options.waits:
        w.line("wait_for_launch_before()")
        w.leaving.append("start_next_launch()")
    wide = ".to(tl.int64)" if w.integer == "tl.int64" else ""
    if w.options.split > 1:
        w.line(f"part = tl.program_id(0) // {w.tiles}")
        w.line(f"program = (tl.program_id(0) % {w.tiles}){wide}")
    elif w.backwards and w.tiles > 1:
        w.line(f"program = ({w.tiles - 1} - tl.program_id(0)){wide}")
    else:
        w.line(f"program = tl.program_id(0){wide}")
    return Tile("program")


def _whole_groups(lanes: list[Place], width: int, product: bool) -> tuple[list[Place], list[Place]]:
    """Axes that are the same for all tiles of a program, as the last ones alone fill whole groups
    of them; and those last axes. Of a product, the lanes are rows, numbered through."""
    if product or width == 1:
        return [], lanes
    for d in range(len(lanes) - 1, 0, -1):
        if prod(n for *_, n in lanes[d:]) % width == 0:
            return lanes[:d], lanes[d:]
    return [], lanes


def _in_order(w: Writer, program: Tile, groups: int, count: int) -> tuple[Tile, Tile]:
    """The numbers of a program's group of lanes and of its block: blocks fastest; of a product a
    few groups of rows take turns at each block of columns, so that the last cache holds both."""
    if groups == 1 or count == 1:
        return (Tile("0"), program) if groups == 1 else (program, Tile("0"))
    if not w.options.product:
        return (
            w.define("group", f"{program.text} // {count}"),
            w.define("block", f"{program.text} % {count}"),
        )
    near = min(ROWS_IN_TURN, groups)
    if groups % near == 0 and groups == near:
        return (
            w.define("group", f"{program.text} % {near}"),
            w.define("block", f"{program.text} // {near}"),
        )
    first = w.define("first", f"{program.text} // {near * count} * {near}")
    turn = w.define("turn", f"{program.text} % {near * count}")
    here = Tile(str(near))
    if groups % near:
        here = w.define("here", f"tl.minimum({groups} - {first.text}, {near})")
    return (
        w.define("group", f"{first.text} + {turn.text} % {here.text}"),
        w.define("block", f"{turn.text} // {here.text}"),
    )


def _emit_walk(w: Writer, nest: Nest) -> int:
    """A nest as one walk over an axis; gives the number of programs."""
    online = as_online(nest)
    if isinstance(online, Refusal):
        raise CannotExpress(online.rule, online.subject, online.text)
    own = w.options
    w.options = replace(own, product=False)  # the queries of a head run one after the other
    programs = _bind_tiles(w, nest, last_first=grows(online))
    w.options = own
    w.scopes.append(Scope({}))
    w.range_widths = walk_widths(online)
    for (a, span), kind in walk_loops(online):
        _bind_loop(w, a, span, kind)
    emit_walk(w, online)
    for st in online.outputs:
        w.result = st.tensor.dtype
        _store(w, Kept(st, st.staged.body), stored(w, st.staged.body, st.tensor.dtype))
    w.scopes.pop()
    return programs


def _emit_stage(w: Writer, k: Kept, columns: set) -> None:
    """One block: kept in registers for the later stages, and stored if it is an output."""
    st = k.stage
    w.result = st.tensor.dtype
    w.scopes.append(Scope({}))
    for a, span in zip(st.staged.loops, st.spans, strict=True):
        _bind_loop(w, a, span, 2 if range_of(span) in columns else 0)
    value = stored(w, k.body, st.tensor.dtype)
    if st.placement == "global" or (st.placement == "shared" and not w.options.cluster):
        _store(w, k, value)
    w.scopes.pop()
    w.kept[st.tensor] = (value, st.staged.store)


def _bind_loop(w: Writer, a: Axis, span: Span, kind: int) -> None:
    """The part of an axis that the tile covers; what lies outside the tensor is masked."""
    covers = range_of(span)
    lo, hi = bounds(span.origin, w.env)
    tests = [">= 0"] * (lo < 0) + [f"< {a.extent}"] * (hi + span.extent > a.extent)
    w.bind_range(a, span.origin, covers, tests, kind)


def _store(w: Writer, k: Kept, value: Tile) -> None:
    st = k.stage
    bound = [b for a in st.staged.loops if (b := w.bound(a)) is not None]
    axes = w.union(*(b.tile for b in bound))
    at = w.whole(w.address(st.tensor, st.staged.store), axes, w.integer)
    within = inside(w, Load(st.tensor, st.staged.store, 0))  # of an axis that was split unevenly
    mask = w.all_of([b.mask for b in bound if b.mask is not None] + within)
    guard = f", mask={w.onto(mask, axes)}" if mask is not None else ""
    text = w.whole(value, axes, spelling.TYPES[st.tensor.dtype.compute])
    w.line(f"tl.store({w.pointers[st.tensor]} + {at}, {text}{guard})")


def _assemble(
    functions: list[tuple[Writer, int]], nest: Nest, comment: str, name: str, counters: int
) -> tuple[str, tuple[Launch, ...]]:
    """The file's text, and its launches. counters: pointers after those of tensors."""
    for w, _ in functions:
        w.levels[0].lines += w.leaving
    joined = "\n".join("\n".join(w.levels[0].lines) for w, _ in functions)
    parts = spelling.prelude(joined)
    parts[0] = "".join(f"# {line}\n" for line in comment.splitlines()) + parts[0]
    launches = []
    next_one = len(functions[0][0].pointers) + counters
    for n, (w, programs) in enumerate(functions):
        own = name if len(functions) == 1 else f"{name}_{n + 1}"
        arguments = _arguments(w, counters, everything=len(functions) == 1)
        arguments |= {next_one + i: f"{p.name}," for i, p in enumerate(w.partial)}
        next_one += len(w.partial)
        head = ["@triton.jit", f"def {own}(", *(f"    {text}" for text in arguments.values()), "):"]
        parts.append("\n".join([*head, *(f"    {line}" for line in w.levels[0].lines)]))
        o = w.options
        cluster = sharing(nest)[1] if o.cluster else 1
        launches.append(
            Launch(own, programs, tuple(arguments), o.warps, o.stages, cluster, o.waits)
        )
    return "\n\n\n".join(parts) + "\n", tuple(launches)


def _arguments(w: Writer, counters: int, everything: bool) -> dict[int, str]:
    """A function's parameters by their number among the kernel's pointers: all, or those that it
    uses."""
    body = "\n".join(w.levels[0].lines)
    out = {}
    for n, (t, pointer) in enumerate(w.pointers.items()):
        if everything or re.search(rf"\b{pointer}\b", body):
            text = f"{t.dtype.label} {_size(t.shape)}, strides {_size(w.strides[t])}"
            out[n] = f"{pointer},  # {text}"
    more = {len(w.pointers) + n: f"counters{n}," for n in range(counters)}
    return out | more


def _size(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


__all__ = ["Launch", "Options", "TritonSource", "Workspace", "emit_kernel"]
