"""A program on a GPU as CUDA graphs: one launch a call, where that is measured faster.

A graph reads and writes the memory that it was recorded with. Two kinds are kept:

- of its *own* inputs: a call copies its inputs there, and its results are copies. Any call may use
  it. One for each stream.
- *lent*: recorded on the memory of a caller's inputs, seen before at the same addresses. Nothing is
  copied; its results are the graph's own memory, so it runs again only when nobody holds them.

Everything is bound to a stream: graphs recorded for one share an arena, since work on a stream
stays in order.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from onchip.analysis.record import Blocker, GraphCoverage
from onchip.capture.captured import Captured
from onchip.errors import OnchipError
from onchip.ir.expr import Tensor
from onchip.planning.plan import KernelStep, Plan
from onchip.planning.recording import Streams, record
from onchip.runtime import branched, graph_choice
from onchip.runtime.arena import Arena, use_count
from onchip.runtime.blockers import culprit, find_blockers, text_of
from onchip.runtime.branches import branches_of
from onchip.runtime.executable import Executable
from onchip.runtime.recorded import Instance, Lane
from onchip.runtime.tensors import again, copy_of, distinct, view_of
from onchip.runtime.weights import Snapshot

ROUNDS = 9  # of measuring: graph or not
IN_A_ROW = 4  # replays that are timed together, where two graphs are compared
LEAST_GAIN = 0.02  # a graph that saves less is not worth its memory
STREAMS = 4
# Graphs are recorded again (for other weights, or another caller's memory) as long as each served
# so many calls, or so many came without a change of the weights. So many are recorded before.
LEAST_CALLS = 4
PATIENCE = 8


class _CannotRecord(Exception):
    """Recording failed, for the reason that is this one's cause."""


class Graphs:
    """The CUDA graphs of one specialisation. `coverage` says whether it has any, and why not.

    run    the flat results of a call, enqueued on the current stream; None if it must be launched
           without a graph
    Thread-safe. A result's memory may be written again by a later call on the same stream once the
    caller has dropped it: work on it that another stream does must be waited for before.
    """

    def __init__(
        self, captured: Captured, plan: Plan, executable: Executable, device: torch.device,
        mutated: Sequence[int], constants: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.captured, self.plan, self.device = captured, plan, device
        self.executable = executable  # what is recorded
        self.mutated, self.constants = mutated, constants
        self.lanes: dict[int, Lane] = {}
        self.lock = threading.Lock()
        self.snapshot: Snapshot | None = None  # the latest call's
        self.records = self.served = self.calls = 0
        self.copying = False  # a graph pays although inputs are copied in and results out
        blockers = find_blockers(captured, plan, device)
        self.coverage = GraphCoverage(False, text_of(blockers), blockers)

    # -- whether there are any

    def prepare(
        self, inputs: Sequence[torch.Tensor], now: Snapshot, choice: dict[str, Any] | None = None
    ) -> None:
        """Record and time the program on copies of these inputs, on the current stream: the
        coverage says what came out. Buffers that the program writes are put back. choice: what was
        decided before (see `choice`), which is done without timing."""
        if self.coverage.blockers:
            return
        with torch.no_grad():
            saved = [(now.values[t], now.values[t].clone()) for t in self.constants]
            try:
                if choice is None:
                    self._prepare(_stream(self.device), inputs, now)
                else:
                    self._repeat(choice, _stream(self.device), inputs, now)
            except _CannotRecord as failure:
                self._off(self._culprit(failure.__cause__ or failure))
            except RuntimeError as error:  # no memory for a second set of inputs
                self._off(self._culprit(error))
            finally:
                for t, value in saved:
                    t.copy_(value)

    def _prepare(self, stream: int, inputs: Sequence[torch.Tensor], now: Snapshot) -> None:
        lane = self._new_lane()
        plain, arena = self.executable, lane.arena
        own, inputs = ([copy_of(x) for x in inputs] for _ in range(2))
        for _ in range(2):
            self._launch(plain, own, now, arena)
        lane.own = mine = self._record(lane, own, now, own)
        lane, mine, early = self._start_early(lane, mine, own, now)
        lane, mine, branches = self._branch(lane, mine, own, now)
        self.lanes[stream] = lane
        runs = (
            lambda: self._launch(plain, own, now, arena),
            mine.graph.replay,
            lambda: self._copied(mine, inputs, now),
        )
        launched, replayed, copied = _medians(runs, self.device)
        gain = 1 - replayed / launched
        figures = f"{replayed:,.0f} µs against {launched:,.0f} µs launched one by one"
        cover = replace(self.coverage, launched_us=launched, replayed_us=replayed, copied_us=copied)
        self.copying = copied < launched * (1 - LEAST_GAIN)
        if gain < LEAST_GAIN or (use_count is None and not self.copying):
            self.coverage = replace(cover, text=f"a CUDA graph would gain nothing: {figures}")
            self.lanes.clear()
            return
        rest = "" if self.copying else ", for inputs at addresses seen before"
        text = f"one CUDA graph{early}{branches}{rest}: {figures}"
        cover = replace(cover, text=text, branches=self.executable.streams)
        self.coverage = replace(cover, graphed=True)
        if not self.copying:
            lane.own = None

    @property
    def choice(self) -> dict[str, Any]:
        """What was decided, in a form that a lock file holds."""
        return graph_choice.written(self.executable, self.copying, self.coverage)

    def _repeat(
        self, choice: dict[str, Any], stream: int, inputs: Sequence[torch.Tensor], now: Snapshot
    ) -> None:
        """Record the program in the form that was chosen."""
        self.coverage = graph_choice.covered(choice, self.captured)
        self.copying = choice["copying"]
        own, arena = [copy_of(x) for x in inputs], self._new_lane().arena
        for _ in range(2):
            self._launch(self.executable, own, now, arena)
        match choice["form"]:
            case graph_choice.EARLY:
                self.executable = replace(self.executable, early=True)
            case graph_choice.BRANCHES:
                branches = branches_of(self.plan)
                self.executable = branched.write(self.captured, self.plan, self.device, branches)
        if not self.coverage.graphed:
            return
        lane = self.lanes[stream] = self._new_lane()
        recorded = self._record(lane, own, now, own)
        lane.own = recorded if self.copying else None

    def _start_early(
        self, lane: Lane, mine: Instance, own: list[torch.Tensor], now: Snapshot
    ) -> tuple[Lane, Instance, str]:
        """Let kernels start while the one before ends, where that is faster. Takes what was
        recorded; returns the lane and the graph to go on with, and what to say of them."""
        if sum(isinstance(s, KernelStep) and s.waits for s in self.plan.steps) < 2:
            return lane, mine, ""
        form = replace(self.executable, early=True)
        lane, mine, found = self._tried(form, lane, mine, own, now)
        if isinstance(found, Blocker):
            return lane, mine, f" (no early starts: {found.operator}: {found.reason})"
        row_us, early_us = found
        self.coverage = replace(self.coverage, row_us=row_us, early_us=early_us)
        if self.executable is not form:
            return lane, mine, ""
        return lane, mine, f", kernels start early ({early_us:,.0f} µs against {row_us:,.0f} µs)"

    def _branch(
        self, lane: Lane, mine: Instance, own: list[torch.Tensor], now: Snapshot
    ) -> tuple[Lane, Instance, str]:
        """The same for branches that run at once, if the program has any."""
        branches = branches_of(self.plan)
        if branches.count == 1:
            return lane, mine, ""
        form = branched.write(self.captured, self.plan, self.device, branches)
        lane, mine, found = self._tried(form, lane, mine, own, now)
        if isinstance(found, Blocker):
            return lane, mine, f" (in a row: {found.operator}: {found.reason})"
        before_us, branched_us = found
        row_us = self.coverage.row_us or before_us
        self.coverage = replace(self.coverage, row_us=row_us, branched_us=branched_us)
        if self.executable is not form:
            return lane, mine, ""
        times = f"{branched_us:,.0f} µs against {before_us:,.0f} µs in a row"
        return lane, mine, f", {branches.count} branches at once ({times})"

    def _tried(
        self, form: Executable, lane: Lane, mine: Instance, own: list[torch.Tensor], now: Snapshot
    ) -> tuple[Lane, Instance, tuple[float, float] | Blocker]:
        """Record the program in another form, too: where that is faster, all is recorded in it from
        now on. The lane and the graph to go on with, and microseconds of `mine` and the new one, or
        why there is none."""
        kept, self.executable = self.executable, form
        try:
            other = self._new_lane()
            other.own = new = self._record(other, own, now, own)
            us = _medians((mine.graph.replay, new.graph.replay), self.device, IN_A_ROW)
        except (_CannotRecord, RuntimeError) as failure:  # or no memory for a second arena
            found = self._culprit(failure.__cause__ or failure)
            self.executable = kept
            return lane, mine, found
        if us[1] > us[0] * (1 - LEAST_GAIN):
            self.executable = kept
            return lane, mine, (us[0], us[1])
        return other, new, (us[0], us[1])

    def _off(self, blocker: Blocker) -> None:
        """No graphs from now on."""
        text = f"no CUDA graph: {blocker.operator}: {blocker.reason}"
        self.coverage = replace(
            self.coverage, graphed=False, text=text, blockers=(*self.coverage.blockers, blocker)
        )
        self.lanes.clear()

    def _culprit(self, error: BaseException) -> Blocker:
        return culprit(error, self.executable.source, self.captured)

    # -- calls

    def run(
        self, inputs: Sequence[torch.Tensor], now: Snapshot, stream: int
    ) -> list[torch.Tensor] | None:
        """See the class. `stream`: the current stream's handle."""
        if not self.coverage.graphed:
            return None
        lane = self._lane(stream)
        if lane is None:
            return None
        with lane.lock:
            self.calls += 1
            if lane.snapshot is not now:
                self._forget(lane, now)
            try:
                return self._serve(lane, inputs, now)
            except _CannotRecord as failure:
                self._off(self._culprit(failure.__cause__ or failure))
                return None

    def _serve(
        self, lane: Lane, inputs: Sequence[torch.Tensor], now: Snapshot
    ) -> list[torch.Tensor] | None:
        pointers = tuple([x.data_ptr() for x in inputs])
        mine = self._lent(lane, pointers)
        if mine is None:
            known = pointers in lane.seen
            if not known:
                lane.seen.append(pointers)
            elif use_count is not None and self._worth_recording():
                mine = self._record(lane, inputs, now, None)
                lane.lent.append(mine)  # the oldest goes
        if mine is not None:
            self.served += 1
            mine.graph.replay()
            self._count_writes(inputs, now)
            return self._results(mine, inputs, now, copied=False)
        if not self.copying:
            return None
        if lane.own is None:
            if not self._worth_recording():
                return None
            own = [copy_of(x) for x in inputs]
            lane.own = self._record(lane, own, now, own)
        self.served += 1
        return self._copied(lane.own, inputs, now)

    @staticmethod
    def _lent(lane: Lane, pointers: tuple[int, ...]) -> Instance | None:
        """A graph on this memory that may run again."""
        for i in lane.lent:
            if i.pointers == pointers and i.free():
                return i
        return None

    def _worth_recording(self) -> bool:
        """What is recorded must be used."""
        return self.records < PATIENCE or self.calls > LEAST_CALLS * self.records

    def _forget(self, lane: Lane, now: Snapshot) -> None:
        """Drop graphs of weights that were replaced since. Of the calls with those, only the ones
        that a graph served are a reason to record another."""
        if self.snapshot is not now:
            self.snapshot, self.calls = now, self.served + 1
        lane.snapshot = now
        if lane.own is not None and lane.own.snapshot is not now:
            lane.own = None
        for i in [i for i in lane.lent if i.snapshot is not now]:
            lane.lent.remove(i)

    def _lane(self, stream: int) -> Lane | None:
        lane = self.lanes.get(stream)
        if lane is None and len(self.lanes) < STREAMS:
            with self.lock:
                lane = self.lanes.setdefault(stream, self._new_lane())
        return lane

    def _new_lane(self) -> Lane:
        arenas = self.executable.arenas
        return Lane(arenas.new() if arenas is not None else None)

    # -- recording and replaying

    def _launch(
        self, executable: Executable, inputs: Sequence[torch.Tensor], now: Snapshot,
        arena: Arena | None,
    ) -> list[torch.Tensor]:  # fmt: skip
        if executable.streams == 1:
            return executable.call(inputs, now, arena)
        with Streams(executable.streams, self.device) as streams:
            return executable.call(inputs, now, arena, streams)

    def _record(
        self, lane: Lane, inputs: Sequence[torch.Tensor], now: Snapshot,
        own: list[torch.Tensor] | None,
    ) -> Instance:  # fmt: skip
        executable, given = self.executable, [x.detach() for x in inputs]
        try:
            r = record(lambda: self._launch(executable, given, now, lane.arena), self.device)
        except (RuntimeError, OnchipError) as error:
            raise _CannotRecord from error
        self.records += 1
        kinds = self.executable.results
        computed = [
            t if kind == "computed" else None for t, kind in zip(r.result, kinds, strict=True)
        ]
        pointers = tuple(x.data_ptr() for x in inputs)
        r.result.clear()  # views of results are made anew by each call: they hold nothing
        # what aliases an input is not held: the caller's memory is the caller's
        return Instance(r.graph, now, pointers, own, computed)

    def _copied(
        self, mine: Instance, inputs: Sequence[torch.Tensor], now: Snapshot
    ) -> list[torch.Tensor]:
        """Replay on copies of the inputs; results are copies, and writes are copied back."""
        assert mine.own is not None
        for to, x in zip(mine.own, inputs, strict=True):
            distinct(to).copy_(distinct(x.detach()))
        mine.graph.replay()
        for i in self.mutated:
            inputs[i].copy_(mine.own[i])
        self._count_writes((), now)
        return self._results(mine, inputs, now, copied=True)

    def _count_writes(self, inputs: Sequence[torch.Tensor], now: Snapshot) -> None:
        """Let PyTorch know what the replay wrote: other programs' derived weights depend on it."""
        if not self.constants and not self.mutated:
            return
        written = [now.values[t] for t in self.constants]
        written += [inputs[i] for i in self.mutated] if inputs else []
        for t in written:
            if not t.is_inference():
                torch.autograd.graph.increment_version(t)

    def _results(
        self, mine: Instance, inputs: Sequence[torch.Tensor], now: Snapshot, copied: bool
    ) -> list[torch.Tensor]:
        """New tensor objects for a call's results: on the graph's memory or a copy of it, and
        aliases of this call's inputs and constants."""
        copies: dict[int, torch.UntypedStorage] = {}  # results that share memory go on doing so
        out: list[torch.Tensor] = []
        for t, how in zip(mine.results, self.captured.results, strict=True):
            if t is not None:
                out.append(again(t, copies) if copied else t.detach())
                continue
            assert how.alias is not None
            kind, key = how.alias
            base = {"input": inputs, "output": out}.get(kind, now.values)[key]
            moved = (how.dtype, how.shape, how.strides, how.shift)
            out.append(base if how.same else view_of(base, *moved))
        return out


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _medians(
    runs: Sequence[Callable[[], object]], device: torch.device, repeats: int = 1
) -> list[float]:
    """Microseconds of each, with the wait for the GPU, in turn. repeats: of each in its turn, so
    that the host's work hides behind the GPU's."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, mine in zip(runs, times, strict=True):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            torch.cuda.synchronize(device)
            mine.append((time.perf_counter() - start) * 1e6 / repeats)
    return [statistics.median(t) for t in times]
