"""What this machine has, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from onchip.analysis.roofline import Ceilings
from onchip.backends.cpp.compiler import cache_folder, compiler_version
from onchip.errors import CacheError, CompilerError
from onchip.planning import machine

Row = tuple[str, str, str]  # item, what was found, what to do ("" if nothing)

# distribution -> what it gives
_OPTIONAL = {
    "triton": "GPU kernels (comes with torch on Linux with CUDA)",
    "torchvision": 'torchvision: models; pip install "onchip[models]"',
    "timm": 'timm: models; pip install "onchip[models]"',
    "transformers": 'transformers: models; pip install "onchip[models]"',
    "onnxruntime": 'ONNX Runtime as a peer in benchmarks; pip install "onchip[onnx]"',
    "nvidia-cudnn-frontend": 'cuDNN\'s fused convolutions; pip install "onchip[cudnn]"',
}


def examine() -> list[Row]:
    """Every check but the ceilings, which take seconds (`ceilings`)."""
    return [
        ("onchip", f"{version('onchip') or 'source tree'}, Python {platform.python_version()}", ""),
        ("torch", torch.__version__, ""),
        _processor(),
        _gpu(),
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
        major, minor = torch.cuda.get_device_capability()
        return ("GPU", f"{torch.cuda.get_device_name()}, sm_{major}{minor}", "")
    advice = "analyze --device h200 predicts for one; to run on one, install its driver"
    if torch.version.cuda is None:
        advice += " and a torch built for CUDA"
    return ("GPU", "none that torch sees", advice)


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
    files = [f.stat().st_size for f in folder.rglob("*") if f.is_file()]
    return f"{folder}: {len(files)} files, {sum(files) / 2**20:.1f} MiB"


def _optional(name: str, gives: str) -> Row:
    found = version(name)
    return (name, found, "") if found else (name, "not installed", f"gives {gives}")
