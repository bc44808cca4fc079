"""Engine kernels compiled by NVRTC: no GPU is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onchip.backends.cuda.build import INCLUDE
from onchip.backends.cuda.kernel import emit
from onchip.backends.cuda.problem import Config, Problem
from onchip.backends.cuda.source import CudaSource
from onchip.backends.cuda.worker import headers, run_nvrtc
from onchip.fusion.layout import contiguous
from onchip.fusion.machine import GPUS

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v")


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


def compiled(text: str, more: tuple[str, ...] = ()) -> Compiled:
    """more: options."""
    error, said, *_ = run_nvrtc(text, "engine.cu", headers(INCLUDE), (*OPTIONS, *more))
    assert not int(error), said
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill", said)
    assert registers, said
    assert spilled, said
    return Compiled(int(registers[1]), sum(map(int, spilled)), said)
