"""Every fused kernel that ships, measured once more against its unfused operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from onchip.analysis.record import Interval
from onchip.capture.devices import device_of
from onchip.planning.assess import FUSED, Compiled
from onchip.planning.intervals import compare
from onchip.planning.library import aten_steps, run_of
from onchip.planning.plan import KernelStep, Step
from onchip.planning.timing import clock_for
from onchip.planning.tuner import Verdict, kernel_run
from onchip.planning.units import Unit
from onchip.planning.values import Values, run_eagerly

# Seconds that one kernel and its operators are measured, beyond the first rounds.
MEASURE_S = 0.5


@dataclass(frozen=True, slots=True)
class Again:
    """One kind of kernel. ops: its operators; how: the variant, or "oneDNN"; places: where it
    ships; fused_us, unfused_us: best rounds now, in microseconds; ratio: the former over the
    latter; then_us: what the fused one took when it was chosen."""

    ops: tuple[str, ...]
    how: str
    places: int
    fused_us: float
    unfused_us: float
    ratio: Interval | None
    then_us: float | None

    @property
    def slower(self) -> bool:
        """Fusing loses here, beyond noise."""
        return self.ratio is not None and self.ratio.low > 1


def remeasure(compiled: Compiled, inputs: Sequence[torch.Tensor]) -> list[Again]:
    """One row for each kind of region that ships fused, in execution order; none where the program
    runs unfused. inputs: those of the captured graph. The operators are ATen's, one call each, in
    the program's layouts."""
    if compiled.outcome.form != FUSED or not compiled.planned.timed:
        return []
    device = device_of(compiled.captured, inputs)
    units: dict[Unit, tuple[Verdict, list[Step]]] = {}
    for step, unit, verdict, _ in compiled.planned.steps_of:
        if verdict is not None and verdict.kind in ("kernel", "onednn"):
            units.setdefault(unit, (verdict, []))[1].append(step)
    kinds = {u.key: u for u in reversed(units)}
    values = run_eagerly(compiled.captured, inputs, compiled.planned.plan.layouts)
    clock, out = clock_for(device), []
    for key, u in reversed(kinds.items()):
        verdict, steps = units[u]
        fused = clock.ready(_run(u, verdict, steps, values))
        unfused = clock.ready(run_of(aten_steps(u.region.nodes), values))
        found = compare(fused, unfused, MEASURE_S)
        ops = tuple(n.name for n in u.region.nodes)
        how = u.candidates[verdict.index].choice if verdict.kind == "kernel" else "oneDNN"
        places = sum(x.key == key for x in units)
        out.append(Again(ops, how, places, *found.best_us, found.ratio, verdict.best_us))
    return out


def _run(u: Unit, verdict: Verdict, steps: Sequence[Step], values: Values) -> Callable[[], object]:
    match steps:
        case [KernelStep(kernel=kernel)]:
            return kernel_run(u.candidates[verdict.index], kernel, values)
    return run_of([s for s in steps if not isinstance(s, KernelStep)], values)
