"""What was measured against what while a program was planned: each place where a more fused form
met a less fused one, whichever of the two ships."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onchip.analysis.record import Contest
from onchip.planning.choice import Choice
from onchip.planning.intervals import words
from onchip.planning.tuner import Verdict


def contests(choices: Sequence[Choice]) -> tuple[Contest, ...]:
    """In execution order, a region that was cut before its parts."""
    met = dict.fromkeys(c for choice in choices for c in (*choice.cut_from, choice))
    return tuple(contest for c in met for contest in _of(c))


def _of(c: Choice) -> Iterator[Contest]:
    v, nodes = c.verdict, c.unit.region.nodes
    if v is None:
        return
    ops = tuple(n.name for n in nodes)
    chosen = v.whole if v.kind == "split" else v.kind
    if v.fused_us is not None and v.library_us is not None:
        won = chosen in ("kernel", "onednn")
        yield Contest(ops, "operators", v.fused_us, v.library_us, v.library_ratio, won)
    whole_us = v.best_of_whole_us
    if v.split_us is not None and whole_us is not None and v.whole != "library":
        first = tuple(nodes[i].name for i in v.cut)
        kept = v.kind != "split"
        yield Contest(ops, "two kernels", whole_us, v.split_us, v.split_ratio, kept, first)


def lost(v: Verdict) -> str:
    """What a kernel lost against, with both times: "90 µs against the library's 80 µs, 1.12×
    (1.10–1.15)"; "" if that was not measured."""
    if v.kind == "onednn" and v.kernel_us is not None and v.onednn_us is not None:
        return f"{v.kernel_us:,.4g} µs against {v.onednn_us:,.4g} µs with oneDNN's calls"
    if v.fused_us is None or v.library_us is None:
        return ""
    found = words(v.library_ratio)
    text = f"{v.fused_us:,.4g} µs against the library's {v.library_us:,.4g} µs"
    return f"{text}, {found}" if found else text
