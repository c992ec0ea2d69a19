/*
Numbers that are known in advance, for tests of devices and links.

    out[i] = a pseudorandom integer from -64 to 63, determined by (key, i)

bf16 represents them exactly, and fp32 every sum of up to 4096 products of two of them, which is 2^24 at most.
So the order in which a library sums does not matter: a product of such matrices is bit-identical on every
device, and a device with a different result is broken. No two tiles of a matrix are the same.
*/
#pragma once

#include <algorithm>

#include "kernels/common.cuh"
#include "kernels/random.cuh"

constexpr int most_known_sums = 4096;  // products that can be added up exactly

HOST_DEVICE inline int known_number_of(uint32_t bits) {
    return (int)(bits >> 25) - 64;
}
HOST_DEVICE inline int known_number(uint64_t key, uint64_t i) {
    return known_number_of(philox(key, i / 4).at[i % 4]);
}

// ----------------------------------------------------------------------------
// CPU

inline void known_numbers_cpu(floatX* out, uint64_t key, size_t n) {
#pragma omp parallel for
    for (size_t four = 0; four < ceil_div(n, 4); four++) {
        Random4 random = philox(key, four);
        for (size_t i = 4 * four; i < std::min(n, 4 * four + 4); i++)
            out[i] = floatX((float)known_number_of(random.at[i % 4]));
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned known_numbers_block = 256;

__global__ void known_numbers_kernel(floatX* out, uint64_t key, size_t n) {
    size_t first = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (first >= n) return;
    Random4 random = philox(key, first / 4);
    for (size_t i = first; i < n && i < first + 4; i++)
        out[i] = floatX((float)known_number_of(random.at[i - first]));
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void known_numbers(floatX* out /* (n) */, uint64_t key, size_t n, cudaStream_t stream) {
    ON_DEVICE(stream, (LaunchCost{.written = array_bytes(out, n)}), known_numbers_cpu(out, key, n),
              launch(known_numbers_kernel, (unsigned)ceil_div(n, 4 * known_numbers_block),
                     known_numbers_block, 0, stream, out, key, n));
}
