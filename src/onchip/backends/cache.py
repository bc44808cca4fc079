"""The cache folder: where it is, how its entries stay whole, and which go when it is full.

An entry is the files of one kind's folder that share the name before the first dot (a key: the
hash of what decides the content), or a folder of that name. Processes need no lock: a file gets its
name when it is complete, two that make the same entry write the same, and whoever reads a binary
compares its hash. (A lock would save the second one's work, and hang all of them where its owner
hangs.)
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onchip.errors import CacheError

# The folder of each kind, and what it holds. Nothing else in the cache folder is touched.
KINDS = {
    "cpp": "C++ kernels",
    "prebuilt": "what C++ kernels share",
    "triton": "Triton kernels",
    "cuda": "CUDA C++ kernels",
    "cudnn": "cuDNN's plans",
    "choices": "choices",
    "ceilings": "ceilings of machines",
}
MOST_BYTES = 4 << 30
# A full cache is emptied down to this share, so that not every store finds it full.
KEPT_SHARE = 0.9
# Looking at every entry takes a second where there are 100,000: a process does so when it first
# writes, unless one did within LOOK_S, and again whenever it has written LOOK_BYTES.
LOOK_S, LOOK_BYTES = 3600.0, 64 << 20
# An entry used so lately may be another process's that is about to load it: it stays.
RECENT_S = 3600.0
# The time of the last use is a file's time of modification (access times are often off). It may be
# behind by so much, so that reading writes nothing most times.
TOUCH_S = 600.0
_STAMP = "looked"
_UNFINISHED = "tmp"  # begins the names of tempfile's files and folders

_mine: set[Path] = set()  # entries that this process uses, as folder / key
_lock = threading.Lock()
_written = 0  # bytes, since this process looked
_looked = False


def cache_folder() -> Path:
    """$ONCHIP_CACHE, else ~/.cache/onchip; created on demand."""
    root = Path(os.environ.get("ONCHIP_CACHE") or Path.home() / ".cache" / "onchip")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(root, error, "created") from error
    return root


def folder_of(kind: str) -> Path:
    """The folder of one of KINDS. CacheError if it can't be made."""
    folder = cache_folder() / kind
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def unwritable(folder: Path, error: OSError, verb: str = "written") -> CacheError:
    return CacheError(
        f"the cache folder {folder} can't be {verb} ({error.strerror}): set ONCHIP_CACHE to a "
        "folder you can write to"
    )


# ---- reading and writing -----------------------------------------------------------------------


def store(path: Path, data: bytes) -> None:
    """Write a file of an entry, whole or not at all. Raises CacheError."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(path.parent, error) from error
    _mine.add(_entry_of(path))
    _make_room(len(data))


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder beside the entries for what a compiler writes; it is gone afterwards. Raises
    CacheError if it can't be made."""
    try:
        made = tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    with made as name:
        yield Path(name)


def used(path: Path) -> None:
    """Note that this process uses the entry of this file: it is young again, and stays."""
    _mine.add(_entry_of(path))
    with suppress(OSError):  # another user's, or read-only: it only ages
        if time.time() - path.stat().st_mtime > TOUCH_S:
            os.utime(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """What a JSON file of an entry holds; None if there is none or it is damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    used(path)
    return found


def store_binary(path: Path, data: bytes, facts: dict[str, Any]) -> None:
    """A binary and what is known of it, in a .json beside it, which is written last: it holds the
    binary's hash and so vouches for it."""
    store(path, data)
    vouched = {**facts, "sha256": hashlib.sha256(data).hexdigest()}
    store(path.with_suffix(".json"), json.dumps(vouched).encode())


def read_facts(path: Path) -> dict[str, Any] | None:
    """The facts of a binary; None if there is none, or it is not the one that was stored (it is
    made again)."""
    facts = read_json(path.with_suffix(".json"))
    if facts is None:
        return None
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
    return facts if facts.get("sha256") == found else None


# ---- what there is, and what goes --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """See the file. used: seconds since 1970 of its last use."""

    kind: str
    path: Path  # folder / key
    files: tuple[Path, ...]
    nbytes: int
    used: float

    @property
    def unfinished(self) -> bool:
        return self.path.name.startswith(_UNFINISHED)

    def remove(self) -> bool:
        """Whether it is gone."""
        for f in self.files:
            if f.is_dir():
                shutil.rmtree(f, ignore_errors=True)
            else:
                with suppress(OSError):
                    f.unlink(missing_ok=True)
        return not any(f.exists() for f in self.files)


def entries() -> list[Entry]:
    """Everything in the cache, least recently used first."""
    root = cache_folder()
    return sorted((e for kind in KINDS for e in _entries(root / kind)), key=lambda e: e.used)


def _entries(folder: Path) -> Iterator[Entry]:
    found: dict[Path, list[tuple[Path, int, float]]] = {}
    with suppress(FileNotFoundError), os.scandir(folder) as there:
        for f in there:
            with suppress(FileNotFoundError):  # another process has removed it
                path, facts = Path(f.path), f.stat()
                size = _size_of(path) if f.is_dir() else facts.st_size
                found.setdefault(_entry_of(path), []).append((path, size, facts.st_mtime))
    for path, files in found.items():
        names = tuple(f for f, _, _ in files)
        size, last = sum(n for _, n, _ in files), max(t for _, _, t in files)
        yield Entry(folder.name, path, names, size, last)


def _entry_of(path: Path) -> Path:
    return path.parent / path.name.partition(".")[0]


def _size_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def clear(older_than_s: float = 0.0) -> list[Entry]:
    """Remove what was not used within so many seconds (0: everything), but for what this process
    uses or another is just writing. What went."""
    now = time.time()
    gone = []
    for e in entries():
        age = now - e.used
        if e.path in _mine or age < older_than_s or (e.unfinished and age < RECENT_S):
            continue
        if e.remove():
            gone.append(e)
    return gone


def trim(most: int = MOST_BYTES) -> list[Entry]:
    """If the cache holds more than `most` bytes, remove the least recently used entries, but for
    recent ones and this process's own. What went."""
    found = entries()
    left, gone = sum(e.nbytes for e in found), []
    if left <= most:
        return gone
    oldest = time.time() - RECENT_S
    for e in found:
        if left <= most * KEPT_SHARE or e.used > oldest:
            break
        if e.path not in _mine and e.remove():
            left -= e.nbytes
            gone.append(e)
    return gone


def _make_room(nbytes: int) -> None:
    """After a store of so many bytes: look whether the cache is full, now and then."""
    global _written, _looked
    with _lock:
        _written += nbytes
        if _looked and _written < LOOK_BYTES:
            return
        again, _looked, _written = _looked, True, 0
    stamp = cache_folder() / _STAMP
    with suppress(OSError):  # a file that can't be removed, or no stamp: it stays too large
        if not again and stamp.exists() and time.time() - stamp.stat().st_mtime < LOOK_S:
            return
        stamp.touch()
        trim()
