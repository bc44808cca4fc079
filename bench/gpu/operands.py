"""Clocks of one product of a warpgroup, by how its operands lie in shared memory.

    PYTHONPATH=src python3 bench/gpu/operands.py [--no-run]

A program a multiprocessor multiplies 64 features by `columns` positions, 16 channels of bfloat16 at
a time, over and over on the same memory; weights are permuted by 128 bytes. At the full rate an
instruction takes columns / 2 clocks. The packed form (src/onchip/backends/cuda/packed.py) reads
positions without permutation: 16-byte parts `leading` bytes apart, groups of 8 positions `stride`
bytes apart. --no-run: compile for sm_90a only.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "src"))

INCLUDE = HERE.parents[1] / "src/onchip/backends/cuda/include"
ROUNDS, EACH = 100, 8
SHARED = 200_000  # bytes


@dataclass(frozen=True)
class Layout:
    """leading 0: permuted by 128 bytes. warpgroups: that multiply side by side."""

    columns: int
    leading: int
    stride: int
    warpgroups: int = 1


LAYOUTS = [
    Layout(112, 0, 1024),
    Layout(224, 0, 1024),
    Layout(112, 0, 1024, 2),
    Layout(112, 128, 256),
    Layout(112, 1792, 128),
    Layout(112, 1792, 128, 2),
    Layout(112, 1808, 128),
    Layout(112, 1920, 128),
    Layout(112, 2048, 128),
    Layout(112, 5376, 128),
    Layout(224, 3584, 128),
]


def text(x: Layout) -> str:
    half = x.columns // 2
    registers = ", ".join(f"%{i}" for i in range(half))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(half))
    operand = f"operand<128>(x, {x.stride})"
    if x.leading:
        operand = f"plain_operand(x, {x.leading})"
    step = x.leading // 8 if x.leading else 2  # of 16 bytes: the next two parts, or 32 bytes
    if x.leading and x.stride != 128:
        step = 16
    return f"""
#include <onchip/hopper.cuh>
DEVICE void product(float (&d)[{half}], u64 a, u64 b) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.u32 p, 1, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{x.columns}k16.f32.bf16.bf16 {{{registers}}}, "
        "%{half}, %{half + 1}, p, 1, 1, 0, 0;\\n}}" : {outputs} : "l"(a), "l"(b));
}}
extern "C" __global__ void __launch_bounds__({128 * x.warpgroups}, 1) clocks(long long* out) {{
    extern __shared__ unsigned char memory[];
    const u32 base = (shared_address(memory) + 1023) & ~1023u, x = base + 65536;
    for (int i = threadIdx.x; i < {(SHARED - 1024) // 4}; i += blockDim.x)
        store_word(base + 4 * i, 0);
    publish();
    __syncthreads();
    float d[{half}];
    for (int i = 0; i < {half}; i++) d[i] = 0.f;
    const u64 a = operand<128>(base + (threadIdx.x >> 7) * 8192, 1024);
    u64 b = {operand};
    if ({x.leading} && {x.stride} != 128) b += (u64)({x.stride - 128} >> 4) << 32;
    const long long start = clock64();
    for (int r = 0; r < {ROUNDS}; r++) {{
        products_fence();
        _Pragma("unroll") for (int k = 0; k < {EACH}; k++)
            product(d, a + k % 4 * 2, b + k % 4 * {step});
        products_commit();
        products_wait<0>();
    }}
    const long long end = clock64();
    float sum = 0.f;
    for (int i = 0; i < {half}; i++) sum += d[i];
    if (threadIdx.x == 0) out[blockIdx.x] = end - start + (sum == 1.f);
}}
"""


def compiled(source: str) -> bytes:
    from onchip.backends.cuda.worker import headers, run_nvrtc

    options = ["--gpu-architecture=sm_90a", "--std=c++17"]
    code, log, _, binary = run_nvrtc(source, "operands.cu", headers(INCLUDE), options)
    if int(code):
        sys.exit(log)
    return binary


def measured(binary: bytes, x: Layout) -> float:
    """Clocks of an instruction, of all warpgroups together."""
    import torch

    from onchip.backends.nvidia.launcher import driver

    torch.cuda.init()
    out = torch.zeros(
        torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int64, device="cuda"
    )
    cuda, module, function = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cuLaunchKernel.argtypes = None
    pointer = ctypes.c_uint64(out.data_ptr())
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    codes = [
        cuda.cuModuleLoadData(ctypes.byref(module), binary),
        cuda.cuModuleGetFunction(ctypes.byref(function), module, b"clocks"),
        cuda.cuFuncSetAttribute(function, 8, SHARED),
        *(
            cuda.cuLaunchKernel(
                function, len(out), 1, 1, 128 * x.warpgroups, 1, 1, SHARED, None, parameters, None
            )
            for _ in range(2)
        ),
    ]
    if any(codes):
        sys.exit(f"the driver answers {codes}")
    torch.cuda.synchronize()
    return out.double().median().item() / (ROUNDS * EACH * x.warpgroups)


def main() -> None:
    for x in LAYOUTS:
        binary = compiled(text(x))
        where = f"parts {x.leading} apart, groups {x.stride}" if x.leading else "permuted"
        said = "compiled"
        if "--no-run" not in sys.argv:
            said = f"{measured(binary, x):6.1f} clocks, {x.columns / 2:g} at the full rate"
        print(f"{x.columns} columns, {x.warpgroups} warpgroups, {where}: {said}", flush=True)


if __name__ == "__main__":
    main()
