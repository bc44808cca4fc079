"""Runs in a process of its own: generated Triton kernels interpreted, or compiled for a GPU.

    python -m tests.backends.triton_child interpret|compile FOLDER

FOLDER holds jobs.json (a list of jobs), and for each job NAME.py and NAME.npz (its inputs).
Interpreting needs TRITON_INTERPRET=1 in the environment and writes NAME.out.npz; compiling writes
compiled.json: for each job its figures, or the error's text.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onchip.backends.triton.build import compile_for, launch, load
from onchip.errors import CompilerError

MARGIN = 4096  # elements of NaN on both sides: what reads or writes outside shows


def placed(shape: list[int], strides: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN memory with margins, and a tensor in its middle."""
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = torch.full((last + 1 + 2 * MARGIN,), float("nan"))
    return memory, torch.as_strided(memory, shape, strides, MARGIN)


def interpret(folder: Path, job: dict[str, Any]) -> None:
    values = np.load(folder / f"{job['name']}.npz")
    tensors = []
    for n, (shape, strides) in enumerate(job["inputs"]):
        _, view = placed(shape, strides)
        view.copy_(torch.from_numpy(values[f"in{n}"]))
        tensors.append(view)
    outputs = [placed(shape, strides) for shape, strides in job["outputs"]]
    tensors += [view for _, view in outputs]
    launch(load(folder / f"{job['name']}.py"), tensors, job["tiles"])
    results = {f"out{n}": view.clone().numpy() for n, (_, view) in enumerate(outputs)}
    for memory, view in outputs:
        view.fill_(float("nan"))
        assert bool(memory.isnan().all()), f"{job['name']} wrote outside its output"
    np.savez(folder / f"{job['name']}.out.npz", **results)


def compiled(folder: Path, job: dict[str, Any]) -> dict[str, Any] | str:
    pointers = ["*fp32"] * (len(job["inputs"]) + len(job["outputs"]))
    try:
        return asdict(compile_for(folder / f"{job['name']}.py", pointers, 90))
    except CompilerError as error:
        return str(error)


def main(mode: str, folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text())
    if mode == "interpret":
        for job in jobs:
            interpret(folder, job)
    else:
        made = {j["name"]: compiled(folder, j) for j in jobs if not j["broken"]}
        (folder / "compiled.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
