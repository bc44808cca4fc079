"""Binaries on a GPU: built in child processes, launched through the driver, recorded in a graph.

    PYTHONPATH=src python bench/gpu/launcher_check.py

One line a check; the exit code is the number of checks that failed.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from onchip.backends.nvidia.build import Built
from onchip.backends.nvidia.launcher import Launcher
from onchip.backends.nvidia.source import Launch
from onchip.backends.triton.build import build_all
from onchip.backends.triton.source import TritonSource
from onchip.errors import DeviceError
from onchip.planning.generators.triton import gpu_of

N = 1000
HEAD = "import triton\nimport triton.language as tl\n\n\n"
ADD = """@triton.jit
def kernel(in0, in1, out0):
    a = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out0 + a, (tl.load(in0 + a) + tl.load(in1 + a)) * 2)
"""
DOUBLE = """

@triton.jit
def double(out0):
    a = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out0 + a, tl.load(out0 + a) * 2)
"""
PRODUCT = """@triton.jit
def kernel(in0, in1, out0):
    m = tl.program_id(0) * 64 + tl.arange(0, 64)
    n = tl.arange(0, 64)
    k = tl.arange(0, 64)
    acc = tl.zeros((64, 64), tl.float32)
    for k0 in range(0, 1024, 64):
        a = tl.load(in0 + m[:, None] * 1024 + k0 + k[None, :])
        b = tl.load(in1 + (k0 + k)[:, None] * 64 + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(out0 + m[:, None] * 64 + n[None, :], acc.to(tl.bfloat16))
"""


def made(source: TritonSource) -> Built:
    (built,) = build_all([source], gpu_of(torch.device("cuda")))
    if isinstance(built, Exception):
        raise built
    return built


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def add_source() -> TritonSource:
    launches = (Launch("kernel", N, (0, 1, 2)), Launch("double", N, (2,), warps=8))
    return TritonSource(HEAD + ADD + DOUBLE, launches, (), (), ("*fp32",) * 3)


def tensors() -> tuple[list[torch.Tensor], list[int], torch.Tensor]:
    """Inputs and a poisoned output, their addresses, and what the two functions should write."""
    x, y = torch.randn(2, N * 1024, device="cuda")
    out = torch.full_like(x, float("nan"))
    return [x, y, out], [t.data_ptr() for t in (x, y, out)], (x + y) * 4


def two_functions() -> str:
    built = made(add_source())
    (_, _, out), pointers, expected = tensors()
    built.run(pointers, stream())
    assert torch.equal(out, expected)
    r = built.resources[0]
    return f"{r.registers} registers, occupancy {r.occupancy:.0%}, {r.seconds:.1f} s to compile"


def large_shared_memory() -> str:
    launch = Launch("kernel", 16, (0, 1, 2), stages=5)
    built = made(TritonSource(HEAD + PRODUCT, (launch,), (), (), ("*bf16",) * 3))
    shared = built.resources[0].shared_bytes
    assert shared > 48 << 10, shared
    x, w = (torch.randn(n, 1024, device="cuda").bfloat16() for n in (1024, 64))
    w = w.T.contiguous()
    out = torch.full((1024, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    built.run([t.data_ptr() for t in (x, w, out)], stream())
    error = (out.double() - x.double() @ w.double()).norm() / out.double().norm()
    assert error < 4e-3, error
    return f"{shared} bytes, error {error:.1e}"


def recorded_in_a_graph() -> str:
    built = made(add_source())
    (x, y, out), pointers, _ = tensors()
    built.launcher()  # loaded before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built.run(pointers, stream())
    out.fill_(float("nan"))
    x.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, (x + y) * 4)
    return "replayed on changed inputs"


def own_stream() -> str:
    built = made(add_source())
    (_, _, out), pointers, expected = tensors()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    built.run(pointers, side.cuda_stream)
    side.synchronize()
    assert torch.equal(out, expected)
    return "a side stream"


def other_threads() -> str:
    """Threads that have not used the GPU before, eight at once, each with tensors of its own."""
    built = made(add_source())
    built.launcher()
    sets = [tensors() for _ in range(8)]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(pointers: list[int]) -> None:
        try:
            for _ in range(50):
                built.run(pointers, 0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(p,)) for _, p, _ in sets]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.cuda.synchronize()
    assert not failures, failures[0]
    assert all(torch.equal(out, expected) for (_, _, out), _, expected in sets)
    return "8 threads, 50 runs each"


def errors_have_names() -> str:
    built = made(add_source())
    _kept, pointers, _ = tensors()
    said = ""
    try:
        built.run([pointers[0], pointers[1] + 4, pointers[2]], stream())
    except DeviceError as error:
        said = str(error)
    assert "not aligned" in said, said or "a misaligned pointer was accepted"
    cut = Path(built.cubins[0].path).with_suffix(".cut")
    cut.write_bytes(built.cubins[0].path.read_bytes()[:500])
    try:
        Launcher(replace(built, cubins=(replace(built.cubins[0], path=cut),) * 2), 0)
    except DeviceError as error:
        return str(error)
    finally:
        cut.unlink()
    raise AssertionError("a damaged binary was loaded")


def host_cost() -> str:
    built = made(add_source())
    _kept, pointers, _ = tensors()
    one = replace(built, launches=built.launches[:1], cubins=built.cubins[:1])
    run, at = one.launcher().run, stream()
    for _ in range(100):
        run(pointers, at)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        run(pointers, at)
    host = (time.perf_counter() - start) / 500
    torch.cuda.synchronize()
    return f"{host * 1e6:.1f} us of the host for each launch"


CHECKS: list[Callable[[], str]] = [
    two_functions, large_shared_memory, recorded_in_a_graph, own_stream, other_threads,
    errors_have_names, host_cost,
]  # fmt: skip


def main() -> int:
    failed = 0
    for check in CHECKS:
        try:
            result = f"ok    {check.__name__}: {check()}"
        except Exception:
            failed += 1
            result = f"FAIL  {check.__name__}: {traceback.format_exc(limit=3)}"
        print(result, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
