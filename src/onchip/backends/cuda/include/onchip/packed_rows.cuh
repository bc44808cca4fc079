// Rows of input of the packed form: which ones a program needs, how warps bring and lay them out.
#pragma once
#include <onchip/engine.cuh>

namespace packed {

using namespace packed_cfg;
using engine::BLOCK;
using engine::SUMS;
using engine::Sums;
using engine::Tile;
using engine::WARPGROUPS;

constexpr int COLUMNS = cfg::PATCH[0];
constexpr int SPENT = ADVANCE / SLOT_ROWS;  // slots by which a tile goes on
constexpr bool EDGES = cfg::PATCH[0] > cfg::POSITIONS[0] || cfg::POSITIONS[1] % cfg::PATCH[1] > 0;
constexpr int K_STEPS = 4;  // instructions that a row of weights feeds
constexpr int WORDS = cfg::WIDE ? 2 : 1;  // that hold a position's values for two features

struct Shared {
    u32 w, x, zero, raw, out, carry, w_full, x_full, x_empty, raw_full, ready, turn, done;
    DEVICE Shared at(u32 start) {
        Shared s;
        s.w = (start + 1023) & ~1023u;
        s.out = s.w + WEIGHTS * cfg::W_BYTES;
        s.x = s.out + WARPGROUPS * ((cfg::TILE_BYTES + 127) / 128 * 128);
        s.zero = s.x + cfg::X_STAGES * SLOT;
        s.raw = s.zero + ZERO_BYTES;
        s.carry = s.raw + LOADER_WARPS * RAW_STAGES * RAW_ROW;
        s.w_full = s.carry + WARPGROUPS * CARRY_BYTES;
        s.x_full = s.w_full + 8 * WEIGHTS;
        s.x_empty = s.x_full + 8 * cfg::X_STAGES;
        s.raw_full = s.x_empty + 8 * cfg::X_STAGES;
        s.ready = s.raw_full + 8 * LOADER_WARPS * RAW_STAGES;
        s.turn = s.ready + 8 * WARPGROUPS;
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

// A row that a loader lays out, of one chunk: `row` counts those of the slots that tile n reads, a
// slot's rows one after the other.
struct Cursor {
    static constexpr int ALL = UNITS * RUN_CHUNKS * SLOT_ROWS, SPARE = (UNITS - SPENT) * RUN_CHUNKS * SLOT_ROWS;
    int n, row;
    __device__ __forceinline__ void skip(int rows) {
        for (row += rows; row >= ALL; row += begins(n) ? 0 : SPARE) n++, row -= ALL;
    }
    __device__ __forceinline__ int chunk() const { return row / SLOT_ROWS % RUN_CHUNKS; }
    // Of the input; it may lie outside.
    __device__ __forceinline__ int y() const {
        const int unit = row / (SLOT_ROWS * RUN_CHUNKS);
        return n % cfg::TILES[1] * ADVANCE + unit * SLOT_ROWS + row % SLOT_ROWS + ROW_ORIGIN;
    }
};

// ---- the loaders -------------------------------------------------------------------------------

constexpr int CHUNK = PARTS * 16 / SIZE;  // elements of a run in a slot

// A row of input as it is, what its chunk's runs cover: zeros where there is nothing.
template <class T>
DEVICE void fetch_row(u32 to, const T* x, const Cursor& at, int lane) {
    constexpr int EACH = COPY / SIZE, COPIES = RAW_ROW / COPY;
    const Tile t = tile_at(at.n, 0);
    const int y = at.y(), element = t.line[0] * TILE_ELEMENTS + at.chunk() * CHUNK + ORIGIN;
    const T* row = x + X_OFFSET + (long long)t.line[2] * X_STEP[1] + (long long)t.line[3] * X_STEP[2] +
                   (long long)y * X_STEP[0];
    for (int i = lane; i < COPIES; i += 32) {
        const int e = element + i * EACH;
        const bool inside = y >= 0 && y < ROWS && e >= 0 && e < ROW_ELEMENTS;
        const T* from = inside ? row + e : x;
        if constexpr (COPY >= 4) copy_ahead<COPY>(to + i * COPY, from, inside ? COPY : 0);
        else store_half(to + i * COPY, inside ? *(const u16*)from : 0);
    }
}

// The same for a whole row: by the copy engine, if it exists. Around it lie zeros, which stay.
template <class T>
DEVICE void fetch_whole_row(u32 to, const T* x, const Cursor& at, u32 full, int lane) {
    constexpr int BYTES = ROW_ELEMENTS * SIZE;
    const Tile t = tile_at(at.n, 0);
    const int y = at.y();
    const bool inside = y >= 0 && y < ROWS;
    to += (u32)(-ORIGIN * SIZE);
    if (!inside) {
        for (int i = lane; i < BYTES / 16; i += 32) store_part(to + 16 * i, make_uint4(0, 0, 0, 0));
        __syncwarp();
    }
    if (lane == 0) {
        barrier_expect(full, inside ? BYTES : 0);
        const T* image = x + X_OFFSET + (long long)t.line[2] * X_STEP[1] + (long long)t.line[3] * X_STEP[2];
        if (inside) copy_run(to, image + (long long)y * X_STEP[0], BYTES, full);
    }
}

// The words of N parts from `at` on, a multiple of 4, in whose middle a run may begin: `shift` bits on.
// What lies beyond `left` elements is zero, and what lies before the first part's run.
template <int N>
DEVICE void read_run(u32 (&word)[4 * N], u32 at, u32 shift, bool first, int left) {
    constexpr int EACH = 4 / SIZE;
    if constexpr (RAW_ALIGNED >= 4) {
        constexpr int STEP_WORDS = RAW_ALIGNED / 4;
        UNROLL for (int i = 0; i < 4 * N; i += STEP_WORDS) {
            if (left <= i * EACH) continue;
            if constexpr (STEP_WORDS == 4) {
                const uint4 v = load_part(at + 4 * i);
                word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
            } else if constexpr (STEP_WORDS == 2) {
                load_words(at + 4 * i, word[i], word[i + 1]);
            } else {
                word[i] = load_word(at + 4 * i);
            }
        }
    } else {
        u32 low = load_word(at);
        UNROLL for (int i = 0; i < 4 * N; i++) {
            if (left <= i * EACH) continue;
            const u32 high = load_word(at + 4 * i + 4);
            word[i] = __funnelshift_r(low, high, shift);
            low = high;
        }
    }
    if (LEAD && first) word[0] &= 0xFFFF0000;
    UNROLL for (int i = 0; i < 4 * N; i++) {
        const int here = left - i * EACH;
        if (here <= 0) word[i] = 0;
        else if (SIZE == 2 && here == 1) word[i] &= 0xFFFF;
        else if (SIZE == 4) word[i] = rounded_tf32(word[i]);
    }
}

// A row in parts, for one chunk of its runs, by a warp: a lane's items together, so that it waits for
// what it reads once.
DEVICE void lay_out(u32 to, u32 raw, int chunk, int lane) {
    constexpr int ITEMS = (COLUMNS + 31) / 32, EACH = 16 / SIZE;
    constexpr bool FILLED = RUN_CHUNKS * CHUNK == LEAD + RUN;  // the last part is full, too
    const u32 run = raw + RAW_BEFORE * SIZE + lane * STEP, from = run & ~3u;
    // every run starts in the middle of a word, or every other one does
    const u32 shift = STEP % 4 == 0 ? RAW_BEFORE * SIZE % 4 * 8 : (run & 2) * 8;
    const bool last = lane < COLUMNS - 32 * (ITEMS - 1);  // has as many items as others, or one less
    to += lane * 16;
    UNROLL for (int part = 0; part < PARTS; part += PER_ITEM)
        UNROLL for (int start = 0; start < ITEMS; start += AT_ONCE) {
            u32 word[AT_ONCE][4 * PER_ITEM];
            UNROLL for (int n = start; n < min(start + AT_ONCE, ITEMS); n++)
                if (n + 1 < ITEMS || last)
                    read_run<PER_ITEM>(word[n - start], from + n * (32 * STEP) + part * 16, shift, chunk == 0 && part == 0,
                                       FILLED ? CHUNK : LEAD + RUN - chunk * CHUNK - part * EACH);
            UNROLL for (int n = start; n < min(start + AT_ONCE, ITEMS); n++)
                if (n + 1 < ITEMS || last)
                    UNROLL for (int p = 0; p < PER_ITEM; p++) {
                        const u32* w = &word[n - start][4 * p];
                        store_part(to + n * (32 * 16) + (part + p) * PART_STEP, make_uint4(w[0], w[1], w[2], w[3]));
                    }
        }
}

template <class T>
DEVICE void load(const Shared& s, const T* x, const TensorMap* w, int warp, int lane) {
    const Walk mine = Walk::mine();
    if (mine.first >= mine.last || warp >= LOADERS) return;
    const u32 raw = s.raw + warp * (RAW_STAGES * RAW_ROW), full = s.raw_full + 8 * RAW_STAGES * warp;
    Cursor here{mine.first, 0};
    here.skip(warp);
    Cursor ahead = here;
    const auto fetch = [&](int stage) {
        if (ahead.n < mine.last) {
            const u32 to = raw + stage * RAW_ROW;
            if constexpr (WHOLE_ROWS) fetch_whole_row(to, x, ahead, full + 8 * stage, lane);
            else fetch_row(to, x, ahead, lane);
            ahead.skip(LOADERS);
        }
        if constexpr (!WHOLE_ROWS) copies_commit();
    };
    if constexpr (WHOLE_ROWS) {
        for (int i = lane; i < RAW_STAGES * RAW_ROW / 16; i += 32) store_part(raw + 16 * i, make_uint4(0, 0, 0, 0));
        publish();
        __syncwarp();
    }
    for (int i = 0; i < RAW_STAGES; i++) fetch(i);
    if (warp == LOADERS - 1 && lane == 0)
        for (int i = 0; i < WEIGHTS; i++) {
            const int at[5] = {0, i * cfg::FEATURES + mine.feature, 0, 0, 0};
            barrier_expect(s.w_full + 8 * i, cfg::W_BYTES);
            load_box<2>(s.w + i * cfg::W_BYTES, w, s.w_full + 8 * i, at);
        }
    engine::Ring<RAW_STAGES> stage;
    int turn = 0;
    for (int row = warp; here.n < mine.last; here.skip(LOADERS), row += LOADERS, turn++) {
        const int filled = row / SLOT_ROWS, slot = filled % cfg::X_STAGES;
        const u32 from = raw + stage.slot * RAW_ROW;
        mark(0, turn);
        if constexpr (WHOLE_ROWS) {
            barrier_wait(full + 8 * stage.slot, stage.parity);
        } else {
            copies_wait<RAW_STAGES - 1>();
            __syncwarp();  // those of all lanes
        }
        mark(1, turn);
        barrier_wait(s.x_empty + 8 * slot, filled / cfg::X_STAGES & 1 ^ 1);
        mark(2, turn);
        lay_out(s.x + slot * SLOT + row % SLOT_ROWS * ROW_STEP, from, here.chunk(), lane);
        mark(3, turn);
        publish();
        warp_arrives(s.x_full + 8 * slot);  // all have read and written
        fetch(stage.slot);
        stage.next();
        mark(4, turn);
    }
}

}  // namespace packed
