// What sm_90a adds, one function an instruction: barriers in shared memory that count bytes, the
// copy engine, and products of a warpgroup. (PTX ISA, sections mbarrier, cp.async.bulk.tensor, wgmma.)
#pragma once

#define DEVICE static __device__ __forceinline__

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

// A CUtensorMap: opaque, made by the driver.
struct alignas(64) TensorMap { unsigned char bytes[128]; };

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- barriers ----------------------------------------------------------------------------------

// This thread's warp, as ptxas must see it: what follows from it alone lies in uniform registers, where
// products want their operands.
DEVICE int own_warp() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }
DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrive at the same barrier of another program of the cluster. It orders nothing but what the copy
// engine does: a release at the cluster's scope waits for this thread's memory, a slot's turn needs
// none of it.
DEVICE void barrier_arrive_at(u32 barrier, u32 program) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(program)
        : "memory");
}
DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// A warp, all of whose lanes have come here: what they waited for must not go on without one. One lane
// says it for all; under a tool each says it for itself, since racecheck follows no other order.
#ifdef PATIENT
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif
DEVICE void warp_arrives(u32 barrier) {
    __syncwarp();
    if (WARP_ARRIVALS == 32 || (threadIdx.x & 31) == 0) barrier_arrive(barrier);
}
// When warps of a program come to a place in their text, and in which turn of its loop. For
// bench/gpu/timeline.py, which says where that is kept, how many turns and places, of which program.
#ifdef TIMELINE
DEVICE void mark(int place, int turn) {
    if (blockIdx.x == TIMELINE_PROGRAM && (threadIdx.x & 31) == 0 && turn < TIMELINE_TURNS)
        ((i64*)TIMELINE)[((threadIdx.x >> 5) * TIMELINE_TURNS + turn) * TIMELINE_PLACES + place] = clock64();
}
#else
DEVICE void mark(int, int) {}
#endif

// A wait that would never end ends the kernel with an error instead, after 2^31 clocks, about a second:
// few instructions, since a kernel has dozens of waits. PATIENT: for tools that slow a kernel down.
DEVICE u32 clocks() {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
    return now;
}
#ifdef PATIENT
DEVICE void still_waiting(u32) {}
#else
DEVICE void still_waiting(u32 since) {
    if ((int)(clocks() - since) < 0) __trap();
}
#endif
#define WAIT(SCOPE)                                                                            \
    u32 done;                                                                                  \
    const u32 since = clocks();                                                                \
    while (true) {                                                                             \
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity" SCOPE                        \
                     ".shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"                  \
                     : "=r"(done)                                                              \
                     : "r"(barrier), "r"(parity)                                               \
                     : "memory");                                                              \
        if (done) break;                                                                       \
        still_waiting(since);                                                                  \
    }
DEVICE void barrier_wait(u32 barrier, u32 parity) { WAIT("") }
// Until what programs of the cluster have sent is there.
DEVICE void barrier_acquire(u32 barrier, u32 parity) { WAIT(".acquire.cluster") }
#undef WAIT
DEVICE void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Barriers that lie side by side, by all warps: what makes one is an instruction of a warp. Everybody
// must meet before they are used.
template <class Arrivals>
DEVICE void make_barriers(u32 first, int count, Arrivals arrivals) {
    const int warp = own_warp();
    if (threadIdx.x & 31) return;
#pragma unroll 1
    for (int i = warp; i < count; i += blockDim.x >> 5) barrier_init(first + 8 * i, arrivals(i));
    barriers_ready();
}
// What this thread has written to shared memory is there for the copy engine and the matrix unit.
DEVICE void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void group_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- launches ----------------------------------------------------------------------------------

DEVICE void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void start_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// In two halves. Who waits finds the barriers of all programs (barriers_ready); anything else that they
// wrote would cost a fence for the GPU.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// ---- the copy engine ---------------------------------------------------------------------------

DEVICE void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
#define LOAD "cp.async.bulk.tensor."
#define LOAD_END ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"
// A box at coordinates c of a map of RANK dimensions, to shared memory; `full` counts its bytes.
template <int RANK>
DEVICE void load_box(u32 to, const TensorMap* map, u32 full, const int (&c)[5]) {
    if constexpr (RANK == 1)
        asm volatile(LOAD "1d" LOAD_END " [%0], [%1, {%3}], [%2];" ::"r"(to), "l"(map), "r"(full),
                     "r"(c[0])
                     : "memory");
    if constexpr (RANK == 2)
        asm volatile(LOAD "2d" LOAD_END " [%0], [%1, {%3,%4}], [%2];" ::"r"(to), "l"(map), "r"(full),
                     "r"(c[0]), "r"(c[1])
                     : "memory");
    if constexpr (RANK == 3)
        asm volatile(LOAD "3d" LOAD_END " [%0], [%1, {%3,%4,%5}], [%2];" ::"r"(to), "l"(map),
                     "r"(full), "r"(c[0]), "r"(c[1]), "r"(c[2])
                     : "memory");
    if constexpr (RANK == 4)
        asm volatile(LOAD "4d" LOAD_END " [%0], [%1, {%3,%4,%5,%6}], [%2];" ::"r"(to), "l"(map),
                     "r"(full), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3])
                     : "memory");
    if constexpr (RANK == 5)
        asm volatile(LOAD "5d" LOAD_END " [%0], [%1, {%3,%4,%5,%6,%7}], [%2];" ::"r"(to), "l"(map),
                     "r"(full), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4])
                     : "memory");
}
// The same box into the shared memory of every program in `programs` (bits), at the same place;
// each one's own barrier counts.
#define SPREAD LOAD_END ".multicast::cluster"
template <int RANK>
DEVICE void spread_box(u32 to, const TensorMap* map, u32 full, const int (&c)[5], u16 programs) {
    if constexpr (RANK == 2)
        asm volatile(LOAD "2d" SPREAD " [%0], [%1, {%3,%4}], [%2], %5;" ::"r"(to), "l"(map),
                     "r"(full), "r"(c[0]), "r"(c[1]), "h"(programs)
                     : "memory");
    if constexpr (RANK == 3)
        asm volatile(LOAD "3d" SPREAD " [%0], [%1, {%3,%4,%5}], [%2], %6;" ::"r"(to), "l"(map),
                     "r"(full), "r"(c[0]), "r"(c[1]), "r"(c[2]), "h"(programs)
                     : "memory");
    if constexpr (RANK == 4)
        asm volatile(LOAD "4d" SPREAD " [%0], [%1, {%3,%4,%5,%6}], [%2], %7;" ::"r"(to), "l"(map),
                     "r"(full), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "h"(programs)
                     : "memory");
    if constexpr (RANK == 5)
        asm volatile(LOAD "5d" SPREAD " [%0], [%1, {%3,%4,%5,%6,%7}], [%2], %8;" ::"r"(to), "l"(map),
                     "r"(full), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]), "h"(programs)
                     : "memory");
}
#undef SPREAD
#undef LOAD
#undef LOAD_END
#define STORE "cp.async.bulk.tensor."
#define STORE_END ".global.shared::cta.bulk_group"
// A box from shared memory; what lies outside of the map's tensor is left out.
template <int RANK>
DEVICE void store_box(const TensorMap* map, u32 from, const int (&c)[5]) {
    if constexpr (RANK == 1)
        asm volatile(STORE "1d" STORE_END " [%0, {%2}], [%1];" ::"l"(map), "r"(from), "r"(c[0])
                     : "memory");
    if constexpr (RANK == 2)
        asm volatile(STORE "2d" STORE_END " [%0, {%2,%3}], [%1];" ::"l"(map), "r"(from), "r"(c[0]),
                     "r"(c[1])
                     : "memory");
    if constexpr (RANK == 3)
        asm volatile(STORE "3d" STORE_END " [%0, {%2,%3,%4}], [%1];" ::"l"(map), "r"(from),
                     "r"(c[0]), "r"(c[1]), "r"(c[2])
                     : "memory");
    if constexpr (RANK == 4)
        asm volatile(STORE "4d" STORE_END " [%0, {%2,%3,%4,%5}], [%1];" ::"l"(map), "r"(from),
                     "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3])
                     : "memory");
    if constexpr (RANK == 5)
        asm volatile(STORE "5d" STORE_END " [%0, {%2,%3,%4,%5,%6}], [%1];" ::"l"(map), "r"(from),
                     "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4])
                     : "memory");
}
#undef STORE
#undef STORE_END
DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but so many of the stores of this thread have read shared memory.
template <int LEFT>
DEVICE void stores_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// ---- products of a warpgroup -------------------------------------------------------------------

DEVICE void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// A value is made, or used, no later or earlier than here.
DEVICE void here(float& v) { asm volatile("" : "+f"(v)::"memory"); }
DEVICE void here(u32& v) { asm volatile("" : "+r"(v)::"memory"); }
// Registers of each thread of a warpgroup from here on, all of whose warps say so: more waits until
// others have given some back.
template <int COUNT>
DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// An operand in shared memory, rows of ROW bytes (128, 64 or 32) whose 16-byte parts are permuted;
// between groups of 8 rows lie `apart` bytes. Adding bytes / 16 moves it: the hardware permutes by
// the address, so that any row may be the first one.
template <int ROW>
DEVICE u64 operand(u32 address, int apart) {
    constexpr u64 mode = ROW == 128 ? 1 : ROW == 64 ? 2 : 3;
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((u64)(apart >> 4) << 32) | (mode << 62);
}

// An operand without permutation: rows of 16 bytes, one after the other, hold half of what an
// instruction multiplies; the other half lies `apart` bytes on.
DEVICE u64 plain_operand(u32 address, u32 apart) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(apart >> 4) << 16) | ((u64)(128 >> 4) << 32);
}

// ---- tiles in shared memory --------------------------------------------------------------------

// 8x8 matrices of 16-bit elements, four or two at a time, transposed on their way: a thread holds two
// neighbours of a column.
DEVICE void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
DEVICE void store_matrices(u32 at, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(a),
                 "r"(b)
                 : "memory");
}
DEVICE void load_matrices(u32 at, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(at)
                 : "memory");
}
DEVICE void load_matrices(u32 at, u32& a, u32& b) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(a), "=r"(b)
                 : "r"(at)
                 : "memory");
}
DEVICE void store_word(u32 at, u32 v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
DEVICE u32 load_word(u32 at) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
DEVICE float4 load_four(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
// Where a place of this program's shared memory lies in another program's of the cluster.
DEVICE u32 address_in(u32 at, u32 program) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(program));
    return there;
}
// 16 bytes into another program's memory; a barrier there counts them.
DEVICE void send_four(u32 there, u32 full, float a, float b, float c, float d) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2,%3,%4,%5}, [%1];" ::"r"(there),
        "r"(full), "f"(a), "f"(b), "f"(c), "f"(d)
        : "memory");
}
DEVICE uint4 load_part(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

// ---- copies by threads -------------------------------------------------------------------------

// BYTES (16, 8 or 4) from memory to shared memory, on their way until waited for; the first `there`
// of them, then zeros.
template <int BYTES>
DEVICE void copy_ahead(u32 to, const void* from, int there) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(there),
                     "n"(BYTES)
                     : "memory");
}
// A run of memory, a multiple of 16 bytes, by the copy engine; `full` counts its bytes.
DEVICE void copy_run(u32 to, const void* from, int bytes, u32 full) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(full)
        : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
DEVICE void store_half(u32 at, u32 v) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"((u16)v) : "memory");
}
DEVICE void store_part(u32 at, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE void store_words(u32 at, u32 a, u32 b) {
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
DEVICE void load_words(u32 at, u32& a, u32& b) {
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(at) : "memory");
}

// ---- element types -----------------------------------------------------------------------------

// Two halves in a word, the first one low.
DEVICE u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE u32 pack_fp16(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// The nearest float32 that the matrix unit reads whole as TF32; it cuts others off.
DEVICE u32 rounded_tf32(u32 x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(x)));
    return r;
}
