"""Calls of a program side by side, captures alone.

torch.export puts fake tensors into the model while it traces, so nothing may read the model's
weights at that time: a capture waits for the calls that run and holds back the next ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """`with gate:` around a call, in as many threads as there are; `with gate.alone():` around a
    capture. A thread may capture within its own call, and call within its own capture."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._inside = 0
        self._waiting = 0
        self._mine = threading.local()

    def __enter__(self) -> None:
        with self._lock:  # the condition's, without its own methods: each call comes by
            self._inside += 1
        self._mine.depth = getattr(self._mine, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        self._mine.depth -= 1
        with self._lock:
            self._inside -= 1
            if self._waiting and not self._inside:
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread is inside, and let none in until the block ends."""
        own = getattr(self._mine, "depth", 0)
        with self._condition:
            self._inside -= own
            if self._waiting:  # another capture may have waited for this thread's calls only
                self._condition.notify_all()
            try:
                while self._inside:
                    self._waiting += 1
                    try:
                        self._condition.wait()
                    finally:
                        self._waiting -= 1
                yield
            finally:
                self._inside += own
