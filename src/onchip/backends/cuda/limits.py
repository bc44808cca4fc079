"""What a kernel of the engine may not be."""

from __future__ import annotations

from onchip.backends.cuda.geometry import GROUP, MOST_BOX, Geometry
from onchip.fusion.refusal import Refusal, Rule

MOST_COLUMNS = 256  # of one instruction (PTX ISA, wgmma)
MOST_CLUSTER = 16  # programs of a cluster
MOST_THREADS = 1024
OTHERS = 40  # registers of a thread beside its sums


def refusal(g: Geometry, shared_bytes: int) -> Refusal | None:
    """Why there is no such kernel; None if there is. shared_bytes: that a program may use."""
    c, p = g.config, g.problem
    name = p.results[0].tensor.name
    registers = 65536 // g.threads // 8 * 8
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
            g.accumulators + OTHERS > min(registers, 255),
            f"{g.accumulators} sums a thread of {min(registers, 255)} registers",
        ),
        (g.threads > MOST_THREADS, f"{g.threads} threads of at most {MOST_THREADS}"),
        (
            g.tile_reads and g.r_stages < c.teams,
            f"{g.r_stages} tiles of reads for {c.teams} teams",
        ),
        (
            [c.k_split, c.x_shared, c.w_shared].count(1) < 2 or c.cluster > MOST_CLUSTER,
            f"a cluster of {c.k_split} x {c.x_shared} x {c.w_shared}",
        ),
        (
            c.k_split > 1 and (c.teams > 1 or c.k_split > g.steps),
            f"{g.steps} steps of {c.teams} teams split in {c.k_split}",
        ),
        (
            c.k_split > 1 and g.partial_bytes > g.operand_bytes,
            f"{g.partial_bytes} bytes of sums in the place of operands",
        ),
        (
            not c.w_stages and p.batch > 1,
            "weights of several batches can't stay",
        ),
    ]
    for wrong, text in checks:
        if wrong:
            return Refusal(Rule.CONTRACTION_FORM, name, text)
    if g.shared_bytes > shared_bytes:
        text = f"{g.shared_bytes:,} bytes of {shared_bytes:,}"
        return Refusal(Rule.SHARED_MEMORY, name, text, {"shared_bytes": g.shared_bytes})
    return None
