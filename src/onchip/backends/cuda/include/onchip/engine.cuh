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
#include <onchip/epilogue.cuh>
#include <onchip/fetch.cuh>
#include <onchip/products.cuh>

namespace engine {

// Sums of a tile that programs share go from one to another in bundles, 16 bytes of each lane of a warp.
// Programs take turns at adding them up.
constexpr int FOURS = cfg::BLOCKS * cfg::STRIPS * SUMS / 4;  // bundles of a warp
constexpr int BUNDLES = 4 * cfg::SPLIT * FOURS, BUNDLE_BYTES = 16 * 32;
constexpr int SHARE = (BUNDLES + cfg::K_SPLIT - 1) / cfg::K_SPLIT;  // of a program, at most
constexpr int TOTALS = cfg::K_SPLIT * SHARE * BUNDLE_BYTES;         // from the parts to what they add up to
DEVICE int share_of(int part) { return (BUNDLES - part + cfg::K_SPLIT - 1) / cfg::K_SPLIT; }

// What the barriers of the two exchanges wait for: bytes.
DEVICE void expect_sums(const Shared& s, int part) {
    barrier_init(s.added, 1);
    barrier_init(s.added + 8, 1);
    barrier_expect(s.added, cfg::K_SPLIT * share_of(part) * BUNDLE_BYTES);
    if (part == 0) barrier_expect(s.added + 8, BUNDLES * BUNDLE_BYTES);
}

// What all programs that share a tile have, added up in their order for the first one: true there. Each
// sends every other one its share (all into one would be as many times the bytes at one program's door),
// adds up its own share, and sends that to the first. It may leave then: nobody writes to it any more.
// Programs meet here, not before, so that each one's first loads wait for no other's start.
DEVICE bool added_up(Sums& d, const Shared& s, int part, int member, int thread) {
    constexpr int WARPS = 4 * cfg::SPLIT;
    const int warp = 4 * member + (thread >> 5);
    const u32 sums = s.sums + (thread & 31) * 16, totals = sums + TOTALS;
    float* flat = &d[0][0][0];
    __syncwarp();
    cluster_wait();
    UNROLL for (int i = 0; i < FOURS; i++) {
        const int bundle = i * WARPS + warp, owner = bundle % cfg::K_SPLIT;
        const u32 to = address_in(sums + (part * SHARE + bundle / cfg::K_SPLIT) * BUNDLE_BYTES, owner);
        send_four(to, address_in(s.added, owner), flat[4 * i], flat[4 * i + 1], flat[4 * i + 2], flat[4 * i + 3]);
    }
    barrier_acquire(s.added, 0);
    for (int n = warp; n < share_of(part); n += WARPS) {
        float4 v[cfg::K_SPLIT];
        UNROLL for (int p = 0; p < cfg::K_SPLIT; p++) v[p] = load_four(sums + (p * SHARE + n) * BUNDLE_BYTES);
        UNROLL for (int p = 1; p < cfg::K_SPLIT; p++)
            v[0].x += v[p].x, v[0].y += v[p].y, v[0].z += v[p].z, v[0].w += v[p].w;
        const u32 to = address_in(totals + (n * cfg::K_SPLIT + part) * BUNDLE_BYTES, 0);
        send_four(to, address_in(s.added + 8, 0), v[0].x, v[0].y, v[0].z, v[0].w);
    }
    if (part > 0) return false;
    barrier_acquire(s.added + 8, 0);
    UNROLL for (int i = 0; i < FOURS; i++) {
        const float4 v = load_four(totals + (i * WARPS + warp) * BUNDLE_BYTES);
        flat[4 * i] = v.x, flat[4 * i + 1] = v.y, flat[4 * i + 2] = v.z, flat[4 * i + 3] = v.w;
    }
    return true;
}

DEVICE void consume(const Shared& s, const Args& a, const TensorMap* const* results) {
    // where operands are split, registers are short, and products are longer
    const int warp = cfg::SPLITS ? threadIdx.x >> 5 : own_warp(), group = warp >> 2;
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
            consumer.pass(tile_of(n));
            continue;
        }
        mark(0, turn);
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
        mark(1, turn);
        Sums d;
        if constexpr (cfg::SPLITS) consumer.sum_split(d, t, order);
        else consumer.sum(d, t, turn);
        mark(2, turn);
        if constexpr (cfg::K_SPLIT > 1)
            if (!added_up(d, s, t.part, consumer.member, e.thread)) break;
        mark(3, turn);
        if constexpr (cfg::READS > 0) barrier_wait(s.in_full + 8 * in.slot, in.parity);
        mark(4, turn);
        before_windows(e, d, c, results);
        store_results(e, d, c, results);
        if constexpr (cfg::READS > 0) {
            const u32 empty = s.in_empty + 8 * in.slot;
            if constexpr (!cfg::IN_PLACE) {
                __syncwarp();  // all lanes have read
                if (e.lane == 0) barrier_arrive(empty);
            } else if (e.thread == 0) {  // the tile before has left its slot
                stores_wait_read<1>();
                if (in_before) barrier_arrive(in_before);
            }
            in_before = empty;
            in.skip(cfg::TEAMS);
        }
        mark(5, turn);
    }
    if ((threadIdx.x & 127) == 0) stores_wait_read<0>();  // shared memory goes with the program
}

DEVICE void run(const Args& a, const TensorMap* x, const TensorMap* w, const TensorMap* const* results,
                const TensorMap* const* reads) {
    extern __shared__ unsigned char memory[];
    const Shared s = Shared::at(shared_address(memory));
    const int warp = own_warp();
    mark(6, 0);
    constexpr int W = W_TILES, X = cfg::X_STAGES, R = cfg::R_STAGES, ALL = 4 * cfg::SPLIT;
    make_barriers(s.w_full, 2 * (W + X + R) + cfg::TEAMS, [](int i) {
        if (i < 2 * W) return i < W ? 1 : ALL * cfg::W_SHARED;
        if (i < 2 * (W + X)) return i < 2 * W + X ? 1 : ALL * cfg::X_SHARED;
        if (i < 2 * (W + X) + R) return 1;
        return i < 2 * (W + X + R) && cfg::IN_PLACE ? cfg::SPLIT : ALL;
    });
    if (threadIdx.x == 0) {
        if constexpr (cfg::K_SPLIT > 1) expect_sums(s, cluster_rank());
        if constexpr (cfg::SPLITS) {
            for (int i = 0; i < X; i++) barrier_init(s.split + 8 * i, 2 * WARP_ARRIVALS);
            for (int i = 0; i < WARPGROUPS; i++) barrier_init(s.order + 8 * i, 4);
        }
        if constexpr (cfg::K_SPLIT > 1 || cfg::SPLITS) barriers_ready();
        prefetch(x), prefetch(w);
    }
    if constexpr (cfg::K_SPLIT > 1) {
        __syncthreads();
        cluster_arrive();  // added_up waits
    } else if constexpr (cfg::CLUSTER > 1) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
    if (!EARLY || warp != 4 * WARPGROUPS) wait_for_launch_before();
    if constexpr (cfg::AT_ONCE)
        if (threadIdx.x == 0) fetch_all_input(s, x);
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
    if constexpr (cfg::K_SPLIT > 1)
        if (warp >= 4 * WARPGROUPS) {
            __syncwarp();
            cluster_wait();  // as the others did
        }
    start_next_launch();
    mark(7, 0);
    if constexpr (cfg::X_SHARED * cfg::W_SHARED > 1) {
        __syncwarp();
        cluster_barrier();  // nobody leaves while others write to its shared memory
    }
}

}  // namespace engine
