"""Work on a GPU recorded as a CUDA graph. All that depends on PyTorch's capturing is here."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# PyTorch's random generators know of one capture at a time.
_lock = threading.RLock()
# The streams of each device that are recorded on. PyTorch hands out 32 streams in turn: with new
# ones for each recording, another thread would soon work on a stream that is being recorded.
_streams: dict[int, list[torch.cuda.Stream]] = {}


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """A CUDA graph and what the recorded call returned: tensors in the graph's own memory, which
    hold nothing until the first replay and are written by each. (Of memory that two graphs shared,
    what one works in may be what the other has returned.)"""

    graph: torch.cuda.CUDAGraph
    result: Any

    def replay(self) -> None:
        """Enqueue it on the current stream."""
        self.graph.replay()


def record(run: Callable[[], T], device: torch.device) -> Recording:
    """Record what `run` launches on the current stream; nothing runs yet. `run` must have been
    called before: what libraries do at their first call can't be recorded.

    Raises what `run` raises: RuntimeError where an operator waits for the GPU, copies from or to
    the CPU's pageable memory, or the like. Other threads may use the GPU meanwhile, but before
    PyTorch 2.14 not draw random numbers from its default generator, which knows of the capture.
    """
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.device(device), _lock, _no_collection(), torch.inference_mode(False):
        try:
            graph, result = _capture(run, pool)
        except BaseException:
            _streams.clear()
            _recover(device, pool)
            raise
    return Recording(graph, result)


def _capture(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    graph, stream = torch.cuda.CUDAGraph(), _own_stream(0)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream), _own_workspaces():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = run()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error says more
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, result


def _own_stream(n: int) -> torch.cuda.Stream:
    """The n-th stream of the current device that is recorded on."""
    mine = _streams.setdefault(torch.cuda.current_device(), [])
    while len(mine) <= n:
        mine.append(torch.cuda.Stream())
    return mine[n]


class Streams:
    """Streams of the branches of one recorded call, inside which this is a context. Number 0 is the
    one that is recorded on; another becomes part of the recording by what it waits for first, and
    number 0 must wait for its last work in the end."""

    def __init__(self, count: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            own = [_own_stream(n) for n in range(1, count)]
            self.all = [torch.cuda.current_stream(), *own]
        self.used: set[int] = set()

    def go(self, n: int, *events: torch.cuda.Event) -> None:
        """Make a stream current, behind these events."""
        for e in events:
            self.all[n].wait_event(e)
        torch.cuda.set_stream(self.all[n])
        self.used.add(n)

    def mark(self) -> torch.cuda.Event:
        """An event behind the current stream's work so far."""
        event = torch.cuda.Event()
        event.record()
        return event

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # a recording can't end before its streams have joined
            with contextlib.suppress(RuntimeError):
                for n in self.used:
                    self.all[0].wait_stream(self.all[n])
        torch.cuda.set_stream(self.all[0])


def _recover(device: torch.device, pool: Any) -> None:
    """After a capture that failed PyTorch's allocator and random generator believe that it goes on
    (PyTorch 2.11): end it for the one, and let the other see one that succeeds."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with contextlib.suppress(RuntimeError):  # it was not reached, or has ended
            end(torch.cuda.current_device() if device.index is None else device.index, pool)
    with contextlib.suppress(RuntimeError):
        word = torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        _capture(word.zero_, torch.cuda.graph_pool_handle())


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """cuBLAS keeps a workspace for each stream. One that was allocated before, or is kept for
    later, could be freed while the graph lives: inside, it gets one of the graph's own memory."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside: freeing a GPU's objects may end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
