/*
Element-wise functions, and the simplest of them, the residual sum.

    out[i] = f(inp[i])      or      out[i] = f(inp1[i], inp2[i])

All arrays are (n) and floatX. f computes in float, and its result is rounded once. out may be an input.
*/
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/common.cuh"
#include "kernels/amax.cuh"

// ----------------------------------------------------------------------------
// CPU

// Pieces have a fixed size, in whole vectors, so the result is bit-identical for any number of threads.
template <auto f, typename... Inputs>
void elementwise_cpu(floatX* out, float* amax, size_t n, const Inputs*... inp) {
    constexpr size_t piece = 8192;
#pragma omp parallel for if (n > piece)
    for (size_t start = 0; start < n; start += piece) {
        size_t end = std::min(n, start + piece);
#pragma omp simd
        for (size_t i = start; i < end; i++) out[i] = floatX(f(float(inp[i])...));
    }
    keep_amax_cpu(amax, out, n);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned elementwise_block = 256;  // threads, of W elements each

template <auto f, int W, typename... Inputs>
__global__ void elementwise_kernel(floatX* out, float* amax, size_t n, const Inputs*... inp) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    Amax element;
    auto write = [&](auto... x) {
        Vec<floatX, W> result;
        for (int k = 0; k < W; k++) result[k] = floatX(f(float(x[k])...));
        element.see(result);
        store(out + i, result);
    };
    if (i < n) write(load<W>(inp + i)...);
    element.keep(amax);
}

// Returns a row length for with_vec_width(): a power of two divides it only if it divides n and every array's
// address, in elements. Rows cut out of a tensor need not be aligned to a vector.
template <typename... Arrays>
size_t common_row(size_t n, const Arrays*... arrays) {
    return n | ((uintptr_t)arrays | ...) / sizeof(floatX);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// amax: (1), receives the amax of out; or null.
template <auto f, typename... Inputs>
void elementwise(floatX* out, float* amax, size_t n, cudaStream_t stream, const Inputs*... inp) {
    static_assert((std::is_same_v<Inputs, floatX> && ...));
    if (n == 0) return;
    ON_DEVICE(stream, (LaunchCost{.read = (array_bytes(inp, n) + ...), .written = array_bytes(out, n)}),
              elementwise_cpu<f>(out, amax, n, inp...), {
                  begin_amax(amax, stream);
                  with_vec_width<floatX>(common_row(n, out, inp...), [=](auto width) {
                      constexpr int W = width;
                      launch(elementwise_kernel<f, W, Inputs...>, ceil_div(n, elementwise_block * W),
                             elementwise_block, 0, stream, out, amax, n, inp...);
                  });
              });
}

HOST_DEVICE inline float sum_of_two(float a, float b) {
    return a + b;
}

// out = inp1 + inp2, for a sum that no norm follows, as at the end of a pipeline stage; if a norm follows,
// residual_norm_forward (norm.cuh) computes both in one pass. The sums of the two functions are
// bit-identical.
inline void residual_forward(floatX* out /* (n), may be inp1 or inp2 */, const floatX* inp1 /* (n) */,
                             const floatX* inp2 /* (n) */, size_t n, cudaStream_t stream) {
    elementwise<sum_of_two>(out, nullptr, n, stream, inp1, inp2);
}
