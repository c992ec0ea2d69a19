/*
Causal self-attention with grouped key/value heads, without a (T, T) matrix in memory (Dao, FlashAttention-2,
2023).

    out_i = sum_j p_ij v_j,  p_ij = exp(s_ij - lse_i),  s_ij = q_i . k_j / sqrt(HS),  lse_i = log sum_j
exp(s_ij)

where j runs over the keys that query i sees: those of its document, no more than `window`, none after i. A
block takes a tile of queries and goes over the keys in tiles. It keeps for each query the largest score so
far and the sums relative to it, and shrinks the sums when a larger score turns up.

Saved for the backward pass: qkv, out and lse. From these the probabilities come back tile by tile, and with
dp_ij = dout_i . v_j and ds_ij = p_ij (dp_ij - dout_i . out_i) / sqrt(HS)

    dv_j = sum_i p_ij dout_i,  dk_j = sum_i ds_ij q_i,  dq_i = sum_j ds_ij k_j

One kernel owns tiles of keys and sums over queries, another owns tiles of queries and sums over keys. Scores
are computed twice, but nothing is added atomically, and the bits are the same on every run.
*/
#pragma once

#include "kernels/attention_cpu.h"
#include "kernels/attention_shape.h"
#include "kernels/attention_tiles.cuh"
#include "kernels/common.cuh"

// ----------------------------------------------------------------------------
// CPU: attention_cpu.h

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

// Does every one of the queries [q, q + queries) see every one of the keys [k, k + keys)?
__device__ inline bool all_seen(const AttentionShape& s, int b, int q, int queries, int k, int keys) {
    return k + keys - 1 <= q && s.first_key(b, min(q + queries, s.T) - 1) <= k;
}

// Rows of queries and of keys in a tile of the forward kernel.
constexpr int forward_queries = attention_warps * 16;
template <int HSP>
constexpr int forward_keys = HSP <= 128 ? 64 : 32;

template <int HSP>
constexpr size_t forward_shared_bytes = sizeof(floatX) *
                                        ((forward_queries + 2 * forward_keys<HSP>)*tile_stride<HSP> +
                                         forward_queries * tile_stride<forward_keys<HSP>>);

// Grid (tiles of queries, NH, B). Each warp owns 16 queries; while it multiplies with one of k and v, the
// other arrives.
template <int HSP>
__global__ void attention_forward_kernel(floatX* out, float* lse, const floatX* qkv, AttentionShape s) {
    constexpr int queries = forward_queries, keys = forward_keys<HSP>;
    constexpr int stride = tile_stride<HSP>, p_stride = tile_stride<keys>;
    floatX* q = dynamic_shared<floatX>();  // (queries, HSP)
    floatX* k = q + queries * stride;      // (keys, HSP)
    floatX* v = k + keys * stride;         // (keys, HSP)
    int warp_row = threadIdx.x / warp_size * 16;
    floatX* warp_q = q + warp_row * stride;
    floatX* warp_p = v + keys * stride + warp_row * p_stride;  // (16, keys)

    int b = blockIdx.z, h = blockIdx.y, kv_head = h / s.group();
    int q_start = (gridDim.x - 1 - blockIdx.x) * queries;  // late tiles see more keys: they go first
    int q_end = min(q_start + queries, s.T);
    int k_start = s.first_key(b, q_start) / keys * keys;
    int query[2], first_key[2];  // of this thread's two rows
    for (int i = 0; i < 2; i++) {
        query[i] = q_start + warp_row + Fragment<keys>::row(2 * i);
        first_key[i] = s.first_key(b, min(query[i], s.T - 1));
    }
    auto load_keys = [&](int start) {
        load_tile<keys, HSP>(k, qkv + s.key(b, start, kv_head), s.qkv_row(), s.T - start, s.HS);
    };

    float scale = s.scale() * log2_e;     // powers of two from here on
    float largest[2] = {-1e30f, -1e30f};  // finite: a query may see nothing of its first tile of keys
    float total[2] = {0.0f, 0.0f};
    Fragment<HSP> sum;
    load_tile<queries, HSP>(q, qkv + s.query(b, q_start, h), s.qkv_row(), s.T - q_start, s.HS);
    load_keys(k_start);
    for (; k_start < q_end; k_start += keys) {
        load_tile_wait();  // k is there, and v no longer in use
        load_tile<keys, HSP>(v, qkv + s.value(b, k_start, kv_head), s.qkv_row(), s.T - k_start, s.HS);
        Fragment<keys> p;
        warp_product<Right::columns, HSP>(p, warp_q, stride, k, stride);

        bool masked = !all_seen(s, b, q_start, queries, k_start, keys);
        float before[2] = {largest[0], largest[1]};
        for (int n = 0; n < keys / 8; n++)
            for (int i = 0; i < 4; i++) {
                int key = k_start + p.column(n, i);
                bool seen = !masked || (first_key[i / 2] <= key && key <= query[i / 2]);
                p.at[n][i] = seen ? p.at[n][i] * scale : -INFINITY;
                largest[i / 2] = fmaxf(largest[i / 2], p.at[n][i]);
            }
        float shrink[2];
        for (int i = 0; i < 2; i++) {
            largest[i] = quad_max(largest[i]);
            shrink[i] = exp2f(before[i] - largest[i]);
            total[i] *= shrink[i];
        }
        for (int n = 0; n < keys / 8; n++)
            for (int i = 0; i < 4; i++) {
                p.at[n][i] = exp2f(p.at[n][i] - largest[i / 2]);
                total[i / 2] += p.at[n][i];
            }
        for (int n = 0; n < HSP / 8; n++)
            for (int i = 0; i < 4; i++) sum.at[n][i] *= shrink[i / 2];
        p.store(warp_p, p_stride, 1.0f, 1.0f);

        load_tile_wait();  // v is there, and k no longer in use
        if (k_start + keys < q_end) load_keys(k_start + keys);
        warp_product<Right::rows, keys>(sum, warp_p, p_stride, v, stride);
    }

    for (int i = 0; i < 2; i++) {
        total[i] = quad_sum(total[i]);
        if (threadIdx.x % 4 == 0 && query[i] < s.T) {
            lse[s.lse(b, query[i], h)] = largest[i] / log2_e + logf(total[i]);
        }
    }
    sum.store(warp_q, stride, 1 / total[0], 1 / total[1]);
    __syncthreads();
    store_tile<queries, HSP>(out + s.output(b, q_start, h), q, s.out_row(), s.T - q_start, s.HS);
}

// dot (B, NH, T) = dout . out of each query and head, by one warp each.
__global__ void attention_dot_kernel(float* dot, const floatX* dout, const floatX* out, AttentionShape s) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / warp_size;  // (B, T, NH)
    if (i >= (size_t)s.B * s.T * s.NH) return;
    float sum = 0;
    for (int c = threadIdx.x % warp_size; c < s.HS; c += warp_size) {
        sum += float(dout[i * s.HS + c]) * float(out[i * s.HS + c]);
    }
    sum = warp_sum(sum);
    int h = i % s.NH, t = i / s.NH % s.T, b = i / s.NH / s.T;
    if (threadIdx.x % warp_size == 0) dot[s.lse(b, t, h)] = sum;
}

// The four warps of a backward kernel: each owns 16 rows, and where the block owns fewer than 64, a part of
// the columns of every product. Column parts meet in shared memory.
template <int HSP>
struct BackwardLayout {
    static constexpr int owned = HSP <= 128 ? 64 : 32;
    static constexpr int other = HSP <= 128 && sizeof(floatX) == 2 ? 64 : 32;
    static constexpr int parts = attention_warps * 16 / owned;
    static constexpr int score_columns = other / parts, head_columns = HSP / parts;
    static constexpr int stride = tile_stride<HSP>, score_stride = tile_stride<other>;
    static constexpr size_t shared_bytes =
        (2 * (owned + other) * stride + 2 * owned * score_stride) * sizeof(floatX) +
        3 * other * sizeof(float);

    using Scores = Fragment<score_columns>;
    using Sums = Fragment<head_columns>;

    __device__ static int row() { return threadIdx.x / warp_size / parts * 16; }
    __device__ static int part() { return threadIdx.x / warp_size % parts; }

    // This warp's part of a (owned, other) product of tiles, rows of both being heads.
    __device__ static void add_scores(Scores& sum, const floatX* a, const floatX* b) {
        const floatX* columns = b + part() * score_columns * stride;
        warp_product<Right::columns, HSP>(sum, a + row() * stride, stride, columns, stride);
    }

    // This warp's part of a (owned, other) tile of scores times an (other, HSP) tile of heads.
    __device__ static void add_heads(Sums& sum, const floatX* scores, const floatX* b) {
        const floatX* rows = scores + row() * score_stride;
        warp_product<Right::rows, other>(sum, rows, score_stride, b + part() * head_columns, stride);
    }

    __device__ static void store_scores(floatX* to, const Scores& scores) {
        scores.store(to + row() * score_stride + part() * score_columns, score_stride, 1.0f, 1.0f);
    }

    // Writes the block's rows of a gradient, by way of a tile that is no longer in use.
    __device__ static void store_heads(floatX* to, floatX* tile, const Sums& sums, float scale,
                                       int row_stride, int count, int HS) {
        sums.store(tile + row() * stride + part() * head_columns, stride, scale, scale);
        __syncthreads();
        store_tile<owned, HSP>(to, tile, row_stride, count, HS);
    }
};

// dk and dv. Grid (tiles of keys, NKV, B): early tiles, which more queries see, go first.
template <int HSP>
__global__ void attention_backward_keys_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv,
                                               const float* lse, const float* dot, AttentionShape s) {
    using Layout = BackwardLayout<HSP>;
    constexpr int keys = Layout::owned, queries = Layout::other;
    floatX* k = dynamic_shared<floatX>();           // (keys, HSP)
    floatX* v = k + keys * Layout::stride;          // (keys, HSP)
    floatX* q = v + keys * Layout::stride;          // (queries, HSP)
    floatX* dout_q = q + queries * Layout::stride;  // (queries, HSP)
    floatX* p = dout_q + queries * Layout::stride;  // (keys, queries)
    floatX* ds = p + keys * Layout::score_stride;   // (keys, queries)
    float* query_lse = (float*)(ds + keys * Layout::score_stride);
    float* query_dot = query_lse + queries;
    int* query_first = (int*)(query_dot + queries);

    int b = blockIdx.z, kv_head = blockIdx.y, k_start = blockIdx.x * keys;
    load_tile<keys, HSP>(k, qkv + s.key(b, k_start, kv_head), s.qkv_row(), s.T - k_start, s.HS);
    load_tile<keys, HSP>(v, qkv + s.value(b, k_start, kv_head), s.qkv_row(), s.T - k_start, s.HS);
    typename Layout::Sums dk, dv;
    for (int h = kv_head * s.group(); h < (kv_head + 1) * s.group(); h++) {
        for (int q_start = k_start; q_start < s.T; q_start += queries) {
            if (s.first_key(b, q_start) >= k_start + keys) break;
            load_tile<queries, HSP>(q, qkv + s.query(b, q_start, h), s.qkv_row(), s.T - q_start, s.HS);
            load_tile<queries, HSP>(dout_q, dout + s.output(b, q_start, h), s.out_row(), s.T - q_start, s.HS);
            for (int i = threadIdx.x; i < queries; i += attention_threads) {
                bool valid = q_start + i < s.T;
                query_lse[i] = valid ? lse[s.lse(b, q_start + i, h)] * log2_e : INFINITY;
                query_dot[i] = valid ? dot[s.lse(b, q_start + i, h)] : 0;
                query_first[i] = valid ? s.first_key(b, q_start + i) : 0;
            }
            load_tile_wait();

            typename Layout::Scores scores, dscores;
            Layout::add_scores(scores, k, q);
            Layout::add_scores(dscores, v, dout_q);
            bool masked = !all_seen(s, b, q_start, queries, k_start, keys);
            for (int n = 0; n < Layout::score_columns / 8; n++)
                for (int i = 0; i < 4; i++) {
                    int query = Layout::part() * Layout::score_columns + scores.column(n, i);
                    int key = k_start + Layout::row() + scores.row(i);
                    bool seen = !masked || (query_first[query] <= key && key <= q_start + query);
                    float exponent = scores.at[n][i] * (s.scale() * log2_e) - query_lse[query];
                    scores.at[n][i] = seen ? exp2f(exponent) : 0.0f;
                    dscores.at[n][i] = scores.at[n][i] * (dscores.at[n][i] - query_dot[query]);
                }
            Layout::store_scores(p, scores);
            Layout::store_scores(ds, dscores);
            __syncthreads();
            Layout::add_heads(dv, p, dout_q);
            Layout::add_heads(dk, ds, q);
            __syncthreads();  // before the next tile of queries takes the place of this one
        }
    }
    int count = s.T - k_start;
    Layout::store_heads(dqkv + s.key(b, k_start, kv_head), k, dk, s.scale(), s.qkv_row(), count, s.HS);
    Layout::store_heads(dqkv + s.value(b, k_start, kv_head), v, dv, 1.0f, s.qkv_row(), count, s.HS);
}

// dq. Grid (tiles of queries, NH, B), late tiles first.
template <int HSP>
__global__ void attention_backward_queries_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv,
                                                  const float* lse, const float* dot, AttentionShape s) {
    using Layout = BackwardLayout<HSP>;
    constexpr int queries = Layout::owned, keys = Layout::other;
    floatX* q = dynamic_shared<floatX>();           // (queries, HSP)
    floatX* dout_q = q + queries * Layout::stride;  // (queries, HSP)
    floatX* k = dout_q + queries * Layout::stride;  // (keys, HSP)
    floatX* v = k + keys * Layout::stride;          // (keys, HSP)
    floatX* ds = v + keys * Layout::stride;         // (queries, keys)

    int b = blockIdx.z, h = blockIdx.y, kv_head = h / s.group();
    int q_start = (gridDim.x - 1 - blockIdx.x) * queries, q_end = min(q_start + queries, s.T);
    int query[2], first_key[2];  // of this thread's two rows
    float row_lse[2], row_dot[2];
    for (int i = 0; i < 2; i++) {
        query[i] = q_start + Layout::row() + Layout::Scores::row(2 * i);
        int t = min(query[i], s.T - 1);
        first_key[i] = s.first_key(b, t);
        row_lse[i] = lse[s.lse(b, t, h)] * log2_e;
        row_dot[i] = dot[s.lse(b, t, h)];
    }
    load_tile<queries, HSP>(q, qkv + s.query(b, q_start, h), s.qkv_row(), s.T - q_start, s.HS);
    load_tile<queries, HSP>(dout_q, dout + s.output(b, q_start, h), s.out_row(), s.T - q_start, s.HS);
    typename Layout::Sums dq;
    for (int k_start = s.first_key(b, q_start) / keys * keys; k_start < q_end; k_start += keys) {
        load_tile<keys, HSP>(k, qkv + s.key(b, k_start, kv_head), s.qkv_row(), s.T - k_start, s.HS);
        load_tile<keys, HSP>(v, qkv + s.value(b, k_start, kv_head), s.qkv_row(), s.T - k_start, s.HS);
        load_tile_wait();

        typename Layout::Scores scores, dscores;
        Layout::add_scores(scores, q, k);
        Layout::add_scores(dscores, dout_q, v);
        bool masked = !all_seen(s, b, q_start, queries, k_start, keys);
        for (int n = 0; n < Layout::score_columns / 8; n++)
            for (int i = 0; i < 4; i++) {
                int key = k_start + Layout::part() * Layout::score_columns + scores.column(n, i);
                bool seen = !masked || (first_key[i / 2] <= key && key <= query[i / 2]);
                float exponent = scores.at[n][i] * (s.scale() * log2_e) - row_lse[i / 2];
                float probability = seen ? exp2f(exponent) : 0.0f;
                dscores.at[n][i] = probability * (dscores.at[n][i] - row_dot[i / 2]);
            }
        Layout::store_scores(ds, dscores);
        __syncthreads();
        Layout::add_heads(dq, ds, k);
        __syncthreads();  // before the next tile of keys takes the place of this one
    }
    Layout::store_heads(dqkv + s.query(b, q_start, h), q, dq, s.scale(), s.qkv_row(), s.T - q_start, s.HS);
}

// Calls f with the smallest of the compiled widths that holds HS, as std::integral_constant.
template <typename F>
void with_head_width(int HS, F&& f) {
    if (HS <= 32)
        f(std::integral_constant<int, 32>{});
    else if (HS <= 64)
        f(std::integral_constant<int, 64>{});
    else if (HS <= 96)
        f(std::integral_constant<int, 96>{});
    else if (HS <= 128)
        f(std::integral_constant<int, 128>{});
    else if (HS <= 192)
        f(std::integral_constant<int, 192>{});
    else
        f(std::integral_constant<int, 256>{});
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Floats of scratch that attention_backward needs.
inline size_t attention_backward_scratch(int B, int T, int NH, int NKV, int HS) {
#ifdef DEVICE_CPU
    (void)NH;
    return attention_backward_scratch_cpu(B, T, NKV, HS);
#else
    (void)NKV, (void)HS;
    return (size_t)B * NH * T;
#endif
}

// Position i of a sequence attends to max(doc_start[i], i - window + 1) ... i (window 0: no limit; doc_start
// null: 0). doc_start[i] <= i, and it never decreases along a sequence. Query head h reads key/value head h /
// (NH / NKV).
inline void attention_forward(floatX* out,           // (B, T, NH, HS)
                              float* lse,            // (B, NH, T)
                              const floatX* qkv,     // (B, T, NH + 2*NKV, HS)
                              const int* doc_start,  // (B, T), nullable
                              int B, int T, int NH, int NKV, int HS, int window, cudaStream_t stream) {
    AttentionShape shape = attention_shape(B, T, NH, NKV, HS, window, doc_start);
    ON_DEVICE(stream, attention_forward_cpu(out, lse, qkv, shape), with_head_width(HS, [&](auto HSP) {
                  dim3 grid(ceil_div(T, forward_queries), NH, B);
                  launch(attention_forward_kernel<HSP>, grid, attention_threads, forward_shared_bytes<HSP>,
                         stream, out, lse, qkv, shape);
              }));
}

// out and lse are those of the forward pass.
inline void attention_backward(floatX* dqkv,          // (B, T, NH + 2*NKV, HS)
                               float* scratch,        // (attention_backward_scratch(B, T, NH, NKV, HS))
                               const floatX* dout,    // (B, T, NH, HS)
                               const floatX* qkv,     // (B, T, NH + 2*NKV, HS)
                               const floatX* out,     // (B, T, NH, HS)
                               const float* lse,      // (B, NH, T)
                               const int* doc_start,  // (B, T), nullable
                               int B, int T, int NH, int NKV, int HS, int window, cudaStream_t stream) {
    AttentionShape shape = attention_shape(B, T, NH, NKV, HS, window, doc_start);
    ON_DEVICE(stream, attention_backward_cpu({dqkv, dout, qkv, out, lse, shape}, scratch), {
        float* dot = scratch;  // (B, NH, T)
        size_t rows = (size_t)B * T * NH;
        launch(attention_dot_kernel, ceil_div(rows, attention_warps), attention_threads, 0, stream, dot, dout,
               out, shape);
        with_head_width(HS, [&](auto HSP) {
            using Layout = BackwardLayout<HSP>;
            unsigned tiles = ceil_div(T, Layout::owned);
            launch(attention_backward_keys_kernel<HSP>, dim3(tiles, NKV, B), attention_threads,
                   Layout::shared_bytes, stream, dqkv, dout, qkv, lse, dot, shape);
            launch(attention_backward_queries_kernel<HSP>, dim3(tiles, NH, B), attention_threads,
                   Layout::shared_bytes, stream, dqkv, dout, qkv, lse, dot, shape);
        });
    });
}
