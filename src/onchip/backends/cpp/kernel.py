"""A whole kernel: one C++ function for the nests of a region."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from onchip.backends.cpp import spelling
from onchip.backends.cpp.loops import emit_stage, lay_out_constants
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
from onchip.fusion.nest import Nest, Stage
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.expr import Load, Tensor, loads

Strides = tuple[int, ...]


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
    """C++ source of the nests, run one after the other. `strides`: elements, for every tensor
    that is an input or output."""
    produced = [st.tensor for nest in nests for st in nest.stages if st.placement == "global"]
    scratch = {st.tensor for nest in nests for st in nest.stages if st.placement == "scratch"}
    reads = dict.fromkeys(
        ld.src
        for nest in nests
        for st in nest.stages
        for ld in loads(st.staged.body)
        if ld.src not in scratch and ld.src not in produced
    )
    buffers: dict[Tensor, Buffer] = {}
    for n, t in enumerate(reads):
        buffers[t] = Buffer(f"in{n}", t.dtype, strides[t])
    for n, t in enumerate(produced):
        buffers[t] = Buffer(f"out{n}", t.dtype, strides[t], level=3)
    w = Writer(buffers)
    panels: list[Panels] = []
    most_scratch = 0
    for nest in nests:
        size = _emit_nest(w, nest, strides, constants, options, panels)
        if isinstance(size, Refusal):
            return size
        most_scratch = max(most_scratch, size)
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


def _emit_nest(
    w: Writer,
    nest: Nest,
    strides: dict[Tensor, Strides],
    constants: frozenset[Tensor],
    options: KernelOptions,
    panels: list[Panels],
) -> int | Refusal:
    sizes, bytes_ = _scratch_plan(nest, strides)
    tiles = nest.tiles
    parallel = options.parallel and tiles > 1
    if parallel:
        w.open("#pragma omp parallel reduction(|:status)\n", {})
    else:
        w.open("", {})
    w.levels[-1].head = w.levels[-1].head.rstrip("\n") + ("\n" if parallel else "")
    allocation = w.depth
    for t, (_, inner) in sizes.items():
        w.buffers[t] = Buffer(
            w.fresh(f"tile_{_identifier(t)}_"), t.dtype, inner, _origins(nest, t), level=3
        )
    loop = w.fresh("tile")
    schedule = "#pragma omp for schedule(dynamic) nowait\n" if parallel else ""
    w.open(f"{schedule}for (int64_t {loop} = 0; {loop} < {tiles}l; ++{loop})", {})
    _bind_tile(w, nest, loop)
    w.open("", {})  # level 3: results of this tile are read no further out
    extra = _emit_stages(w, nest, constants, options, panels)
    if isinstance(extra, Refusal):
        return extra
    w.close()
    w.close()
    if options.stream:
        w.line("onchip::stream_fence();")
    _allocate(w, allocation, nest, sizes, bytes_, extra)
    w.close()
    return bytes_


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
    for st, target, product in zip(nest.stages, targets, products, strict=True):
        if product is not None and not columns_aligned(st, product):
            return Refusal(Rule.CONTRACTION_FORM, st.tensor.name, "a tile cuts a column panel")
        w.open("", {})
        if product is None:
            emit_stage(w, st, target, options.stream and st.placement == "global")
        else:
            extra += _emit_product_stage(w, st, target, product, panels)
        w.close()
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


def _origins(nest: Nest, t: Tensor) -> tuple:
    stage = next(s for s in nest.stages if s.tensor is t)
    return tuple(sp.origin for sp in stage.box)


def _scratch_plan(nest: Nest, strides) -> tuple[dict[Tensor, tuple[int, Strides]], int]:
    """Byte offset and strides of every scratch tensor's box, in the tensor's own layout order."""
    out: dict[Tensor, tuple[int, Strides]] = {}
    offset = 0
    for st in nest.stages:
        if st.placement != "scratch":
            continue
        extents = [sp.extent for sp in st.box]
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
