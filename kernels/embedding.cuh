/*
Embedding: a row of the token table plus, with learned positions, a row of the position table.

    out[b, t, :] = wte[tokens[b, t], :] + wpe[t - doc_start[b, t], :]

out is (B, T, C), wte (V, C), wpe (T, C) or null; the backward pass needs tokens. doc_start (B, T) says where
in the row the document of a token begins: positions count from there, so a document looks the same wherever
it was packed. Null: they count from the beginning of the row.
Many tokens share a row of a table, so the backward pass would need atomics, whose order changes the sum.
Instead one worker adds up all that a row of a table receives, in a fixed order. For wte the host sorts the
tokens of a batch into buckets of the same one. For wpe the worker of a position walks through the batch and
leaps from one document to the next, as each has that position once at most.

Where the vocabulary is cut over several devices, a WordRange says which rows of the table are here. The other
words are zeros, so that the sum over the devices, of which one adds the positions, is the embedding.
*/
#pragma once

#include <algorithm>
#include <climits>

#include "kernels/common.cuh"

// The words whose rows a token table has: first .. first + count - 1.
struct WordRange {
    int first = 0, count = INT_MAX;

    HOST_DEVICE bool has(int word) const { return word >= first && word - first < count; }
    HOST_DEVICE size_t row(int word) const { return (size_t)(word - first); }
};

// Sorts the positions 0 .. N-1 by token, equal tokens by position: bucket k is order[starts[k]] ..
// order[starts[k+1] - 1]. Returns the number of buckets. A radix sort, one byte of the token at a time, that
// moves between the two outputs.
inline int bucket_tokens(int* order /* (N) */, int* starts /* (N + 1) */, const int* tokens /* (N) */,
                         int N) {
    for (int n = 0; n < N; n++) order[n] = n;
    int *from = order, *to = starts;
    for (int shift = 0; shift < 32; shift += 8) {
        auto digit = [=](int n) { return (uint32_t)tokens[n] >> shift & 255; };
        int ends[257] = {};
        for (int n = 0; n < N; n++) ends[digit(n) + 1]++;
        for (int d = 0; d < 256; d++) ends[d + 1] += ends[d];
        for (int i = 0; i < N; i++) to[ends[digit(from[i])]++] = from[i];
        std::swap(from, to);
    }
    int buckets = 0;
    for (int i = 0; i < N; i++) {
        if (i == 0 || tokens[order[i]] != tokens[order[i - 1]]) starts[buckets++] = i;
    }
    starts[buckets] = N;
    return buckets;
}

// The position of token n = b * T + t.
HOST_DEVICE inline int position_of(int n, const int* doc_start, int T) {
    return n % T - (doc_start ? doc_start[n] : 0);
}

// The first place after n, itself at position `at`, where position p can be: in this document if p is still
// to come, else in one that begins after n at the earliest.
HOST_DEVICE inline int next_candidate(int p, int n, int at) {
    return n + (at < p ? p - at : p + 1);
}

// ----------------------------------------------------------------------------
// CPU

inline void embedding_forward_cpu(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe,
                                  const int* doc_start, int B, int T, int C, WordRange words) {
#pragma omp parallel for
    for (int n = 0; n < B * T; n++) {
        floatX* row = out + (size_t)n * C;
        const floatX *token = words.has(tokens[n]) ? wte + words.row(tokens[n]) * C : nullptr,
                     *position = wpe ? wpe + (size_t)position_of(n, doc_start, T) * C : nullptr;
        if (token && position)
            for (int c = 0; c < C; c++) row[c] = floatX(float(token[c]) + float(position[c]));
        else if (token || position)
            std::copy_n(token ? token : position, C, row);
        else
            std::fill_n(row, C, floatX(0.0f));
    }
}

inline void embedding_backward_cpu(float* dwte, float* dwpe, const floatX* dout, const int* tokens,
                                   const int* order, const int* starts, int buckets, const int* doc_start,
                                   int B, int T, int C, WordRange words) {
    auto add_row = [=](float* to, int n) {
        const floatX* row = dout + (size_t)n * C;
#pragma omp simd
        for (int c = 0; c < C; c++) to[c] += float(row[c]);
    };
#pragma omp parallel for schedule(dynamic, 16)
    for (int k = 0; k < buckets; k++) {
        int word = tokens[order[starts[k]]];
        if (!words.has(word)) continue;
        float* to = dwte + words.row(word) * C;
        for (int i = starts[k]; i < starts[k + 1]; i++) add_row(to, order[i]);
    }
    if (!dwpe) return;
    if (!doc_start) {
#pragma omp parallel for
        for (int t = 0; t < T; t++) {
            for (int b = 0; b < B; b++) add_row(dwpe + (size_t)t * C, b * T + t);
        }
        return;
    }
    // all documents have the first positions, and few the last
#pragma omp parallel for schedule(dynamic, 16)
    for (int p = 0; p < T; p++) {
        for (int n = p; n < B * T;) {
            int at = position_of(n, doc_start, T);
            if (at == p) add_row(dwpe + (size_t)p * C, n);
            n = next_candidate(p, n, at);
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr int embedding_block = 256;

// A row of blocks for each position, a thread for W neighbouring channels.
template <int W>
__global__ void embedding_forward_kernel(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe,
                                         const int* doc_start, int T, int C, WordRange words) {
    int c = (int)(blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (c >= C) return;
    size_t n = blockIdx.x;
    Vec<floatX, W> sum = {};
    if (words.has(tokens[n])) sum = load<W>(wte + words.row(tokens[n]) * C + c);
    if (wpe) {
        auto position = load<W>(wpe + (size_t)position_of((int)n, doc_start, T) * C + c);
        for (int k = 0; k < W; k++) sum[k] = floatX(float(sum[k]) + float(position[k]));
    }
    store(out + n * C + c, sum);
}

template <int W>
__device__ void add_to(float (&sum)[W], const floatX* from) {
    auto values = load<W>(from);
    for (int k = 0; k < W; k++) sum[k] += float(values[k]);
}

// A row of a gradient is the work of a block of warps: each sums its share of the tokens, a lane W channels.
constexpr unsigned row_warps = 8;

// Adds the sums of the first `used` warps to the W channels at `to`, or nowhere if it is null. All threads of
// the block take part.
template <int W>
__device__ void add_warp_sums(float* to, const float (&sum)[W], int used) {
    __shared__ float sums[row_warps][W][warp_size];
    int lane = threadIdx.x, warp = threadIdx.y;
    for (int k = 0; k < W; k++) sums[warp][k][lane] = sum[k];
    __syncthreads();

    if (warp > 0 || !to) return;
    for (int k = 0; k < W; k++) {
        float total = 0;
        for (int w = 0; w < used; w++) total += sums[w][k][lane];
        to[k] += total;
    }
}

// A block for a bucket, of which each warp takes every 8th token.
template <int W>
__global__ void embedding_backward_kernel(float* dwte, const floatX* dout, const int* tokens,
                                          const int* order, const int* starts, int C, WordRange words) {
    int lane = threadIdx.x, warp = threadIdx.y;
    int start = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    int c = (int)(blockIdx.y * warp_size + lane) * W, word = tokens[order[start]];
    if (!words.has(word)) return;

    float sum[W] = {};
    if (c < C) {
#pragma unroll 4
        for (int i = start + warp; i < end; i += row_warps) add_to<W>(sum, dout + (size_t)order[i] * C + c);
    }
    float* to = c < C ? dwte + words.row(word) * C + c : nullptr;
    add_warp_sums<W>(to, sum, min(end - start, (int)row_warps));
}

template <int W>
__global__ void position_backward_kernel(float* dwpe, const floatX* dout, int B, int T, int C) {
    int c = (int)(blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (c >= C) return;
    size_t t = blockIdx.x;
    float sum[W] = {};
#pragma unroll 4
    for (int b = 0; b < B; b++) add_to<W>(sum, dout + (b * (size_t)T + t) * C + c);
    for (int k = 0; k < W; k++) dwpe[t * C + c + k] += sum[k];
}

// A block for a position, of which each warp looks through an equal part of the batch: 32 tokens at a glance,
// then from the last of them to where the position can be next.
template <int W>
__global__ void document_position_backward_kernel(float* dwpe, const floatX* dout, const int* doc_start,
                                                  int N, int T, int C) {
    int lane = threadIdx.x, warp = threadIdx.y, p = blockIdx.x;
    int c = (int)(blockIdx.y * warp_size + lane) * W;
    int part = ceil_div(N, row_warps), n = warp * part, end = min(n + part, N);

    float sum[W] = {};
    while (n < end) {
        int at = n + lane < end ? position_of(n + lane, doc_start, T) : -1;
        for (unsigned found = __ballot_sync(~0u, at == p); found; found &= found - 1) {
            if (c < C) add_to<W>(sum, dout + (size_t)(n + __ffs((int)found) - 1) * C + c);
        }
        n = next_candidate(p, n + warp_size - 1, __shfl_sync(~0u, at, warp_size - 1));
    }
    add_warp_sums<W>(c < C ? dwpe + (size_t)p * C + c : nullptr, sum, row_warps);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// doc_start[b, t] <= t, and the token it points to begins its own document. A word that is not here counts as
// zeros: its row is that of the position alone, or 0 without positions.
inline void embedding_forward(floatX* out /* (B, T, C) */, const int* tokens /* (B, T) */,
                              const floatX* wte /* (words, C) */, const floatX* wpe /* (T, C) or null */,
                              const int* doc_start /* (B, T) or null */, int B, int T, int C,
                              cudaStream_t stream, WordRange words = {}) {
    ON_DEVICE(stream, embedding_forward_cpu(out, tokens, wte, wpe, doc_start, B, T, C, words),
              with_vec_width<floatX>(C, [=](auto width) {
                  constexpr int W = width;
                  int threads = row_threads(C / W, embedding_block);
                  dim3 grid(B * T, ceil_div(C, threads * W));
                  launch(embedding_forward_kernel<W>, grid, threads, 0, stream, out, tokens, wte, wpe,
                         doc_start, T, C, words);
              }));
}

// order, starts and buckets are of bucket_tokens. dwpe gets the gradient of every token, dwte of those here.
inline void embedding_backward(float* dwte /* (words, C) += */, float* dwpe /* (T, C) +=, or null */,
                               const floatX* dout /* (B, T, C) */, const int* tokens /* (B, T) */,
                               const int* order /* (B*T) */, const int* starts /* (B*T + 1) */, int buckets,
                               const int* doc_start /* (B, T) or null */, int B, int T, int C,
                               cudaStream_t stream, WordRange words = {}) {
    ON_DEVICE(
        stream,
        embedding_backward_cpu(dwte, dwpe, dout, tokens, order, starts, buckets, doc_start, B, T, C, words),
        with_vec_width<floatX>(C, [=](auto width) {
            constexpr int W = width;
            dim3 grid(buckets, ceil_div(C, warp_size * W)), block(warp_size, row_warps);
            launch(embedding_backward_kernel<W>, grid, block, 0, stream, dwte, dout, tokens, order, starts, C,
                   words);
            if (!dwpe) return;
            if (doc_start) {
                grid.x = T;
                launch(document_position_backward_kernel<W>, grid, block, 0, stream, dwpe, dout, doc_start,
                       B * T, T, C);
                return;
            }
            int threads = row_threads(C / W, embedding_block);
            dim3 position_grid(T, ceil_div(C, threads * W));
            launch(position_backward_kernel<W>, position_grid, threads, 0, stream, dwpe, dout, B, T, C);
        }));
}
