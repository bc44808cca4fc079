"""Compiled functions and kernels, and the cache that holds them by content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip.backends.cache import read_facts, scratch, store, store_binary, used
from onchip.backends.nvidia import pool
from onchip.backends.nvidia.resources import Resources, over_budget
from onchip.backends.nvidia.source import Launch
from onchip.errors import CompilerError
from onchip.fusion.machine import Gpu
from onchip.fusion.refusal import Refusal

if TYPE_CHECKING:
    from onchip.backends.nvidia.launcher import Launcher


@dataclass(frozen=True, slots=True)
class Cubin:
    """One compiled function: its binary, its name in it, and how many parameters it takes (those
    beyond its launch's arguments are pointers, which are null)."""

    path: Path
    name: str
    parameters: int
    resources: Resources


@dataclass(frozen=True, eq=False, slots=True)
class Built:
    """A kernel that can be launched: the functions of `launches`, in order.

    backend  "triton" or "cuda"
    path     the generated text
    cubins   one for each launch; none where Triton's interpreter runs the text
    reused   every binary was in the cache
    """

    backend: str
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
        from onchip.backends.nvidia.launcher import Launcher, current_device

        device = current_device() if device is None else device
        if device not in self._launchers:
            self._launchers[device] = Launcher(self, device)
        return self._launchers[device]

    def run(self, pointers: Sequence[int], stream: int = 0) -> int:
        """Launch it on the current device; see Launcher.run."""
        return self.launcher().run(pointers, stream)


@dataclass(frozen=True, eq=False, slots=True)
class Compiled:
    """The answers to jobs, by key; reused: those that were in the cache."""

    found: Mapping[str, Cubin | CompilerError]
    reused: frozenset[str]

    def kernel(
        self, backend: str, path: Path, launches: tuple[Launch, ...], keys: Sequence[str]
    ) -> Built | CompilerError:
        """The kernel whose functions have these keys, or the first one's error."""
        cubins = []
        for k in keys:
            one = self.found[k]
            if isinstance(one, CompilerError):
                return one
            cubins.append(one)
        return Built(backend, path, launches, tuple(cubins), self.reused.issuperset(keys))


def compile_all(
    compiler: pool.Compiler,
    jobs: Mapping[str, pool.Job],
    folder: Path,
    limit_s: float,
    workers: int | None = None,
) -> Compiled:
    """Compile what the cache folder does not hold, and put it there. Jobs by key (`hashed`: what
    decides a binary); each has a `name` and a `source` (a file) and a `capability`, its worker
    writes the binary to `cubin` and answers with the facts of a Cubin. `workers`: processes at a
    time. CacheError if the cache can't be written."""
    found: dict[str, Cubin | CompilerError] = {
        k: c for k in jobs if (c := _read(folder, k)) is not None
    }
    reused = frozenset(found)
    missing = [k for k in jobs if k not in reused]
    if not missing:
        return Compiled(found, reused)
    with scratch(folder) as made_in:
        cubins = [made_in / f"{k}.cubin" for k in missing]
        tasks = [{**jobs[k], "cubin": str(c)} for k, c in zip(missing, cubins, strict=True)]
        answers = pool.run_all(compiler, tasks, limit_s, workers or os.cpu_count() or 1)
        for k, made, answer in zip(missing, cubins, answers, strict=True):
            found[k] = _stored(compiler, folder, k, jobs[k], made, answer)
    return Compiled(found, reused)


# ---- the cache ---------------------------------------------------------------------------------


def code_of(text: str, comment: str) -> str:
    """The text without comments, which name the operators of one place in one model."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(comment))


def hashed(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def written(text: str, folder: Path, suffix: str, comment: str) -> Path:
    """The file of a text."""
    code = code_of(text, comment)
    path = folder / f"{hashed(code)}{suffix}"
    try:
        if code_of(path.read_text(), comment) == code:
            used(path)
            return path
    except (OSError, ValueError):
        pass  # it is not there, or damaged
    store(path, text.encode())
    return path


def _stored(
    compiler: pool.Compiler,
    folder: Path,
    key: str,
    job: pool.Job,
    made: Path,
    answer: pool.Job | CompilerError,
) -> Cubin | CompilerError:
    """Put a fresh binary into the cache. The facts come last: they vouch for it."""
    if isinstance(answer, CompilerError):
        return answer
    if "error" in answer:
        where = f"{job['name']} of {job['source']} for sm_{job['capability']}"
        return CompilerError(f"{compiler.name} refused {where}: {answer['error'][:800]}")
    path = folder / f"{key}.cubin"
    store_binary(path, made.read_bytes(), answer)
    return _cubin(path, answer)


def _read(folder: Path, key: str) -> Cubin | None:
    """A binary of the cache; None if there is none or it is damaged (it is made again)."""
    path = folder / f"{key}.cubin"
    facts = read_facts(path)
    try:
        return None if facts is None else _cubin(path, facts)
    except (TypeError, KeyError):  # another form
        return None


def _cubin(path: Path, facts: dict[str, Any]) -> Cubin:
    found = facts["resources"]
    resources = Resources(**{**found, "warnings": tuple(found["warnings"])})
    return Cubin(path, facts["name"], facts["parameters"], resources)
