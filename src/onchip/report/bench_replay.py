"""Times of calls on a GPU: CUDA graphs over rotated inputs, replayed in turn.

A call is captured once for each of several sets of inputs whose size is a multiple of the last
cache, so that no call finds its data there; graphs of all forms are replayed in rounds, with events
around each replay. So the host costs nothing, drift of the clocks meets all alike, and what is
left of launching is a graph's node (`node_us`).
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onchip.capture.observe import clone_storage
from onchip.planning.recording import Recording, record

Call = Callable[[], object]

CACHES = 4  # rotated sets together are so many times the last cache
MOST_SETS = 256
LEAST_MS = 3.0  # of one replay: its start and end, some microseconds, are then nothing
MOST_REPEATS = 2000
SPIN = 200_000  # cycles that the GPU waits before a replay, while the host enqueues it
ROUNDS = 15
CEILING_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Graphed:
    """A CUDA graph of `calls` calls, with what they returned: its memory."""

    recording: Recording
    calls: int

    def milliseconds(self) -> float:
        """Of one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN)
        start.record()
        self.recording.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def sets_for(nbytes: int, cache_bytes: int) -> int:
    """How many input sets of `nbytes` (outputs included) to rotate: one where a single one is much
    larger than the cache."""
    return max(1, min(math.ceil(CACHES * cache_bytes / max(nbytes, 1)), MOST_SETS))


def cache_bytes(device: str = "cuda") -> int:
    """The GPU's last cache."""
    return torch.cuda.get_device_properties(device).L2_cache_size


def rotated(inputs: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    """`count` sets with the same values and strides in other memory; the first is the given one."""

    def again() -> tuple[Any, ...]:
        return tuple(clone_storage(x) if isinstance(x, torch.Tensor) else x for x in inputs)

    return [tuple(inputs), *(again() for _ in range(count - 1))]


def medians(
    forms: Mapping[str, Sequence[Call]], rounds: int = ROUNDS
) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds of a call of each form (one callable for each input set), the median of rounds
    in which all forms take turns; and why others have none: their capture failed."""
    graphs, failed = {}, {}
    for name, calls in forms.items():
        try:
            graphs[name] = graphed(calls)
        except Exception as error:  # a peer or a candidate that can't be captured has no time
            failed[name] = reason(error)
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, g in graphs.items():
            times[name].append(g.milliseconds() * 1e3 / g.calls)
    return {name: statistics.median(t) for name, t in times.items()}, failed


def reason(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def graphed(calls: Sequence[Call]) -> Graphed:
    """The calls, in turn, as one graph that runs for LEAST_MS at least."""
    once = captured(calls, 1)
    once.milliseconds()
    repeats = math.ceil(LEAST_MS / max(once.milliseconds(), 1e-4))
    repeats = max(1, min(repeats, MOST_REPEATS // len(calls)))
    if repeats == 1:
        return once
    del once
    again = captured(calls, repeats)
    again.milliseconds()
    return again


def captured(calls: Sequence[Call], repeats: int) -> Graphed:
    """The calls, in turn, `repeats` times, as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # handles, workspaces, compiled code: nothing of it may be captured
            for call in calls:
                call()
    torch.cuda.synchronize()
    kept: list[object] = [None for _ in calls]

    def all_calls() -> list[object]:
        for _ in range(repeats):
            for n, call in enumerate(calls):
                kept[n] = call()  # a result lives until the same set's next call
        return kept

    recording = record(all_calls, torch.device("cuda", torch.cuda.current_device()))
    return Graphed(recording, repeats * len(calls))


def free() -> None:
    """Give memory that nothing holds any more back, for the next case."""
    gc.collect()
    torch.cuda.empty_cache()


@functools.cache
def copy_gbs(nbytes: int = 1 << 30) -> float:
    """The copy ceiling: GB/s, read plus written, between two buffers of `nbytes`: by the driver's
    copy or a pointwise kernel, whichever is faster (the driver's copy of 1 GiB reached 2,700 GB/s
    on an H200 where kernels reach 4,300). The best of several attempts, once a process: one of them
    gave a tenth less."""
    source = torch.randint(0, 1 << 30, (nbytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    ways = {
        "copy": [lambda: target.copy_(source)],
        "kernel": [lambda: torch.bitwise_not(source, out=target)],
    }
    best = math.inf
    for _ in range(CEILING_ATTEMPTS):
        found, failed = medians(ways, rounds=9)
        if failed:
            raise RuntimeError(f"a copy can't be captured in a CUDA graph: {failed}")
        best = min(best, *found.values())
    return 2 * nbytes / best / 1e3


def node_us() -> float:
    """What a kernel of next to no work takes as a node of a graph of dependent ones."""
    t = torch.ones(8, device="cuda")
    found, failed = medians({"node": [lambda: torch.relu_(t)]}, rounds=9)
    if failed:
        raise RuntimeError(f"an operator can't be captured in a CUDA graph: {failed['node']}")
    return found["node"]
