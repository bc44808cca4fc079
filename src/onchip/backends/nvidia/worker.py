"""The loop of a process that compiles for its parent (pool.py): a job a line, an answer a line.

The compiler may abort, or never end: then this process is lost and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

Job = dict[str, Any]


def serve(compile_job: Callable[[Job], Job]) -> None:
    """Answer the jobs of standard input until it ends; an exception is the answer "error"."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the compiler prints is no answer
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        used = math.ceil(time.process_time() + job["limit_s"])
        resource.setrlimit(resource.RLIMIT_CPU, (used, resource.RLIM_INFINITY))
        # if the parent is gone there is nobody else to end a compilation that never does
        signal.alarm(math.ceil(job["wall_s"]) + 10)
        try:
            answer = compile_job(job)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        print(json.dumps(answer), file=answers, flush=True)


def processor_s() -> float:
    """Processor time of this process and of the tools that it has run."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system
