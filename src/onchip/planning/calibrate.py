"""The cost model's parameters (analysis.roofline.Costs), measured in a second or two."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log

import torch

from onchip.analysis.cost import Product, costs_of, product_us
from onchip.analysis.roofline import Ceilings, Costs
from onchip.backends.cpp.compiler import build
from onchip.errors import CompilerError
from onchip.ir.dtype import DType

# float32 elements of the copies that are timed: from what the first cache holds to what none does.
COPIED = tuple(1 << p for p in (12, 14, 16, 18, 20, 22, 24, 26))
# (rows, columns, K) of products that show what a tile costs beyond its K, and the values tried.
CPU_PRODUCTS = ((3136, 64, 64), (784, 128, 512), (3136, 64, 147))
GPU_PRODUCTS = ((8192, 256, 64), (6272, 128, 1152), (1568, 512, 512))
FILLS = tuple(8 * 2 ** (i / 2) for i in range(11))
# Of the shorter of moving bytes and computing, what the longer hides: least squares over the suite
# `cpu` (two cores), and for GPUs what kernels with several programs a multiprocessor reach.
OVERLAP = {False: 0.5, True: 0.8}

Run = Callable[[], object]
# Microseconds of one call, what starting it takes included.
Time = Callable[[Run], float]

_EMPTY_KERNEL = """
#include <cstdint>
extern "C" int kernel(void** pointers) {
  int status = 0;
  #pragma omp parallel reduction(|:status)
  { status |= pointers == nullptr; }
  return status;
}
"""


def kernel_call_us() -> float | None:
    """Microseconds that starting one generated kernel takes: the call from Python and waking the
    threads. None without a compiler."""
    try:
        function = build(_EMPTY_KERNEL).function
    except CompilerError:
        return None
    pointers = (ctypes.c_void_p * 1)(0)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            function(pointers)
        best = min(best, (time.perf_counter() - start) / 50)
    return best * 1e6


@torch.no_grad()
def costs(ceilings: Ceilings, device: torch.device, timed: Time, processors: int) -> Costs:
    """Parameters for a device whose ceilings are known; `timed` takes the best of a few calls."""
    if ceilings.gpu:
        start = call = ceilings.graph_launch_us or ceilings.launch_us
    else:
        start, call = kernel_call_us() or ceilings.launch_us, ceilings.launch_us
    found = Costs(_copied(device, timed, call, ceilings), start, processors, FILLS[0], 0.0)
    fill = _fill(replace(ceilings, costs=found), device, timed, call)
    return replace(found, fill=fill, overlap=OVERLAP[ceilings.gpu])


def _copied(
    device: torch.device, timed: Time, call: float, ceilings: Ceilings
) -> tuple[tuple[int, float], ...]:
    """See Costs. Whatever disturbs a measurement makes it longer, so a copy takes no longer than
    one of more bytes, and the largest no longer than at the ceiling; on a CPU, where short copies
    have no latency to speak of, none does."""
    source, target = torch.ones(2, COPIED[-1], device=device)
    points: list[tuple[int, float]] = []
    most = 2 * 4 * COPIED[-1] / ceilings.copy_gbs / 1e3
    for n in reversed(COPIED):
        x, y = source[:n], target[:n]
        us = timed(lambda x=x, y=y: torch.neg(x, out=y)) - call
        if not ceilings.gpu:
            most = min(most, 2 * 4 * n / ceilings.copy_gbs / 1e3 + call)
        # what an error of the start would make of a short copy is no speed
        us = min(max(us, call / 16), most)
        points.append((2 * 4 * n, us))
        most = us / 1.05
    return tuple(reversed(points))


def _fill(ceilings: Ceilings, device: torch.device, timed: Time, call: float) -> float:
    """The fill with which the model comes closest to measured products."""
    dtype, label = (torch.bfloat16, DType.BF16) if ceilings.gpu else (torch.float32, DType.F32)
    shapes = GPU_PRODUCTS if ceilings.gpu else CPU_PRODUCTS
    measured = []
    for m, n, k in shapes:
        x = torch.randn(m, k, device=device).to(dtype)
        y = torch.randn(k, n, device=device).to(dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        us = timed(lambda x=x, y=y, out=out: torch.mm(x, y, out=out)) - call
        measured.append((Product(m, n, k, 1, label), max(us, 0.1)))
    return closest_fill(ceilings, measured)


def closest_fill(ceilings: Ceilings, measured: Sequence[tuple[Product, float]]) -> float:
    """Of FILLS the one with the least sum of squared logarithms of predicted over measured."""
    costs = costs_of(ceilings)

    def error(fill: float) -> float:
        c = replace(ceilings, costs=replace(costs, fill=fill))
        return sum(log(product_us(p, c) / us) ** 2 for p, us in measured)

    return min(FILLS, key=error)
