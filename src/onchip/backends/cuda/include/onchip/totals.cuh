// The second launch of a kernel with totals: what tiles have folded is folded in their order, in float64
// (sums of thousands of tiles), and finished.
//
// The text that includes this defines, before: namespace cfg, struct Args, partials(),
// finish(): the generated results of totals. A program has 32 features of one place along the lines that
// are kept; its warps fold runs of tiles side by side, then what each has.
#pragma once
#include <onchip/hopper.cuh>
#include <onchip/scalar.cuh>

#define UNROLL _Pragma("unroll")

namespace totals {

constexpr int LANES = 32, WARPS = cfg::TOTAL_WARPS;
constexpr int BLOCKS = (cfg::FEATURES + LANES - 1) / LANES;

DEVICE double nothing(char fold) {
    const double infinite = __longlong_as_double(0x7FF0000000000000ll);
    return fold == 's' ? 0. : fold == 'M' ? -infinite : infinite;
}
DEVICE double folded(char fold, double a, double b) {  // NaN in either wins
    if (fold == 's') return a + b;
    return b != b || (fold == 'M' ? b > a : b < a) ? b : a;
}

DEVICE void run(const Args& a) {
    __shared__ double parts[WARPS][cfg::TOTALS][LANES];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int block = blockIdx.x % BLOCKS, kept = blockIdx.x / BLOCKS % cfg::KEPT;
    const int batch = blockIdx.x / BLOCKS / cfg::KEPT, feature = block * LANES + lane;
    const int own = min(feature, cfg::FEATURES - 1);
    wait_for_launch_before();
    UNROLL for (int k = 0; k < cfg::TOTALS; k++) {
        const float* from = partials(a) + ((k * cfg::BATCH + batch) * cfg::KEPT + kept) * (cfg::FOLDED_TILES * cfg::FEATURES) + own;
        double v = nothing(cfg::TOTAL_FOLD[k]);
#pragma unroll 8
        for (int n = warp * cfg::FOLDED_TILES / WARPS; n < (warp + 1) * cfg::FOLDED_TILES / WARPS; n++)
            v = folded(cfg::TOTAL_FOLD[k], v, from[n * cfg::FEATURES]);
        parts[warp][k][lane] = v;
    }
    __syncthreads();
    if (warp == 0 && feature < cfg::FEATURES) {
        float total[cfg::TOTALS];
        UNROLL for (int k = 0; k < cfg::TOTALS; k++) {
            double v = nothing(cfg::TOTAL_FOLD[k]);
            UNROLL for (int w = 0; w < WARPS; w++) v = folded(cfg::TOTAL_FOLD[k], v, parts[w][k][lane]);
            total[k] = v;
        }
        Place at = {batch, feature, {0, 0, 0, 0}};
        int rest = kept;
        UNROLL for (int l = 0; l < 4; l++)
            if (cfg::APART[l]) {
                at.at[l] = rest % cfg::TILES[l];
                rest /= cfg::TILES[l];
            }
        finish(a, total, at);
    }
    start_next_launch();
}

}  // namespace totals
