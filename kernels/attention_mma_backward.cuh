/*
The backward pass of attention on mma.sync, in one kernel with five products. Formula and layout:
attention.cuh.

A block owns a tile of keys. It visits the queries that see them, from the last tile of queries down to the
diagonal, for each head of its group, and sums dk and dv in registers. Scores are computed transposed, keys by
queries, so that p and ds are already in registers as the left operands of the products for dv and dk.

Blocks add to dq in turns (attention_backward.cuh), in ascending order of their tiles of keys. A block and
the block of the preceding tile of keys visit the same tiles of queries in the same order, so that one waits
for the other only at the start.
*/
#pragma once

#include "kernels/attention_backward.cuh"
#include "kernels/attention_shape.h"
#include "kernels/attention_tiles.cuh"
#include "kernels/common.cuh"

#ifndef DEVICE_CPU

// ----------------------------------------------------------------------------
// tiles

// Tiles of `keys` by `queries`. Each of eight warps owns 16 keys. If the block has fewer than 128 keys,
// several warps share 16 of them: each computes a part of the columns of every product, and stores its parts
// of p and ds in shared memory. With two stages, the next queries load while the current ones are in use. One
// block fills a multiprocessor.
template <int HSP_, int keys_, int queries_, int stages_>
struct BackwardTiles {
    static constexpr int HSP = HSP_, keys = keys_, queries = queries_, stages = stages_;
    static constexpr int warps = 8, threads = warps * warp_size;
    static constexpr int parts = warps * 16 / keys, head_columns = HSP / parts;
    // If there are fewer than eight queries for each part, the last parts have none.
    static constexpr int part_queries = queries / parts < 8 ? 8 : queries / parts;
    // Columns of scores computed at a time. With wide heads, 64 of them exceed the registers on sm_90.
#if __CUDA_ARCH__ >= 900
    static constexpr int most_scores = HSP_ > 64 ? 32 : 64;
#else
    static constexpr int most_scores = 64;
#endif
    static constexpr int scores = part_queries < most_scores ? part_queries : most_scores;

    // dq: 32 queries per warp if the columns can be divided accordingly, else 16
    static constexpr int step = tensor_cores ? 16 : 8;
    static constexpr int dq_rows = queries >= 32 && queries * HSP / 32 % (warps * step) == 0 ? 32 : 16;
    static constexpr int dq_parts = warps * dq_rows / queries, dq_columns = HSP / dq_parts;

    static constexpr bool p_in_registers = tensor_cores && parts == 1;
    static constexpr int score_tiles = p_in_registers ? 1 : 2;  // ds, p
    static constexpr size_t shared_bytes =
        sizeof(floatX) * (2 * keys * HSP + stages * 2 * queries * HSP + score_tiles * keys * queries) +
        sizeof(float) * stages * 3 * queries;
    // The most sums that a thread holds. The host chooses tiles by it, so it is the same for every
    // architecture.
    static constexpr int widest_scores = part_queries < 64 ? part_queries : 64;
    static constexpr int accumulators = 2 * 16 * (widest_scores + head_columns) / warp_size;
};

// Returns the largest of the tiles that fit in `shared` bytes and whose sums fit in registers.
template <size_t shared, typename First, typename... Rest>
constexpr auto choose_backward_tiles() {
    constexpr int registers = tensor_cores ? 192 : 128;
    constexpr size_t own = 128;  // bytes of the kernel's own shared variables, which lie before the tiles
    constexpr bool fits = First::shared_bytes + own <= shared && First::accumulators <= registers;
    static_assert(fits || sizeof...(Rest) > 0);
    if constexpr (fits)
        return First{};
    else
        return choose_backward_tiles<shared, Rest...>();
}

template <int HSP, size_t shared>
using BackwardTilesFor =
    decltype(choose_backward_tiles<shared, BackwardTiles<HSP, 128, 128, 2>, BackwardTiles<HSP, 128, 64, 2>,
                                   BackwardTiles<HSP, 64, 64, 2>, BackwardTiles<HSP, 64, 32, 2>,
                                   BackwardTiles<HSP, 64, 32, 1>, BackwardTiles<HSP, 32, 32, 1>,
                                   BackwardTiles<HSP, 16, 16, 1>>());

// ----------------------------------------------------------------------------
// kernels

// Sums of dq are stored in blocks of 16 x 8, each in the order in which a warp adds them: (4, 32), register
// by lane. Returns the offset of the block at a row (a multiple of 16) and a column (a multiple of 8).
__device__ inline size_t dq_offset(int row, int column, int width) {
    return (size_t)row * width + column * 16;
}

// One block per tile of keys, key/value head and sequence. `scale` turns scores into base-2 exponents. If no
// query sees a tile of keys, its dk and dv are left as they are.
template <typename Tiles>
__global__ void __launch_bounds__(Tiles::threads, 1)
    attention_backward_kernel(floatX* dkv, BackwardScratch scratch, const floatX* dout, Qkv<const floatX> qkv,
                              AttentionShape s, float scale, int section) {
    constexpr int HSP = Tiles::HSP, keys = Tiles::keys, queries = Tiles::queries, parts = Tiles::parts;
    constexpr int stages = Tiles::stages, threads = Tiles::threads;
    Tile<HSP> k{dynamic_shared<floatX>()};                  // (keys, HSP)
    Tile<HSP> v{k.data + keys * HSP};                       // (keys, HSP)
    floatX* staged = v.data + keys * HSP;                   // (stages, q and dout, queries, HSP)
    Tile<queries> ds{staged + stages * 2 * queries * HSP};  // (keys, queries)
    Tile<queries> p{ds.data + (Tiles::score_tiles - 1) * keys * queries};  // (keys, queries)
    float* stats = (float*)(p.data + keys * queries);                      // (stages, queries, 2)
    int* first_keys = (int*)(stats + stages * 2 * queries);                // (stages, queries)
    __shared__ unsigned drawn;
    __shared__ Turn turn;

    if (threadIdx.x == 0) {
        drawn = atomicAdd(scratch.ticket(), 1);
        turn.counter = nullptr;
    }
    __syncthreads();
    auto work = KeyTileWork<keys, queries>::of(s, section, drawn);
    work.number = pinned(work.number);  // registers are scarce: start() is recomputed from it each time
    int b = work.b, k_start = work.start();

    int warp = threadIdx.x / warp_size, part = warp % parts, warp_row = warp / parts * 16;
    int dq_row = warp / Tiles::dq_parts * Tiles::dq_rows;
    int dq_column = warp % Tiles::dq_parts * Tiles::dq_columns;

    if (work.seeing.none()) return;
    // Registers are scarce: the addresses of queries are recomputed for each tile.
    auto load_queries = [&](auto step, int stage) {
        int h = step.h, start = step.row(), count = s.Tq - start;
        floatX* q = staged + stage * 2 * queries * HSP;
        load_tile<queries, threads, HSP>({q}, qkv.queries + s.query(b, start, h), s.q_row, count, s.HS,
                                         pinned(threadIdx.x));
        load_tile<queries, threads, HSP>({q + queries * HSP}, dout + s.output(b, start, h), s.out_row(),
                                         count, s.HS);
        const float* from_stats = scratch.stats(b, h, start);
        const int* from_first = scratch.first_keys(b, start);
        for (int i = threadIdx.x * 4; i < 2 * queries; i += threads * 4)
            cp_async_16(stats + stage * 2 * queries + i, from_stats + i);
        for (int i = threadIdx.x * 4; i < queries; i += threads * 4)
            cp_async_16(first_keys + stage * queries + i, from_first + i);
        cp_async_commit();
    };

    Fragment<16, Tiles::head_columns> dk, dv;
    int seen_keys = s.keys_end() - k_start;
    load_tile<keys, threads>(k, qkv.keys + s.key(b, k_start, work.kv_head), s.kv_row, seen_keys, s.HS);
    load_tile<keys, threads>(v, qkv.keys + s.value(b, k_start, work.kv_head), s.kv_row, seen_keys, s.HS);
    auto step = work.first_step(s);
    load_queries(step, 0);
    int stage = 0;
    while (true) {
        cp_async_wait<0>();
        __syncthreads();  // these queries have arrived, and those before them are no longer in use
        int q_start = step.row();
        unsigned seen = 0;
        if (threadIdx.x == 0) {
            if (turn.counter) turn.pass();
            turn = scratch.turn(b, step.h, q_start, work.turn(s, step));
            seen = counter_now(turn.counter);
        }
        Tile<HSP> q{staged + stage * 2 * queries * HSP}, dout_q{q.data + queries * HSP};
        const float* tile_stats = stats + stage * 2 * queries;
        const int* tile_first = first_keys + stage * queries;
        bool masked =
            !all_seen(s.position(q_start), s.first_key(b, min(q_start + queries, s.Tq) - 1), k_start, keys);
        work.advance(s, step);
        bool more = work.has(step);
        if constexpr (stages == 2) {
            stage ^= 1;
            if (more) load_queries(step, stage);
        }

#pragma unroll 1
        for (int c = 0; c < Tiles::part_queries; c += Tiles::scores) {
            Fragment<16, Tiles::scores> scores, dscores;
            int first_score = part * Tiles::part_queries + c;
            if (parts * Tiles::part_queries > queries && first_score >= queries) break;
            warp_product<Right::columns, HSP>(
                scores, [&](Left& left, int, int at) { left.load(k, warp_row, at); }, q, first_score);
            warp_product<Right::columns, HSP>(
                dscores, [&](Left& left, int, int at) { left.load(v, warp_row, at); }, dout_q, first_score);
            if (masked) {
                int key = k_start + warp_row + scores.row(0, 0);
#pragma unroll
                for (int n = 0; n < Tiles::scores / 8; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        int query = first_score + scores.column(n, i);
                        int first = tile_first[query] - key, seen = s.position(q_start) + query - key;
                        if (0 < first || 0 > seen) scores.at[0][n][i] = -INFINITY;
                        if (8 < first || 8 > seen) scores.at[0][n][2 + i] = -INFINITY;
                    }
            }
#pragma unroll
            for (int n = 0; n < Tiles::scores / 8; n++) {
                Vec<float, 4> of_two = load<4>(tile_stats + 2 * (first_score + scores.column(n, 0)));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float lse = of_two[i % 2 * 2], dot = of_two[i % 2 * 2 + 1];
                    float probability = exp2_approx(scores.at[0][n][i] * scale - lse);
                    scores.at[0][n][i] = probability;
                    dscores.at[0][n][i] = probability * (dscores.at[0][n][i] - dot);
                }
            }
            dscores.store(ds, warp_row, first_score);
            if constexpr (Tiles::p_in_registers) {
                warp_product<Right::rows, Tiles::scores>(
                    dv, [&](auto& left, int, int at) { left.take(scores, 0, at); }, dout_q.from_row(c));
                warp_product<Right::rows, Tiles::scores>(
                    dk, [&](auto& left, int, int at) { left.take(dscores, 0, at); }, q.from_row(c));
            } else {
                scores.store(p, warp_row, first_score);
            }
        }
        if (threadIdx.x == 0) turn.wait(seen);
        __syncthreads();  // ds is complete, and it is this block's turn
        if constexpr (!Tiles::p_in_registers) {
            int first_column = part * Tiles::head_columns;
            warp_product<Right::rows, queries>(
                dv, [&](Left& left, int, int at) { left.load(p, warp_row, at); }, dout_q, first_column);
            warp_product<Right::rows, queries>(
                dk, [&](Left& left, int, int at) { left.load(ds, warp_row, at); }, q, first_column);
        }
        Fragment<Tiles::dq_rows, Tiles::dq_columns> dq;
        warp_product<Right::rows, keys>(
            dq, [&](Left& left, int m, int at) { left.load_transposed(ds, dq_row + m * 16, at); }, k,
            dq_column);
        float* sums = scratch.data + turn.sums + dq_offset(dq_row, dq_column, HSP) + lane_id();
        auto at = [&](int m, int n, int i) { return sums + dq_offset(m * 16, n * 8, HSP) + i * 32; };
        if (turn.number == 0)
            dq.each([&](float& element, int m, int n, int i) { *at(m, n, i) = element; });
        else
            dq.each([&](float& element, int m, int n, int i) { add_global(at(m, n, i), element); });
        if (!more) break;
        if constexpr (stages == 1) {
            __syncthreads();
            load_queries(step, stage);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) turn.pass();
    dk.each([&](float& element, int, int, int) { element *= scale / log2_e; });
    dk.store(k, warp_row, part * Tiles::head_columns);
    dv.store(v, warp_row, part * Tiles::head_columns);
    __syncthreads();
    // Registers are scarce: the addresses of these keys are recomputed rather than kept from the loads.
    int count = s.Tk - k_start;
    store_tile<keys, threads>(dkv + s.key(b, k_start, work.kv_head), k, 0, pinned(threadIdx.x), s.kv_row,
                              count, s.HS);
    store_tile<keys, threads>(dkv + s.value(b, k_start, work.kv_head), v, 0, threadIdx.x, s.kv_row, count,
                              s.HS);
}

// Converts the sums of a head (blockIdx.y) of a sequence (blockIdx.z) to dq: eight columns of a query per
// thread. A warp handles eight queries by 32 columns, whose sums fill whole cache lines.
__global__ void attention_dq_kernel(floatX* dqueries, BackwardScratch scratch, AttentionShape s) {
    int warp = (blockIdx.x * blockDim.x + threadIdx.x) / warp_size, parts = scratch.width / 32;
    int query = warp / parts * 8 + lane_id() / 4, column = warp % parts * 32 + lane_id() % 4 * 8;
    int h = blockIdx.y, b = blockIdx.z;
    if (query >= s.Tq || column >= s.HS) return;
    const float* sums = scratch.data + scratch.sums(b, h, query / 16 * 16) +
                        dq_offset(0, column, scratch.width) + query / 8 % 2 * 64 + query % 8 * 4;
    Vec<float, 4> even = load<4>(sums), odd = load<4>(sums + 32);
    Vec<floatX, 8> dq;
    for (int c = 0; c < 8; c++) dq[c] = floatX((c % 2 ? odd[c / 2] : even[c / 2]) * s.scale());
    floatX* to = dqueries + s.query(b, query, h) + column;
    constexpr int W = vec_width<floatX>;
    if (s.HS % 8 == 0) {
        for (int c = 0; c < 8; c += W) store(to + c, load<W>(&dq[c]));
    } else {
        for (int c = 0; c < 8 && column + c < s.HS; c++) to[c] = dq[c];
    }
}

// ----------------------------------------------------------------------------
// launching

inline void attention_mma_backward(Qkv<floatX> dqkv, float* scratch_data, const floatX* dout,
                                   Qkv<const floatX> qkv, const floatX* out, const float* lse,
                                   const AttentionShape& s, cudaStream_t stream,
                                   const AttentionCard& card = attention_card()) {
    with_head_width(s.HS, [&](auto HSP) {
        BackwardScratch scratch(scratch_data, s, HSP);
        prepare_backward_scratch(scratch, dout, out, lse, s, stream);
        if (s.Tq < s.Tk) {
            cudaCheck(cudaMemset2DAsync(dqkv.keys, s.kv_row * sizeof(floatX), 0,
                                        2 * s.NKV * s.HS * sizeof(floatX), (size_t)s.B * s.Tk, stream));
        }
        auto with = [&](auto tiles) {
            using Tiles = decltype(tiles);
            launch(attention_backward_kernel<Tiles>, KeyTileWork<Tiles::keys, Tiles::queries>::tickets(s),
                   Tiles::threads, Tiles::shared_bytes, stream, dqkv.keys, scratch, dout, qkv, s,
                   s.scale() * log2_e, backward_section(s, card.multiprocessors));
        };
        constexpr int width = HSP;
        card.with_shared_bytes([&](auto bytes) { with(BackwardTilesFor<width, decltype(bytes)::value>{}); });
        constexpr int block = 256, part = 8;  // part: floats per thread
        launch(attention_dq_kernel, dim3(scratch.rows * HSP / part / block, s.NH, s.B), block, 0, stream,
               dqkv.queries, scratch, s);
    });
}

#endif
