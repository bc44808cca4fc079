// The engine's PTX functions for the host: a program's threads take turns on one of this machine's,
// each until it waits (the kernel of the host takes a hundred times as long to change threads), and
// shared memory is an array. What the hardware does at its leisure is done late where that can be
// seen: copies by threads land when they are waited for. Unaligned and outside accesses, too many
// arrivals and waits that never end stop the run with a message. standard.h comes in front of it,
// precompiled (cuda_threads.py).
#pragma once
#include <onchip/half.cuh>

#define DEVICE static inline
#define __global__
#ifdef ONCHIP_LAUNCH  // a plain kernel: an array that all threads of a program have
#define __shared__ static
#else  // only `extern` memory, which shared_address stands for
#define __shared__
#endif
#define __grid_constant__
#define __launch_bounds__(...)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
DEVICE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DEVICE float2 make_float2(float x, float y) { return {x, y}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DEVICE void mark(int, int) {}
using std::max;
using std::min;
struct Dim { int x; };
static Dim threadIdx, blockIdx;  // of the thread whose turn it is, as `rank` below
static Dim gridDim, blockDim;

// A tensor map: elements between neighbours, all innermost first.
struct TensorMap {
    char* base;
    int rank, size;
    long long extent[5], step[5];
    int box[5];
};

// ---- shared memory -----------------------------------------------------------------------------

// Of the programs of a cluster, which run together. An address may name one of them (its number + 1)
// above the bits of a place; without, it is this program's own.
constexpr u32 FIRST = 1024, BYTES = 227 << 10, PROGRAM = 18, MOST_CLUSTER = 16;
static_assert(FIRST + BYTES <= 1 << PROGRAM);
alignas(1024) static unsigned char shared_bytes[MOST_CLUSTER][FIRST + BYTES];
static u32 rank;
static int cluster_size = 1;
namespace packed { unsigned char memory[1]; }

// What each thread waits for.
struct Waiting {
    const char* what;
    u32 at, parity;
};
static Waiting all_waiting[MOST_CLUSTER][1024];
#define waiting all_waiting[rank]

[[noreturn]] static void stop(const char* what, u32 n) {
    std::printf("%s %u: program %d, thread %d\n", what, n, blockIdx.x, threadIdx.x);
    for (int t = 0; t < blockDim.x; t++) {
        const Waiting &w = waiting[t], &before = waiting[t ? t - 1 : 0];
        const char* now = w.what ? w.what : "runs";
        if (t % 32 && w.what == before.what && w.at == before.at && w.parity == before.parity) continue;
        std::printf("thread %d: %s %u, parity %u\n", t, now, w.at, w.parity);
    }
    std::fflush(stdout);
    std::_Exit(3);
}
static unsigned char* bytes_at(u32 address, u32 n, u32 aligned) {
    const u32 at = address & ((1 << PROGRAM) - 1), program = address >> PROGRAM ? (address >> PROGRAM) - 1 : rank;
    if (program >= cluster_size) stop("no such program in the cluster:", program);
    if (at < FIRST || at + n > FIRST + BYTES) stop("outside of shared memory at", at);
    if (at % aligned) stop("unaligned access at", at);
    return shared_bytes[program] + at;
}
template <class T> static T& shared(u32 at) { return *(T*)bytes_at(at, sizeof(T), sizeof(T)); }
static u32 permuted(u32 at) { return at ^ (at >> 7 & 7) << 4; }
static u32 shared_address(const void*) { return FIRST + 16; }

// ---- turns -------------------------------------------------------------------------------------

constexpr int STACK = 1 << 17;
struct Copy {
    u32 to, bytes;
    char value[16];
};
struct Thread {
    std::unique_ptr<char[]> stack{new char[STACK]};
    ucontext_t context;
    std::function<bool()> ready;  // whether what it waits for has happened; empty: it need not wait
    bool ended, met;              // met: its cluster
    std::vector<std::vector<Copy>> copies;
    std::vector<Copy> copies_now;
};
static std::vector<Thread> threads;
static ucontext_t between_turns;
static std::function<void()> body;

static Thread& mine() { return threads[rank * blockDim.x + threadIdx.x]; }
static void run_body() {
    body();
    mine().ended = true;
    swapcontext(&mine().context, &between_turns);
}
// The turns of others until `ready`.
template <class Ready> static void wait_until(const Waiting& why, Ready ready) {
    if (ready()) return;
    waiting[threadIdx.x] = why;
    mine().ready = ready;
    swapcontext(&mine().context, &between_turns);
}
static bool takes_turn(int n) {
    Thread& t = threads[n];
    rank = n / blockDim.x, threadIdx.x = n % blockDim.x;
    if (t.ended || (t.ready && !t.ready())) return false;
    t.ready = nullptr;
    waiting[threadIdx.x].what = nullptr;
    swapcontext(&between_turns, &t.context);
    return true;
}
// A cluster of programs, from number `first` on. Each round of turns begins with a thread drawn at
// random and goes up or down.
static void run_cluster(int first, const std::function<void()>& kernel) {
    const int count = cluster_size * blockDim.x;
    static std::minstd_rand draw;
    threads = std::vector<Thread>(count);
    body = kernel;
    for (Thread& t : threads) {
        t.ended = t.met = false;
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.get(), t.context.uc_stack.ss_size = STACK;
        makecontext(&t.context, run_body, 0);
    }
    for (bool some = true; some;) {
        const int from = draw() % count, step = draw() % 2 ? 1 : count - 1;
        some = false;
        for (int i = 0, n = from; i < count; i++, n = (n + step) % count) {
            blockIdx.x = first + n / blockDim.x;
            some |= takes_turn(n);
        }
    }
    for (int n = 0; n < count; n++)
        if (!threads[n].ended) {
            rank = n / blockDim.x, threadIdx.x = n % blockDim.x, blockIdx.x = first + rank;
            stop(waiting[threadIdx.x].what, waiting[threadIdx.x].at);
        }
}

// ---- threads meet ------------------------------------------------------------------------------

struct Meeting {
    int here = 0;
    u64 round = 0;
    void wait(int all, const char* what, u32 id) {
        const u64 before = round;
        if (++here == all) here = 0, round++;
        else wait_until({what, id, 0}, [this, before] { return round != before; });
    }
};
struct Meetings {
    Meeting named[16], warps[32], everyone;
};
static Meetings meetings[MOST_CLUSTER];
static u32 all_exchanged[MOST_CLUSTER][32][32];
#define exchanged all_exchanged[rank]
DEVICE void __syncwarp() {
    meetings[rank].warps[threadIdx.x / 32].wait(32, "a warp does not meet", threadIdx.x / 32);
}
DEVICE void __syncthreads() { meetings[rank].everyone.wait(blockDim.x, "a program does not meet", 0); }
DEVICE void group_barrier(int id, int threads) {
    meetings[rank].named[id].wait(threads, "a group does not meet", id);
}
DEVICE u32 cluster_rank() { return rank; }
// Once in a kernel; clusters run one after the other.
static long arrived;
DEVICE void cluster_arrive() { arrived++; }
DEVICE void cluster_wait() {
    const long all = (blockIdx.x / cluster_size + 1l) * cluster_size * blockDim.x;
    wait_until({"a cluster does not meet", 0, 0}, [all] { return arrived >= all; });
    mine().met = true;
}
template <class T> static T __shfl_sync(u32, T v, int from) {
    const int warp = threadIdx.x / 32;
    std::memcpy(&exchanged[warp][threadIdx.x % 32], &v, 4);
    __syncwarp();
    std::memcpy(&v, &exchanged[warp][from % 32], 4);
    __syncwarp();
    return v;
}
template <class T> static T __shfl_xor_sync(u32 all, T v, int apart) {
    return __shfl_sync(all, v, threadIdx.x % 32 ^ apart);
}
DEVICE double __longlong_as_double(long long v) {
    double d;
    std::memcpy(&d, &v, 8);
    return d;
}
DEVICE u32 __funnelshift_r(u32 low, u32 high, u32 n) {
    return (u32)(((u64)high << 32 | low) >> (n & 31));
}

struct Barrier {
    int arrivals = 0, wanted = 0;
    long bytes = 0;
    u64 round = 0;
    void step(int arrived, long more) {
        wanted -= arrived, bytes += more;
        if (wanted < 0) stop("too many arrivals", (u32)-wanted);
        if (wanted || bytes) return;
        wanted = arrivals, round++;
    }
};
static Barrier barriers[MOST_CLUSTER][(FIRST + BYTES) / 8];
static Barrier& barrier_at(u32 address) {
    const long at = bytes_at(address, 8, 8) - &shared_bytes[0][0];
    return barriers[at / (FIRST + BYTES)][at % (FIRST + BYTES) / 8];
}
DEVICE void barrier_init(u32 at, int arrivals) {
    Barrier& b = barrier_at(at);
    b.arrivals = b.wanted = arrivals, b.bytes = 0, b.round = 0;
}
DEVICE int own_warp() { return threadIdx.x >> 5; }
template <class Arrivals>
DEVICE void make_barriers(u32 first, int count, Arrivals arrivals) {
    if (threadIdx.x % 32) return;
    for (int i = own_warp(); i < count; i += blockDim.x / 32) barrier_init(first + 8 * i, arrivals(i));
}
DEVICE void barrier_arrive(u32 at) { barrier_at(at).step(1, 0); }
constexpr int WARP_ARRIVALS = 1;
DEVICE void warp_arrives(u32 at) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(at);
}
DEVICE void barrier_expect(u32 at, int bytes) { barrier_at(at).step(1, bytes); }
DEVICE void barrier_wait(u32 at, u32 parity) {
    Barrier& b = barrier_at(at);
    wait_until({"an endless wait at", at, parity}, [&b, parity] { return (b.round & 1) != parity; });
}
DEVICE void barriers_ready() {}
DEVICE void publish() {}
DEVICE void wait_for_launch_before() {}
DEVICE void start_next_launch() {}

// ---- copies ------------------------------------------------------------------------------------

template <class F> static void each_element(const TensorMap* m, u32 at, const int (&c)[5], F f) {
    long long n = 1;
    for (int i = 0; i < m->rank; i++) n *= m->box[i];
    for (long long k = 0; k < n; k++) {
        long long rest = k, offset = 0;
        bool inside = true;
        for (int i = 0; i < m->rank; i++) {
            const long long x = c[i] + rest % m->box[i];
            rest /= m->box[i];
            inside = inside && x >= 0 && x < m->extent[i];
            offset += x * m->step[i];
        }
        f(bytes_at(permuted((u32)(at + k * m->size)), m->size, m->size), inside ? m->base + offset : nullptr);
    }
}
DEVICE void prefetch(const TensorMap*) {}
template <int RANK>
DEVICE void load_box(u32 to, const TensorMap* m, u32 full, const int (&c)[5]) {
    long n = 0;
    each_element(m, to, c, [&](unsigned char* here, char* there) {
        if (there) std::memcpy(here, there, m->size);
        else std::memset(here, 0, m->size);
        n += m->size;
    });
    barrier_at(full).step(0, -n);
}
template <int RANK>
DEVICE void store_box(const TensorMap* m, u32 from, const int (&c)[5]) {
    each_element(m, from, c, [&](unsigned char* here, char* there) {
        if (there) std::memcpy(there, here, m->size);
    });
}
DEVICE void stores_commit() {}
template <int LEFT> DEVICE void stores_wait_read() {}

static const char *copied_from, *copied_to;  // the tensor that threads copy
template <int N>
DEVICE void copy_ahead(u32 to, const void* from, int there) {
    Copy c{to, N, {}};
    if ((u64)from % N) stop("an unaligned copy to", to);
    if (there && (from < copied_from || (const char*)from + there > copied_to))
        stop("a copy from outside to", to);
    std::memcpy(c.value, from, there);
    mine().copies_now.push_back(c);
}
DEVICE void copy_run(u32 to, const void* from, int bytes, u32 full) {
    if ((u64)from % 16 || bytes % 16) stop("an unaligned copy to", to);
    if (from < copied_from || (const char*)from + bytes > copied_to) stop("a copy from outside to", to);
    std::memcpy(bytes_at(to, bytes, 16), from, bytes);
    barrier_at(full).step(0, -bytes);
}
DEVICE void copies_commit() {
    mine().copies.push_back(std::move(mine().copies_now));
    mine().copies_now.clear();
}
template <int LEFT> DEVICE void copies_wait() {
    std::vector<std::vector<Copy>>& copies = mine().copies;
    while (copies.size() > LEFT) {
        for (const Copy& c : copies.front()) std::memcpy(bytes_at(c.to, c.bytes, c.bytes), c.value, c.bytes);
        copies.erase(copies.begin());
    }
}

// ---- products ----------------------------------------------------------------------------------

// These three are of a whole warp, which they bring together.
DEVICE void products_fence() { __syncwarp(); }
DEVICE void products_commit() { __syncwarp(); }
template <int LEFT> DEVICE void products_wait() { __syncwarp(); }
template <int ROW>
DEVICE u64 operand(u32 at, int apart) {
    static_assert(ROW == 128, "rows of 128 bytes");
    return (u64)(at >> 4) | (u64)(apart >> 4) << 32 | 1ull << 62;
}
DEVICE u64 plain_operand(u32 at, u32 apart) {
    if (at % 16 || apart % 16 || apart >> 18) stop("an operand at", at);
    return (u64)(at >> 4) | (u64)(apart >> 4) << 16 | (u64)(128 >> 4) << 32;
}
// One element of an operand, by its descriptor (PTX ISA, "Matrix Descriptor"; INNER: its MN-major
// layout with rows of 128 bytes, else K-major).
template <char KIND, bool INNER = false>
static float element(u64 descriptor, int row, int k) {
    constexpr int SIZE = KIND == 't' ? 4 : 2;
    const u32 base = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
    const u32 group = base + row / 8 * ((u32)(descriptor >> 32 & 0x3FFF) << 4), byte = k * SIZE;
    const u32 inner = base + k / 8 * ((u32)(descriptor >> 32 & 0x3FFF) << 4) + k % 8 * 128 + row * SIZE;
    const u32 at = INNER ? permuted(inner)
                   : descriptor >> 62 ? permuted(group + row % 8 * 128 + byte)
                                    : group + row % 8 * 16 + byte / 16 * leading + byte % 16;
    if constexpr (KIND == 't') return shared<float>(at);
    else return KIND == 'b' ? onchip::from_bf16(shared<u16>(at)) : onchip::from_fp16(shared<u16>(at));
}
// This thread's sums of its two of 64 rows by 2 * HALF columns, 32 bytes deep; `seen`: what the
// tensor cores see of a word. Each element is read once.
template <char KIND, int HALF, int DEEP, class Seen>
static void multiply_rows(float (&d)[HALF], const float (&rows)[2][DEEP], u64 b, u32 add, Seen seen) {
    for (int group = 0; group < HALF / 4; group++)
        for (int e = 0; e < 2; e++) {
            float column[DEEP];
            for (int k = 0; k < DEEP; k++)
                column[k] = seen(element<KIND>(b, 8 * group + 2 * (threadIdx.x % 4) + e, k));
            for (int r = 0; r < 2; r++) {
                float& to = d[4 * group + 2 * r + e];
                float sum = add ? to : 0.f;
                for (int k = 0; k < DEEP; k++) sum += rows[r][k] * column[k];
                to = sum;
            }
        }
}
template <char KIND, int HALF, bool INNER>
static void multiply_here(float (&d)[HALF], u64 a, u64 b, u32 add) {
    constexpr int DEEP = KIND == 't' ? 8 : 16;
    const int row = 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4;
    float rows[2][DEEP];
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < DEEP; k++) rows[r][k] = element<KIND, INNER>(a, row + 8 * r, k);
    multiply_rows<KIND>(d, rows, b, add, [](float x) { return x; });
}
// The same, 64 rows from registers (PTX ISA, wgmma, fragments of .m64k8 and .m64k16). Of words of
// TF32 the low 13 bits are nothing.
static float truncated(u32 word) { return __uint_as_float(word & 0xFFFFE000u); }
template <char KIND, int HALF>
static void multiply_held(float (&d)[HALF], const u32 (&a)[4], u64 b, u32 add) {
    const int lane = threadIdx.x % 32;
    constexpr int DEEP = KIND == 't' ? 8 : 16;
    float rows[2][DEEP];
    for (int q = 0; q < 4; q++)
        for (int i = 0; i < 4; i++) {
            const u32 word = __shfl_sync(~0u, a[i], lane / 4 * 4 + q);
            float* to = &rows[i % 2][DEEP / 2 * (i / 2) + DEEP / 8 * q];
            if constexpr (KIND == 't') *to = truncated(word);
            else for (int e = 0; e < 2; e++) to[e] = KIND == 'b' ? onchip::from_bf16(word >> 16 * e) : onchip::from_fp16(word >> 16 * e);
        }
    multiply_rows<KIND>(d, rows, b, add, [](float x) {
        return KIND == 't' ? truncated(__float_as_uint(x)) : x;
    });
}
DEVICE void here(float&) {}
DEVICE void here(u32&) {}
template <int COUNT> DEVICE void more_registers() {}
template <int COUNT> DEVICE void fewer_registers() {}

// ---- tiles in shared memory --------------------------------------------------------------------

static void put_matrices(u32 at, int n, const u32* words) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    exchanged[warp][lane] = at;
    __syncwarp();
    for (int q = 0; q < n; q++)
        for (int e = 0; e < 2; e++)
            shared<u16>(exchanged[warp][8 * q + 2 * (lane % 4) + e] + lane / 4 * 2) = words[q] >> 16 * e;
    __syncwarp();
}
DEVICE void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
    const u32 words[] = {a, b, c, d};
    put_matrices(at, 4, words);
}
DEVICE void store_matrices(u32 at, u32 a, u32 b) {
    const u32 words[] = {a, b};
    put_matrices(at, 2, words);
}
static u32 taken_matrix(u32 at, int q) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    exchanged[warp][lane] = at;
    __syncwarp();
    u32 word = 0;
    for (int e = 0; e < 2; e++)
        word |= shared<u16>(exchanged[warp][8 * q + 2 * (lane % 4) + e] + lane / 4 * 2) << 16 * e;
    __syncwarp();
    return word;
}
DEVICE void load_matrices(u32 at, u32& a, u32& b, u32& c, u32& d) {
    a = taken_matrix(at, 0), b = taken_matrix(at, 1), c = taken_matrix(at, 2), d = taken_matrix(at, 3);
}
DEVICE void load_matrices(u32 at, u32& a, u32& b) { a = taken_matrix(at, 0), b = taken_matrix(at, 1); }
DEVICE void store_word(u32 at, u32 v) { shared<u32>(at) = v; }
DEVICE void store_words(u32 at, u32 a, u32 b) {
    store_word(at, a);
    store_word(at + 4, b);
}
DEVICE u32 load_word(u32 at) { return shared<u32>(at); }
DEVICE void store_half(u32 at, u32 v) { shared<u16>(at) = v; }
DEVICE void store_part(u32 at, uint4 v) { std::memcpy(bytes_at(at, 16, 16), &v, 16); }
DEVICE uint4 load_part(u32 at) {
    uint4 v;
    std::memcpy(&v, bytes_at(at, 16, 16), 16);
    return v;
}
DEVICE float4 load_four(u32 at) {
    float4 v;
    std::memcpy(&v, bytes_at(at, 16, 16), 16);
    return v;
}
DEVICE void load_words(u32 at, u32& a, u32& b) {
    bytes_at(at, 8, 8);
    a = load_word(at), b = load_word(at + 4);
}

// ---- other programs of the cluster ---------------------------------------------------------------

DEVICE u32 address_in(u32 at, u32 program) { return at | (program + 1) << PROGRAM; }
// What is sent to a program lands when it waits for it.
struct Sent {
    u32 there, full;
    float4 value;
};
static std::vector<Sent> sent[MOST_CLUSTER];
DEVICE void send_four(u32 there, u32 full, float a, float b, float c, float d) {
    if (!mine().met) stop("sent to a program that may not have started, at", there);
    if (there >> PROGRAM != full >> PROGRAM) stop("a barrier of another program than its bytes' at", full);
    sent[(there >> PROGRAM) - 1].push_back({there, full, {a, b, c, d}});
}
DEVICE void barrier_acquire(u32 at, u32 parity) {
    Barrier& b = barrier_at(at);
    wait_until({"an endless wait for what is sent at", at, parity}, [&b, parity] {
        for (const Sent& s : sent[rank]) {
            std::memcpy(bytes_at(s.there, 16, 16), &s.value, 16);
            barrier_at(s.full).step(0, -16);
        }
        sent[rank].clear();
        return (b.round & 1) != parity;
    });
}

// ---- element types -----------------------------------------------------------------------------

DEVICE u32 pack_bf16(float low, float high) { return onchip::to_bf16(low) | (u32)onchip::to_bf16(high) << 16; }
DEVICE u32 pack_fp16(float low, float high) { return onchip::to_fp16(low) | (u32)onchip::to_fp16(high) << 16; }
DEVICE u32 rounded_tf32(u32 x) { return (x & 0x7F800000) == 0x7F800000 ? x : (x + 0x1000) & ~0x1FFFu; }

// ---- what the packed form does not use ---------------------------------------------------------

static u32 unused() { stop("no host version of this function", 0); }
DEVICE void cluster_barrier() { unused(); }
DEVICE void barrier_arrive_at(u32, u32) { unused(); }
template <int RANK>
DEVICE void spread_box(u32, const TensorMap*, u32, const int (&)[5], u16) { unused(); }
