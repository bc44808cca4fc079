"""What was decided by timing about a program's CUDA graphs, as a lock file holds it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from onchip.analysis.record import Blocker, GraphCoverage
from onchip.capture.captured import Captured
from onchip.runtime.executable import Executable

ROW, EARLY, BRANCHES = "row", "early", "branches"


def form_of(executable: Executable) -> str:
    """How a recorded program's kernels follow each other."""
    return EARLY if executable.early else BRANCHES if executable.streams > 1 else ROW


def written(executable: Executable, copying: bool, coverage: GraphCoverage) -> dict[str, Any]:
    """The form that is recorded, whether a graph pays with inputs copied, and the coverage; of a
    blocker only its operator and the reason, not the place in the user's files."""
    facts = asdict(coverage)
    facts["blockers"] = [{k: b[k] for k in ("operator", "reason")} for b in facts["blockers"]]
    return {"form": form_of(executable), "copying": copying, **facts}


def covered(choice: dict[str, Any], captured: Captured) -> GraphCoverage:
    """The coverage of such a choice, its blockers with their places in this program."""
    origins = {n.name: str(n.origin) for n in captured.graph.nodes}
    blockers = tuple(
        Blocker(b["operator"], origins.get(b["operator"], ""), b["reason"])
        for b in choice["blockers"]
    )
    facts = {k: v for k, v in choice.items() if k not in ("form", "copying")}
    return replace(GraphCoverage(**facts), blockers=blockers)
