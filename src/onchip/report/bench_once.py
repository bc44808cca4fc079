"""Times of single calls on a GPU: a CUDA graph of one call, the last cache flushed before it.

What triton.testing.do_bench measures of a graph's replay, but of all forms in turn: before each
replay a buffer larger than the last cache is written, and the host runs ahead meanwhile, so
launching costs it nothing. What is left is a start and an end that even an empty kernel has
(`empty_us`): 4.5 microseconds on an H200.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping

import torch

from onchip.report.bench_replay import Call, captured, reason

FLUSH = 256 << 20  # bytes that are written before each replay
WARM = 5  # rounds that do not count
ROUNDS = 100


def medians(
    forms: Mapping[str, Call], rounds: int = ROUNDS
) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds of a call of each form, the median of rounds in which all forms take turns; and
    why others have none: their capture failed."""
    graphs, failed = recorded(forms)
    return timed(graphs, rounds), failed


def recorded(forms: Mapping[str, Call]) -> tuple[dict[str, Call], dict[str, str]]:
    """What replays each form's CUDA graph of one call; and why others have none."""
    graphs: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for name, call in forms.items():
        try:
            graphs[name] = captured([call], 1).recording.replay
        except Exception as error:  # a peer that can't be captured has no graph
            failed[name] = reason(error)
            torch.cuda.synchronize()
    return graphs, failed


def timed(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """The same for what replays a graph, or launches its work without one."""
    buffer = _buffer()
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(WARM + rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            buffer.zero_()
            start.record()
            call()
            end.record()
            spans[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) * 1e3 for start, end in found[WARM:])
        for name, found in spans.items()
    }


def _buffer() -> torch.Tensor:
    return torch.empty(FLUSH // 4, dtype=torch.int32, device="cuda")


@functools.cache
def empty_us() -> float:
    """What a kernel without work takes here; once a process."""
    found, failed = medians({"empty": lambda: torch.cuda._sleep(0)})
    if failed:
        raise RuntimeError(f"an empty kernel can't be captured in a CUDA graph: {failed['empty']}")
    return found["empty"]
