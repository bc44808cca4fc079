"""From generated Triton text to binaries: compiled in child processes, cached by content.

Compiling needs no GPU. With TRITON_INTERPRET=1 in the environment texts are only written down, and
`interpret` runs them on CPU tensors.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onchip.backends.cache import folder_of
from onchip.backends.nvidia.build import (
    Built,
    code_of,
    compile_all,
    hashed,
    written,
)
from onchip.backends.nvidia.pool import Compiler, Job
from onchip.backends.nvidia.resources import MOST_SECONDS
from onchip.backends.nvidia.source import Launch
from onchip.backends.triton.source import TritonSource
from onchip.errors import CompilerError
from onchip.fusion.machine import Gpu

_FORM = 2  # of a cache entry
LIMIT_S = MOST_SECONDS  # of processor time, for compiling one function
COMPILER = Compiler(
    "Triton",
    "onchip.backends.triton.worker",
    lambda folder: {
        "TRITON_INTERPRET": "0",
        # each result is kept once, in our cache
        "TRITON_CACHE_DIR": folder,
        "TRITON_ALWAYS_COMPILE": "1",
    },
)


def interpreting() -> bool:
    """Whether kernels run under Triton's interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@functools.cache
def triton_version() -> str:
    """CompilerError if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise CompilerError(
            "Triton is not installed, so no GPU kernel can be built: pip install triton (torch for "
            "CUDA brings it)"
        )
    return importlib.metadata.version("triton")


def build_all(
    sources: Sequence[TritonSource],
    gpu: Gpu,
    limit_s: float = LIMIT_S,
    workers: int | None = None,
) -> list[Built | CompilerError]:
    """Compile every function of every source for the GPU, or take it from the cache.

    A source that Triton refuses, that takes more than `limit_s` seconds of processor time, or that
    brings the compiler down, gets a CompilerError; the others are built. `workers`: processes at a
    time.
    Raises CompilerError if Triton is not installed, CacheError if the cache can't be written.
    """
    version, folder = triton_version(), folder_of("triton")
    paths = [written(s.text, folder, ".py", "#") for s in sources]  # Triton reads from files
    if interpreting():
        return [
            Built("triton", p, s.launches, (), False) for p, s in zip(paths, sources, strict=True)
        ]
    jobs: dict[str, Job] = {}
    keys: list[list[str]] = []
    for source, path in zip(sources, paths, strict=True):
        made = [_job(source, n, path, gpu.capability) for n in source.launches]
        keys.append([_key(source, job, version) for job in made])
        jobs |= zip(keys[-1], made, strict=True)
    done = compile_all(COMPILER, jobs, folder, limit_s, workers)
    return [
        done.kernel("triton", p, s.launches, mine)
        for p, s, mine in zip(paths, sources, keys, strict=True)
    ]


def _job(source: TritonSource, launch: Launch, path: Path, capability: int) -> Job:
    return {
        "source": str(path),
        "name": launch.name,
        "pointers": [source.pointers[n] for n in launch.arguments if isinstance(n, int)],
        "warps": launch.warps,
        "stages": launch.stages,
        "capability": capability,
    }


def _key(source: TritonSource, job: Job, version: str) -> str:
    """Hash of what decides a binary."""
    facts = sorted((k, v) for k, v in job.items() if k != "source")
    return hashed(_FORM, version, facts, code_of(source.text, "#"))


# ---- the interpreter ---------------------------------------------------------------------------


def interpret(path: Path, launches: Sequence[Launch], tensors: Sequence[Any]) -> None:
    """Run a text under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported) on CPU
    tensors in the order of the kernel's pointers. Its bfloat16 arithmetic is wrong: the text must
    be written for it (Options.interpret)."""
    module = _module(path)
    for launch in launches:
        if launch.programs:
            function = getattr(module, launch.name)
            given = [tensors[n] for n in launch.arguments if isinstance(n, int)]
            function[(launch.programs,)](*given)


@functools.cache
def _module(path: Path) -> Any:
    from onchip.backends.triton.worker import load

    return load(path)
