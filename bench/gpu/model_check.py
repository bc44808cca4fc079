"""The cost model against what planning measured, one JSON line a kind of region:

    python3 bench/gpu/model_check.py [--suites memory gpu engine] [--match REGEX] [--budget S]

Each case is planned, not run as a program. A line holds the predicted and the measured
microseconds of the generated kernel and of the library's calls, and the features that the model
predicts from, so that its parameters can be fitted again elsewhere. Lines go to
$OUT/model_check.jsonl as they come; the first one holds the device's ceilings. Printed in the end:
median and worst |predicted / measured − 1|. `--suites cpu` needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "src"))

import torch  # noqa: E402

from onchip.analysis.cost import Pricer, Work  # noqa: E402
from onchip.analysis.roofline import Ceilings  # noqa: E402
from onchip.analysis.traffic import Ledger  # noqa: E402
from onchip.capture import capture  # noqa: E402
from onchip.models import resolve  # noqa: E402
from onchip.planning import decide, machine, planner  # noqa: E402
from onchip.report.bench_suites import SUITES, Case  # noqa: E402
from onchip.settings import Settings  # noqa: E402


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--suites", nargs="+", default=["memory", "gpu", "engine"], choices=SUITES)
    p.add_argument("--match", default="", metavar="REGEX")
    p.add_argument("--budget", type=float, default=30.0, metavar="S")
    return p.parse_args()


def choices_of(case: Case, budget_s: float) -> Iterator[tuple[Ledger, decide.Choice]]:
    """Every choice that planning one case made, those of parts and wholes, with its books."""
    found = resolve(case.model, batch=case.batch, dtype=case.dtype)
    module, inputs = found.module.to(case.device), found.example_inputs
    if case.channels_last:
        module = module.to(memory_format=torch.channels_last)
        inputs = tuple(x.contiguous(memory_format=torch.channels_last) for x in inputs)
    inputs = tuple(x.to(case.device) for x in inputs)
    captured = capture(module, inputs)
    seen: list[decide.Choice] = []
    own = decide.Decider.choose

    def choose(self: decide.Decider, *args: Any) -> list[list[decide.Choice]]:
        out = own(self, *args)
        seen.extend(x for some in out for c in some for x in (c, *c.cut_from))
        return out

    decide.Decider.choose = choose  # type: ignore[method-assign]
    try:
        planned = planner.plan(captured, inputs, Settings(budget_s=budget_s))
    finally:
        decide.Decider.choose = own  # type: ignore[method-assign]
    ledger = Ledger(captured.graph, planned.plan.layouts)
    for c in {c.unit.key: c for c in seen}.values():
        yield ledger, c


def line(case: Case, ledger: Ledger, c: decide.Choice, ceilings: Ceilings) -> dict[str, Any]:
    own = {n.name: n for n in ledger.graph.nodes}  # planning may have put a copy in its place
    nodes = [own[n.name] for n in c.unit.region.nodes]
    pricer = Pricer(ledger, ceilings)
    work, v = pricer.work(nodes), c.verdict
    assert v is not None
    label = min(v.times_us, key=v.times_us.__getitem__) if v.times_us else ""
    return {
        "case": case.name,
        "dtype": str(case.dtype or torch.float32).removeprefix("torch."),
        "region": c.unit.region.name,
        "kind": v.kind,
        "choice": label,
        "kernel_us": v.kernel_us,
        "predicted_us": pricer.kernel_us(nodes),
        "library_us": v.library_us,
        "library_predicted_us": pricer.library_us(nodes),
        "floor_us": pricer.floor_us(nodes),
        "work": features(work),
        "nodes": [{"op": n.op, "work": features(pricer.work([n]))} for n in nodes],
    }


def features(work: Work | None) -> dict[str, Any] | None:
    if work is None:
        return None
    products = [asdict(p) | {"dtype": p.dtype.label} for p in work.products]
    return asdict(replace(work, products=())) | {"products": products}


def error(lines: list[dict[str, Any]], measured: str, predicted: str) -> str:
    off = [abs(r[predicted] / r[measured] - 1) for r in lines if r[measured]]
    if not off:
        return "nothing was measured"
    return f"{len(off)} regions: median {statistics.median(off):.0%}, worst {max(off):.0%}"


def main() -> None:
    options = arguments()
    out = Path(os.environ.get("OUT", "/tmp")) / "model_check.jsonl"
    lines: list[dict[str, Any]] = []
    cases = [c for s in options.suites for c in SUITES[s] if re.search(options.match, c.name)]
    ceilings = machine.measure(cases[0].device)
    with out.open("w") as f, torch.no_grad():
        f.write(json.dumps({"ceilings": asdict(ceilings)}) + "\n")
        for case in dict.fromkeys(cases):
            try:
                for ledger, c in choices_of(case, options.budget):
                    if c.verdict is None:
                        continue
                    r = line(case, ledger, c, ceilings)
                    lines.append(r)
                    f.write(json.dumps(r) + "\n")
                    f.flush()
                    print(shown(r), flush=True)
            except Exception:  # whatever it is: the other cases have lines
                print(f"{case.name}: {traceback.format_exc(limit=3)}", flush=True)
            gc.collect()
    print("generated kernels, " + error(lines, "kernel_us", "predicted_us"))
    print("library calls, " + error(lines, "library_us", "library_predicted_us"))


def shown(r: dict[str, Any]) -> str:
    def pair(predicted: float, measured: float | None) -> str:
        return f"{predicted:9,.1f} / {'-' if measured is None else f'{measured:,.1f}':>9}"

    kernel = pair(r["predicted_us"], r["kernel_us"])
    return f"{kernel}   {pair(r['library_predicted_us'], r['library_us'])}  {r['region'][:70]}"


if __name__ == "__main__":
    main()
