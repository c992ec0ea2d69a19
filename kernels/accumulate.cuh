/*
Adds one array to another.

    out = out + inp

Both are (n) and float, need no alignment beyond that of a float, and do not overlap.
*/
#pragma once

#include <algorithm>

#include "kernels/common.cuh"
#include "kernels/ragged.cuh"

// ----------------------------------------------------------------------------
// CPU

inline void accumulate_cpu(float* out, const float* inp, size_t n) {
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++) out[i] += inp[i];
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned accumulate_block = 256;  // threads, of W elements each

template <int W>
__global__ void accumulate_kernel(float* out, const float* inp, size_t n, int skip) {
    size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    each_ragged_vector<W>(thread, n, skip, [&](auto width, size_t i) {
        auto sum = load<width>(out + i), more = load<width>(inp + i);
        for (int k = 0; k < width; k++) sum[k] += more[k];
        store(out + i, sum);
    });
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void accumulate(float* out /* (n) += */, const float* inp /* (n) */, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(out, n) + array_bytes(inp, n), .written = array_bytes(out, n)}),
              accumulate_cpu(out, inp, n), RaggedVectors vectors = ragged_vectors(out, inp);
              with_ragged_width(vectors, [=](auto width) {
                  launch(accumulate_kernel<width>, ceil_div(vectors.threads(n), accumulate_block),
                         accumulate_block, 0, stream, out, inp, n, vectors.skip);
              }));
}
