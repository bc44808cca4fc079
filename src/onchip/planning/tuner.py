"""How to run one group of operators: candidates are built, checked against eager's values, and
timed against the library; the fastest is chosen."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from onchip.backends.cpp.compiler import Binary, build_all, cache_folder, content_key
from onchip.backends.library import aten
from onchip.errors import CompilerError
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node
from onchip.planning.candidates import Candidate, CompiledKernel, runner
from onchip.planning.timing import fastest
from onchip.planning.values import Values, in_layout

# A float32 result may differ from eager's by roundings in another order, not by more.
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found for one kind of region.

    kind       "kernel" (candidate `index`) or "library"
    kernel_us  the fastest candidate's time; library_us the unfused library calls' time
    times_us   every candidate that was timed, by its choice
    refused    candidates that were not timed: (choice, why)
    """

    kind: str
    index: int = 0
    kernel_us: float | None = None
    library_us: float | None = None
    times_us: dict[str, float] = field(default_factory=dict)
    refused: tuple[tuple[str, str], ...] = ()


def kernel_of(candidate: Candidate, binary: Binary) -> CompiledKernel:
    arity = len(candidate.inputs) + len(candidate.derived) + len(candidate.source.outputs)
    return CompiledKernel(binary, arity)


def tune(
    nodes: Sequence[Node],
    candidates: Sequence[Candidate],
    binaries: Sequence[Binary | CompilerError],
    values: Values,
    budget_s: float,
) -> Verdict:
    """Check and time the candidates of one region and its library calls."""
    runs: list[Callable[[], object]] = [library_run(nodes, values)]
    kept: list[int] = []
    refused: list[tuple[str, str]] = []
    derived: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for i, (c, b) in enumerate(zip(candidates, binaries, strict=True)):
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
            continue
        kept.append(i)
        runs.append(run)
    if not kept:
        return Verdict("library", refused=tuple(refused))
    library_s, *kernel_s = fastest(runs, budget_s)
    times = {candidates[i].choice: t * 1e6 for i, t in zip(kept, kernel_s, strict=True)}
    best_s, best = min(zip(kernel_s, kept, strict=True))
    kind = "kernel" if best_s <= library_s else "library"
    return Verdict(kind, best, best_s * 1e6, library_s * 1e6, times, tuple(refused))


def library_run(nodes: Sequence[Node], values: Values) -> Callable[[], object]:
    """The nodes as ATen calls, on the program's own layouts."""
    inputs = dict.fromkeys(t for n in nodes for t in n.inputs)

    def run() -> object:
        local = {t: values.tensors[t] for t in inputs if t in values.tensors}
        with torch.no_grad():
            for n in nodes:
                aten.run(n, local)
        return local

    return run


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
        return Verdict(**{**raw, "refused": tuple(tuple(r) for r in raw["refused"])})
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


__all__ = ["build_all", "content_key", "in_layout", "tune"]
