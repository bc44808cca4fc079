"""The whole program: which form of it ships, and what it and its unfused forms take.

Never slower: after planning, the fused program is timed against the model as given. If it is
measurably slower, every operator as its library call is tried, and if that is slower as well, the
original module runs. The outcome is kept in the cache, so a warm compile times nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from onchip.backends.cpp.compiler import build
from onchip.backends.library import aten
from onchip.capture.captured import Captured
from onchip.capture.containers import flatten, rebuild
from onchip.capture.observe import clone_storage
from onchip.capture.schema import is_view
from onchip.errors import CompilerError
from onchip.ir.graph import Node
from onchip.planning.plan import LibraryStep, Plan
from onchip.planning.planner import Planned
from onchip.planning.timing import measurably_slower, samples
from onchip.planning.tuner import load_record, store_record
from onchip.planning.values import run_eagerly

Call = Callable[[], object]

FUSED, LIBRARY, EAGER = "fused", "library", "eager"
RACE_S = 2.0  # seconds that one comparison of two forms may take, beyond its first rounds
FIRST_ROUNDS, MOST_ROUNDS = 5, 25


@dataclass(frozen=True, slots=True)
class Outcome:
    """Which form of a program ships.

    form      "fused", "library" (every operator its library call), or "eager" (the module itself)
    times_us  median microseconds of the forms that were timed, by name; empty if none was
    text      why it is not the fused one, or why nothing was timed; "" otherwise
    """

    form: str
    times_us: dict[str, float] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Compiled:
    """One specialisation with its books.

    original  the graph as captured; captured: what was planned (batch norms folded)
    seconds   wall clock of capture, planning and choosing the form
    """

    original: Captured
    captured: Captured
    planned: Planned
    outcome: Outcome
    seconds: float
    notes: tuple[str, ...] = ()


# ---- which form ships --------------------------------------------------------------------------


def settle(
    key: str, eager: Call, fused: Call, library: Callable[[], Call], budget_s: float = RACE_S
) -> Outcome:
    """The form that ships, from the cache or timed now. `library` makes the library form."""
    known = load_record(key)
    try:
        if known is not None and known["form"] in (FUSED, LIBRARY, EAGER):
            return Outcome(**known)
    except (KeyError, TypeError):
        pass  # damaged: time it again
    found = race(eager, fused, library, budget_s)
    store_record(key, asdict(found))
    return found


def race(
    eager: Call, fused: Call, library: Callable[[], Call], budget_s: float = RACE_S
) -> Outcome:
    """Time the forms side by side; a later one is tried only if the one before it is slower."""
    slower, times = _loses(fused, eager, budget_s)
    found = {FUSED: times[0], EAGER: times[1]}
    if not slower:
        return Outcome(FUSED, found)
    slower, times = _loses(library(), eager, budget_s)
    found |= {LIBRARY: times[0]}
    form = EAGER if slower else LIBRARY
    ran = "the original module runs" if slower else "every operator runs as its library call"
    text = (
        f"the fused program was measured slower than eager ({found[FUSED]:,.0f} µs against "
        f"{found[EAGER]:,.0f} µs), so {ran}"
    )
    return Outcome(form, found, text)


def _loses(mine: Call, other: Call, budget_s: float) -> tuple[bool, tuple[float, float]]:
    """Whether `mine` is measurably slower, and both medians in microseconds. A few rounds if they
    show no loss, more if they do."""
    end = time.perf_counter() + budget_s
    a, b = samples([mine, other], 0.0, least=FIRST_ROUNDS)
    while measurably_slower(a, b) and len(a) < MOST_ROUNDS and time.perf_counter() < end:
        more_a, more_b = samples([mine, other], 0.0, least=FIRST_ROUNDS)
        a, b = a + more_a, b + more_b
    return measurably_slower(a, b), (statistics.median(a) * 1e6, statistics.median(b) * 1e6)


def program_key(original: Captured, planned: Planned) -> str:
    """Programs with the same key have the same operators, kernels and choices."""
    lines = [
        f"{n.call.target} {[(t.dtype.label, t.shape) for t in (*n.inputs, *n.results)]}"
        for n in original.graph.nodes
    ]
    for step, unit, verdict, _ in planned.steps_of:
        kind = verdict.kind if verdict is not None else "library"
        chosen = verdict.index if verdict is not None and kind == "kernel" else kind
        lines.append(f"{type(step).__name__} {unit.key} {chosen}")
    lines.append(f"{torch.__version__} {torch.get_num_threads()}")
    return "program-" + hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def fuses(plan: Plan) -> bool:
    """Whether the plan is another one than every operator as its ATen call."""
    return any(not isinstance(s, LibraryStep) for s in plan.steps)


# ---- running a model without changing it -------------------------------------------------------


def copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments with every tensor on a storage of its own, strides kept, no gradients."""
    leaves, spec = flatten((args, kwargs))
    memo: dict[int, torch.Tensor] = {}
    new = [
        memo.setdefault(id(x), clone_storage(x.detach())) if isinstance(x, torch.Tensor) else x
        for x in leaves
    ]
    return rebuild(spec, new)


@contextlib.contextmanager
def undisturbed(module: torch.nn.Module) -> Iterator[None]:
    """No gradients inside; afterwards the module's buffers and the random state are as before."""
    saved = [(b, b.detach().clone()) for b in module.buffers()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for b, value in saved:
                if not torch.equal(b, value):  # an unchanged buffer keeps its version
                    b.copy_(value)


# ---- measuring for the report ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """Median microseconds of a call, all forms interleaved: the model as given, the program, and
    `baselines` by name (None: failed; `notes` say why). node_us: operators that the library runs,
    each alone. call_us: starting one generated kernel; None without a compiler."""

    eager_us: float
    program_us: float
    baselines: Mapping[str, float | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    node_us: Mapping[str, float] = field(default_factory=dict)
    call_us: float | None = None


def measure_forms(forms: Mapping[str, Call], budget_s: float) -> dict[str, float]:
    """Median microseconds of each form, interleaved."""
    found = samples(list(forms.values()), budget_s, least=FIRST_ROUNDS, settle=True)
    return {k: statistics.median(t) * 1e6 for k, t in zip(forms, found, strict=True)}


def library_times(
    nodes: Sequence[Node], captured: Captured, inputs: Sequence[torch.Tensor], planned: Planned
) -> dict[str, float]:
    """Microseconds of operators run alone as library calls, in the program's layouts, by name."""
    wanted = [n for n in nodes if not is_view(n.call.target)]
    if not wanted:
        return {}
    values = run_eagerly(captured, inputs, planned.plan.layouts)
    with torch.no_grad():
        return {n.name: aten.seconds(n, values.tensors, 3) * 1e6 for n in wanted}


_EMPTY_KERNEL = """
#include <cstdint>
extern "C" int kernel(void** pointers) {
  int status = 0;
  #pragma omp parallel reduction(|:status)
  { status |= pointers == nullptr; }
  return status;
}
"""


def kernel_call_us() -> float | None:
    """Microseconds that starting one generated kernel takes: the call from Python and waking the
    threads. None without a compiler."""
    try:
        function = build(_EMPTY_KERNEL).function
    except CompilerError:
        return None
    pointers = (ctypes.c_void_p * 1)(0)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            function(pointers)
        best = min(best, (time.perf_counter() - start) / 50)
    return best * 1e6
