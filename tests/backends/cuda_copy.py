"""A kernel that copies one box of a tensor through shared memory by a tensor map, and what it
should write: every second row, some of the rows outside of the tensor."""

from __future__ import annotations

import torch

from onchip.backends.cuda.source import CudaSource, Pointer
from onchip.backends.nvidia.source import TensorMap

SHAPE = (4, 9, 96)  # of the tensor
OFFSET, SIZES = 32, (64, 9, 4)  # the map is of part of each row
BOX, EVERY, START = (64, 5, 3), (1, 2, 1), (0, -1, 2)
TAKEN = tuple(-(-b // e) for b, e in zip(BOX, EVERY, strict=True))  # innermost first

TEXT = """\
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) Map { u64 words[16]; };

extern "C" __global__ void __launch_bounds__(128)
copy(u16* out, const __grid_constant__ Map map) {
  extern __shared__ __align__(1024) u16 box[];
  u32 at = __cvta_generic_to_shared(box), barrier = __cvta_generic_to_shared(box + COUNT);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async.shared::cta;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(2 * COUNT));
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(at), "l"(&map), "r"(barrier), "r"(START0), "r"(START1), "r"(START2)
                 : "memory");
  }
  __syncthreads();
  u32 done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier) : "memory");
  for (int n = threadIdx.x; n < COUNT; n += 128) out[n] = box[n];
}
"""
COUNT = TAKEN[0] * TAKEN[1] * TAKEN[2]


def source(swizzle: int = 0) -> CudaSource:
    """The kernel: pointers are those of its result (COUNT elements) and of the tensor."""
    text = TEXT.replace("COUNT", str(COUNT))
    for n, start in enumerate(START):
        text = text.replace(f"START{n}", str(start))
    strides = (2 * SHAPE[2], 2 * SHAPE[2] * SHAPE[1])
    made = TensorMap(1, "bf16", OFFSET, SIZES, strides, BOX, EVERY, swizzle)
    return CudaSource(text, "copy", (Pointer(0), made), 1, 128, 2 * COUNT + 8, (), (), waits=False)


def expected(x: torch.Tensor, swizzle: int = 0) -> torch.Tensor:
    """What shared memory holds, [z, y, x], for a tensor of SHAPE in bfloat16."""
    out = torch.zeros(TAKEN[::-1], dtype=x.dtype)
    for z in range(TAKEN[2]):
        for y in range(TAKEN[1]):
            row, picture = START[1] + EVERY[1] * y, START[2] + EVERY[2] * z
            if 0 <= row < SIZES[1] and 0 <= picture < SIZES[2]:
                out[z, y] = x[picture, row, OFFSET : OFFSET + SIZES[0]]
    if not swizzle:
        return out
    # 16-byte parts of a row of 128 bytes, permuted by the row's number
    rows = out.reshape(-1, swizzle // 16, 8)
    moved = torch.empty_like(rows)
    for n in range(len(rows)):
        for part in range(rows.shape[1]):
            moved[n, part ^ (n % 8)] = rows[n, part]
    return moved.reshape(out.shape)
