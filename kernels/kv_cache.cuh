/*
Attention with a key/value cache, for text that is generated token by token: keys and values of earlier
positions are kept, so that a new token costs one query instead of a pass over the whole sequence.

    att_t = sum_j p_tj v_j,  p_tj = exp(s_tj) / sum_j exp(s_tj),  s_tj = q_t . k_j / sqrt(HS)

Query t of the T in qkv is at position past + t. j runs over the positions 0 .. past + t, or the last `window`
of them. The formula and the layout of qkv are those of attention.cuh, and the results agree up to rounding.
Texts of different lengths each have their own `past`; a text whose past is negative is skipped, and its
output is zero.

A cache (B, limit, 2, NKV, HS) belongs to one layer. Its row for a position, [NKV keys | NKV values], is the
end of that position's row of qkv, so new rows are copied as they are. Nothing is saved: there is no backward
pass.

When there are few queries, they have little to share, and the time is that of reading the cache once. So a
block handles one query of one head, and spreads the keys over its threads.
*/
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/attention_shape.h"
#include "kernels/common.cuh"
#include "kernels/fast_math.cuh"

struct KvCacheShape {
    AttentionShape attention;  // describes qkv and att, whose position t is position past + t of the text
    int limit, past;
    const int* pasts;  // (B), on the device; null: every text has the same `past`

    HOST_DEVICE int before(int b) const { return pasts ? pasts[b] : past; }

    HOST_DEVICE size_t row() const { return (size_t)2 * attention.NKV * attention.HS; }

    // Offsets into a cache: the row of a position, and in it the key and the value of a head. Positions are
    // row() apart.
    HOST_DEVICE size_t position(int b, int at) const { return ((size_t)b * limit + at) * row(); }
    HOST_DEVICE size_t key(int b, int at, int kv_head) const {
        return position(b, at) + (size_t)kv_head * attention.HS;
    }
    HOST_DEVICE size_t value(int b, int at, int kv_head) const { return key(b, at, attention.NKV + kv_head); }

    // The first position that the query at `position` sees.
    HOST_DEVICE int first(int position) const { return attention.first_key(0, position); }
};

// Returns the shape for T positions that follow `past` others. Throws Error if the cache has no room for
// them. pasts: on the device, one for each text; the caller ensures that there is room.
inline KvCacheShape kv_cache_shape(int B, int T, int limit, int past, int NH, int NKV, int HS, int window,
                                   const int* pasts = nullptr) {
    if (past < 0 || T > limit - past) {
        fail("key/value cache: no room for %d positions after %d; make it longer than %d", T, past, limit);
    }
    return {self_attention_shape(B, T, NH, NKV, HS, window, nullptr), limit, past, pasts};
}

// ----------------------------------------------------------------------------
// CPU

inline void kv_cache_append_cpu(floatX* cache, const floatX* qkv, const KvCacheShape& s) {
    const AttentionShape& a = s.attention;
#pragma omp parallel for collapse(2) if (a.B * a.Tk > 16)
    for (int b = 0; b < a.B; b++)
        for (int t = 0; t < a.Tk; t++) {
            if (s.before(b) >= 0)
                std::copy_n(in_rows(qkv, a).keys + a.key(b, t, 0), s.row(),
                            cache + s.position(b, s.before(b) + t));
        }
}

// One query of one head. It receives keys and values in tiles, keeps the largest score so far and sums
// relative to it, and rescales the sums when a larger score turns up.
struct CachedQuery {
    static constexpr int tile = 64;
    alignas(64) float q[max_head_size], sum[max_head_size];
    float largest, total;

    void begin(const floatX* query, float scale, int HS) {
        for (int c = 0; c < HS; c++) q[c] = scale * float(query[c]), sum[c] = 0;
        largest = -1e30f, total = 0;
    }

    // Consecutive keys are `row` elements apart, and so are consecutive values.
    void add_tile(const floatX* k, const floatX* v, size_t row, int count, int HS) {
        alignas(64) float p[tile];
        float before = largest;
        for (int j = 0; j < count; j++) {
            float score = 0;
#pragma omp simd reduction(+ : score)
            for (int c = 0; c < HS; c++) score += q[c] * float(k[j * row + c]);
            p[j] = score;
            largest = std::max(largest, score);
        }
        float shrink = fast_exp(before - largest), tile_total = 0;
#pragma omp simd reduction(+ : tile_total)
        for (int j = 0; j < count; j++) tile_total += p[j] = fast_exp(p[j] - largest);
        total = total * shrink + tile_total;
#pragma omp simd
        for (int c = 0; c < HS; c++) sum[c] *= shrink;
        for (int j = 0; j < count; j++) {
#pragma omp simd
            for (int c = 0; c < HS; c++) sum[c] += p[j] * float(v[j * row + c]);
        }
    }

    // Writes zeros if there were no positions.
    void finish(floatX* att, int HS) const {
        for (int c = 0; c < HS; c++) att[c] = floatX(total == 0 ? 0 : sum[c] / total);
    }
};

// Heads that share keys and values are processed together, up to this many, so that the cache is read once
// for them.
constexpr int heads_together = 4;

inline void kv_cache_attention_cpu(floatX* att, const floatX* qkv, const floatX* cache,
                                   const KvCacheShape& s) {
    const AttentionShape& a = s.attention;
    int parts = ceil_div(a.group(), heads_together);  // number of parts of the heads that share a key
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int b = 0; b < a.B; b++)
        for (int part = 0; part < a.NKV * parts; part++)
            for (int t = 0; t < a.Tq; t++) {
                int kv_head = part / parts, first = kv_head * a.group() + part % parts * heads_together;
                int heads = std::min(heads_together, (kv_head + 1) * a.group() - first);
                CachedQuery queries[heads_together];
                for (int i = 0; i < heads; i++) {
                    queries[i].begin(qkv + a.query(b, t, first + i), a.scale(), a.HS);
                }
                int past = s.before(b), end = past < 0 ? 0 : past + t + 1;
                for (int at = s.first(end - 1); at < end; at += CachedQuery::tile) {
                    int count = std::min(CachedQuery::tile, end - at);
                    for (int i = 0; i < heads; i++) {
                        queries[i].add_tile(cache + s.key(b, at, kv_head), cache + s.value(b, at, kv_head),
                                            s.row(), count, a.HS);
                    }
                }
                for (int i = 0; i < heads; i++) queries[i].finish(att + a.output(b, t, first + i), a.HS);
            }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr int kv_cache_block = 256;

// One block per row of qkv, W neighboring elements per thread.
template <int W>
__global__ void kv_cache_append_kernel(floatX* cache, const floatX* qkv, KvCacheShape s) {
    const AttentionShape& a = s.attention;
    int b = blockIdx.x / a.Tk, t = blockIdx.x % a.Tk;
    const floatX* from = in_rows(qkv, a).keys + a.key(b, t, 0);
    int past = s.before(b);
    if (past < 0) return;
    floatX* to = cache + s.position(b, past + t);
    for (size_t c = threadIdx.x * W; c < s.row(); c += blockDim.x * W) store(to + c, load<W>(from + c));
}

// Elements of a head that a lane holds, as vectors of W; neighboring lanes hold neighboring vectors.
constexpr int lane_elements = 8;

template <int W>
struct HeadSlice {
    static constexpr int vectors = lane_elements / W;
    Vec<floatX, W> at[vectors];

    __device__ static int column(int lane, int lanes, int vector) { return (vector * lanes + lane) * W; }

    // Loads a lane's part of a head of HS elements that `lanes` lanes share; zeros past its end, or if not
    // `there`.
    __device__ void load_from(const floatX* head, bool there, int lane, int lanes, int HS) {
        for (int i = 0; i < vectors; i++) {
            int c = column(lane, lanes, i);
            at[i] = there && c < HS ? load<W>(head + c) : Vec<floatX, W>{};
        }
    }

    __device__ float operator[](int i) const { return float(at[i / W][i % W]); }
};

// Grid (T, NH, B). A team of `lanes` neighboring lanes, a power of two, reads a key; the block's teams take
// positions in turn, several at a time, so that their loads overlap.
template <int W>
__global__ void __launch_bounds__(kv_cache_block)
    kv_cache_attention_kernel(floatX* att, const floatX* qkv, const floatX* cache, KvCacheShape s,
                              int lanes) {
    constexpr int warps = kv_cache_block / warp_size, at_a_time = 4;
    __shared__ float sums[warps][max_head_size];
    const AttentionShape& a = s.attention;
    int t = blockIdx.x, h = blockIdx.y, b = blockIdx.z, kv_head = h / a.group();
    int team = threadIdx.x / lanes, lane = threadIdx.x % lanes, teams = kv_cache_block / lanes;
    int past = s.before(b), end = past < 0 ? 0 : past + t + 1;
    const floatX* keys = cache + s.key(b, 0, kv_head);
    const floatX* values = cache + s.value(b, 0, kv_head);

    HeadSlice<W> q;
    q.load_from(qkv + a.query(b, t, h), true, lane, lanes, a.HS);
    float largest = -1e30f;  // finite: a team may have no position
    float total = 0, sum[lane_elements] = {};
    for (int start = s.first(end - 1); start < end; start += at_a_time * teams) {
        HeadSlice<W> k[at_a_time], v[at_a_time];
        for (int j = 0; j < at_a_time; j++) {
            int at = start + j * teams + team;
            k[j].load_from(keys + at * s.row(), at < end, lane, lanes, a.HS);
            v[j].load_from(values + at * s.row(), at < end, lane, lanes, a.HS);
        }
        float p[at_a_time] = {}, before = largest;
        for (int j = 0; j < at_a_time; j++) {
            for (int i = 0; i < lane_elements; i++) p[j] += q[i] * k[j][i];
            for (int offset = lanes / 2; offset > 0; offset /= 2) p[j] += __shfl_xor_sync(~0u, p[j], offset);
            p[j] = start + j * teams + team < end ? p[j] * a.scale() : -INFINITY;
            largest = fmaxf(largest, p[j]);
        }
        float shrink = expf(before - largest);
        total *= shrink;
        for (int i = 0; i < lane_elements; i++) sum[i] *= shrink;
        for (int j = 0; j < at_a_time; j++) {
            p[j] = expf(p[j] - largest);
            total += p[j];
            for (int i = 0; i < lane_elements; i++) sum[i] += p[j] * v[j][i];
        }
    }

    // Rescales the teams' sums to the largest score of all and adds them, first within each warp, then over
    // the warps.
    float shrink = expf(largest - block_max(largest));
    total = block_sum(lane == 0 ? total * shrink : 0.0f);
    for (int i = 0; i < lane_elements; i++) {
        sum[i] *= shrink;
        for (int offset = lanes; offset < warp_size; offset *= 2) {
            sum[i] += __shfl_xor_sync(~0u, sum[i], offset);
        }
        int c = HeadSlice<W>::column(lane, lanes, i / W) + i % W;
        if (team * lanes % warp_size == 0 && c < a.HS) sums[threadIdx.x / warp_size][c] = sum[i];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < a.HS; c += kv_cache_block) {
        float all = 0;
        for (int warp = 0; warp < warps; warp++) all += sums[warp][c];
        att[a.output(b, t, h) + c] = floatX(total == 0 ? 0 : all / total);
    }
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Writes keys and values of the positions past .. past + T - 1, which must be below `limit`.
inline void kv_cache_append(floatX* cache,      // (B, limit, 2, NKV, HS)
                            const floatX* qkv,  // (B, T, NH + 2*NKV, HS)
                            const KvCacheShape& shape, cudaStream_t stream) {
    const AttentionShape& a = shape.attention;
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(qkv, a.B, a.Tk, shape.row()),
                          .written = array_bytes(cache, a.B, a.Tk, shape.row())}),
              kv_cache_append_cpu(cache, qkv, shape), {
                  with_vec_width<floatX>(a.HS, [&](auto width) {
                      launch(kv_cache_append_kernel<width()>, a.B * a.Tk, kv_cache_block, 0, stream, cache,
                             qkv, shape);
                  });
              });
}

// The query at position past + t sees the positions 0 .. past + t of the cache, or the last `window` of them
// (0: no limit). Only the queries of qkv are read, so call kv_cache_append first. Any T works, but
// attention_forward is faster if past is 0 and T is about 64 or more.
inline void kv_cache_attention(floatX* att,          // (B, T, NH, HS)
                               const floatX* qkv,    // (B, T, NH + 2*NKV, HS)
                               const floatX* cache,  // (B, limit, 2, NKV, HS)
                               const KvCacheShape& shape, cudaStream_t stream) {
    const AttentionShape& a = shape.attention;
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(qkv, a.B, a.Tq, a.A()) +
                                  array_bytes(cache, a.B, shape.past + a.Tk, shape.row()),
                          .written = array_bytes(att, a.B, a.Tq, a.A())}),
              kv_cache_attention_cpu(att, qkv, cache, shape), {
                  int lanes = (int)std::bit_ceil((unsigned)ceil_div(a.HS, lane_elements));
                  with_vec_width<floatX>(a.HS, [&](auto width) {
                      launch(kv_cache_attention_kernel<width()>, dim3(a.Tq, a.NH, a.B), kv_cache_block, 0,
                             stream, att, qkv, cache, shape, lanes);
                  });
              });
}
