"""The report as one self-contained page: inline style, inline SVG, no script, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from onchip.planning.intervals import words
from onchip.report import text
from onchip.report.picture import picture
from onchip.report.report import Report

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --paper: #ffffff; --soft: #667085;
  --line: #d5dae3; --chip: #e6f4ec; --chip-line: #2f8f5b; --memory: #fdeee2; --memory-line: #c8641b;
  --op: #eef2fb; --op-line: #5470b5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --paper: #14181f; --soft: #98a2b3;
  --line: #333b49; --chip: #16301f; --chip-line: #57c08a; --memory: #33210f;
  --memory-line: #e8924f; --op: #1b2438; --op-line: #8aa4e6; } }
body { background: var(--paper); color: var(--ink); margin: 2rem auto; max-width: 68rem;
  padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p.sub { color: var(--soft); margin-top: .2rem; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; } .n { text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif;
  fill: var(--ink); }
svg .soft { fill: var(--soft); } svg .head { font-weight: 600; font-size: 14px; }
svg .op { fill: var(--op); stroke: var(--op-line); }
svg .kernel { fill: var(--chip); stroke: var(--chip-line); }
svg .memory { fill: var(--memory); stroke: var(--memory-line); }
svg .traffic { stroke: var(--memory-line); stroke-width: 2; fill: none; }
svg .inner { stroke: var(--chip-line); stroke-width: 2; fill: none; }
svg .tip { fill: var(--memory-line); } svg .innertip { fill: var(--chip-line); }
"""


def page(r: Report) -> str:
    """The whole page."""
    title = escape(f"onchip: {r.model}")
    parts = [
        f"<h1>{escape(r.model)}</h1>",
        f'<p class="sub">{escape(" · ".join([r.device, r.dtype, *_versions(r)]))}</p>',
        f"<p>{escape(text.closing(r))}</p>",
        "<h2>What fusion gained</h2>",
        table(("metric", "unfused", "fused", "improvement"), text.benefit_rows(r)),
        "<h2>Before and after</h2>",
        picture(r),
        "<h2>Latency ladder</h2>",
        table(("form", "latency"), _ladder(r)),
        f"<h2>Kernels ({len(r.kernels)})</h2>",
        table(_KERNEL_HEAD, _kernels(r), numbers=3),
        "<h2>Edges between kernels</h2>",
        _cuts(r),
        *(
            x
            for title, lines in text.contested(r, None)
            for x in (f"<h2>{escape(title.capitalize())}</h2>", _list(lines))
        ),
        "<h2>Numerics</h2>",
        _list(text.numerics(r)),
        *(["<h2>CUDA graph</h2>", _list(lines)] if (lines := text.coverage(r)) else []),
        *(["<h2>Notes</h2>", _list(r.notes)] if r.notes else []),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 1) -> str:
    """A table whose columns from the index `numbers` on hold figures."""

    def line(tag: str, cells: Sequence[str]) -> str:
        out = []
        for i, c in enumerate(cells):
            style = ' class="n"' if i >= numbers else ""
            out.append(f"<{tag}{style}>{escape(c)}</{tag}>")
        return f"<tr>{''.join(out)}</tr>"

    body = "".join(line("td", r) for r in rows)
    return f'<div class="wide"><table>{line("th", head)}{body}</table></div>'


def _versions(r: Report) -> list[str]:
    return [f"{name} {version}" for name, version in r.versions.items()]


def _ladder(r: Report) -> list[tuple[str, str]]:
    forms = {"unfused (eager)": r.unfused.latency_us, **r.baselines, "onchip": r.fused.latency_us}
    rows = [(n, text.time(us)) for n, us in sorted(forms.items(), key=lambda kv: -(kv[1] or 0))]
    return [*rows, ("physical limit", text.time(r.bound_us))]


_KERNEL_HEAD = (
    "kernel", "operators", "backend", "bytes", "FLOP", "predicted", "measured", "unfused",
    "measured / unfused", *text.NEEDS,
)  # fmt: skip


def _kernels(r: Report) -> list[tuple[str, ...]]:
    return [
        (
            k.name,
            " + ".join(k.ops),
            f"{k.backend} {k.choice}".strip(),
            text.quantity(k.dram_bytes, "B"),
            text.quantity(k.flops),
            text.time(k.predicted_us),
            text.time(k.measured_us),
            text.time(k.unfused_us),
            words(k.ratio) or text.UNKNOWN,
            *text.needs(k),
        )
        for k in r.kernels
    ]


def _cuts(r: Report) -> str:
    rows = [(d.edge[0], d.edge[1], d.family, d.text or d.rule) for d in r.decisions if not d.fused]
    if not rows:
        return "<p>None: every pair of neighbours shares a kernel.</p>"
    return table(("producer", "consumer", "family", "reason"), rows, numbers=4)


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
