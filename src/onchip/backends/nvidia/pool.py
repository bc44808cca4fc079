"""Child processes that compile: kept for a while, ended when they hang, replaced when they die."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onchip.errors import CompilerError

Job = dict[str, Any]
IDLE_S = 30.0  # a process that nobody asked for so long is ended
# A busy machine gives a process a part of a processor: limits are of processor time, and of so many
# times as much time by the clock for one that only sleeps.
WAITS = 5
_STARTING_S = 120.0  # what importing the compiler may take
_SOURCES = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Compiler:
    """name: for people; module: that is run in a process (worker.serve); environment: variables
    beyond the parent's, given a folder that lives as long as the process."""

    name: str
    module: str
    environment: Callable[[str], Mapping[str, str]] = lambda folder: {}


class NotStarted(CompilerError):
    """A process never came to its first job, so that nothing is known of the job."""


class Worker:
    """One process of a compiler."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        self.scratch = tempfile.TemporaryDirectory(prefix="onchip-compiler-")
        self.ready = False
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_SOURCES), *(p for p in sys.path if p)]),
            **compiler.environment(self.scratch.name),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", compiler.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            start_new_session=True,  # so that its tools can be ended with it
        )

    def ask(self, job: Job, limit_s: float) -> Job:
        """The answer; CompilerError if there is none after `limit_s` of processor time (or WAITS
        times as long), or the process dies."""
        if not self.ready:
            try:
                self._answer(_STARTING_S, "starting")
            except CompilerError as error:
                raise NotStarted(str(error)) from error
            self.ready = True
        what = job.get("what") or (
            f"compiling {job['name']} of {job['source']} for sm_{job['capability']}"
        )
        self.log.seek(0)  # the process writes at this position too
        self.log.truncate()
        assert self.process.stdin is not None
        # a process that is dead by now gives no answer, which says so
        with contextlib.suppress(OSError):
            task = {**job, "limit_s": limit_s, "wall_s": WAITS * limit_s}
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()
        try:
            return self._answer(WAITS * limit_s, what)
        except CompilerError:
            if self.process.returncode == -signal.SIGXCPU:
                took = f"{self.compiler.name} took more than {limit_s:g} s of processor time {what}"
                raise CompilerError(took) from None
            raise

    def _answer(self, limit_s: float, what: str) -> Job:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                self.end()
                raise CompilerError(f"{self.compiler.name} took more than {limit_s:g} s {what}")
        line = self.process.stdout.readline()
        try:
            return json.loads(line)
        except ValueError:
            self.end(5.0)  # its death may take a moment, and tells how
            printed = self._printed()
            raise CompilerError(
                f"{self.compiler.name} died ({self._death()}) {what}: {printed}"
            ) from None

    def _death(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            return signal.Signals(-code).name
        return f"exit code {code}"

    def _printed(self) -> str:
        self.log.seek(0)
        text = self.log.read().decode(errors="replace").strip()
        return text[-600:] or "it printed nothing"

    def end(self, grace_s: float = 0.05) -> None:
        """End the process and its tools, by force after `grace_s`."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if self.process.poll() is None:
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.scratch.cleanup()


# ---- processes that wait for work --------------------------------------------------------------

_idle: list[tuple[float, Worker]] = []
_lock = threading.Lock()


def run_all(
    compiler: Compiler, jobs: Sequence[Job], limit_s: float, workers: int
) -> list[Job | CompilerError]:
    """The compiler's answer to each job, or why there is none. workers: processes at a time, at
    most; limit_s: seconds of processor time for one job."""

    def run(job: Job) -> Job | CompilerError:
        try:
            return ask(compiler, job, limit_s)
        except CompilerError as error:
            return error

    with ThreadPoolExecutor(max(1, min(workers, len(jobs)))) as threads:
        answers = list(threads.map(run, jobs))
    _end_later()
    return answers


def ask(compiler: Compiler, job: Job, limit_s: float) -> Job:
    """The compiler's answer to one job; CompilerError, and its process has ended, if there is none.
    A process that answers that it is `spent` is ended, too."""
    worker = _borrow(compiler)
    try:
        answer = worker.ask(job, limit_s)
    except BaseException:
        worker.end()
        raise
    if answer.get("spent"):
        worker.end()
    else:
        _give_back(worker)
    return answer


def prepare(compiler: Compiler) -> None:
    """Start a process for the next job, if none waits, and don't wait for it."""
    _give_back(_borrow(compiler))
    _end_later()


def _end_later() -> None:
    timer = threading.Timer(IDLE_S + 1, end_idle, [IDLE_S])
    timer.daemon = True
    timer.start()


def _borrow(compiler: Compiler) -> Worker:
    with _lock:
        mine = [x for x in _idle if x[1].compiler == compiler]
        for waiting in reversed(mine):
            _idle.remove(waiting)
            if waiting[1].process.poll() is None:
                return waiting[1]
            waiting[1].end()
    return Worker(compiler)


def _give_back(worker: Worker) -> None:
    with _lock:
        _idle.append((time.monotonic(), worker))


def end_idle(for_s: float = 0.0) -> None:
    """End the processes that have waited for `for_s` seconds."""
    now = time.monotonic()
    with _lock:
        old = [w for t, w in _idle if now - t >= for_s]
        _idle[:] = [(t, w) for t, w in _idle if now - t < for_s]
    for worker in old:
        worker.end()


atexit.register(end_idle)
os.register_at_fork(after_in_child=_idle.clear)  # they are the parent's
