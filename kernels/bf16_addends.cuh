/*
What ranks do with the addends of a sum that travel as bf16 (comm/gradient_sums.h):

    round_addends     out = bf16(inp)
    add_addends       out = out + inp[0] + inp[1] + ...     all but one, in this order, in fp32
    widen_sum         out = float(inp)

A bf16 is its bits. All arrays begin at multiples of 8 elements, and so are their sizes: a thread takes 8.
*/
#pragma once

#include "kernels/bf16_bits.h"
#include "kernels/common.cuh"

// Other ranks' addends, rank after rank: all but the one of `own`, whose place nothing is read from.
struct Addends {
    const uint16_t* at;  // (ranks, stride)
    size_t stride;
    int ranks, own;
};

// ----------------------------------------------------------------------------
// CPU

inline void round_addends_cpu(uint16_t* out, const float* inp, size_t n) {
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++) out[i] = float_to_bf16(inp[i]);
}

inline void add_addends_cpu(float* out, const Addends& addends, size_t n) {
    constexpr size_t block = 4096;  // of which the sums stay in the cache
#pragma omp parallel for if (n > block)
    for (size_t begin = 0; begin < n; begin += block) {
        size_t end = std::min(begin + block, n);
        for (int rank = 0; rank < addends.ranks; rank++) {
            if (rank == addends.own) continue;
            const uint16_t* inp = addends.at + rank * addends.stride;
#pragma omp simd
            for (size_t i = begin; i < end; i++) out[i] += bf16_to_float(inp[i]);
        }
    }
}

inline void widen_sum_cpu(float* out, const uint16_t* inp, size_t n) {
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++) out[i] = bf16_to_float(inp[i]);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned addends_block = 256;  // threads
constexpr int addends_width = 8;         // elements of each

__global__ void round_addends_kernel(uint16_t* out, const float* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * addends_width;
    if (i >= n) return;
    auto values = load<addends_width>(inp + i);
    Vec<uint16_t, addends_width> rounded;
    for (int k = 0; k < addends_width; k++) rounded[k] = float_to_bf16(values[k]);
    store(out + i, rounded);
}

__global__ void add_addends_kernel(float* out, Addends addends, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * addends_width;
    if (i >= n) return;
    auto sum = load<addends_width>(out + i);
    for (int rank = 0; rank < addends.ranks; rank++) {
        if (rank == addends.own) continue;
        auto more = load<addends_width>(addends.at + rank * addends.stride + i);
        for (int k = 0; k < addends_width; k++) sum[k] += bf16_to_float(more[k]);
    }
    store(out + i, sum);
}

__global__ void widen_sum_kernel(float* out, const uint16_t* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * addends_width;
    if (i >= n) return;
    auto values = load<addends_width>(inp + i);
    Vec<float, addends_width> widened;
    for (int k = 0; k < addends_width; k++) widened[k] = bf16_to_float(values[k]);
    store(out + i, widened);
}

inline unsigned addends_blocks(size_t n) {
    return ceil_div(n, (size_t)addends_block * addends_width);
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void round_addends(uint16_t* out /* (n) */, const float* inp /* (n) */, size_t n,
                          cudaStream_t stream) {
    if (n == 0) return;
    ON_DEVICE(stream, round_addends_cpu(out, inp, n),
              launch(round_addends_kernel, addends_blocks(n), addends_block, 0, stream, out, inp, n));
}

inline void add_addends(float* out /* (n) += */, const Addends& addends, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    ON_DEVICE(stream, add_addends_cpu(out, addends, n),
              launch(add_addends_kernel, addends_blocks(n), addends_block, 0, stream, out, addends, n));
}

inline void widen_sum(float* out /* (n) */, const uint16_t* inp /* (n) */, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    ON_DEVICE(stream, widen_sum_cpu(out, inp, n),
              launch(widen_sum_kernel, addends_blocks(n), addends_block, 0, stream, out, inp, n));
}
