/*
The forward pass of attention on mma.sync. Formula and layout: attention.cuh.

A block handles a tile of queries and visits the keys tile by tile. For each query it keeps the largest score
so far and the sums relative to it, and rescales the sums when a larger score turns up. In bf16 the
probabilities never leave the registers: a product leaves its result where the next one expects its left
operand. In float they go through shared memory.
*/
#pragma once

#include "kernels/attention_shape.h"
#include "kernels/attention_tiles.cuh"
#include "kernels/common.cuh"

#ifndef DEVICE_CPU

// Each warp owns 32 queries, or 16 if the sums of 32 would not fit in its registers. Two blocks share a
// multiprocessor: one multiplies while the other computes exponentials. Wide heads in float have small tiles,
// which leave registers for addresses and need no more shared memory than every card has.
template <int width, int tile_keys>
struct ForwardTiles {
    static constexpr int HSP = width, keys = tile_keys;
    static constexpr bool wide = HSP > 128;
    static constexpr int warps = tensor_cores || !wide ? 4 : 2, threads = warps * warp_size;
    static constexpr int warp_queries = tensor_cores && !wide ? 32 : 16, queries = warps * warp_queries;
    static constexpr size_t shared_bytes =
        sizeof(floatX) * ((queries + 2 * keys) * HSP + (tensor_cores ? 0 : queries * keys));
    static_assert(shared_bytes <= least_shared_bytes);
};

// Returns the tiles for a card whose blocks may have `most_bytes` of shared memory: the large ones if two
// such blocks fit on a multiprocessor, else smaller ones.
template <int HSP, size_t most_bytes>
constexpr auto forward_tiles() {
    constexpr int keys = !tensor_cores ? (HSP > 128 ? 16 : 32) : HSP > 192 ? 32 : HSP > 64 ? 64 : 128;
    using Large = ForwardTiles<HSP, keys>;
    constexpr size_t of_two = 2 * (Large::shared_bytes + reserved_shared_bytes);
    constexpr bool fits = !tensor_cores || of_two <= most_bytes + reserved_shared_bytes;
    return std::conditional_t<fits, Large, ForwardTiles<HSP, 32>>();
}

// Grid (tiles of queries, NH, B). `scale` turns scores into base-2 exponents. Keys load during the product
// with the previous tile's values, and values during the product with the keys.
template <typename Tiles>
__global__ void __launch_bounds__(Tiles::threads, 2)
    attention_forward_kernel(floatX* out, float* lse, float* amax, Qkv<const floatX> qkv, AttentionShape s,
                             float scale) {
    constexpr int HSP = Tiles::HSP, queries = Tiles::queries, keys = Tiles::keys, threads = Tiles::threads;
    Tile<HSP> q{dynamic_shared<floatX>()};  // (queries, HSP)
    Tile<HSP> k{q.data + queries * HSP};    // (keys, HSP)
    Tile<HSP> v{k.data + keys * HSP};       // (keys, HSP)

    int b = blockIdx.z, h = blockIdx.y, kv_head = h / s.group();
    int q_start = (gridDim.x - 1 - blockIdx.x) * queries;  // late tiles see more keys: they go first
    int q_end = min(q_start + queries, s.Tq);
    int k_start = s.first_key(b, q_start) / keys * keys, last_first = s.first_key(b, q_end - 1);
    int warp_row = threadIdx.x / warp_size * Tiles::warp_queries;
    // Registers are scarce: the addresses of keys are recomputed for each tile.
    auto load_keys = [&](Tile<HSP> to, size_t from) {
        load_tile<keys, threads>(to, qkv.keys + from, s.kv_row, s.keys_end() - k_start, s.HS,
                                 pinned(threadIdx.x));
        cp_async_commit();
    };
    auto arrived = [] {
        cp_async_wait<0>();
        __syncthreads();
    };

    using Scores = Fragment<Tiles::warp_queries, keys>;
    using Rows = float[Tiles::warp_queries / 16][2];
    Rows largest, total;  // maxima of scores times scale, and sums of exponentials
    Scores::each_row([&](int m, int i) {
        largest[m][i] = -1e30f;  // finite: a query may see nothing of its first tile of keys
        total[m][i] = 0;
    });
    Fragment<Tiles::warp_queries, HSP> sum;
    load_tile<queries, threads>(q, qkv.queries + s.query(b, q_start, h), s.q_row, s.Tq - q_start, s.HS);
    load_keys(k, s.key(b, k_start, pinned(kv_head)));
    while (true) {
        arrived();  // k; and v is no longer in use
        load_keys(v, s.value(b, k_start, pinned(kv_head)));
        Scores p;
        warp_product<Right::columns, HSP>(
            p, [&](Left& left, int m, int at) { left.load(q, warp_row + m * 16, at); }, k);
        arrived();                   // v; and k is no longer in use
        int start = k_start - s.q0;  // k_start as a query index
        bool masked = !all_seen(q_start, last_first - s.q0, start, keys), last = start + keys >= q_end;
        k_start += keys;
        if (!last) load_keys(k, s.key(b, k_start, pinned(kv_head)));

        if (masked) {
            Scores::each_row([&](int m, int i) {
                int query = q_start + warp_row + p.row(m, 2 * i);
                int first = s.first_key(b, min(query, s.Tq - 1)) - s.q0 - start - p.column(0, 0);
                int seen = query - start - p.column(0, 0);
#pragma unroll
                for (int n = 0; n < keys / 8; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        if (n * 8 + c < first || n * 8 + c > seen) p.at[m][n][2 * i + c] = -INFINITY;
                    }
            });
        }
        Rows shrink;
        Scores::each_row([&](int m, int i) {
            float here = -INFINITY, before = largest[m][i];
#pragma unroll
            for (int n = 0; n < keys / 8; n++)
                here = fmaxf(here, fmaxf(p.at[m][n][2 * i], p.at[m][n][2 * i + 1]));
            largest[m][i] = fmaxf(before, quad_max(here) * scale);
            shrink[m][i] = exp2_approx(before - largest[m][i]);
            total[m][i] *= shrink[m][i];
        });
        p.each([&](float& element, int m, int, int i) {
            element = exp2_approx(element * scale - largest[m][i / 2]);
            total[m][i / 2] += element;
        });
        sum.each([&](float& element, int m, int, int i) { element *= shrink[m][i / 2]; });
        if constexpr (tensor_cores) {
            warp_product<Right::rows, keys>(
                sum, [&](auto& left, int m, int at) { left.take(p, m, at); }, v);
        } else {
            Tile<keys> p_tile{v.data + keys * HSP};  // (queries, keys)
            p.store(p_tile, warp_row, 0);
            __syncwarp();
            warp_product<Right::rows, keys>(
                sum, [&](Left& left, int m, int at) { left.load(p_tile, warp_row + m * 16, at); }, v);
        }
        if (last) break;
    }

    Rows inverse;
    Scores::each_row([&](int m, int i) {
        int query = q_start + warp_row + sum.row(m, 2 * i);
        float all = quad_sum(total[m][i]);
        inverse[m][i] = 1 / all;
        if (lane_id() % 4 == 0 && query < s.Tq) lse[s.lse(b, query, h)] = largest[m][i] / log2_e + logf(all);
    });
    sum.each([&](float& element, int m, int, int i) { element *= inverse[m][i / 2]; });
    sum.store(q, warp_row, 0);  // no other warp reads these rows
    __syncwarp();
    int start = q_start + warp_row;
    store_tile<Tiles::warp_queries, warp_size>(out + s.output(b, start, h), q, warp_row, lane_id(),
                                               s.out_row(), s.Tq - start, s.HS)
        .keep(amax);
}

inline void attention_mma_forward(floatX* out, float* lse, float* amax, Qkv<const floatX> qkv,
                                  const AttentionShape& s, cudaStream_t stream,
                                  const AttentionCard& card = attention_card()) {
    with_head_width(s.HS, [&](auto HSP) {
        constexpr int width = HSP;
        card.with_shared_bytes([&](auto bytes) {
            using Tiles = decltype(forward_tiles<width, decltype(bytes)::value>());
            launch(attention_forward_kernel<Tiles>, dim3(ceil_div(s.Tq, Tiles::queries), s.NH, s.B),
                   Tiles::threads, Tiles::shared_bytes, stream, out, lse, amax, qkv, s, s.scale() * log2_e);
        });
    });
}

#endif
