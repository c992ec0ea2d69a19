/*
GELU (Hendrycks & Gimpel, 2016): x times the probability that a standard normal number is below x.

    exact   out = x Phi(x)
    tanh    out = x/2 (1 + tanh(u)) = x sigmoid(2u),   u = sqrt(2/pi) (x + 0.044715 x^3)       (GPT-2)

inp, out and their gradients are n elements of any shape; the backward pass needs inp.
Written with the sigmoid, each form costs one exponential: the CPU loops run at the speed of memory.
*/
#pragma once

#include <algorithm>

#include "kernels/common.cuh"
#include "kernels/fast_math.cuh"

enum class Gelu { tanh, exact };

constexpr float gelu_cubic = 0.044715f, gelu_twice_root = 1.5957691216f;  // 2 sqrt(2/pi)

template <Gelu form>
HOST_DEVICE float gelu(float x) {
    if constexpr (form == Gelu::exact) {
        return x * fast_normal(x).below;
    } else {
        return x * fast_sigmoid(gelu_twice_root * (x + gelu_cubic * x * x * x));
    }
}

// The derivative of gelu at x.
template <Gelu form>
HOST_DEVICE float gelu_slope(float x) {
    if constexpr (form == Gelu::exact) {
        Normal normal = fast_normal(x);
        return normal.below + x * normal.density;
    } else {
        float twice_u = gelu_twice_root * (x + gelu_cubic * x * x * x);
        float e = fast_exp(-fabsf(twice_u));
        float above = fast_inverse(1 + e), below = e * above;  // of |2u| and -|2u|, neither by cancellation
        float slope_u = gelu_twice_root * (1 + 3 * gelu_cubic * x * x);
        return (twice_u > 0 ? above : below) + x * above * below * slope_u;
    }
}

// Calls f with the form as a constant.
template <typename F>
void with_gelu(Gelu form, F&& f) {
    if (form == Gelu::tanh)
        f(std::integral_constant<Gelu, Gelu::tanh>{});
    else
        f(std::integral_constant<Gelu, Gelu::exact>{});
}

// ----------------------------------------------------------------------------
// CPU

// Fixed pieces, each of whole vectors: the number of threads changes no bit.
constexpr size_t gelu_piece = 8192;

inline void gelu_forward_cpu(Gelu form, floatX* out, const floatX* inp, size_t n) {
    with_gelu(form, [=](auto f) {
#pragma omp parallel for
        for (size_t start = 0; start < n; start += gelu_piece) {
            size_t end = std::min(n, start + gelu_piece);
#pragma omp simd
            for (size_t i = start; i < end; i++) out[i] = floatX(gelu<f()>(float(inp[i])));
        }
    });
}

inline void gelu_backward_cpu(Gelu form, floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    with_gelu(form, [=](auto f) {
#pragma omp parallel for
        for (size_t start = 0; start < n; start += gelu_piece) {
            size_t end = std::min(n, start + gelu_piece);
#pragma omp simd
            for (size_t i = start; i < end; i++) {
                dinp[i] = floatX(gelu_slope<f()>(float(inp[i])) * float(dout[i]));
            }
        }
    });
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned gelu_block = 256;  // threads, of W elements each

template <Gelu form, int W>
__global__ void gelu_forward_kernel(floatX* out, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i >= n) return;
    auto x = load<W>(inp + i);
    for (int k = 0; k < W; k++) x[k] = floatX(gelu<form>(float(x[k])));
    store(out + i, x);
}

template <Gelu form, int W>
__global__ void gelu_backward_kernel(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i >= n) return;
    auto x = load<W>(inp + i), dx = load<W>(dout + i);
    for (int k = 0; k < W; k++) dx[k] = floatX(gelu_slope<form>(float(x[k])) * float(dx[k]));
    store(dinp + i, dx);
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void gelu_forward(Gelu form, floatX* out /* (n), may be inp */, const floatX* inp /* (n) */, size_t n,
                         cudaStream_t stream) {
    ON_DEVICE(stream, gelu_forward_cpu(form, out, inp, n), with_vec_width<floatX>(n, [=](auto width) {
                  constexpr int W = width;
                  auto kernel = form == Gelu::tanh ? gelu_forward_kernel<Gelu::tanh, W>
                                                   : gelu_forward_kernel<Gelu::exact, W>;
                  launch(kernel, ceil_div(n, gelu_block * W), gelu_block, 0, stream, out, inp, n);
              }));
}

inline void gelu_backward(Gelu form, floatX* dinp /* (n), may be dout */, const floatX* dout /* (n) */,
                          const floatX* inp /* (n) */, size_t n, cudaStream_t stream) {
    ON_DEVICE(stream, gelu_backward_cpu(form, dinp, dout, inp, n), with_vec_width<floatX>(n, [=](auto width) {
                  constexpr int W = width;
                  auto kernel = form == Gelu::tanh ? gelu_backward_kernel<Gelu::tanh, W>
                                                   : gelu_backward_kernel<Gelu::exact, W>;
                  launch(kernel, ceil_div(n, gelu_block * W), gelu_block, 0, stream, dinp, dout, inp, n);
              }));
}
