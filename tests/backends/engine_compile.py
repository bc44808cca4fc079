"""Engine kernels with an epilogue written by hand, compiled by NVRTC: no GPU is needed."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cuda.bindings import nvrtc

from onchip.backends import cuda
from onchip.backends.cuda.problem import Config, Problem, Read
from onchip.backends.cuda.source import CudaSource
from onchip.fusion.machine import GPUS
from onchip.ir.expr import Tensor

HEADERS = Path(cuda.__file__).parent / "include"
OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17", b"--ptxas-options=-v")


@dataclass(frozen=True)
class Epilogue:
    text: str
    tile_reads: tuple[Read, ...]


def epilogue_text(p: Problem, pointer: Callable[[Tensor], str]) -> Epilogue:
    """ReLU of the sum, and what is read added."""
    reads = tuple(r for r in p.reads if r.kind == "tile")
    takes = "const Args& a, float acc, const Features& c, const Place& at"
    results = "\n".join(
        f"DEVICE float result{n}({takes}, const float* tile) {{ return acc{' + tile[0]' * bool(reads)}; }}"
        for n in range(len(p.results))
    )
    text = f"""struct Features {{ float bias; }};
DEVICE Features features(const Args& a, int batch, int feature) {{ return {{(float)feature}}; }}
DEVICE float before({takes}) {{ return larger(acc + c.bias, 0.f); }}
{results}"""
    return Epilogue(text, reads)


if importlib.util.find_spec("onchip.backends.cuda.epilogue") is None:
    stub = types.ModuleType("onchip.backends.cuda.epilogue")
    stub.epilogue_text = epilogue_text  # type: ignore[attr-defined]
    sys.modules[stub.__name__] = stub

from onchip.backends.cuda import kernel  # noqa: E402


@dataclass(frozen=True)
class Compiled:
    """registers of a thread; spilled: bytes; log: what the compilers said."""

    registers: int
    spilled: int
    log: str


def source_of(p: Problem, c: Config) -> CudaSource:
    tensors = [p.x, p.w, *(r.tensor for r in p.reads), *(r.tensor for r in p.results)]
    source = kernel.emit(p, c, GPUS["h200"], {t: _dense(t.shape) for t in tensors})
    assert isinstance(source, CudaSource), source
    return source


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= n
    return tuple(reversed(steps))


def compiled(text: str) -> Compiled:
    headers = {f"onchip/{f.name}": f.read_bytes() for f in sorted(HEADERS.rglob("*.cuh"))}
    _, program = nvrtc.nvrtcCreateProgram(
        text.encode(), b"engine.cu", len(headers), list(headers.values()),
        [name.encode() for name in headers],
    )  # fmt: skip
    (error,) = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), OPTIONS)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.decode(errors="replace").strip("\0 \n")
    assert not int(error), said
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill", said)
    assert registers and spilled, said
    return Compiled(int(registers[1]), sum(map(int, spilled)), said)
