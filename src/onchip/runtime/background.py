"""Compiling beside the calls of the original module (Settings(start="eager")).

Only the capture runs in the caller's thread: PyTorch's tracing is not safe beside calls of the
model. Planning, the compilers and the timing run in one thread of the program, inside its gate like
a call, so no other capture comes between. What would be seen from outside does not run there: a
program that draws random numbers or writes to buffers, whose state the timing puts back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

from onchip.capture import schema
from onchip.capture.captured import Captured
from onchip.planning.plan import Plan

COMPILING = "the program is compiled in the background: the original module runs until it is ready"


@dataclass(frozen=True, eq=False, slots=True)
class Begun:
    """A captured program. finish: plans it on these args and kwargs, which it does not change."""

    original: Captured
    finish: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Captured, Plan]]


def leaves_no_trace(captured: Captured) -> bool:
    """Whether running the program changes nothing: no input, no buffer, no attribute of the model
    and no generator of random numbers (of operators that are not PyTorch's own nobody knows)."""
    calls = [n.call for n in captured.graph.nodes]
    if captured.graph.mutations or captured.python_state:
        return False
    return all(c.target.startswith("aten.") and not schema.draws(c) for c in calls)


@dataclass(eq=False)
class Worker:
    """One thread that does what it is given, in order. When the process ends it is waited for."""

    _pool: futures.ThreadPoolExecutor | None = None
    _pending: list[futures.Future] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return any(not f.done() for f in list(self._pending))

    def submit(self, work: Callable[[], None]) -> None:
        """`work` must handle its own errors."""
        if self._pool is None:
            self._pool = futures.ThreadPoolExecutor(1, thread_name_prefix="onchip")
        self._pending = [f for f in self._pending if not f.done()]
        self._pending.append(self._pool.submit(work))

    def wait(self, timeout: float | None) -> bool:
        """Whether all work is done, after `timeout` seconds at most."""
        return not futures.wait(list(self._pending), timeout).not_done


def failure_of(error: BaseException) -> str:
    """What to say of an error of the background, once: as a warning, and for program.notes."""
    text = " ".join(str(error).split())
    reason = f"compiling failed, so the original module runs: {type(error).__name__}: {text}"
    warnings.warn(f"onchip: {reason}", stacklevel=2)
    return reason
