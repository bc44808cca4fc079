"""How to run one group of operators: candidates are built, checked against eager's values, and
timed against the library; the fastest is chosen."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from onchip.backends.cpp.compiler import Binary, cache_folder
from onchip.errors import CompilerError
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import Region
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate, CompiledKernel, runner
from onchip.planning.library import Step, aten_steps, planted, run_of
from onchip.planning.plan import CallStep
from onchip.planning.timing import fastest
from onchip.planning.values import Values

# A float32 result may differ from eager's by roundings in another order, not by more.
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 4e-3}

# Where a generated kernel is so many times as fast as oneDNN's form, its parts are not timed.
HOPELESS = 1.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found for one kind of region.

    kind        "kernel" (candidate `index`), "library" (each operator its ATen call), "onednn"
                (oneDNN's calls and ATen's), or "split" (two regions, planned on their own)
    kernel_us   the fastest generated kernel's time; likewise library_us and onednn_us
    calls_us    oneDNN's calls alone, without ATen's between them
    split_us    the two parts' time, if a cut was tried; cut: places of the first part's operators
    times_us    every generated kernel that was timed, by its choice
    refused     candidates that were not timed: (choice, why)
    """

    kind: str
    index: int = 0
    kernel_us: float | None = None
    library_us: float | None = None
    onednn_us: float | None = None
    calls_us: float | None = None
    split_us: float | None = None
    cut: tuple[int, ...] = ()
    times_us: dict[str, float] = field(default_factory=dict)
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def best_us(self) -> float | None:
        """The time of what was chosen."""
        return getattr(self, f"{self.kind}_us")

    @property
    def costs(self) -> dict[str, float]:
        """What was measured, by name, for a decision."""
        names = ("kernel_us", "library_us", "onednn_us", "split_us")
        return {n: t for n in names if (t := getattr(self, n)) is not None}


def kernel_of(candidate: Candidate, binary: Binary) -> CompiledKernel:
    arity = len(candidate.inputs) + len(candidate.derived) + len(candidate.source.outputs)
    return CompiledKernel(binary, arity)


def tune(
    region: Region,
    candidates: Mapping[int, Candidate],
    binaries: Mapping[int, Binary | CompilerError],
    onednn: Sequence[Step],
    constants: frozenset[Tensor],
    values: Values,
    budget_s: float,
) -> Verdict:
    """Check and time the ways of running one region: its candidates (numbered, with their
    binaries), its operators as ATen calls, and oneDNN's calls (`onednn`; empty: none)."""
    refused: list[tuple[str, str]] = []
    kernels = dict(_checked(candidates, binaries, values, refused))
    runs: dict[str, Callable[[], object]] = {"library": run_of(aten_steps(region.nodes), values)}
    if onednn:
        problem = check_steps(onednn, region, constants, values)
        if problem:
            refused.append(("oneDNN", str(Refusal(Rule.WRONG, region.name, problem))))
        else:
            runs["onednn"] = run_of(onednn, values)
    if not kernels and len(runs) == 1:
        return Verdict("library", refused=tuple(refused))
    timed = fastest([*runs.values(), *kernels.values()], budget_s)
    times = {k: t * 1e6 for k, t in zip((*runs, *kernels), timed, strict=True)}
    found = _fastest_of(times, candidates, kernels, tuple(refused))
    calls = [s for s in onednn if isinstance(s, CallStep)]
    if found.onednn_us is None or len(calls) == len(onednn):
        return found
    if found.kernel_us is not None and found.onednn_us > HOPELESS * found.kernel_us:
        return found
    only = fastest([run_of(calls, values)], budget_s / 4)[0]
    return replace(found, calls_us=only * 1e6)


def _fastest_of(
    times: Mapping[str | int, float],
    candidates: Mapping[int, Candidate],
    kernels: Mapping[int, object],
    refused: tuple[tuple[str, str], ...],
) -> Verdict:
    index = min(kernels, key=lambda i: times[i], default=0)
    whole = {"kernel": times[index]} if kernels else {}  # first: it wins a tie
    whole |= {k: times[k] for k in ("onednn", "library") if k in times}
    return Verdict(
        min(whole, key=lambda k: whole[k]),
        index,
        whole.get("kernel"),
        whole["library"],
        whole.get("onednn"),
        times_us={candidates[i].choice: times[i] for i in kernels},
        refused=refused,
    )


def _checked(
    candidates: Mapping[int, Candidate],
    binaries: Mapping[int, Binary | CompilerError],
    values: Values,
    refused: list[tuple[str, str]],
) -> Iterator[tuple[int, Callable[[], object]]]:
    """The candidates that write eager's values, ready to run; why not, for the others."""
    derived: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for i, c in candidates.items():
        b = binaries[i]
        if isinstance(b, CompilerError):
            refused.append((c.choice, str(Refusal(Rule.COMPILER, text=str(b)))))
            continue
        # siblings share their weights' packing
        key = tuple(d.name for d in c.derived)
        if key not in derived:
            derived[key] = [d.compute([values[s] for s in d.sources]) for d in c.derived]
        outputs = [_empty_like(values[t]) for t in c.source.outputs]
        run = runner(c, kernel_of(c, b), values.__getitem__, derived[key], outputs)
        problem = check(run, c.source.outputs, outputs, values)
        if problem:
            refused.append((c.choice, str(Refusal(Rule.WRONG, c.region.name, problem))))
        else:
            yield i, run


def kernel_run(candidate: Candidate, binary: Binary, values: Values) -> Callable[[], object]:
    """A closure that runs one built kernel once, into memory of its own."""
    derived = [d.compute([values[s] for s in d.sources]) for d in candidate.derived]
    outputs = [_empty_like(values[t]) for t in candidate.source.outputs]
    return runner(candidate, kernel_of(candidate, binary), values.__getitem__, derived, outputs)


def check_steps(
    steps: Sequence[Step], region: Region, constants: frozenset[Tensor], values: Values
) -> str:
    """ "" if the steps give eager's values, and ATen's where an input holds NaN or an infinity;
    else what is wrong."""
    odd = planted(region, constants, values)
    expected_odd = run_of(aten_steps(region.nodes), odd)()
    try:
        got, got_odd = run_of(steps, values)(), run_of(steps, odd)()
    except RuntimeError as error:  # what oneDNN has no implementation of
        return str(error)
    for t in region.outputs:
        problem = difference(got[t], values[t])
        if problem:
            return f"{t.name}: {problem}"
        problem = difference(got_odd[t], expected_odd[t])
        if problem:
            return f"{t.name}, with NaN and infinities among the inputs: {problem}"
    return ""


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def poison(x: torch.Tensor) -> None:
    """A value no correct kernel leaves behind."""
    if x.dtype.is_floating_point:
        x.fill_(float("nan"))
    elif x.dtype is torch.bool:
        x.view(torch.uint8).fill_(77)
    else:
        x.fill_(77)


def check(
    run: Callable[[], object], outputs: Sequence[Tensor], got: list[torch.Tensor], values: Values
) -> str:
    """ "" if the kernel writes eager's values, else what is wrong."""
    for x in got:
        poison(x)
    status = run()
    if status:
        return f"status {status}"
    for t, x in zip(outputs, got, strict=True):
        problem = difference(x, values[t])
        if problem:
            return f"{t.name}: {problem}"
    return ""


def difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    """ "" if the tensors agree to the type's tolerance (NaN and inf at the same places)."""
    if not expected.dtype.is_floating_point:
        same = torch.equal(got, expected)
        return "" if same else f"{int((got != expected).sum())} elements differ"
    a, b = got.double(), expected.double()
    finite = torch.isfinite(b)
    if not torch.equal(finite, torch.isfinite(a)):
        return "NaN or inf at other places"
    if not torch.equal(torch.isnan(a), torch.isnan(b)):
        return "NaN at other places"
    d = torch.where(finite, a - b, torch.zeros_like(a)).norm().item()
    size = torch.where(finite, b, torch.zeros_like(b)).norm().item()
    limit = TOLERANCE.get(expected.dtype, 1e-3)
    if d <= limit * size or d <= 1e-6 * max(b.numel(), 1) ** 0.5:
        return ""
    return f"relative error {d / max(size, 1e-300):.1e}"


# ---- verdicts are kept between processes -------------------------------------------------------


def verdict_path(key: str) -> Path:
    return cache_folder() / "choices" / f"{key}.json"


def load_verdict(key: str) -> Verdict | None:
    """The stored verdict; None if there is none or it can't be read (it is measured again)."""
    raw = load_record(key)
    if raw is None:
        return None
    try:
        refused = tuple(tuple(r) for r in raw["refused"])
        return Verdict(**{**raw, "refused": refused, "cut": tuple(raw["cut"])})
    except (TypeError, KeyError):
        return None


def store_verdict(key: str, verdict: Verdict) -> None:
    store_record(key, asdict(verdict))


def load_record(key: str) -> dict[str, Any] | None:
    """What was stored under `key`; None if there is nothing or it can't be read."""
    try:
        raw = json.loads(verdict_path(key).read_text())
        return raw if isinstance(raw, dict) else None
    except (OSError, ValueError):
        return None


def store_record(key: str, record: dict[str, Any]) -> None:
    """Written whole or not at all; a cache that can't be written only costs time later."""
    path = verdict_path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as f:
            json.dump(record, f)
        os.replace(temporary, path)
    except OSError:
        return
