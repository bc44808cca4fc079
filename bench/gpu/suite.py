"""Cases of a suite of `onchip bench` with peers as a short table:

    python3 bench/gpu/suite.py SUITE [REGEX] [--without PEER...] [--prepare N]
    python3 bench/gpu/suite.py kernelbench PATH [REGEX] [--ids 1,4,7-9] [--skip K] [--every N] ...

REGEX chooses cases by name and type ("56x56.*bfloat16"). PATH is a clone of KernelBench; of its
problems (of IDS: all) the first K are left out and then all but every N-th, so that N runs with
K = 0 ... N - 1 are all of them. Every row is printed, and the contract's JSON written to
$OUT/SUITE-cuda.json (for bench/results; merge.py joins those of several runs), as soon as the case
is done: a run that is stopped keeps what it has. --prepare N first runs every case in N processes
side by side, which prints those that fail and leaves compiled kernels in the caches, but nothing
that was measured meanwhile. A case that breaks or hangs the process has a row that says so, and the
others run in a new process. Exit code 1: a case failed or missed its target.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this repository, for bench.gpu
sys.path.insert(0, str(HERE.parents[1] / "src"))

from bench.gpu import kernels  # noqa: E402

from onchip.errors import OnchipError  # noqa: E402
from onchip.report import bench, benchmarks, schema  # noqa: E402
from onchip.settings import Settings  # noqa: E402

PEERS = {
    "eager": "eager",
    "bare": "bare",
    "cudnn": "cudnn",
    "channels_last": "ch.last",
    "inductor": "inductor",
    "inductor_freezing": "freezing",
    "inductor_max_autotune": "autotune",
}  # and the heads of their columns, which a suite without them has not
# A case that takes longer hangs; a peer that tries all that it can takes minutes for a network.
QUIET_S, QUIET_TUNED_S = 240, 570
PREPARED_S = 40.0  # of searching and building, for one case while others run


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("suite", choices=(*bench.SUITES, bench.KERNELBENCH))
    p.add_argument("words", nargs="*", metavar="[PATH] [REGEX]")
    p.add_argument("--without", nargs="*", default=[], metavar="PEER")
    p.add_argument("--ids", default="")
    p.add_argument("--skip", type=int, default=0)
    p.add_argument("--every", type=int, default=1)
    p.add_argument("--prepare", type=int, default=0, metavar="N")
    p.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of N, which this process prepares
    found = p.parse_args(argv)
    found.problems = {}
    if found.suite == bench.KERNELBENCH:
        path = found.words.pop(0) if found.words else ""
        found.problems = dict(path=path, ids=found.ids, skip=found.skip, every=found.every)
    found.pattern = found.words.pop(0) if found.words else ""
    if found.words:
        p.error(f"unrecognized arguments: {' '.join(found.words)}")
    return found


def name_of(case: bench.Case) -> str:
    return f"{case.name} {str(case.dtype).removeprefix('torch.')}"


def chosen(suite: str, pattern: str, **problems: Any) -> list[bench.Case]:
    try:
        cases = bench.cases(suite, **problems)
    except OnchipError as error:
        sys.exit(f"onchip: {error}")
    found = [c for c in cases if re.search(pattern, name_of(c))]
    if not found:
        sys.exit(f"no case of {suite} matches {pattern!r}")
    return found


def wanted(options: argparse.Namespace) -> list[bench.Case]:
    found = chosen(options.suite, options.pattern, **options.problems)
    try:
        bench.check_without(options.suite, found, options.without)
    except OnchipError as error:
        sys.exit(f"onchip: {error}")
    return found


def parent(options: argparse.Namespace, argv: Sequence[str]) -> int:
    cases = wanted(options)
    state = Path(tempfile.mkdtemp(prefix="onchip-bench-")) / "state.jsonl"
    state.touch()
    heads = [PEERS[p] for p in columns(cases)]
    print("".join(f"{h:>10}" for h in ("onchip", *heads, "floor", "share", "target", "kernels",
                                       "error", "eager's", "seconds")) + "  case")  # fmt: skip
    quiet_s = QUIET_TUNED_S if any("inductor_max_autotune" in c.peers for c in cases) else QUIET_S
    command = [sys.executable, __file__, *argv, "--state", str(state)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit: end the child, too
    try:
        code = kernels.supervise(command, state, quiet_s)
    except KeyboardInterrupt:
        code = 124
    result = written(options, state)
    rows = result["rows"] if result else []
    print("\n".join(x.strip() for x in benchmarks.summary(rows)))
    return 1 if code or not rows or any(missed(r) for r in rows) else 0


def prepare(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Compiles all cases with peers, in processes side by side, and forgets what they measured."""
    from onchip.backends import cache

    # what a machine can do is measured alone
    alone = "from onchip.planning import machine; machine.measure('cuda')"
    subprocess.run([sys.executable, "-c", alone], check=True)
    start = time.monotonic()
    command = [sys.executable, __file__, *argv, "--part"]
    parts = [subprocess.Popen([*command, str(n)]) for n in range(options.prepare)]
    codes = [p.wait() for p in parts]
    shutil.rmtree(cache.folder_of("choices"))
    print(f"prepared in {time.monotonic() - start:.0f} s; exit codes {codes}", flush=True)


def part(options: argparse.Namespace) -> int:
    """One process' share of the cases; prints those that fail."""
    from onchip.report import bench_kernelbench

    bench_kernelbench.ROUNDS = 1, 1
    bench_kernelbench.KernelBench.settings = Settings(budget_s=PREPARED_S)
    for case in wanted(options)[options.part :: options.prepare]:
        (row,) = bench.run_cases(options.suite, [case], True, options.without)["rows"]
        if row["onchip_us"] is None:
            print(f"prepared {name_of(case)}: {row['notes'][:400]}", flush=True)
    return 0


def child(options: argparse.Namespace) -> int:
    import torch
    from bench.gpu.measure import alive

    cases = wanted(options)
    if cases[0].device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"suite {options.suite} runs on an NVIDIA GPU; torch sees none here")
    done = {e["row"]["case"] for e in kernels.read(options.state) if "row" in e}
    for case in cases:
        name = name_of(case)
        if name in done:
            continue
        kernels.append(options.state, dict(begin=dict(case=name, variant=options.suite)))
        result = bench.run_cases(options.suite, [case], True, options.without)
        row = dict(case=name, variant=options.suite, result=result)
        kernels.append(options.state, dict(row=row))
        written(options, options.state)
        print(line(result["rows"][0], columns(cases)), flush=True)
        if result["rows"][0]["onchip_us"] is None and not alive():
            os._exit(kernels.RESTART)  # an orderly end would wait for the GPU
    return 0


def written(options: argparse.Namespace, state: Path) -> dict[str, Any] | None:
    """All rows so far as one result, also in the file; None before the first."""
    found = [e["row"] for e in kernels.read(state) if "row" in e]
    whole = [r["result"] for r in found if "result" in r]
    if not whole:
        return None
    cases = {name_of(c): c for c in wanted(options)}
    rows = [
        r["result"]["rows"][0]
        if "result" in r
        else bench.failed(cases[r["case"]], RuntimeError(r["error"]))
        for r in found
    ]
    result = whole[-1] | {"rows": rows}
    schema.check(result, schema.BENCH, "bench result")
    target = Path(os.environ.get("OUT", "/tmp")) / f"{options.suite}-cuda.json"
    target.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return result


def columns(cases: Sequence[bench.Case]) -> list[str]:
    """The peers that a suite's cases have."""
    return [p for p in PEERS if p == "eager" or p in bench.peers_of(cases[0])]


def line(r: dict[str, Any], peers: Sequence[str]) -> str:
    def cell(v: float | None, form: str) -> str:
        return f"{'-' if v is None else format(v, form):>10}"

    name = f"{r['name'].removeprefix('pipeline:')} {r['dtype']}"
    cells = [cell(t, ",.1f") for t in (r["onchip_us"], *(r["peers"].get(p) for p in peers))]
    cells += [cell(r["floor_us"], ",.1f"), cell(r["share"], ".1%")]
    cells += [cell(r["target_us"], ",.1f"), cell(r["launches"], "d")]
    cells += [cell(r["error"], ".1e"), cell(r["eager_error"], ".1e")]
    cells += [cell(sum(r["seconds"].values()) if "seconds" in r else None, ".0f")]
    notes = f"\n    {r['notes'][:400]}" if r["onchip_us"] is None else ""
    return f"{''.join(cells)}  {name}{' MISSED' if missed(r) else ''}{notes}"


def missed(r: dict[str, Any]) -> bool:
    if r["onchip_us"] is None:
        return True
    return r["target_us"] is not None and r["onchip_us"] > r["target_us"]


if __name__ == "__main__":
    parsed = arguments(sys.argv[1:])
    if parsed.part is not None:
        sys.exit(part(parsed))
    if parsed.prepare and not parsed.state:
        prepare(parsed, sys.argv[1:])
    sys.exit(child(parsed) if parsed.state else parent(parsed, sys.argv[1:]))
