"""From texts of graphs to cuDNN's plans, compiled in child processes and cached by content."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip.backends.cache import folder_of, read_facts, scratch, store_binary
from onchip.backends.cudnn.source import COMMENT, GraphSource
from onchip.backends.nvidia import pool
from onchip.backends.nvidia.build import code_of, hashed, written
from onchip.backends.nvidia.resources import MOST_SECONDS
from onchip.errors import CompilerError

if TYPE_CHECKING:
    from onchip.backends.cudnn.launcher import PlanLauncher

_FORM = 1  # of a cache entry
COMPILER = pool.Compiler("cuDNN", "onchip.backends.cudnn.worker")
PACKAGE = "nvidia-cudnn-frontend"


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """A plan that can be run.

    path       of the graph's text
    stored     of the plan, as cuDNN serialises it, compiled
    name       of its engine and that engine's choices, as cuDNN says it
    workspace  bytes
    pointers   it takes before that of its workspace
    seconds    of processor time that building took
    reused     it was in the cache
    """

    path: Path
    stored: Path
    name: str
    workspace: int
    pointers: int
    seconds: float
    reused: bool
    _launchers: dict[int, PlanLauncher] = field(default_factory=dict, init=False)

    backend = "cudnn"

    def __reduce__(self) -> tuple[Any, ...]:
        """For a child process: what it has loaded stays here."""
        known = (self.path, self.stored, self.name, self.workspace, self.pointers)
        return Plan, (*known, self.seconds, self.reused)

    def launcher(self, device: int) -> PlanLauncher:
        """What runs it on the GPU of that index, loaded when it is first asked for. DeviceError if
        cuDNN can't load it."""
        from onchip.backends.cudnn.launcher import PlanLauncher

        if device not in self._launchers:
            self._launchers[device] = PlanLauncher(self, device)
        return self._launchers[device]


def installed() -> bool:
    """Whether the package is."""
    return importlib.util.find_spec("cudnn") is not None


@functools.cache
def cudnn_version() -> str:
    """Of the package and the library, that a choice between plans depends on. CompilerError if the
    package is not installed, or finds no library."""
    try:
        package = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise CompilerError(
            f'{PACKAGE} is not installed, so cuDNN builds no plans: pip install "onchip[cudnn]"'
        ) from None
    try:
        import cudnn

        return f"{PACKAGE} {package}, cuDNN {cudnn.backend_version()}"
    except Exception as error:  # of loading a library: whatever it is, there are no plans
        raise CompilerError(f"{PACKAGE} {package} can't be used: {error}") from error


def device_properties(device: int) -> str:
    """What cuDNN knows of the GPU of that index, as JSON; CompilerError if it can't be asked."""
    import cudnn

    try:
        return cudnn.create_device_properties(device).serialize()
    except Exception as error:  # the package has types of its own
        raise CompilerError(f"cuDNN can't describe GPU {device}: {error}") from error


def build_all(
    sources: Sequence[GraphSource],
    device: str,
    limit_s: float = MOST_SECONDS,
    workers: int | None = None,
) -> list[Plan | CompilerError]:
    """Build every source's plan for a GPU (its `device_properties`), or take it from the cache. One
    that cuDNN refuses (the error holds what it says), or that takes more than `limit_s` seconds of
    processor time, gets a CompilerError. Raises CompilerError if the package is missing, CacheError
    if the cache can't be written."""
    version, folder = cudnn_version(), folder_of("cudnn")
    texts = [written(s.text, folder, ".graph", COMMENT) for s in sources]
    keys = [hashed(_FORM, version, device, code_of(s.text, COMMENT)) for s in sources]
    found = {k: _read(folder, k) for k in keys}
    missing = {k: t for k, t in zip(keys, texts, strict=True) if found[k] is None}
    fresh = _built(folder, missing, device, limit_s, workers or os.cpu_count() or 1)
    out: list[Plan | CompilerError] = []
    for k, text, s in zip(keys, texts, sources, strict=True):
        facts = found[k] or fresh[k]
        if isinstance(facts, CompilerError):
            out.append(facts)
            continue
        pointers = len(s.inputs) + len(s.scalars) + len(s.outputs)
        known = (facts["name"], facts["workspace"], pointers, facts["seconds"], k not in missing)
        out.append(Plan(text, _stored(folder, k), *known))
    return out


def _built(
    folder: Path, missing: dict[str, Path], device: str, limit_s: float, workers: int
) -> dict[str, dict[str, Any] | CompilerError]:
    """Facts of plans that were not there, by key."""
    if not missing:
        return {}
    out: dict[str, dict[str, Any] | CompilerError] = {}
    with scratch(folder) as made_in:
        jobs = [
            {"source": str(t), "device": device, "plan": str(made_in / k), "what": f"building {t}"}
            for k, t in missing.items()
        ]
        answers = pool.run_all(COMPILER, jobs, limit_s, workers)
        for k, job, answer in zip(missing, jobs, answers, strict=True):
            if isinstance(answer, dict) and "error" in answer:
                answer = CompilerError(f"cuDNN builds no plan: {answer['error'][:800]}")
            if not isinstance(answer, CompilerError):
                store_binary(_stored(folder, k), Path(job["plan"]).read_bytes(), answer)
            out[k] = answer
    return out


def _stored(folder: Path, key: str) -> Path:
    return folder / f"{key}.plan"


def _read(folder: Path, key: str) -> dict[str, Any] | None:
    """The facts of a plan in the cache; None if there is none or it is damaged."""
    facts = read_facts(_stored(folder, key))
    return facts if facts is not None and {"name", "workspace", "seconds"} <= facts.keys() else None
