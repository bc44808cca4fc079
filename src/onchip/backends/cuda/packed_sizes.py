"""What the packed form's text says of a geometry: namespace packed_cfg of include/packed.cuh."""

from __future__ import annotations

from math import prod

from onchip.backends.cuda.geometry import up
from onchip.backends.cuda.packed import AT_ONCE, RAW_STAGES, PackedGeometry
from onchip.backends.cuda.registers import launched


def constants(g: PackedGeometry) -> dict[str, int]:
    """Sizes of include/packed.cuh."""
    d = g.down
    return {
        "SIZE": g.problem.size, "LEAD": g.lead, "RUN": g.run,
        "RUN_CHUNKS": g.run_chunks,
        "PARTS": g.parts, "PART_STEP": g.part_step, "ROW_STEP": g.row_step,
        "SLOT": g.x_slot, "ADVANCE": g.advance, "SLOT_ROWS": g.slot_rows,
        "UNITS": g.units, "DOWN_STRIDE": d.stride, "PAIRS": len(g.pairs),
        "WEIGHTS": g.w_tiles,
        "ZERO_BYTES": up(g.zero_bytes, 128), "RAW_STAGES": RAW_STAGES,
        "RAW_ROW": g.raw_row, "RAW_BEFORE": g.raw_before,
        "RAW_ALIGNED": g.raw_aligned, "COPY": g.copy_bytes, "PER_ITEM": g.per_item,
        "AT_ONCE": AT_ONCE, "WHOLE_ROWS": int(g.whole_rows),
        "STEP": g.step_bytes, "LOADER_WARPS": g.loader_warps,
        "LOADERS": g.loaders,
        "W_HELD": int(g.w_held), "LOADING": g.loading,
        "MULTIPLYING": g.registers, "HANDED_ON": int(g.registers > launched(g)),
        "ROW_ELEMENTS": g.line.size * g.problem.channels, "ROWS": d.size,
        "X_OFFSET": g.problem.x_offset, "ORIGIN": g.origin - g.lead - g.raw_before,
        "TILE_ELEMENTS": g.hops[0] * g.line.stride * g.problem.channels,
        "ROW_ORIGIN": -d.pad - d.lead * d.stride * (not g.carried),
        "CARRIED": int(g.carried), "CARRY_BYTES": g.carry_bytes,
        "POSITION_TILES": prod(g.tiles),
    }  # fmt: skip


def tables(g: PackedGeometry) -> dict[str, list[int]]:
    """For each pair: its row, its part, and the bytes from there to the second part (-1:
    zeros). Then elements of memory between two elements of each line but the first."""
    apart = []
    for (row, j), second in g.pairs:
        to = second and (second[0] - row) * g.row_step + (second[1] - j) * g.part_step
        apart.append(-1 if to is None else to)
    steps = [x.step for x in g.problem.lines[1:]]
    return {
        "PAIR_ROW": [row * g.down.dilation for (row, _), _ in g.pairs],
        "PAIR_PART": [j for (_, j), _ in g.pairs],
        "PAIR_APART": apart,
        "X_STEP": steps + [0] * (3 - len(steps)),
    }
