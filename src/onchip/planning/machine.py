"""The ceilings of the machine at hand, measured once and kept in the cache folder."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from onchip.analysis.roofline import Ceilings, Costs
from onchip.backends.cache import folder_of, read_json, store
from onchip.backends.cpp.compiler import build
from onchip.errors import CompilerError, OnchipError
from onchip.planning.calibrate import costs

_VERSION = 4  # of the stored form and of the way of measuring
_DRIVER = Path("/proc/driver/nvidia/version")
PAUSES, PAUSE_S, REST_S = 20, 0.004, 0.2  # of a measurement on a CPU, which others use too
_GPU_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def device_name(device: str = "cpu") -> str:
    """The processor's own name: "AMD EPYC 9B14", "NVIDIA H200"."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def driver_version(device: str = "cpu") -> str:
    """Of the GPU's driver: "570.86.15", or the CUDA version that it is for where the system does
    not say more; "" for a CPU."""
    if torch.device(device).type != "cuda":
        return ""
    try:  # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu ..."
        words = _DRIVER.read_text().split()
        return next(w for w in words if w[0].isdigit() and w.count(".") >= 1)
    except (OSError, StopIteration):
        asked = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")  # no CUDA in torch
        return f"for CUDA {asked()}"


def measure(device: str = "cpu", refresh: bool = False) -> Ceilings:
    """Ceilings of `device` ("cpu" or "cuda"), from the cache or measured now (a few seconds).

    copy: GB/s read plus written by one copy between reused buffers far larger than the caches,
    all threads. gflops: a large square matrix product by type; for float32 on a CPU multiply-adds
    between registers if they are faster, as no library's product is a ceiling. launch_us: a tiny
    operator, eager, and on a GPU a node of a CUDA graph. The best of several tries, since other
    processes only ever slow them down; `source` says under what load that was.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise OnchipError(f"device {device!r} can't be measured: use 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise OnchipError(f"device {device!r} is not there: torch {torch.__version__} sees no GPU")
    path = _path(device)
    if not refresh and (known := _read(path)) is not None:
        return known
    gpus = [] if kind == "cpu" else [torch.device(device).index or torch.cuda.current_device()]
    # the user's random numbers go on as if nothing had happened
    with torch.random.fork_rng(devices=gpus):
        found = _measure_cpu() if kind == "cpu" else _measure_gpu(device)
    _write(path, found)
    return found


def _path(device: str) -> Path:
    where = (device_name(device), driver_version(device))
    key = (_VERSION, *where, torch.get_num_threads(), torch.__version__)
    return folder_of("ceilings") / f"{sha256(repr(key).encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> Ceilings | None:
    """The stored ceilings; None (measure again) if there are none, if the file is damaged, or if
    they were measured on a machine twice as busy as it is now."""
    try:
        stored = read_json(path) or {}
        busy = stored["load"] > torch.get_num_threads() and _load() < stored["load"] / 2
        return None if busy else _restored(stored["ceilings"])
    except (TypeError, KeyError):
        return None


def _restored(stored: dict[str, Any]) -> Ceilings:
    known = stored["costs"]
    if known is not None:
        known = Costs(**{**known, "copied": tuple((n, us) for n, us in known["copied"])})
    return Ceilings(**{**stored, "costs": known})


def _write(path: Path, found: Ceilings) -> None:
    store(path, json.dumps({"load": _load(), "ceilings": asdict(found)}, indent=1).encode())


def _best_us(run: Callable[[], object], tries: int, calls: int = 1) -> float:
    """Microseconds of one call, the best of `tries`."""
    run()
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    return best


def _rested_us(run: Callable[[], object]) -> float:
    """The best of several tries, some after each pause: a scheduler gives cores to a process that
    has waited, and the first call after the pause wakes the threads."""
    best, end = float("inf"), time.perf_counter() + REST_S
    for n in range(PAUSES):
        if n > 1 and time.perf_counter() > end:
            break
        time.sleep(PAUSE_S)
        best = min(best, _best_us(run, 4))
    return best


def _copy_us(n: int, device: str, clock: Callable[[Callable[[], object]], float]) -> float:
    """Copying n float32 between two reused buffers."""
    src, dst = torch.ones(2, n, device=device)
    return clock(lambda: dst.copy_(src))


def _load() -> float:
    """Processes that wanted to run in the last minute, ours included; 0 where unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


@torch.no_grad()
def _measure_cpu() -> Ceilings:
    n = 1 << 26  # 256 MiB a buffer: past any last-level cache
    copy_us = _copy_us(n, "cpu", lambda run: _best_us(run, 5))
    rates = {}
    for label, dtype, size in (("float32", torch.float32, 1536), ("float64", torch.float64, 1024)):
        x, y = torch.randn(2, size, size, dtype=dtype)
        out = torch.empty_like(x)
        us = _best_us(lambda x=x, y=y, out=out: torch.mm(x, y, out=out), 5)
        rates[label] = 2 * size**3 / us / 1e3
    rates["float32"] = max(rates["float32"], _multiply_add_rate())
    t = torch.ones(8)
    launch = _best_us(lambda: torch.relu(t), 20, 200)
    found = Ceilings(
        device_name(),
        2 * 4 * n / copy_us / 1e3,
        rates,
        launch,
        f"measured, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"load average {_load():.1f}",
        gpu=False,
    )
    threads = torch.get_num_threads()
    own = costs(found, torch.device("cpu"), _rested_us, threads)
    return replace(found, costs=own)


_ROUNDS = 2_000_000
_MULTIPLY_ADDS = """
#include "onchip/kernel.h"
extern "C" int kernel(void** pointers) {
  int status = 0;
  #pragma omp parallel reduction(|:status)
  {
    onchip::Vector sum[12] = {}, factor = onchip::broadcast(0.5f);
    for (long i = 0; i < ROUNDS; ++i)
    #pragma GCC unroll 12
      for (int j = 0; j < 12; ++j) onchip::add_product(sum[j], factor, factor);
    float total = 0;
    #pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) total += sum[j][0];
    status |= total < 0;
    *(float*)pointers[0] = onchip::VEC;
  }
  return status;
}
"""


def _multiply_add_rate() -> float:
    """GFLOP/s of twelve independent vectors of float32 multiply-adds on each thread; 0 without a
    compiler. Twelve: enough to hide their latency, few enough for the registers."""
    try:
        function = build(_MULTIPLY_ADDS.replace("ROUNDS", str(_ROUNDS))).function
    except CompilerError:
        return 0.0
    width = ctypes.c_float()
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(width))
    us = _best_us(lambda: function(pointers), 5)
    return 2 * 12 * width.value * _ROUNDS * torch.get_num_threads() / us / 1e3


@torch.no_grad()
def _measure_gpu(device: str) -> Ceilings:
    def clock(run: Callable[[], object], tries: int, calls: int) -> float:
        def several() -> None:
            for _ in range(calls):
                run()
            torch.cuda.synchronize(device)

        return _best_us(several, tries) / calls

    n = 1 << 28
    copy_us = _copy_us(n, device, lambda run: clock(run, 5, 20))
    src, dst = torch.ones(2, n, device=device)
    # the driver's copy may be slower than a kernel that reads and writes as much
    copy_us = min(copy_us, clock(lambda: torch.neg(src, out=dst), 5, 20))
    t = torch.ones(8, device=device)
    launch = clock(lambda: torch.relu(t), 10, 500)
    found = Ceilings(
        device_name(device),
        2 * 4 * n / copy_us / 1e3,
        _gpu_rates(device, clock),
        launch,
        f"measured, torch {torch.__version__}, CUDA {torch.version.cuda}",
        _graph_node_us(device, lambda: torch.relu_(t)),
    )
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    timed = lambda run: _graph_node_us(device, run, 20)  # noqa: E731
    return replace(found, costs=costs(found, torch.device(device), timed, processors))


def _gpu_rates(device: str, clock: Callable[..., float]) -> dict[str, float]:
    """GFLOP/s of 8192^3 products (4096^3 in float64), random operands; float32 with TF32 off."""
    rates, size = {}, 8192
    flag = torch.backends.cuda.matmul.allow_tf32
    try:
        for dtype in _GPU_TYPES:
            x, y = torch.randn(2, size, size, device=device).to(dtype)
            for tf32 in (False, True) if dtype is torch.float32 else (False,):
                torch.backends.cuda.matmul.allow_tf32 = tf32
                us = clock(lambda x=x, y=y: x @ y, 3, 5)
                label = "tf32" if tf32 else str(dtype).removeprefix("torch.")
                rates[label] = 2 * size**3 / us / 1e3
        x, y = torch.randn(2, size // 2, size // 2, device=device, dtype=torch.float64)
        rates["float64"] = 2 * (size // 2) ** 3 / clock(lambda: x @ y, 3, 3) / 1e3
    finally:
        torch.backends.cuda.matmul.allow_tf32 = flag
    return rates


def _graph_node_us(device: str, run: Callable[[], object], nodes: int = 1000) -> float:
    """One kernel as a node of a CUDA graph of `nodes` dependent ones."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(nodes):
            run()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return _best_us(replay, 10) / nodes
