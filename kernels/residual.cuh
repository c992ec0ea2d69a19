/*
Residual: the sum of a stream and what a layer adds to it.

    out = inp1 + inp2

All are (n). Where a norm follows, residual_norm_forward (norm.cuh) does both in one pass; this is for where
none does, as at the end of a pipeline stage. The sum is rounded as it is there, and has the same bits.
*/
#pragma once

#include "kernels/common.cuh"

// ----------------------------------------------------------------------------
// CPU

inline void residual_forward_cpu(floatX* out, const floatX* inp1, const floatX* inp2, size_t n) {
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++) out[i] = floatX(float(inp1[i]) + float(inp2[i]));
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned residual_block = 256;  // threads, of W elements each

template <int W>
__global__ void residual_forward_kernel(floatX* out, const floatX* inp1, const floatX* inp2, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i >= n) return;
    auto sum = load<W>(inp1 + i), more = load<W>(inp2 + i);
    for (int k = 0; k < W; k++) sum[k] = floatX(float(sum[k]) + float(more[k]));
    store(out + i, sum);
}

// Divisible by a power of two only if n is, and the place of every array in memory, in elements: rows cut out
// of a tensor need not begin with a whole vector.
inline size_t common_row(size_t n, const floatX* a, const floatX* b, const floatX* c) {
    return n | ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) / sizeof(floatX);
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void residual_forward(floatX* out /* (n), may be inp1 or inp2 */, const floatX* inp1 /* (n) */,
                             const floatX* inp2 /* (n) */, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    ON_DEVICE(stream, residual_forward_cpu(out, inp1, inp2, n),
              with_vec_width<floatX>(common_row(n, out, inp1, inp2), [=](auto width) {
                  constexpr int W = width;
                  launch(residual_forward_kernel<W>, ceil_div(n, residual_block * W), residual_block, 0,
                         stream, out, inp1, inp2, n);
              }));
}
