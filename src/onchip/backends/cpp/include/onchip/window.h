// Sums over sliding windows with a weight for each tap and channel (depthwise convolutions), over
// channels-last data.
//
// A sum loads one input and one weight for each multiplication, so that loads are the bottleneck.
// COUNT neighbouring positions together load each weight once and share the inputs on which their
// windows overlap. The sums are written channel by channel to a small tile; generated code goes on
// from there.
#pragma once

#include "onchip/contract.h"

namespace onchip {

// sums[q * ld + c] = sum over i < ROWS, j < TAPS of
//     input[c + i * row + (q * STRIDE + j * DILATION) * step] * weights[c + (i * TAPS + j) * ldw]
// for q < COUNT and c < channels. Whatever is read must lie in memory: there are no borders here.
template <int ROWS, int TAPS, int COUNT, int STRIDE, int DILATION>
inline void window_sums(const float* input, long row, long step, const float* weights, long ldw,
                        long channels, float* sums, long ld) {
    constexpr int WIDTH = (COUNT - 1) * STRIDE + (TAPS - 1) * DILATION + 1;
    long c = 0;
#pragma GCC unroll 1
    for (; c + VEC <= channels; c += VEC) {
        Vector sum[COUNT];
#pragma GCC unroll 16
        for (int q = 0; q < COUNT; ++q) sum[q] = Vector{};
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
            Vector weight[TAPS];
#pragma GCC unroll 16
            for (int j = 0; j < TAPS; ++j) weight[j] = load(weights + c + (i * TAPS + j) * ldw);
            // Input by input rather than tap by tap: each is in a register only while it is used.
#pragma GCC unroll 64
            for (int u = 0; u < WIDTH; ++u) {
                const Vector value = load(input + c + i * row + u * step);
#pragma GCC unroll 16
                for (int j = 0; j < TAPS; ++j) {
                    const int start = u - j * DILATION;
                    if (start >= 0 && start % STRIDE == 0 && start / STRIDE < COUNT)
                        add_product(sum[start / STRIDE], value, weight[j]);
                }
            }
        }
#pragma GCC unroll 16
        for (int q = 0; q < COUNT; ++q) store(sums + q * ld + c, sum[q]);
    }
    for (; c < channels; ++c)
        for (int q = 0; q < COUNT; ++q) {
            float sum = 0.0f;
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < TAPS; ++j)
                    sum += input[c + i * row + (q * STRIDE + j * DILATION) * step] *
                           weights[c + (i * TAPS + j) * ldw];
            sums[q * ld + c] = sum;
        }
}

}  // namespace onchip
