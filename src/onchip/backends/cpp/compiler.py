"""Generated C++ to loaded functions: g++ or clang++, in parallel, cached by content."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from onchip.backends.cache import (
    cache_folder,
    folder_of,
    read_facts,
    scratch,
    store,
    store_binary,
    used,
)
from onchip.errors import CompilerError

INCLUDE = Path(__file__).parent / "include"
FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fno-semantic-interposition",
    # A row of 64 elements is eight vectors: unrolled completely, a kernel of fifty such loops would
    # take four times as long to compile and leave the instruction cache. Short loops (a window's
    # taps) still disappear.
    "--param=max-completely-peeled-insns=100",
]
# GNU ld reads every symbol of libstdc++, 0.15 s a kernel; these do the same in a third of it.
LINKERS = ("mold", "lld", "gold")


@dataclass(frozen=True, eq=False, slots=True)
class Binary:
    """A loaded kernel: call `function(pointers)`; 0 means success."""

    path: Path
    function: ctypes._CFuncPtr  # type: ignore[name-defined]
    seconds: float
    reused: bool

    @property
    def code_bytes(self) -> int:
        """Size of the shared object's text, from its section headers (binutils-free estimate)."""
        return text_bytes(self.path)


@functools.cache
def find_compiler() -> str:
    """$CXX, g++ or clang++; CompilerError says how to get one."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise CompilerError(
        "no C++ compiler was found: install g++ (Debian: apt-get install g++) or set CXX; "
        "without one only library kernels run"
    )


@functools.cache
def linker_flags() -> tuple[str, ...]:
    """What makes the compiler take a linker faster than GNU ld; empty if there is none."""
    found = next((name for name in LINKERS if shutil.which(f"ld.{name}")), None)
    return (f"-fuse-ld={found}",) if found is not None and _links(found) else ()


def _links(linker: str) -> bool:
    """Whether the compiler knows the linker and it works (an old g++ refuses mold)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [find_compiler(), "-shared", f"-fuse-ld={linker}", "-x", "c++", os.devnull]
        done = subprocess.run([*command, "-o", f"{folder}/empty.so"], capture_output=True)
    return done.returncode == 0


@functools.cache
def compiler_version() -> str:
    cxx = find_compiler()
    done = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False)
    return f"{cxx} {done.stdout.splitlines()[0] if done.stdout else '?'}"


@functools.cache
def target_macros() -> frozenset[str]:
    """Macros that the compiler predefines for this processor (__AVX2__, __AVX512F__...)."""
    done = subprocess.run(
        [find_compiler(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    return frozenset(line.split()[1] for line in done.stdout.splitlines() if "__" in line)


def panel_width() -> int:
    """NR of include/onchip/contract.h: two vector registers of floats."""
    macros = target_macros()
    vector = 16 if "__AVX512F__" in macros else 8 if "__AVX__" in macros else 4
    return 2 * vector


@functools.cache
def _environment_key() -> str:
    h = hashlib.sha256()
    for header in sorted(INCLUDE.rglob("*.h")):
        h.update(header.read_bytes())
    h.update(" ".join(FLAGS).encode())
    h.update(compiler_version().encode())
    h.update(" ".join(sorted(target_macros())).encode())
    return h.hexdigest()


def content_key(source: str, optimise: str = FLAGS[0]) -> str:
    """Hash of what decides the binary: source without comments, headers, flags, compiler, CPU."""
    code = "\n".join(line for line in source.splitlines() if not line.startswith("//"))
    return hashlib.sha256((_environment_key() + optimise + code).encode()).hexdigest()[:32]


def build(source: str, optimise: str = FLAGS[0]) -> Binary:
    """Compile (or take from the cache) and load. Raises CompilerError with the first error.
    `optimise`: another optimisation level, for tests of many kernels."""
    start = time.perf_counter()
    folder = folder_of("cpp")
    path = folder / f"{content_key(source, optimise)}.so"
    if (binary := _reused(path, start)) is not None:
        return binary
    store(path.with_suffix(".cpp"), source.encode())
    with scratch(folder) as made:
        target = made / path.name
        _run_compiler(path.with_suffix(".cpp"), str(target), optimise)
        store_binary(path, target.read_bytes(), {})
    return Binary(path, _load(path), time.perf_counter() - start, False)


def _reused(path: Path, start: float) -> Binary | None:
    """The binary in the cache; None if there is none or it is damaged. (Its hash is compared
    first: loading one that was cut short may end the process.)"""
    if read_facts(path) is None:
        return None
    try:
        return Binary(path, _load(path), time.perf_counter() - start, True)
    except OSError:  # another process has removed it since
        return None


def _run_compiler(source: Path, target: str, optimise: str) -> None:
    parts = prebuilt(optimise)
    plain = [f"-I{INCLUDE}", str(source), *linker_flags()]
    if not parts.exists():
        return _compile(plain, target, optimise)
    try:
        shared = [*parts.before(), str(source), *parts.after(), *linker_flags()]
        _compile(shared, target, optimise)
        used(parts.folder)
    except CompilerError:  # its own fault, or that of damaged parts: without them it becomes clear
        _compile(plain, target, optimise)
        shutil.rmtree(parts.folder, ignore_errors=True)  # they are made again


def _compile(arguments: list[str], target: str, optimise: str) -> None:
    command = [find_compiler(), optimise, *FLAGS[1:], *arguments, "-o", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [x for x in done.stderr.splitlines() if "error: " in x] or ["no message"]
        named = next(x for x in arguments if x.endswith((".cpp", ".h")))
        raise CompilerError(f"{command[0]} refused {named}: {errors[0]}")


def _load(path: Path) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    function = ctypes.CDLL(str(path)).kernel
    function.argtypes = [ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def build_all(sources: list[str], workers: int | None = None) -> list[Binary | CompilerError]:
    """Build many sources at once, each distinct one once."""
    distinct = list(dict.fromkeys(sources))
    folder = folder_of("cpp")
    missing = [s for s in distinct if not (folder / f"{content_key(s)}.json").exists()]
    if len(missing) >= PREBUILD_FOR:
        prebuilt(FLAGS[0]).make()

    def attempt(source: str) -> Binary | CompilerError:
        try:
            return build(source)
        except CompilerError as e:
            return e

    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        done = dict(zip(distinct, pool.map(attempt, distinct), strict=True))
    return [done[s] for s in sources]


# ---- what all kernels share, compiled once -----------------------------------------------------

# Sources for which it pays to compile the shared parts first (they take as long as two kernels).
PREBUILD_FOR = 3
_HEADER = "onchip/kernel.h"
_TILES = '#define ONCHIP_PREBUILT_TILES\n#include "onchip/contract.h"\n'


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """A precompiled kernel.h (g++ only) and the micro-kernels of contract.h as an object file.
    They change no binary's behaviour: without them a kernel takes three times as long to build."""

    folder: Path
    optimise: str

    def exists(self) -> bool:
        return self.folder.is_dir()

    def before(self) -> list[str]:
        """Arguments in front of the source: g++ looks for kernel.h.gch along the -I folders, and
        takes the plain header if it does not fit."""
        return [f"-I{self.folder}", f"-I{INCLUDE}", "-DONCHIP_PREBUILT_TILES=extern"]

    def after(self) -> list[str]:
        return [str(self.folder / "tiles.o"), "-Wl,--gc-sections"]

    def make(self) -> None:
        """Compile both, in a folder that gets its name when it is complete. What can't be built
        here is not used: the kernels say what is wrong with the compiler or the cache."""
        if self.exists():
            return
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder.parent) as temporary:
                whole = Path(temporary) / "whole"
                (whole / _HEADER).parent.mkdir(parents=True)
                self._fill(whole)
                os.rename(whole, self.folder)  # fails if another process was first
        except (OSError, CompilerError):
            return

    def _fill(self, folder: Path) -> None:
        tiles = folder / "tiles.cpp"
        tiles.write_text(_TILES)
        hidden = ["-c", "-fvisibility=hidden", "-ffunction-sections", f"-I{INCLUDE}"]
        _compile([*hidden, str(tiles)], str(folder / "tiles.o"), self.optimise)
        if "clang" in compiler_version().lower():
            return
        header = ["-DONCHIP_PREBUILT_TILES=extern", f"-I{INCLUDE}", "-x", "c++-header"]
        _compile([*header, str(INCLUDE / _HEADER)], str(folder / f"{_HEADER}.gch"), self.optimise)


def prebuilt(optimise: str) -> Prebuilt:
    """The shared parts for one optimisation level and this environment."""
    name = hashlib.sha256((_environment_key() + optimise).encode()).hexdigest()[:32]
    return Prebuilt(cache_folder() / "prebuilt" / name, optimise)


def text_bytes(path: Path) -> int:
    """Bytes of the ELF .text section; 0 where the file is not ELF64."""
    data = path.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return 0
    at = int.from_bytes(data[40:48], "little")
    size, count, names = (int.from_bytes(data[n : n + 2], "little") for n in (58, 60, 62))
    heads = [data[at + i * size : at + (i + 1) * size] for i in range(count)]

    def number(head: bytes, start: int, width: int) -> int:
        return int.from_bytes(head[start : start + width], "little")

    strings = number(heads[names], 24, 8)
    for head in heads:
        label = data[strings + number(head, 0, 4) :].split(b"\0", 1)[0]
        if label == b".text":
            return number(head, 32, 8)
    return 0
