"""What a kernel of the engine may not be."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.backends.cuda.geometry import GROUP, LINE_BYTES, MOST_BOX, Geometry
from onchip.backends.cuda.packed import STEPS_OF_ROW, PackedGeometry
from onchip.backends.cuda.parts import part_inputs, part_steps
from onchip.backends.cuda.registers import available, held
from onchip.backends.cuda.totals import workspace_bytes
from onchip.fusion.phases import WORKSPACE_BUDGET
from onchip.fusion.refusal import Refusal, Rule

MOST_COLUMNS = 256  # of one instruction (PTX ISA, wgmma)
MOST_CLUSTER = 16  # programs of a cluster
MOST_THREADS = 1024
WARP = 32  # lanes, each of which gives back a slot
OTHERS = 32  # registers of a thread beside its sums, at least

Checks = Sequence[tuple[object, str]]  # (wrong, why)


def refusal(g: Geometry, shared_bytes: int) -> Refusal | None:
    """Why there is no such kernel; None if there is. shared_bytes: that a program may use."""
    if isinstance(g, PackedGeometry):
        return _packed(g, shared_bytes)
    c, p = g.config, g.problem
    checks = [
        (g.columns > MOST_COLUMNS, f"{g.columns} columns of at most {MOST_COLUMNS}"),
        (c.patch[0] % GROUP > 0, f"a patch of {c.patch[0]} positions, not a multiple of 8"),
        (max(g.x_box) > MOST_BOX, f"a box of {max(g.x_box)} of at most {MOST_BOX}"),
        (
            g.pieces > 1 and p.lines[g.outermost].stride > 1,
            f"a strided line of {g.extents[g.outermost]} elements",
        ),
        (g.tile_features > MOST_BOX, f"{g.tile_features} features a tile"),
        (min(g.cells) < 1, "a patch smaller than a window"),
        (
            held(g) + OTHERS > available(g),
            f"{held(g)} sums a thread of {available(g)} registers",
        ),
        (g.threads > MOST_THREADS, f"{g.threads} threads of at most {MOST_THREADS}"),
        (
            # a slot is given back when the products of the next one have begun
            (c.x_stages == 1 and part_inputs(g) > 1) or (c.w_stages == 1 and part_steps(g) > 1),
            f"rings of {c.x_stages} chunks and {c.w_stages} tiles of weights",
        ),
        (
            # each team has slots of its own, so that it never takes one round for another; a slot
            # that a result leaves is free when the one after it has been written
            g.tile_reads and (g.r_stages % c.teams or g.r_stages < c.teams * (1 + g.in_place)),
            f"{g.r_stages} tiles of reads for {c.teams} teams",
        ),
        (
            g.pieces > 1 and g.x_bytes // g.pieces % 128,
            f"parts of {g.x_bytes // g.pieces} bytes of a chunk",
        ),
        (
            [c.k_split, c.x_shared, c.w_shared].count(1) < 2 or c.cluster > MOST_CLUSTER,
            f"a cluster of {c.k_split} x {c.x_shared} x {c.w_shared}",
        ),
        (
            c.k_split > 1 and (c.teams > 1 or c.k_split > g.steps),
            f"{g.steps} steps of {c.teams} teams split in {c.k_split}",
        ),
        (c.k_split > 1 and p.unlike, "classes of different numbers of taps split in parts"),
        (
            p.w_features_inner and (p.w_constant or p.size != 2),
            f"features innermost of {'constant' if p.w_constant else p.kind} weights",
        ),
        (
            p.w_features_inner and g.chunk % (GROUP * c.w_shared) > 0,
            f"{g.chunk} channels of features innermost for {c.w_shared} programs",
        ),
        (
            not c.w_stages and (p.batch > 1 or c.k_split > 1),
            "weights of several batches or parts can't stay",
        ),
    ]
    return _first(g, checks, shared_bytes)


def _packed(g: PackedGeometry, shared_bytes: int) -> Refusal | None:
    """Limits of the packed form."""
    p, c = g.problem, g.config
    if min(g.cells) < 1:
        return _first(g, [(True, "a patch smaller than a window")], shared_bytes)
    others = zip(p.lines[2:], c.patch[2:], strict=True)
    checks = [
        (p.batch > 1, "a packed input of several batches"),
        (p.splits, "a packed input in float32 that is split"),
        (not p.w_constant, "weights of a packed input that are not constant"),
        (g.line.step != p.channels, "channels of a row with gaps between them"),
        (g.line.dilation > 1, "dilation along a packed row"),
        (
            any(x.taps > 1 or x.stride > 1 or n > 1 or x.pools for x, n in others),
            "a packed input of more than two lines",
        ),
        (any(r.kind == "tile" for r in p.reads), "tiles that a packed input's epilogue reads"),
        (c.along != 0 or c.row_bytes != LINE_BYTES, f"a packed input along {c.along}"),
        (c.w_stages > 0 or c.cluster > 1, "streamed weights or clusters with packed input"),
        (c.patch[0] % GROUP > 0, f"a patch of {c.patch[0]} positions, not a multiple of 8"),
        (g.columns > MOST_COLUMNS, f"{g.columns} columns of at most {MOST_COLUMNS}"),
        (g.tile_features > MOST_BOX, f"{g.tile_features} features a tile"),
        (c.x_stages <= g.units, f"{c.x_stages} slots for tiles of {g.units}"),
        (g.units > WARP, f"tiles of {g.units} slots"),
        (
            g.run_chunks > 1 and len(g.pairs) % STEPS_OF_ROW > 0,
            f"{len(g.pairs)} instructions a chunk",
        ),
        (
            g.needed > g.registers,
            f"{g.accumulators} sums a thread of {g.registers} registers",
        ),
        (g.threads > MOST_THREADS, f"{g.threads} threads of at most {MOST_THREADS}"),
    ]
    return _first(g, checks, shared_bytes)


def _first(g: Geometry, checks: Checks, shared_bytes: int) -> Refusal | None:
    p = g.problem
    name = p.subject
    tiles = [*(r.tensor for r in p.results), *(r.tensor for r in p.reads if r.kind == "tile")]
    mixed = len({t.dtype for t in tiles if t.dtype.size == 2}) > 1
    steps = (n * x.hop for n, x in zip(g.cells, p.lines, strict=True))
    gaps = any(c < s for c, s in zip(g.config.patch, steps, strict=True))
    kept = any(x.apart and n > 1 for x, n in zip(p.lines, g.config.patch, strict=True))
    common = [
        (kept, "a tile of positions that have totals of their own"),
        (mixed, "tiles of bfloat16 and of float16"),
        (g.positions_stored and gaps, "a result of positions that no tile of windows has"),
    ]
    for wrong, text in [*checks, *common]:
        if wrong:
            return Refusal(Rule.CONTRACTION_FORM, name, text)
    workspace = workspace_bytes(g)
    if workspace > WORKSPACE_BUDGET:
        text = f"{workspace:,} bytes of tiles' totals, of {WORKSPACE_BUDGET:,}"
        return Refusal(Rule.WORKSPACE, name, text, {"workspace_bytes": workspace})
    if g.shared_bytes > shared_bytes:
        text = f"{g.shared_bytes:,} bytes of {shared_bytes:,}"
        return Refusal(Rule.SHARED_MEMORY, name, text, {"shared_bytes": g.shared_bytes})
    return None
