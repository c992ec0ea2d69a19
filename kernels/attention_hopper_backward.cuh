/*
The backward pass of attention (see attention.cuh) for Hopper: one kernel, with five products per pair of
tiles.

A block owns 128 keys of a key/value head and visits the tiles of queries that see them, for all query heads
of the group. Its two computing warpgroups own 64 keys each. For each tile of queries they compute, with keys
as rows,

    p = exp(k q' - lse)     ds = p * (v dout' - dot)     dv += p dout     dk += ds q     dq += ds' k

p and ds stay in registers for dv and dk; ds goes through shared memory only for dq, because dq sums over the
keys of both warpgroups.

If a bias gradient (the column sums of dqkv) is wanted, each warp also writes the column sums of its rows of
dqkv, from the same registers.

Blocks take turns in adding to dq (attention_order.h). The TMA (the copy engine) does the additions, which a
dedicated thread issues. The block with the last turn has the whole sum and writes it directly to dqkv.

Other orders compile worse with ptxas 13.0. Computing dq before dk, so that the product for dk hides the store
of dq, fits heads of 64; but with heads of 128, 232 registers make the products wait for each other (ptxas's
note C7512), and 240, which leave 24 for the loading warps, spill 24 bytes. The compiler splits loads of two
or four statistics at a time or, if they are volatile, makes a kernel spill. If the product for the scores
starts before the statistics are read, its registers are touched while it runs (C7517). Only a GPU can show
whether an order that fits is faster.
*/
#pragma once

#include "kernels/attention_backward.cuh"
#include "kernels/attention_hopper_tiles.cuh"
#include "kernels/attention_order.h"
#include "kernels/column_sums.cuh"

// ----------------------------------------------------------------------------
// CUDA kernels

template <int HSP>
struct HopperBackward {
    static constexpr int keys = 128, queries = HSP == 64 ? 128 : 64, buffers = 2;
    static constexpr int dq_floats = queries * HSP;
    using KeyTile = SwizzledTile<keys, HSP>;
    using QueryTile = SwizzledTile<queries, HSP>;
    using ScoreTile = SwizzledTile<keys, queries>;  // its columns are queries

    struct alignas(1024) Shared {
        char k[KeyTile::bytes], v[KeyTile::bytes];
        char q[buffers][QueryTile::bytes], dout[buffers][QueryTile::bytes];
        char ds[buffers][ScoreTile::bytes];
        float dq[dq_floats];
        float stats[buffers][2 * queries];  // each query's lse and dot, ordered as in the scratch
        int first_keys[buffers][queries];
        Mbarrier keys_there, dq_full, dq_empty;
        Handover queries_there[buffers];
        int ticket;
    };

    // Each warpgroup computes 64 queries by 64 columns of dq: half of the queries, or half of the columns. If
    // there are 96 columns, both compute the middle 32 and only the second stores them.
    __device__ static int dq_query(int group) { return queries == 128 ? group * 64 : 0; }
    __device__ static int dq_column(int group) { return queries == 128 ? 0 : group * (HSP - 64); }
    __device__ static int dq_columns(int group) { return queries == 64 && group == 0 ? HSP - 64 : 64; }
    // Sums of dq are laid out as in the registers of a warpgroup, in units of 64 queries by 8 columns: four
    // floats of each of its threads. Returns the unit at which a warpgroup's part begins.
    __device__ static int dq_unit(int group) { return (dq_query(group) / 64 * HSP + dq_column(group)) / 8; }
};

template <int HSP>
using HopperKeys = KeyTileWork<HopperBackward<HSP>::keys, HopperBackward<HSP>::queries>;

template <int HSP>
__device__ void hopper_backward_load(typename HopperBackward<HSP>::Shared& shared,
                                     const HopperKeys<HSP>& work, const CUtensorMap& key_map,
                                     const CUtensorMap& query_map, const CUtensorMap& dout_map,
                                     const BackwardScratch& scratch, const AttentionShape& s) {
    using Sizes = HopperBackward<HSP>;
    using KeyTile = typename Sizes::KeyTile;
    using QueryTile = typename Sizes::QueryTile;
    mbarrier_arrive_expect(&shared.keys_there, 2 * KeyTile::bytes);
    KeyTile::load(shared.k, key_map, work.kv_head, work.start(), work.b, &shared.keys_there);
    KeyTile::load(shared.v, key_map, s.NKV + work.kv_head, work.start(), work.b, &shared.keys_there);
    Ring<Sizes::buffers> ring;
    for (auto step = work.first_step(s); work.has(step); work.advance(s, step)) {
        int h = step.h, row = step.row(), at = ring.at;
        constexpr int stats_bytes = sizeof shared.stats[0], first_bytes = sizeof shared.first_keys[0];
        Mbarrier* full =
            shared.queries_there[at].fill(ring.phase, 2 * QueryTile::bytes + stats_bytes + first_bytes);
        QueryTile::load(shared.q[at], query_map, h, row, work.b, full);
        bulk_load(shared.stats[at], scratch.stats(work.b, h, row), stats_bytes, full);
        bulk_load(shared.first_keys[at], scratch.first_keys(work.b, row), first_bytes, full);
        QueryTile::load(shared.dout[at], dout_map, h, row, work.b, full);
        ring.next();
    }
}

// Adds the tiles that the computing warpgroups leave in shared.dq to the sums in global memory, each in its
// turn.
template <int HSP>
__device__ void hopper_backward_add(typename HopperBackward<HSP>::Shared& shared, const HopperKeys<HSP>& work,
                                    const BackwardScratch& scratch, const AttentionShape& s) {
    using Sizes = HopperBackward<HSP>;
    constexpr int bytes = Sizes::dq_floats * sizeof(float);
    Ring<1> ring;
    for (auto step = work.first_step(s); work.has(step); work.advance(s, step)) {
        if (work.has_last_turn(s, step)) continue;
        Turn turn = scratch.turn(work.b, step.h, step.row(), work.turn(s, step));
        turn.wait();
        mbarrier_wait(&shared.dq_full, ring.phase);
        ring.next();
        fence_async_global();
        if (turn.number == 0)
            bulk_store(scratch.data + turn.sums, shared.dq, bytes);
        else
            bulk_add(scratch.data + turn.sums, shared.dq, bytes);
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(&shared.dq_empty);
        bulk_wait<0>();
        fence_async_global();
        turn.pass();
    }
}

// For the last turn at a tile of dq: adds the sums of all earlier turns to this thread's part, which begins
// at offset `part` of the tile.
__device__ inline void hopper_backward_finish(float (&dq)[32], const Turn& turn, const float* sums,
                                              int part) {
    if (turn.number == 0) return;
    if (threadIdx.x % warp_size == 0) turn.wait();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 32; n += 4) {
        Vec<float, 4> before = load<4>(sums + turn.sums + part + n * warpgroup_size);
#pragma unroll
        for (int i = 0; i < 4; i++) dq[n + i] += before[i];
    }
}

template <int HSP>
__device__ void hopper_backward_compute(typename HopperBackward<HSP>::Shared& shared,
                                        const HopperKeys<HSP>& work, Qkv<floatX> dqkv,
                                        const BackwardScratch& scratch, const AttentionShape& s, int group) {
    using Sizes = HopperBackward<HSP>;
    using KeyTile = typename Sizes::KeyTile;
    using QueryTile = typename Sizes::QueryTile;
    using ScoreTile = typename Sizes::ScoreTile;
    constexpr int queries = Sizes::queries, count = queries / 2;
    float dk[HSP / 2], dv[HSP / 2];
#pragma unroll
    for (int n = 0; n < HSP / 2; n++) dk[n] = dv[n] = 0;
    int first_row = work.start() + group * warpgroup_rows;
    float scale = s.scale() * log2_e;  // turns scores into base-2 exponents
    Ring<Sizes::buffers> ring;
    Ring<1> dq_ring;

    // Starts a product, summed over the columns of the head, of this warpgroup's keys or values with queries
    // or dout. Adds to d if `keep`.
    auto start_scores = [&](float(&d)[count], const char* keys, const char* with, bool keep) {
        uint64_t left = KeyTile::rows_from(keys, group * warpgroup_rows),
                 right = QueryTile::rows_from(with, 0);
#pragma unroll
        for (int c = 0; c < HSP; c += 16)
            wgmma<Major::k, Major::k>(d, KeyTile::right(left, c), QueryTile::right(right, c), keep || c > 0);
        wgmma_commit();
    };
    // Starts a product, summed over queries, that is added to a gradient of this warpgroup's keys or values.
    auto start_sum = [&](float(&d)[HSP / 2], const uint32_t(&left)[count / 8][4], const char* with) {
        uint64_t right = QueryTile::columns_from(with, 0);
#pragma unroll
        for (int c = 0; c < queries; c += 16)
            wgmma<Major::mn>(d, left[c / 16], QueryTile::down(right, c), true);
        wgmma_commit();
    };

    mbarrier_wait(&shared.keys_there, 0);
    for (auto step = work.first_step(s); work.has(step); work.advance(s, step)) {
        float p[count], ds[count];
        int buffer = ring.at, first_query = s.position(step.row());
        int row = group * warpgroup_rows + pinned(result_row(0)), column = pinned(result_column(0));
        const float* stats = shared.stats[buffer] + 2 * column;
        const int* first_key = shared.first_keys[buffer];
        shared.queries_there[buffer].wait(ring.phase);
#pragma unroll
        for (int n = 0; n < count; n++) ds[n] = -stats[2 * further_right(n) + 1];
        pin(ds);
        wgmma_fence();
        start_scores(p, shared.k, shared.q[buffer], false);
        start_scores(ds, shared.v, shared.dout[buffer], true);
        wgmma_wait<1>();
        pin(p);
#pragma unroll
        for (int n = 0; n < count; n++) p[n] = exp2_approx(fmaf(p[n], scale, -stats[2 * further_right(n)]));
        if (first_row + warpgroup_rows - 1 > first_query || first_key[queries - 1] > first_row) {
#pragma unroll
            for (int n = 0; n < count; n++) {
                int key = work.start() + row + further_down(n), query = column + further_right(n);
                bool seen = first_key[query] <= key && key <= first_query + query;
                p[n] = seen ? p[n] : 0.0f;
            }
        }
        uint32_t p_left[count / 8][4], ds_left[count / 8][4];
        pack_results(p_left, p);  // ds reads p from there, which frees the registers of p
        wgmma_wait<0>();
        pin(ds);
#pragma unroll
        for (int n = 0; n < count; n++) ds[n] *= packed_result(p_left, n);
        pack_results(ds_left, ds);
        pin(dk);
        pin(dv);
        wgmma_fence();
        start_sum(dv, p_left, shared.dout[buffer]);
        // Stores ds before a product uses its registers, which may not be read until that product has
        // finished.
#pragma unroll
        for (int n = 0; n < count; n += 2)
            ScoreTile::store(shared.ds[buffer], row + further_down(n), column, further_right(n),
                             ds_left[n / 8][n / 2 % 4]);
        fence_async();
        start_sum(dk, ds_left, shared.q[buffer]);
        // After this barrier, both halves of ds are stored, and both warpgroups are done with the ds of the
        // preceding tile, whose buffer is written next.
        named_barrier_sync(1, computing_threads);
        float dq[32];
        uint64_t left = ScoreTile::columns_from(shared.ds[buffer], Sizes::dq_query(group));
        uint64_t right = KeyTile::columns_from(shared.k, Sizes::dq_column(group));
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < Sizes::keys; c += 16)
            wgmma<Major::mn, Major::mn>(dq, ScoreTile::down(left, c), KeyTile::down(right, c), c > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(dv);
        pin(dk);
        pin(dq);
        shared.queries_there[buffer].done();
        ring.next();

        int part = (Sizes::dq_unit(group) * warpgroup_size + threadIdx.x % warpgroup_size) * 4;
        if (work.has_last_turn(s, step)) {
            hopper_backward_finish(dq, scratch.turn(work.b, step.h, step.row(), work.turn(s, step)),
                                   scratch.data, part);
            int first = step.row() + Sizes::dq_query(group), column = Sizes::dq_column(group);
            store_results(dqkv.queries + s.query(work.b, first, step.h) + column, s.q_row, dq,
                          {s.scale(), s.scale()}, s.Tq - first, min(s.HS - column, Sizes::dq_columns(group)));
            if (scratch.columns)
                store_column_sums(scratch.column_sums(work.b, first) + step.h * s.HS + column,
                                  scratch.columns, dq, s.scale(), s.Tq - first,
                                  min(s.HS - column, Sizes::dq_columns(group)));
            continue;
        }
        mbarrier_wait(&shared.dq_empty, dq_ring.phase ^ 1);
        dq_ring.next();
#pragma unroll
        for (int n = 0; n < 32; n += 4)
            if (further_right(n) < Sizes::dq_columns(group))
                *reinterpret_cast<float4*>(shared.dq + part + n * warpgroup_size) =
                    make_float4(dq[n], dq[n + 1], dq[n + 2], dq[n + 3]);
        fence_async();
        __syncwarp();
        if (threadIdx.x % warp_size == 0) mbarrier_arrive(&shared.dq_full);
    }
    int rows = s.Tk - first_row;
    store_results(dqkv.keys + s.key(work.b, first_row, work.kv_head), s.kv_row, dk, {s.scale(), s.scale()},
                  rows, s.HS);
    store_results(dqkv.keys + s.value(work.b, first_row, work.kv_head), s.kv_row, dv, {1.0f, 1.0f}, rows,
                  s.HS);
    if (!scratch.columns) return;
    float* sums = scratch.column_sums(work.b, first_row) + work.kv_head * s.HS;
    store_column_sums(sums + s.NH * s.HS, scratch.columns, dk, s.scale(), rows, s.HS);
    store_column_sums(sums + (s.NH + s.NKV) * s.HS, scratch.columns, dv, 1.0f, rows, s.HS);
}

template <int HSP>
__device__ void hopper_backward_block(Qkv<floatX> dqkv, const CUtensorMap& key_map,
                                      const CUtensorMap& query_map, const CUtensorMap& dout_map,
                                      const BackwardScratch& scratch, const AttentionShape& s, int section) {
    auto& shared = *swizzled_shared<typename HopperBackward<HSP>::Shared>();
    if (threadIdx.x == 0) {
        shared.ticket = atomicAdd(scratch.ticket(), 1);
        mbarrier_init(&shared.keys_there, 1);
        mbarrier_init(&shared.dq_full, computing_warps);
        mbarrier_init(&shared.dq_empty, 1);
        for (Handover& handover : shared.queries_there) handover.init();
        fence_mbarrier_init();
    }
    __syncthreads();
    int group = warpgroup_number();
    if (group == 0) {
        give_registers_up<loading_registers>();
        auto work = HopperKeys<HSP>::of(s, section, shared.ticket);
        if (threadIdx.x == 0)
            hopper_backward_load<HSP>(shared, work, key_map, query_map, dout_map, scratch, s);
        else if (threadIdx.x == warp_size)
            hopper_backward_add<HSP>(shared, work, scratch, s);
    } else {
        take_registers<computing_registers>();
        hopper_backward_compute<HSP>(shared, HopperKeys<HSP>::of(s, section, shared.ticket), dqkv, scratch, s,
                                     group - 1);
    }
}

// One block per tile of keys of each of the (B, NKV) heads.
template <int HSP>
__global__ void __launch_bounds__(hopper_threads, 1)
    attention_hopper_backward_kernel(Qkv<floatX> dqkv, const __grid_constant__ CUtensorMap key_map,
                                     const __grid_constant__ CUtensorMap query_map,
                                     const __grid_constant__ CUtensorMap dout_map, BackwardScratch scratch,
                                     AttentionShape s, int section) {
    if constexpr (is_hopper)
        hopper_backward_block<HSP>(dqkv, key_map, query_map, dout_map, scratch, s, section);
    else
        __trap();
}

// ----------------------------------------------------------------------------
// launchers

// For shapes that pass hopper_attention_fits(). The buffers are those of attention_backward.
inline void attention_hopper_backward(Qkv<floatX> dqkv, float* scratch_data, const floatX* dout,
                                      Qkv<const floatX> qkv, const floatX* out, const float* lse,
                                      const AttentionShape& s, cudaStream_t stream, float* dbias) {
    ProfileRange profile_range(__func__);
    with_hopper_width(s.HS, [&](auto HSP) {
        using Sizes = HopperBackward<HSP>;
        BackwardScratch scratch(scratch_data, s, HSP, dbias != nullptr);
        prepare_backward_scratch(scratch, dout, out, lse, s, stream);
        CUtensorMap key_map = Sizes::KeyTile::key_map(qkv, s);
        CUtensorMap query_map = Sizes::QueryTile::query_map(qkv, s);
        CUtensorMap dout_map = Sizes::QueryTile::output_map(dout, s);
        launch(attention_hopper_backward_kernel<HSP>, HopperKeys<HSP>::tickets(s), hopper_threads,
               sizeof(typename Sizes::Shared), stream, dqkv, key_map, query_map, dout_map, scratch, s,
               backward_section(s, device_properties().multiProcessorCount));
        if (dbias)
            add_partials(dbias, nullptr, scratch.column_sums(0, 0), s.B * scratch.sums_of_columns,
                         scratch.columns, stream, 1);
    });
}
