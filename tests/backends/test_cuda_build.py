"""CUDA C++ becomes binaries through NVRTC in child processes: figures, warnings, the cache, what
goes wrong; and how kernels with tensor maps are launched (with a driver of Python functions)."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.backends import cuda_copy
from tests.backends.fake_driver import Driver, installed

from onchip.backends.cuda import build
from onchip.backends.cuda.build import build_all
from onchip.backends.cuda.source import CudaSource, Further, Pointer
from onchip.backends.nvidia import launcher, pool
from onchip.backends.nvidia.build import Built
from onchip.backends.nvidia.resources import over_budget, tool
from onchip.backends.nvidia.source import TensorMap
from onchip.backends.nvidia.tensor_map import EncodedMap, problem_of
from onchip.errors import CompilerError, DeviceError
from onchip.fusion.machine import GPUS
from onchip.fusion.refusal import Rule

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("triton") is None,
    reason="cuda-bindings or triton (for cuobjdump) is not installed: torch for CUDA brings both",
)
H200 = GPUS["h200"]
ADD = """\
extern "C" __global__ void __launch_bounds__(128) add(const float* a, const float* b, float* c) {
  int n = blockIdx.x * 128 + threadIdx.x;
  c[n] = (a[n] + b[n]) * SCALE;
}
"""
MAPPED = """\
struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void mapped(float* c, const __grid_constant__ Map m) {
  c[threadIdx.x] = m.words[threadIdx.x % 16];
}
"""
ACCUMULATORS = ", ".join(f"%{n}" for n in range(32))
# Products into 32 accumulators of a thread, which are read (or not) before they are done.
PRODUCTS = f"""\
extern "C" __global__ void __launch_bounds__(128) multiply(
    float* out, unsigned long long a, unsigned long long b) {{
  float d[32];
  for (int i = 0; i < 32; ++i) d[i] = out[i];
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int k = 0; k < 4; ++k) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{ACCUMULATORS}}},"
                 " %32, %33, 1, 1, 1, 0, 0;"
                 : {", ".join(f'"+f"(d[{n}])' for n in range(32))} : "l"(a), "l"(b));
    BETWEEN
  }}
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 32; ++i) out[i + threadIdx.x * 32] = d[i];
}}
"""


def source(text: str, name: str, kinds: str = "ppp", **facts) -> CudaSource:
    """kinds: a letter for each parameter, "p" a pointer, "m" a map of it."""
    made = [Pointer(n) if k == "p" else replace(MAP, n=n) for n, k in enumerate(kinds)]
    return CudaSource(text, name, tuple(made), 3, 128, facts.pop("shared", 0), (), (), **facts)


MAP = TensorMap(
    0, "bf16", 64, (64, 28, 32), (128, 3584), (64, 10, 6), (1, 1, 2), 128
)  # fmt: skip
ADDED = source(ADD.replace("SCALE", "2"), "add")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    return tmp_path / "cuda"


@pytest.fixture
def include(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "include"
    (folder / "onchip").mkdir(parents=True)
    monkeypatch.setattr(build, "INCLUDE", folder)
    return folder / "onchip"


@pytest.fixture
def driver(monkeypatch) -> Iterator[Driver]:
    yield from installed(monkeypatch)


def built(*sources: CudaSource) -> list[Built]:
    made = build_all(sources, H200)
    assert all(isinstance(b, Built) for b in made), made
    return [b for b in made if isinstance(b, Built)]


def refused(s: CudaSource) -> str:
    (error,) = build_all([s], H200)
    assert isinstance(error, CompilerError)
    return str(error)


# ---- figures -----------------------------------------------------------------------------------


@needs_nvrtc
def test_figures_and_warnings_of_known_kernels(cache):
    big = 100 << 10
    made = built(
        source(ADD.replace("SCALE", "2"), "add", shared=big),
        source(PRODUCTS.replace("BETWEEN", ""), "multiply"),
        source(PRODUCTS.replace("BETWEEN", "d[k] += 1.f;"), "multiply"),
    )
    plain, fine, serial = (b.resources[0] for b in made)
    assert (plain.shared_bytes, plain.warps, plain.spills, plain.stack_bytes) == (big, 4, 0, 0)
    assert plain.programs == 2  # of 101 KiB, in 228
    assert 8 <= plain.registers <= 32
    assert 0.01 < plain.seconds < 30
    assert fine.registers >= 32
    assert not any("serialized" in w for w in fine.warnings)
    assert over_budget([plain, fine], H200) is None
    # each text once, without the line of PTX
    assert len(set(serial.warnings)) == len(serial.warnings)
    assert not any("around line" in w for w in serial.warnings)
    refusal = made[2].over_budget(H200)
    assert refusal is not None
    assert refusal.rule is Rule.SERIALISED
    assert re.search(r"\(C75\d\d\).*wgmma.*serialized.*'multiply'", str(refusal))
    (again,) = built(source(PRODUCTS.replace("BETWEEN", "d[k] += 1.f;"), "multiply"))
    assert again.reused
    assert again.resources == made[2].resources  # warnings too


TWICE = f"""\
#ifndef ONCHIP_LAUNCH
{ADD.replace("SCALE", "2")}
#else
extern "C" __global__ void negate(float* c) {{ c[threadIdx.x] = -c[threadIdx.x]; }}
#endif
"""


@needs_nvrtc
def test_each_launch_of_a_text_is_a_binary_of_its_own(cache):
    further = (Further("negate", (Pointer(2),), 1, 64),)
    (b,) = built(source(TWICE, "add", further=further))
    assert [c.name for c in b.cubins] == ["add", "negate"]
    assert len({c.path for c in b.cubins}) == 2
    assert [(x.name, x.programs, x.warps, x.arguments) for x in b.launches] == [
        ("add", 3, 4, (0, 1, 2)), ("negate", 1, 2, (2,)),
    ]  # fmt: skip
    assert [r.warps for r in b.resources] == [4, 2]
    assert len(list(cache.rglob("*.cubin"))) == 2
    says = refused(source(TWICE, "add", further=(Further("lost", (), 1, 32),)))
    assert 'no kernel of that name: extern "C" __global__ void lost' in says


# ---- what goes wrong ---------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize(
    ("made", "says"),
    [
        (source(ADD, "add"), r'NVRTC refused add of .*\.cu for sm_90.*\.cu\(3\): error: .*"SCALE"'),
        (source(ADD.replace("SCALE", "2"), "other"), r'no kernel of that name: extern "C".*other'),
        (
            source(ADD.replace("SCALE", "2"), "add", "pp"),
            r"takes \['pointer', 'pointer', 'pointer'\], and its launch gives .*'pointer'\]",
        ),
        (source(MAPPED, "mapped", "mp"), r"takes \['pointer', 'map'\].*\['map', 'pointer'\]"),
        (source(MAPPED.replace("64)", "32)"), "mapped", "pm"), r"\.align 32 \.b8"),
        (source('#include "onchip/none.cuh"\n' + ADDED.text, "add"), r"onchip/none\.cuh"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_and_costs_its_own_kernel_only(made, says, cache):
    error, fine = build_all([made, ADDED], H200, workers=1)
    assert isinstance(error, CompilerError)
    assert re.search(f"(?s){says}", str(error)), error
    assert isinstance(fine, Built)
    assert list(cache.glob("*.cubin")) == [fine.cubins[0].path]


@needs_nvrtc
def test_processes_of_two_compilers_are_not_mixed_up(cache):
    pool.end_idle()
    built(ADDED)
    ((_, worker),) = pool._idle
    other = pool._borrow(pool.Compiler("another", "onchip.backends.cuda.worker"))
    assert other is not worker
    other.end()
    assert pool._borrow(build.COMPILER) is worker
    pool._give_back(worker)
    pool.end_idle()


def test_other_gpus_are_refused(cache):
    with pytest.raises(CompilerError, match="written for sm_90, not for sm_100"):
        build_all([ADDED], GPUS["b200"])


def test_without_the_bindings_there_is_one_sentence(cache, monkeypatch):
    def missing(name):
        raise build.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build.importlib.metadata, "version", missing)
    monkeypatch.setattr(build, "nvrtc_version", build.nvrtc_version.__wrapped__)
    with pytest.raises(CompilerError, match=r"not installed.*pip install cuda-bindings"):
        build_all([ADDED], H200)


# ---- the cache ---------------------------------------------------------------------------------


@needs_nvrtc
def test_a_binary_is_made_once_for_each_text_and_header(cache, include):
    header = include / "scale.cuh"
    header.write_text("#pragma once\n#define SCALE 2\n")
    scaled = source("#include <onchip/scale.cuh>\n" + ADD, "add")
    first, second = built(scaled, scaled)
    assert not first.reused
    assert first.cubins == second.cubins
    (again,) = built(replace(scaled, text="// another model\n" + scaled.text))
    assert again.reused
    header.write_text("#pragma once\n#define SCALE 3\n")
    (other,) = built(scaled)
    assert not other.reused
    assert other.path == first.path
    assert other.cubins[0].path != first.cubins[0].path
    assert other.cubins[0].path.read_bytes() != first.cubins[0].path.read_bytes()
    (shared,) = built(replace(scaled, shared_bytes=1 << 10))  # figures depend on it
    assert not shared.reused
    assert shared.resources[0].shared_bytes == 1 << 10


@needs_nvrtc
@pytest.mark.parametrize("part", ["json", "cubin"])
def test_a_damaged_entry_is_made_again(part, cache):
    (first,) = built(ADDED)
    (path,) = cache.glob(f"*.{part}")
    path.write_bytes(path.read_bytes()[:-20])
    (second,) = built(ADDED)
    assert not second.reused
    assert second.resources[0].registers == first.resources[0].registers
    (third,) = built(ADDED)
    assert third.reused


# ---- tensor maps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"sizes": (64,), "strides": (), "box": (64,), "every": (1,)}, ""),
        ({"box": (64, 256, 6)}, ""),
        ({"kind": "fp32", "box": (32, 10, 6)}, ""),
        ({"swizzle": 0, "box": (256, 10, 6)}, ""),
        ({"kind": "fp8"}, "type fp8: known are fp16, fp32, bf16"),
        ({"sizes": ()}, "0 dimensions, where 1 to 5"),
        ({"sizes": (8,) * 6}, "6 dimensions"),
        ({"strides": (128,)}, "3 sizes need 2 strides, 3 of box and every, not 1, 3 and 3"),
        ({"every": (1, 1)}, "not 2, 3 and 2"),
        ({"swizzle": 48}, "swizzle is 48 bytes"),
        ({"offset": 4}, "starts 8 bytes into the tensor, no multiple of 16"),
        ({"sizes": (64, 0, 32)}, "size 1 is 0"),
        ({"box": (64, 257, 6)}, "box 1 is 257, where 1 to 256"),
        ({"every": (1, 9, 1)}, "every 1 is 9"),
        ({"strides": (1 << 40, 128)}, "stride 0 is 1,099,511,627,776"),
        ({"strides": (128, 3592)}, "stride 1 is 3,592 bytes, no multiple of 16"),
        ({"every": (2, 1, 1)}, "one in 2 of the innermost"),
        ({"box": (60, 10, 6)}, "a row of the box is 120 bytes, no multiple of 16"),
        ({"swizzle": 64}, "a row of the box is 128 bytes, and 64 are permuted"),
    ],
)
def test_what_the_hardware_can_not_have_is_said(change, says):
    found = problem_of(replace(MAP, **change))
    assert says in found
    assert bool(says) == bool(found)


def test_a_map_is_encoded_as_the_driver_wants_it(driver):
    cuda = pytest.importorskip("cuda.bindings.driver")
    m = EncodedMap(MAP)
    assert m.move(driver, 0x7000) == 0
    assert driver.named("cuTensorMapEncodeTiled") == [
        (
            cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, 0x7000 + 64 * 2,
            [64, 28, 32], [128, 3584], [64, 10, 6], [1, 1, 2],
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    ]  # fmt: skip
    kinds, swizzles = cuda.CUtensorMapDataType, cuda.CUtensorMapSwizzle
    for kind, swizzle, number, code in (
        ("fp16", 64, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, swizzles.CU_TENSOR_MAP_SWIZZLE_64B),
        ("fp32", 32, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, swizzles.CU_TENSOR_MAP_SWIZZLE_32B),
        ("fp32", 0, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, swizzles.CU_TENSOR_MAP_SWIZZLE_NONE),
    ):
        EncodedMap(replace(MAP, kind=kind, swizzle=swizzle)).move(driver, 16)
        call = driver.named("cuTensorMapEncodeTiled")[-1]
        assert (call[0], call[8]) == (number, code)
        assert call[2] == 16 + 64 * (2 if kind == "fp16" else 4)


@needs_nvrtc
def test_the_kernel_that_copies_a_box_compiles(cache, driver):
    """What tests/gpu runs."""
    driver.functions["copy"] = 2
    (b,) = built(cuda_copy.source(128))
    assert "UTMALDG" in disassembled(b)
    assert problem_of(b.launches[0].arguments[1]) == ""
    b.run([16, 0x1000])
    assert driver.named("cuLaunchKernelEx")[-1][-1] == [16, 0x1000 + 2 * cuda_copy.OFFSET]


def disassembled(b: Built) -> str:
    command = [str(tool()), "-sass", str(b.cubins[0].path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_nvrtc
def test_maps_follow_their_tensors(cache, driver):
    driver.functions["mapped"] = 2
    (b,) = built(source(MAPPED, "mapped", "pm", cluster=2, shared=64 << 10))
    launched = []
    for pointers in ([16, 0x100], [32, 0x100], [32, 0x200], [32, 0x200], [48, 0x100]):
        b.run(pointers, 7)
        launched.append(driver.named("cuLaunchKernelEx")[-1])
    assert launched[0] == (1000, 3, 1, 1, 128, 1, 1, 64 << 10, 7, [16, 0x180])
    # each launch with the map of its own call
    assert [x[-1] for x in launched] == [
        [16, 0x180], [32, 0x180], [32, 0x280], [32, 0x280], [48, 0x180],
    ]  # fmt: skip
    assert len(driver.named("cuTensorMapEncodeTiled")) == 1
    assert driver.named("cuTensorMapReplaceAddress") == [(0x280,), (0x180,)]
    assert driver.named("cuFuncSetAttribute") == [(1000, 8, 64 << 10)]
    with launcher.early_starts():
        b.run([16, 0x100])
    assert driver.attributes[0] == [(4, 2, 1, 1)]
    assert driver.attributes[-1] == [(4, 2, 1, 1), (6, 1, 0, 0)]


@needs_nvrtc
def test_errors_of_tensor_maps_have_a_name(cache, driver):
    driver.functions["mapped"] = 2
    (b,) = built(source(MAPPED, "mapped", "pm"))
    driver.codes["cuTensorMapEncodeTiled"] = [1]
    with pytest.raises(DeviceError, match=r"tensor map of .*0x100 failed: CUDA_ERROR_OF_A_TEST"):
        b.run([16, 0x100])
    driver.codes["cuTensorMapEncodeTiled"] = [201]  # this thread's first use of the GPU
    b.run([16, 0x100])
    assert driver.named("cuCtxSetCurrent")
    assert driver.named("cuLaunchKernelEx")[-1][-1] == [16, 0x180]
    bad = replace(b, launches=(replace(b.launches[0], arguments=(0, replace(MAP, swizzle=5))),))
    with pytest.raises(DeviceError, match=r"tensor map of .*\.cu can't be: swizzle is 5"):
        bad.launcher(0)


def test_an_old_driver_is_one_sentence():
    with pytest.raises(DeviceError, match=r"no cuTensorMapEncodeTiled.*CUDA 12"):
        EncodedMap(MAP).move(object(), 16)  # type: ignore[arg-type]
