"""Results of several runs of one suite as one file, on one machine and one commit:

    python3 bench/gpu/merge.py TARGET FILE...

Each row is of one run, in which all of its forms took turns. Of a case in several files the last
one counts. Rows stand in the suite's order. Files of other suites, devices, versions or protocols
are an error.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from onchip.errors import OnchipError
from onchip.report import schema
from onchip.report.bench_suites import SUITES

SAME = ("suite", "device", "versions", "protocol")


def merged(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One result of results by file name; facts of the run (date, empty_us) are the last one's.
    OnchipError names the first file that is not of the same suite and machine."""
    rows: dict[tuple[str, str], Any] = {}
    first: Mapping[str, Any] | None = None
    for name, result in results.items():
        schema.check(result, schema.BENCH, name)
        first = first or result
        for key in SAME:
            if result.get(key) != first.get(key):
                raise OnchipError(f"{name}: {key} is {result.get(key)!r}, not {first.get(key)!r}")
        rows |= {(row["name"], row["dtype"]): row for row in result["rows"]}
    if first is None:
        raise OnchipError("no results to merge: give the files of several runs")
    cases = SUITES.get(first["suite"], ())
    order = {(c.name, str(c.dtype).removeprefix("torch.")): n for n, c in enumerate(cases)}

    def place(row: Mapping[str, Any]) -> tuple[int, int]:
        number = re.match(r"(\d+)_", row["name"])  # KernelBench's problems have one
        return order.get((row["name"], row["dtype"]), len(order)), int(number[1]) if number else 0

    return {**list(results.values())[-1], "rows": sorted(rows.values(), key=place)}


def main(target: str, files: Sequence[str]) -> None:
    result = merged({f: json.loads(Path(f).read_text()) for f in files})
    Path(target).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except (OnchipError, IndexError, OSError, ValueError) as error:
        sys.exit(f"onchip: {error}")
