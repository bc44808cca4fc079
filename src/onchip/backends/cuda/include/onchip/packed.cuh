// The packed form of a contraction: inputs of few channels (packed.py says how they lie).
//
// A few warps bring rows of input to shared memory as they are, one slot's rows after the other, and
// lay out from there the run of each position in parts of 16 bytes, which the matrix unit reads without
// permutation. Weights stay. A program walks down the rows of an image, so that each row is laid out
// once; teams take turns at its tiles. Windows of 3 every 2 from one before are folded in registers:
// with the neighbour's column by a shuffle, with the row above as the tile before hands it on.
//
// The text that includes this defines namespace packed_cfg besides what engine.cuh wants.
#pragma once
#include <onchip/engine.cuh>

namespace packed {

using namespace packed_cfg;
using engine::BLOCK;
using engine::SUMS;
using engine::Sums;
using engine::Tile;
using engine::WARPGROUPS;

constexpr int LOADERS = 32 * LOADER_WARPS;
constexpr int COLUMNS = cfg::PATCH[0];
constexpr int RAW_SLOT = SLOT_ROWS * RAW_ROW;
constexpr int SPENT = ADVANCE / SLOT_ROWS;  // slots by which a tile goes on
constexpr bool EDGES = cfg::PATCH[0] > cfg::POSITIONS[0] || cfg::POSITIONS[1] % cfg::PATCH[1] > 0;
constexpr int K_STEPS = 4;  // instructions that a row of weights feeds

struct Shared {
    u32 w, x, zero, raw, out, carry, w_full, x_full, x_empty, raw_full, turn, done;
    DEVICE Shared at(u32 start) {
        Shared s;
        s.w = (start + 1023) & ~1023u;
        s.out = s.w + WEIGHTS * cfg::W_BYTES;
        s.x = s.out + WARPGROUPS * ((cfg::TILE_BYTES + 127) / 128 * 128);
        s.zero = s.x + cfg::X_STAGES * SLOT;
        s.raw = s.zero + ZERO_BYTES;
        s.carry = s.raw + RAW_STAGES * RAW_SLOT;
        s.w_full = s.carry + WARPGROUPS * CARRY_BYTES;
        s.x_full = s.w_full + 8 * WEIGHTS;
        s.x_empty = s.x_full + 8 * cfg::X_STAGES;
        s.raw_full = s.x_empty + 8 * cfg::X_STAGES;
        s.turn = s.raw_full + 8 * RAW_STAGES;
        s.done = s.turn + 8 * WARPGROUPS;
        return s;
    }
};

// ---- which tiles -------------------------------------------------------------------------------

// Position tiles of a program: consecutive ones, down the rows first, of one tile of features. Where a
// row is handed on, the first one is the tile above, which stores nothing.
struct Walk {
    int feature, first, last, above;
    DEVICE Walk mine() {
        const int share = gridDim.x / cfg::FEATURE_TILES, part = blockIdx.x / cfg::FEATURE_TILES;
        Walk w;
        w.feature = blockIdx.x % cfg::FEATURE_TILES * (BLOCK * cfg::BLOCKS * cfg::SPLIT);
        const int begin = (long long)part * POSITION_TILES / share;
        w.last = (long long)(part + 1) * POSITION_TILES / share;
        w.above = CARRIED && begin < w.last && begin % cfg::TILES[1] > 0;
        w.first = begin - w.above;
        return w;
    }
};
DEVICE bool begins(int n) { return n % cfg::TILES[1] == 0; }
DEVICE Tile tile_at(int n, int feature) {
    Tile t;
    t.part = 0;
    t.feature = feature;
    t.batch = 0;
    t.line[1] = n % cfg::TILES[1];
    n /= cfg::TILES[1];
    t.line[0] = n % cfg::TILES[0];
    n /= cfg::TILES[0];
    t.line[2] = n % cfg::TILES[2];
    t.line[3] = n / cfg::TILES[2];
    return t;
}

// The next slot's rows: `unit` counts by how many slots they lie below a tile's first ones.
struct Cursor {
    int n, unit;
    __device__ __forceinline__ void next() {
        if (++unit < UNITS) return;
        n++;
        unit = begins(n) ? 0 : UNITS - SPENT;
    }
};

// ---- the loaders -------------------------------------------------------------------------------

// A slot's rows of input, as they are: zeros where there are none.
template <class T>
DEVICE void fetch_rows(u32 to, const T* x, Cursor at, int thread) {
    constexpr int EACH = COPY / SIZE, COPIES = RAW_ROW / COPY;
    const Tile t = tile_at(at.n, 0);
    const int row = t.line[1] * ADVANCE + at.unit * SLOT_ROWS + ROW_ORIGIN, element = t.line[0] * TILE_ELEMENTS + ORIGIN;
    const T* image = x + X_OFFSET + (long long)t.line[2] * X_STEP[1] + (long long)t.line[3] * X_STEP[2];
    for (int i = thread; i < SLOT_ROWS * COPIES; i += LOADERS) {
        const int y = row + i / COPIES, e = element + i % COPIES * EACH;
        const bool inside = y >= 0 && y < ROWS && e >= 0 && e < ROW_ELEMENTS;
        const T* from = inside ? image + (long long)y * X_STEP[0] + e : x;
        const u32 where = to + i / COPIES * RAW_ROW + i % COPIES * COPY;
        if constexpr (COPY >= 4) copy_ahead<COPY>(where, from, inside ? COPY : 0);
        else store_half(where, inside ? *(const u16*)from : 0);
    }
}

// The same for whole rows: by the copy engine, where the row exists. Around it lie zeros, which stay.
template <class T>
DEVICE void fetch_whole_rows(u32 to, const T* x, Cursor at, u32 full, int thread) {
    const Tile t = tile_at(at.n, 0);
    const int first = t.line[1] * ADVANCE + at.unit * SLOT_ROWS + ROW_ORIGIN;
    const T* image = x + X_OFFSET + (long long)t.line[2] * X_STEP[1] + (long long)t.line[3] * X_STEP[2];
    constexpr int BYTES = ROW_ELEMENTS * SIZE;
    int inside = 0;
    UNROLL for (int row = 0; row < SLOT_ROWS; row++) inside += first + row >= 0 && first + row < ROWS;
    if (thread == 0) barrier_expect(full, inside * BYTES);
    for (int row = 0; row < SLOT_ROWS; row++) {
        const int y = first + row;
        const u32 there = to + row * RAW_ROW + (u32)(-ORIGIN * SIZE);
        if (y >= 0 && y < ROWS) {
            if (thread == 0) copy_run(there, image + (long long)y * X_STEP[0], BYTES, full);
        } else {
            for (int i = thread; i < BYTES / 16; i += LOADERS) store_part(there + 16 * i, make_uint4(0, 0, 0, 0));
        }
    }
}

// The words of N parts from `at` on; what lies beyond `left` elements is zero, and what lies before the
// first part's run.
template <int N>
DEVICE void read_run(u32 (&word)[4 * N], u32 at, bool first, int left) {
    if constexpr (RAW_ALIGNED >= 4) {
        constexpr int WORDS = RAW_ALIGNED / 4;
        UNROLL for (int i = 0; i < 4 * N; i += WORDS) {
            if constexpr (WORDS == 4) {
                const uint4 v = load_part(at + 4 * i);
                word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
            } else if constexpr (WORDS == 2) {
                load_words(at + 4 * i, word[i], word[i + 1]);
            } else {
                word[i] = load_word(at + 4 * i);
            }
        }
    } else {
        // every run starts in the middle of a word, or every other one does
        const u32 shift = STEP % 4 == 0 ? RAW_BEFORE * SIZE % 4 * 8 : (at & 2) * 8;
        u32 low = load_word(at & ~3u);
        UNROLL for (int i = 0; i < 4 * N; i++) {
            const u32 high = load_word((at & ~3u) + 4 * i + 4);
            word[i] = __funnelshift_r(low, high, shift);
            low = high;
        }
    }
    if (LEAD && first) word[0] &= 0xFFFF0000;
    UNROLL for (int i = 0; i < 4 * N; i++) {
        const int here = left - i * 4 / SIZE;
        if (here <= 0) word[i] = 0;
        else if (SIZE == 2 && here == 1) word[i] &= 0xFFFF;
        else if (SIZE == 4) word[i] = rounded_tf32(word[i]);
    }
}

// A slot's rows in parts, for one chunk of their runs: each thread's items together, so that it waits for
// what it reads once.
DEVICE void lay_out(u32 to, u32 raw, int chunk, int thread) {
    constexpr int GROUPS = PARTS / PER_ITEM, EACH = 16 / SIZE, ITEMS = SLOT_ROWS * GROUPS * COLUMNS;
    for (int start = thread; start < ITEMS; start += AT_ONCE * LOADERS) {
        u32 word[AT_ONCE][4 * PER_ITEM], there[AT_ONCE];
        UNROLL for (int n = 0; n < AT_ONCE; n++) {
            const int i = min(start + n * LOADERS, ITEMS - 1);
            const int column = i % COLUMNS, group = i / COLUMNS % GROUPS, row = i / COLUMNS / GROUPS;
            const int part = GROUPS == 1 ? 0 : group * PER_ITEM, first = chunk * PARTS + part;
            read_run<PER_ITEM>(word[n], raw + row * RAW_ROW + RAW_BEFORE * SIZE + column * STEP + first * 16,
                               first == 0, LEAD + RUN - first * EACH);
            there[n] = to + row * ROW_STEP + part * PART_STEP + column * 16;
        }
        UNROLL for (int n = 0; n < AT_ONCE; n++)
            if (start + n * LOADERS < ITEMS)
                UNROLL for (int p = 0; p < PER_ITEM; p++)
                    store_part(there[n] + p * PART_STEP, make_uint4(word[n][4 * p], word[n][4 * p + 1],
                                                                    word[n][4 * p + 2], word[n][4 * p + 3]));
    }
}

template <class T>
DEVICE void load(const Shared& s, const T* x, const TensorMap* w, int thread) {
    const Walk mine = Walk::mine();
    if (mine.first >= mine.last) return;
    if (thread == 0)
        for (int i = 0; i < WEIGHTS; i++) {
            const int at[5] = {0, i * cfg::FEATURES + mine.feature, 0, 0, 0};
            barrier_expect(s.w_full + 8 * i, cfg::W_BYTES);
            load_box<2>(s.w + i * cfg::W_BYTES, w, s.w_full + 8 * i, at);
        }
    Cursor here{mine.first, 0}, ahead = here;
    int raw = 0, raw_ahead = 0;
    const auto fetch = [&]() {
        if (ahead.n < mine.last) {
            const u32 to = s.raw + raw_ahead * RAW_SLOT;
            if constexpr (WHOLE_ROWS) fetch_whole_rows(to, x, ahead, s.raw_full + 8 * raw_ahead, thread);
            else fetch_rows(to, x, ahead, thread);
            ahead.next();
        }
        if constexpr (!WHOLE_ROWS) copies_commit();
        raw_ahead = raw_ahead == RAW_STAGES - 1 ? 0 : raw_ahead + 1;
    };
    if constexpr (WHOLE_ROWS) {
        for (int i = thread; i < RAW_STAGES * RAW_SLOT / 16; i += LOADERS)
            store_part(s.raw + 16 * i, make_uint4(0, 0, 0, 0));
        publish();
        group_barrier(15, LOADERS);
    }
    for (int i = 0; i < RAW_STAGES - 1; i++) fetch();
    u32 parity = 0;
    engine::Ring<cfg::X_STAGES> ring;
    for (int turn = 0; here.n < mine.last; here.next(), turn++) {
        mark(0, turn);
        if constexpr (WHOLE_ROWS) barrier_wait(s.raw_full + 8 * raw, parity);
        else copies_wait<RAW_STAGES - 2>();
        mark(1, turn);
        group_barrier(15, LOADERS);  // these rows are here, those before have been read
        mark(2, turn);
        fetch();
        mark(3, turn);
        for (int chunk = 0; chunk < RUN_CHUNKS; chunk++) {
            barrier_wait(s.x_empty + 8 * ring.slot, ring.parity ^ 1);
            mark(4, turn);
            lay_out(s.x + ring.slot * SLOT, s.raw + raw * RAW_SLOT, chunk, thread);
            publish();
            __syncwarp();
            if ((thread & 31) == 0) barrier_arrive(s.x_full + 8 * ring.slot);
            ring.next();
            mark(5, turn);
        }
        if (++raw == RAW_STAGES) raw = 0, parity ^= 1;
    }
}

// ---- the consumers -----------------------------------------------------------------------------

// For a warp, all of whose lanes have come here: what they waited for must not go on without one.
DEVICE void arrive(u32 barrier) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
}

// All of a tile's products into d; `slot`: how many slots were filled before its first one. Where
// runs come in chunks, it gives back each slot but the last.
DEVICE void sum(Sums& d, const Shared& s, u32 weights, int slot, bool weights_here) {
    const u64 a = operand<128>(weights, 8 * 128);
#pragma unroll 1
    for (int chunk = 0; chunk < RUN_CHUNKS; chunk++, slot++) {
        u32 x[UNITS];
        UNROLL for (int u = 0; u < UNITS; u++) {
            const int k = (slot + u) % cfg::X_STAGES;
            barrier_wait(s.x_full + 8 * k, (slot + u) / cfg::X_STAGES & 1);
            x[u] = s.x + k * SLOT;
        }
        if (!weights_here) {
            constexpr int EACH = RUN_CHUNKS == 1 ? WEIGHTS : PAIRS / K_STEPS;
            for (int i = 0; i < EACH; i++) barrier_wait(s.w_full + 8 * (chunk * EACH + i), 0);
        }
        const u64 mine = a + (u64)(chunk * (PAIRS / K_STEPS) * (cfg::W_BYTES / 16));
        products_fence();
        UNROLL for (int i = 0; i < PAIRS; i++)
            UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
                UNROLL for (int strip = 0; strip < cfg::STRIPS; strip++) {
                    const int row = strip * DOWN_STRIDE + PAIR_ROW[i];
                    const u32 at = x[row / SLOT_ROWS] + row % SLOT_ROWS * ROW_STEP + PAIR_PART[i] * PART_STEP;
                    const u32 apart = PAIR_APART[i] < 0 ? s.zero - at : PAIR_APART[i];
                    product(d[m][strip],
                            mine + (i / K_STEPS * cfg::W_BYTES + m * BLOCK * 128 + i % K_STEPS * 32) / 16,
                            plain_operand(at, apart), i > 0 ? 1 : chunk > 0);
                }
        products_commit();
        if (RUN_CHUNKS > 1 && chunk > 0) {
            products_wait<1>();
            arrive(s.x_empty + 8 * ((slot - 1) % cfg::X_STAGES));
        }
    }
}

// What is no position does not count in a window.
DEVICE float nothing() { return __uint_as_float(cfg::FOLD == 'M' ? 0xFF800000u : 0x7F800000u); }

// A position's value in its pair: the first of two also has what its left neighbour has.
DEVICE void fold_left(float (&d)[cfg::STRIPS][SUMS], int lane) {
    const int from = (lane & 28) | ((lane + 3) & 3);
    UNROLL for (int strip = 0; strip < cfg::STRIPS; strip++) {
        float before[2] = {nothing(), nothing()};
        UNROLL for (int g = 0; g < cfg::GROUPS; g++) {
            float own[2], left[2];
            UNROLL for (int h = 0; h < 2; h++) own[h] = d[strip][4 * g + 2 * h + 1];
            const bool last = (lane & 3) == 3;
            if constexpr (cfg::WIDE) {
                UNROLL for (int h = 0; h < 2; h++)
                    left[h] = __shfl_sync(~0u, last ? before[h] : own[h], from);
            } else {
                const u32 word = __shfl_sync(~0u, last ? engine::packed(before[0], before[1]) : engine::packed(own[0], own[1]), from);
                UNROLL for (int h = 0; h < 2; h++) left[h] = engine::unpacked(word, h);
            }
            UNROLL for (int h = 0; h < 2; h++) {
                float& v = d[strip][4 * g + 2 * h];
                v = engine::folded(v, left[h]);
                before[h] = own[h];
            }
        }
    }
}

// A window's first row has the row above: that of the strip before, or what the tile before hands on
// at `from`. The last strip's goes to `to`.
DEVICE void fold_down(float (&d)[cfg::STRIPS][SUMS], u32 from, u32 to, bool take) {
    constexpr int WORDS = cfg::WIDE ? 2 : 1, LAST = cfg::STRIPS - 1;
    UNROLL for (int g = 0; g < cfg::GROUPS; g++) {
        float above[2], mine[2];
        UNROLL for (int h = 0; h < 2; h++)
            mine[h] = engine::folded(d[LAST][4 * g + 2 * h], d[LAST][4 * g + 2 * h + 1]);
        if (take) {
            const u32 word = load_word(from + g * WORDS * 512);
            if constexpr (cfg::WIDE) {
                above[0] = __uint_as_float(word);
                above[1] = __uint_as_float(load_word(from + (2 * g + 1) * 512));
            } else {
                UNROLL for (int h = 0; h < 2; h++) above[h] = engine::unpacked(word, h);
            }
        }
        if constexpr (cfg::WIDE) {
            UNROLL for (int h = 0; h < 2; h++) store_word(to + (2 * g + h) * 512, __float_as_uint(mine[h]));
        } else {
            store_word(to + g * 512, engine::packed(mine[0], mine[1]));
        }
        UNROLL for (int h = 0; h < 2; h++) {
            UNROLL for (int strip = 2; strip < cfg::STRIPS; strip += 2)
                d[strip][4 * g + 2 * h] = engine::folded(
                    d[strip][4 * g + 2 * h],
                    engine::folded(d[strip - 1][4 * g + 2 * h], d[strip - 1][4 * g + 2 * h + 1]));
            if (take) d[0][4 * g + 2 * h] = engine::folded(d[0][4 * g + 2 * h], above[h]);
        }
    }
}

DEVICE void consume(const Shared& s, const Args& a, const TensorMap* const* results) {
    const int group = threadIdx.x >> 7, team = group / cfg::SPLIT, member = group % cfg::SPLIT;
    const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
    const Walk mine = Walk::mine();
    const engine::Shared nowhere{};
    Tile t = tile_at(mine.first, mine.feature);
    engine::Epilogue e{a, nowhere, t, group, member, thread, thread >> 5, lane,
                       s.out + group * ((cfg::TILE_BYTES + 127) / 128 * 128), 0};
    Features c[cfg::BLOCKS][2];
    UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
        UNROLL for (int h = 0; h < 2; h++) c[m][h] = features(a, 0, min(e.feature(m, h), cfg::FEATURES - 1));
    bool weights_here = false;
    int slot = 0, turn = 0;
    for (int n = mine.first; n < mine.last; n++, turn++) {
        const bool ends = n + 1 == mine.last || begins(n + 1);
        const int spent = ends ? UNITS : SPENT;  // slots that no later tile reads
        if (cfg::TEAMS > 1 && turn % cfg::TEAMS != team) {
            slot += spent * RUN_CHUNKS;
            continue;
        }
        mark(0, turn);
        t = tile_at(n, mine.feature);
        const int other = (group + WARPGROUPS - cfg::SPLIT) % WARPGROUPS;  // that has the tile before
        const u32 parity = (turn - 1) / cfg::TEAMS & 1;
        Sums d;
        if (cfg::TEAMS > 1 && turn > 0) barrier_wait(s.turn + 8 * other, parity);
        mark(1, turn);
        sum(d, s, s.w + member * cfg::BLOCKS * BLOCK * 128, slot, weights_here);
        weights_here = true;
        mark(2, turn);
        if constexpr (cfg::TEAMS > 1) arrive(s.turn + 8 * group);
        products_wait<0>();
        mark(3, turn);
        const bool stores = n > mine.first || !mine.above;
        if (cfg::FOLD != 0 && stores) engine::all_results<0, false>(e, d, c, results);
        typedef engine::View<false> V;
        UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
            UNROLL for (int strip = 0; strip < cfg::STRIPS; strip++)
                UNROLL for (int i = 0; i < SUMS; i++) {
                    bool inside;
                    const int h = i >> 1 & 1;
                    const Place p = e.place<false>(strip * V::ACROSS + i / 4, m, h, i & 1, inside);
                    float& v = d[m][strip][i];
                    v = before(a, v, c[m][h], p);
                    if (CARRIED && EDGES && !inside) v = nothing();
                }
        if constexpr (CARRIED)
            UNROLL for (int m = 0; m < cfg::BLOCKS; m++) fold_left(d[m], lane);
        mark(4, turn);
        // the tiles before have multiplied, and the last one has handed on its row
        if (cfg::TEAMS > 1 && turn > 0) barrier_wait(s.done + 8 * other, parity);
        for (int u = 0; u < spent; u++)
            arrive(s.x_empty + 8 * ((slot + (RUN_CHUNKS - 1) + u) % cfg::X_STAGES));
        slot += spent * RUN_CHUNKS;
        if constexpr (CARRIED) {
            UNROLL for (int m = 0; m < cfg::BLOCKS; m++) {
                const u32 row = s.carry + m * (CARRY_BYTES / cfg::BLOCKS) + thread * 4;
                fold_down(d[m], row + other * CARRY_BYTES, row + group * CARRY_BYTES, n > mine.first && !begins(n));
            }
        }
        if constexpr (cfg::TEAMS > 1) arrive(s.done + 8 * group);
        mark(5, turn);
        if (!stores) continue;
        engine::all_results<0, cfg::FOLD != 0>(e, d, c, results);
        if constexpr (cfg::STAGED) {
            e.tile_is_free();
            e.stage(d);
            group_barrier(1 + group, 128);
            engine::all_folds<0>(e);
            group_barrier(1 + group, 128);  // all have read
        }
        mark(6, turn);
    }
    if (thread == 0) stores_wait_read<0>();  // shared memory goes with the program
}

template <class T>
DEVICE void run(const Args& a, const T* x, const TensorMap* w, const TensorMap* const* results) {
    extern __shared__ unsigned char memory[];
    const Shared s = Shared::at(shared_address(memory));
    if (threadIdx.x == 0) {
        for (int i = 0; i < WEIGHTS; i++) barrier_init(s.w_full + 8 * i, 1);
        for (int i = 0; i < cfg::X_STAGES; i++) {
            barrier_init(s.x_full + 8 * i, LOADER_WARPS);
            barrier_init(s.x_empty + 8 * i, 4 * cfg::SPLIT);
        }
        for (int i = 0; i < RAW_STAGES; i++) barrier_init(s.raw_full + 8 * i, 1);
        for (int i = 0; i < WARPGROUPS; i++) {
            barrier_init(s.turn + 8 * i, 4);
            barrier_init(s.done + 8 * i, 4);
        }
        barriers_ready();
        prefetch(w);
    }
    for (int i = threadIdx.x; i < ZERO_BYTES / 4; i += blockDim.x) store_word(s.zero + 4 * i, 0);
    publish();
    __syncthreads();
    wait_for_launch_before();
    if (threadIdx.x >= 128 * WARPGROUPS) load(s, x, w, threadIdx.x - 128 * WARPGROUPS);
    else consume(s, a, results);
    start_next_launch();
}

}  // namespace packed
