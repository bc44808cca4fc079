"""`onchip bench SUITE`: every case optimised, verified and measured; the rows are the contract."""

from __future__ import annotations

import datetime
import difflib
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onchip.errors import OnchipError
from onchip.report.bench_suites import KERNELBENCH, SUITES, Case
from onchip.report.contests import one_or_two
from onchip.report.report import Report

__all__ = [
    "KERNELBENCH", "SUITES", "Case", "cases", "check_without", "peers_of", "row_of", "run",
    "run_cases", "verify",
]  # fmt: skip


def run(
    suite: str, peers: bool = False, without: Sequence[str] = (), **problems: Any
) -> dict[str, Any]:
    """Results of a suite on this machine, in the form of report.schema.BENCH; on a GPU the peers
    named in `without` are left out. Where there is a GPU, a suite NAME that has a counterpart
    gpu-NAME is that one. `problems` are the arguments of bench_kernelbench.cases, for that suite.
    A case that fails has a row that says why. Raises OnchipError if there is no such suite, or no
    GPU for it."""
    suite = here(suite)
    return run_cases(suite, cases(suite, **problems), peers, without)


def verify(suite: str, show: Callable[[str], None], **problems: Any) -> int:
    """Compile the cases of a suite, and measure every fused kernel that ships again, in turn with
    its operators as library calls: how many are slower, beyond noise, or could not be measured.
    `show` gets each line of a table."""
    from onchip.report.bench_verify import verify_cases

    found = cases(here(suite), **problems)
    _check_device(suite, found)
    return verify_cases(found, show)


def here(suite: str) -> str:
    """Where there is a GPU, the counterpart gpu-NAME of a suite NAME, if it has one."""
    on_gpu = f"gpu-{suite}"
    return on_gpu if on_gpu in SUITES and torch.cuda.is_available() else suite


def cases(suite: str, **problems: Any) -> tuple[Case, ...]:
    """A suite's cases. OnchipError if there is no such suite, or not these problems."""
    if suite == KERNELBENCH:
        from onchip.report import bench_kernelbench

        if not problems.get("path"):
            raise OnchipError(f"suite {suite} needs the PATH of a clone of KernelBench")
        return bench_kernelbench.cases(**problems)
    if problems:
        raise OnchipError(f"suite {suite} takes no PATH and no choice of ids: {KERNELBENCH} does")
    if suite not in SUITES:
        raise OnchipError(f"no suite {suite!r}: there are {', '.join((*SUITES, KERNELBENCH))}")
    return SUITES[suite]


def run_cases(
    suite: str, cases: Sequence[Case], peers: bool, without: Sequence[str] = ()
) -> dict[str, Any]:
    """The same for cases of one device and protocol."""
    from onchip import api
    from onchip.planning.machine import device_name

    device = cases[0].device
    check_without(suite, cases, without)
    _check_device(suite, cases)
    conditions: dict[str, Any] = {}
    if device == "cuda":
        bench = device_bench(cases[0].protocol)(peers, without)
        rows, conditions = bench.rows(cases), bench.conditions()
    else:
        rows = [_row(case, peers) for case in cases]
    return {
        "suite": suite,
        "device": device_name(device),
        "versions": api.versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **conditions,
        "rows": rows,
    }


def _check_device(suite: str, cases: Sequence[Case]) -> None:
    if cases[0].device == "cuda" and not torch.cuda.is_available():
        raise OnchipError(f"suite {suite} runs on an NVIDIA GPU; torch sees none here")


def check_without(suite: str, cases: Sequence[Case], without: Sequence[str]) -> None:
    """OnchipError if a peer that is to be left out is none of the cases'."""
    if without and cases[0].device == "cpu":
        raise OnchipError(f"--without {without[0]}: suite {suite} runs on the CPU, with all peers")
    known = list(dict.fromkeys(p for c in cases for p in peers_of(c)))
    for name in without:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            peers = ", ".join(known)
            raise OnchipError(f"--without {name}: suite {suite} has only the peers {peers}{hint}")


def peers_of(case: Case) -> tuple[str, ...]:
    """The peers of a case on a GPU that may be left out (eager PyTorch may not)."""
    if case.protocol == "once":
        from onchip.report.bench_engine import PEERS

        return tuple(PEERS)
    return case.peers


def device_bench(protocol: str) -> Any:
    """What runs cases of a protocol on a GPU."""
    from onchip.report.bench_engine import EngineBench
    from onchip.report.bench_gpu import DeviceBench
    from onchip.report.bench_kernelbench import KernelBench

    return {"rotated": DeviceBench, "once": EngineBench, KERNELBENCH: KernelBench}[protocol]


def _row(case: Case, peers: bool) -> dict[str, Any]:
    from onchip import api

    try:
        _, report = api.optimize(case.model, batch=case.batch, dtype=case.dtype, peers=peers)
    except OnchipError as error:
        return failed(case, error)
    finally:
        gc.collect()  # the case's weights, before the next one's come
    met = one_or_two(report.contests) if case.contests else ()
    return row_of(case.name, report, met)


def row_of(name: str, report: Report, notes: Sequence[str] = ()) -> dict[str, Any]:
    """One row of the contract."""
    return {
        "name": name,
        "dtype": report.dtype,
        "onchip_us": report.fused.latency_us,
        "predicted_us": report.plan.predicted_us,
        "peers": {"eager": report.unfused.latency_us, **report.baselines},
        "floor_us": report.bound_us,
        "error": report.numerics.error,
        "eager_error": report.numerics.eager_error,
        "launches": report.fused.launches,
        "bytes": None,
        "share": None,
        "target_us": None,
        "notes": "; ".join((*report.notes, *notes)),
    }


def failed(case: Case, error: Exception) -> dict[str, Any]:
    """The row of a case that has no figures."""
    unknown = ("onchip_us", "predicted_us", "floor_us", "error", "eager_error", "launches", "bytes",
               "share")  # fmt: skip
    row: dict[str, Any] = {"name": case.name, "dtype": str(case.dtype or "").removeprefix("torch.")}
    return {
        **row,
        "peers": {},
        **dict.fromkeys(unknown),
        "target_us": case.target_us,
        **grouped(case),
        "notes": f"{type(error).__name__}: {' '.join(str(error).split())}",
    }


def grouped(case: Case) -> dict[str, str]:
    """What a row says of the rows that it is summarised with."""
    return {"group": case.group} if case.group else {}
