/*
SwiGLU (Shazeer, "GLU variants improve transformer", 2020): a gated activation.

    out[n, f] = silu(gate) * up,   silu(x) = x sigmoid(x),   gate = inp[n, f], up = inp[n, F + f]

inp is (N, 2F): one matrix product computes both halves of a row. out is (N, F). The backward pass needs inp,
from which it can also recompute `out` if that was not kept.
*/
#pragma once

#include "kernels/common.cuh"
#include "kernels/fast_math.cuh"
#include "kernels/amax.cuh"

HOST_DEVICE inline float swiglu(float gate, float up) {
    return gate * fast_sigmoid(gate) * up;
}

struct SwigluSlope {
    float gate, up;
};

// Returns the derivatives of swiglu with respect to its two arguments.
HOST_DEVICE inline SwigluSlope swiglu_slope(float gate, float up) {
    float s = fast_sigmoid(gate);
    return {up * s * (1 + gate * (1 - s)), gate * s};
}

// ----------------------------------------------------------------------------
// CPU

inline void swiglu_forward_cpu(floatX* out, float* amax, const floatX* inp, int N, int F) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX *gate = inp + (size_t)n * 2 * F, *up = gate + F;
        floatX* row = out + (size_t)n * F;
#pragma omp simd
        for (int f = 0; f < F; f++) row[f] = floatX(swiglu(float(gate[f]), float(up[f])));
    }
    keep_amax_cpu(amax, out, (size_t)N * F);
}

inline void swiglu_backward_cpu(floatX* dinp, floatX* out, float* amax, const floatX* dout, const floatX* inp,
                                int N, int F) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX *gate = inp + (size_t)n * 2 * F, *up = gate + F, *dout_row = dout + (size_t)n * F;
        floatX *dgate = dinp + (size_t)n * 2 * F, *dup = dgate + F,
               *row = out ? out + (size_t)n * F : nullptr;
#pragma omp simd
        for (int f = 0; f < F; f++) {
            float g = float(gate[f]), u = float(up[f]), d = float(dout_row[f]);
            SwigluSlope slope = swiglu_slope(g, u);
            dgate[f] = floatX(slope.gate * d);
            dup[f] = floatX(slope.up * d);
            if (row) row[f] = floatX(swiglu(g, u));
        }
    }
    keep_amax_cpu(amax, dinp, (size_t)N * 2 * F);
}

// ----------------------------------------------------------------------------
// CUDA kernels: one row of blocks per row of inp; a thread handles W neighbors

#ifndef DEVICE_CPU

constexpr int swiglu_block = 256;

template <int W>
__global__ void swiglu_forward_kernel(floatX* out, float* amax, const floatX* inp, int F) {
    size_t row = blockIdx.x;
    int f = (int)(blockIdx.y * blockDim.x + threadIdx.x) * W;
    Amax element;
    if (f < F) {
        auto gate = load<W>(inp + row * 2 * F + f), up = load<W>(inp + row * 2 * F + F + f);
        for (int k = 0; k < W; k++) gate[k] = floatX(swiglu(float(gate[k]), float(up[k])));
        element.see(gate);
        store(out + row * F + f, gate);
    }
    element.keep(amax);
}

template <int W>
__global__ void swiglu_backward_kernel(floatX* dinp, floatX* out, float* amax, const floatX* dout,
                                       const floatX* inp, int F) {
    size_t row = blockIdx.x;
    int f = (int)(blockIdx.y * blockDim.x + threadIdx.x) * W;
    Amax element;
    if (f < F) {
        auto gate = load<W>(inp + row * 2 * F + f), up = load<W>(inp + row * 2 * F + F + f);
        auto d = load<W>(dout + row * F + f);
        for (int k = 0; k < W; k++) {
            float g = float(gate[k]), u = float(up[k]);
            SwigluSlope slope = swiglu_slope(g, u);
            gate[k] = floatX(slope.gate * float(d[k]));
            up[k] = floatX(slope.up * float(d[k]));
            d[k] = floatX(swiglu(g, u));
        }
        element.see(gate);
        element.see(up);
        if (out) store(out + row * F + f, d);
        store(dinp + row * 2 * F + f, gate);
        store(dinp + row * 2 * F + F + f, up);
    }
    element.keep(amax);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// amax: (1) receives the amax of out, or, in the backward pass, of dinp; may be null.
inline void swiglu_forward(floatX* out /* (N, F) */, const floatX* inp /* (N, 2F) */, int N, int F,
                           cudaStream_t stream, float* amax = nullptr) {
    ON_DEVICE(stream, (LaunchCost{.read = array_bytes(inp, N, 2, F), .written = array_bytes(out, N, F)}),
              swiglu_forward_cpu(out, amax, inp, N, F), {
                  begin_amax(amax, stream);
                  with_vec_width<floatX>(F, [=](auto width) {
                      constexpr int W = width;
                      int threads = row_threads(F / W, swiglu_block);
                      dim3 grid(N, ceil_div(F, threads * W));
                      launch(swiglu_forward_kernel<W>, grid, threads, 0, stream, out, amax, inp, F);
                  });
              });
}

// out: receives values that are bit-identical to those of swiglu_forward(); or null.
inline void swiglu_backward(floatX* dinp /* (N, 2F), may be inp */, const floatX* dout /* (N, F) */,
                            const floatX* inp /* (N, 2F) */, int N, int F, cudaStream_t stream,
                            float* amax = nullptr, floatX* out = nullptr /* (N, F), may be dout */) {
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(dout, N, F) + array_bytes(inp, N, 2, F),
                          .written = array_bytes(dinp, N, 2, F) + array_bytes(out, N, F)}),
              swiglu_backward_cpu(dinp, out, amax, dout, inp, N, F), {
                  begin_amax(amax, stream);
                  with_vec_width<floatX>(F, [=](auto width) {
                      constexpr int W = width;
                      int threads = row_threads(F / W, swiglu_block);
                      dim3 grid(N, ceil_div(F, threads * W));
                      launch(swiglu_backward_kernel<W>, grid, threads, 0, stream, dinp, out, amax, dout, inp,
                             F);
                  });
              });
}
