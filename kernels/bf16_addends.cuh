/*
Operations on the addends of a sum that ranks exchange as bf16 (comm/gradient_sums.h):

    round_addends     out = bf16(inp)
    add_addends       out = out + inp[0] + inp[1] + ...     without inp[own], in this order, in fp32
    widen_sum         out = float(inp)

A bf16 is stored as its bits. Arrays are aligned to 8 elements, and their sizes are multiples of 8: each
thread handles 8.
*/
#pragma once

#include "kernels/bf16_bits.h"
#include "kernels/common.cuh"

// The other ranks' addends, in the order of ranks. The place of rank `own` is never read.
struct Addends {
    const uint16_t* at;  // (ranks, stride)
    size_t stride;
    int ranks, own;
};

HOST_DEVICE inline uint16_t converted(float value) {
    return float_to_bf16(value);
}
HOST_DEVICE inline float converted(uint16_t bits) {
    return bf16_to_float(bits);
}

// ----------------------------------------------------------------------------
// CPU

template <typename To, typename From>
void convert_addends_cpu(To* out, const From* inp, size_t n) {
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++) out[i] = converted(inp[i]);
}

inline void add_addends_cpu(float* out, const Addends& addends, size_t n) {
    constexpr size_t block = 4096;  // sums that stay in the cache
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

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned addends_block = 256;  // threads
constexpr int addends_width = 8;         // elements per thread

template <typename To, typename From>
__global__ void convert_addends_kernel(To* out, const From* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * addends_width;
    if (i >= n) return;
    auto values = load<addends_width>(inp + i);
    Vec<To, addends_width> results;
    for (int k = 0; k < addends_width; k++) results[k] = converted(values[k]);
    store(out + i, results);
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

inline unsigned addends_blocks(size_t n) {
    return ceil_div(n, (size_t)addends_block * addends_width);
}

#endif

// ----------------------------------------------------------------------------
// launchers

template <typename To, typename From>
void convert_addends(To* out, const From* inp, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    ON_DEVICE(
        stream, (LaunchCost{.read = array_bytes(inp, n), .written = array_bytes(out, n)}),
        convert_addends_cpu(out, inp, n),
        launch(convert_addends_kernel<To, From>, addends_blocks(n), addends_block, 0, stream, out, inp, n));
}

inline void round_addends(uint16_t* out /* (n) */, const float* inp /* (n) */, size_t n,
                          cudaStream_t stream) {
    convert_addends(out, inp, n, stream);
}

inline void add_addends(float* out /* (n) += */, const Addends& addends, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(out, n) + array_bytes(addends.at, addends.ranks - 1, n),
                          .written = array_bytes(out, n)}),
              add_addends_cpu(out, addends, n),
              launch(add_addends_kernel, addends_blocks(n), addends_block, 0, stream, out, addends, n));
}

inline void widen_sum(float* out /* (n) */, const uint16_t* inp /* (n) */, size_t n, cudaStream_t stream) {
    convert_addends(out, inp, n, stream);
}
