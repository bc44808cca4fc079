"""What `onchip analyze`, `onchip doctor` and `onchip cache` print."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from onchip.analysis.roofline import Bound, Ceilings, Costs
from onchip.analysis.summary import Analysis, OperatorRow
from onchip.backends.cache import KINDS, MOST_BYTES, Entry
from onchip.report.text import UNKNOWN, count, improvement, quantity, time


def ceilings_line(c: Ceilings) -> str:
    rates = ", ".join(f"{k} {quantity(v * 1e9, 'FLOP/s')}" for k, v in c.gflops.items())
    launch = f"launch {time(c.launch_us)}"
    if c.graph_launch_us is not None:
        launch += f", {time(c.graph_launch_us)} in a CUDA graph"
    return f"{c.device}: copy {c.copy_gbs:,.0f} GB/s; {rates}; {launch} ({c.source})"


def costs_line(c: Costs) -> str:
    """The cost model's parameters."""
    copies = ", ".join(
        f"{quantity(n, 'B')} {n / us / 1e3:,.0f} GB/s" for n, us in c.copied if us > 0
    )
    return (
        f"a kernel starts in {time(c.start_us)} on {c.processors} processors; copies of {copies}; "
        f"a product's tile takes {c.fill:.0f} steps of K more than it has; of moving and "
        f"computing, {c.overlap:.0%} of the shorter is hidden"
    )


def analysis_view(name: str, a: Analysis, top: int = 30) -> Group:
    """The operators by share of time, the roofline classes, and what fusion can gain at best."""
    parts: list[RenderableType] = [
        Text(f"{name} on {ceilings_line(a.ceilings)}"),
        _operators(a, top),
        _classes(a),
        _potentials(a),
        Text(_verdict(a), style="bold"),
    ]
    return Group(*parts)


def _operators(a: Analysis, top: int) -> Table:
    rows = sorted((r for r in a.rows if r.bound is not None), key=lambda r: -r.share)
    views = len(a.rows) - len(rows)
    title = f"{len(rows)} operators, {views} views" if views else f"{len(rows)} operators"
    table = Table(title=title, title_justify="left")
    table.add_column("operator", overflow="fold", ratio=1)
    table.add_column("kind")
    for head in ("share", "time", "bytes", "FLOP", "FLOP/byte"):
        table.add_column(head, justify="right")
    table.add_column("limited by")
    for r in rows[:top]:
        op = r.op.strip("_").removeprefix("native_").removesuffix("_legit_no_training")
        label = r.name if op in r.name else f"{r.name} ({op})"
        table.add_row(
            escape(label),
            r.kind.value,
            f"{r.share:.1%}",
            time(r.predicted_us),
            quantity(r.totals.dram_bytes, "B"),
            quantity(r.totals.flops),
            quantity(r.totals.intensity),
            _limits(r),
        )
    if len(rows) > top:
        rest = rows[top:]
        share, us = sum(r.share for r in rest), sum(r.predicted_us for r in rest)
        table.add_row(f"… {len(rest)} more (--top N)", "", f"{share:.1%}", time(us))
    return table


def _limits(r: OperatorRow) -> str:
    """ "launch, then memory" for a kernel that takes less time than its launch."""
    words = [b.value.removesuffix("-bound") for b in (r.bound, r.running) if b is not None]
    return ", then ".join(dict.fromkeys(words))


def _classes(a: Analysis) -> Table:
    table = Table(title="roofline classes", title_justify="left")
    table.add_column("limited by")
    table.add_column("operators", justify="right")
    table.add_column("share of time", justify="right")
    for bound in Bound:
        n = sum(r.bound is bound for r in a.rows)
        table.add_row(bound.value.removesuffix("-bound"), count(n), f"{a.share(bound):.1%}")
    return table


def _potentials(a: Analysis, top: int = 10) -> Table:
    table = Table(title="what one kernel could hold, best first", title_justify="left")
    table.add_column("operators", overflow="fold", ratio=1)
    for head in ("time", "fused at best", "saves", "bytes", "launches"):
        table.add_column(head, justify="right")
    several = [p for p in a.potentials if len(p.ops) > 1]
    for p in several[:top]:
        table.add_row(
            escape(" + ".join(p.ops)),
            time(p.before_us),
            time(p.after_us),
            time(p.gain_us),
            improvement(p.before.dram_bytes, p.after.dram_bytes),
            f"{count(p.before.launches)} -> {count(p.after.launches)}",
        )
    if len(several) > top:
        table.add_row(f"… {len(several) - top} more", "", "", time(sum(
            p.gain_us for p in several[top:])))  # fmt: skip
    return table


def _verdict(a: Analysis) -> str:
    best = f"{a.predicted_us / a.best_us:.2f}×" if a.best_us else UNKNOWN
    return (
        f"predicted {time(a.predicted_us)} as operators, {time(a.best_us)} with every group fused "
        f"({best} at best), physical limit {time(a.bound_us)}; accesses {count(a.unfused.accesses)}"
        f" -> {count(a.fused.accesses)}, launches {count(a.unfused.launches)} -> "
        f"{count(a.fused.launches)}"
    )


def doctor_view(rows: Sequence[tuple[str, str, str]]) -> Table:
    """item, what was found, what to do if something is missing ("" if nothing is)."""
    table = Table(title="onchip doctor", title_justify="left")
    table.add_column("item")
    table.add_column("found", overflow="fold", ratio=1)
    table.add_column("to do", overflow="fold", ratio=1)
    for item, found, advice in rows:
        table.add_row(escape(item), escape(found), escape(advice))
    return table


def cache_view(folder: Path, found: Sequence[Entry]) -> Group:
    """Entries and bytes by kind, with the oldest and the newest use."""
    table = Table("kind", "entries", "size", "last used, oldest", "newest", title_justify="left")
    for kind, text in KINDS.items():
        mine = [e for e in found if e.kind == kind]
        table.add_row(f"{kind}: {text}", *_facts(mine))
    table.add_section()
    table.add_row("all", *_facts(found))
    kept = f"least recently used entries go beyond {MOST_BYTES / 2**30:.0f} GiB"
    end = "onchip cache clear [--older-than DAYS] removes"
    return Group(Text(str(folder)), table, Text(f"{kept}; {end}"))


def _facts(found: Sequence[Entry]) -> tuple[str, str, str, str]:
    times = [datetime.fromtimestamp(e.used).isoformat(" ", "minutes") for e in found]
    size = f"{sum(e.nbytes for e in found) / 2**20:,.1f} MiB"
    oldest, newest = (min(times), max(times)) if times else (UNKNOWN, UNKNOWN)
    return str(len(found)), size, oldest, newest
