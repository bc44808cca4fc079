"""How one group of operators runs, and its two parts where it is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onchip.fusion.partition import Group
from onchip.planning.cut import Cut, cut_in_two
from onchip.planning.generators import Built
from onchip.planning.library import Step as LibraryForm
from onchip.planning.library import aten_steps, run_of
from onchip.planning.plan import Kernel, KernelStep, Step
from onchip.planning.tuner import Verdict, kernel_run
from onchip.planning.units import Unit
from onchip.planning.values import Values


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """How one unit runs. built, kernel: of the candidate that was chosen; onednn: its form with
    oneDNN's calls (empty: there is none); cut_from: the choices for the larger regions that it is a
    part of, outermost first."""

    unit: Unit
    verdict: Verdict | None
    built: Built | None
    kernel: Kernel | None
    onednn: tuple[LibraryForm, ...]
    cut_from: tuple[Choice, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        nodes = self.unit.region.nodes
        match self.verdict:
            case Verdict(kind="kernel", index=i) if self.kernel is not None:
                c, name = self.unit.candidates[i], self.unit.region.name
                step = KernelStep(
                    name, self.kernel, c.inputs, c.outputs, c.derived, nodes, c.workspace, c.waits,
                    c.source.text,
                )  # fmt: skip
                return (step,)
            case Verdict(kind="onednn") if self.onednn:
                return self.onednn
        return aten_steps(nodes)

    def run(self, values: Values) -> Callable[[], object]:
        """A closure that runs it once on the program's tensors."""
        if self.verdict is not None and self.verdict.kind == "kernel" and self.kernel is not None:
            return kernel_run(self.unit.candidates[self.verdict.index], self.kernel, values)
        return run_of([s for s in self.steps if not isinstance(s, KernelStep)], values)

    @property
    def best_us(self) -> float:
        """What the verdict measured for it; 0 if it was not timed."""
        return (self.verdict.best_us if self.verdict is not None else None) or 0.0


def halves(choice: Choice, cut: Cut | Verdict) -> tuple[Group, Group]:
    """The two parts of a region as groups of their own."""
    places = cut.first if isinstance(cut, Cut) else cut.cut
    return cut_in_two(choice.unit.group, choice.unit.region, places)
