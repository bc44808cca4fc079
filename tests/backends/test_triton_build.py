"""Triton texts become binaries in child processes: their figures, the cache, what goes wrong, and
how they are launched (with a driver of Python functions in place of CUDA's)."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.backends.fake_driver import Driver, installed

from onchip.backends.nvidia import launcher, pool
from onchip.backends.nvidia.build import Built
from onchip.backends.nvidia.resources import Resources, over_budget, resident_programs
from onchip.backends.nvidia.source import Launch
from onchip.backends.triton import build
from onchip.backends.triton.build import build_all
from onchip.backends.triton.source import TritonSource
from onchip.errors import CacheError, CompilerError, DeviceError
from onchip.fusion.machine import GPUS
from onchip.fusion.refusal import Rule

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the triton package is not installed (torch brings it on Linux)",
)
HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
ADD = HEAD + (
    "def kernel(in0, in1, out0):\n"
    "    a = tl.program_id(0) * 1024 + tl.arange(0, 1024)\n"
    "    tl.store(out0 + a, (tl.load(in0 + a) + tl.load(in1 + a)) * 2)\n"
)
# One warp has 128 elements of each of three values a thread, which all live until the end.
SPILLING = HEAD + (
    "def kernel(in0, out0):\n"
    "    a = tl.arange(0, 4096)\n"
    "    x = tl.load(in0 + a)\n"
    "    y = tl.load(in0 + 4096 + a)\n"
    "    z = tl.load(in0 + 8192 + a)\n"
    "    m = tl.max(x + y + z, 0)\n"
    "    tl.store(out0 + a, x - m)\n"
    "    tl.store(out0 + 4096 + a, y - m)\n"
    "    tl.store(out0 + 8192 + a, z - m)\n"
)
PRODUCT = HEAD + (
    "def kernel(in0, in1, out0):\n"
    "    m = tl.program_id(0) * 64 + tl.arange(0, 64)\n"
    "    n = tl.arange(0, 64)\n"
    "    k = tl.arange(0, 64)\n"
    "    acc = tl.zeros((64, 64), tl.float32)\n"
    "    for k0 in range(0, 256, 64):\n"
    "        a = tl.load(in0 + m[:, None] * 256 + k0 + k[None, :])\n"
    "        b = tl.load(in1 + (k0 + k)[:, None] * 64 + n[None, :])\n"
    "        acc = tl.dot(a, b, acc)\n"
    "    tl.store(out0 + m[:, None] * 64 + n[None, :], acc.to(tl.bfloat16))\n"
)
TWO = ADD + "\n\n" + ADD.removeprefix(HEAD[: HEAD.index("@")]).replace("kernel", "second")
ABORTS = (
    "import os\nimport sys\nprint('this is the end', file=sys.stderr, flush=True)\nos.abort()\n"
)
H200 = GPUS["h200"]


def source(text: str, *types: str, **options: int) -> TritonSource:
    launch = Launch("kernel", 3, tuple(range(len(types))), **options)
    return TritonSource(text, (launch,), (), (), types)


ADDED = source(ADD, "*fp32", "*fp32", "*fp32")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    return tmp_path / "triton"


def built(*sources: TritonSource, gpu=H200, **limits) -> list[Built]:
    made = build_all(sources, gpu, **limits)
    assert all(isinstance(b, Built) for b in made), made
    return [b for b in made if isinstance(b, Built)]


# ---- figures -----------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("name", ["a100", "h200", "b200"])
def test_figures_of_known_kernels(name, cache):
    gpu = GPUS[name]
    product = source(PRODUCT, "*bf16", "*bf16", "*bf16", stages=3)
    plain, matrix = (b.resources[0] for b in built(ADDED, product, gpu=gpu))
    assert (plain.shared_bytes, plain.stack_bytes, plain.spills, plain.warps) == (0, 0, 0, 4)
    assert 8 <= plain.registers <= 64
    assert plain.occupancy == 1.0
    assert plain.code_bytes == 16 * plain.instructions
    assert 30 < plain.instructions < 300
    # two operands of 64 x 64 in bf16, at least two of three stages in flight
    assert 2 * 2 * 64 * 64 * 2 <= matrix.shared_bytes <= gpu.shared_bytes
    assert matrix.spills == 0
    assert 0 < matrix.occupancy < 1
    assert over_budget([plain, matrix], gpu) is None


@needs_triton
def test_spills_are_counted_and_refused(cache):
    (b,) = built(source(SPILLING, "*fp32", "*fp32", warps=1))
    (r,) = b.resources
    assert r.stack_bytes > 256  # 384 values do not fit 255 registers
    assert r.spills > 100
    refusal = b.over_budget(H200)
    assert refusal is not None
    assert refusal.rule is Rule.SPILLS
    assert f"{r.stack_bytes:,} bytes" in str(refusal)
    (wide,) = built(source(SPILLING, "*fp32", "*fp32", warps=8))
    assert wide.over_budget(H200) is None


def test_each_limit_refuses_alone():
    fine = Resources(
        registers=64, stack_bytes=0, spills=0, shared_bytes=1024, warps=4, programs=8,
        occupancy=0.5, instructions=100, code_bytes=1600, seconds=1.0,
    )  # fmt: skip
    assert over_budget([fine], H200) is None
    for change, rule, figure in (
        ({"shared_bytes": 300_000}, Rule.SHARED_MEMORY, "300,000 bytes of 232,448"),
        ({"stack_bytes": 4096}, Rule.SPILLS, "4,096 bytes"),
        ({"programs": 0}, Rule.SPILLS, "64 registers a thread, 4 warps"),
        ({"code_bytes": 1 << 20}, Rule.TOO_LARGE, "1,024 KiB"),
        ({"seconds": 45.0}, Rule.TOO_LARGE, "45 s"),
    ):
        found = over_budget([fine, replace(fine, **change)], H200)
        assert found is not None
        assert found.rule is rule
        assert figure in str(found)


@pytest.mark.parametrize(
    ("capability", "registers", "shared", "warps", "programs"),
    [
        # by hand from the tables of the CUDA programming guide
        (90, 32, 0, 4, 16),  # 64 warps
        (90, 255, 0, 8, 1),  # 8 warps of 8,192 registers: 2 of them in a quarter of 16,384
        (90, 168, 0, 4, 3),  # 5,376 registers a warp: 3 a quarter, 12 in all
        (90, 144, 0, 1, 12),  # 4,608 a warp: 3 a quarter, though 65,536 hold 14
        (90, 32, 100 << 10, 4, 2),  # 101 KiB of 228
        (90, 32, 227 << 10, 4, 1),
        (90, 16, 0, 1, 32),  # 32 programs at most
        (80, 32, 81 << 10, 4, 2),  # 82 KiB of 164
        (80, 32, 82 << 10, 4, 1),
        (89, 32, 0, 4, 12),  # 48 warps
        (90, 128, 0, 32, 0),  # 4,096 registers a warp: 16 warps in all
    ],
)
def test_resident_programs(capability, registers, shared, warps, programs):
    n, occupancy = resident_programs(capability, registers, shared, warps)
    assert n == programs
    assert occupancy == n * warps / (48 if capability == 89 else 64)


def test_an_unknown_capability_is_an_error():
    with pytest.raises(CompilerError, match="sm_70"):
        resident_programs(70, 32, 0, 4)


# ---- what goes wrong ---------------------------------------------------------------------------


@needs_triton
def test_a_crash_and_a_refusal_cost_their_own_kernel_only(cache):
    bad = source(HEAD + "def kernel(in0):\n    tl.arange(0, 5)\n", "*fp32")
    crash = source(ADD + ABORTS, "*fp32")
    made = build_all([ADDED, crash, bad, ADDED], H200, workers=2)
    assert isinstance(made[0], Built)
    assert isinstance(made[3], Built)
    texts = (r"SIGABRT.*sm_90: this is the end", r"sm_90: .*power of 2")
    for error, text in zip(made[1:3], texts, strict=True):
        assert isinstance(error, CompilerError)
        assert re.search(f"(?s){text}", str(error)), error
    again = build_all([crash], H200)  # what failed is tried again
    assert isinstance(again[0], CompilerError)


@needs_triton
@pytest.mark.parametrize(
    ("text", "waits", "figure", "how"),
    [
        ("while True:\n    pass\n", 100, "1 s of processor time", signal.SIGXCPU),
        ("import time\ntime.sleep(100)\n", 3, "3 s", signal.SIGKILL),
    ],
)
def test_what_takes_too_long_is_ended(text, waits, figure, how, cache, monkeypatch):
    pool.end_idle()
    monkeypatch.setattr(pool, "WAITS", waits)
    made: list[pool.Worker] = []

    class Seen(pool.Worker):
        def __init__(self, compiler: pool.Compiler) -> None:
            super().__init__(compiler)
            made.append(self)

    monkeypatch.setattr(pool, "Worker", Seen)
    (error,) = build_all([source(ADD + text, "*fp32")], H200, limit_s=1)
    assert isinstance(error, CompilerError)
    assert f"more than {figure} compiling kernel" in str(error)
    assert [w.process.poll() for w in made] == [-how]
    assert pool._idle == []


@needs_triton
def test_the_compiler_process_is_kept_and_ended(cache, monkeypatch):
    pool.end_idle()
    build_all([ADDED], H200)
    ((_, worker),) = pool._idle
    build_all([source(ADD.replace("2)", "3)"), "*fp32", "*fp32", "*fp32")], H200)
    assert [w for _, w in pool._idle] == [worker]
    scratch = Path(worker.scratch.name)
    assert scratch.is_dir()
    pool.end_idle()
    assert worker.process.poll() is not None
    assert not scratch.exists()


def test_without_triton_there_is_one_sentence(cache, monkeypatch):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(build, "triton_version", build.triton_version.__wrapped__)
    with pytest.raises(CompilerError, match=r"not installed.*pip install triton"):
        build_all([ADDED], H200)


# ---- the cache ---------------------------------------------------------------------------------


@needs_triton
def test_a_binary_is_made_once_for_each_capability_and_choice(cache):
    first, second = built(ADDED, ADDED)
    assert not first.reused
    assert first.cubins == second.cubins
    comment = replace(ADDED, text="# another model\n" + ADD)
    (again,) = built(comment)
    assert again.reused
    assert again.cubins == first.cubins
    others = [
        source(ADD, "*fp32", "*fp32", "*fp32", warps=8),
        source(ADD, "*bf16", "*fp32", "*fp32"),
        source(ADD.replace("* 2", "* 3"), "*fp32", "*fp32", "*fp32"),
    ]
    made = [*built(*others), *built(ADDED, gpu=GPUS["a100"])]
    assert not any(b.reused for b in made)
    assert len({b.cubins[0].path for b in (first, *made)}) == 5


@needs_triton
@pytest.mark.parametrize("part", ["json", "cubin", "py"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_entry_is_made_again(part, damage, cache):
    (first,) = built(ADDED)
    (path,) = cache.glob(f"*.{part}")
    whole = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "changed":
            path.write_bytes(whole.replace(b"0", b"1"))
        case "gone":
            path.unlink()
    (second,) = built(ADDED)
    assert second.reused == (part == "py")
    assert second.path.read_text() == ADD
    assert second.cubins[0].path.read_bytes()[:4] == b"\x7fELF"
    facts = json.loads(next(cache.glob("*.json")).read_text())
    assert facts["resources"]["registers"] == first.resources[0].registers
    assert not [p for p in cache.iterdir() if p.suffix not in (".py", ".json", ".cubin")]


@needs_triton
def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "triton").write_text("a file where the folder should be")
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    with pytest.raises(CacheError, match="ONCHIP_CACHE"):
        build_all([ADDED], H200)


@needs_triton
def test_under_the_interpreter_nothing_is_compiled(cache, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (b,) = built(ADDED)
    assert b.cubins == ()
    assert b.path.read_text() == ADD
    monkeypatch.setattr(launcher.torch.cuda, "init", lambda: None)
    with pytest.raises(CompilerError, match="TRITON_INTERPRET"):
        b.launcher(0)


# ---- launching ---------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch) -> Iterator[Driver]:
    yield from installed(monkeypatch)


@needs_triton
def test_launches_in_order_with_their_own_pointers(cache, driver):
    launches = (
        Launch("kernel", 7, (0, 1, 3)), Launch("second", 0, (0, 1, 2)),
        Launch("second", 9, (3, 1, 2), warps=2),
    )  # fmt: skip
    types = ("*fp32", "*fp32", "*fp32", "*fp32")
    (b,) = built(TritonSource(TWO, launches, (), (), types))
    assert b.run([16, 32, 48, 64], 77) == 0
    assert b.run([160, 320, 480, 640], 78) == 0
    b.launcher(0).enqueue((16, 32, 48, 64), 0)
    assert driver.named("cuLaunchKernelEx") == [
        (1000, 7, 1, 1, 128, 1, 1, 0, 77, [16, 32, 64, 0, 0]),
        (1001, 9, 1, 1, 64, 1, 1, 0, 77, [64, 32, 48, 0, 0]),
        (1000, 7, 1, 1, 128, 1, 1, 0, 78, [160, 320, 640, 0, 0]),
        (1001, 9, 1, 1, 64, 1, 1, 0, 78, [640, 320, 480, 0, 0]),
        (1000, 7, 1, 1, 128, 1, 1, 0, 0, [16, 32, 64, 0, 0]),
        (1001, 9, 1, 1, 64, 1, 1, 0, 0, [64, 32, 48, 0, 0]),
    ]
    assert len(driver.named("cuModuleLoadData")) == 2  # loaded once, none for the empty launch
    assert driver.named("cuFuncSetAttribute") == []
    assert driver.attributes == [[]] * 6


@needs_triton
@pytest.mark.parametrize(("cluster", "allowed"), [(8, []), (16, [(1000, 14, 1)])])
def test_clusters_and_early_starts_are_asked_for(cache, driver, cluster, allowed):
    launches = (
        Launch("kernel", 32, (0, 1, 2), cluster=cluster, waits=True),
        Launch("second", 9, (3, 1, 2)),
    )
    (b,) = built(TritonSource(TWO, launches, (), (), ("*fp32",) * 4))
    pointers = [16, 32, 48, 64]
    b.run(pointers)
    with launcher.early_starts():
        b.run(pointers)
    b.run(pointers)
    assert driver.named("cuFuncSetAttribute") == allowed
    shape, early = (4, cluster, 1, 1), (6, 1, 0, 0)
    # a kernel that does not wait by itself may not start early
    assert driver.attributes == [[shape], [], [shape, early], [], [shape], []]


@needs_triton
def test_threads_do_not_mix_their_pointers(cache, driver):
    (b,) = built(ADDED)
    enqueue = b.launcher(0).enqueue

    def work(k):
        for _ in range(100):
            enqueue((16 * k, 32 * k, 48 * k), k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    found = [(c[8], *c[9][:3]) for c in driver.named("cuLaunchKernelEx")]
    assert Counter(found) == {(k, 16 * k, 32 * k, 48 * k): 100 for k in range(1, 5)}


@needs_triton
def test_large_shared_memory_is_asked_for_once(cache, driver):
    text = PRODUCT.replace("256", "1024")
    big = source(text, "*bf16", "*bf16", "*bf16", stages=5)
    (b,) = built(big)
    shared = b.resources[0].shared_bytes
    assert shared > 48 << 10
    b.run([16, 32, 48])
    b.run([16, 32, 48])
    assert driver.named("cuFuncSetAttribute") == [(1000, 8, shared)]
    assert driver.named("cuLaunchKernelEx")[0][7] == shared


@needs_triton
def test_errors_of_the_driver_have_a_name(cache, driver):
    (b,) = built(ADDED)
    driver.codes["cuModuleLoadData"] = [209]
    with pytest.raises(DeviceError, match=r"loading .*cubin on GPU 0.*CUDA_ERROR_OF_A_TEST"):
        b.run([16, 32, 48])
    b.run([16, 32, 48])  # what failed is tried again
    driver.codes["cuLaunchKernelEx"] = [719]
    with pytest.raises(DeviceError, match="launching kernel failed"):
        b.run([16, 32, 48])
    with pytest.raises(DeviceError, match="0x2c is not aligned to 16 bytes"):
        b.run([16, 44, 48])


@needs_triton
def test_a_thread_without_a_context_gets_one(cache, driver):
    (b,) = built(ADDED)
    driver.codes["cuLaunchKernelEx"] = [201]
    assert b.run([16, 32, 48]) == 0
    order = [c[0] for c in driver.calls]
    assert order[-4:] == [
        "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernelEx",
    ]  # fmt: skip


def test_no_driver_is_one_sentence(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(launcher.ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match=r"the NVIDIA driver .* is not installed here"):
        launcher.driver.__wrapped__()
