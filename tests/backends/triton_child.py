"""Runs in a process of its own, with TRITON_INTERPRET=1: interprets jobs (triton_jobs.py).

    python -m tests.backends.triton_child

reads a folder a line. It holds jobs.pt; its results.pt gets the outputs of each job, or the text of
what went wrong, and then the folder is written as a line.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tests.backends.triton_interpreter import repair
from tests.backends.triton_jobs import Job, execute
from tests.backends.triton_together import launch_together


def launch(job: Job, path: Path, tensors: Sequence[torch.Tensor]) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for one in job.source.launches:
        if one.programs:
            function = getattr(module, one.name)
            arguments = [tensors[n] for n in one.arguments]
            if one.cluster > 1 or any(w.zeroed for w in job.source.workspace):
                # programs wait for each other
                launch_together(function, one.programs, arguments, one.cluster)
                spaces = tensors[len(tensors) - len(job.source.workspace) :]
                for w, space in zip(job.source.workspace, spaces, strict=True):
                    if not w.zeroed:
                        space.fill_(float("nan") if space.is_floating_point() else -1)
                # once more, with what the first launch left in the counters
                launch_together(function, one.programs, arguments, one.cluster)
            else:
                function[(one.programs,)](*arguments)


def run(job: Job, path: Path) -> list[torch.Tensor] | str:
    path.write_text(job.source.text)
    path.with_name("running.txt").write_text(f"{job.name} ({path})")
    try:
        return execute(job, lambda tensors: launch(job, path, tensors))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        lines = [f"{f.lineno}: {f.line}" for f in where if f.filename == str(path)]
        cause = error.__cause__ or error
        return "\n".join([f"{type(error).__name__}: {error} ({cause})", *lines])


def interpret(folder: Path) -> None:
    jobs: list[Job] = torch.load(folder / "jobs.pt", weights_only=False)
    results = [run(job, folder / f"job{n}.py") for n, job in enumerate(jobs)]
    torch.save(results, folder / "results.pt")


def main() -> None:
    repair()
    np.seterr(all="ignore")
    answers, sys.stdout = sys.stdout, sys.stderr  # what a kernel prints is no answer
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        interpret(folder)
        print(folder, file=answers, flush=True)


if __name__ == "__main__":
    main()
