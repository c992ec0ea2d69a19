/*
The backward pass of attention (see attention.cuh) for Hopper: one kernel, five products of each pair of
tiles.

A block owns 128 keys of a key/value head, and goes over the tiles of queries that see them, of all query
heads of the group. Its two computing warpgroups own 64 keys each. With keys as rows, of each tile of queries

    p = exp(k q' - lse)     ds = p * (v dout' - dot)     dv += p dout     dk += ds q     dq += ds' k

where p and ds stay in registers on their way to dv and dk; only for dq does ds go through shared memory, for
its sum is over the keys of both warpgroups.

dq is summed over blocks, in float, in memory, and always in the same order: that of tile i of queries begins
with the tile of keys on its diagonal and goes down from there. A counter for each tile of queries says whose
turn it is. A block begins at its diagonal, too, so blocks of one head that run side by side, each a step
behind the one above, find their turn come when they need it. Blocks take their work in the order of these
turns, so that a block waits only for such as began before it. The copy engine does the additions, asked by a
thread of its own.
*/
#pragma once

#include "kernels/attention_hopper_tiles.cuh"

// ----------------------------------------------------------------------------
// CUDA kernels

// Sums of dq lie as the registers of the computing threads had them: in a tile four floats of each thread of
// the first warpgroup, then the next four; then those of the other. Each has half of the queries, or half of
// the columns.
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
        float lse[buffers][queries], dot[buffers][queries];
        int first[buffers][queries];  // the first key that each query sees
        Mbarrier keys_there, dq_full, dq_empty;
        Handover queries_there[buffers];
        int ticket;
    };

    // Where a warpgroup's part of the product for dq lies in the tile.
    __device__ static int dq_query(int group) { return queries == 128 ? group * 64 : 0; }
    __device__ static int dq_column(int group) { return queries == 128 ? 0 : group * 64; }
};

// What the kernels share in memory. Rows of lse, dot and first, and dq, are whole tiles of queries.
struct HopperBackwardScratch {
    float *lse, *dot;   // (B, NH, tiles of queries, queries) lse of powers of two, and dout . out
    int* first;         // (B, tiles of queries, queries) the first key that each query sees
    float* dq;          // (B, NH, tiles of queries, dq_floats)
    unsigned* turns;    // (B, NH, tiles of queries) how many blocks have added to dq
    unsigned* tickets;  // how many blocks have begun
};

// dot = dout . out of each query and head, by 16 threads each; lse in powers of two. Behind the last query an
// lse for which every probability is zero.
__global__ void attention_hopper_dot_kernel(HopperBackwardScratch scratch, const floatX* dout,
                                            const floatX* out, const float* lse, AttentionShape s, int rows) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 16;  // (B, rows, NH)
    if (i >= (size_t)s.B * rows * s.NH) return;
    int h = i % s.NH, t = i / s.NH % rows, b = i / s.NH / rows, column = threadIdx.x % 16 * 8;
    float sum = 0;
    if (t < s.T && column < s.HS) {
        auto left = load<8>(dout + s.output(b, t, h) + column),
             right = load<8>(out + s.output(b, t, h) + column);
        for (int c = 0; c < 8; c++) sum += float(left[c]) * float(right[c]);
    }
    unsigned lanes = 0xffffu << threadIdx.x % warp_size / 16 * 16;
    for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(lanes, sum, offset);
    if (column == 0) {
        size_t to = ((size_t)b * s.NH + h) * rows + t;
        scratch.dot[to] = sum;
        scratch.lse[to] = t < s.T ? lse[s.lse(b, t, h)] * log2_e : INFINITY;
        if (h == 0) scratch.first[(size_t)b * rows + t] = s.first_key(b, min(t, s.T - 1));
    }
}

// The work of a block: a tile of keys, and the tiles of queries [first, end) that see some of them.
template <int HSP>
struct HopperKeys {
    int b, kv_head, start, first, end;

    __device__ HopperKeys(const AttentionShape& s, int ticket) {
        using Sizes = HopperBackward<HSP>;
        int tiles = ceil_div(s.T, Sizes::keys), head = ticket / tiles;
        b = head / s.NKV;
        kv_head = head % s.NKV;
        start = (tiles - 1 - ticket % tiles) * Sizes::keys;
        first = start / Sizes::queries;
        end = first + 1;
        for (int beyond = ceil_div(s.T, Sizes::queries); end < beyond;) {  // the first key never moves back
            int middle = (end + beyond) / 2;
            if (s.first_key(b, middle * Sizes::queries) < start + Sizes::keys)
                end = middle + 1;
            else
                beyond = middle;
        }
    }

    // Calls f(query head, tile of queries) in the order in which the block goes over them.
    template <typename F>
    __device__ void each(const AttentionShape& s, F&& f) const {
#pragma unroll 1
        for (int h = kv_head * s.group(); h < (kv_head + 1) * s.group(); h++)
#pragma unroll 1
            for (int i = first; i < end; i++) f(h, i);
    }
};

template <int HSP>
__device__ void hopper_backward_load(typename HopperBackward<HSP>::Shared& shared,
                                     const HopperKeys<HSP>& work, const CUtensorMap& key_map,
                                     const CUtensorMap& query_map, const CUtensorMap& dout_map,
                                     const HopperBackwardScratch& scratch, const AttentionShape& s) {
    using Sizes = HopperBackward<HSP>;
    using KeyTile = typename Sizes::KeyTile;
    using QueryTile = typename Sizes::QueryTile;
    constexpr int row_bytes = Sizes::queries * sizeof(float);
    mbarrier_arrive_expect(&shared.keys_there, 2 * KeyTile::bytes);
    KeyTile::load(shared.k, key_map, s.NH + work.kv_head, work.start, work.b, &shared.keys_there);
    KeyTile::load(shared.v, key_map, s.NH + s.NKV + work.kv_head, work.start, work.b, &shared.keys_there);
    Ring<Sizes::buffers> ring;
    int tiles = ceil_div(s.T, Sizes::queries);
    work.each(s, [&](int h, int i) {
        size_t row = (((size_t)work.b * s.NH + h) * tiles + i) * Sizes::queries;
        Mbarrier* full = shared.queries_there[ring.at].fill(ring.phase, 2 * QueryTile::bytes + 3 * row_bytes);
        QueryTile::load(shared.q[ring.at], query_map, h, i * Sizes::queries, work.b, full);
        bulk_load(shared.lse[ring.at], scratch.lse + row, row_bytes, full);
        bulk_load(shared.first[ring.at], scratch.first + ((size_t)work.b * tiles + i) * Sizes::queries,
                  row_bytes, full);

        QueryTile::load(shared.dout[ring.at], dout_map, h, i * Sizes::queries, work.b, full);
        bulk_load(shared.dot[ring.at], scratch.dot + row, row_bytes, full);
        ring.next();
    });
}

// Adds what the computing warpgroups leave in shared.dq to the sums in memory, each when it is its turn.
template <int HSP>
__device__ void hopper_backward_add(typename HopperBackward<HSP>::Shared& shared, const HopperKeys<HSP>& work,
                                    const HopperBackwardScratch& scratch, const AttentionShape& s) {
    using Sizes = HopperBackward<HSP>;
    constexpr int bytes = Sizes::dq_floats * sizeof(float);
    int tiles = ceil_div(s.T, Sizes::queries);
    Ring<1> ring;
    work.each(s, [&](int h, int i) {
        size_t tile = ((size_t)work.b * s.NH + h) * tiles + i;
        float* dq = scratch.dq + tile * Sizes::dq_floats;
        unsigned turn = (i - work.first) * Sizes::queries / Sizes::keys;
        mbarrier_wait(&shared.dq_full, ring.phase);
        ring.next();
        counter_wait(scratch.turns + tile, turn);
        fence_async_global();
        if (turn == 0)
            bulk_store(dq, shared.dq, bytes);
        else
            bulk_add(dq, shared.dq, bytes);
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(&shared.dq_empty);
        bulk_wait<0>();
        fence_async_global();
        counter_set(scratch.turns + tile, turn + 1);
    });
}

template <int HSP>
__device__ void hopper_backward_compute(typename HopperBackward<HSP>::Shared& shared,
                                        const HopperKeys<HSP>& work, floatX* dqkv, const AttentionShape& s,
                                        int group) {
    using Sizes = HopperBackward<HSP>;
    using KeyTile = typename Sizes::KeyTile;
    using QueryTile = typename Sizes::QueryTile;
    using ScoreTile = typename Sizes::ScoreTile;
    constexpr int queries = Sizes::queries, count = queries / 2;
    float dk[HSP / 2], dv[HSP / 2];
#pragma unroll
    for (int n = 0; n < HSP / 2; n++) dk[n] = dv[n] = 0;
    int first_row = work.start + group * warpgroup_rows;
    float scale = s.scale() * log2_e;  // powers of two
    Ring<Sizes::buffers> ring;
    Ring<1> dq_ring;

    // A product over the head, of this warpgroup's keys or values with queries. Adds to d where `keep`.
    auto start_scores = [&](float(&d)[count], const char* keys, const char* with, bool keep) {
        uint64_t left = KeyTile::rows_from(keys, group * warpgroup_rows),
                 right = QueryTile::rows_from(with, 0);
#pragma unroll
        for (int c = 0; c < HSP; c += 16)
            wgmma<Major::k, Major::k>(d, KeyTile::right(left, c), QueryTile::right(right, c), keep || c > 0);
        wgmma_commit();
    };
    // A product over queries, added to a gradient of this warpgroup's keys or values.
    auto start_sum = [&](float(&d)[HSP / 2], const uint32_t(&left)[count / 8][4], const char* with) {
        uint64_t right = QueryTile::columns_from(with, 0);
#pragma unroll
        for (int c = 0; c < queries; c += 16)
            wgmma<Major::mn>(d, left[c / 16], QueryTile::down(right, c), true);
        wgmma_commit();
    };

    mbarrier_wait(&shared.keys_there, 0);
    work.each(s, [&](int, int i) {
        float p[count], ds[count];
        int buffer = ring.at, first_query = i * queries;
        int row = group * warpgroup_rows + pinned(result_row(0)), column = pinned(result_column(0));
        shared.queries_there[buffer].wait(ring.phase);
#pragma unroll
        for (int n = 0; n < count; n++) ds[n] = -shared.dot[buffer][column + further_right(n)];
        pin(ds);
        wgmma_fence();
        start_scores(p, shared.k, shared.q[buffer], false);
        start_scores(ds, shared.v, shared.dout[buffer], true);
        wgmma_wait<1>();
        pin(p);
        const float* lse = shared.lse[buffer];
        const int* first_key = shared.first[buffer];
#pragma unroll
        for (int n = 0; n < count; n++)
            p[n] = exp2_approx(fmaf(p[n], scale, -lse[column + further_right(n)]));
        if (first_row + warpgroup_rows - 1 > first_query || first_key[queries - 1] > first_row) {
#pragma unroll
            for (int n = 0; n < count; n++) {
                int key = work.start + row + further_down(n), query = column + further_right(n);
                bool seen = first_key[query] <= key && key <= first_query + query;
                p[n] = seen ? p[n] : 0.0f;
            }
        }
        uint32_t p_left[count / 8][4], ds_left[count / 8][4];
        pack_results(p_left, p);  // ds takes p from there, which leaves the registers of p to others
        wgmma_wait<0>();
        pin(ds);
#pragma unroll
        for (int n = 0; n < count; n++) ds[n] *= packed_result(p_left, n);
        pack_results(ds_left, ds);
        pin(dk);
        pin(dv);
        wgmma_fence();
        start_sum(dv, p_left, shared.dout[buffer]);
        start_sum(dk, ds_left, shared.q[buffer]);
#pragma unroll
        for (int n = 0; n < count; n += 2)
            ScoreTile::store(shared.ds[buffer], row + further_down(n), column, further_right(n),
                             ds_left[n / 8][n / 2 % 4]);
        fence_async();
        // Both halves of ds are there; and as both came here, nobody reads those of the tile before the last.
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

        mbarrier_wait(&shared.dq_empty, dq_ring.phase ^ 1);
        dq_ring.next();
        float* to = shared.dq + (group * 8 * warpgroup_size + threadIdx.x % warpgroup_size) * 4;
#pragma unroll
        for (int n = 0; n < 32; n += 4)
            *reinterpret_cast<float4*>(to + n * warpgroup_size) =
                make_float4(dq[n], dq[n + 1], dq[n + 2], dq[n + 3]);
        fence_async();
        __syncwarp();
        if (threadIdx.x % warp_size == 0) mbarrier_arrive(&shared.dq_full);
    });
    int rows = s.T - first_row;
    store_results(dqkv + s.key(work.b, first_row, work.kv_head), s.qkv_row(), dk, {s.scale(), s.scale()},
                  rows, s.HS);
    store_results(dqkv + s.value(work.b, first_row, work.kv_head), s.qkv_row(), dv, {1.0f, 1.0f}, rows, s.HS);
}

template <int HSP>
__device__ void hopper_backward_block(floatX* dqkv, const CUtensorMap& key_map, const CUtensorMap& query_map,
                                      const CUtensorMap& dout_map, const HopperBackwardScratch& scratch,
                                      const AttentionShape& s) {
    auto& shared = *swizzled_shared<typename HopperBackward<HSP>::Shared>();
    if (threadIdx.x == 0) {
        shared.ticket = atomicAdd(scratch.tickets, 1);
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
        HopperKeys<HSP> work(s, shared.ticket);
        if (threadIdx.x == 0)
            hopper_backward_load<HSP>(shared, work, key_map, query_map, dout_map, scratch, s);
        else if (threadIdx.x == warp_size)
            hopper_backward_add<HSP>(shared, work, scratch, s);
    } else {
        take_registers<computing_registers>();
        hopper_backward_compute<HSP>(shared, HopperKeys<HSP>(s, shared.ticket), dqkv, s, group - 1);
    }
}

// dk, dv, and the sums of dq. A block for each tile of keys, of all (B, NKV).
template <int HSP>
__global__ void __launch_bounds__(hopper_threads, 1)
    attention_hopper_backward_kernel(floatX* dqkv, const __grid_constant__ CUtensorMap key_map,
                                     const __grid_constant__ CUtensorMap query_map,
                                     const __grid_constant__ CUtensorMap dout_map,
                                     HopperBackwardScratch scratch, AttentionShape s) {
    if constexpr (is_hopper)
        hopper_backward_block<HSP>(dqkv, key_map, query_map, dout_map, scratch, s);
    else
        __trap();
}

// The sums of dq to their place in dqkv: by each thread, eight columns of two rows.
template <int HSP>
__global__ void attention_hopper_queries_kernel(floatX* dqkv, const float* dq, AttentionShape s, int tiles) {
    using Sizes = HopperBackward<HSP>;
    size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x, tile = thread / 512;
    if (tile >= (size_t)s.B * s.NH * tiles) return;
    int unit = thread % 8, quad = thread / 8 % 32, group = thread / 256 % 2;
    const float* from = dq + tile * Sizes::dq_floats + ((group * 8 + unit) * 32 + quad) * 16;
    Vec<floatX, 8> rows[2];
    for (int i = 0; i < 4; i++) {
        Vec<float, 4> lane = load<4>(from + i * 4);
        for (int n = 0; n < 4; n++) rows[n / 2][i * 2 + n % 2] = floatX(lane[n] * s.scale());
    }
    int i = tile % tiles, h = tile / tiles % s.NH, b = tile / tiles / s.NH;
    int column = Sizes::dq_column(group) + unit * 8;
    for (int r = 0; r < 2; r++) {
        int t = i * Sizes::queries + Sizes::dq_query(group) + quad / 8 * 16 + quad % 8 + r * 8;
        if (t < s.T && column < s.HS) store(dqkv + s.query(b, t, h) + column, rows[r]);
    }
}

// ----------------------------------------------------------------------------
// launchers

// Floats of scratch that attention_hopper_backward needs.
inline size_t attention_hopper_backward_scratch(int B, int T, int NH, int, int HS) {
    size_t floats = 0;
    with_tile_width<64, 128>(HS, [&](auto HSP) {
        using Sizes = HopperBackward<HSP>;
        size_t tiles = (size_t)B * NH * ceil_div(T, Sizes::queries);
        floats = tiles * (2 * Sizes::queries + Sizes::dq_floats + 1) + tiles / NH * Sizes::queries + 1;
    });
    return floats;
}

// For shapes of which hopper_attention_fits. dqkv as qkv (B, T, NH + 2*NKV, HS), dout and out (B, T, NH, HS),
// lse (B, NH, T); scratch begins at a multiple of 16 bytes.
inline void attention_hopper_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv,
                                      const floatX* out, const float* lse, const AttentionShape& s,
                                      cudaStream_t stream) {
    ProfileRange profile_range(__func__);
    with_tile_width<64, 128>(s.HS, [&](auto HSP) {
        using Sizes = HopperBackward<HSP>;
        int per_head = ceil_div(s.T, Sizes::queries), rows = per_head * Sizes::queries;
        size_t tiles = (size_t)s.B * s.NH * per_head;
        HopperBackwardScratch memory;
        memory.dq = scratch;
        memory.lse = memory.dq + tiles * Sizes::dq_floats;
        memory.dot = memory.lse + tiles * Sizes::queries;
        memory.first = (int*)(memory.dot + tiles * Sizes::queries);
        memory.turns = (unsigned*)(memory.first + (size_t)s.B * rows);
        memory.tickets = memory.turns + tiles;
        cudaCheck(cudaMemsetAsync(memory.turns, 0, (tiles + 1) * sizeof(unsigned), stream));
        constexpr int threads = 256;
        launch(attention_hopper_dot_kernel, ceil_div((size_t)s.B * rows * s.NH * 16, threads), threads, 0,
               stream, memory, dout, out, lse, s, rows);
        CUtensorMap key_map = Sizes::KeyTile::map(qkv, s, s.NH + 2 * s.NKV);
        CUtensorMap query_map = Sizes::QueryTile::map(qkv, s, s.NH + 2 * s.NKV);
        CUtensorMap dout_map = Sizes::QueryTile::map(dout, s, s.NH);
        launch(attention_hopper_backward_kernel<HSP>, ceil_div(s.T, Sizes::keys) * s.B * s.NKV,
               hopper_threads, sizeof(typename Sizes::Shared), stream, dqkv, key_map, query_map, dout_map,
               memory, s);
        launch(attention_hopper_queries_kernel<HSP>, ceil_div(tiles * 512, threads), threads, 0, stream, dqkv,
               memory.dq, s, per_head);
    });
}
