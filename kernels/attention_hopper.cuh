/*
The forward pass of attention (see attention.cuh) for Hopper, with wgmma and the TMA (the copy engine).

One block per multiprocessor draws tiles of 128 queries one after another, in the order of attention_order.h.
One thread of each block draws the tiles and loads the queries, then keys and values, from the last tile of
keys that the queries see to the first, up to two tiles ahead. Two warpgroups own 64 queries each. Scores and
probabilities never leave their registers:

    scores = q k'           for one tile of keys         both products are started together; while they
    sum   += p v            for the tile before          run, the other warpgroup computes its softmax

Two named barriers make the warpgroups take turns in starting products, so that one multiplies while the other
computes exponentials, which take about as long.
*/
#pragma once

#include <algorithm>
#include <map>

#include "kernels/attention_hopper_tiles.cuh"
#include "kernels/attention_order.h"
#include "kernels/streams.cuh"

// ----------------------------------------------------------------------------
// CUDA kernels

constexpr int hopper_queries = computing_groups * warpgroup_rows, hopper_keys = 128;

template <int HSP>
struct alignas(1024) HopperForwardShared {
    static constexpr int buffers = 2;
    using Tile = SwizzledTile<128, HSP>;  // holds queries, keys or values
    char q[Tile::bytes], k[buffers][Tile::bytes], v[buffers][Tile::bytes];
    Handover q_there, k_there[buffers], v_there[buffers];
    int ticket;  // the tile whose queries are in q, or a number past the last tile
};

// The tickets of a launch.
struct Tickets {
    int count, section;
    unsigned* drawn;  // 0 before and after a launch

    // Returns `count` or more if no tile is left. Each block makes one such draw, and the last of these
    // resets the counter to 0.
    __device__ int draw() const { return (int)atomicInc(drawn, count + gridDim.x - 1); }
};

using HopperQueries = QueryTileWork<hopper_queries, hopper_keys>;

template <int HSP>
__device__ void hopper_forward_load(HopperForwardShared<HSP>& shared, const CUtensorMap& query_map,
                                    const CUtensorMap& key_map, const AttentionShape& s,
                                    const Tickets& tickets) {
    using Tile = typename HopperForwardShared<HSP>::Tile;
    Ring<1> q;
    Ring<HopperForwardShared<HSP>::buffers> ring;
    while (true) {
        int ticket = tickets.draw();
        shared.q_there.wait_empty(q.phase);
        shared.ticket = ticket;
        if (ticket >= tickets.count) break;
        auto work = HopperQueries::of(s, tickets.section, ticket);
        int key_head = work.h / s.group(), value_head = s.NKV + key_head;
        mbarrier_arrive_expect(&shared.q_there.full, Tile::bytes);
        Tile::load(shared.q, query_map, work.h, work.start, work.b, &shared.q_there.full);
        q.next();
        for (int keys = work.last_keys; keys >= work.first_keys; keys--) {
            Mbarrier* k_full = shared.k_there[ring.at].fill(ring.phase, Tile::bytes);
            Tile::load(shared.k[ring.at], key_map, key_head, keys * hopper_keys, work.b, k_full);
            Mbarrier* v_full = shared.v_there[ring.at].fill(ring.phase, Tile::bytes);
            Tile::load(shared.v[ring.at], key_map, value_head, keys * hopper_keys, work.b, v_full);
            ring.next();
        }
    }
    mbarrier_arrive(&shared.q_there.full);
}

// The softmax of this thread's two rows, over all keys so far.
struct OnlineSoftmax {
    float scale;  // turns scores into base-2 exponents
    float largest[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f}, shrink[2] = {};

    // Replaces scores by probabilities relative to the largest score so far. Sets `shrink` to the factor by
    // which earlier probabilities, and sums of them, must be multiplied.
    template <int count>
    __device__ void add(float (&scores)[count]) {
        float offset[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float before = largest[i];
#pragma unroll
            for (int n = 0; n < count; n++)
                if (n / 2 % 2 == i) largest[i] = fmaxf(largest[i], scores[n]);
            largest[i] = quad_max(largest[i]);
            shrink[i] = exp2_approx((before - largest[i]) * scale);
            total[i] *= shrink[i];
            offset[i] = largest[i] * scale;
        }
#pragma unroll
        for (int n = 0; n < count; n++) {
            scores[n] = exp2_approx(fmaf(scores[n], scale, -offset[n / 2 % 2]));
            total[n / 2 % 2] += scores[n];
        }
    }
};

template <int HSP>
__device__ void hopper_forward_compute(HopperForwardShared<HSP>& shared, floatX* out, float* lse, float* amax,
                                       const AttentionShape& s, int group, const Tickets& tickets) {
    using Tile = typename HopperForwardShared<HSP>::Tile;
    auto take_turn = [&] { named_barrier_sync(1 + group, computing_threads); };
    auto pass_turn = [&] { named_barrier_arrive(2 - group, computing_threads); };
    if (group == 1) pass_turn();  // group 0 begins

    // Initialized here because compilers before CUDA 12.9 would otherwise initialize them between two
    // products, and wait for each product.
    float scores[hopper_keys / 2] = {}, sum[HSP / 2] = {};
    uint32_t p[hopper_keys / 16][4];
    Ring<1> q;
    Ring<HopperForwardShared<HSP>::buffers> k, v;
    auto start_scores = [&] {
        uint64_t left = Tile::rows_from(shared.q, group * warpgroup_rows),
                 right = Tile::rows_from(shared.k[k.at], 0);
#pragma unroll
        for (int c = 0; c < HSP; c += 16)
            wgmma<Major::k, Major::k>(scores, Tile::right(left, c), Tile::right(right, c), c > 0);
        wgmma_commit();
    };
    auto start_sum = [&](bool keep) {
        uint64_t right = Tile::columns_from(shared.v[v.at], 0);
#pragma unroll
        for (int c = 0; c < hopper_keys; c += 16)
            wgmma<Major::mn>(sum, p[c / 16], Tile::down(right, c), keep || c > 0);
        wgmma_commit();
    };

    while (true) {
        shared.q_there.wait(q.phase);
        q.next();
        if (shared.ticket >= tickets.count) break;
        auto work = HopperQueries::of(s, tickets.section, shared.ticket);
        int first_row = work.start + group * warpgroup_rows;
        int query[2] = {first_row + result_row(0), first_row + result_row(2)}, first_key[2];
        for (int i = 0; i < 2; i++) first_key[i] = s.first_key(work.b, min(query[i], s.Tq - 1));
        int last_first_key = s.first_key(work.b, min(first_row + warpgroup_rows, s.Tq) - 1);
        OnlineSoftmax softmax{s.scale() * log2_e};
        auto add_scores = [&](int keys) {
            int start = keys * hopper_keys;
            if (start + hopper_keys - 1 > s.position(first_row) || last_first_key > start) {
#pragma unroll
                for (int i = 0; i < hopper_keys / 2; i++) {
                    int key = start + result_column(i);
                    bool seen = first_key[i / 2 % 2] <= key && key <= s.position(query[i / 2 % 2]);
                    scores[i] = seen ? scores[i] : -INFINITY;
                }
            }
            softmax.add(scores);
        };

        shared.k_there[k.at].wait(k.phase);
        take_turn();
        wgmma_fence();
        start_scores();
        pass_turn();
        wgmma_wait<0>();
        pin(scores);
        shared.k_there[k.at].done();
        k.next();
        add_scores(work.last_keys);
        pack_results(p, scores);
        shared.v_there[v.at].wait(v.phase);
        bool more = false;  // true once `sum` holds something
        for (int keys = work.last_keys - 1; keys >= work.first_keys; keys--) {
            shared.k_there[k.at].wait(k.phase);
            take_turn();
            pin(scores);
            pin(sum);
            wgmma_fence();
            start_scores();
            start_sum(more);
            pass_turn();
            wgmma_wait<1>();
            pin(scores);
            shared.k_there[k.at].done();
            k.next();
            add_scores(keys);
            pin(scores);
            // This wait also keeps the compiler from moving the next wgmma_wait up, above the softmax.
            Handover& v_done = shared.v_there[v.at];
            v.next();
            shared.v_there[v.at].wait(v.phase);
            wgmma_wait<0>();
            pin(sum);
            v_done.done();
#pragma unroll
            for (int i = 0; i < HSP / 2; i++) sum[i] *= softmax.shrink[i / 2 % 2];
            pack_results(p, scores);
            more = true;
        }
        shared.q_there.done();
        pin(sum);
        wgmma_fence();
        start_sum(more);
        wgmma_wait<0>();
        pin(sum);
        shared.v_there[v.at].done();
        v.next();

        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float total = quad_sum(softmax.total[i]);
            scale[i] = 1 / total;
            if (threadIdx.x % 4 == 0 && query[i] < s.Tq)
                lse[s.lse(work.b, query[i], work.h)] = softmax.largest[i] * s.scale() + logf(total);
        }
        store_results(out + s.output(work.b, first_row, work.h), s.out_row(), sum, scale, s.Tq - first_row,
                      s.HS)
            .keep(amax);
    }
    if (group == 0) take_turn();  // consumes the last turn that group 1 passed
}

template <int HSP>
__device__ void hopper_forward_block(floatX* out, float* lse, float* amax, const CUtensorMap& query_map,
                                     const CUtensorMap& key_map, const AttentionShape& s,
                                     const Tickets& tickets) {
    auto& shared = *swizzled_shared<HopperForwardShared<HSP>>();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(query_map);
        prefetch_tensor_map(key_map);
        shared.q_there.init();
        for (Handover& handover : shared.k_there) handover.init();
        for (Handover& handover : shared.v_there) handover.init();
        fence_mbarrier_init();
    }
    __syncthreads();
    int group = warpgroup_number();
    if (group == 0) {
        give_registers_up<loading_registers>();
        if (threadIdx.x == 0) hopper_forward_load<HSP>(shared, query_map, key_map, s, tickets);
    } else {
        take_registers<computing_registers>();
        hopper_forward_compute<HSP>(shared, out, lse, amax, s, group - 1, tickets);
    }
}

template <int HSP>
__global__ void __launch_bounds__(hopper_threads, 1)
    attention_hopper_forward_kernel(floatX* out, float* lse, float* amax,
                                    const __grid_constant__ CUtensorMap query_map,
                                    const __grid_constant__ CUtensorMap key_map, AttentionShape s,
                                    Tickets tickets) {
    if constexpr (is_hopper)
        hopper_forward_block<HSP>(out, lse, amax, query_map, key_map, s, tickets);
    else
        __trap();
}

// ----------------------------------------------------------------------------
// launchers

// Returns the counter of the tickets drawn on a stream. It is 0 between launches, which do not overlap.
inline unsigned* ticket_counter(cudaStream_t stream) {
    static std::map<cudaStream_t, unsigned*> counters;
    unsigned*& counter = counters[stream];
    if (!counter) {
        cudaCheck(cudaMalloc((void**)&counter, sizeof *counter));
        zero_async(counter, 1, stream);
    }
    return counter;
}

// For shapes that pass hopper_attention_fits(). The buffers are those of attention_forward.
inline void attention_hopper_forward(floatX* out, float* lse, float* amax, Qkv<const floatX> qkv,
                                     const AttentionShape& shape, cudaStream_t stream) {
    ProfileRange profile_range(__func__);
    with_hopper_width(shape.HS, [&](auto HSP) {
        using Shared = HopperForwardShared<HSP>;
        CUtensorMap query_map = Shared::Tile::query_map(qkv, shape);
        CUtensorMap key_map = Shared::Tile::key_map(qkv, shape);
        Tickets tickets = {HopperQueries::tickets(shape), forward_section(shape), ticket_counter(stream)};
        int blocks = std::min(tickets.count, device_properties().multiProcessorCount);
        launch(attention_hopper_forward_kernel<HSP>, blocks, hopper_threads, sizeof(Shared), stream, out, lse,
               amax, query_map, key_map, shape, tickets);
    });
}
