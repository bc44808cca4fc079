// What brings operands and reads to shared memory: a thread for each, through the copy engine; and what
// splits float32 operands on their way.
#pragma once
#include <onchip/tiles.cuh>

namespace engine {

// ---- the producer ------------------------------------------------------------------------------

DEVICE void fetch_input(const Shared& s, const TensorMap* x, const Tile& t, int c, int phase,
                        Ring<cfg::X_STAGES>& ring) {
    barrier_wait(s.x_empty + 8 * ring.slot, ring.parity ^ 1);
    const u32 full = s.x_full + 8 * ring.slot, to = s.x + ring.slot * cfg::X_SLOT;
    barrier_expect(full, cfg::X_BYTES);
    int at[5] = {c * cfg::CHUNK, 0, 0, 0, 0};
    UNROLL for (int l = 0; l < cfg::LINES; l++)
        at[1 + l] = t.position(l) * cfg::STRIDE[l] + cfg::START[phase][l] +
                    (cfg::CLASSES > 1 ? cfg::SHIFT[t.batch][l] : 0);
    if constexpr (cfg::BATCHED) at[1 + cfg::LINES] = t.batch;
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

// Where programs share a tile and each has slots for all of its part, nobody waits for one. Weights that
// are laid out at load depend on no launch: they come while the one before still runs. Two threads ask,
// so that neither operand comes behind the other.
constexpr bool EARLY = cfg::AT_ONCE && cfg::W_PACKED;

DEVICE void fetch_all_input(const Shared& s, const TensorMap* x) {
    Ring<cfg::X_STAGES> ring;
    const Tile t = tile_of(first_tile());
    walk<1>(t, [&](int c, int phase) { fetch_input(s, x, t, c, phase, ring); }, [](int, int, bool) {});
}

DEVICE void fetch_all_weights(const Shared& s, const TensorMap* w) {
    int slot = 0;
    mark(0, 0);
    const Tile t = tile_of(first_tile());
    walk<1>(t, [](int, int) {}, [&](int c, int tap, bool) { fetch_weights(s, w, t, c, tap, slot++); });
    mark(1, 0);
}

DEVICE void produce(const Shared& s, const TensorMap* x, const TensorMap* w) {
    Ring<cfg::X_STAGES> x_ring;
    Ring<W_TILES> w_ring;
    if constexpr (cfg::AT_ONCE) return fetch_all_weights(s, w);
    // Where weights stay, the first tiles' input comes between them: memory takes its time for each
    // input, and hands out weights, which everybody reads, meanwhile.
    constexpr int AHEAD = STREAM || cfg::CHUNKS * cfg::PHASES > 1 ? 0
                          : (cfg::TEAMS < cfg::X_STAGES ? cfg::TEAMS : cfg::X_STAGES) - 1;
    constexpr int EVERY = STEPS / (AHEAD + 1) > 0 ? STEPS / (AHEAD + 1) : 1;  // steps
    int n = first_tile(), ahead = 0;
    for (int turn = 0; n < cfg::WORK; n += next_tile(), turn++) {
        mark(0, turn);
        const Tile t = tile_of(n);
        walk<STREAM ? UNROLLED : 1>(  // where weights come by, a step's may take no longer than its products
            t,
            [&](int c, int phase) {
                if (AHEAD == 0 || turn == 0 || turn > ahead) fetch_input(s, x, t, c, phase, x_ring);
            },
            [&](int c, int tap, bool) {
                if constexpr (STREAM) {
                    barrier_wait(s.w_empty + 8 * w_ring.slot, w_ring.parity ^ 1);
                    fetch_weights(s, w, t, c, tap, w_ring.slot);
                    w_ring.next();
                } else if (turn == 0) {
                    const int step = c * cfg::TAPS + tap;
                    fetch_weights(s, w, t, c, tap, step);
                    if constexpr (AHEAD > 0)
                        if ((step + 1) % EVERY == 0 && ahead < AHEAD) {
                            const int next = n + (ahead + 1) * next_tile();
                            if (next < cfg::WORK) fetch_input(s, x, tile_of(next), 0, 0, x_ring), ahead++;
                        }
                }
            });
        mark(1, turn);
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
                        if constexpr (cfg::BATCHED) at[1 + cfg::LINES] = t.batch;
                        load_box<cfg::TILE_RANK>(s.in + (ring.slot * cfg::SPLIT + member) * cfg::READ_BYTES +
                                                     cfg::READ_AT[r] + m * cfg::READ_BLOCK[r] +
                                                     part * (cfg::READ_BLOCK[r] / parts),
                                                 map_of(maps[r], t), full, at);
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
        walk<1>(
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
                warp_arrives(s.split + 8 * ring.slot);
                ring.next();
            },
            [](int, int, bool) {});
}

}  // namespace engine
