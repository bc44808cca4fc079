"""The parts that kernels share are compiled once, change no result, and are never needed."""

import ctypes
import multiprocessing

import numpy as np
import pytest

from onchip.backends.cpp import compiler

# C = A B by contract(), and a streamed copy of C: both things that the shared parts hold.
SOURCE = """
#include "onchip/kernel.h"
struct Write {
    float* to; long ld;
    __attribute__((always_inline)) void operator()(long m, int mc, long n, int nc,
                                                   const float* tile, long l) const {
        for (int i = 0; i < mc; ++i)
            for (int j = 0; j < nc; ++j) to[(m + i) * ld + n + j] = tile[i * l + j];
    }
};
extern "C" int kernel(void** p) {
    const float* a = (const float*)p[0];
    constexpr long M = 13, K = 29, N = 37;
    float* packed = (float*)aligned_alloc(64, (onchip::packed_b_size(K, N) * 4 + 63) / 64 * 64);
    onchip::pack_b((const float*)p[1], K, N, N, 1, packed);
    const onchip::Blocking blocking = onchip::choose_blocking(M, N, K, K);
    char* work = onchip::thread_scratch(onchip::workspace_floats(M, N, K, blocking) * 4);
    onchip::contract(M, N, K, 0, N, packed, blocking,
                     onchip::direct_rows([=](long m) { return a + m * K; }),
                     Write{(float*)p[2], N}, (float*)work);
    onchip::stream((float*)p[3] + 1, (const float*)p[2], M * N);
    onchip::stream_fence();
    free(packed);
    return TAG;
}
"""


def source(tag: int) -> str:
    return SOURCE.replace("TAG", str(tag))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    return tmp_path


def check(binary, tag):
    rng = np.random.default_rng(tag)
    a = rng.normal(size=(13, 29)).astype(np.float32)
    b = rng.normal(size=(29, 37)).astype(np.float32)
    c = np.full((13, 37), np.nan, np.float32)
    d = np.full(13 * 37 + 2, 5.0, np.float32)
    status = binary.function((ctypes.c_void_p * 4)(*(x.ctypes.data for x in (a, b, c, d))))
    assert status == tag
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
    assert np.array_equal(d[1:-1], c.ravel())
    assert d[0] == d[-1] == 5.0


@pytest.fixture
def commands(monkeypatch):
    """Arguments of every compilation."""
    seen, original = [], compiler._compile

    def watched(arguments, target, optimise):
        seen.append(arguments)
        return original(arguments, target, optimise)

    monkeypatch.setattr(compiler, "_compile", watched)
    return seen


def test_many_kernels_share_parts_and_few_do_not(commands):
    for tag, b in enumerate(compiler.build_all([source(0), source(1)])):
        check(b, tag)
    assert len(commands) == 2
    assert not compiler.prebuilt("-O3").exists()
    del commands[:]
    for tag, b in enumerate(compiler.build_all([source(i) for i in range(4)])):
        check(b, tag)
        assert b.reused == (tag < 2)
    assert len(commands) == 2  # two sources are new: too few
    del commands[:]
    for tag, b in enumerate(compiler.build_all([source(i) for i in range(4, 7)]), 4):
        check(b, tag)
    parts = compiler.prebuilt("-O3")
    assert parts.exists()
    assert (parts.folder / "tiles.o").is_file()
    assert sum(str(parts.folder / "tiles.o") in c for c in commands) == 3


def test_damaged_parts_are_not_needed(commands):
    parts = compiler.prebuilt("-O3")
    parts.make()
    for name in ("tiles.o", "onchip/kernel.h.gch"):
        (parts.folder / name).write_bytes(b"damaged")
    check(compiler.build(source(3)), 3)
    assert len(commands[-1]) < len(commands[-2])


def test_parts_that_can_not_be_built_are_not_used(monkeypatch, cache):
    def refuse(*_):
        raise compiler.CompilerError("no")

    with monkeypatch.context() as m:
        m.setattr(compiler, "_compile", refuse)
        compiler.prebuilt("-O3").make()
    assert not compiler.prebuilt("-O3").exists()
    assert not list((cache / "prebuilt").iterdir())
    check(compiler.build(source(2)), 2)


def test_an_error_names_the_kernel(cache):
    compiler.prebuilt("-O3").make()
    with pytest.raises(compiler.CompilerError, match=r"cpp/\w+\.cpp: .*nothing"):
        compiler.build(source(1).replace("return 1", "return nothing"))


def _make(folder):
    import os

    os.environ["ONCHIP_CACHE"] = folder
    compiler.prebuilt("-O1").make()


def test_processes_may_build_the_parts_at_once(cache):
    workers = [multiprocessing.get_context("spawn").Process(target=_make, args=(str(cache),))
               for _ in range(2)]  # fmt: skip
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert [w.exitcode for w in workers] == [0, 0]
    assert [p.name for p in (cache / "prebuilt").iterdir()] == [
        compiler.prebuilt("-O1").folder.name
    ]
    check(compiler.build(source(4), "-O1"), 4)


def test_fifty_loops_over_short_rows_stay_small():
    """Rows of eight vectors are not unrolled: the code would be five times as long."""
    loop = """
    for (int64_t i = 0; i < 64; ++i) {
        #pragma omp simd
        for (int64_t j = 0; j < 64; ++j)
            y[i * 64 + j] = onchip::sin(x[i * 64 + j]) + x[i * 64 + j] * %d.5f;
    }"""
    body = "\n".join(loop % n for n in range(50))
    source = (
        '#include "onchip/kernel.h"\nextern "C" int kernel(void** p) {\n'
        f"const float* x = (const float*)p[0]; float* y = (float*)p[1];\n{body}\nreturn 0; }}\n"
    )
    assert 0 < compiler.build(source).code_bytes < 60_000


def test_a_kernel_is_linked_with_whatever_linker_there_is(monkeypatch, tmp_path):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    compiler_linkers = compiler.LINKERS
    for linkers in ((), ("no-such-linker",), compiler_linkers):
        monkeypatch.setattr(compiler, "LINKERS", linkers)
        compiler.linker_flags.cache_clear()
        if linkers != compiler_linkers:
            assert compiler.linker_flags() == ()
        source = f'extern "C" int kernel(void**) {{ return {len(linkers)}; }}\n'
        assert compiler.build(source).function(None) == len(linkers)
    compiler.linker_flags.cache_clear()
