"""The report for a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from onchip.analysis.record import KernelRow
from onchip.report.contests import lost, one_or_two
from onchip.report.report import Report

if TYPE_CHECKING:
    from onchip.report.preview import Preview

UNKNOWN = "–"


def quantity(v: float | None, unit: str = "") -> str:
    """A number with a decimal prefix: 12.3 M."""
    if v is None:
        return UNKNOWN
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(v) >= limit:
            return f"{v / limit:.3g} {prefix}{unit}"
    return f"{v:.3g} {unit}".rstrip() if isinstance(v, float) else f"{v:,} {unit}".rstrip()


def time(us: float | None) -> str:
    if us is None:
        return UNKNOWN
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.3g} µs"


def count(n: int | None) -> str:
    return UNKNOWN if n is None else f"{n:,}"


def improvement(before: float | None, after: float | None, more: bool = False) -> str:
    """How much less (or, `more`, how many times more)."""
    if before is None or after is None or not before:
        return UNKNOWN
    if more:
        return f"{after / before:.2f}×"
    change = 1 - after / before
    return f"{change:.0%} less" if change >= 0 else f"{-change:.0%} more"


def benefit_rows(r: Report) -> list[tuple[str, str, str, str]]:
    """metric, unfused, fused, improvement: the table of the mission, with this machine's values."""
    a, b = r.unfused, r.fused

    def row(name: str, key: str, show: Callable[..., str], more: bool = False):
        x, y = getattr(a, key), getattr(b, key)
        return (name, show(x), show(y), improvement(x, y, more))

    return [
        row("tensor accesses", "accesses", count),
        row("DRAM bytes", "dram_bytes", lambda v: quantity(v, "B")),
        row("kernel launches", "launches", count),
        row("intensity (FLOP/byte)", "intensity", quantity, more=True),
        launch_row(r),
        row("latency", "latency_us", time),
    ]


def launch_row(r: Report) -> tuple[str, str, str, str]:
    """Launches times what one costs here."""
    before = _product(r.unfused.launches, r.launch.eager_us)
    after = _product(r.fused.launches, r.launch.fused_us)
    return ("launch overhead", time(before), time(after), improvement(before, after))


def _product(n: int | None, us: float | None) -> float | None:
    return None if n is None or us is None else n * us


def benefit_table(r: Report) -> Table:
    title = escape(f"{r.model} · {r.dtype} · {r.device}")
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    for name in ("unfused", "fused", "improvement"):
        table.add_column(name, justify="right")
    for row in benefit_rows(r):
        table.add_row(*row)
    return table


def ladder(r: Report) -> Table:
    """Every measured form of the model, slowest first, with the physical limit."""
    forms = {"unfused (eager)": r.unfused.latency_us, **r.baselines, "onchip": r.fused.latency_us}
    table = Table(title="latency ladder", title_justify="left")
    table.add_column("form")
    table.add_column("latency", justify="right")
    table.add_column("against onchip", justify="right")
    own = r.fused.latency_us
    for name, us in sorted(forms.items(), key=lambda kv: -(kv[1] or 0)):
        table.add_row(
            f"[bold]{name}[/]" if name == "onchip" else escape(name),
            time(us),
            f"{us / own:.2f}×" if us is not None and own else UNKNOWN,
        )
    if r.bound_us is not None:
        share = f"{r.bound_us / own:.2f}×" if own else UNKNOWN
        table.add_row("physical limit", time(r.bound_us), share, style="dim")
    return table


def kernel_table(r: Report, limit: int = 40) -> Table:
    table = Table(title=f"kernels ({len(r.kernels)})", title_justify="left")
    table.add_column("kernel", overflow="fold")
    table.add_column("operators", overflow="fold", ratio=1)
    table.add_column("backend")
    for name in ("bytes", "FLOP", "predicted", "measured", "unfused"):
        table.add_column(name, justify="right")
    for k in r.kernels[:limit]:
        table.add_row(
            escape(k.name),
            escape(" + ".join(k.ops)),
            escape(f"{k.backend} {k.choice}".strip()),
            quantity(k.dram_bytes, "B"),
            quantity(k.flops),
            time(k.predicted_us),
            time(k.measured_us),
            time(k.unfused_us),
        )
    if len(r.kernels) > limit:
        table.add_row("…", f"{len(r.kernels) - limit} more: see --json or --report")
    return table


NEEDS = ("registers", "spilled", "shared", "occupancy", "code", "compiled")


def needs(k: KernelRow) -> tuple[str, ...]:
    """What a generated kernel needs of the machine, in the order of NEEDS."""
    return (
        count(k.registers),
        quantity(k.spills, "B"),
        quantity(k.shared_bytes, "B"),
        UNKNOWN if k.occupancy is None else f"{k.occupancy:.0%}",
        quantity(k.code_bytes, "B"),
        UNKNOWN if k.compile_s is None else f"{k.compile_s:.1f} s" if k.compile_s else "reused",
    )


def needs_table(r: Report, limit: int = 40) -> Table | None:
    """What is known of that, for the kernels that were generated; None if none was."""
    made = [k for k in r.kernels if k.code_bytes is not None]
    if not made:
        return None
    rows = [needs(k) for k in made]
    known = [i for i in range(len(NEEDS)) if any(row[i] != UNKNOWN for row in rows)]
    table = Table(title="generated code", title_justify="left")
    table.add_column("kernel", overflow="fold")
    for i in known:
        table.add_column(NEEDS[i], justify="right")
    for k, row in zip(made[:limit], rows, strict=False):
        table.add_row(escape(k.name), *(row[i] for i in known))
    if len(made) > limit:
        table.add_row(f"… {len(made) - limit} more: see --json or --report")
    return table


def preview_view(previews: Sequence[Preview], device: str) -> Group:
    """The launches of a model on a GPU that is not here, and why some are no generated kernels."""
    table = Table(title=f"what would run on {device}", title_justify="left")
    table.add_column("", overflow="fold")
    table.add_column("operators, variant", overflow="fold", ratio=1)
    for name in ("predicted", *NEEDS):
        table.add_column(name, justify="right")
    for p in previews:
        k = p.row
        how = f"library: {k.choice}" if k.backend == "library" else k.choice
        table.add_row(
            k.name.partition(" ")[0],
            f"{escape(' + '.join(k.ops))}\n[dim]{escape(how)}[/]",
            time(k.predicted_us),
            *needs(k),
        )
    made = sum(p.row.backend != "library" for p in previews)
    us = sum(p.row.predicted_us or 0.0 for p in previews)
    closing = (
        f"{made} generated kernels, {len(previews) - made} library calls; predicted {time(us)} a "
        "call (by the cost model, launches as nodes of a CUDA graph)"
    )
    reasons = dict.fromkeys(_not_taken(p) for p in previews if p.refused)
    return Group(table, *(Text(line) for line in reasons), Text(closing, style="bold"))


def _not_taken(p: Preview) -> str:
    """Why a launch is no generated kernel, or not of an earlier variant."""
    reasons = (f"{variant}: {why}" if variant else why for variant, why in p.refused)
    return f"{p.row.name}: " + "; ".join(" ".join(r.split()) for r in reasons)


def cuts(r: Report, limit: int = 20) -> list[str]:
    """One line for each edge between two kernels, equal reasons counted once each."""
    lines = []
    for d in r.decisions:
        if not d.fused:
            reason = d.text or d.rule or "no reason was recorded"
            family = f"[{d.family}] " if d.family else ""
            lines.append(f"{d.edge[0]} -> {d.edge[1]}: {family}{reason}")
    hidden = len(lines) - limit
    return lines if hidden <= 0 else [*lines[:limit], f"… {hidden} more: onchip why MODEL A B"]


def contested(r: Report, limit: int | None = 20) -> list[tuple[str, list[str]]]:
    """What was measured against what, under a title each; without limit, all of it."""
    found = [
        ("fusion was tried and lost", lost(r)),
        ("one kernel or two, as measured", one_or_two(r.contests)),
    ]
    return [(title, _first(lines, limit)) for title, lines in found if lines]


def _first(lines: list[str], limit: int | None) -> list[str]:
    hidden = 0 if limit is None else len(lines) - limit
    return lines if hidden <= 0 else [*lines[:limit], f"… {hidden} more: see --json or --report"]


def numerics(r: Report) -> list[str]:
    n = r.numerics
    show = [UNKNOWN if e is None else f"{e:.2g}" for e in (n.error, n.eager_error)]
    lines = [f"error against float64: onchip {show[0]}, eager {show[1]}"]
    for e in n.ledger:
        size = "" if e.error is None else f" (error {e.error:.2g})"
        lines.append(f"{e.kind} at {e.where}: {e.text}{size}")
    return lines


def closing(r: Report) -> str:
    parts = []
    if r.speedup is not None:
        parts.append(f"speedup {r.speedup:.2f}×{_interval(r)}")
    if r.plan.gap is not None:
        bound = time(r.plan.lower_bound_us)
        parts.append(f"{1 + r.plan.gap:.2f} times the lower bound ({bound}) of any cover")
    c = r.compile
    if c.seconds is not None:
        parts.append(f"compiled in {c.seconds:.1f} s")
    if c.kernels_built is not None or c.kernels_reused is not None:
        parts.append(f"{count(c.kernels_built)} kernels built, {count(c.kernels_reused)} reused")
    if c.kernels_left_out:
        parts.append(f"{count(c.kernels_left_out)} variants left out: Settings.budget_s")
    if c.seconds_per_us_saved is not None:
        parts.append(
            f"{c.seconds_per_us_saved:.2g} s for each µs saved, paid off after "
            f"{count(c.pays_off_after)} calls"
        )
    return " · ".join(parts)


def _interval(r: Report) -> str:
    """The 95 % interval of the speedup, where there is one."""
    if r.ratio is None:
        return ""
    return f" ({1 / r.ratio.high:.2f}–{1 / r.ratio.low:.2f} at 95 % confidence)"


def coverage(r: Report) -> list[str]:
    """Whether the program is one CUDA graph, and each operator that keeps it from being one."""
    c = r.cuda_graph
    blockers = (f"{b.operator}: {b.reason}" + f" ({b.origin})" * bool(b.origin) for b in c.blockers)
    return [] if c.graphed is None else [c.text, *blockers]


def renderable(r: Report) -> Group:
    """The whole report for a rich console."""
    parts: list[RenderableType] = [benefit_table(r), ladder(r)]
    if r.kernels:
        parts.append(kernel_table(r))
    if (table := needs_table(r)) is not None:
        parts.append(table)
    if cut := cuts(r):
        parts += [Text("cut edges", style="italic"), *(Text(f"  {line}") for line in cut)]
    for title, lines in contested(r):
        parts += [Text(title, style="italic"), *(Text(f"  {line}") for line in lines)]
    parts += [Text("numerics", style="italic"), *(Text(f"  {line}") for line in numerics(r))]
    if lines := coverage(r):
        parts += [Text("CUDA graph", style="italic"), *(Text(f"  {line}") for line in lines)]
    parts += [Text(f"note: {n}") for n in r.notes]
    if end := closing(r):
        parts.append(Text(end, style="bold"))
    return Group(*parts)


def render(r: Report, width: int = 100, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, no_color=not color)
    console.print(renderable(r))
    return out.getvalue()
