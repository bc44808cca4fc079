"""The functions of a kernel of several phases: one for each phase, launched one after the other;
or one for all of them, where the programs that share a row wait for each other.

Programs that are a cluster run at the same time: their barrier is the hardware's, and they hand on
what they do through each other's shared memory. Elsewhere partial results go through memory, and
a barrier of a row is a counter in memory. Every program of the row stores what it hands on, adds
one, and waits until all have. Leaving, it adds one more, and the last to leave puts zero back, so
that the next launch starts as this one did.

The programs that wait must not keep out the ones that they wait for. Programs start in the order of
their numbers (as CUB's scans and stream-K products rely on as well), a row's are neighbours, and
there are at most MOST_SHARING of them, far fewer than any GPU holds at once: so all programs of the
lowest unfinished row are running or about to start. Of several such kernels at a time each can have
one row that has not started whole; it takes four of them to fill a GPU of 132 multiprocessors, with
one program on each. (The branches of one CUDA graph run them one at a time: runtime/branches.py.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from onchip.backends.nvidia.source import Workspace
from onchip.backends.triton.placement import Kept
from onchip.backends.triton.writer import Tile, Writer
from onchip.fusion.layout import contiguous
from onchip.fusion.nest import Nest
from onchip.fusion.staging import Staged
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Tensor, axis, loads
from onchip.ir.index import stride_along

Strides = tuple[int, ...]

# Programs that may share a row.
MOST_SHARING = 32
# Programs of a cluster (CUDA C++ Programming Guide, "Thread Block Clusters"): 8 on any GPU, 16
# where a kernel allows it.
MOST_IN_CLUSTER = 16
# Counters lie in different sectors of the cache, so that rows don't wait for each other's atomics.
COUNTER_BYTES = 32


def same_tiles(w: Writer, before: Nest, nest: Nest) -> None:
    """Let the tiles of an earlier phase be those of `nest`: its loops are the first of the root's,
    and all are cut into single elements."""
    for own, shared in zip(before.tile_axes, nest.tile_axes, strict=False):
        bound = w.bound(shared)
        assert bound is not None, "tiles are bound before phases are joined"
        w.env[own] = w.env[shared]
        w.scopes[-1].bound[own] = bound
        w.ranks[own] = w.ranks[shared]


def sharing(nest: Nest) -> tuple[int, int]:
    """Rows of a joined nest, and programs that share one: the root's loops number the rows, the
    chunks of a row, and the elements of a chunk, which are the tile."""
    *rows, chunks, _ = (max(a.extent, 1) for a in nest.root.loops)
    return prod(rows), chunks


def counters(nest: Nest) -> list[Workspace]:
    """The memory of barriers that are not a cluster's: after each phase but the last, a counter a
    row."""
    rows, _ = sharing(nest)
    return [Workspace(rows * COUNTER_BYTES, zeroed=True, barrier=True) for _ in nest.before]


def emit_barrier(w: Writer, counter: str, nest: Nest, done: list[Kept]) -> None:
    """Wait for the programs of the row; what they handed on is read from memory from here on."""
    if w.options.cluster:
        _exchange(w, nest, done)
        return
    _wait_by_counter(w, counter, nest)
    for k in done:
        if k.stage.placement == "shared":
            del w.kept[k.stage.tensor]
            w.uncached.add(k.stage.tensor)


def _exchange(w: Writer, nest: Nest, done: list[Kept]) -> None:
    """What each program of the cluster hands on becomes a block over all of them."""
    _, programs = sharing(nest)
    given = [k.stage for k in done if k.stage.placement == "shared"]
    if w.entering:  # nobody's shared memory may be written before it has started
        w.entering = False
        w.line("cluster_wait()")
    texts = [w.kept[st.tensor][0].text for st in given]
    names = [w.fresh("all") for _ in given]
    ranks = w.define("ranks", f"tl.arange(0, {programs})").text
    function = {1: "of_cluster", 2: "both_of_cluster"}[len(given)]
    w.line(f"{', '.join(names)} = {function}({', '.join([*texts, ranks])})")
    for st, name in zip(given, names, strict=True):
        chunks = axis(programs, "rank")
        w.widths[chunks] = programs
        w.kept[st.tensor] = Tile(name, (chunks,)), (chunks, *st.staged.store[1:])


def exchangeable(nest: Nest) -> bool:
    """Whether the programs of a row can hand on what they do within a cluster: one or two values of
    float32 a phase, of a power of two programs."""
    _, programs = sharing(nest)
    handed = [[st.tensor for st in p.stages if st.placement == "shared"] for p in nest.before]
    return (
        programs <= MOST_IN_CLUSTER
        and programs & (programs - 1) == 0
        and all(1 <= len(h) <= 2 and all(t.dtype is DType.F32 for t in h) for h in handed)
    )


def _wait_by_counter(w: Writer, counter: str, nest: Nest) -> None:
    _, programs = sharing(nest)
    step = COUNTER_BYTES // 4
    at = w.define("row", f"{counter} + program // {programs} * {step}").text
    w.line("tl.debug_barrier()")
    w.line(f'tl.atomic_add({at}, 1, sem="release")')
    w.line(f'while tl.atomic_add({at}, 0, sem="acquire") < {programs}:')
    w.line("    pass")
    w.line("tl.debug_barrier()")
    w.leaving.append(f'if tl.atomic_add({at}, 1, sem="relaxed") == {2 * programs - 1}:')
    w.leaving.append(f"    tl.store({at}, 0)")


def narrowed(w: Writer) -> None:
    """Blocks of half types are kept as stored from here on: what reads them next widens them
    again. (Widened, a chunk would take twice the registers between two folds.)"""
    for stored, widened in w.packed.items():
        if widened in w.levels[0].names and not w.options.interpret:
            w.line(f"{stored} = again({stored})")
            del w.levels[0].names[widened]


def handed_on(nest: Nest) -> tuple[Tensor, ...]:
    """What the phases hand to each other through memory."""
    stages = (st for phase in nest.phases for st in phase.stages)
    return tuple(st.tensor for st in stages if st.placement == "shared")


def handed_on_strides(
    stages: Iterable[Staged], strides: Mapping[Tensor, Strides]
) -> dict[Tensor, Strides]:
    """Strides of what phases hand on: its elements lie as what they are computed from, as programs
    are counted as their results lie in memory, and later phases count backwards."""
    return {s.tensor: _as_read(s, strides) for s in stages}


def _as_read(s: Staged, strides: Mapping[Tensor, Strides]) -> Strides:
    dense = contiguous(s.tensor.shape)
    found = [ld for ld in loads(s.body) if ld.src in strides]
    axes = [a for a in s.store if isinstance(a, Axis)]
    if not found or len(axes) < len(s.store):
        return dense
    largest = max(found, key=lambda ld: ld.src.numel)
    steps = [stride_along(largest.index, strides[largest.src], a) for a in axes]
    if any(step is None for step in steps):
        return dense
    order = sorted(range(len(steps)), key=lambda d: -abs(steps[d] or 0))
    inner = contiguous(tuple(s.tensor.shape[d] for d in order))
    return tuple(inner[order.index(d)] for d in range(len(steps)))


def reads_again(before: Iterable[Nest], nest: Nest) -> bool:
    """Whether a phase reads what an earlier one has read from memory: its last part is still in the
    last cache, so a phase that counts backwards finds it there."""

    def read(n: Nest) -> set[Tensor]:
        made = {st.tensor for st in n.stages}
        return {ld.src for st in n.stages for ld in loads(st.staged.body)} - made

    return any(read(n) & read(nest) for n in before)
