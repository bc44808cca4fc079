"""The report: one frozen value that holds exactly the JSON contract (schema.py, docs/json.md)."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onchip.analysis.record import (
    Blocker,
    Contest,
    Decision,
    GraphCoverage,
    Interval,
    KernelRow,
    LedgerEntry,
    Totals,
)
from onchip.errors import OnchipError
from onchip.report import schema


@dataclass(frozen=True, slots=True)
class Numerics:
    """error and eager_error: largest difference from the float64 result, relative to its scale."""

    error: float | None = None
    eager_error: float | None = None
    ledger: tuple[LedgerEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """predicted_us: the program's predicted time; lower_bound_us: no cover of the graph by regions
    that the search knew can take less, each at the device's ceilings; gap: the measured time over
    that, less 1 (0: nothing is left to gain)."""

    predicted_us: float | None = None
    lower_bound_us: float | None = None
    gap: float | None = None


@dataclass(frozen=True, slots=True)
class CompileSummary:
    """kernels_left_out: variants for which the budget left no time, whenever the choice was made;
    seconds_per_us_saved: seconds of compiling for each microsecond that a call takes less than
    unfused; pays_off_after: calls that save as much time as compiling took."""

    seconds: float | None = None
    kernels_built: int | None = None
    kernels_reused: int | None = None
    kernels_left_out: int | None = None
    seconds_per_us_saved: float | None = None
    pays_off_after: int | None = None


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Microseconds that starting one kernel costs here: an operator in eager PyTorch, and a kernel
    of the fused program (a node of a CUDA graph, or a call)."""

    eager_us: float | None = None
    fused_us: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What one compilation did and what it gained. Times in microseconds a call; None is unknown.

    unfused    the model as the user gave it, eager, one kernel an operator
    baselines  better unfused or compiled forms: name -> latency_us
    bound_us   the physical limit of the device for this model
    speedup    unfused latency / fused latency
    ratio      fused latency / unfused, with its interval, of rounds in which both took turns
    contests   each place where a more fused form was measured against a less fused one
    notes      what else to know: which form ships, where inputs come from, peers that failed
    """

    model: str
    device: str
    dtype: str
    unfused: Totals
    fused: Totals
    versions: Mapping[str, str] = field(default_factory=dict)
    baselines: Mapping[str, float | None] = field(default_factory=dict)
    bound_us: float | None = None
    launch: LaunchCost = LaunchCost()
    numerics: Numerics = Numerics()
    plan: PlanSummary = PlanSummary()
    compile: CompileSummary = CompileSummary()
    cuda_graph: GraphCoverage = field(default_factory=GraphCoverage)
    kernels: tuple[KernelRow, ...] = ()
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    ratio: Interval | None = None
    contests: tuple[Contest, ...] = ()

    @property
    def speedup(self) -> float | None:
        before, after = self.unfused.latency_us, self.fused.latency_us
        return before / after if before is not None and after else None

    def to_dict(self) -> dict[str, Any]:
        """The contract as plain dictionaries, lists and numbers."""
        out = _plain(asdict(self))
        out["unfused"], out["fused"] = _totals(self.unfused), _totals(self.fused)
        out["speedup"] = self.speedup
        return {key: out[key] for key in schema.REPORT["properties"]}

    def to_json(self, path: str | Path | None = None) -> str:
        """The contract as JSON text, also written to `path` if given."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        if path is not None:
            _write(Path(path), text)
        return text

    @staticmethod
    def from_json(text: str) -> Report:
        """The report that to_json wrote. OnchipError names the first field that does not fit."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise OnchipError(f"not a report: invalid JSON ({error})") from error
        schema.check(data, schema.REPORT)
        return _from_dict(data)

    def text(self, width: int = 100, color: bool = False) -> str:
        """The benefit table and what stands behind it, for a terminal of `width` columns."""
        from onchip.report.text import render

        return render(self, width, color)

    def __str__(self) -> str:
        return self.text()

    def to_html(self, path: str | Path) -> None:
        """One self-contained page: tables and the before/after picture."""
        from onchip.report.html import page

        _write(Path(path), page(self))

    def why(self, a: str, b: str) -> str:
        """Why operators `a` and `b` (names, or module paths, in either order) are, or are not,
        in one kernel. OnchipError if a name is not in the model."""
        return why(self, a, b)

    def kernel_of(self, op: str) -> KernelRow | None:
        """The kernel that computes the operator called `op`."""
        return next((k for k in self.kernels if op in k.ops), None)


# ---- conversion --------------------------------------------------------------------------------


def _totals(t: Totals) -> dict[str, Any]:
    keys = ("launches", "accesses", "dram_bytes", "flops", "intensity", "latency_us")
    return {k: _plain(getattr(t, k)) for k in keys}


def _plain(x: Any) -> Any:
    """JSON values; a number that is not finite is unknown."""
    match x:
        case dict():
            return {str(k): _plain(v) for k, v in x.items()}
        case list() | tuple():
            return [_plain(v) for v in x]
        case bool() | int() | str() | None:
            return x
        case float():
            return x if math.isfinite(x) else None
        case Mapping():
            return {str(k): _plain(v) for k, v in x.items()}
    raise OnchipError(f"a report can't hold a {type(x).__name__} ({x!r}): give numbers and text")


def _from_dict(data: dict[str, Any]) -> Report:
    data = dict(data)
    data.pop("speedup")
    for key in ("unfused", "fused"):
        data[key] = Totals(**{k: v for k, v in data[key].items() if k != "intensity"})
    ledger = tuple(LedgerEntry(**e) for e in data["numerics"]["ledger"])
    data["numerics"] = Numerics(**{**data["numerics"], "ledger": ledger})
    data["launch"] = LaunchCost(**data["launch"])
    data["plan"] = PlanSummary(**data["plan"])
    data["compile"] = CompileSummary(**data["compile"])
    blockers = tuple(Blocker(**b) for b in data["cuda_graph"]["blockers"])
    data["cuda_graph"] = GraphCoverage(**{**data["cuda_graph"], "blockers": blockers})
    data["kernels"] = tuple(
        KernelRow(**{**k, "ops": tuple(k["ops"]), "ratio": _interval(k["ratio"])})
        for k in data["kernels"]
    )
    data["ratio"] = _interval(data["ratio"])
    lists = ("ops", "first")
    data["contests"] = tuple(
        Contest(**{**c, **{k: tuple(c[k]) for k in lists}, "ratio": _interval(c["ratio"])})
        for c in data["contests"]
    )
    data["decisions"] = tuple(
        Decision(**{**d, "edge": (d["edge"][0], d["edge"][1])}) for d in data["decisions"]
    )
    data["notes"] = tuple(data["notes"])
    return Report(**data)


def _interval(data: dict[str, Any] | None) -> Interval | None:
    return None if data is None else Interval(**data)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OnchipError(f"{path} can't be written: {error.strerror}") from error


# ---- why ---------------------------------------------------------------------------------------


def why(report: Report, a: str, b: str) -> str:
    firsts, seconds = _named(report, a), _named(report, b)
    lines = []
    for d in report.decisions:
        p, c = d.edge
        if (p in firsts and c in seconds) or (p in seconds and c in firsts):
            lines.append(_explain(report, d))
    if lines:
        return "\n".join(lines)
    for x in firsts:
        kernel = report.kernel_of(x)
        if kernel is not None and any(y in kernel.ops for y in seconds):
            return f"{a} and {b} are in one kernel, {kernel.name} ({kernel.backend})."
    return _apart(report, a, b, firsts, seconds)


def _named(report: Report, name: str) -> set[str]:
    """Operators called `name`, or lying in the module `name`."""
    known = {n for d in report.decisions for n in d.edge} | {
        o for k in report.kernels for o in k.ops
    }
    found = {n for n in known if n == name} or {n for n in known if n.startswith(f"{name}.")}
    if not found:
        close = difflib.get_close_matches(name, known, n=4, cutoff=0.4)
        hint = f"; nearest: {', '.join(close)}" if close else ""
        raise OnchipError(f"{report.model} has no operator or module {name!r}{hint}")
    return found


def _explain(report: Report, d: Decision) -> str:
    producer, consumer = d.edge
    kernel = report.kernel_of(producer)
    if d.fused:
        where = f", {kernel.name} ({kernel.backend})" if kernel else ""
        return f"{producer} -> {consumer}: one kernel{where}." + (f" {d.text}" if d.text else "")
    kind = f" [{d.family}: {d.rule}]" if d.rule else ""
    costs = "; ".join(f"{k} {_figure(v)}" for k, v in d.costs.items())
    tail = f" Figures: {costs}." if costs else ""
    return f"{producer} -> {consumer}: separate kernels{kind}. {d.text}{tail}"


def _figure(v: Any) -> str:
    return f"{v:,.4g}" if isinstance(v, float) else (f"{v:,}" if isinstance(v, int) else str(v))


def _apart(report: Report, a: str, b: str, firsts: set[str], seconds: set[str]) -> str:
    """No edge joins them: say where each is, and which cut lies on the way between them."""
    for start, end in ((firsts, seconds), (seconds, firsts)):
        path = _path(report, start, end)
        cuts = [d for d in path if not d.fused]
        if cuts:
            inner = "\n".join(f"  {_explain(report, d)}" for d in cuts)
            return f"{a} and {b} are not neighbours; these cuts lie between them:\n{inner}"
    return f"{a} and {b} share no tensor, neither directly nor through others: nothing to fuse."


def _path(report: Report, start: set[str], end: set[str]) -> list[Decision]:
    """A shortest chain of edges from an operator of `start` to one of `end`."""
    frontier: list[tuple[str, list[Decision]]] = [(n, []) for n in sorted(start)]
    seen = set(start)
    while frontier:
        name, path = frontier.pop(0)
        if name in end:
            return path
        for d in report.decisions:
            if d.edge[0] == name and d.edge[1] not in seen:
                seen.add(d.edge[1])
                frontier.append((d.edge[1], [*path, d]))
    return []
