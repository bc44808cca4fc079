"""Timing side by side, by the host's clock or by a GPU's: warm up, interleave, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from onchip.errors import OnchipError
from onchip.planning.recording import record

# Threads of an OpenMP or ONNX Runtime pool spin for some milliseconds after their work, and would
# take a core from another library's function that is timed next.
SETTLE_S = 0.03

Function = Callable[[], object]
Timed = Callable[[], float]  # runs a function and returns the seconds that it took


class Clock(Protocol):
    def ready(self, function: Function) -> Timed:
        """Warm up: the function has run when this returns."""
        ...


@dataclass(frozen=True, slots=True)
class HostClock:
    """The host's time for one call."""

    def ready(self, function: Function) -> Timed:
        function()

        def timed() -> float:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start

        return timed


HOST = HostClock()

# A replay of a CUDA graph should take so long that its start is no part of the result.
REPLAY_S, MOST_REPEATS = 2e-4, 64
# More than the last cache of any GPU: writing it leaves nothing of the last round's data there.
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, eq=False, slots=True)
class DeviceClock:
    """A GPU's own time for one call, between two events. The call is captured in a CUDA graph as
    often as it takes to fill REPLAY_S, so that what the host needs to launch is no part of it; what
    can't be captured (it synchronises) is launched between the events. Before each round, the
    cache is filled with other data: a call that is repeated in a graph finds in the cache what it
    would find behind an operator that has just written it, a long one reads memory."""

    device: torch.device

    def ready(self, function: Function) -> Timed:
        with torch.cuda.device(self.device):
            _warm(function)
        one = _recorded(function, 1, self.device)
        if one is None:
            return self._between_events(function)
        once = self._between_events(one)
        seconds = min(once() for _ in range(3))
        repeats = min(round(REPLAY_S / max(seconds, 1e-7)), MOST_REPEATS)
        more = _recorded(function, repeats, self.device) if repeats > 1 else None
        if more is None:
            return once
        replay = self._between_events(more)
        replay()
        return lambda: replay() / repeats

    def _between_events(self, function: Function) -> Timed:
        def timed() -> float:
            with torch.cuda.device(self.device):
                # read, since lines that were written would leave the cache while the function runs;
                # taken anew each time: kept, it would be memory that the program can't have
                torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device).sum()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                function()
                end.record()
                end.synchronize()
                return start.elapsed_time(end) / 1e3

        return timed


def _warm(function: Function) -> None:
    """Run it on a stream of its own, as capturing asks for: libraries choose and allocate."""
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        function()
        function()
    torch.cuda.current_stream().wait_stream(own)
    torch.cuda.synchronize()


def _recorded(function: Function, repeats: int, device: torch.device) -> Function | None:
    """Replays a CUDA graph of so many calls; None if it can't be captured."""

    def run() -> None:
        for _ in range(repeats):
            function()

    try:
        return record(run, device).replay
    except (RuntimeError, OnchipError):
        return None


def clock_for(device: torch.device) -> Clock:
    """What times the work on a device."""
    return DeviceClock(device) if device.type == "cuda" else HOST


def samples(
    functions: Sequence[Function],
    budget_s: float,
    most: int = 50,
    least: int = 3,
    settle: bool = False,
    clock: Clock = HOST,
) -> list[list[float]]:
    """Seconds of each function in every round, measured in turn so that drift of the machine's
    speed meets all alike. Each is called once before, unmeasured. Stops after `budget_s` seconds in
    total, but not before `least` rounds. settle: functions of different libraries, each given a
    pause and an unmeasured call before its turn."""
    return _rounds([clock.ready(f) for f in functions], budget_s, most, least, settle)


def rounds(timed: Sequence[Timed], count: int, budget_s: float | None = None) -> list[list[float]]:
    """Seconds of each in so many rounds, or in those that are begun within the budget."""
    if budget_s is not None:
        return _rounds(timed, budget_s, count, 0)
    return _rounds(timed, 0.0, least=count)


def _rounds(
    timed: Sequence[Timed], budget_s: float, most: int = 50, least: int = 3, settle: bool = False
) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in timed]
    end = time.perf_counter() + budget_s
    while len(times[0]) < most and (len(times[0]) < least or time.perf_counter() < end):
        for f, mine in zip(timed, times, strict=True):
            if settle:
                time.sleep(SETTLE_S)
                f()
            mine.append(f())
    return times


def shortlist(timed: Sequence[Timed], budget_s: float, keep: float = 1.5) -> list[list[float]]:
    """Seconds of each in the rounds that it took part in: the first three, and until the budget is
    spent if it was not clearly slower in those (by more than `keep`). The n-th ones of two were
    measured in turn."""
    times = _rounds(timed, 0.0, least=3)
    limit = min(min(t) for t in times) * keep
    again = [i for i, t in enumerate(times) if min(t) <= limit]
    for i, t in zip(again, _rounds([timed[i] for i in again], budget_s), strict=True):
        times[i] += t
    return times


def fastest(functions: Sequence[Function], budget_s: float, clock: Clock = HOST) -> list[float]:
    """Seconds of each function in its best round: kernels do the same work every time, so whatever
    took longer was something else on the machine, and a choice must not depend on that."""
    return [min(t) for t in shortlist([clock.ready(f) for f in functions], budget_s)]
