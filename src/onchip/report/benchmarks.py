"""docs/benchmarks.md from the stored results: `python -m onchip.report.benchmarks FOLDER PAGE`."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onchip.errors import OnchipError
from onchip.report import schema
from onchip.report.bench_suites import SHORT, SUITES
from onchip.report.text import UNKNOWN, count, quantity, time

HEAD = """# Benchmarks

Written by `make bench` (`python -m onchip.report.benchmarks bench/results docs/benchmarks.md`)
from the files in bench/results; nothing here is typed by hand. `onchip` and every peer run the same
model on the same inputs in one process, interleaved; a time is the median of a call. The error is
the relative distance from a float64 run, in the Euclidean norm. The floor is what moving inputs,
outputs and weights once, or doing the arithmetic, takes at the machine's measured ceilings; the
arithmetic is the operators' own, of which Winograd's form of a 3-tap convolution does less.
`vs best` is the best peer's time over onchip's: above 1, onchip is the fastest. `predicted` is the
cost model's time for the program, worked out before anything was built.

On a GPU each form runs inside CUDA graphs, over rotated inputs that together are several times its
last cache. `bytes` are inputs, weights and results, each once; `share` is how much of the rate of a
plain copy (read plus written) moving them at that time is; `target` is what the project promises.
The suite `engine` measures single calls, as it says; `bare` is less than the model, and so no peer
that `vs best` counts.
"""

BARE = "bare"  # a product of the library without the model's other operators

# columns that only some suites have
EXTRA = {"predicted_us": "predicted", "bytes": "bytes", "share": "share", "target_us": "target"}


def document(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page for results by file name. OnchipError names a result that breaks the contract."""
    parts = [HEAD]
    for name, result in sorted(results.items()):
        schema.check(result, schema.BENCH, name)
        parts.append(_suite(result))
    return "\n".join(parts)


def _suite(result: Mapping[str, Any]) -> str:
    rows = result["rows"]
    peers = list(dict.fromkeys(p for r in rows for p in r["peers"]))
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    extra = [k for k in EXTRA if any(r.get(k) is not None for r in rows)]
    head = ["model", "dtype", "onchip", *peers, "vs eager", "vs best", "floor",
            *(EXTRA[k] for k in extra), "launches", "error (eager's)"]  # fmt: skip
    lines = [
        f"\n## {result['suite']} on {result['device']}\n",
        f"{result['date']}; {versions}.\n",
        *_protocol(result),
        _line(head),
        _line(["---", "---", *["---:"] * (len(head) - 2)]),
        *(_line(_cells(r, peers, extra)) for r in rows),
        "",
        *summary(rows),
        *_model_error(rows),
        *(f"- {r['name']}: {r['notes']}" for r in rows if r["notes"]),
        *_reasons(result),
    ]
    return "\n".join(lines) + "\n"


def _protocol(result: Mapping[str, Any]) -> list[str]:
    """How a suite was measured that is not measured as the others are."""
    if "protocol" not in result:
        return []
    empty = f" An empty kernel takes {time(result['empty_us'])}." if "empty_us" in result else ""
    text = result["protocol"]
    return [f"{text[:1].upper()}{text[1:]}.{empty}\n"]


def _reasons(result: Mapping[str, Any]) -> list[str]:
    """Why rows miss their targets, or take over twice their floors, as the suite's cases say, and
    bench_suites.SHORT for rows that have no case of ours."""
    suite, lines = result["suite"], []
    cases = {(c.name, str(c.dtype or "float32").removeprefix("torch.")): c.short
             for c in SUITES.get(suite, ())}  # fmt: skip
    for row in result["rows"]:
        text = cases.get((row["name"], row["dtype"]), "")
        text = SHORT.get(suite, {}).get(row["name"], text)
        took, target, floor = row["onchip_us"], row["target_us"], row["floor_us"]
        if text and target is not None and (took is None or took > target):
            lines.append(f"- {row['name']}: short of its target: {text}")
        elif text and took is not None and took > 2 * floor:
            lines.append(f"- {row['name']}: {took / floor:.1f} times its floor: {text}")
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def _extra(row: Mapping[str, Any], key: str) -> str:
    """A figure that only some suites have."""
    value, own = row.get(key), row["onchip_us"]
    match key:
        case _ if value is None:
            return UNKNOWN
        case "predicted_us":
            return time(value)
        case "bytes":
            return quantity(value, "B")
        case "share":
            return f"{value:.0%}"
    met = own is not None and own <= value
    return f"{time(value)} ({'met' if met else 'missed'})"


def _cells(row: Mapping[str, Any], peers: Sequence[str], extra: Sequence[str]) -> list[str]:
    own = row["onchip_us"]
    known = {k: v for k, v in row["peers"].items() if v is not None}
    best = min((us for name, us in known.items() if name != BARE), default=None)
    errors = [UNKNOWN if e is None else f"{e:.1e}" for e in (row["error"], row["eager_error"])]
    return [
        row["name"],
        row["dtype"],
        f"**{time(own)}**",
        *(time(row["peers"].get(p)) for p in peers),
        _ratio(known.get("eager"), own),
        _ratio(best, own),
        time(row["floor_us"]),
        *(_extra(row, k) for k in extra),
        count(row["launches"]),
        f"{errors[0]} ({errors[1]})",
    ]


def _ratio(peer: float | None, own: float | None) -> str:
    return UNKNOWN if not peer or not own else f"{peer / own:.2f}×"


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Geometric mean against each peer, over the rows that have both; of each group of rows, where
    there are such."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get("group", ""), []).append(row)
    return [line for group, found in sorted(groups.items()) for line in _means(group, found)]


def _means(group: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(p for r in rows for p in r["peers"])
    head = f"{group[:1].upper()}{group[1:]}: against" if group else "Against"
    lines = []
    for name in names:
        ratios = [
            r["peers"][name] / r["onchip_us"]
            for r in rows
            if r["onchip_us"] and r["peers"].get(name)
        ]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            won = sum(x > 1 for x in ratios)
            lines.append(
                f"{head} {name}: {mean:.2f}× in the geometric mean of {len(ratios)} rows, faster "
                f"in {won}.\n"
            )
    return lines


def _model_error(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far the cost model's predictions are from what was measured."""
    pairs = [(r.get("predicted_us"), r["onchip_us"]) for r in rows]
    off = [abs(p / us - 1) for p, us in pairs if p and us]
    if not off:
        return []
    return [
        f"Model error (predicted over measured, less 1) of {len(off)} rows: median "
        f"{statistics.median(off):.0%}, worst {max(off):.0%}.\n"
    ]


def main(folder: str, page: str) -> None:
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        raise OnchipError(f"{folder} has no results: run onchip bench cpu --json {folder}/...")
    Path(page).write_text(document({f.name: json.loads(f.read_text()) for f in files}))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except (OnchipError, TypeError, OSError, ValueError) as error:
        sys.exit(f"onchip: {error}")
