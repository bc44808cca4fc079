"""From generated CUDA C++ to binaries: NVRTC in child processes, cached by content. Compiling needs
no GPU."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from onchip.backends.cache import folder_of
from onchip.backends.cuda.source import CudaSource, Further
from onchip.backends.nvidia.build import (
    Built,
    code_of,
    compile_all,
    hashed,
    written,
)
from onchip.backends.nvidia.pool import Compiler, Job
from onchip.backends.nvidia.resources import MOST_SECONDS
from onchip.backends.nvidia.source import Launch, TensorMap
from onchip.errors import CompilerError
from onchip.fusion.machine import HOPPER, Gpu

_FORM = 1  # of a cache entry
LIMIT_S = MOST_SECONDS  # of processor time, for compiling one kernel
COMPILER = Compiler("NVRTC", "onchip.backends.cuda.worker")
INCLUDE = Path(__file__).parent / "include"
# What is only there on one generation (wgmma, setmaxnreg) needs the "a".
_ARCHITECTURES = {HOPPER: "sm_90a"}
_OPTIONS = ("--std=c++17",)
# Distributions that bring NVRTC, of CUDA 13 and 12.
_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


@functools.cache
def nvrtc_version() -> str:
    """Of the bindings and the library. CompilerError if they are not installed."""
    try:
        bindings = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        raise CompilerError(
            "cuda-bindings is not installed, so NVRTC can't compile CUDA C++ kernels: pip install "
            "cuda-bindings (torch for CUDA brings it)"
        ) from None
    return f"cuda-bindings {bindings}, NVRTC {_library_version()}"


def _library_version() -> str:
    for name in _WHEELS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    from cuda.bindings import nvrtc  # only to be asked: compiling is worker.py's

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the library is looked for when it is first used
        raise CompilerError(
            f"NVRTC is not installed: pip install nvidia-cuda-nvrtc ({error})"
        ) from error
    return f"{major}.{minor}"


def build_all(
    sources: Sequence[CudaSource],
    gpu: Gpu,
    limit_s: float = LIMIT_S,
    workers: int | None = None,
) -> list[Built | CompilerError]:
    """Compile every source for the GPU, or take it from the cache.

    A source that NVRTC refuses (the error holds its log), that takes more than `limit_s` seconds of
    processor time, or that brings the compiler down, gets a CompilerError; the others are built.
    `workers`: processes at a time.
    Raises CompilerError if NVRTC is not installed or the GPU is none that the kernels are for,
    CacheError if the cache can't be written.
    """
    version = nvrtc_version()
    if gpu.capability not in _ARCHITECTURES:
        known = ", ".join(f"sm_{c}" for c in _ARCHITECTURES)
        raise CompilerError(
            f"kernels in CUDA C++ are written for {known}, not for sm_{gpu.capability}"
        )
    folder, device_code = folder_of("cuda"), _headers_key()
    paths = [written(s.text, folder, ".cu", "//") for s in sources]
    jobs: dict[str, Job] = {}
    keys: list[list[str]] = []
    for source, path in zip(sources, paths, strict=True):
        keys.append([])
        for n, part in enumerate((source, *source.further)):
            job = _job(part, n, path, gpu.capability)
            facts = sorted((k, v) for k, v in job.items() if k not in ("source", "include"))
            key = hashed(_FORM, version, device_code, facts, code_of(source.text, "//"))
            keys[-1].append(key)
            jobs[key] = job
    done = compile_all(COMPILER, jobs, folder, limit_s, workers)
    return [
        done.kernel("cuda", p, launches_of(s), k)
        for p, s, k in zip(paths, sources, keys, strict=True)
    ]


def launches_of(source: CudaSource) -> tuple[Launch, ...]:
    """The source's launches in order, as the launcher takes them."""
    out = []
    for part in (source, *source.further):
        assert part.threads % 32 == 0, f"{part.name} has {part.threads} threads: no whole warps"
        arguments = tuple(p if isinstance(p, TensorMap) else p.n for p in part.parameters)
        out.append(
            Launch(
                part.name, part.programs, arguments, part.threads // 32, cluster=part.cluster,
                waits=source.waits,
            )
        )  # fmt: skip
    return tuple(out)


def _job(part: CudaSource | Further, n: int, path: Path, capability: int) -> Job:
    """The n-th launch of a text."""
    kinds = ["map" if isinstance(p, TensorMap) else "pointer" for p in part.parameters]
    which = [f"--define-macro=ONCHIP_LAUNCH={n}"] * (n > 0)
    return {
        "source": str(path),
        "include": str(INCLUDE),
        "name": part.name,
        "parameters": kinds,
        "options": [f"--gpu-architecture={_ARCHITECTURES[capability]}", *_OPTIONS, *which],
        "warps": part.threads // 32,
        "shared_bytes": part.shared_bytes,
        "capability": capability,
    }


def _headers_key() -> str:
    """Hash of the device code that texts include."""
    files = sorted(INCLUDE.rglob("*.cuh"))
    return hashed(*(f"{p.relative_to(INCLUDE)}\n{p.read_text()}" for p in files))
