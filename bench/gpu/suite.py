"""A suite of `onchip bench` with peers as a short table: python3 bench/gpu/suite.py memory

The contract's JSON goes to $OUT/SUITE-cuda.json (for bench/results). Exit code 1: a case failed or
missed its target.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from onchip.report import bench, schema


def main(suite: str) -> int:
    result = bench.run(suite, peers=True)
    schema.check(result, schema.BENCH, "bench result")
    out = Path(os.environ.get("OUT", "/tmp"))
    (out / f"{suite}-cuda.json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    print(f"{'case':62} {'onchip':>9} {'eager':>9} {'inductor':>9} {'floor':>8} {'share':>6} "
          f"{'target':>8} {'kernels':>7} {'error':>8} {'eager':>8}")  # fmt: skip
    for r in result["rows"]:
        print(line(r))
    return 1 if any(missed(r) for r in result["rows"]) else 0


def line(r: dict[str, Any]) -> str:
    def cell(v: float | None, form: str, width: int) -> str:
        return f"{'-' if v is None else format(v, form):>{width}}"

    name = f"{r['name'].removeprefix('pipeline:')} {r['dtype']}"
    times = (r["onchip_us"], r["peers"].get("eager"), r["peers"].get("inductor"))
    cells = [cell(t, ",.1f", 9) for t in times]
    cells += [cell(r["floor_us"], ",.1f", 8), cell(r["share"], ".1%", 6)]
    cells += [cell(r["target_us"], ",.1f", 8), cell(r["launches"], "d", 7)]
    cells += [cell(r["error"], ".1e", 8), cell(r["eager_error"], ".1e", 8)]
    notes = f"\n    {r['notes'][:180]}" if r["onchip_us"] is None else ""
    return f"{name:62} {' '.join(cells)}{' MISSED' if missed(r) else ''}{notes}"


def missed(r: dict[str, Any]) -> bool:
    if r["onchip_us"] is None:
        return True
    return r["target_us"] is not None and r["onchip_us"] > r["target_us"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
