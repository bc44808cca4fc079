// The main loop of a contraction on sm_90a, around an epilogue that is generated.
//
// The text that includes this defines, before: namespace cfg (sizes, see kernel.py), struct Args,
// struct Features, features(), before(), result<R>(), put<R>(). One warp fetches tiles of input and
// weights into two rings in shared memory. Warpgroups multiply them: teams take turns at tiles, so
// that one's epilogue hides behind another's products; the warpgroups of a team share a tile's
// positions, each with features of its own. D[feature, position] lies in registers: a thread has
// features 16 * warp + lane / 4 + 8 * h of each block of 64, and of each group of 8 positions the
// two from 2 * (lane % 4) on.
#pragma once
#include <onchip/hopper.cuh>

#define UNROLL _Pragma("unroll")

namespace engine {

constexpr int GROUP = 8, BLOCK = 64, LINE = 128;
constexpr int WARPGROUPS = cfg::TEAMS * cfg::SPLIT;
constexpr int SUMS = 4 * cfg::GROUPS;  // of a strip, in a thread
constexpr bool STREAM = cfg::W_STAGES > 0;
constexpr int W_TILES = STREAM ? cfg::W_STAGES : cfg::CHUNKS * cfg::TAPS;
constexpr int STEPS = cfg::CHUNKS * cfg::TAPS;
constexpr int W_ROW = cfg::W_ROW, W_K_STEP = cfg::W_K_STEP;
constexpr int PART_GROUPS = cfg::PART_GROUPS;
constexpr int X_LOW = cfg::X_SLOT / 2;  // from a chunk to its low parts, where operands are split
constexpr int UNROLLED = cfg::K_SPLIT == 1 && !cfg::SPLITS && cfg::TAPS <= 16 ? cfg::TAPS : 1;

// ---- shared memory -----------------------------------------------------------------------------

struct Shared {
    u32 w, x, out, in, w_full, w_empty, x_full, x_empty, in_full, in_empty, turn, added, split, order;
    DEVICE Shared at(u32 start) {
        Shared s;
        s.w = (start + 1023) & ~1023u;
        s.x = s.w + W_TILES * cfg::W_BYTES;
        s.out = s.x + cfg::X_STAGES * cfg::X_SLOT;
        s.in = s.out + WARPGROUPS * cfg::TILE_BYTES;
        s.w_full = s.in + cfg::R_STAGES * cfg::SPLIT * cfg::READ_BYTES;
        s.w_empty = s.w_full + 8 * W_TILES;
        s.x_full = s.w_empty + 8 * W_TILES;
        s.x_empty = s.x_full + 8 * cfg::X_STAGES;
        s.in_full = s.x_empty + 8 * cfg::X_STAGES;
        s.in_empty = s.in_full + 8 * cfg::R_STAGES;
        s.turn = s.in_empty + 8 * cfg::R_STAGES;
        s.added = s.turn + 8 * cfg::TEAMS;
        s.split = s.added + 8 * WARPGROUPS;
        s.order = s.split + 8 * cfg::X_STAGES;
        return s;
    }
};

// A place in a ring of slots, and the parity of the round that it is in.
template <int SLOTS>
struct Ring {
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(int n) {
        slot += n % SLOTS;
        parity ^= (n / SLOTS) & 1;
        if (slot >= SLOTS) slot -= SLOTS, parity ^= 1;
    }
};

// ---- which tile --------------------------------------------------------------------------------

struct Tile {
    int part, feature, batch, line[4];
    __device__ __forceinline__ int first_step() const { return part * STEPS / cfg::K_SPLIT; }
    __device__ __forceinline__ int last_step() const { return (part + 1) * STEPS / cfg::K_SPLIT; }
    // The first cell and position along a line.
    __device__ __forceinline__ int cell(int l) const { return line[l] * cfg::CELLS[l]; }
    __device__ __forceinline__ int position(int l) const {
        return cell(l) * cfg::HOP[l] - cfg::LEAD[l];
    }
};

// This program's tile of the n-th that its cluster takes: a group of feature tiles, which read the
// same input, then the tiles of positions. The last ones of a cluster may lie outside.
DEVICE Tile tile_of(int n) {
    const int rank = cfg::CLUSTER > 1 ? cluster_rank() : 0;
    Tile t;
    t.part = cfg::K_SPLIT > 1 ? rank : 0;
    constexpr int FEATURES = (cfg::FEATURE_TILES + cfg::X_SHARED - 1) / cfg::X_SHARED;
    constexpr int POSITIONS = (cfg::POSITION_TILES + cfg::W_SHARED - 1) / cfg::W_SHARED;
    int f = n % cfg::FEATURE_GROUP;
    n /= cfg::FEATURE_GROUP;
    int p = n % POSITIONS * cfg::W_SHARED + (cfg::W_SHARED > 1 ? rank : 0);
    n /= POSITIONS;
    constexpr int GROUPS = FEATURES / cfg::FEATURE_GROUP;
    f = (n % GROUPS * cfg::FEATURE_GROUP + f) * cfg::X_SHARED + (cfg::X_SHARED > 1 ? rank : 0);
    t.feature = f * (BLOCK * cfg::BLOCKS * cfg::SPLIT);
    t.batch = n / GROUPS;
    UNROLL for (int l = 0; l < 4; l++) {
        t.line[l] = l + 1 == cfg::LINES ? p : p % cfg::TILES[l];
        p = l + 1 == cfg::LINES ? 0 : p / cfg::TILES[l];
    }
    return t;
}
DEVICE int first_tile() { return blockIdx.x / cfg::CLUSTER; }
DEVICE int next_tile() { return gridDim.x / cfg::CLUSTER; }

// Every chunk of a tile's input and every step on it, in the order in which both sides of the rings
// go: chunk(channels, phase), then step(channels, tap, first of the chunk).
template <class Chunk, class Step>
DEVICE void walk(const Tile& t, Chunk chunk, Step step) {
    const int first = cfg::K_SPLIT > 1 ? t.first_step() : 0;
    const int last = cfg::K_SPLIT > 1 ? t.last_step() : STEPS;
#pragma unroll 1
    for (int c = first / cfg::TAPS; c * cfg::TAPS < last; c++) {
        const int low = cfg::K_SPLIT > 1 ? max(first - c * cfg::TAPS, 0) : 0;
        const int high = cfg::K_SPLIT > 1 ? min(last - c * cfg::TAPS, cfg::TAPS) : cfg::TAPS;
        UNROLL for (int phase = 0; phase < cfg::PHASES; phase++) {
            const int begin = max(low, cfg::PHASE_BEGIN[phase]);
            const int end = min(high, cfg::PHASE_BEGIN[phase + 1]);
            if (begin < end) {
                chunk(c, phase);
#pragma unroll UNROLLED
                for (int tap = begin; tap < end; tap++) step(c, tap, tap == begin);
            }
        }
    }
}

// ---- the producer ------------------------------------------------------------------------------

DEVICE void fetch_input(const Shared& s, const TensorMap* x, const Tile& t, int c, int phase,
                        Ring<cfg::X_STAGES>& ring) {
    barrier_wait(s.x_empty + 8 * ring.slot, ring.parity ^ 1);
    const u32 full = s.x_full + 8 * ring.slot, to = s.x + ring.slot * cfg::X_SLOT;
    barrier_expect(full, cfg::X_BYTES);
    int at[5] = {c * cfg::CHUNK, 0, 0, 0, 0};
    UNROLL for (int l = 0; l < cfg::LINES; l++)
        at[1 + l] = t.position(l) * cfg::STRIDE[l] + cfg::START[phase][l];
    if constexpr (cfg::X_BATCHED) at[1 + cfg::LINES] = t.batch;
    constexpr int SHARE = cfg::PIECES / cfg::X_SHARED;
    const int mine = cfg::X_SHARED > 1 ? cluster_rank() * SHARE : 0;
    const int origin = at[1 + cfg::OUTERMOST];
    UNROLL for (int n = 0; n < SHARE; n++) {
        const int piece = mine + n;
        at[1 + cfg::OUTERMOST] = origin + piece * cfg::PIECE;
        const u32 there = to + piece * (cfg::X_BYTES / cfg::PIECES);
        if constexpr (cfg::X_SHARED > 1) spread_box<cfg::X_RANK>(there, x, full, at, (1 << cfg::X_SHARED) - 1);
        else load_box<cfg::X_RANK>(there, x, full, at);
    }
    ring.next();
}

DEVICE void fetch_weights(const Shared& s, const TensorMap* w, const Tile& t, int c, int tap, int slot) {
    const u32 full = s.w_full + 8 * slot;
    barrier_expect(full, cfg::W_BYTES);
    int at[5] = {c * cfg::CHUNK, t.feature, t.batch, 0, 0};
    if constexpr (cfg::W_PACKED) {
        at[0] = 0;
        at[1] += ((t.batch * cfg::TAPS + cfg::TAP_NUMBER[tap]) * cfg::CHUNKS + c) * cfg::FEATURES;
    }
    const u32 to = s.w + slot * cfg::W_BYTES;
    if constexpr (cfg::W_INNER) {  // block by block; programs share a block's channels
        constexpr int SHARE = cfg::W_BYTES / cfg::W_COPIES / cfg::W_SHARED;
        const int mine = cfg::W_SHARED > 1 ? cluster_rank() : 0;
        at[0] = t.feature, at[1] = c * cfg::CHUNK + mine * (cfg::CHUNK / cfg::W_SHARED);
        UNROLL for (int n = 0; n < cfg::W_COPIES; n++, at[0] += BLOCK) {
            const u32 there = to + (n * cfg::W_SHARED + mine) * SHARE;
            if constexpr (cfg::W_SHARED > 1) spread_box<cfg::W_RANK>(there, w, full, at, (1 << cfg::W_SHARED) - 1);
            else load_box<cfg::W_RANK>(there, w, full, at);
        }
    } else if constexpr (cfg::W_SHARED > 1) {
        const int mine = cluster_rank();
        at[1] += mine * (BLOCK * cfg::BLOCKS * cfg::SPLIT / cfg::W_SHARED);
        spread_box<cfg::W_RANK>(to + mine * (cfg::W_BYTES / cfg::W_SHARED), w, full, at, (1 << cfg::W_SHARED) - 1);
    } else {
        load_box<cfg::W_RANK>(to, w, full, at);
    }
}

DEVICE void produce(const Shared& s, const TensorMap* x, const TensorMap* w) {
    Ring<cfg::X_STAGES> x_ring;
    Ring<W_TILES> w_ring;
    // where weights stay: input of the first tiles goes before the weights that they need last
    constexpr int AHEAD = STREAM || cfg::CHUNKS * cfg::PHASES > 1 ? 0
                          : (cfg::TEAMS < cfg::X_STAGES ? cfg::TEAMS : cfg::X_STAGES) - 1;
    int n = first_tile();
    for (int turn = 0; n < cfg::WORK; n += next_tile(), turn++) {
        const Tile t = tile_of(n);
        const bool weights_late = !STREAM && turn == AHEAD;
        const bool last_chance = !STREAM && turn < AHEAD && n + next_tile() >= cfg::WORK;
        walk(
            t,
            [&](int c, int phase) { fetch_input(s, x, t, c, phase, x_ring); },
            [&](int c, int tap, bool) {
                if constexpr (STREAM) {
                    barrier_wait(s.w_empty + 8 * w_ring.slot, w_ring.parity ^ 1);
                    fetch_weights(s, w, t, c, tap, w_ring.slot);
                    w_ring.next();
                } else {
                    const bool first_tap = tap == 0;
                    const bool now = AHEAD == 0 ? turn == 0
                                     : first_tap ? turn == 0 : weights_late || last_chance;
                    if (now) fetch_weights(s, w, t, c, tap, c * cfg::TAPS + tap);
                }
            });
    }
}

// What the epilogue reads by tiles.
DEVICE void fetch_reads(const Shared& s, const TensorMap* const* maps) {
    Ring<cfg::R_STAGES + !cfg::R_STAGES> ring;
    for (int n = first_tile(); n < cfg::WORK; n += next_tile()) {
        const Tile t = tile_of(n);
        if (t.part) return;
        barrier_wait(s.in_empty + 8 * ring.slot, ring.parity ^ 1);
        const u32 full = s.in_full + 8 * ring.slot;
        barrier_expect(full, cfg::READ_TX);
        for (int member = 0; member < cfg::SPLIT; member++)
            UNROLL for (int r = 0; r < cfg::READS; r++)
                UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
                    UNROLL for (int part = 0; part < cfg::READ_SIZE[r] / 2; part++) {
                        const int parts = cfg::READ_SIZE[r] / 2;
                        int at[5] = {t.feature + (member * cfg::BLOCKS + m) * BLOCK + part * (BLOCK / parts), 0, 0, 0, 0};
                        UNROLL for (int l = 0; l < cfg::LINES; l++)
                            at[1 + l] = cfg::FOLD ? t.cell(l) : t.position(l);
                        if constexpr (cfg::BATCH > 1) at[1 + cfg::LINES] = t.batch;
                        load_box<cfg::TILE_RANK>(s.in + (ring.slot * cfg::SPLIT + member) * cfg::READ_BYTES +
                                                     cfg::READ_AT[r] + m * cfg::READ_BLOCK[r] +
                                                     part * (cfg::READ_BLOCK[r] / parts),
                                                 maps[r], full, at);
                    }
        ring.next();
    }
}

// What of a float32 the matrix unit leaves away: it reads 11 bits of a word's significand.
DEVICE u32 low_part(u32 word) {
    return rounded_tf32(__float_as_uint(__uint_as_float(word) - __uint_as_float(word & 0xFFFFE000u)));
}

// The low parts of each chunk of input, by two warps: thread counts their 64.
DEVICE void split_input(const Shared& s, int thread) {
    constexpr int EACH = 4, STRIDE = 16 * 64;  // bytes of all threads
    Ring<cfg::X_STAGES> ring;
    for (int n = first_tile(); n < cfg::WORK; n += next_tile())
        walk(
            tile_of(n),
            [&](int, int) {
                barrier_wait(s.x_full + 8 * ring.slot, ring.parity);
                const u32 from = s.x + ring.slot * cfg::X_SLOT;
#pragma unroll 1
                for (int at = 16 * thread; at < cfg::X_BYTES; at += EACH * STRIDE) {
                    uint4 v[EACH];  // all loads before the first store
                    UNROLL for (int i = 0; i < EACH; i++)
                        if (at + i * STRIDE < cfg::X_BYTES) v[i] = load_part(from + at + i * STRIDE);
                    UNROLL for (int i = 0; i < EACH; i++)
                        if (at + i * STRIDE < cfg::X_BYTES)
                            store_part(from + X_LOW + at + i * STRIDE,
                                       make_uint4(low_part(v[i].x), low_part(v[i].y), low_part(v[i].z), low_part(v[i].w)));
                }
                publish();
                __syncwarp();
                if ((thread & 31) == 0) barrier_arrive(s.split + 8 * ring.slot);
                ring.next();
            },
            [](int, int, bool) {});
}

// ---- the consumers -----------------------------------------------------------------------------

typedef float Sums[cfg::BLOCKS][cfg::STRIPS][SUMS];

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
    __device__ __forceinline__ void sum(D& d, const Tile& t) {
        const u64 a = operand<W_ROW>(s.w + member * cfg::BLOCKS * BLOCK * cfg::ROW, 8 * W_ROW);
        const u64 b = operand<cfg::ROW>(s.x, cfg::GROUP_ROWS * cfg::ROW);
        int w_before = -1, x_before = -1, x_now = 0;
        u32 add = 0;
        walk(
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
        UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
            UNROLL for (int n = 0; n < cfg::STRIPS; n++)
                UNROLL for (int i = 0; i < SUMS; i++) d[m][n][i] = 0.f;
        int x_now = -1;
        walk(
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
    __device__ __forceinline__ void pass_on() { release<1>(s.turn + 8 * (group / cfg::SPLIT)); }

    // The rings as they are after a tile of another team.
    __device__ __forceinline__ void pass() {
        x.skip(cfg::CHUNKS * cfg::PHASES);
        if constexpr (STREAM) w.skip(STEPS);
    }
};

// ---- the epilogue ------------------------------------------------------------------------------

DEVICE float folded(float a, float b) {
    return cfg::FOLD == 'M' ? larger(a, b) : cfg::FOLD == 'm' ? smaller(a, b) : a + b;
}

// A tile of results: the cells of a patch, or its positions. A thread's part of it is counted by
// slots: of 8 neighbours along the first line (two a thread), or of 4, each folded from a pair.
template <bool POOLED>
struct View {
    static constexpr int UNIT = POOLED && cfg::WINDOW[0] == 2 ? 4 : 8;
    static constexpr int EACH = UNIT / 4;  // elements of a slot in a thread
    static constexpr int ACROSS = cfg::PATCH[0] / 8;
    DEVICE constexpr int extent(int l) { return POOLED ? cfg::CELLS[l] : cfg::PATCH[l]; }
    DEVICE constexpr int total(int l) { return POOLED ? cfg::ALL_CELLS[l] : cfg::POSITIONS[l]; }
    static constexpr int ROWS = (POOLED ? cfg::CELLS[0] * cfg::CELLS[1] * cfg::CELLS[2] * cfg::CELLS[3]
                                        : cfg::PATCH[0] * cfg::PATCH[1] * cfg::PATCH[2] * cfg::PATCH[3]);
    static constexpr int SLOTS = ROWS / UNIT;
    static constexpr int PADDED = (ROWS + 7) / 8 * 8;

    // Where a slot's element lies along line l, from the tile's first.
    DEVICE int local(int slot, int l, int lane, int e) {
        const int inner = slot % ACROSS, outer = slot / ACROSS;
        if (l == 0) return UNIT * inner + EACH * (lane & 3) + e;
        if (l == 1) return outer % extent(1);
        if (l == 2) return outer / extent(1) % extent(2);
        return outer / (extent(1) * extent(2));
    }
    DEVICE int first(const Tile& t, int l) { return POOLED ? t.cell(l) : t.position(l); }

    // The sum of a position, or the fold of a cell's.
    DEVICE float value(const float (&d)[cfg::STRIPS][SUMS], int slot, int h, int e) {
        const int inner = slot % ACROSS, outer = slot / ACROSS;
        const int q1 = outer % extent(1), q2 = outer / extent(1) % extent(2);
        const int q3 = outer / (extent(1) * extent(2));
        constexpr int W0 = POOLED ? cfg::WINDOW[0] : 1, W1 = POOLED ? cfg::WINDOW[1] : 1;
        constexpr int W2 = POOLED ? cfg::WINDOW[2] : 1, W3 = POOLED ? cfg::WINDOW[3] : 1;
        float v = 0.f;
        UNROLL for (int i3 = 0; i3 < W3; i3++)
            UNROLL for (int i2 = 0; i2 < W2; i2++)
                UNROLL for (int i1 = 0; i1 < W1; i1++)
                    UNROLL for (int i0 = 0; i0 < W0; i0++) {
                        const int p1 = q1 * W1 + i1;
                        const int p23 = (q3 * W3 + i3) * cfg::PATCH[2] + q2 * W2 + i2;
                        const int strip = cfg::ALONG == 0 ? p23 * cfg::PATCH[1] + p1
                                                          : p23 * ACROSS + inner;
                        const int g = cfg::ALONG == 0 ? inner : p1;
                        const float x = d[strip][4 * g + 2 * h + (W0 == 2 ? i0 : e)];
                        v = i0 + i1 + i2 + i3 == 0 ? x : folded(v, x);
                    }
        return v;
    }

    // Row of the tile in shared memory: for the pair that a thread holds of an 8x8 matrix (`column`
    // counts the matrix's 8), and for one element.
    DEVICE int matrix_row(int matrix, int column) {
        return UNIT == 8 ? 8 * matrix + column : 8 * matrix + 4 * (column & 1) + (column >> 1);
    }
    DEVICE int row(int slot, int lane, int e) { return UNIT * slot + EACH * (lane & 3) + e; }
};

DEVICE u32 packed(float low, float high) {
    return cfg::HALF == 'b' ? pack_bf16(low, high) : pack_fp16(low, high);
}
DEVICE float unpacked(u32 word, int e) {
    const u32 x = e ? word >> 16 : word & 0xFFFF;
    return cfg::HALF == 'b' ? bf16_float(x) : fp16_float(x);
}
DEVICE u32 folded_halves(u32 a, u32 b) {
    u32 r;
    if constexpr (cfg::HALF == 'b') {
        if constexpr (cfg::FOLD == 'M') asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        else asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else {
        if constexpr (cfg::FOLD == 'M') asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        else asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    }
    return r;
}

// A word of float32 in a tile of two halves of 32 features.
template <int PADDED>
DEVICE u32 word_at(u32 tile, int row, int feature) {
    const int part = (feature & 31) >> 2;
    return tile + (feature >> 5) * (PADDED * LINE) + row * LINE + ((part ^ (row & 7)) << 4) +
           (feature & 3) * 4;
}

struct Epilogue {
    const Args& a;
    const Shared& s;
    const Tile& t;
    int group, member, thread, warp, lane;  // warp: of the warpgroup
    u32 tile, in;                           // this warpgroup's, of results and of reads

    __device__ __forceinline__ int feature(int m, int h) const {
        return t.feature + (member * cfg::BLOCKS + m) * BLOCK + 16 * warp + 8 * h + (lane >> 2);
    }

    template <bool POOLED>
    __device__ __forceinline__ Place place(int slot, int m, int h, int e, bool& inside) const {
        Place p;
        p.batch = t.batch;
        p.feature = min(feature(m, h), cfg::FEATURES - 1);
        inside = feature(m, h) < cfg::FEATURES;
        UNROLL for (int l = 0; l < 4; l++) {
            const int at = View<POOLED>::first(t, l) + View<POOLED>::local(slot, l, lane, e);
            inside = inside && at >= 0 && at < View<POOLED>::total(l);
            p.at[l] = max(min(at, View<POOLED>::total(l) - 1), 0);
        }
        return p;
    }

    // The tile reads of a pair of 8x8 matrices, or of one element (float32).
    template <bool POOLED, int R>
    __device__ __forceinline__ float result_at(const Sums& d, const Features (&c)[cfg::BLOCKS][2], int m,
                                               int slot, int h, int e, const float* reads, bool& inside,
                                               Place& p) const {
        p = place<POOLED>(slot, m, h, e, inside);
        return result<R>(a, View<POOLED>::value(d[m], slot, h, e), c[m][h], p, reads);
    }

    // All of a result of half type: pairs of matrices through shared memory.
    template <bool POOLED, int R>
    __device__ __forceinline__ void write_halves(const Sums& d, const Features (&c)[cfg::BLOCKS][2]) const {
        typedef View<POOLED> V;
        constexpr int MATRICES = V::PADDED / 8;
        UNROLL for (int m = 0; m < cfg::BLOCKS; m++) {
            UNROLL for (int u = 0; u < MATRICES; u += 2) {
                const int matrix = min(u + (lane >> 4), MATRICES - 1);
                const int row = V::matrix_row(matrix, lane & 7);
                const u32 where = row * LINE + (((2 * warp + ((lane >> 3) & 1)) ^ (row & 7)) << 4);
                u32 pairs[cfg::READS + 1][4];
                UNROLL for (int r = 0; r < cfg::READS; r++)
                    if (cfg::READ_SIZE[r] == 2) {
                        const u32 from = in + cfg::READ_AT[r] + m * cfg::READ_BLOCK[r] + where;
                        if (u + 1 < MATRICES) load_matrices(from, pairs[r][0], pairs[r][1], pairs[r][2], pairs[r][3]);
                        else load_matrices(from, pairs[r][0], pairs[r][1]);
                    }
                u32 words[4];
                UNROLL for (int q = 0; q < 4; q++) {
                    if (u + (q >> 1) >= MATRICES) continue;
                    float v[2];
                    UNROLL for (int e = 0; e < 2; e++) {
                        const int slot = V::UNIT == 8 ? u + (q >> 1) : min(2 * (u + (q >> 1)) + e, V::SLOTS - 1);
                        float reads[cfg::READS + 1];
                        UNROLL for (int r = 0; r < cfg::READS; r++)
                            reads[r] = cfg::READ_SIZE[r] == 2
                                           ? unpacked(pairs[r][q], e)
                                           : __uint_as_float(load_word(word_at<V::PADDED>(
                                                 in + cfg::READ_AT[r] + m * cfg::READ_BLOCK[r],
                                                 V::row(slot, lane, V::UNIT == 8 ? e : 0),
                                                 16 * warp + 8 * (q & 1) + (lane >> 2))));
                        bool inside;
                        Place p;
                        v[e] = result_at<POOLED, R>(d, c, m, slot, q & 1, V::UNIT == 8 ? e : 0, reads, inside, p);
                    }
                    words[q] = packed(v[0], v[1]);
                }
                const u32 to = tile + m * (V::PADDED * LINE) + where;
                if (u + 1 < MATRICES) store_matrices(to, words[0], words[1], words[2], words[3]);
                else store_matrices(to, words[0], words[1]);
            }
        }
    }

    // All of a float32 result, or of one that is stored element by element.
    template <bool POOLED, int R, bool DIRECT>
    __device__ __forceinline__ void write_words(const Sums& d, const Features (&c)[cfg::BLOCKS][2]) const {
        typedef View<POOLED> V;
        UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
            UNROLL for (int slot = 0; slot < V::SLOTS; slot++)
                UNROLL for (int h = 0; h < 2; h++)
                    UNROLL for (int e = 0; e < V::EACH; e++) {
                        const int f = 16 * warp + 8 * h + (lane >> 2), row = V::row(slot, lane, e);
                        float reads[cfg::READS + 1];
                        UNROLL for (int r = 0; r < cfg::READS; r++) {
                            const u32 from = in + cfg::READ_AT[r] + m * cfg::READ_BLOCK[r];
                            if (cfg::READ_SIZE[r] == 4) {
                                reads[r] = __uint_as_float(load_word(word_at<V::PADDED>(from, row, f)));
                            } else {
                                const u32 word = load_word(from + row * LINE + (((f >> 3) ^ (row & 7)) << 4) + (f & 6) * 2);
                                reads[r] = unpacked(word, f & 1);
                            }
                        }
                        bool inside;
                        Place p;
                        const float v = result_at<POOLED, R>(d, c, m, slot, h, e, reads, inside, p);
                        if constexpr (DIRECT) {
                            if (inside) put<R>(a, p, v);
                        } else {
                            store_word(word_at<V::PADDED>(tile + m * 2 * V::PADDED * LINE, row, f), __float_as_uint(v));
                        }
                    }
    }

    // Before this warpgroup's tile is written again, the copy engine must have read it.
    __device__ __forceinline__ void tile_is_free() const {
        if constexpr (cfg::IN_PLACE) return;  // it is the tile of a read, which has just come
        if (thread == 0) stores_wait_read<0>();
        group_barrier(1 + group, 128);
    }

    template <bool POOLED, int R>
    __device__ __forceinline__ void store_tile(const TensorMap* map) const {
        constexpr int SIZE = cfg::RESULT_SIZE[R], HALVES = SIZE / 2;
        publish();
        group_barrier(1 + group, 128);
        if (thread == 0) {
            UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
                UNROLL for (int half = 0; half < HALVES; half++) {
                    const int f = t.feature + (member * cfg::BLOCKS + m) * BLOCK + half * (BLOCK / HALVES);
                    int at[5] = {f, 0, 0, 0, 0};
                    UNROLL for (int l = 0; l < cfg::LINES; l++) at[1 + l] = View<POOLED>::first(t, l);
                    if constexpr (cfg::BATCH > 1) at[1 + cfg::LINES] = t.batch;
                    if (f < cfg::FEATURES)
                        store_box<cfg::TILE_RANK>(map, tile + (m * HALVES + half) * (View<POOLED>::PADDED * LINE), at);
                }
            stores_commit();
        }
    }

    template <int R>
    __device__ __forceinline__ void one_result(const Sums& d, const Features (&c)[cfg::BLOCKS][2],
                                               const TensorMap* map) const {
        constexpr bool POOLED = cfg::RESULT_POOLED[R] && cfg::FOLD != 0;
        if constexpr (!cfg::RESULT_TILE[R]) {
            write_words<POOLED, R, true>(d, c);
        } else {
            tile_is_free();
            if constexpr (cfg::RESULT_SIZE[R] == 2) write_halves<POOLED, R>(d, c);
            else write_words<POOLED, R, false>(d, c);
            store_tile<POOLED, R>(map);
        }
    }

    // ---- windows folded from shared memory -----------------------------------------------------

    // The patch's values as they will be folded.
    __device__ __forceinline__ void stage(const Sums& d) const {
        typedef View<false> V;
        UNROLL for (int m = 0; m < cfg::BLOCKS; m++) {
            if constexpr (cfg::WIDE) {
                UNROLL for (int slot = 0; slot < V::SLOTS; slot++)
                    UNROLL for (int h = 0; h < 2; h++)
                        UNROLL for (int e = 0; e < 2; e++)
                            store_word(word_at<V::PADDED>(tile + m * 2 * V::PADDED * LINE, V::row(slot, lane, e),
                                                          16 * warp + 8 * h + (lane >> 2)),
                                       __float_as_uint(V::value(d[m], slot, h, e)));
            } else {
                constexpr int MATRICES = V::SLOTS;
                UNROLL for (int u = 0; u < MATRICES; u += 2) {
                    const int row = V::matrix_row(min(u + (lane >> 4), MATRICES - 1), lane & 7);
                    const u32 to = tile + m * V::PADDED * LINE + row * LINE +
                                   (((2 * warp + ((lane >> 3) & 1)) ^ (row & 7)) << 4);
                    u32 words[4];
                    UNROLL for (int q = 0; q < 4; q++)
                        if (u + (q >> 1) < MATRICES)
                            words[q] = packed(V::value(d[m], u + (q >> 1), q & 1, 0),
                                              V::value(d[m], u + (q >> 1), q & 1, 1));
                    if (u + 1 < MATRICES) store_matrices(to, words[0], words[1], words[2], words[3]);
                    else store_matrices(to, words[0], words[1]);
                }
            }
        }
    }

    template <int R>
    __device__ __forceinline__ void fold_windows() const {
        constexpr int EACH = cfg::WIDE ? 4 : 8;  // features of 16 bytes
        constexpr int PARTS = cfg::BLOCKS * BLOCK / EACH;
        constexpr int CELLS = cfg::CELLS[0] * cfg::CELLS[1] * cfg::CELLS[2] * cfg::CELLS[3];
        constexpr int PADDED = View<false>::PADDED;
        for (int item = thread; item < CELLS * PARTS; item += 128) {
            const int part = item % PARTS;
            int rest = item / PARTS;
            int cell[4], local[4];
            bool inside = true;
            UNROLL for (int l = 0; l < 4; l++) {
                const int q = rest % cfg::CELLS[l];
                rest /= cfg::CELLS[l];
                local[l] = q * cfg::HOP[l];
                cell[l] = t.cell(l) + q;
                inside = inside && cell[l] < cfg::ALL_CELLS[l];
            }
            const int f = part * EACH;
            const int first = t.feature + member * cfg::BLOCKS * BLOCK + f;
            if (!inside || first >= cfg::FEATURES) continue;
            const int m = f / BLOCK, column = f % BLOCK;
            const u32 from = tile + m * (cfg::WIDE ? 2 : 1) * PADDED * LINE +
                             (cfg::WIDE ? (column >> 5) * (PADDED * LINE) : 0);
            const int at16 = cfg::WIDE ? (column & 31) >> 2 : column >> 3;
            u32 v[4];
            bool any = false;
            UNROLL for (int i3 = 0; i3 < cfg::WINDOW[3]; i3++)
                UNROLL for (int i2 = 0; i2 < cfg::WINDOW[2]; i2++)
                    UNROLL for (int i1 = 0; i1 < cfg::WINDOW[1]; i1++)
                        UNROLL for (int i0 = 0; i0 < cfg::WINDOW[0]; i0++) {
                            const int i[4] = {i0, i1, i2, i3};
                            bool there = true;
                            int row = 0;
                            UNROLL for (int l = 3; l >= 0; l--) {
                                const int at = local[l] + i[l];
                                row = row * cfg::PATCH[l] + at;
                                const int position = t.position(l) + at;
                                there = there && position >= 0 && position < cfg::POSITIONS[l];
                            }
                            if (there) {
                                const uint4 x = load_part(from + row * LINE + ((at16 ^ (row & 7)) << 4));
                                const u32 words[4] = {x.x, x.y, x.z, x.w};
                                UNROLL for (int q = 0; q < 4; q++) {
                                    if constexpr (cfg::WIDE)
                                        v[q] = any ? __float_as_uint(folded(__uint_as_float(v[q]), __uint_as_float(words[q])))
                                                   : words[q];
                                    else
                                        v[q] = any ? folded_halves(v[q], words[q]) : words[q];
                                }
                                any = true;
                            }
                        }
            float out[EACH];
            UNROLL for (int e = 0; e < EACH; e++) {
                const float x = cfg::WIDE ? __uint_as_float(v[e & 3]) : unpacked(v[e >> 1], e & 1);
                const int own = min(first + e, cfg::FEATURES - 1);
                Place p = {t.batch, own, {cell[0], cell[1], cell[2], cell[3]}};
                out[e] = result<R>(a, x, features(a, t.batch, own), p, nullptr);
            }
            Place p = {t.batch, first, {cell[0], cell[1], cell[2], cell[3]}};
            if (cfg::RESULT_TILE[R] && first + EACH <= cfg::FEATURES) {
                put_all<R, EACH>(a, p, out);
            } else {
                UNROLL for (int e = 0; e < EACH; e++)
                    if (first + e < cfg::FEATURES) {
                        p.feature = first + e;
                        put<R>(a, p, out[e]);
                    }
            }
        }
    }
};

// Each program of the cluster may read what this warp has written. Lanes do it side by side: a release
// waits for memory.
DEVICE void release_sums(u32 barrier) {
    __syncwarp();
    const u32 lane = threadIdx.x & 31;
    if (lane < cfg::K_SPLIT) barrier_release_at(barrier, lane);
}

// What all programs that share a tile have, added up in their order for the first one: true there.
// The sums take the place of the operands, which nobody needs any more: a program adds up its part
// of all programs' sums, the first one collects the parts.
DEVICE bool added_up(Sums& d, const Shared& s, int part, int member, int thread) {
    constexpr int ALL = cfg::BLOCKS * cfg::STRIPS * SUMS / 4;  // of 16 bytes a thread
    const u32 mine = s.w + (member * ALL * 128 + thread) * 16;
    float* flat = &d[0][0][0];
    group_barrier(15, 128 * cfg::SPLIT);  // all of this program have multiplied
    UNROLL for (int i = 0; i < ALL; i++)
        store_four(mine + i * 128 * 16, flat[4 * i], flat[4 * i + 1], flat[4 * i + 2], flat[4 * i + 3]);
    release_sums(s.added);
    barrier_acquire(s.added, 0);
    for (int i = part * ALL / cfg::K_SPLIT; i < (part + 1) * ALL / cfg::K_SPLIT; i++) {
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        UNROLL for (int p = 0; p < cfg::K_SPLIT; p++) {
            const float4 o = load_four_of(mine + i * 128 * 16, p);
            v.x += o.x, v.y += o.y, v.z += o.z, v.w += o.w;
        }
        store_four(mine + i * 128 * 16, v.x, v.y, v.z, v.w);
    }
    release_sums(s.added);
    barrier_acquire(s.added, 1);
    if (part == 0) {
        UNROLL for (int i = 0; i < ALL; i++) {
            const int owner = ((i + 1) * cfg::K_SPLIT - 1) / ALL;
            const float4 v = load_four_of(mine + i * 128 * 16, owner);
            flat[4 * i] = v.x, flat[4 * i + 1] = v.y, flat[4 * i + 2] = v.z, flat[4 * i + 3] = v.w;
        }
    }
    release_sums(s.added);
    return part == 0;
}

template <int R>
DEVICE void all_results(const Epilogue& e, const Sums& d, const Features (&c)[cfg::BLOCKS][2],
                        const TensorMap* const* maps) {
    if constexpr (R < cfg::RESULTS) {
        if constexpr (!(cfg::STAGED && cfg::RESULT_POOLED[R])) e.one_result<R>(d, c, maps[R]);
        all_results<R + 1>(e, d, c, maps);
    }
}
template <int R>
DEVICE void all_folds(const Epilogue& e) {
    if constexpr (R < cfg::RESULTS) {
        if constexpr (cfg::RESULT_POOLED[R]) e.fold_windows<R>();
        all_folds<R + 1>(e);
    }
}

DEVICE void consume(const Shared& s, const Args& a, const TensorMap* const* results) {
    const int warp = threadIdx.x >> 5, group = warp >> 2;
    Consumer consumer{s, group, group % cfg::SPLIT, {}, {}, false};
    const int team = group / cfg::SPLIT;
    Order order = Order::of(s, group);
    Ring<cfg::R_STAGES + !cfg::R_STAGES> in;
    in.skip(team);
    u32 in_before = 0;
    Features c[cfg::BLOCKS][2];
    int feature = -1, batch = -1, turn = 0;
    for (int n = first_tile(); n < cfg::WORK; n += next_tile(), turn++) {
        if (cfg::TEAMS > 1 && turn % cfg::TEAMS != team) {
            consumer.pass();
            continue;
        }
        const Tile t = tile_of(n);
        const u32 read = s.in + (in.slot * cfg::SPLIT + consumer.member) * cfg::READ_BYTES;
        Epilogue e{a, s, t, group, consumer.member, (int)threadIdx.x & 127, warp & 3, (int)threadIdx.x & 31,
                   cfg::IN_PLACE ? read : s.out + group * cfg::TILE_BYTES, read};
        if (t.feature != feature || t.batch != batch) {
            feature = t.feature, batch = t.batch;
            UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
                UNROLL for (int h = 0; h < 2; h++)
                    c[m][h] = features(a, batch, min(e.feature(m, h), cfg::FEATURES - 1));
        }
        if constexpr (cfg::TURNS)
            if (turn > 0)
                barrier_wait(s.turn + 8 * ((team + cfg::TEAMS - 1) % cfg::TEAMS), (turn - 1) / cfg::TEAMS & 1);
        Sums d;
        if constexpr (cfg::SPLITS) consumer.sum_split(d, t, order);
        else consumer.sum(d, t);
        if constexpr (cfg::K_SPLIT > 1)
            if (!added_up(d, s, t.part, consumer.member, e.thread)) break;
        if constexpr (cfg::READS > 0) barrier_wait(s.in_full + 8 * in.slot, in.parity);
        typedef View<false> V;
        UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
            UNROLL for (int slot = 0; slot < V::SLOTS; slot++)
                UNROLL for (int h = 0; h < 2; h++)
                    UNROLL for (int x = 0; x < 2; x++) {
                        const int strip = cfg::ALONG == 0 ? slot / V::ACROSS
                                                          : slot / (V::ACROSS * cfg::PATCH[1]) * V::ACROSS + slot % V::ACROSS;
                        const int g = cfg::ALONG == 0 ? slot % V::ACROSS : slot / V::ACROSS % cfg::PATCH[1];
                        bool inside;
                        const Place p = e.place<false>(slot, m, h, x, inside);
                        float& v = d[m][strip][4 * g + 2 * h + x];
                        v = before(a, v, c[m][h], p);
                    }
        all_results<0>(e, d, c, results);
        if constexpr (cfg::STAGED) {
            e.tile_is_free();
            e.stage(d);
            group_barrier(1 + group, 128);
            all_folds<0>(e);
        }
        if constexpr (cfg::READS > 0) {
            const u32 empty = s.in_empty + 8 * in.slot;
            if constexpr (!cfg::IN_PLACE) {
                if (e.lane == 0) barrier_arrive(empty);
            } else if (e.thread == 0) {  // the tile before has left its slot
                stores_wait_read<1>();
                if (in_before) barrier_arrive(in_before);
            }
            in_before = empty;
            in.skip(cfg::TEAMS);
        }
        if constexpr (cfg::STAGED) group_barrier(1 + group, 128);  // all have read
    }
    if ((threadIdx.x & 127) == 0) stores_wait_read<0>();  // shared memory goes with the program
    if constexpr (cfg::K_SPLIT > 1) barrier_acquire(s.added, 0);  // nobody reads this program's memory
}

DEVICE void run(const Args& a, const TensorMap* x, const TensorMap* w, const TensorMap* const* results,
                const TensorMap* const* reads) {
    extern __shared__ unsigned char memory[];
    const Shared s = Shared::at(shared_address(memory));
    const int warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) {
        for (int i = 0; i < W_TILES; i++) {
            barrier_init(s.w_full + 8 * i, 1);
            barrier_init(s.w_empty + 8 * i, 4 * cfg::SPLIT * cfg::W_SHARED);
        }
        for (int i = 0; i < cfg::X_STAGES; i++) {
            barrier_init(s.x_full + 8 * i, 1);
            barrier_init(s.x_empty + 8 * i, 4 * cfg::SPLIT * cfg::X_SHARED);
        }
        for (int i = 0; i < cfg::R_STAGES; i++) {
            barrier_init(s.in_full + 8 * i, 1);
            barrier_init(s.in_empty + 8 * i, cfg::IN_PLACE ? cfg::SPLIT : 4 * cfg::SPLIT);
        }
        for (int i = 0; i < cfg::TEAMS; i++) barrier_init(s.turn + 8 * i, 4 * cfg::SPLIT);
        barrier_init(s.added, 4 * cfg::SPLIT * cfg::K_SPLIT);
        if constexpr (cfg::SPLITS) {
            for (int i = 0; i < cfg::X_STAGES; i++) barrier_init(s.split + 8 * i, 2);
            for (int i = 0; i < WARPGROUPS; i++) barrier_init(s.order + 8 * i, 4);
        }
        barriers_ready();
        prefetch(x);
        prefetch(w);
    }
    if constexpr (cfg::CLUSTER > 1) cluster_barrier();
    else __syncthreads();
    wait_for_launch_before();
    if constexpr (cfg::SPLITS) {  // two branches: ptxas counts the registers of each by itself
        if (warp < 4 * WARPGROUPS) {
            if constexpr (cfg::REGISTERS > 0) more_registers<cfg::REGISTERS>();
            consume(s, a, results);
        } else {
            if constexpr (cfg::REGISTERS > 0) fewer_registers<cfg::HELPING>();
            const int helper = warp - 4 * WARPGROUPS, lane = threadIdx.x & 31;
            if (helper > 1) split_input(s, 32 * (helper - 2) + lane);
            else if (helper == 0 && lane == 0) produce(s, x, w);
            else if (cfg::READS > 0 && helper == 1 && lane == 0) fetch_reads(s, reads);
        }
    } else if (warp == 4 * WARPGROUPS) {
        if ((threadIdx.x & 31) == 0) produce(s, x, w);
    } else if (warp > 4 * WARPGROUPS) {
        if constexpr (cfg::READS > 0)
            if ((threadIdx.x & 31) == 0) fetch_reads(s, reads);
    } else {
        consume(s, a, results);
    }
    start_next_launch();
    if constexpr (cfg::X_SHARED * cfg::W_SHARED > 1) {
        __syncwarp();
        cluster_barrier();  // nobody leaves while others write to its shared memory
    }
}

}  // namespace engine
