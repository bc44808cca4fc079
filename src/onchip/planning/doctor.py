"""What this machine has, what is missing, and how to get it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from onchip.analysis.roofline import Ceilings
from onchip.backends.cache import cache_folder, entries
from onchip.backends.cpp.compiler import compiler_version
from onchip.backends.cuda import build as cuda
from onchip.backends.cuda.source import CudaSource, Pointer
from onchip.backends.cudnn.build import PACKAGE, cudnn_version
from onchip.backends.nvidia.launcher import driver
from onchip.backends.nvidia.source import Launch
from onchip.backends.triton.build import build_all, triton_version
from onchip.backends.triton.source import TritonSource
from onchip.errors import CacheError, CompilerError, DeviceError
from onchip.fusion.machine import GPUS
from onchip.planning import machine

# What is built to see whether Triton works.
_TINY = TritonSource(
    "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(out0):\n"
    "    tl.store(out0 + tl.arange(0, 128), 1.0)\n",
    (Launch("kernel", 1, (0,)),),
    (),
    (),
    ("*fp32",),
)

# And for NVRTC.
_TINY_CUDA = CudaSource(
    'extern "C" __global__ void kernel(float* out) { out[threadIdx.x] = 1.0f; }\n',
    "kernel",
    (Pointer(0),),
    1,
    128,
    0,
    (),
    (),
)

Row = tuple[str, str, str]  # item, what was found, what to do ("" if nothing)

# distribution -> what it gives
_OPTIONAL = {
    "torchvision": 'torchvision: models; pip install "onchip[models]"',
    "timm": 'timm: models; pip install "onchip[models]"',
    "transformers": 'transformers: models; pip install "onchip[models]"',
    "onnxruntime": 'ONNX Runtime as a peer in benchmarks; pip install "onchip[onnx]"',
}


def examine() -> list[Row]:
    """Every check but the ceilings, which take seconds (`ceilings`)."""
    return [
        ("onchip", f"{version('onchip') or 'source tree'}, Python {platform.python_version()}", ""),
        ("torch", torch.__version__, ""),
        _processor(),
        _gpu(),
        _driver(),
        _triton(),
        _nvrtc(),
        _cudnn(),
        _compiler(),
        _cache(),
        *(_optional(name, gives) for name, gives in _OPTIONAL.items()),
    ]


def ceilings(refresh: bool = False) -> list[Ceilings]:
    """Measured ceilings of every device that is there."""
    found = [machine.measure("cpu", refresh)]
    if torch.cuda.is_available():
        found.append(machine.measure("cuda", refresh))
    return found


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> Row:
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    advice = f"{cores} cores, {threads} threads: see OMP_NUM_THREADS" if threads < cores else ""
    return ("processor", f"{machine.device_name()}, {threads} threads", advice)


def _gpu() -> Row:
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        text = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB"
        return ("GPU", f"{count} of {text}" if count > 1 else text, "")
    advice = "analyze and kernels --device h200 predict for one; to run on one, install its driver"
    if torch.version.cuda is None:
        advice += " and a torch built for CUDA"
    return ("GPU", "none that torch sees", advice)


def _driver() -> Row:
    """NVIDIA's driver, and the CUDA version that it supports."""
    found = ctypes.c_int()
    try:
        driver().cuDriverGetVersion(ctypes.byref(found))
    except DeviceError:
        return (
            "NVIDIA driver",
            "not installed",
            "needed to run kernels, not to build them",
        )
    major, minor = found.value // 1000, found.value % 1000 // 10
    own = f"torch is built for CUDA {torch.version.cuda}"
    return ("NVIDIA driver", f"for CUDA {major}.{minor}; {own}", "")


def _triton() -> Row:
    """Whether Triton builds a kernel, in a process of its own."""
    try:
        (made,) = build_all([_TINY], GPUS["h200"])
    except (CompilerError, CacheError) as error:
        return ("Triton", version("triton") or "not installed", str(error))
    if isinstance(made, CompilerError):
        return ("Triton", f"{triton_version()}, builds nothing", str(made))
    return ("Triton", f"{triton_version()}, builds a kernel for sm_90", "")


def _nvrtc() -> Row:
    """Whether NVRTC builds a kernel, in a process of its own."""
    try:
        found = cuda.nvrtc_version()
        (made,) = cuda.build_all([_TINY_CUDA], GPUS["h200"])
    except (CompilerError, CacheError) as error:
        return ("NVRTC", version("cuda-bindings") or "not installed", str(error))
    if isinstance(made, CompilerError):
        return ("NVRTC", f"{found}, builds nothing", str(made))
    return ("NVRTC", f"{found}, builds a kernel for sm_90", "")


def _cudnn() -> Row:
    """Whether cuDNN's fused graphs can be candidates."""
    try:
        return ("cuDNN's graphs", cudnn_version(), "")
    except CompilerError as error:
        return ("cuDNN's graphs", version(PACKAGE) or "not installed", str(error))


def _compiler() -> Row:
    try:
        return ("C++ compiler", compiler_version(), "")
    except CompilerError as error:
        return ("C++ compiler", "none", str(error))


def _cache() -> Row:
    try:
        folder = cache_folder()
    except CacheError as error:
        return ("cache folder", "unusable", str(error))
    if not os.access(folder, os.W_OK):
        return ("cache folder", f"{folder} (read-only)", "set ONCHIP_CACHE to a writable folder")
    return ("cache folder", _contents(folder), "")


def _contents(folder: Path) -> str:
    found = entries()
    size = sum(e.nbytes for e in found) / 2**20
    return f"{folder}: {len(found)} entries, {size:.1f} MiB"


def _optional(name: str, gives: str) -> Row:
    found = version(name)
    return (name, found, "") if found else (name, "not installed", f"gives {gives}")
