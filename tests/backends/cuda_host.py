"""The engine's generated C++ on this machine: by the host's compiler, to run it, and by NVRTC.

host_cuda/onchip/half.cuh stands in for the PTX functions; all other text is the engine's own.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onchip.backends.cuda import spelling
from onchip.backends.cuda.epilogue import Epilogue, epilogue_text
from onchip.backends.cuda.problem import Problem
from onchip.backends.scalar_numpy import round_bfloat16
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor

INCLUDE = Path(__file__).parents[2] / "src/onchip/backends/cuda/include"
HOST = Path(__file__).parent / "host_cuda"
PLACE = "struct Place { int batch, feature; int at[4]; };\n"


def library(text: str, folder: Path) -> ctypes.CDLL:
    """A shared library of C++ text; warnings are errors."""
    source, made = folder / "text.cpp", folder / "text.so"
    source.write_text("#include <onchip/scalar.cuh>\n" + text)
    flags = [
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Werror",
        "-Wno-tautological-compare",
        "-Wno-bool-operation",
        "-shared",
        "-fPIC",
        "-ffp-contract=off",
    ]
    # half.cuh of the host comes first, since each include is looked for in this order
    paths = [f"-I{HOST}", f"-I{INCLUDE}"]
    done = subprocess.run(
        ["g++", *flags, *paths, str(source), "-o", str(made)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(made))


def nvrtc_log(text: str) -> str:
    """What NVRTC says of text for sm_90a; "" if it compiles."""
    from onchip.backends.cuda.worker import headers, run_nvrtc

    source = "#include <onchip/scalar.cuh>\n" + text
    options = ["--gpu-architecture=sm_90a", "--std=c++17"]
    code, log, *_ = run_nvrtc(source, "text.cu", headers(INCLUDE), options)
    return log or ("failed" if int(code) else "")


class Text:
    """One problem's epilogue, in a namespace of its own."""

    def __init__(self, p: Problem, strides, name: str, tiles: bool = True) -> None:
        self.problem, self.strides, self.name = p, strides, name
        self.tensors: dict[Tensor, str] = {}
        self.epilogue: Epilogue = epilogue_text(p, self._pointer, strides, tiles)

    def _pointer(self, t: Tensor) -> str:
        return self.tensors.setdefault(t, f"in{len(self.tensors)}")

    @property
    def text(self) -> str:
        members = [f"const {spelling.STORAGE[t.dtype]}* {n};" for t, n in self.tensors.items()]
        args = f"struct Args {{ {' '.join(members)} }};\n"
        return f"namespace {self.name} {{\n{args}{PLACE}\n{self.epilogue.text}\n}}\n"

    @property
    def functions(self) -> list[str]:
        results, totals = self.problem.results, self.problem.totals
        names = [f"result{n}" for n in range(len(results))]
        return ["before", *names, *(f"total{n}" for n in range(len(totals)))]

    def host_loops(self) -> str:
        out = [self.text]
        for f in self.functions:
            tile = f", tile + n * {len(self.epilogue.tile_reads)}" if f != "before" else ""
            out.append(
                f'extern "C" void {self.name}_{f}(const {self.name}::Args* a, long count, const '
                f"float* acc, const {self.name}::Place* at, const float* tile, float* out) {{\n"
                "    for (long n = 0; n < count; ++n)\n"
                f"        out[n] = {self.name}::{f}(*a, acc[n], {self.name}::features(*a, "
                f"at[n].batch, at[n].feature), at[n]{tile});\n}}\n"
            )
        for n, _ in enumerate(self.problem.results):
            out.append(
                f'extern "C" void {self.name}_element{n}(long count, const {self.name}::Place* at, '
                "long long* out) {\n    for (long n = 0; n < count; ++n) "
                f"out[n] = {self.name}::element{n}(at[n]);\n}}\n"
            )
        return "".join(out)

    def kernel(self) -> str:
        """A kernel that calls all of the functions, for a compiler to look at."""
        n = self.name
        lines = [f"{n}::Place at = places[threadIdx.x];"]
        lines += [f"{n}::Features c = {n}::features(a, at.batch, at.feature);"]
        lines += ["float v = out[threadIdx.x];"]
        lines += [
            f"v += {n}::{f}(a, v, c, at{', tile' * (f != 'before')});" for f in self.functions
        ]
        lines += ["out[threadIdx.x] = v;"]
        head = f"{n}::Args a, const {n}::Place* places, const float* tile, float* out"
        return (
            f'{self.text}extern "C" __global__ void {n}_kernel({head}) {{\n{" ".join(lines)}\n}}\n'
        )

    def run(self, lib: ctypes.CDLL, function: str, values, acc: np.ndarray, tiles):
        """The function's values for accumulators over (batch, feature, places); tiles: of each tile
        read over the same axes."""
        kept = [_stored(values[t], self.strides[t], t.dtype) for t in self.tensors]
        pointers = (ctypes.c_void_p * max(len(kept), 1))(*(x.ctypes.data for x in kept))
        at = _places(acc.shape)
        flat = np.ascontiguousarray(acc, np.float32)
        tile = np.ascontiguousarray(np.stack([x.ravel() for x in tiles], 1) if tiles else flat)
        tile, out = tile.astype(np.float32), np.empty(acc.shape, np.float32)
        data = [x.ctypes.data_as(ctypes.c_void_p) for x in (flat, at, tile, out)]
        call = getattr(lib, f"{self.name}_{function}")
        call(ctypes.byref(pointers), ctypes.c_long(acc.size), *data)
        return out

    def elements(self, lib: ctypes.CDLL, n: int, shape: tuple[int, ...]) -> np.ndarray:
        """Where the n-th result's elements over (batch, feature, places) are stored."""
        out = np.empty(shape, np.int64)
        data = [x.ctypes.data_as(ctypes.c_void_p) for x in (_places(shape), out)]
        getattr(lib, f"{self.name}_element{n}")(ctypes.c_long(out.size), *data)
        return out


def _places(shape: tuple[int, ...]) -> np.ndarray:
    """A Place for each element over (batch, feature, places)."""
    at = np.zeros((int(np.prod(shape)), 6), np.int32)
    for k, i in enumerate(np.indices(shape)):
        at[:, k] = i.ravel()
    return at


def _stored(x: np.ndarray, strides: Sequence[int], dtype: DType) -> np.ndarray:
    """A tensor's memory in its own type."""
    flat = np.zeros(1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)), x.dtype)
    np.lib.stride_tricks.as_strided(flat, x.shape, [x.dtype.itemsize * s for s in strides])[...] = x
    if dtype is DType.BOOL:
        return flat.astype(np.uint8)
    if dtype is DType.BF16:
        return (round_bfloat16(flat).view(np.uint32) >> 16).astype(np.uint16)
    return flat.astype(dtype.label)
