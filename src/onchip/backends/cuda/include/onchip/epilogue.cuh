// From a tile's sums to results: the generated functions on each element, windows folded, tiles stored.
// It asks of a main loop only where a thread's sums lie: D[feature, position] in fragments of wgmma.
#pragma once
#include <onchip/half.cuh>
#include <onchip/tiles.cuh>

namespace engine {

// ---- the epilogue ------------------------------------------------------------------------------

// Of two values by 'M'aximum, 'm'inimum or 's'um, and what counts for nothing there.
template <char HOW>
DEVICE float both(float a, float b) {
    return HOW == 'M' ? onchip::maximum(a, b) : HOW == 'm' ? onchip::minimum(a, b) : a + b;
}
DEVICE float nothing_of(char how) {
    return how == 's' ? 0.f : __uint_as_float(how == 'M' ? 0xFF800000u : 0x7F800000u);
}
DEVICE float folded(float a, float b) { return both<cfg::FOLD>(a, b); }

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
        constexpr bool ONE = cfg::FOLDED;  // a window's first position has it all
        float v = 0.f;
        UNROLL for (int i3 = 0; i3 < (ONE ? 1 : W3); i3++)
            UNROLL for (int i2 = 0; i2 < (ONE ? 1 : W2); i2++)
                UNROLL for (int i1 = 0; i1 < (ONE ? 1 : W1); i1++)
                    UNROLL for (int i0 = 0; i0 < (ONE ? 1 : W0); i0++) {
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
    return cfg::HALF == 'b' ? onchip::from_bf16(x) : onchip::from_fp16(x);
}
DEVICE u32 folded_halves(u32 a, u32 b) {
    if constexpr (cfg::HALF == 'b') return cfg::FOLD == 'M' ? onchip::maximum_bf16x2(a, b) : onchip::minimum_bf16x2(a, b);
    else return cfg::FOLD == 'M' ? onchip::maximum_fp16x2(a, b) : onchip::minimum_fp16x2(a, b);
}

// A word of float32 in a tile of two halves of 32 features.
template <int PADDED>
DEVICE u32 word_at(u32 tile, int row, int feature) {
    const int part = (feature & 31) >> 2;
    return tile + (feature >> 5) * (PADDED * LINE) + row * LINE + ((part ^ (row & 7)) << 4) +
           (feature & 3) * 4;
}

constexpr int FOLDS = cfg::TOTALS + !cfg::TOTALS;

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
            int end = View<POOLED>::total(l);
            if constexpr (cfg::UNEVEN && !POOLED) end = cfg::LENGTH[t.batch][l];  // of its class
            inside = inside && at >= 0 && at < end;
            p.at[l] = max(min(at, end - 1), 0);
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

    // The tile reads of one element.
    template <int PADDED>
    __device__ __forceinline__ void read_words(int m, int row, int f, float (&reads)[cfg::READS + 1]) const {
        UNROLL for (int r = 0; r < cfg::READS; r++) {
            const u32 from = in + cfg::READ_AT[r] + m * cfg::READ_BLOCK[r];
            if (cfg::READ_SIZE[r] == 4) {
                reads[r] = __uint_as_float(load_word(word_at<PADDED>(from, row, f)));
            } else {
                const u32 word = load_word(from + row * LINE + (((f >> 3) ^ (row & 7)) << 4) + (f & 6) * 2);
                reads[r] = unpacked(word, f & 1);
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
                        read_words<V::PADDED>(m, row, f, reads);
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

    // All of a result whose neighbours along the first line lie side by side: by rows of each feature,
    // which a warp hands round in shared memory, since parts of a sector of memory that are written by
    // themselves are read before.
    template <bool POOLED, int R>
    __device__ __forceinline__ void write_rows(const Sums& d, const Features (&c)[cfg::BLOCKS][2]) const {
        typedef View<POOLED> V;
        constexpr int LENGTH = V::ACROSS * V::UNIT, COLUMNS = LENGTH < cfg::ROW_COLUMNS ? LENGTH : cfg::ROW_COLUMNS;
        constexpr int SLOTS = COLUMNS / V::UNIT, PITCH = cfg::ROW_PITCH;
        constexpr int STEP = POOLED ? cfg::CELLS[0] : cfg::CELLS[0] * cfg::HOP[0];
        constexpr int SIDE = STEP % 2 == 0 && (POOLED || cfg::LEAD[0] % 2 == 0) ? cfg::RESULT_SIDE[R] : 1;
        constexpr int AT_ONCE = 32 / (COLUMNS / SIDE) ? 32 / (COLUMNS / SIDE) : 1;  // rows of an instruction
        const u32 own = tile + warp * (16 * PITCH * 4);
        const int column = lane % (32 / AT_ONCE) * SIDE, first_row = lane / (32 / AT_ONCE);
        UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
            UNROLL for (int outer = 0; outer < V::SLOTS / V::ACROSS; outer++) {
                Place p;
                p.batch = t.batch;
                bool there = true;
                UNROLL for (int l = 1; l < 4; l++) {
                    p.at[l] = V::first(t, l) + V::local(outer * V::ACROSS, l, lane, 0);
                    there = there && p.at[l] >= 0 && p.at[l] < V::total(l);
                }
                UNROLL for (int start = 0; start < V::ACROSS; start += SLOTS) {
                    UNROLL for (int inner = 0; inner < SLOTS && start + inner < V::ACROSS; inner++)
                        UNROLL for (int h = 0; h < 2; h++) {
                            const int slot = outer * V::ACROSS + start + inner, f = 8 * h + (lane >> 2);
                            u32 v[2];
                            UNROLL for (int e = 0; e < V::EACH; e++) {
                                float reads[cfg::READS + 1];
                                read_words<V::PADDED>(m, V::row(slot, lane, e), 16 * warp + f, reads);
                                bool inside;
                                Place q;
                                v[e] = __float_as_uint(result_at<POOLED, R>(d, c, m, slot, h, e, reads, inside, q));
                            }
                            const u32 to = own + (f * PITCH + V::UNIT * inner + V::EACH * (lane & 3)) * 4;
                            if constexpr (V::EACH == 2) store_words(to, v[0], v[1]);
                            else store_word(to, v[0]);
                        }
                    __syncwarp();
                    p.at[0] = V::first(t, 0) + start * V::UNIT + column;
                    const int left = min(V::total(0) - p.at[0], LENGTH - start * V::UNIT - column);
                    const bool here = there && column < COLUMNS && left > 0 && p.at[0] + SIDE > 0;
                    UNROLL for (int row = first_row; row < 16; row += AT_ONCE) {
                        p.feature = t.feature + (member * cfg::BLOCKS + m) * BLOCK + 16 * warp + row;
                        const u32 from = own + (row * PITCH + column) * 4;
                        if (!here || p.feature >= cfg::FEATURES) continue;
                        if constexpr (SIDE == 2) {
                            u32 w[2];
                            load_words(from, w[0], w[1]);
                            const float v[2] = {__uint_as_float(w[0]), __uint_as_float(w[1])};
                            if (left > 1) put_all<R, 2>(a, p, v);
                            else put<R>(a, p, v[0]);
                        } else {
                            put<R>(a, p, __uint_as_float(load_word(from)));
                        }
                    }
                    __syncwarp();  // all have read
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
                    if constexpr (cfg::BATCHED) at[1 + cfg::LINES] = t.batch;
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
        if constexpr (!cfg::RESULT_TILE[R] && cfg::RESULT_SIDE[R] > 0) {
            tile_is_free();
            write_rows<POOLED, R>(d, c);
        } else if constexpr (!cfg::RESULT_TILE[R]) {
            write_words<POOLED, R, true>(d, c);
        } else {
            tile_is_free();
            if constexpr (cfg::RESULT_SIZE[R] == 2) write_halves<POOLED, R>(d, c);
            else write_words<POOLED, R, false>(d, c);
            store_tile<POOLED, R>(map);
        }
    }

    // ---- totals --------------------------------------------------------------------------------

    template <int K>
    __device__ __forceinline__ void fold_in(float (&v)[FOLDS], float acc, const Features& own, const Place& p,
                                            const float* reads) const {
        if constexpr (K < cfg::TOTALS) {
            v[K] = both<cfg::TOTAL_FOLD[K]>(v[K], total<K>(a, acc, own, p, reads));
            fold_in<K + 1>(v, acc, own, p, reads);
        }
    }
    template <int K>
    __device__ __forceinline__ void store_totals(const float (&v)[FOLDS], int place, int row) const {
        if constexpr (K < cfg::TOTALS) {
            float all = v[K];
            UNROLL for (int apart = 1; apart < 4; apart *= 2)
                all = both<cfg::TOTAL_FOLD[K]>(all, __shfl_xor_sync(~0u, all, apart));
            if (place >= 0 && (lane & 3) == 0) {
                const int first = (K * cfg::BATCH + t.batch) * cfg::KEPT * cfg::FOLDED_TILES + place;
                partials(a)[first * cfg::FEATURES + row] = all;
            }
            store_totals<K + 1>(v, place, row);
        }
    }

    // What this tile has of the totals, for the second launch: a thread folds its positions that exist,
    // then the four that share a feature do. Each tile has an element of its own.
    __device__ __forceinline__ void fold_tile(const Sums& d, const Features (&c)[cfg::BLOCKS][2]) const {
        typedef View<false> V;
        int kept = 0, folds = 0;
        bool there = true;  // a cluster's last tiles may lie outside
        UNROLL for (int l = 3; l >= 0; l--) {
            int& place = cfg::APART[l] ? kept : folds;
            place = place * cfg::TILES[l] + t.line[l];
            there = there && t.line[l] < cfg::TILES[l];
        }
        const int here_at = kept * cfg::FOLDED_TILES + folds;
        UNROLL for (int m = 0; m < cfg::BLOCKS; m++)
            UNROLL for (int h = 0; h < 2; h++) {
                float v[FOLDS];
                UNROLL for (int k = 0; k < cfg::TOTALS; k++) v[k] = nothing_of(cfg::TOTAL_FOLD[k]);
                UNROLL for (int slot = 0; slot < V::SLOTS; slot++)
                    UNROLL for (int x = 0; x < 2; x++) {
                        float reads[cfg::READS + 1];
                        read_words<V::PADDED>(m, V::row(slot, lane, x), 16 * warp + 8 * h + (lane >> 2), reads);
                        bool inside;
                        const Place p = place<false>(slot, m, h, x, inside);
                        if (inside) fold_in<0>(v, V::value(d[m], slot, h, x), c[m][h], p, reads);
                    }
                store_totals<0>(v, there && feature(m, h) < cfg::FEATURES ? here_at : -1, feature(m, h));
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

// Those of positions, or those of windows; then totals, where nothing is pooled.
template <int R, bool POOLED>
DEVICE void all_results(const Epilogue& e, const Sums& d, const Features (&c)[cfg::BLOCKS][2],
                        const TensorMap* const* maps) {
    if constexpr (R < cfg::RESULTS) {
        constexpr bool OWN = cfg::RESULT_POOLED[R] == POOLED && !(cfg::STAGED && POOLED);
        if constexpr (OWN) e.one_result<R>(d, c, map_of(maps[R], e.t));
        all_results<R + 1, POOLED>(e, d, c, maps);
    } else if constexpr (cfg::TOTALS > 0) {
        e.fold_tile(d, c);
    }
}
template <int R>
DEVICE void all_folds(const Epilogue& e) {
    if constexpr (R < cfg::RESULTS) {
        if constexpr (cfg::RESULT_POOLED[R]) e.fold_windows<R>();
        all_folds<R + 1>(e);
    }
}

// Results of positions beside a pool, which come of the sums as they are; then each sum becomes what
// windows fold.
DEVICE void before_windows(const Epilogue& e, Sums& d, const Features (&c)[cfg::BLOCKS][2],
                           const TensorMap* const* maps) {
    if constexpr (cfg::FOLD != 0) all_results<0, false>(e, d, c, maps);
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
                    v = before(e.a, v, c[m][h], p);
                }
}
// What is left then: results, and windows that are folded from shared memory.
DEVICE void store_results(const Epilogue& e, const Sums& d, const Features (&c)[cfg::BLOCKS][2],
                          const TensorMap* const* maps) {
    all_results<0, cfg::FOLD != 0>(e, d, c, maps);
    if constexpr (cfg::STAGED) {
        e.tile_is_free();
        e.stage(d);
        group_barrier(1 + e.group, 128);
        all_folds<0>(e);
        group_barrier(1 + e.group, 128);  // all have read
    }
}

}  // namespace engine
