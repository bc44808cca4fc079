"""What keeps a program from being a CUDA graph: known before, or found by the attempt."""

from __future__ import annotations

import traceback

import torch

from onchip.analysis.record import Blocker
from onchip.capture import schema
from onchip.capture.captured import Captured
from onchip.ir.expr import Tensor
from onchip.planning.plan import LibraryStep, Plan
from onchip.runtime.executable import PROGRAM


def find_blockers(captured: Captured, plan: Plan, device: torch.device) -> tuple[Blocker, ...]:
    """What a graph can't hold: operators with tensors on the CPU, and random numbers (each replay
    would draw the same). Operators that wait for the GPU are found by recording."""
    found = []
    for t in captured.graph.inputs:
        if _elsewhere(t, device):
            found.append(Blocker(t.name, "", f"this input is on {t.tag['device']}"))
    for step in plan.steps:
        if not isinstance(step, LibraryStep):
            continue
        node = step.node
        odd = next((t for t in (*node.inputs, *node.results) if _elsewhere(t, device)), None)
        if odd is not None:
            reason = f"{odd.name} is on {odd.tag['device']}"
        elif schema.draws(node.call):
            reason = "it draws random numbers"
        else:
            continue
        found.append(Blocker(node.name, str(node.origin), reason))
    return tuple(found)


def _elsewhere(t: Tensor, device: torch.device) -> bool:
    return str(t.tag.get("device", device)) != str(device)


def culprit(error: BaseException, source: str, captured: Captured) -> Blocker:
    """The operator whose call failed, by the line of the program (`source`) that made it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.lineno for f in reversed(frames) if f.filename == PROGRAM), None)
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    lines = source.splitlines()
    if line is None or line > len(lines):
        return Blocker("the program", "", text)
    name = lines[line - 1].partition("  # ")[2] or lines[line - 1].strip()
    node = next((n for n in captured.graph.nodes if n.name == name), None)
    return Blocker(name, str(node.origin) if node is not None else "", text)


def text_of(blockers: tuple[Blocker, ...]) -> str:
    names = ", ".join(b.operator for b in blockers[:3])
    more = f" and {len(blockers) - 3} more" if len(blockers) > 3 else ""
    return f"no CUDA graph: {names}{more} can't be part of one" if blockers else "not tried yet"
