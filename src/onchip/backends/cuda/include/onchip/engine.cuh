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

// Each program of the cluster may read what this warp has written. Lanes do it side by side: a release
// waits for memory.
DEVICE void release_sums(u32 barrier) {
    __syncwarp();
    const u32 lane = threadIdx.x & 31;
    if (lane < cfg::K_SPLIT) barrier_release_at(barrier, lane);
}

// What all programs that share a tile have, added up in their order for the first one: true there.
// The sums take the place of the operands, which nobody needs any more: a program adds up its part
// of all programs' sums, the first one collects the parts.
DEVICE bool added_up(Sums& d, const Shared& s, int part, int member, int thread) {
    constexpr int ALL = cfg::BLOCKS * cfg::STRIPS * SUMS / 4;  // of 16 bytes a thread
    const u32 mine = s.w + (member * ALL * 128 + thread) * 16;
    float* flat = &d[0][0][0];
    group_barrier(15, 128 * cfg::SPLIT);  // all of this program have multiplied
    UNROLL for (int i = 0; i < ALL; i++)
        store_four(mine + i * 128 * 16, flat[4 * i], flat[4 * i + 1], flat[4 * i + 2], flat[4 * i + 3]);
    release_sums(s.added);
    barrier_acquire(s.added, 0);
    for (int i = part * ALL / cfg::K_SPLIT; i < (part + 1) * ALL / cfg::K_SPLIT; i++) {
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        UNROLL for (int p = 0; p < cfg::K_SPLIT; p++) {
            const float4 o = load_four_of(mine + i * 128 * 16, p);
            v.x += o.x, v.y += o.y, v.z += o.z, v.w += o.w;
        }
        store_four(mine + i * 128 * 16, v.x, v.y, v.z, v.w);
    }
    release_sums(s.added);
    barrier_acquire(s.added, 1);
    if (part == 0) {
        UNROLL for (int i = 0; i < ALL; i++) {
            const int owner = ((i + 1) * cfg::K_SPLIT - 1) / ALL;
            const float4 v = load_four_of(mine + i * 128 * 16, owner);
            flat[4 * i] = v.x, flat[4 * i + 1] = v.y, flat[4 * i + 2] = v.z, flat[4 * i + 3] = v.w;
        }
    }
    release_sums(s.added);
    return part == 0;
}

DEVICE void consume(const Shared& s, const Args& a, const TensorMap* const* results) {
    const int warp = threadIdx.x >> 5, group = warp >> 2;
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
        else consumer.sum(d, t);
        mark(2, turn);
        if constexpr (cfg::K_SPLIT > 1)
            if (!added_up(d, s, t.part, consumer.member, e.thread)) break;
        mark(3, turn);
        if constexpr (cfg::READS > 0) barrier_wait(s.in_full + 8 * in.slot, in.parity);
        mark(4, turn);
        // what `before` makes of the sums is what windows fold: results of positions come first
        if constexpr (cfg::FOLD != 0) all_results<0, false>(e, d, c, results);
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
                        v = before(a, v, c[m][h], p);
                    }
        all_results<0, cfg::FOLD != 0>(e, d, c, results);
        if constexpr (cfg::STAGED) {
            e.tile_is_free();
            e.stage(d);
            group_barrier(1 + group, 128);
            all_folds<0>(e);
        }
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
        if constexpr (cfg::STAGED) group_barrier(1 + group, 128);  // all have read
        mark(5, turn);
    }
    if ((threadIdx.x & 127) == 0) stores_wait_read<0>();  // shared memory goes with the program
    if constexpr (cfg::K_SPLIT > 1) barrier_acquire(s.added, 0);  // nobody reads this program's memory
}

DEVICE void run(const Args& a, const TensorMap* x, const TensorMap* w, const TensorMap* const* results,
                const TensorMap* const* reads) {
    extern __shared__ unsigned char memory[];
    const Shared s = Shared::at(shared_address(memory));
    const int warp = threadIdx.x >> 5;
    mark(6, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < W_TILES; i++) {
            barrier_init(s.w_full + 8 * i, 1);
            barrier_init(s.w_empty + 8 * i, 4 * cfg::SPLIT * cfg::W_SHARED);
        }
        for (int i = 0; i < cfg::X_STAGES; i++) {
            barrier_init(s.x_full + 8 * i, 1);
            barrier_init(s.x_empty + 8 * i, 4 * cfg::SPLIT * cfg::X_SHARED);
        }
        for (int i = 0; i < cfg::R_STAGES; i++) {
            barrier_init(s.in_full + 8 * i, 1);
            barrier_init(s.in_empty + 8 * i, cfg::IN_PLACE ? cfg::SPLIT : 4 * cfg::SPLIT);
        }
        for (int i = 0; i < cfg::TEAMS; i++) barrier_init(s.turn + 8 * i, 4 * cfg::SPLIT);
        barrier_init(s.added, 4 * cfg::SPLIT * cfg::K_SPLIT);
        if constexpr (cfg::SPLITS) {
            for (int i = 0; i < cfg::X_STAGES; i++) barrier_init(s.split + 8 * i, 2);
            for (int i = 0; i < WARPGROUPS; i++) barrier_init(s.order + 8 * i, 4);
        }
        barriers_ready();
        prefetch(x);
        prefetch(w);
    }
    if constexpr (cfg::CLUSTER > 1) cluster_barrier();
    else __syncthreads();
    wait_for_launch_before();
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
    start_next_launch();
    mark(7, 0);
    if constexpr (cfg::X_SHARED * cfg::W_SHARED > 1) {
        __syncwarp();
        cluster_barrier();  // nobody leaves while others write to its shared memory
    }
}

}  // namespace engine
