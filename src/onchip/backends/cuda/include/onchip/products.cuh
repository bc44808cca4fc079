// The products of a warpgroup (wgmma), over all of a tile's steps.
#pragma once
#include <onchip/tiles.cuh>

namespace engine {

// ---- the consumers -----------------------------------------------------------------------------

// One step: a chunk of channels of one tap. add 0: nothing has been summed yet.
template <class D>
DEVICE void multiply(D& d, u64 a, u64 b, u32 add) {
    UNROLL for (int k = 0; k < cfg::K_STEPS; k++)
        UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
            UNROLL for (int s = 0; s < cfg::STRIPS; s++)
                product(d[m][s], a + (m * BLOCK * cfg::ROW + W_K_STEP * k) / 16,
                        b + (cfg::STRIP_ROW[s] * cfg::ROW + 32 * k) / 16, k == 0 ? add : 1);
}

// A thread's weights of one step, as the matrix unit takes them from registers (PTX ISA, wgmma: of
// each 8 channels those of rows lane / 4 and 8 on, at lane % 4 and 4 on), as two TF32 each.
struct Weights {
    u32 high[cfg::BLOCKS][cfg::K_STEPS][4], low[cfg::BLOCKS][cfg::K_STEPS][4];

    __device__ __forceinline__ void load(u32 tile) {
        constexpr u32 PERMUTED = cfg::ROW - 16;  // bits of an address: which 16 bytes of a row
        const int lane = threadIdx.x & 31, row = 16 * (threadIdx.x >> 5 & 3) + (lane >> 2);
        const u32 at = tile + row * cfg::ROW, own = at + (at >> 3 & PERMUTED) + 4 * (lane & 3);
        UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
            UNROLL for (int k = 0; k < cfg::K_STEPS; k++)
                UNROLL for (int i = 0; i < 4; i++) {
                    const u32 word = load_word((own ^ (32 * k + 16 * (i >> 1))) + (m * BLOCK + 8 * (i & 1)) * cfg::ROW);
                    high[m][k][i] = rounded_tf32(word);
                    low[m][k][i] = __float_as_uint(__uint_as_float(word) - __uint_as_float(high[m][k][i]));
                    here(high[m][k][i]), here(low[m][k][i]);  // not between products
                }
    }
};

// Warpgroups of a team issue a step's products one after the other: what one does besides (its
// weights, its sums) hides behind the others' products.
struct Order {
    u32 mine, next;  // barriers: it is this warpgroup's turn, the next one's
    u32 parity;      // of the first member's, whose first turn nobody passes, the other one
    DEVICE Order of(const Shared& s, int group) {
        if constexpr (!cfg::SPLITS) return {};
        const int same = __shfl_sync(~0u, group, 0);  // in a warp: ptxas must see that a wait ends for all
        const int member = same % cfg::SPLIT;
        return {s.order + 8 * same, s.order + 8 * (same - member + (member + 1) % cfg::SPLIT), member == 0};
    }
    __device__ __forceinline__ void take() {
        if constexpr (cfg::SPLIT > 1) barrier_wait(mine, parity), parity ^= 1;
    }
    __device__ __forceinline__ void pass() const {
        if constexpr (cfg::SPLIT > 1)
            if ((threadIdx.x & 31) == 0) barrier_arrive(next);
    }
};

// One step whose operands are split, the product of the low parts left away. The matrix unit rounds
// its sums toward zero, which over thousands of steps costs more than the low parts gain. So this
// step's sums, of some columns at a time, start from zero, low parts first, and are added to d while
// the next columns are multiplied.
template <class D, class W>
DEVICE void multiply_split(D& d, const W& w, u64 b, Order& order) {
    constexpr int PARTS = cfg::GROUPS / PART_GROUPS, COUNT = 4 * PART_GROUPS;
    constexpr int ALL = cfg::BLOCKS * cfg::STRIPS * PARTS;
    float sums[2][COUNT];
    order.take();
    UNROLL for (int n = 0; n <= ALL; n++) {
        if (n < ALL) {
            const int m = n / (cfg::STRIPS * PARTS), s = n / PARTS % cfg::STRIPS, part = n % PARTS;
            const u64 high = b + (cfg::STRIP_ROW[s] + part * PART_GROUPS * cfg::GROUP_ROWS) * cfg::ROW / 16;
            products_fence();
            UNROLL for (int k = 0; k < cfg::K_STEPS; k++) {
                product(sums[n & 1], w.low[m][k], high + 2 * k, k > 0);
                product(sums[n & 1], w.high[m][k], high + X_LOW / 16 + 2 * k, 1);
            }
            UNROLL for (int k = 0; k < cfg::K_STEPS; k++) product(sums[n & 1], w.high[m][k], high + 2 * k, 1);
            products_commit();
            if (n == ALL - 1) order.pass();
        }
        if (n > 0) {
            const int m = (n - 1) / (cfg::STRIPS * PARTS), s = (n - 1) / PARTS % cfg::STRIPS;
            if (n < ALL) products_wait<1>();
            else products_wait<0>();
            UNROLL for (int i = 0; i < COUNT; i++) {
                here(sums[(n - 1) & 1][i]);
                d[m][s][(n - 1) % PARTS * COUNT + i] += sums[(n - 1) & 1][i];
            }
        }
    }
}

template <class D>
DEVICE void clear(D& d) {
    UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
        UNROLL for (int n = 0; n < cfg::STRIPS; n++)
            UNROLL for (int i = 0; i < SUMS; i++) d[m][n][i] = 0.f;
}

// A slot is free, as far as this warp is concerned: for all programs that fill it together.
template <int PROGRAMS>
DEVICE void release(u32 barrier) {
    const u32 lane = threadIdx.x & 31;
    if constexpr (PROGRAMS > 1) {
        if (lane < PROGRAMS) barrier_arrive_at(barrier, lane);
    } else {
        if (lane == 0) barrier_arrive(barrier);
    }
}

struct Consumer {
    Shared s;
    int group, member;  // of the warpgroups; in its team
    Ring<cfg::X_STAGES> x;
    Ring<W_TILES> w;
    bool weights_here;

    // All of a tile's products into d.
    template <class D>
    __device__ __forceinline__ void sum(D& d, const Tile& t, int turn) {
        const u64 a = operand<W_ROW>(s.w + member * cfg::BLOCKS * BLOCK * cfg::ROW, 8 * W_ROW);
        const u64 b = operand<cfg::ROW>(s.x, cfg::GROUP_ROWS * cfg::ROW);
        int w_before = -1, x_before = -1, x_now = 0;
        u32 add = cfg::K_SPLIT > 1;
        // of a part whose number of steps ptxas can't tell, sums without a value would serialize products
        if constexpr (cfg::K_SPLIT > 1) clear(d);
        walk<UNROLLED>(
            t,
            [&](int c, int phase) {
                barrier_wait(s.x_full + 8 * x.slot, x.parity);
                x_now = x.slot;
                x.next();
                if constexpr (cfg::TURNS && !STREAM)
                    if (c == cfg::CHUNKS - 1 && phase == cfg::PHASES - 1) pass_on();
            },
            [&](int c, int tap, bool first) {
                const int slot = STREAM ? w.slot : c * cfg::TAPS + tap;
                if (STREAM || !weights_here) barrier_wait(s.w_full + 8 * slot, STREAM ? w.parity : 0);
                if (w_before < 0 && x_before < 0 && first) mark(8, turn);
                products_fence();
                multiply(d, a + (u64)(slot * (cfg::W_BYTES / 16)),
                         b + (u64)(x_now * (cfg::X_SLOT / 16) + cfg::TAP_ROWS[tap] * (cfg::ROW / 16)), add);
                products_commit();
                add = 1;
                if (STREAM || first) {
                    products_wait<1>();  // those of the step before
                    if (STREAM && w_before >= 0) release<cfg::W_SHARED>(s.w_empty + 8 * w_before);
                    if (first && x_before >= 0) release<cfg::X_SHARED>(s.x_empty + 8 * x_before);
                }
                if (first) x_before = x_now;
                if constexpr (STREAM) {
                    w_before = w.slot;
                    w.next();
                }
            });
        if constexpr (cfg::TURNS && STREAM) pass_on();
        products_wait<0>();
        release<cfg::X_SHARED>(s.x_empty + 8 * x_before);
        if constexpr (STREAM) release<cfg::W_SHARED>(s.w_empty + 8 * w_before);
        weights_here = true;
    }

    // The same where operands are split.
    template <class D>
    __device__ __forceinline__ void sum_split(D& d, const Tile& t, Order& order) {
        const u64 b = operand<cfg::ROW>(s.x, cfg::GROUP_ROWS * cfg::ROW);
        clear(d);
        int x_now = -1;
        walk<UNROLLED>(
            t,
            [&](int c, int phase) {
                if (x_now >= 0) release<cfg::X_SHARED>(s.x_empty + 8 * x_now);
                barrier_wait(s.x_full + 8 * x.slot, x.parity);
                barrier_wait(s.split + 8 * x.slot, x.parity);
                x_now = x.slot;
                x.next();
                if constexpr (cfg::TURNS && !STREAM)
                    if (c == cfg::CHUNKS - 1 && phase == cfg::PHASES - 1) pass_on();
            },
            [&](int c, int tap, bool) {
                const int slot = STREAM ? w.slot : c * cfg::TAPS + tap;
                if (STREAM || !weights_here) barrier_wait(s.w_full + 8 * slot, STREAM ? w.parity : 0);
                Weights own;
                own.load(s.w + slot * cfg::W_BYTES + member * cfg::BLOCKS * BLOCK * cfg::ROW);
                multiply_split(d, own, b + (u64)(x_now * (cfg::X_SLOT / 16) + cfg::TAP_ROWS[tap] * (cfg::ROW / 16)),
                               order);
                if constexpr (STREAM) {
                    release<cfg::W_SHARED>(s.w_empty + 8 * slot);
                    w.next();
                }
            });
        if constexpr (cfg::TURNS && STREAM) pass_on();
        release<cfg::X_SHARED>(s.x_empty + 8 * x_now);
        weights_here = true;
    }

    // All that this team waits for has come: the next team may wait.
    __device__ __forceinline__ void pass_on() {
        __syncwarp();  // no lane is left behind at a barrier that goes on
        release<1>(s.turn + 8 * (group / cfg::SPLIT));
    }

    // The rings as they are after a tile of another team.
    __device__ __forceinline__ void pass() {
        x.skip(cfg::CHUNKS * cfg::PHASES);
        if constexpr (STREAM) w.skip(STEPS);
    }
};

}  // namespace engine
