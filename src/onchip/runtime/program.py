"""The compiled model: called like the model itself."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onchip.analysis.record import GraphCoverage
from onchip.analysis.traffic import Ledger
from onchip.capture.captured import Captured
from onchip.capture.containers import flatten
from onchip.capture.template import Templates
from onchip.errors import CaptureError, InputError
from onchip.planning import assess
from onchip.planning.lock import Lock
from onchip.planning.plan import KernelStep, LibraryStep, Plan
from onchip.planning.tuner import wait
from onchip.runtime.background import COMPILING, Begun, Worker, failure_of, leaves_no_trace
from onchip.runtime.gate import Gate
from onchip.runtime.guards import StateGuard, ambient_key, input_key, overlaps
from onchip.runtime.specialisation import Specialisation, make
from onchip.runtime.weights import Stale
from onchip.settings import Settings

# (module, args, kwargs, templates) -> what to run; see `capture`
Build = Callable[
    [torch.nn.Module, tuple[Any, ...], dict[str, Any], Templates], tuple[Captured, Plan]
]

Begin = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any], Templates], Begun]


@dataclass(eq=False)
class EagerCall:
    """The original module runs for these inputs, for a reason that stands in program.notes;
    always, or (`calls_left`) so many times before they are compiled, or (`waits`) until they are.
    """

    reason: str
    state: StateGuard
    ambient: tuple[Any, ...]
    calls_left: int | None = None
    waits: bool = False
    used: int = 0

    @property
    def due(self) -> bool:
        return self.calls_left is not None and self.calls_left <= 0


def count_launches(captured: Captured, plan: Plan) -> int:
    """Kernels and library calls of one call; views launch nothing."""
    ledger = Ledger(captured.graph, plan.layouts)
    free = {n.name for n in captured.graph.nodes if ledger.is_free(n)}
    return sum(not (isinstance(s, LibraryStep) and s.node.name in free) for s in plan.steps)


class Program:
    """A callable with the model's own signature, outputs, aliasing and mutations.

    notes      why something ran in eager mode, once each
    launches   kernels and library calls that one call of the latest specialisation starts; if the
               original module runs, its operators; None if it could not be captured
    begin      like build, in two parts: for Settings(start="eager"); None: compiled at once
    lock_file  holds what is decided about CUDA graphs, if there is one
    describe   makes the report, from `compiled`: the books of the latest specialisation (both
               set by onchip.api)
    Raises InputError (arguments that do not fit the model's signature), CaptureError (a new
    combination of inputs can't be captured), and whatever eager raises.
    Thread-safe. Other shapes, strides, dtypes, training flags, hooks or attributes give a new
    specialisation by themselves; weights may change freely. Small writes to weights that PyTorch
    does not count (one row, through `.data` or numpy) may take 128 calls to be noticed (see
    runtime/weights.py): call `refresh()` after them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        build: Build,
        settings: Settings = Settings(),
        lock: Lock | None = None,
        begin: Begin | None = None,
        notes: list[str] | None = None,
    ) -> None:
        self.module, self.build, self.settings, self.lock_file = module, build, settings, lock
        self.begin = begin if settings.start == "eager" else None
        self.worker = Worker()
        self.notes: list[str] = [] if notes is None else notes
        self.table: dict[Any, list[Specialisation | EagerCall]] = {}
        self.templates: tuple[StateGuard, tuple[Any, ...], Templates] | None = None
        self.lock = threading.RLock()
        self.gate = Gate()
        self.clock = 0
        self.latest: Specialisation | None = None
        self.running: tuple[Captured, Plan] | None = None
        self.describe: Callable[[], Any] | None = None
        self.compiled: list[Any] = []
        leaves, spec = _flatten_call(args, kwargs)
        self._specialise((spec, input_key(leaves)), args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.gate:
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = _flatten_call(args, kwargs)
        key = (spec, input_key(leaves))
        if torch.is_grad_enabled() and self._requires_grad(leaves):
            return self._eager("gradients are required: the original module runs", args, kwargs)
        entry = self._find(key)
        if entry is None and self.begin is not None and self.worker.busy:
            return self._eager(COMPILING, args, kwargs, expected=True)
        entry = entry or self._specialise(key, args, kwargs)
        if isinstance(entry, EagerCall):
            if entry.due:
                self._drop(key, entry)
                entry = self._specialise(key, args, kwargs, at_once=True)
            elif entry.calls_left is not None:
                entry.calls_left -= 1
                return self._eager(entry.reason, args, kwargs, expected=True)
        if isinstance(entry, EagerCall):
            return self._eager(entry.reason, args, kwargs, entry.waits)
        try:
            if entry.writes and self._overlaps(entry, leaves):
                reason = "a tensor that the model writes overlaps another: the original runs"
                return self._eager(reason, args, kwargs)
            return entry.run(leaves)
        except Stale:
            self._drop(key, entry)
            return self._call(args, kwargs)

    # -- facts

    @property
    def launches(self) -> int | None:
        return None if self.running is None else count_launches(*self.running)

    @property
    def graph_coverage(self) -> GraphCoverage | None:
        """Whether the latest specialisation runs as one CUDA graph, and what hinders it; None if it
        does not run on a GPU, or in eager mode."""
        return None if self.latest is None else self.latest.coverage

    @property
    def source(self) -> str:
        """The latest specialisation as Python code."""
        return self.latest.executable.source if self.latest is not None else ""

    @property
    def sources(self) -> dict[str, str]:
        """The generated kernels' sources, by name."""
        found: dict[str, str] = {}
        for step in self.latest.plan.steps if self.latest is not None else ():
            if isinstance(step, KernelStep):
                found[f"k{len(found)} {step.name}"] = step.text
        return found

    def report(self) -> Any:
        """The Report of the latest specialisation (`onchip.Report`): what was fused, why not, and
        what it gained. Raises InputError if this program was not made by onchip.compile."""
        self.wait()
        if self.describe is None:
            raise InputError("only a program that onchip.compile or onchip.optimize made reports")
        return self.describe()

    def why(self, a: str, b: str) -> str:
        """Why operators `a` and `b` are, or are not, in one kernel. OnchipError if unknown."""
        return self.report().why(a, b)

    def wait(self, timeout: float | None = None) -> bool:
        """Until what compiles in the background (Settings.start) is in place or has failed (see
        notes). False if that takes longer than `timeout` seconds."""
        return self.worker.wait(timeout)

    def refresh(self) -> None:
        """Recompute everything derived from weights."""
        with self.gate:
            for key, entries in list(self.table.items()):
                for e in list(entries):
                    if isinstance(e, Specialisation):
                        try:
                            e.weights.refresh()
                        except Stale:
                            self._drop(key, e)

    # -- dispatch

    def _find(self, key: Any) -> Specialisation | EagerCall | None:
        entries = self.table.get(key)
        if entries is None:
            return None
        ambient = ambient_key()
        for e in entries:
            if e.ambient == ambient and e.state.holds():
                self.clock += 1
                e.used = self.clock
                return e
        return None

    def _requires_grad(self, leaves: Sequence[Any]) -> bool:
        if any(x.requires_grad for x in leaves if isinstance(x, torch.Tensor)):
            return True
        return any(p.requires_grad for p in self.module.parameters())

    def _overlaps(self, entry: Specialisation, leaves: Sequence[Any]) -> bool:
        now = entry.weights.current()
        written = [now.values[t] for t in entry.mutated_constants]
        return overlaps(entry.inputs(leaves), entry.mutated, now.tensors, written)

    def _eager(
        self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool = False
    ) -> Any:
        if reason not in self.notes:
            self.notes.append(reason)
            if not expected:
                warnings.warn(f"onchip: {reason}", stacklevel=4)
        return self.module(*args, **kwargs)

    def _drop(self, key: Any, entry: Specialisation | EagerCall) -> None:
        with self.lock:
            if entry in self.table.get(key, ()):
                self.table[key].remove(entry)

    def _specialise(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at_once: bool = False
    ) -> Specialisation | EagerCall:
        with self.gate.alone(), self.lock:
            found = self._find(key)
            if found is not None:
                return found
            self._check_signature(args, kwargs)
            later = None if at_once else self._later(key[0])
            entry = later or self._new(key, args, kwargs)
            self.table[key] = [*self.table.get(key, ()), entry]
            self.clock += 1
            entry.used = self.clock
            self._evict()
            return entry

    def _later(self, spec: Any) -> EagerCall | None:
        """Eager calls first, where many sets of inputs of this structure were compiled already."""
        most, calls = self.settings.compiled_at_once, self.settings.eager_calls
        ambient = ambient_key()
        alike = sum(
            e.ambient == ambient and e.state.holds()
            for (known, _), entries in self.table.items() if known == spec
            for e in entries
        )  # fmt: skip
        if calls <= 0 or alike < most:
            return None
        reason = (
            f"after {most} sets of shapes, strides and Python values, a further one runs eagerly "
            f"{calls} times before it is compiled (Settings.eager_calls)"
        )
        return EagerCall(reason, StateGuard(self.module), ambient, calls)

    def _new(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Specialisation | EagerCall:
        state, ambient = StateGuard(self.module), ambient_key()
        templates = self._templates(state, ambient)
        try:
            if self.begin is None:
                captured, plan = self.build(self.module, args, kwargs, templates)
            else:
                begun = self.begin(self.module, args, kwargs, templates)
                if not ambient and leaves_no_trace(begun.original):
                    return self._later_on(key, begun, args, kwargs, state)
                captured, plan = begun.finish(args, kwargs)
        except CaptureError as error:
            if self.settings.uncapturable == "raise":
                raise
            self.running = None
            return EagerCall(str(error), state, ambient)
        leaves, _ = _flatten_call(args, kwargs)
        return self._entry(captured, plan, state, ambient, leaves)

    def _later_on(
        self, key: Any, begun: Begun, args: tuple[Any, ...], kwargs: dict[str, Any],
        state: StateGuard,
    ) -> EagerCall:  # fmt: skip
        """The original module, until the background has put the program in its place."""
        waiting = EagerCall(COMPILING, state, (), waits=True)
        args, kwargs = assess.copied(args, kwargs)  # the caller may write to them meanwhile
        leaves, _ = _flatten_call(args, kwargs)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        wait(tensors)  # streams differ from thread to thread

        def work() -> None:
            try:
                with self.gate, torch.no_grad():
                    captured, plan = begun.finish(args, kwargs)
                    entry = self._entry(captured, plan, state, (), leaves)
                    wait(tensors)
            except Exception as error:
                entry = EagerCall(failure_of(error), state, (), waits=True)
                self.notes.append(entry.reason)
            with self.lock:
                entries = self.table.get(key, [])
                self.table[key] = [entry if e is waiting else e for e in entries]

        self.worker.submit(work)
        return waiting

    def _entry(
        self, captured: Captured, plan: Plan, state: StateGuard, ambient: tuple[Any, ...],
        leaves: Sequence[Any],
    ) -> Specialisation | EagerCall:  # fmt: skip
        self.running = captured, plan
        if captured.python_state:
            names = ", ".join(captured.python_state[:3])
            reason = f"forward() changes Python attributes of the model ({names}); it runs eagerly"
            return EagerCall(reason, state, ambient)
        if plan.eager:
            return EagerCall(plan.eager, state, ambient)
        entry = make(captured, plan, state, ambient, leaves)
        inputs = entry.inputs(leaves)
        if any(0 in inputs[i].stride() and inputs[i].numel() > 1 for i in entry.mutated):
            reason = "an input that the model writes overlaps itself: the original module runs"
            self.running = captured, Plan(tuple(LibraryStep(n) for n in captured.graph.nodes))
            return EagerCall(reason, state, ambient)
        if self.settings.cuda_graph == "auto":
            entry.prepare_graphs(inputs, self.lock_file)
        self.latest = entry
        return entry

    def _templates(self, state: StateGuard, ambient: tuple[Any, ...]) -> Templates:
        """Exports of the model in its present state."""
        known = self.templates
        if known is None or not known[0].holds() or known[1] != ambient:
            known = self.templates = (state, ambient, Templates())
        return known[2]

    def _check_signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            inspect.signature(self.module.forward).bind(*args, **kwargs)
        except TypeError as error:
            name = type(self.module).__name__
            raise InputError(f"{name} can't be called like this: {error}") from None
        except ValueError:
            return  # no signature is known (a builtin): the model's own error will say

    def _evict(self) -> None:
        entries = [(e.used, k, e) for k, es in self.table.items() for e in es]
        if len(entries) <= self.settings.specialisations:
            return
        _, key, oldest = min(entries, key=lambda x: x[0])
        remaining = [e for e in self.table[key] if e is not oldest]
        if remaining:
            self.table[key] = remaining
        else:
            del self.table[key]


def _flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """Flat leaves and a hashable key of their structure; tensors only is the fast case."""
    if not kwargs:
        for a in args:
            if not isinstance(a, torch.Tensor):
                break
        else:
            return args, len(args)
    return flatten((args, kwargs))
