"""Engine kernels compiled by NVRTC: no GPU is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cuda.bindings import nvrtc

from onchip.backends import cuda
from onchip.backends.cuda.kernel import emit
from onchip.backends.cuda.problem import Config, Problem
from onchip.backends.cuda.source import CudaSource
from onchip.fusion.layout import contiguous
from onchip.fusion.machine import GPUS

HEADERS = Path(cuda.__file__).parent / "include"
OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17", b"--ptxas-options=-v")


@dataclass(frozen=True)
class Compiled:
    """registers of a thread; spilled: bytes; log: what the compilers said."""

    registers: int
    spilled: int
    log: str


def source_of(p: Problem, c: Config) -> CudaSource:
    tensors = [p.x, p.w, *(r.tensor for r in p.reads), *(r.tensor for r in p.results)]
    source = emit(p, c, GPUS["h200"], {t: contiguous(t.shape) for t in tensors})
    assert isinstance(source, CudaSource), source
    return source


def compiled(text: str) -> Compiled:
    headers = {f"onchip/{f.name}": f.read_bytes() for f in sorted(HEADERS.rglob("*.cuh"))}
    _, program = nvrtc.nvrtcCreateProgram(
        text.encode(), b"engine.cu", len(headers), list(headers.values()),
        [name.encode() for name in headers],
    )  # fmt: skip
    (error,) = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), OPTIONS)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytes(size + 1)  # of its own: one byte would be shared by all of Python
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.decode(errors="replace").strip("\0 \n")
    assert not int(error), said
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill", said)
    assert registers, said
    assert spilled, said
    return Compiled(int(registers[1]), sum(map(int, spilled)), said)
