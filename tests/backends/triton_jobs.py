"""Generated Triton kernels with the memory that they work on: interpreted here, or on a GPU.

All kernels of a test process are interpreted in one child process, since importing PyTorch and
Triton takes seconds and TRITON_INTERPRET holds for a whole process. Importing this file needs no
Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tests.fusion.harness import Program

from onchip.backends.cpp.run import region_for
from onchip.backends.nvidia.build import Built
from onchip.backends.triton import spelling
from onchip.backends.triton.build import build_all
from onchip.backends.triton.source import TritonSource
from onchip.errors import CompilerError
from onchip.fusion.layout import contiguous
from onchip.fusion.refusal import Refusal
from onchip.fusion.staging import Staged, stage
from onchip.ir.expr import Tensor
from onchip.planning.generators.triton import gpu_of

ROOT = Path(__file__).parents[2]
MARGIN = 4096  # elements around each tensor: what reads or writes outside shows
POISON = 0xFF  # every byte: a NaN, or -1

POINTED = {p: getattr(torch, d.label) for d, p in spelling.POINTERS.items()}

Strides = tuple[int, ...]
Run = Callable[[Sequence[torch.Tensor]], object]


@dataclass(frozen=True, eq=False)
class Job:
    """A kernel, its inputs' values (in their element types), and its outputs' types and shapes;
    all of them lie as the strides say. wanted: the numbers of the outputs that are asked for
    (None: all)."""

    name: str
    source: TritonSource
    inputs: tuple[tuple[torch.Tensor, Strides], ...]
    outputs: tuple[tuple[torch.dtype, tuple[int, ...], Strides], ...]
    wanted: tuple[int, ...] | None = None


def staged_of(p: Program) -> tuple[tuple[Staged, ...], dict[Tensor, Strides]]:
    """A program's stages, and the strides of its tensors."""
    region = region_for(p.outputs, list(p.values))
    staged = stage(region)
    assert not isinstance(staged, Refusal), staged
    strides = {t: contiguous(t.shape) for t in (*region.inputs, *region.tensors)}
    return staged, strides | p.strides


def job_of(name: str, p: Program, strides: dict[Tensor, Strides], source: TritonSource) -> Job:
    """A kernel of the program with the program's values."""

    def kind(t: Tensor) -> torch.dtype:
        return getattr(torch, t.dtype.label)

    laid = strides | source.laid_out
    given = [(torch.from_numpy(np.array(p.values[t])).to(kind(t)), laid[t]) for t in source.inputs]
    made = [(kind(t), t.shape, laid[t]) for t in source.outputs]
    wanted = tuple(source.outputs.index(t) for t in p.outputs)
    return Job(name, bare(source), tuple(given), tuple(made), wanted)


def bare(source: TritonSource) -> TritonSource:
    """Without the tensors, which are not needed to run it and belong to this process."""
    return replace(source, inputs=(), outputs=(), laid_out={})


def poisoned(
    dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory with margins (bytes), and the tensor in its middle."""
    empty = 0 in shape
    last = -1 if empty else sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    size = dtype.itemsize * (last + 1 + 2 * MARGIN)
    memory = torch.full((size,), POISON, dtype=torch.uint8, device=device)
    typed = memory.view(dtype)
    return memory, torch.as_strided(typed, tuple(shape), tuple(strides), MARGIN)


def execute(job: Job, run: Run, device: str = "cpu") -> list[torch.Tensor]:
    """The outputs, on the CPU. AssertionError if anything else was written."""
    given = [(poisoned(x.dtype, x.shape, strides, device), x) for x, strides in job.inputs]
    for (_, view), x in given:
        view.copy_(x)
    before = [memory.clone() for (memory, _), _ in given]
    made = [poisoned(*o, device) for o in job.outputs]
    spaces = []
    pointers = job.source.pointers[len(given) + len(made) :]
    for w, pointer in zip(job.source.workspace, pointers, strict=True):
        dtype = POINTED[pointer]
        memory, view = poisoned(dtype, [w.nbytes // dtype.itemsize], [1], device)
        if w.zeroed:
            view.zero_()
        spaces.append((memory, view, w.zeroed))
    run([*(v for (_, v), _ in given), *(v for _, v in made), *(v for _, v, _ in spaces)])
    results = [view.clone().cpu() for _, view in made]
    for (memory, _), old in zip((g for g, _ in given), before, strict=True):
        assert torch.equal(memory, old), f"{job.name} wrote an input"
    for memory, view in made:
        _poison(view)
        assert bool((memory == POISON).all()), f"{job.name} wrote outside of its output"
    for memory, view, zeroed in spaces:
        assert not (zeroed and bool(view.any())), f"{job.name} left a workspace that is not zero"
        _poison(view)
        assert bool((memory == POISON).all()), f"{job.name} wrote outside of its workspace"
    return results if job.wanted is None else [results[n] for n in job.wanted]


def _poison(view: torch.Tensor) -> None:
    # as integers: copying a bool writes 0 or 1
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    view.view(integers[view.element_size()]).fill_(-1)


# ---- the interpreter's process -----------------------------------------------------------------

_child: list[subprocess.Popen[str]] = []  # this process's, if it has begun one that still runs


def _interpreter(folder: Path) -> subprocess.Popen[str]:
    """The process that interprets, begun with the first jobs; it ends when its input does, with
    this process. What it complains of is in the file `complaints` of the folder that was first."""
    if _child and _child[0].poll() is None:
        return _child[0]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "tests.backends.triton_child"]
    with (folder / "complaints").open("w") as complaints:
        made = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=complaints,
        )  # fmt: skip
    _child[:] = [made]
    return made


def interpret(jobs: Sequence[Job], folder: Path) -> list[list[torch.Tensor] | str]:
    """The outputs of each job, or what went wrong in it."""
    if not jobs:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(list(jobs), folder / "jobs.pt")
    child = _interpreter(folder)
    assert child.stdin is not None
    assert child.stdout is not None
    print(folder, file=child.stdin, flush=True)
    try:
        answer = child.stdout.readline()
    except BaseException:  # the time of a test is over: what follows gets a process of its own
        child.kill()
        child.wait()
        raise
    if answer.strip() != str(folder):
        running = folder / "running.txt"
        where = running.read_text() if running.exists() else "no job"
        raise AssertionError(f"the interpreter ended with exit code {child.wait()} in {where}")
    return torch.load(folder / "results.pt", weights_only=False)


# ---- a GPU -------------------------------------------------------------------------------------


def launch_on_gpu(jobs: Sequence[Job]) -> list[list[torch.Tensor] | str]:
    """The outputs of each job on the current GPU, or what went wrong in it. All kernels are
    compiled before, in as many processes as there are cores."""
    built = build_all([j.source for j in jobs], gpu_of(torch.device("cuda")))
    return [_launched(j, b) for j, b in zip(jobs, built, strict=True)]


def _launched(job: Job, built: Built | CompilerError) -> list[torch.Tensor] | str:
    if isinstance(built, CompilerError):
        return str(built)
    try:
        launcher = built.launcher()

        def run(tensors: Sequence[torch.Tensor]) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            launcher.run([t.data_ptr() for t in tensors], stream)
            torch.cuda.synchronize()

        return execute(job, run, "cuda")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
