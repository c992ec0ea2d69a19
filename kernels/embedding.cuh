/*
Embedding: a row of the token table plus, with learned positions, a row of the position table.

    out[b, t, :] = wte[tokens[b, t], :] + wpe[t, :]

out is (B, T, C), wte (V, C), wpe (T, C) or null; the backward pass needs tokens.
Many positions hold the same token, so the backward pass would need atomics, whose order changes the sum.
Instead the host sorts the positions into buckets of one token each, and one worker adds up a bucket in the
order of positions.
*/
#pragma once

#include <algorithm>

#include "kernels/common.cuh"

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

// ----------------------------------------------------------------------------
// CPU

inline void embedding_forward_cpu(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B,
                                  int T, int C) {
#pragma omp parallel for
    for (int n = 0; n < B * T; n++) {
        floatX* row = out + (size_t)n * C;
        const floatX *token = wte + (size_t)tokens[n] * C,
                     *position = wpe ? wpe + (size_t)(n % T) * C : nullptr;
        for (int c = 0; c < C; c++) row[c] = wpe ? floatX(float(token[c]) + float(position[c])) : token[c];
    }
}

inline void embedding_backward_cpu(float* dwte, float* dwpe, const floatX* dout, const int* tokens,
                                   const int* order, const int* starts, int buckets, int B, int T, int C) {
    auto add_row = [=](float* to, int n) {
        const floatX* row = dout + (size_t)n * C;
#pragma omp simd
        for (int c = 0; c < C; c++) to[c] += float(row[c]);
    };
#pragma omp parallel for schedule(dynamic, 16)
    for (int k = 0; k < buckets; k++) {
        float* to = dwte + (size_t)tokens[order[starts[k]]] * C;
        for (int i = starts[k]; i < starts[k + 1]; i++) add_row(to, order[i]);
    }
    if (!dwpe) return;
#pragma omp parallel for
    for (int t = 0; t < T; t++) {
        for (int b = 0; b < B; b++) add_row(dwpe + (size_t)t * C, b * T + t);
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned embedding_block = 256;

// A row of blocks for each position, a thread for W neighbouring channels.
template <int W>
__global__ void embedding_forward_kernel(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe,
                                         int T, int C) {
    int c = (int)(blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (c >= C) return;
    size_t n = blockIdx.x;
    auto sum = load<W>(wte + (size_t)tokens[n] * C + c);
    if (wpe) {
        auto position = load<W>(wpe + n % T * C + c);
        for (int k = 0; k < W; k++) sum[k] = floatX(float(sum[k]) + float(position[k]));
    }
    store(out + n * C + c, sum);
}

template <int W>
__device__ void add_to(float (&sum)[W], const floatX* from) {
    auto values = load<W>(from);
    for (int k = 0; k < W; k++) sum[k] += float(values[k]);
}

// The sum of a bucket by a block of warps: each takes every 8th position of the bucket, and a lane W
// channels.
constexpr unsigned bucket_warps = 8;

template <int W>
__global__ void embedding_backward_kernel(float* dwte, const floatX* dout, const int* tokens,
                                          const int* order, const int* starts, int C) {
    __shared__ float sums[bucket_warps][W][warp_size];
    int lane = threadIdx.x, warp = threadIdx.y;
    int start = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    int c = (int)(blockIdx.y * warp_size + lane) * W;

    float sum[W] = {};
    if (c < C) {
#pragma unroll 4
        for (int i = start + warp; i < end; i += bucket_warps)
            add_to<W>(sum, dout + (size_t)order[i] * C + c);
    }
    for (int k = 0; k < W; k++) sums[warp][k][lane] = sum[k];
    __syncthreads();

    if (warp > 0 || c >= C) return;
    int used = min(end - start, (int)bucket_warps);
    float* to = dwte + (size_t)tokens[order[start]] * C + c;
    for (int k = 0; k < W; k++) {
        float total = 0;
        for (int w = 0; w < used; w++) total += sums[w][k][lane];
        to[k] += total;
    }
}

template <int W>
__global__ void position_backward_kernel(float* dwpe, const floatX* dout, int B, int T, int C) {
    int c = (int)(blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (c >= C) return;
    size_t t = blockIdx.x;
    float sum[W] = {};
    for (int b = 0; b < B; b++) add_to<W>(sum, dout + (b * (size_t)T + t) * C + c);
    for (int k = 0; k < W; k++) dwpe[t * C + c + k] += sum[k];
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void embedding_forward(floatX* out /* (B, T, C) */, const int* tokens /* (B, T) */,
                              const floatX* wte /* (V, C) */, const floatX* wpe /* (T, C) or null */, int B,
                              int T, int C, cudaStream_t stream) {
    ON_DEVICE(stream, embedding_forward_cpu(out, tokens, wte, wpe, B, T, C),
              with_vec_width<floatX>(C, [=](auto width) {
                  constexpr int W = width;
                  dim3 grid(B * T, ceil_div((unsigned)C, embedding_block * W));
                  launch(embedding_forward_kernel<W>, grid, embedding_block, 0, stream, out, tokens, wte, wpe,
                         T, C);
              }));
}

// order, starts and buckets are of bucket_tokens.
inline void embedding_backward(float* dwte /* (V, C) += */, float* dwpe /* (T, C) +=, or null */,
                               const floatX* dout /* (B, T, C) */, const int* tokens /* (B, T) */,
                               const int* order /* (B*T) */, const int* starts /* (B*T + 1) */, int buckets,
                               int B, int T, int C, cudaStream_t stream) {
    ON_DEVICE(stream, embedding_backward_cpu(dwte, dwpe, dout, tokens, order, starts, buckets, B, T, C),
              with_vec_width<floatX>(C, [=](auto width) {
                  constexpr int W = width;
                  dim3 grid(buckets, ceil_div(C, warp_size * W)), block(warp_size, bucket_warps);
                  launch(embedding_backward_kernel<W>, grid, block, 0, stream, dwte, dout, tokens, order,
                         starts, C);
                  if (!dwpe) return;
                  dim3 position_grid(T, ceil_div((unsigned)C, embedding_block * W));
                  launch(position_backward_kernel<W>, position_grid, embedding_block, 0, stream, dwpe, dout,
                         B, T, C);
              }));
}
