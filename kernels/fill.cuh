/*
Sets all elements of an array to a value.

    out[i] = value
*/
#pragma once

#include <algorithm>

#include "kernels/common.cuh"

// ----------------------------------------------------------------------------
// CPU

inline void fill_cpu(float* out, float value, size_t n) {
    std::fill_n(out, n, value);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned fill_block = 256;

__global__ void fill_kernel(float* out, float value, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = value;
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void fill(float* out /* (n) */, float value, size_t n, cudaStream_t stream) {
    ON_DEVICE(stream, (LaunchCost{.written = array_bytes(out, n)}), fill_cpu(out, value, n),
              launch(fill_kernel, (unsigned)ceil_div(n, fill_block), fill_block, 0, stream, out, value, n));
}
