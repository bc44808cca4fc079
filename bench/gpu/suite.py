"""Cases of a suite of `onchip bench` with peers as a short table:

    python3 bench/gpu/suite.py memory [REGEX]

Every row is printed, and the contract's JSON written to $OUT/SUITE-cuda.json (for bench/results),
as soon as the case is done: a run that is stopped keeps what it has. Exit code 1: a case failed or
missed its target.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from onchip.report import bench, schema


def main(suite: str, pattern: str = "") -> int:
    target = Path(os.environ.get("OUT", "/tmp")) / f"{suite}-cuda.json"
    print(f"{'onchip':>9} {'eager':>9} {'inductor':>9} {'floor':>8} {'share':>6} "
          f"{'target':>8} {'kernels':>7} {'error':>8} {'eager':>8}  case")  # fmt: skip
    rows: list[dict[str, Any]] = []
    for case in bench.SUITES[suite]:
        if re.search(pattern, case.name):
            result = bench.run_cases(suite, [case], peers=True)
            rows += result["rows"]
            result["rows"] = rows
            schema.check(result, schema.BENCH, "bench result")
            target.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
            print(line(rows[-1]), flush=True)
    return 1 if any(missed(r) for r in rows) else 0


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
    return f"{' '.join(cells)}  {name}{' MISSED' if missed(r) else ''}{notes}"


def missed(r: dict[str, Any]) -> bool:
    if r["onchip_us"] is None:
        return True
    return r["target_us"] is not None and r["onchip_us"] > r["target_us"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
