"""Measure again what README.md shows: `make readme`, on an otherwise idle machine."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import onchip
from onchip.errors import OnchipError
from onchip.report import Report
from onchip.report.svg import standalone
from onchip.report.text import benefit_rows, time

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- measured: begin (make readme) -->\n", "<!-- measured: end -->\n"
PICTURE, NETWORK = "pipeline:conv-relu-bn-pool", "torchvision:resnet50"


def section(pipeline: Report, network: Report | None) -> str:
    """The measured part of README.md."""
    versions = ", ".join(f"{k} {v}" for k, v in pipeline.versions.items())
    lines = [
        "| metric | unfused | fused | improvement |",
        "| --- | ---: | ---: | ---: |",
        *("| " + " | ".join(row) + " |" for row in benefit_rows(pipeline)),
        "",
        _sentence(pipeline),
    ]
    if network is not None:
        a, b = network.unfused, network.fused
        lines += [
            "",
            f"{_sentence(network)} Accesses {a.accesses} → {b.accesses}, launches {a.launches} → "
            f"{b.launches}.",
        ]
    today = datetime.date.today().isoformat()
    load = f"; load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    where = f"Measured {today} on {pipeline.device} ({versions}{load})."
    return "\n".join([*lines, "", where, ""])


def _sentence(r: Report) -> str:
    forms = {"eager": r.unfused.latency_us, **r.baselines}
    ladder = ", ".join(f"{k} {time(v)}" for k, v in forms.items() if v is not None)
    return (
        f"`{r.model}`: onchip {time(r.fused.latency_us)}; {ladder}. Error {r.numerics.error:.1e} "
        f"(eager's {r.numerics.eager_error:.1e})."
    )


def main(arguments: list[str]) -> None:
    _, pipeline = onchip.optimize(PICTURE, peers=True)
    network = None if "--quick" in arguments else onchip.optimize(NETWORK, peers=True)[1]
    page = ROOT / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise OnchipError(f"{page} has lost its markers ({BEGIN.strip()})")
    page.write_text(before + BEGIN + section(pipeline, network) + END + after)
    (ROOT / "docs" / "images" / "conv-relu-bn-pool.svg").write_text(standalone(pipeline))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OnchipError as error:
        sys.exit(f"readme: {error}")
