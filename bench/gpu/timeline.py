"""When the warps of one program of an engine kernel do what, in clocks.

    PYTHONPATH=src python3 bench/gpu/timeline.py CASE [options of kernels.py]
                                                 [--program 0] [--turns 6] [--runs 3]

The kernel is the first variant of kernels.py's CASE that the engine has under these options, built
with marks (`mark` in include/onchip/hopper.cuh: what a place is stands where it is called), and run
with nothing of its operands in the last cache. For each warp that has marks, a line a turn: clocks
from the program's first mark to this turn's first, then from mark to mark.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parents[1] / "src")]

import torch  # noqa: E402
from bench.gpu import kernels, measure, region  # noqa: E402

from onchip.backends.nvidia.build import Built  # noqa: E402

PLACES, WARPS = 9, 32


def main() -> int:
    own = argparse.ArgumentParser()
    for name, number in (("--program", 0), ("--turns", 6), ("--runs", 3)):
        own.add_argument(name, type=int, default=number)
    mine, rest = own.parse_known_args()
    options = kernels.arguments([*rest, "--generator", "cuda", "--limit", "1"])
    for case in kernels.chosen(options):
        generator = measure.generator_of(options, True)
        s = region.prepare(case, generator, measure.sweep(options))
        if not s.candidates:
            print(f"{case.name}: no kernel: {'; '.join(s.refused.values())}")
            return 1
        label, c = next(iter(s.candidates.items()))
        print(f"{case.name}: {label}, {c.source.threads} threads")
        kept = torch.zeros(WARPS, mine.turns, PLACES, dtype=torch.int64, device="cuda")
        above = "".join(
            f"#define TIMELINE{name} {value}\n"
            for name, value in (
                ("", f"{kept.data_ptr()}ull"), ("_TURNS", mine.turns), ("_PLACES", PLACES),
                ("_PROGRAM", mine.program),
            )
        )  # fmt: skip
        c = replace(c, source=replace(c.source, text=above + c.source.text))
        (built,) = region.build_all([c], generator.gpu)
        if not isinstance(built, Built):
            print(built)
            return 1
        sets = region.on_device(s, "cuda", 1)
        memory = region.memory_of(c, sets)
        pointers = [t.data_ptr() for t in region.tensors_of(c, memory, sets, 0)]
        for _ in range(mine.runs):
            torch.full((256 << 20,), 1, dtype=torch.uint8, device="cuda")
            kept.zero_()
            generator.kernel(c, built).run(pointers)
        torch.cuda.synchronize()
        show(kept.cpu(), c.source.threads // 32)
    return 0


def show(kept: torch.Tensor, warps: int) -> None:
    start = int(kept[kept > 0].min())
    before = ""
    for warp in range(warps):
        lines = []
        for turn, marks in enumerate(kept[warp].tolist()):
            found = sorted((at, place) for place, at in enumerate(marks) if at)
            if not found:
                continue
            text = f"{found[0][0] - start:8d} [{found[0][1]}]"
            for (a, _), (b, place) in itertools.pairwise(found):
                text += f" {b - a:6d} [{place}]"
            lines.append(f"  turn {turn}: {text}")
        if warp % 4 == 0 or (lines and not before):  # of a warpgroup, the first warp
            print("\n".join([f"warp {warp}", *lines]))
        before = "shown" if lines else ""


if __name__ == "__main__":
    sys.exit(main())
