"""From generated Triton text to binaries: compiled in child processes, cached by content.

Compiling needs no GPU. With TRITON_INTERPRET=1 in the environment texts are only written down, and
`interpret` runs them on CPU tensors.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip.backends.cpp.compiler import cache_folder
from onchip.backends.triton import pool
from onchip.backends.triton.resources import MOST_SECONDS, Resources, over_budget
from onchip.backends.triton.source import Launch, TritonSource
from onchip.errors import CacheError, CompilerError
from onchip.fusion.machine import Gpu
from onchip.fusion.refusal import Refusal

if TYPE_CHECKING:
    from onchip.backends.triton.launcher import Launcher

_FORM = 1  # of a cache entry
LIMIT_S = MOST_SECONDS  # of processor time, for compiling one function


@dataclass(frozen=True, slots=True)
class Cubin:
    """One compiled function: its binary, its name in it, and how many pointers it takes (the last
    ones are Triton's own and null)."""

    path: Path
    name: str
    parameters: int
    resources: Resources


@dataclass(frozen=True, eq=False, slots=True)
class Built:
    """A kernel that can be launched: the functions of `launches`, in order.

    path     the generated text
    cubins   one for each launch; none where Triton's interpreter runs the text
    reused   every binary was in the cache
    """

    path: Path
    launches: tuple[Launch, ...]
    cubins: tuple[Cubin, ...]
    reused: bool
    _launchers: dict[int, Launcher] = field(default_factory=dict, init=False)

    @property
    def resources(self) -> tuple[Resources, ...]:
        return tuple(c.resources for c in self.cubins)

    @property
    def code_bytes(self) -> int:
        return sum(r.code_bytes for r in self.resources)

    @property
    def seconds(self) -> float:
        """Processor seconds that compiling took, when it was done."""
        return sum(r.seconds for r in self.resources)

    def over_budget(self, gpu: Gpu) -> Refusal | None:
        """Why it is not worth timing on that GPU."""
        return over_budget(self.resources, gpu)

    def launcher(self, device: int | None = None) -> Launcher:
        """What runs it on a GPU of this machine (`device`: its index, the current one if None),
        loaded when it is first asked for. DeviceError if the driver can't load it."""
        if device is not None and (known := self._launchers.get(device)) is not None:
            return known
        from onchip.backends.triton.launcher import Launcher, current_device

        device = current_device() if device is None else device
        if device not in self._launchers:
            self._launchers[device] = Launcher(self, device)
        return self._launchers[device]

    def run(self, pointers: Sequence[int], stream: int = 0) -> int:
        """Launch it on the current device; see Launcher.run."""
        return self.launcher().run(pointers, stream)


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
    version, folder = triton_version(), _folder()
    paths = [_written(s, folder) for s in sources]
    if interpreting():
        return [Built(p, s.launches, (), False) for p, s in zip(paths, sources, strict=True)]
    jobs: dict[str, pool.Job] = {}
    keys: list[list[str]] = []
    for source, path in zip(sources, paths, strict=True):
        made = [_job(source, n, path, gpu.capability) for n in source.launches]
        keys.append([_key(source, job, version) for job in made])
        jobs |= zip(keys[-1], made, strict=True)
    found: dict[str, Cubin | CompilerError] = {
        k: c for k in jobs if (c := _read(folder, k)) is not None
    }
    known = set(found)
    missing = [k for k in jobs if k not in known]
    found |= zip(missing, _compile(folder, missing, jobs, limit_s, workers), strict=True)
    return [
        _built(p, s.launches, [found[k] for k in mine], known.issuperset(mine))
        for p, s, mine in zip(paths, sources, keys, strict=True)
    ]


def _built(
    path: Path, launches: tuple[Launch, ...], parts: list[Cubin | CompilerError], reused: bool
) -> Built | CompilerError:
    cubins = []
    for p in parts:
        if isinstance(p, CompilerError):
            return p
        cubins.append(p)
    return Built(path, launches, tuple(cubins), reused)


def _compile(
    folder: Path,
    keys: Sequence[str],
    jobs: dict[str, pool.Job],
    limit_s: float,
    workers: int | None,
) -> list[Cubin | CompilerError]:
    """Compile what the cache does not hold, and put it there."""
    if not keys:
        return []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        cubins = [Path(scratch) / f"{k}.cubin" for k in keys]
        tasks = [{**jobs[k], "cubin": str(c)} for k, c in zip(keys, cubins, strict=True)]
        answers = pool.run_all(tasks, limit_s, workers or os.cpu_count() or 1)
        return [
            _stored(folder, k, jobs[k], c, a) for k, c, a in zip(keys, cubins, answers, strict=True)
        ]


def _job(source: TritonSource, launch: Launch, path: Path, capability: int) -> pool.Job:
    return {
        "source": str(path),
        "name": launch.name,
        "pointers": [source.pointers[i] for i in launch.arguments],
        "warps": launch.warps,
        "stages": launch.stages,
        "capability": capability,
    }


# ---- the cache ---------------------------------------------------------------------------------


def _folder() -> Path:
    folder = cache_folder() / "triton"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _unwritable(folder: Path, error: OSError) -> CacheError:
    return CacheError(
        f"the cache folder {folder} can't be written ({error.strerror}): set ONCHIP_CACHE to a "
        "folder you can write to"
    )


def _code(text: str) -> str:
    """The text without comments, which name the operators of one place in one model."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def _hash(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def _key(source: TritonSource, job: pool.Job, version: str) -> str:
    """Hash of what decides a binary."""
    facts = sorted((k, v) for k, v in job.items() if k != "source")
    return _hash(_FORM, version, facts, _code(source.text))


def _written(source: TritonSource, folder: Path) -> Path:
    """The file of a text: Triton reads functions from files."""
    path = folder / f"{_hash(_code(source.text))}.py"
    try:
        if _code(path.read_text()) == _code(source.text):
            return path
    except (OSError, ValueError):
        pass  # it is not there, or damaged
    _store(path, source.text.encode())
    return path


def _store(path: Path, data: bytes) -> None:
    """Written whole or not at all."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        os.replace(temporary, path)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _stored(
    folder: Path, key: str, job: pool.Job, made: Path, answer: pool.Job | CompilerError
) -> Cubin | CompilerError:
    """Put a fresh binary into the cache. The facts come last: they vouch for it."""
    if isinstance(answer, CompilerError):
        return answer
    if "error" in answer:
        where = f"{job['name']} of {job['source']} for sm_{job['capability']}"
        return CompilerError(f"Triton refused {where}: {answer['error'][:800]}")
    data = made.read_bytes()
    path = folder / f"{key}.cubin"
    _store(path, data)
    facts = {**answer, "sha256": hashlib.sha256(data).hexdigest()}
    _store(folder / f"{key}.json", json.dumps(facts).encode())
    return _cubin(path, answer)


def _read(folder: Path, key: str) -> Cubin | None:
    """A binary of the cache; None if there is none or it is damaged (it is made again)."""
    path = folder / f"{key}.cubin"
    try:
        facts = json.loads((folder / f"{key}.json").read_text())
        if facts["sha256"] != hashlib.sha256(path.read_bytes()).hexdigest():
            return None
        return _cubin(path, facts)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _cubin(path: Path, facts: dict[str, Any]) -> Cubin:
    return Cubin(path, facts["name"], facts["parameters"], Resources(**facts["resources"]))


# ---- the interpreter ---------------------------------------------------------------------------


def interpret(path: Path, launches: Sequence[Launch], tensors: Sequence[Any]) -> None:
    """Run a text under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported) on CPU
    tensors in the order of the kernel's pointers. Its bfloat16 arithmetic is wrong: the text must
    be written for it (Options.interpret)."""
    module = _module(path)
    for launch in launches:
        if launch.programs:
            function = getattr(module, launch.name)
            function[(launch.programs,)](*(tensors[n] for n in launch.arguments))


@functools.cache
def _module(path: Path) -> Any:
    from onchip.backends.triton.worker import load

    return load(path)
