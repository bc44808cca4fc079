// Tiles of a contraction, whatever multiplies them: where a program keeps them in shared memory, which
// ones it takes, and in which order it walks over a tile's channels and taps.
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
    u32 w, x, out, in, sums, w_full, w_empty, x_full, x_empty, in_full, in_empty, turn, added, split, order;
    DEVICE Shared at(u32 start) {
        Shared s;
        s.w = (start + 1023) & ~1023u;
        s.x = s.w + W_TILES * cfg::W_BYTES;
        s.out = s.x + cfg::X_STAGES * cfg::X_SLOT;
        s.in = s.out + WARPGROUPS * cfg::TILE_BYTES;
        s.sums = s.in + cfg::R_STAGES * cfg::SPLIT * cfg::READ_BYTES;
        s.w_full = s.sums + cfg::EXCHANGE_BYTES;
        s.w_empty = s.w_full + 8 * W_TILES;
        s.x_full = s.w_empty + 8 * W_TILES;
        s.x_empty = s.x_full + 8 * cfg::X_STAGES;
        s.in_full = s.x_empty + 8 * cfg::X_STAGES;
        s.in_empty = s.in_full + 8 * cfg::R_STAGES;
        s.turn = s.in_empty + 8 * cfg::R_STAGES;
        s.added = s.turn + 8 * cfg::TEAMS;
        s.split = s.added + 16 * (cfg::K_SPLIT > 1);
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
// `unrolled`: taps. What multiplies unrolls them, since products wait for what lies between two steps.
template <int unrolled, class Chunk, class Step>
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
#pragma unroll unrolled
                for (int tap = begin; tap < end; tap++) step(c, tap, tap == begin);
            }
        }
    }
}

// ---- sums --------------------------------------------------------------------------------------

// A thread's, of each block of features and strip of positions.
typedef float Sums[cfg::BLOCKS][cfg::STRIPS][SUMS];

}  // namespace engine
