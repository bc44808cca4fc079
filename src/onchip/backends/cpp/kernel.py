"""A whole kernel: one C++ function for the nests of a region."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from onchip.backends.cpp import spelling
from onchip.backends.cpp.ahead import fetch_next_tile
from onchip.backends.cpp.first_read import stored_by_reader
from onchip.backends.cpp.loops import emit_stage, lay_out_constants
from onchip.backends.cpp.margins import Margin, fill_margin, margins_of
from onchip.backends.cpp.pack import packed_right_floats
from onchip.backends.cpp.product import emit_product, workspace_call
from onchip.backends.cpp.roles import (
    Panels,
    Product,
    assign_roles,
    columns_aligned,
    panels_of,
)
from onchip.backends.cpp.writer import Buffer, Writer
from onchip.fusion.layout import contiguous
from onchip.fusion.nest import Nest, Span, Stage
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.expr import Load, Tensor, loads, reduces

Strides = tuple[int, ...]

# Elements a thread is handed at once, at least (handing out costs a tenth of a microsecond), while
# there are this many pieces to share between the threads.
GRAIN = 1 << 14
LEAST_PIECES = 64


@dataclass(frozen=True, eq=False, slots=True)
class KernelSource:
    """Generated text and what to call it with: pointers to inputs, panels, outputs, in order.

    laid_out: constants among the inputs that the kernel wants with other strides than they have.
    """

    text: str
    inputs: tuple[Tensor, ...]
    panels: tuple[Panels, ...]
    outputs: tuple[Tensor, ...]
    scratch_bytes: int
    parallel: bool
    laid_out: dict[Tensor, Strides]


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Choices that are tuned: `stream` stores outputs past the caches; `parallel` uses all
    threads."""

    stream: bool = False
    parallel: bool = True


def emit_kernel(
    nests: tuple[Nest, ...],
    strides: dict[Tensor, Strides],
    constants: frozenset[Tensor],
    options: KernelOptions,
    comment: str,
    late: frozenset[Tensor] = frozenset(),
) -> KernelSource | Refusal:
    """C++ source of the nests and the phases before each, run one after the other. `strides`:
    elements, for every tensor that is an input or output."""
    nests = tuple(phase for nest in nests for phase in nest.phases)
    produced = [st.tensor for nest in nests for st in nest.stages if st.placement == "global"]
    shared = [st.tensor for nest in nests for st in nest.stages if st.placement == "shared"]
    scratch = {st.tensor for nest in nests for st in nest.stages if st.placement == "scratch"}
    inside = {*produced, *shared, *scratch}
    reads = dict.fromkeys(
        ld.src
        for nest in nests
        for st in nest.stages
        for ld in loads(st.staged.body)
        if ld.src not in inside
    )
    buffers: dict[Tensor, Buffer] = {}
    for n, t in enumerate(reads):
        buffers[t] = Buffer(f"in{n}", t.dtype, strides[t])
    for n, t in enumerate(produced):
        buffers[t] = Buffer(f"out{n}", t.dtype, strides[t])
    for n, t in enumerate(shared):
        buffers[t] = Buffer(f"shared{n}", t.dtype, contiguous(t.shape))
    w = Writer(buffers)
    _allocate_shared(w, shared)
    panels: list[Panels] = []
    most_scratch = _emit_nests(w, nests, strides, constants, options, panels)
    if isinstance(most_scratch, Refusal):
        return most_scratch
    used = _used_inputs(list(reads), nests, panels)
    used.sort(
        key=lambda t: t in late or t in w.laid_out
    )  # tensors derived at load come after the others
    text = _assemble(w, used, panels, produced, buffers, comment)
    return KernelSource(
        text,
        tuple(used),
        tuple(panels),
        tuple(produced),
        most_scratch,
        options.parallel,
        {t: buffers[t].strides for t in used if t in w.laid_out},
    )


def _used_inputs(reads: list[Tensor], nests, panels: list[Panels]) -> list[Tensor]:
    """Weights that are only read as packed panels need no pointer of their own."""
    inside = {ld for p in panels for ld in p.packed}
    stages = [st for nest in nests for st in nest.stages]
    read = {ld.src for st in stages for ld in _unpacked_loads(st, inside)}
    return [t for t in reads if t in read]


def _unpacked_loads(st: Stage, packed: set[Load]) -> list[Load]:
    return [ld for ld in loads(st.staged.body) if ld not in packed]


def _assemble(w: Writer, used, panels, produced, buffers, comment: str) -> str:
    head = [f"// {line}" for line in comment.splitlines()]
    head += ['#include "onchip/kernel.h"', ""]
    for (kind, pad), name in w.pads.items():
        head.append(f"static {kind} {name}[512];")
        w.levels[0].lines.insert(0, f"onchip_fill({name}, {pad});")
    if w.pads:
        head.append(
            "template <class T> static void onchip_fill(T* row, T value) {\n"
            "  if (row[511] != value) for (int i = 0; i < 512; ++i) row[i] = value;\n}"
        )
    head += ["", 'extern "C" int kernel(void** pointers) {']
    body = []
    for n, t in enumerate(used):
        kind, name = spelling.STORAGE[t.dtype], buffers[t].pointer
        body.append(f"const {kind}* __restrict const {name} = (const {kind}*)pointers[{n}];")
    for n in range(len(panels)):
        body.append(f"const float* const panels{n} = (const float*)pointers[{len(used) + n}];")
    for n, t in enumerate(produced):
        kind, name = spelling.STORAGE[t.dtype], buffers[t].pointer
        at = len(used) + len(panels) + n
        body.append(f"{kind}* const {name} = ({kind}*)pointers[{at}];")
    body += ["int status = 0;", *w.levels[0].lines, "return status;"]
    return "\n".join(head + ["  " + b for b in body] + ["}", ""])


def _emit_nests(
    w: Writer,
    nests: tuple[Nest, ...],
    strides: dict[Tensor, Strides],
    constants: frozenset[Tensor],
    options: KernelOptions,
    panels: list[Panels],
) -> int | Refusal:
    """All phases, inside one parallel region; returns the bytes of one thread's scratch."""
    several = len(nests) > 1
    parallel = options.parallel and any(nest.tiles > 1 for nest in nests)
    w.open("#pragma omp parallel reduction(|:status)\n" if parallel else "", {})
    most = 0
    for nest in nests:
        if several:
            w.open("", {})
        size = _emit_nest(
            w, nest, strides, constants, options, panels, _work_sharing(nest, nests, parallel)
        )
        if isinstance(size, Refusal):
            return size
        most = max(most, size)
        if several:
            for st in nest.stages:  # complete: the later phases may read it before their loops
                w.buffers[st.tensor].level = w.depth
            w.close()
    w.close()
    return most


def _work_sharing(nest: Nest, nests: tuple[Nest, ...], parallel: bool) -> str:
    """How the threads share the tiles of a phase. Before the next one they wait for each other."""
    if not parallel:
        return ""
    wait = " nowait" if nest is nests[-1] else ""
    if nest.tiles > 1:
        several = _tiles_at_once(nest)
        chunk = f", {several}" if several > 1 else ""
        return f"#pragma omp for schedule(dynamic{chunk}){wait}\n"
    return f"#pragma omp single{wait}\n"


def _tiles_at_once(nest: Nest) -> int:
    """Tiles handed to a thread together: a few microseconds of work, but always pieces enough."""
    work = sum(
        prod(sp.extent for sp in st.spans)
        * max((prod(a.extent for a in r.axes) for r in reduces(st.staged.body)), default=1)
        for st in nest.stages
    )
    return max(min(GRAIN // max(work, 1), nest.tiles // LEAST_PIECES), 1)


def _emit_nest(
    w: Writer,
    nest: Nest,
    strides: dict[Tensor, Strides],
    constants: frozenset[Tensor],
    options: KernelOptions,
    panels: list[Panels],
    sharing: str,
) -> int | Refusal:
    margins = margins_of(nest)
    sizes, bytes_ = _scratch_plan(nest, strides, margins)
    allocation = w.depth
    for t, (_, inner) in sizes.items():
        name = w.fresh(f"tile_{_identifier(t)}_")
        origins = tuple(sp.origin for sp in _scratch_box(nest, t, margins))
        w.buffers[t] = Buffer(name, t.dtype, inner, origins, margin=t in margins)
    for st in nest.stages:  # results of a tile are read no further out
        w.buffers[st.tensor].level = allocation + 2
    loop = w.fresh("tile")
    w.open(f"{sharing}for (int64_t {loop} = 0; {loop} < {nest.tiles}l; ++{loop})", {})
    _bind_tile(w, nest, loop)
    w.open("", {})
    for t, margin in margins.items():
        fill_margin(w, t, margin, w.buffers[t])
    extra = _emit_stages(w, nest, constants, options, panels)
    if isinstance(extra, Refusal):
        return extra
    w.close()
    w.close()
    if options.stream:
        w.line("onchip::stream_fence();")
    _allocate(w, allocation, nest, sizes, bytes_, extra)
    return bytes_


def _allocate_shared(w: Writer, shared: list[Tensor]) -> None:
    """What one phase hands on to the next, in memory of the thread that calls the kernel."""
    offset = 0
    lines = []
    for t in shared:
        kind, name = spelling.STORAGE[t.dtype], w.buffers[t].pointer
        lines.append(f"{kind}* const {name} = ({kind}*)(workspace + {offset});")
        offset += -(-t.nbytes // 64) * 64
    if lines:
        w.line(f"char* const workspace = onchip::workspace({offset}l);")
    for line in lines:
        w.line(line)


def _emit_stages(
    w: Writer, nest: Nest, constants, options, panels: list[Panels]
) -> list[str] | Refusal:
    """Emit all stages; returns the C++ sizes (floats) of workspace and run-time panels."""
    extra: list[str] = []
    targets = [w.buffers[st.tensor] for st in nest.stages]
    products = [
        assign_roles(st, target, w.buffers, constants)
        for st, target in zip(nest.stages, targets, strict=True)
    ]
    plain = [st for st, product in zip(nest.stages, products, strict=True) if product is None]
    lay_out_constants(w, plain, constants)
    by_reader = stored_by_reader(nest.stages)
    for st, target, product in zip(nest.stages, targets, products, strict=True):
        if product is not None and not columns_aligned(st, product):
            return Refusal(Rule.CONTRACTION_FORM, st.tensor.name, "a tile cuts a column panel")
        if st.tensor in by_reader:
            continue
        w.on_first_read = {x.tensor: x.staged for x in nest.stages if by_reader.get(x.tensor) is st}
        w.open("", {})
        if product is None:
            emit_stage(w, st, target, options.stream and st.placement == "global")
        else:
            extra += _emit_product_stage(w, st, target, product, panels)
        w.close()
        if st is nest.stages[0] and product is None:
            fetch_next_tile(w, nest, st)
    return extra


def _emit_product_stage(
    w: Writer, st: Stage, target: Buffer, product: Product, panels: list[Panels]
) -> list[str]:
    sizes = []
    if product.constant:
        name = f"panels{len(panels)}"
        panels.append(panels_of(product))
    else:
        name = w.fresh("packed")
        sizes.append(f"{name} {packed_right_floats(st, product)}")
    work = w.fresh("work")
    sizes.append(f"{work} {workspace_call(st, product, w.buffers)}")
    emit_product(w, st, target, product, name, work)
    return sizes


def _bind_tile(w: Writer, nest: Nest, loop: str) -> None:
    """Origins of the tile along each axis, the last one fastest."""
    rest = loop
    axes = list(zip(nest.root.loops, nest.tile_axes, nest.tile, strict=True))
    counts = [max(ceil(a.extent / t), 1) for a, _, t in axes]
    for (_, o, t), n in reversed(list(zip(axes, counts, strict=True))):
        name = w.fresh("t")
        w.line(
            f"const int64_t {name} = {rest} % {n}l * {t}l;"
            if n > 1
            else f"const int64_t {name} = 0;"
        )
        if n > 1:
            quotient = w.fresh("q")
            w.line(f"const int64_t {quotient} = {rest} / {n}l;")
            rest = quotient
        w.levels[-1].bound[o] = name
        w.where[name] = w.depth


def _scratch_box(nest: Nest, t: Tensor, margins: dict[Tensor, Margin]) -> tuple[Span, ...]:
    if t in margins:
        return margins[t].box
    return next(s for s in nest.stages if s.tensor is t).box


def _scratch_plan(
    nest: Nest, strides, margins: dict[Tensor, Margin]
) -> tuple[dict[Tensor, tuple[int, Strides]], int]:
    """Byte offset and strides of every scratch tensor's box, in the tensor's own layout order."""
    out: dict[Tensor, tuple[int, Strides]] = {}
    offset = 0
    for st in nest.stages:
        if st.placement != "scratch":
            continue
        extents = [sp.extent for sp in _scratch_box(nest, st.tensor, margins)]
        like = st.staged.layout or strides.get(st.tensor, contiguous(st.tensor.shape))
        order = sorted(range(len(extents)), key=lambda d: (-like[d], d))
        step, inner = 1, [0] * len(extents)
        for d in reversed(order):
            inner[d] = step
            step *= extents[d]
        out[st.tensor] = (offset, tuple(inner))
        offset += -(-step * st.tensor.dtype.size // 64) * 64
    return out, offset


def _identifier(t: Tensor) -> str:
    return "".join(c if c.isalnum() else "_" for c in t.name.rsplit("_", 1)[0])


def _allocate(w: Writer, level: int, nest: Nest, sizes, bytes_: int, extra: list[str]) -> None:
    """Scratch of one thread: the tiles, then the products' workspaces."""
    if not sizes and not extra:
        return
    lines = []
    total = f"{bytes_}l"
    offsets = []
    for e in extra:
        name, size = e.split(" ", 1)
        lines.append(f"const int64_t {name}_floats = onchip::round_up({size}, 16l);")
        offsets.append((name, total))
        total = f"{total} + {name}_floats * 4l"
    lines.append(f"char* const scratch = onchip::thread_scratch({total});")
    for t, (offset, _) in sizes.items():
        kind = spelling.STORAGE[t.dtype]
        lines.append(f"{kind}* const {w.buffers[t].pointer} = ({kind}*)(scratch + {offset});")
    for name, at in offsets:
        lines.append(f"float* const {name} = (float*)(scratch + {at});")
    w.levels[level].lines[:0] = lines
