"""Times of a region's generated GPU kernels, variant by variant, without the planner.

    PYTHONPATH=src python3 bench/gpu/kernels.py CASE... [options]

CASE: a regular expression for pipelines and layers of the suites `memory`, `gpu` and `engine`, or a
MODEL (pipeline:softmax:16384x4096) with --dtype. --generator says whose variants: Triton's, the
tensor-core engine's (cuda), or those that the planner has for the GPU, in its order (auto). All are
built side by side, checked against float64 with poisoned outputs, and timed by
onchip.report.bench_replay (--once: bench_once) beside eager and Inductor. A variant that fails is a
row. One that breaks or hangs the process (an illegal address ends every later CUDA call) is a row,
too: the rest runs in a new process. Results go to $OUT/kernels.json. Exit code 1: a case has no
correct variant. On a machine without a GPU, or with --no-run, the variants are written, built and
listed only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this repository, for bench.gpu
sys.path.insert(0, str(HERE.parents[1] / "src"))

PIECES = ("pipeline:", "layer:")  # how models begin that may be one region
QUIET_S, BUILD_S = 150, 600  # a child without progress for so long hangs
MOST_RESTARTS = 40
RESTART = 75  # exit code of a child whose CUDA context is lost


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("cases", nargs="+", metavar="CASE", help="regular expression, or a MODEL")
    p.add_argument("--limit", type=int, default=40, help="variants of a case (default 40)")
    p.add_argument("--dtype", default="bfloat16", help="of a MODEL that is no suite's case")
    p.add_argument("--tiles", default="", help="tiles of the root in place of the proposed ones: "
                   "1x4096,2x4096")  # fmt: skip
    p.add_argument("--set", action="append", default=[], metavar="OPTION=V1,V2",
                   help="values for a field of triton.source.Options (--set warps=4,8) or of the "
                   "engine's Config (--set x_stages=2,3 --set patch=8x7x1,8x14x1)")  # fmt: skip
    p.add_argument(
        "--generator",
        choices=("triton", "cuda", "auto"),
        default="auto",
        help="whose variants (default auto: what the planner has on this GPU)",
    )
    p.add_argument("--peers", choices=("none", "eager", "all"), default="all")
    p.add_argument("--once", action="store_true",
                   help="time single calls whose operands have left the last cache")  # fmt: skip
    p.add_argument("--device", default="h200", help="that kernels are for, without a GPU")
    p.add_argument("--no-run", action="store_true", help="build and list only")
    p.add_argument("--sources", type=Path, help="write the generated texts into this folder")
    p.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    return p.parse_args(argv)


# ---- the parent: restarts the child after a crash or a hang ------------------------------------


def parent(options: argparse.Namespace) -> int:
    state = Path(tempfile.mkdtemp(prefix="onchip-bench-")) / "state.jsonl"
    state.touch()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit: show what there is
    try:
        code = supervise([sys.executable, __file__, *sys.argv[1:], "--state", str(state)], state)
    except KeyboardInterrupt:
        code = 124
    return show(read(state), code)


def supervise(command: list[str], state: Path, quiet_s: float = QUIET_S) -> int:
    """Runs the child until it is done, again after each variant that ended it; the last exit
    code."""
    code = RESTART
    for _ in range(MOST_RESTARTS):
        code = watched(command, state, quiet_s)
        if code == RESTART:  # the culprit has a row by now
            continue
        pending = unfinished(read(state))
        if code == 0 or (pending is None and code > 0):
            break
        if pending is None:
            print(f"the process {how(code, quiet_s)} outside of any variant", flush=True)
            break
        row = dict(pending, error=f"the process {how(code, quiet_s)}")
        append(state, dict(row=row))
        print(f"{row['case']}: {row['variant']}: {row['error']}; going on", flush=True)
    return code


def how(code: int, quiet_s: float) -> str:
    return f"hung for {quiet_s:g} s" if code == -9 else f"ended with code {code}"


def watched(command: list[str], state: Path, quiet_s: float) -> int:
    """The child's exit code; it is killed when it makes no progress."""
    child = subprocess.Popen(command)
    try:
        while child.poll() is None:
            time.sleep(0.2)
            quiet = time.time() - state.stat().st_mtime
            if quiet > quiet_s and (quiet > BUILD_S or "building" not in (read(state) or [{}])[-1]):
                child.kill()
    finally:
        child.kill()
    return child.wait()


def read(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in state.read_text().splitlines()]


def append(state: Path, entry: dict[str, Any]) -> None:
    with state.open("a") as f:
        f.write(json.dumps(entry) + "\n")


def unfinished(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The variant that was begun last and has no row."""
    begun = [e["begin"] for e in entries if "begin" in e]
    if not begun:
        return None
    done = {(e["row"]["case"], e["row"]["variant"]) for e in entries if "row" in e}
    last = begun[-1]
    return None if (last["case"], last["variant"]) in done else last


def show(entries: list[dict[str, Any]], code: int) -> int:
    """A table for each case, the fastest first; 1 if a case has no correct variant."""
    out = os.environ.get("OUT")
    if out:
        Path(out, "kernels.json").write_text(json.dumps(entries, indent=1))
    for e in entries:
        if "facts" in e:
            print(", ".join(f"{k} {v}" for k, v in e["facts"].items()))
    cases: dict[str, list[dict[str, Any]]] = {}
    for e in entries:
        row = e.get("row") or e.get("final")
        if row is not None:
            known = cases.setdefault(row["case"], [])
            known[:] = [r for r in known if r["variant"] != row["variant"]] + [row]
    if not cases and entries:
        print(f"it ended before any variant had a row: {entries[-1]}")
    bad = [name for name, rows in cases.items() if not any(good(r) for r in rows)]
    for name, rows in cases.items():
        print(f"\n{name}")
        rows.sort(key=lambda r: (bool(r.get("error")), r.get("us") or 1e30))
        for line in table(rows):
            print("  " + line)
    if bad:
        print(f"\nno correct variant: {', '.join(bad)}")
    return 1 if bad or code else 0


def good(row: dict[str, Any]) -> bool:
    return not row.get("error") and not row.get("peer")


COLUMNS = {
    "us": "8.2f", "gbs": "6.0f", "share": "5.1%", "err": "8.1e", "regs": "4",
    "spill": "5", "shared": "6", "occ": "4.0%", "sass": "6", "build_s": "5.1f",
}  # fmt: skip


def table(rows: list[dict[str, Any]], most: int = 60) -> list[str]:
    """Lines; what a variant is stands last, since it may be long."""
    lines, last = [" ".join(f"{c:>8}" for c in COLUMNS) + "  variant"], ""
    for r in rows[:most]:
        cells = (
            f"{'-' if r.get(c) is None else format(r[c], form):>8}" for c, form in COLUMNS.items()
        )
        lines.append(f"{' '.join(cells)}  {r['variant']}")
        if r.get("error") and r["error"] != last:
            lines.append(f"    {r['error']}")
        last = r.get("error", "")
    return lines + ([f"and {len(rows) - most} more"] if len(rows) > most else [])


# ---- the child ---------------------------------------------------------------------------------


def child(options: argparse.Namespace) -> int:
    import torch
    from bench.gpu.measure import Bench, Lost, alive

    from onchip.report import bench_replay as replay

    run = torch.cuda.is_available() and not options.no_run
    bench = Bench(options.state, options, run)
    subjects = bench.prepare(chosen(options))
    bench.build(subjects)
    if run:
        bench.facts()
        for s in subjects:
            try:
                bench.measure(s)
            except Lost:
                os._exit(RESTART)  # an orderly end would wait for the GPU
            except Exception:
                bench.fail(s, traceback.format_exc(limit=4))
                if not alive():
                    os._exit(RESTART)
            replay.free()
    return 0


def chosen(options: argparse.Namespace) -> list[Any]:
    """Cases of the suites whose name and type match, then MODELs."""
    import torch

    from onchip.report.bench_suites import SUITES, Case

    out: list[Any] = []
    suites = (*SUITES["memory"], *SUITES["gpu"], *SUITES["engine"])
    # a case of two suites is one
    pieces = {(c.name, c.dtype): c for c in reversed(suites) if c.model.startswith(PIECES)}
    known = list(reversed(pieces.values()))
    for text in options.cases:
        found = [c for c in known if re.search(text, f"{c.name} {c.dtype}")]
        if not found and ":" in text:
            dtype = getattr(torch, options.dtype)
            found = [Case(text, dtype=dtype, device="cuda", memory_bound=True)]
        if not found:
            sys.exit(f"no case matches {text!r}: {', '.join(c.name for c in known)}")
        out += [c for c in found if c not in out]
    return out


if __name__ == "__main__":
    parsed = arguments(sys.argv[1:])
    sys.exit(child(parsed) if parsed.state else parent(parsed))
