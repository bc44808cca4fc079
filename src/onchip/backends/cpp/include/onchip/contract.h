// The main loop shared by every contraction of the C++ backend: matmul, linear and
// convolution (as implicit GEMM) all compute
//
//     C[m, n] = sum over k of A[m, k] * B[k, n]         (float, row-major)
//
// Generated code supplies the two ends and this header the middle:
//   * B is constant (weights) and packed once, by pack_b, into panels [ceil(N/NR)][K][NR].
//   * A is a functor with one of two members
//         const float* row(long m) const                                    "direct"
//             the K contiguous floats of row m;
//         void pack(long m0, long mcount, long k0, long kc, float* dst, long ld) const
//             stores A[m0 + i, k0 + j] to dst[i * ld + j]                    "packed"
//             for loads that are padded, strided or fused with other operations.
//   * The result leaves through a functor, called once per finished tile:
//         void epilogue(long m, int mcount, long n, int ncount, const float* tile, long ld)
//             tile[i * ld + j] is C[m + i, n + j], for i < mcount <= MR and j < ncount <= NR.
//     It has two call sites (in one of them ncount is the constant NR), so declare it
//     __attribute__((always_inline)), and capture by value rather than by reference.
//     It may have a member
//         void prefetch(long m, int mcount, long n, int ncount) const
//     called before the tile is computed, to fetch the lines of the output (with
//     __builtin_prefetch(address, 1)) and of residual operands. Outputs larger than L2
//     gained 1 to 20 % (the more, the busier the machine); small ones lose 1 %.
//
// Blocking. A tile of MR x NR sums lives in registers. The B panel of one K block
// (kc * NR floats) stays in L1 while the rows of an M block stream past it from L2, which
// needs far less bandwidth than keeping the rows and streaming B. If K takes several blocks,
// the partial sums wait in the workspace, tile by tile. Prefetching brings in the next B panel
// and, for direct rows, the next block of rows meanwhile: the hardware does not foresee these
// jumps, and most operands of a network come from L3 or memory.
#pragma once

#include <string.h>

namespace onchip {

#if defined(__AVX512F__)
constexpr int VEC = 16;  // floats per vector register
constexpr int MR = 12;   // 24 of 32 registers hold sums; more row pointers would not fit
#elif defined(__AVX__)
constexpr int VEC = 8;
constexpr int MR = 6;    // 12 of 16 registers hold sums, 2 hold B, 2 are left for A
#else
constexpr int VEC = 4;
constexpr int MR = 6;
#endif
constexpr int NR = 2 * VEC;

typedef float Vector __attribute__((vector_size(VEC * 4)));
// The same, at any float address: the compiler emits unaligned moves.
typedef float VectorAnywhere __attribute__((vector_size(VEC * 4), aligned(4), may_alias));

inline Vector load(const float* from) { return *(const VectorAnywhere*)from; }
inline void store(float* to, Vector value) { *(VectorAnywhere*)to = value; }

inline Vector broadcast(float value) { return value - Vector{}; }  // x - 0 is x, even for -0

// sum += a * b. Spelled out for x86: left to itself, gcc 12 folds the load of a B vector into
// each of its uses, so that loads (two per cycle) become the bottleneck, and uses the forms of
// FMA that overwrite a factor, which costs moves and spills.
inline void add_product(Vector& sum, Vector a, Vector b) {
#if defined(__FMA__)
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
    sum += a * b;
#endif
}

constexpr long round_up(long value, long step) { return (value + step - 1) / step * step; }
constexpr long shorter(long a, long b) { return a < b ? a : b; }

// ---------------------------------------------------------------- packing B

inline long packed_b_size(long K, long N) { return round_up(N, NR) * K; }

// B[k, n] is read at src[k * stride_k + n * stride_n]; columns beyond N become zero.
inline void pack_b(const float* src, long K, long N, long stride_k, long stride_n, float* dst) {
    for (long n = 0; n < N; n += NR) {
        const long columns = shorter(NR, N - n);
        for (long k = 0; k < K; ++k, dst += NR) {
            const float* from = src + k * stride_k + n * stride_n;
            for (long j = 0; j < columns; ++j) dst[j] = from[j * stride_n];
            for (long j = columns; j < NR; ++j) dst[j] = 0.0f;
        }
    }
}

// ---------------------------------------------------------------- blocking

constexpr long MAX_BLOCK_ROWS = 384;  // bounds the driver's tables of row pointers

struct Blocking {
    long rows;       // rows of A per M block, at most MAX_BLOCK_ROWS
    long depth;      // elements of K per K block
    bool copy_rows;  // direct mode: copy the rows of a block into the workspace first
};

// M, N: the share of one thread. row_stride: floats between direct rows (0: packed mode).
inline Blocking choose_blocking(long M, long N, long K, long row_stride = 0) {
    // A single tile is memory bound: stream the whole of B once, in order.
    if (M <= MR) return {M > 0 ? M : 1, K, false};
    // A panel takes 24K of a 32K L1, a block of rows at most 150K of L2.
    const long max_depth = 6144 / NR, max_rows = 96;
    const long depth_blocks = K > 0 ? (K + max_depth - 1) / max_depth : 1;
    const long row_blocks = (M + max_rows - 1) / max_rows;
    Blocking blocking;
    blocking.depth = round_up((K + depth_blocks - 1) / depth_blocks, 8);
    blocking.rows = round_up((M + row_blocks - 1) / row_blocks, MR);
    // Rows a multiple of 4K apart share cache sets, and evict each other and the B panel.
    // Copying rows that do not costs up to 7 % at N = 128.
    blocking.copy_rows = row_stride != 0 && row_stride % 1024 == 0 && N >= 128;
    return blocking;
}

// Distance between packed rows: an odd number of cache lines, so that the rows of one tile
// fall into different cache sets.
inline long packed_row_stride(long depth) { return (round_up(depth, 16) / 16 | 1) * 16; }

// The workspace holds a block of packed rows, then the partial sums.
inline long packed_rows_size(long M, Blocking blocking) {
    return shorter(M, blocking.rows) * packed_row_stride(blocking.depth);
}
// Floats of workspace (64-byte aligned) for one call of contract with n1 - n0 <= N columns.
inline long workspace_floats(long M, long N, long K, Blocking blocking) {
    const long tiles = (shorter(M, blocking.rows) + MR - 1) / MR * (round_up(N, NR) / NR);
    return packed_rows_size(M, blocking) + (K > blocking.depth ? tiles * MR * NR : 0) + 16;
}

// ---------------------------------------------------------------- micro-kernel

constexpr long UNROLL = 4;
constexpr long LINES = NR > 16 ? NR / 16 : 1;  // cache lines of one k of a B panel

// tile[ROWS][NR] (+)= row[ROWS][kc] * panel[kc][NR]. Not inlined: it depends on neither functor,
// so all contractions of a translation unit share it. Meanwhile it prefetches a quarter of a
// panel from `prefetch` on, or with few rows, when there may be but one or two tiles, a whole.
template <int ROWS>
__attribute__((noinline)) void multiply_tile(const float* const* row, const float* panel,
                                             long kc, float* tile, bool accumulate,
                                             const float* prefetch) {
    // An FMA takes 4 cycles and two start per cycle, so at least 8 sums must be independent:
    // few rows use several sets of sums, for k modulo SETS.
    constexpr int SETS = ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;
    constexpr int PREFETCHES = LINES * (ROWS <= 4 ? UNROLL : 1);
    const float* a[ROWS];
    Vector sum[SETS][ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
        a[i] = row[i];
#pragma GCC unroll 4
        for (int s = 0; s < SETS; ++s) sum[s][i][0] = sum[s][i][1] = Vector{};
    }
    long k = 0;
    for (; k + UNROLL <= kc; k += UNROLL, panel += UNROLL * NR) {
#pragma GCC unroll 16
        for (int p = 0; p < PREFETCHES; ++p) __builtin_prefetch(prefetch + 16 * p);
        prefetch += 16 * PREFETCHES;
#pragma GCC unroll 4
        for (int u = 0; u < UNROLL; ++u) {
            const Vector left = load(panel + u * NR), right = load(panel + u * NR + VEC);
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; ++i) {
                const Vector factor = broadcast(a[i][k + u]);
                add_product(sum[u % SETS][i][0], left, factor);
                add_product(sum[u % SETS][i][1], right, factor);
            }
        }
    }
#pragma GCC unroll 1
    for (; k < kc; ++k, panel += NR) {
        const Vector left = load(panel), right = load(panel + VEC);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
            const Vector factor = broadcast(a[i][k]);
            add_product(sum[0][i][0], left, factor);
            add_product(sum[0][i][1], right, factor);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
        for (int s = 1; s < SETS; ++s) {
            sum[0][i][0] += sum[s][i][0];
            sum[0][i][1] += sum[s][i][1];
        }
        // Added at the end, not taken as a start: a block's sum is then rounded against itself
        // and not against all that went before, which for K = 65536 is ten times as exact.
        if (accumulate) {
            sum[0][i][0] += load(tile + i * NR);
            sum[0][i][1] += load(tile + i * NR + VEC);
        }
        store(tile + i * NR, sum[0][i][0]);
        store(tile + i * NR + VEC, sum[0][i][1]);
    }
}

// Kernels are linked with the ones in tiles.cpp, compiled once: a third of a kernel's compile time.
#if defined(ONCHIP_PREBUILT_TILES)
#define ONCHIP_TILE(ROWS)                                                                     \
    ONCHIP_PREBUILT_TILES template void multiply_tile<ROWS>(const float* const*, const float*, \
                                                            long, float*, bool, const float*)
ONCHIP_TILE(1);
ONCHIP_TILE(2);
ONCHIP_TILE(3);
ONCHIP_TILE(4);
ONCHIP_TILE(5);
ONCHIP_TILE(6);
#if defined(__AVX512F__)
ONCHIP_TILE(7);
ONCHIP_TILE(8);
ONCHIP_TILE(9);
ONCHIP_TILE(10);
ONCHIP_TILE(11);
ONCHIP_TILE(12);
#endif
#endif

typedef void (*MultiplyTile)(const float* const*, const float*, long, float*, bool, const float*);

// The kernel for 1 to MR rows.
inline MultiplyTile multiply_rows(long rows) {
    static const MultiplyTile table[] = {
        multiply_tile<1>, multiply_tile<2>, multiply_tile<3>,
        multiply_tile<4>, multiply_tile<5>, multiply_tile<6>,
#if defined(__AVX512F__)
        multiply_tile<7>, multiply_tile<8>, multiply_tile<9>,
        multiply_tile<10>, multiply_tile<11>, multiply_tile<12>,
#endif
    };
    static_assert(sizeof(table) / sizeof(*table) == MR, "one kernel per height of a tile");
    return table[rows - 1];
}

// ---------------------------------------------------------------- driver

// Calls epilogue.prefetch if there is one.
template <class Epilogue>
inline auto prefetch_output(Epilogue& epilogue, long m, int mcount, long n, int ncount, int)
    -> decltype(epilogue.prefetch(m, mcount, n, ncount), void()) {
    epilogue.prefetch(m, mcount, n, ncount);
}
template <class Epilogue>
inline void prefetch_output(Epilogue&, long, int, long, int, long) {}

// One M block times one B panel, in one K block.
struct Pass {
    const float* const* row;        // the rows of the M block, at the start of the K block
    const float* const* row_ahead;  // the rows needed next ...
    long line, end_line;            // ... of which this pass fetches these cache lines
    const float* panel;
    const float* panel_ahead;
    float* sums;       // the partial sums of this panel, tile by tile; null for a single K block
    long m, mcount, kc;
    bool first, last;  // of the K blocks
};

// Not inlined, to keep the loop over tiles and the epilogue apart from the many variables of
// the driver, which would all be spilled around each tile.
template <class Epilogue>
__attribute__((noinline)) void multiply_panel(const Pass& pass, long n, int ncount,
                                              Epilogue& epilogue) {
    alignas(64) float stack_tile[MR * NR];
    float* tile = pass.sums ? pass.sums : stack_tile;
    const float* const* row = pass.row;
    const float* const* row_ahead = pass.row_ahead;
    const float* panel_ahead = pass.panel_ahead;
    long m = pass.m;
    // Tiles of nearly equal height: 49 rows are 4 * 6 + 5 * 5 rather than 8 * 6 + 1, as
    // tiles of less than 4 rows keep the FMA units less busy.
    const long tiles = (pass.mcount + MR - 1) / MR;
    const long height = pass.mcount / tiles, taller = pass.mcount % tiles;
#pragma GCC unroll 1
    for (long t = 0; t < tiles; ++t) {
        const long rows = height + (t < taller);
        for (long line = pass.line; line < pass.end_line; ++line)
            for (long i = 0; i < rows; ++i)
                __builtin_prefetch(row_ahead[i] + 16 * line, 0, 2);  // into L2
        if (pass.last) prefetch_output(epilogue, m, (int)rows, n, ncount, 0);
        multiply_rows(rows)(row, pass.panel, pass.kc, tile, !pass.first, panel_ahead);
        if (pass.last) {
            if (ncount == NR)
                epilogue(m, (int)rows, n, NR, tile, (long)NR);
            else
                epilogue(m, (int)rows, n, ncount, tile, (long)NR);
        }
        panel_ahead += pass.kc / UNROLL * 16 * LINES;
        tile += pass.sums ? MR * NR : 0;
        row += rows;
        row_ahead += rows;
        m += rows;
    }
}

// Whether A is direct, that is, has a member row.
template <class A>
constexpr auto is_direct(const A* a) -> decltype(a->row(0L), true) { return true; }
constexpr bool is_direct(const void*) { return false; }

template <class A>
struct RemoveReference { typedef A type; };
template <class A>
struct RemoveReference<A&> { typedef A type; };

// Rows 0..M and columns [n0, n1) of C, on the calling thread. n0 is a multiple of NR, N the
// width of B, packedB the whole of it.
template <class A, class Epilogue>
void contract(long M, long N, long K, long n0, long n1, const float* packedB, Blocking blocking,
              A&& a, Epilogue&& epilogue, float* workspace) {
    constexpr bool direct = is_direct((typename RemoveReference<A>::type*)nullptr);
    (void)N;
    const bool in_place = direct && !blocking.copy_rows;
    const long ld = packed_row_stride(blocking.depth);
    const long panels = (n1 - n0 + NR - 1) / NR;
    const float* first_panel = packedB + n0 * K;
    const float* row[MAX_BLOCK_ROWS];
    const float* row_ahead[MAX_BLOCK_ROWS];

    for (long m0 = 0; m0 < M; m0 += blocking.rows) {
        const long mcount = shorter(blocking.rows, M - m0);
        for (long i = 0; i < mcount; ++i) row[i] = workspace + i * ld;
        long k0 = 0;
        do {  // also once for K == 0, to give zeros
            const long kc = shorter(blocking.depth, K - k0);
            const bool last = k0 + kc >= K;
            const long k_ahead = last ? 0 : k0 + kc;
            if constexpr (direct) {
                for (long i = 0; i < mcount; ++i) {
                    const float* source = a.row(m0 + i);
                    if (in_place)
                        row[i] = source + k0;
                    else
                        memcpy(workspace + i * ld, source + k0, kc * sizeof(float));
                    const long m = last ? m0 + blocking.rows + i : m0 + i;
                    row_ahead[i] = m < M ? a.row(m) + k_ahead : row[i];
                }
            } else {
                a.pack(m0, mcount, k0, kc, workspace, ld);
            }
            Pass pass = {row, row_ahead, 0, 0, nullptr, nullptr, nullptr,
                         m0, mcount, kc, k0 == 0, last};
            if (K > blocking.depth) pass.sums = workspace + packed_rows_size(M, blocking);
            for (long p = 0; p < panels; ++p) {
                const long n = n0 + p * NR;
                pass.panel = first_panel + (p * K + k0) * NR;
                pass.panel_ahead =
                    p + 1 < panels ? pass.panel + K * NR : first_panel + k_ahead * NR;
                // A single tile reads B in order: keep 8K ahead, across page boundaries.
                if (M <= MR) pass.panel_ahead = pass.panel + 2048;
                if (direct) pass.end_line = (kc + 15) / 16 * (p + 1) / panels;
                multiply_panel(pass, n, (int)shorter(NR, n1 - n), epilogue);
                pass.line = pass.end_line;
                if (pass.sums) pass.sums += (mcount + MR - 1) / MR * (MR * NR);
            }
            k0 += kc;
        } while (k0 < K);
    }
}

}  // namespace onchip
