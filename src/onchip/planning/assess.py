"""The whole program: which form of it ships, and what it and its unfused forms take.

Never slower: after planning, the fused program is timed against the model as given. If it is
measurably slower, every operator as its library call is tried, and if that is slower as well, the
original module runs. The outcome is kept in the cache, so a warm compile times nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from onchip.analysis.record import Interval
from onchip.backends.library import aten
from onchip.capture.captured import Captured
from onchip.capture.containers import flatten, rebuild
from onchip.capture.export import gpus
from onchip.capture.observe import clone_storage
from onchip.capture.schema import is_view
from onchip.ir.graph import Node
from onchip.planning.intervals import LEAST_ROUNDS, Comparison, compare, words
from onchip.planning.plan import LibraryStep, Plan
from onchip.planning.planner import Planned
from onchip.planning.recording import Recording, record
from onchip.planning.records import about_to_measure, load_record, store_record
from onchip.planning.timing import HOST, Clock, Timed, clock_for, rounds, samples
from onchip.planning.values import run_eagerly

Call = Callable[[], object]

FUSED, LIBRARY, EAGER = "fused", "library", "eager"
RACE_S = 2.0  # seconds that one comparison of two forms may take, beyond its first rounds
# Of programs so slow that these rounds take half of that time, one that takes so much less in each
# of them needs no more.
CLEAR_ROUNDS, CLEAR_SHARE = 2, 0.8


@dataclass(frozen=True, slots=True)
class Outcome:
    """Which form of a program ships.

    form      "fused", "library" (every operator its library call), or "eager" (the module itself)
    times_us  median microseconds of the forms that were timed, by name; empty if none was
    ratios    each one's time over eager's, where enough rounds were measured in turn
    text      why it is not the fused one, or why nothing was timed; "" otherwise
    """

    form: str
    times_us: dict[str, float] = field(default_factory=dict)
    text: str = ""
    ratios: dict[str, Interval] = field(default_factory=dict)


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


# ---- clocks ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallClock:
    """The time of one of a few calls that are made in a row: the host's or the GPU's work,
    whichever takes longer. (One call alone and a wait for it would add up the two, which no loop
    over batches does.)"""

    device: torch.device
    IN_A_ROW = 4

    def ready(self, function: Call) -> Timed:
        def timed() -> float:
            start = time.perf_counter()
            for _ in range(self.IN_A_ROW):
                function()
            torch.cuda.synchronize(self.device)
            return (time.perf_counter() - start) / self.IN_A_ROW

        timed()
        return timed


@dataclass(frozen=True, slots=True)
class EventClock:
    """A GPU's own time for what a function enqueues: its replay of a CUDA graph. The GPU is kept
    busy until the host has enqueued it."""

    device: torch.device
    SPIN = 100_000  # cycles

    def ready(self, function: Call) -> Timed:
        def timed() -> float:
            with torch.cuda.device(self.device):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(self.SPIN)
                start.record()
                function()
                end.record()
                end.synchronize()
            return start.elapsed_time(end) / 1e3

        timed()
        return timed


def caller_clock(device: torch.device) -> Clock:
    """What a caller sees."""
    return CallClock(device) if device.type == "cuda" else HOST


# ---- which form ships --------------------------------------------------------------------------


def settle(
    key: str,
    eager: Call,
    fused: Call,
    library: Callable[[], Call],
    budget_s: float = RACE_S,
    clock: Clock = HOST,
) -> Outcome:
    """The form that ships, from the cache or timed now. `library` makes the library form."""
    known = load_record(key)
    try:
        if known is not None and known["form"] in (FUSED, LIBRARY, EAGER):
            ratios = {k: Interval(**r) for k, r in known["ratios"].items()}
            return Outcome(**{**known, "ratios": ratios})
    except (AttributeError, KeyError, TypeError):
        pass  # damaged: time it again
    about_to_measure("which form of the program ships")
    found = race(eager, fused, library, budget_s, clock)
    store_record(key, asdict(found))
    return found


def race(
    eager: Call,
    fused: Call,
    library: Callable[[], Call],
    budget_s: float = RACE_S,
    clock: Clock = HOST,
) -> Outcome:
    """Time the forms side by side; a later one is tried only if the one before it is slower."""
    first = _against(fused, eager, budget_s, clock)
    found: dict[str, float] = dict(zip((FUSED, EAGER), first.median_us, strict=True))
    ratios: dict[str, Interval | None] = {FUSED: first.ratio}
    if not first.slower:
        return Outcome(FUSED, found, ratios=_known(ratios))
    second = _against(library(), eager, budget_s, clock)
    found[LIBRARY], ratios[LIBRARY] = second.median_us[0], second.ratio
    form = EAGER if second.slower else LIBRARY
    ran = "the original module runs" if second.slower else "every operator runs as its library call"
    text = (
        f"the fused program was measured slower than eager ({found[FUSED]:,.0f} µs against "
        f"{found[EAGER]:,.0f} µs, {words(first.ratio)}), so {ran}"
    )
    return Outcome(form, found, text, _known(ratios))


def _known(ratios: Mapping[str, Interval | None]) -> dict[str, Interval]:
    return {k: r for k, r in ratios.items() if r is not None}


def _against(mine: Call, other: Call, budget_s: float, clock: Clock) -> Comparison:
    """Both side by side. `mine` stands unless it is slower beyond noise."""
    ready = [clock.ready(f) for f in (mine, other)]
    start = time.perf_counter()
    a, b = rounds(ready, CLEAR_ROUNDS)
    slow = time.perf_counter() - start > budget_s / 2
    if slow and max(a) <= CLEAR_SHARE * min(b):
        return Comparison(tuple(a), tuple(b))
    return compare(ready[0], ready[1], budget_s, (a, b))


def program_key(original: Captured, planned: Planned, where: str = "") -> str:
    """Programs with the same key have the same operators, kernels and choices. `where`: what else
    their times depend on, such as the GPU's name."""
    lines = [
        f"{n.call.target} {[(t.dtype.label, t.shape) for t in (*n.inputs, *n.results)]}"
        for n in original.graph.nodes
    ]
    for step, unit, verdict, _ in planned.steps_of:
        kind = verdict.kind if verdict is not None else "library"
        chosen = verdict.index if verdict is not None and kind == "kernel" else kind
        lines.append(f"{type(step).__name__} {unit.key} {chosen}")
    lines.append(f"{torch.__version__} {torch.get_num_threads()} {where}")
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
def undisturbed(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor] = (), traceless: bool = False
) -> Iterator[None]:
    """No gradients inside; afterwards the module's buffers and the random state are as before, that
    of the inputs' GPU too. traceless: running it changes neither, so they are left alone (another
    thread may go on with them)."""
    if traceless:
        with torch.no_grad():
            yield
        return
    saved = [(b, b.detach().clone()) for b in module.buffers()]
    with torch.no_grad(), torch.random.fork_rng(devices=gpus(module, inputs)):
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
    each alone. call_us: starting one generated kernel; None without a compiler. ratio: the program
    over the model as given."""

    eager_us: float
    program_us: float
    baselines: Mapping[str, float | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    node_us: Mapping[str, float] = field(default_factory=dict)
    call_us: float | None = None
    ratio: Interval | None = None


def measure_forms(
    forms: Mapping[str, Call], budget_s: float, clock: Clock = HOST
) -> dict[str, list[float]]:
    """Seconds of each form in every round, interleaved."""
    if not forms:
        return {}
    found = samples(
        list(forms.values()), budget_s, least=LEAST_ROUNDS, settle=clock is HOST, clock=clock
    )
    return dict(zip(forms, found, strict=True))


def medians_us(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {k: statistics.median(t) * 1e6 for k, t in taken.items()}


def measure_graphs(
    forms: Mapping[str, Call], budget_s: float, device: torch.device
) -> tuple[dict[str, float], dict[str, str]]:
    """Median microseconds that a GPU takes for each form, as one CUDA graph and interleaved, so
    that what the host needs to launch is no part of it; and why others can't be captured."""
    graphs: dict[str, Recording] = {}
    failed: dict[str, str] = {}
    for name, call in forms.items():
        for _ in range(2):
            call()
        torch.cuda.synchronize(device)
        try:
            graphs[name] = record(call, device)
        except Exception as error:  # whatever a peer does
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    replays = {name: g.replay for name, g in graphs.items()}
    return medians_us(measure_forms(replays, budget_s, EventClock(device))), failed


def library_times(
    nodes: Sequence[Node],
    captured: Captured,
    inputs: Sequence[torch.Tensor],
    planned: Planned,
    device: torch.device,
) -> dict[str, float]:
    """Microseconds of operators run alone as library calls, in the program's layouts, by name: the
    host's time on a CPU, a GPU's own there."""
    wanted = [n for n in nodes if not is_view(n.call.target)]
    if not wanted:
        return {}
    values = run_eagerly(captured, inputs, planned.plan.layouts)
    with torch.no_grad():
        if device.type == "cpu":
            return {n.name: aten.seconds(n, values.tensors, 3) * 1e6 for n in wanted}
        clock = clock_for(device)
        runs = [lambda n=n: aten.call(n.call, values.tensors) for n in wanted]
        timed = [min(samples([r], 0.0, least=3, clock=clock)[0]) for r in runs]
    return {n.name: t * 1e6 for n, t in zip(wanted, timed, strict=True)}
