"""The before/after picture as a file: `python -m onchip.report.svg REPORT.json OUT.svg`."""

from __future__ import annotations

import sys
from pathlib import Path

from onchip.errors import OnchipError
from onchip.report.html import STYLE
from onchip.report.picture import picture
from onchip.report.report import Report


def standalone(report: Report) -> str:
    """An SVG with its style inside, light whatever the viewer prefers. OnchipError if the report
    has no kernels."""
    drawn = picture(report)
    if not drawn.startswith("<svg"):
        raise OnchipError(f"{report.model}: the report has no kernels to draw")
    colours = STYLE[STYLE.index("--ink") : STYLE.index("}")]
    rules = [
        line.replace("svg ", "")
        for line in STYLE.replace(";\n  fill", "; fill").splitlines()
        if line.startswith("svg .")
    ]
    style = (
        f"<style>svg {{ {colours} background: var(--paper); }} "
        f"text {{ font: 12px system-ui, sans-serif; fill: var(--ink); }} {' '.join(rules)}</style>"
    )
    head, _, rest = drawn.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'


def main(source: str, target: str) -> None:
    Path(target).write_text(standalone(Report.from_json(Path(source).read_text())))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except (OnchipError, TypeError, OSError) as error:
        sys.exit(f"onchip: {error}")
