"""The cache folder: whole entries whoever writes, damaged ones made again, old ones gone."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from onchip.backends import cache
from onchip.backends.cpp import compiler
from onchip.errors import CacheError

SOURCE = 'extern "C" int kernel(void** p) { *(float*)p[0] = %d.0f; return 0; }\n'
HOUR = 3600.0


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "c"))
    monkeypatch.setattr(cache, "_mine", set())
    monkeypatch.setattr(cache, "_looked", False)
    monkeypatch.setattr(cache, "_written", 0)
    return tmp_path / "c"


def result_of(binary: compiler.Binary) -> float:
    out = ctypes.c_float()
    assert binary.function((ctypes.c_void_p * 1)(ctypes.addressof(out))) == 0
    return out.value


def entry(key: str, nbytes: int, hours: float, kind: str = "choices") -> Path:
    """An entry of another process, last used so long ago."""
    path = cache.folder_of(kind) / f"{key}.json"
    path.write_bytes(b" " * nbytes)
    os.utime(path, (time.time() - hours * HOUR,) * 2)
    return path


def keys() -> set[str]:
    return {e.path.name for e in cache.entries()}


# ---- damaged entries ---------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "another file":
            path.write_bytes(data[:-8] + b"damaged!")
        case "not ELF":
            path.write_bytes(b"hello")
        case "no facts":
            path.with_suffix(".json").write_text("{")
        case "facts of a list":
            path.with_suffix(".json").write_text("[]")


@pytest.mark.parametrize(
    "how", ["truncated", "another file", "not ELF", "no facts", "facts of a list"]
)
def test_a_damaged_binary_is_built_again(how):
    path = compiler.build(SOURCE % 7).path
    damage(path, how)
    assert cache.read_facts(path) is None
    code = f"from onchip.backends.cpp import compiler as c; print(c.build({SOURCE % 7!r}).reused)"
    assert other_process(code) == "False"  # this one has the sound one loaded
    assert cache.read_facts(path) is not None
    assert other_process(code) == "True"


def other_process(code: str) -> str:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_binary_that_is_there_is_not_compiled(monkeypatch):
    assert not compiler.build(SOURCE % 3).reused
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("it compiles"))
    again = compiler.build("// of another model\n" + SOURCE % 3)
    assert again.reused
    assert result_of(again) == 3.0


def test_damaged_shared_parts_are_removed():
    parts = compiler.prebuilt("-O3")
    parts.make()
    (parts.folder / "tiles.o").write_text("nonsense")
    text = '#include "onchip/kernel.h"\n' + SOURCE % 4
    assert result_of(compiler.build(text)) == 4.0
    assert not parts.exists()


# ---- processes ---------------------------------------------------------------------------------


def _build(folder: str, start: float, out) -> None:
    os.environ["ONCHIP_CACHE"] = folder
    time.sleep(max(0.0, start - time.time()))
    made = [compiler.build(SOURCE % n) for n in range(4)]
    out.put([result_of(b) for b in made])


def test_processes_that_build_the_same_at_once_get_whole_binaries(folder):
    context = multiprocessing.get_context("spawn")
    out, start = context.Queue(), time.time() + 4
    workers = [context.Process(target=_build, args=(str(folder), start, out)) for _ in range(3)]
    for w in workers:
        w.start()
    found = [out.get(timeout=120) for _ in workers]
    for w in workers:
        w.join()
    assert found == [[0.0, 1.0, 2.0, 3.0]] * 3
    assert len(cache.entries()) == 4
    assert not [f for f in (folder / "cpp").iterdir() if f.name.startswith("tmp")]
    assert all(cache.read_facts(f) is not None for f in (folder / "cpp").glob("*.so"))


def _rewrite(path: str, n: int) -> None:
    for _ in range(200):
        cache.store(Path(path), json.dumps([n] * 5000).encode())


def test_a_reader_never_sees_half_a_file(folder):
    path = cache.folder_of("choices") / "k.json"
    cache.store(path, b"[]")
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_rewrite, args=(str(path), n)) for n in range(2)]
    for w in writers:
        w.start()
    while any(w.is_alive() for w in writers):
        assert len(json.loads(path.read_text())) in (0, 5000)
    assert [w.exitcode for w in writers] == [0, 0]


# ---- size --------------------------------------------------------------------------------------


def test_the_least_recently_used_go_and_no_more_than_needed():
    for n, hours in enumerate((9, 3, 7, 5)):
        entry(f"e{n}", 100, hours)
    gone = cache.trim(300)
    assert [e.path.name for e in gone] == ["e0", "e2"]  # down to 270 bytes, oldest first
    assert keys() == {"e1", "e3"}
    assert cache.trim(300) == []


def test_recent_entries_and_this_processs_own_stay():
    entry("recent", 100, 0.5)
    mine = entry("mine", 100, 50)
    cache.used(mine)
    os.utime(mine, (time.time() - 50 * HOUR,) * 2)
    entry("old", 100, 40)
    assert [e.path.name for e in cache.trim(0)] == ["old"]
    assert keys() == {"recent", "mine"}


def test_use_makes_an_entry_young():
    path = entry("k", 2, 100)
    assert cache.read_json(path) is None  # spaces: nobody uses what is damaged
    assert time.time() - cache.entries()[0].used > 99 * HOUR
    path.write_text("{}")
    os.utime(path, (time.time() - 100 * HOUR,) * 2)
    assert cache.read_json(path) == {}
    assert time.time() - cache.entries()[0].used < HOUR


def test_a_full_cache_is_emptied_by_a_store_but_not_looked_at_by_each(monkeypatch):
    looks = []
    trim = cache.trim
    monkeypatch.setattr(cache, "trim", lambda: looks.append(1) or trim(150))
    entry("a", 100, 9)
    entry("b", 100, 8)
    for n in range(3):
        cache.store(cache.folder_of("choices") / f"new{n}.json", b"{}")
    assert keys() == {"b", "new0", "new1", "new2"}
    assert len(looks) == 1
    monkeypatch.setattr(cache, "LOOK_BYTES", 10)
    cache.store(cache.folder_of("choices") / "large.json", b" " * 20)
    assert len(looks) == 2
    monkeypatch.setattr(cache, "_looked", False)  # another process, within the hour
    cache.store(cache.folder_of("choices") / "other.json", b"{}")
    assert len(looks) == 2


def test_an_entry_is_all_its_files(folder):
    compiler.build(SOURCE % 1)
    (found,) = cache.entries()
    assert sorted(f.suffix for f in found.files) == [".cpp", ".json", ".so"]
    assert found.nbytes == sum(f.stat().st_size for f in (folder / "cpp").iterdir())
    assert found.kind == "cpp"


# ---- clear -------------------------------------------------------------------------------------


def test_clear_removes_what_is_old_enough(folder):
    entry("young", 10, 10)
    entry("old", 30, 60)
    (folder / "notes.txt").write_text("not ours")
    assert [e.path.name for e in cache.clear(48 * HOUR)] == ["old"]
    assert keys() == {"young"}
    assert [e.nbytes for e in cache.clear()] == [10]
    assert (folder / "notes.txt").exists()


def test_clear_leaves_what_is_being_written():
    (cache.folder_of("triton") / "tmpabc").mkdir()
    assert cache.clear() == []
    os.utime(cache.folder_of("triton") / "tmpabc", (time.time() - 2 * HOUR,) * 2)
    assert len(cache.clear()) == 1


def test_a_folder_that_can_not_be_written_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "file" / "c"))
    with pytest.raises(CacheError, match="set ONCHIP_CACHE"):
        compiler.build(SOURCE % 1)
    with pytest.raises(CacheError, match=r"can't be written.*set ONCHIP_CACHE"):
        cache.store(tmp_path / "nowhere" / "x.json", b"")
