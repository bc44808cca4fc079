// What scalar functions need of PTX: half types without their headers, and instructions that CUDA C++
// has no name for. "approx" ones are some units of float32 off.
#pragma once

namespace onchip {

__device__ __forceinline__ float from_bf16(unsigned short x) { return __uint_as_float(unsigned(x) << 16); }
__device__ __forceinline__ float from_fp16(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ unsigned short to_bf16(float x) {
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ unsigned short to_fp16(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
// NaN in either wins; the last four are of both halves of a word.
#define EXTREME(NAME, TYPE, LETTER, INSTRUCTION)                                     \
    __device__ __forceinline__ TYPE NAME(TYPE a, TYPE b) {                           \
        TYPE y;                                                                      \
        asm(INSTRUCTION " %0, %1, %2;" : "=" LETTER(y) : LETTER(a), LETTER(b));      \
        return y;                                                                    \
    }
EXTREME(maximum, float, "f", "max.NaN.f32")
EXTREME(minimum, float, "f", "min.NaN.f32")
EXTREME(maximum_bf16x2, unsigned, "r", "max.NaN.bf16x2")
EXTREME(minimum_bf16x2, unsigned, "r", "min.NaN.bf16x2")
EXTREME(maximum_fp16x2, unsigned, "r", "max.NaN.f16x2")
EXTREME(minimum_fp16x2, unsigned, "r", "min.NaN.f16x2")
#undef EXTREME
// Results below the normal range are zero.
__device__ __forceinline__ float approx_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float approx_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float approx_sqrt(float x) {
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float approx_divide(float a, float b) {  // over the whole range of b
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

}  // namespace onchip
