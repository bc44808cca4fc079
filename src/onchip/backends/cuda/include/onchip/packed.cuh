// The packed form of a contraction: inputs of few channels (packed.py says how they lie).
//
// A few warps take turns at rows of input: each one brings its row to shared memory as it is and lays
// out from there the run of each position in parts of 16 bytes, which the matrix unit reads without
// permutation. Rows of all these warps are on their way side by side; no warp waits for another one.
// Where runs come in chunks, a row's chunks go to warps as rows do. Weights stay. A program walks down
// the rows of an image, so that each row is laid out once; teams take turns at its tiles. Windows of 3
// every 2 from one before are folded in registers: with the neighbour's column by a shuffle, with the
// row above as the tile before hands it on.
//
// The text that includes this defines namespace packed_cfg besides what engine.cuh wants.
#pragma once
#include <onchip/packed_rows.cuh>

namespace packed {

// ---- the consumers -----------------------------------------------------------------------------

// Slots in their order, and after those of tiles before: a slot's barrier tells one round from the
// next only, and a loader looks at every LOADERS / SLOT_ROWS-th slot.
DEVICE void give_back(const Shared& s, int slot, int count) {
    __syncwarp();
    if (WARP_ARRIVALS == 1 && (threadIdx.x & 31) != 0) return;
    int k = slot % cfg::X_STAGES;
    for (int u = 0; u < count; u++) {
        barrier_arrive(s.x_empty + 8 * k);
        k = k + 1 == cfg::X_STAGES ? 0 : k + 1;
    }
}

DEVICE void weights_come(const Shared& s, int first, int count) {
    for (int i = first; i < first + count; i++) barrier_wait(s.w_full + 8 * i, 0);
}

// Until what a tile multiplies, of one chunk, has come.
DEVICE void operands_here(const Shared& s, int slot, int chunk, bool weights_here) {
    UNROLL for (int u = 0; u < UNITS; u++)
        barrier_wait(s.x_full + 8 * ((slot + u) % cfg::X_STAGES), (slot + u) / cfg::X_STAGES & 1);
    constexpr int EACH = RUN_CHUNKS == 1 ? WEIGHTS : PAIRS / K_STEPS;
    if (!weights_here) weights_come(s, chunk * EACH, EACH);
}

// A warpgroup's weights: in shared memory, or in registers, where the matrix unit reads them without
// taking from shared memory's bandwidth (PTX ISA, wgmma: of each 32 bytes of rows lane / 4 and 8 on
// the words lane % 4 and 4 on).
template <bool HELD>
struct Weights {
    u64 first;
    DEVICE Weights of(u32 at, int) { return {operand<128>(at, 8 * 128)}; }
    __device__ __forceinline__ u64 get(int chunk, int i, int m) const {
        return first + (u64)((chunk * (PAIRS / K_STEPS) + i / K_STEPS) * cfg::W_BYTES + m * BLOCK * 128 + i % K_STEPS * 32) / 16;
    }
};
template <>
struct Weights<true> {
    u32 word[PAIRS][cfg::BLOCKS][4];
    DEVICE Weights of(u32 at, int thread) {
        Weights w;
        const int row = thread / 32 * 16 + thread % 32 / 4;
        const u32 own = at + row * 128 + (row % 8 << 4) + thread % 4 * 4;
        UNROLL for (int i = 0; i < PAIRS; i++)
            UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
                UNROLL for (int q = 0; q < 4; q++)
                    w.word[i][m][q] = load_word((own ^ (i % K_STEPS * 32 + q / 2 * 16)) + i / K_STEPS * cfg::W_BYTES +
                                                (m * BLOCK + q % 2 * 8) * 128);
        return w;
    }
    __device__ __forceinline__ const u32 (&get(int, int i, int m) const)[4] { return word[i][m]; }
};

// All of a tile's products into d; `slot`: how many slots were filled before its first one. Where
// runs come in chunks, it waits for each one, and gives back each slot but the last, once the tile
// before has multiplied.
template <class Wait>
DEVICE void sum(Sums& d, const Shared& s, const Weights<W_HELD>& weights, int slot, bool weights_here,
                Wait tile_before) {
#pragma unroll 1
    for (int chunk = 0; chunk < RUN_CHUNKS; chunk++, slot++) {
        u32 x[UNITS];
        UNROLL for (int u = 0; u < UNITS; u++) x[u] = s.x + (slot + u) % cfg::X_STAGES * SLOT;
        if constexpr (RUN_CHUNKS > 1) operands_here(s, slot, chunk, weights_here);
        products_fence();
        UNROLL for (int i = 0; i < PAIRS; i++)
            UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
                UNROLL for (int strip = 0; strip < cfg::STRIPS; strip++) {
                    const int row = strip * DOWN_STRIDE + PAIR_ROW[i];
                    const u32 at = x[row / SLOT_ROWS] + row % SLOT_ROWS * ROW_STEP + PAIR_PART[i] * PART_STEP;
                    const u32 apart = PAIR_APART[i] < 0 ? s.zero - at : PAIR_APART[i];
                    product(d[m][strip], weights.get(chunk, i, m), plain_operand(at, apart), i > 0 ? 1 : chunk > 0);
                }
        products_commit();
        if (RUN_CHUNKS > 1 && chunk > 0) {
            products_wait<1>();
            if (chunk == 1) tile_before();
            give_back(s, slot - 1, 1);
        }
    }
}

// What is no position does not count in a window.
DEVICE float nothing() { return engine::nothing_of(cfg::FOLD); }

// A row of a tile as windows fold it: of each group of 8 positions the two that a thread has.
typedef u32 Row[cfg::GROUPS][2][WORDS];
constexpr int ROW_PARTS = (cfg::GROUPS * 2 * WORDS + 3) / 4;  // parts of 16 bytes of it

DEVICE void pack(u32 (&to)[WORDS], float first, float second) {
    if constexpr (cfg::WIDE) to[0] = __float_as_uint(first), to[1] = __float_as_uint(second);
    else to[0] = engine::packed(first, second);
}
DEVICE u32 fold(u32 a, u32 b) {
    if constexpr (cfg::WIDE) return __float_as_uint(engine::folded(__uint_as_float(a), __uint_as_float(b)));
    else return engine::folded_halves(a, b);
}

// What `before` makes of a group's sums; rounding now or after the fold is the same.
DEVICE void values(u32 (&to)[2][WORDS], const engine::Epilogue& e, const float (&d)[SUMS], const Features (&c)[2],
                   int m, int strip, int g) {
    UNROLL for (int x = 0; x < 2; x++) {
        float v[2];
        UNROLL for (int h = 0; h < 2; h++) {
            bool inside;
            const Place p = e.place<false>(strip * engine::View<false>::ACROSS + g, m, h, x, inside);
            v[h] = before(e.a, d[4 * g + 2 * h + x], c[h], p);
            if (EDGES && !inside) v[h] = nothing();
        }
        pack(to[x], v[0], v[1]);
    }
}

// A row from shared memory, or to there: a thread's parts of 16 bytes, 128 threads' side by side.
DEVICE void take_row(Row& row, u32 from) {
    u32 flat[4 * ROW_PARTS];
    UNROLL for (int i = 0; i < ROW_PARTS; i++) {
        const uint4 v = load_part(from + i * (128 * 16));
        flat[4 * i] = v.x, flat[4 * i + 1] = v.y, flat[4 * i + 2] = v.z, flat[4 * i + 3] = v.w;
    }
    UNROLL for (int i = 0; i < cfg::GROUPS * 2 * WORDS; i++) row[i / (2 * WORDS)][i / WORDS % 2][i % WORDS] = flat[i];
}
DEVICE void copy(Row& to, const Row& from) {
    UNROLL for (int i = 0; i < cfg::GROUPS * 2 * WORDS; i++)
        to[i / (2 * WORDS)][i / WORDS % 2][i % WORDS] = from[i / (2 * WORDS)][i / WORDS % 2][i % WORDS];
}
DEVICE void hand_on(const Row& row, u32 to) {
    u32 flat[4 * ROW_PARTS];
    UNROLL for (int i = 0; i < 4 * ROW_PARTS; i++)
        flat[i] = i < cfg::GROUPS * 2 * WORDS ? row[i / (2 * WORDS)][i / WORDS % 2][i % WORDS] : 0;
    UNROLL for (int i = 0; i < ROW_PARTS; i++)
        store_part(to + i * (128 * 16), make_uint4(flat[4 * i], flat[4 * i + 1], flat[4 * i + 2], flat[4 * i + 3]));
}

// Windows, each in the first sum of its two rows and two positions. A window's first row is the one
// above, its first position the left neighbour's second one.
DEVICE void fold_windows(float (&d)[cfg::STRIPS][SUMS], const engine::Epilogue& e, const Features (&c)[2], int m,
                         const Row& above, const Row& last) {
    constexpr int CELLS = (cfg::STRIPS + 1) / 2;
    const int from = (e.lane & 28) | ((e.lane + 3) & 3);
    const bool ends = (e.lane & 3) == 3;
    u32 before_it[CELLS][WORDS];
    UNROLL for (int q = 0; q < CELLS; q++) pack(before_it[q], nothing(), nothing());
    UNROLL for (int g = 0; g < cfg::GROUPS; g++) {
        u32 row[cfg::STRIPS][2][WORDS];
        UNROLL for (int strip = 0; strip + 1 < cfg::STRIPS; strip++) values(row[strip], e, d[strip], c, m, strip, g);
        UNROLL for (int q = 0; q < CELLS; q++)
            UNROLL for (int i = 0; i < WORDS; i++) {
                u32 v[2];
                UNROLL for (int x = 0; x < 2; x++) {
                    const u32 low = 2 * q + 2 < cfg::STRIPS ? row[2 * q + 1][x][i] : last[g][x][i];
                    v[x] = fold(fold(row[2 * q][x][i], low), q > 0 ? row[2 * q - 1][x][i] : above[g][x][i]);
                }
                const u32 left = __shfl_sync(~0u, ends ? before_it[q][i] : v[1], from);
                before_it[q][i] = v[1];
                const u32 all = fold(fold(v[0], v[1]), left);
                UNROLL for (int h = 0; h < 2; h++) {
                    if (cfg::WIDE && h != i) continue;
                    d[2 * q][4 * g + 2 * h] = cfg::WIDE ? __uint_as_float(all) : engine::unpacked(all, h);
                }
            }
    }
}

DEVICE void consume(const Shared& s, const Args& a, const TensorMap* const* results) {
    const int group = own_warp() >> 2, team = group / cfg::SPLIT, member = group % cfg::SPLIT;
    const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
    const Walk mine = Walk::mine();
    const engine::Shared nowhere{};
    Tile t = tile_at(mine.first, mine.feature);
    engine::Epilogue e{a, nowhere, t, group, member, thread, thread >> 5, lane,
                       s.out + group * ((cfg::TILE_BYTES + 127) / 128 * 128), 0};
    Features c[cfg::BLOCKS][2];
    UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
        UNROLL for (int h = 0; h < 2; h++) c[m][h] = features(a, 0, min(e.feature(m, h), cfg::FEATURES - 1));
    Row own[cfg::BLOCKS];  // the last row, where there is one team
    bool weights_here = false;
    if (W_HELD && mine.first < mine.last) {
        weights_come(s, 0, WEIGHTS);
        weights_here = true;
    }
    const Weights<W_HELD> weights = Weights<W_HELD>::of(s.w + member * cfg::BLOCKS * BLOCK * 128, thread);
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
        if constexpr (RUN_CHUNKS == 1) {
            // a slot's barrier tells one round from the next only: those of the tile before have come
            if (cfg::TEAMS > 1 && turn > 0) barrier_wait(s.ready + 8 * other, parity);
            operands_here(s, slot, 0, weights_here);
            if constexpr (cfg::TEAMS > 1) warp_arrives(s.ready + 8 * group);
        }
        mark(1, turn);
        Sums d;
        if (cfg::TEAMS > 1 && turn > 0) barrier_wait(s.turn + 8 * other, parity);
        mark(2, turn);
        const auto tile_before = [&]() {
            if (cfg::TEAMS > 1 && turn > 0) barrier_wait(s.done + 8 * other, parity);
        };
        sum(d, s, weights, slot, weights_here, tile_before);
        weights_here = true;
        if constexpr (cfg::TEAMS > 1) warp_arrives(s.turn + 8 * group);
        products_wait<0>();
        mark(3, turn);
        tile_before();  // it has multiplied, and handed on its row
        give_back(s, slot + (RUN_CHUNKS - 1), spent);
        slot += spent * RUN_CHUNKS;
        mark(4, turn);
        const bool stores = n > mine.first || !mine.above;
        if constexpr (CARRIED) {
            Row above[cfg::BLOCKS], last[cfg::BLOCKS];
            const bool take = n > mine.first && !begins(n);
            UNROLL for (int m = 0; m < cfg::BLOCKS; m++) {
                constexpr int LAST = cfg::STRIPS - 1;
                UNROLL for (int g = 0; g < cfg::GROUPS; g++) values(last[m][g], e, d[m][LAST], c[m], m, LAST, g);
                const u32 row = s.carry + m * (CARRY_BYTES / cfg::BLOCKS) + thread * 16;
                if (take) {
                    if constexpr (cfg::TEAMS > 1) take_row(above[m], row + other * CARRY_BYTES);
                    else copy(above[m], own[m]);
                } else {
                    UNROLL for (int g = 0; g < cfg::GROUPS; g++)
                        UNROLL for (int x = 0; x < 2; x++) pack(above[m][g][x], nothing(), nothing());
                }
                if constexpr (cfg::TEAMS > 1) hand_on(last[m], row + group * CARRY_BYTES);
                else copy(own[m], last[m]);
            }
            if constexpr (cfg::TEAMS > 1) warp_arrives(s.done + 8 * group);
            mark(5, turn);
            if (!stores) continue;
            UNROLL for (int m = 0; m < cfg::BLOCKS; m++) fold_windows(d[m], e, c[m], m, above[m], last[m]);
        } else {
            if constexpr (cfg::TEAMS > 1) warp_arrives(s.done + 8 * group);
            mark(5, turn);
            engine::before_windows(e, d, c, results);
        }
        mark(6, turn);
        engine::store_results(e, d, c, results);
        mark(7, turn);
    }
    if (thread == 0) stores_wait_read<0>();  // shared memory goes with the program
}

template <class T>
DEVICE void run(const Args& a, const T* x, const TensorMap* w, const TensorMap* const* results) {
    extern __shared__ unsigned char memory[];
    const Shared s = Shared::at(shared_address(memory));
    constexpr int W = WEIGHTS, X = cfg::X_STAGES, RAW = LOADER_WARPS * RAW_STAGES;
    make_barriers(s.w_full, W + 2 * X + RAW + 3 * WARPGROUPS, [](int i) {  // the last: ready, turn, done
        if (i < W + X) return i < W ? 1 : SLOT_ROWS * WARP_ARRIVALS;
        if (i < W + 2 * X) return 4 * cfg::SPLIT * WARP_ARRIVALS;
        return i < W + 2 * X + RAW ? 1 : 4 * WARP_ARRIVALS;
    });
    if (threadIdx.x == 0) prefetch(w);
#pragma unroll 1
    for (int i = threadIdx.x; i < ZERO_BYTES / 4; i += blockDim.x) store_word(s.zero + 4 * i, 0);
    publish();
    __syncthreads();
    wait_for_launch_before();
    const int warp = own_warp();
    if (warp < 4 * WARPGROUPS) {  // this branch first: else ptxas gives it no more registers
        if constexpr (HANDED_ON) more_registers<MULTIPLYING>();
        consume(s, a, results);
    } else {
        if constexpr (HANDED_ON) fewer_registers<LOADING>();
        load(s, x, w, warp - 4 * WARPGROUPS, threadIdx.x & 31);
    }
    start_next_launch();
}

}  // namespace packed
