/*
RMSNorm of every query head and every key head, before the rotary embedding (Dehghani et al., "Scaling Vision
Transformers to 22 Billion Parameters", 2023; used by Qwen3 and Gemma 3). It bounds the attention logits.

A row of qkv is [NH query heads | NKV key heads | NKV value heads], each HS wide. Each of the first two kinds
has one weight (HS), shared by its heads:

    out = inp * rstd * weight         rstd = 1/sqrt(average of the squares of the head + eps)

Value heads are copied. Saved for the backward pass: inp and rstd (N, NH + NKV). With xhat = inp * rstd and
dxhat = dout * weight:

    dinp     = rstd * (dxhat - xhat * average(dxhat * xhat))        (value heads: dout)
    dweight += sum over rows and heads of dout * xhat

Seen as heads of HS elements, all of qkv is one array of N * (NH + 2 NKV) rows, and that is how the kernels
walk it.
*/
#pragma once

#include "kernels/norm.cuh"

constexpr int qk_norm_partials = 512;

// Floats of scratch that qk_norm_backward needs, whatever N is.
inline size_t qk_norm_backward_scratch(int HS) {
    return (size_t)qk_norm_partials * 2 * HS;
}

// ----------------------------------------------------------------------------
// CPU

inline void qk_norm_forward_cpu(floatX* out, float* rstd, const floatX* inp, const floatX* qweight,
                                const floatX* kweight, int N, int NH, int NKV, int HS, float eps) {
    int heads = NH + 2 * NKV;
#pragma omp parallel for
    for (int row = 0; row < N; row++) {
        for (int h = 0; h < heads; h++) {
            const floatX* x = inp + ((size_t)row * heads + h) * HS;
            floatX* o = out + ((size_t)row * heads + h) * HS;
            if (h >= NH + NKV) {
                std::copy_n(x, HS, o);
                continue;
            }
            const floatX* weight = h < NH ? qweight : kweight;
            float r = 1.0f / sqrtf(row_variance_cpu(x, 0.0f, HS) + eps);
            rstd[(size_t)row * (NH + NKV) + h] = r;
#pragma omp simd
            for (int c = 0; c < HS; c++) o[c] = floatX(float(x[c]) * r * float(weight[c]));
        }
    }
}

inline void qk_norm_backward_cpu(floatX* dinp, float* dqweight, float* dkweight, float* scratch,
                                 const floatX* dout, const floatX* inp, const float* rstd,
                                 const floatX* qweight, const floatX* kweight, int N, int NH, int NKV,
                                 int HS) {
    int heads = NH + 2 * NKV, rows = rows_per_partial_cpu(N), count = ceil_div(N, rows);
#pragma omp parallel for
    for (int k = 0; k < count; k++) {
        float* partial = scratch + (size_t)k * 2 * HS;
        std::fill_n(partial, 2 * HS, 0.0f);
        for (int row = k * rows; row < std::min(N, (k + 1) * rows); row++) {
            for (int h = 0; h < heads; h++) {
                size_t start = ((size_t)row * heads + h) * HS;
                const floatX *dy = dout + start, *x = inp + start;
                floatX* dx = dinp + start;
                if (h >= NH + NKV) {
                    if (dx != dy) std::copy_n(dy, HS, dx);
                    continue;
                }
                const floatX* weight = h < NH ? qweight : kweight;
                float* dw = h < NH ? partial : partial + HS;
                float r = rstd[(size_t)row * (NH + NKV) + h];

                float sum_xhat = 0;
#pragma omp simd reduction(+ : sum_xhat)
                for (int c = 0; c < HS; c++) sum_xhat += float(dy[c]) * float(weight[c]) * (float(x[c]) * r);
                float average_xhat = sum_xhat / HS;
#pragma omp simd
                for (int c = 0; c < HS; c++) {
                    float dyc = float(dy[c]), xhat = float(x[c]) * r;
                    dw[c] += dyc * xhat;
                    dx[c] = floatX(r * (dyc * float(weight[c]) - xhat * average_xhat));
                }
            }
        }
    }
    add_partials_cpu(dqweight, dkweight, scratch, count, HS);
}

// ----------------------------------------------------------------------------
// CUDA kernels
#ifndef DEVICE_CPU

// A warp does one head of one row.
template <int W>
__global__ void qk_norm_forward_kernel(floatX* out, float* rstd, const floatX* inp, const floatX* qweight,
                                       const floatX* kweight, int N, int NH, int NKV, int HS, float eps) {
    int heads = NH + 2 * NKV, lane = threadIdx.x % warp_size, warps = blockDim.x / warp_size;
    size_t item = (size_t)blockIdx.x * warps + threadIdx.x / warp_size;
    if (item >= (size_t)N * heads) return;
    size_t row = item / heads;
    int h = (int)(item % heads);
    const floatX* x = inp + item * HS;
    floatX* o = out + item * HS;
    if (h >= NH + NKV) {
        for (int c = lane * W; c < HS; c += warp_size * W) store(o + c, load<W>(x + c));
        return;
    }
    const floatX* weight = h < NH ? qweight : kweight;
    float r = 1.0f / sqrtf(warp_row_sum<W>(x, HS, [](float x) { return x * x; }) / HS + eps);
    if (lane == 0) rstd[row * (NH + NKV) + h] = r;
    for (int c = lane * W; c < HS; c += warp_size * W) {
        Vec<floatX, W> y = load<W>(x + c), w = load<W>(weight + c);
        for (int i = 0; i < W; i++) y[i] = floatX(float(y[i]) * r * float(w[i]));
        store(o + c, y);
    }
}

// A warp does a fixed set of (row, head) and keeps their sums for both weights in shared memory, laid out as
// in norm_backward_kernel; at the end the block adds those of its warps and writes one partial sum (2, HS).
template <int W>
__global__ void qk_norm_backward_kernel(floatX* dinp, float* partials, const floatX* dout, const floatX* inp,
                                        const float* rstd, const floatX* qweight, const floatX* kweight,
                                        int N, int NH, int NKV, int HS) {
    int heads = NH + 2 * NKV, lane = threadIdx.x % warp_size;
    int warp = threadIdx.x / warp_size, warps = blockDim.x / warp_size;
    float* sums = dynamic_shared<float>();  // (warps, 2, HS)
    for (int i = threadIdx.x; i < warps * 2 * HS; i += blockDim.x) sums[i] = 0;
    __syncthreads();

    size_t items = (size_t)N * heads, step = (size_t)gridDim.x * warps;
    for (size_t item = (size_t)blockIdx.x * warps + warp; item < items; item += step) {
        size_t row = item / heads;
        int h = (int)(item % heads);
        const floatX *dy = dout + item * HS, *x = inp + item * HS;
        floatX* dx = dinp + item * HS;
        if (h >= NH + NKV) {
            for (int c = lane * W; dx != dy && c < HS; c += warp_size * W) store(dx + c, load<W>(dy + c));
            continue;
        }
        const floatX* weight = h < NH ? qweight : kweight;
        float* dweight = sums + (warp * 2 + (h < NH ? 0 : 1)) * HS;
        float r = rstd[row * (NH + NKV) + h];

        float sum_xhat = 0;
        for (int c = lane * W; c < HS; c += warp_size * W) {
            Vec<floatX, W> dyc = load<W>(dy + c), xc = load<W>(x + c), w = load<W>(weight + c);
            for (int i = 0; i < W; i++) sum_xhat += float(dyc[i]) * float(w[i]) * (float(xc[i]) * r);
        }
        float average_xhat = warp_sum(sum_xhat) / HS;
        for (int c = lane * W; c < HS; c += warp_size * W) {
            Vec<floatX, W> dyc = load<W>(dy + c), xc = load<W>(x + c), w = load<W>(weight + c), dxc;
            for (int i = 0; i < W; i++) {
                float xhat = float(xc[i]) * r;
                dweight[i * (HS / W) + c / W] += float(dyc[i]) * xhat;
                dxc[i] = floatX(r * (float(dyc[i]) * float(w[i]) - xhat * average_xhat));
            }
            store(dx + c, dxc);
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * HS; c += blockDim.x) {
        int at = c / HS * HS + c % HS % W * (HS / W) + c % HS / W;
        float sum = 0;
        for (int w = 0; w < warps; w++) sum += sums[w * 2 * HS + at];
        partials[(size_t)blockIdx.x * 2 * HS + c] = sum;
    }
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void qk_norm_forward(floatX* out,            // (N, (NH + 2 NKV) * HS)
                            float* rstd,            // (N, NH + NKV)
                            const floatX* inp,      // (N, (NH + 2 NKV) * HS)
                            const floatX* qweight,  // (HS)
                            const floatX* kweight,  // (HS)
                            int N, int NH, int NKV, int HS, float eps, cudaStream_t stream) {
    ON_DEVICE(stream, qk_norm_forward_cpu(out, rstd, inp, qweight, kweight, N, NH, NKV, HS, eps),
              with_vec_width<floatX>(HS, [&](auto width) {
                  constexpr int warps = 4;
                  size_t blocks = ceil_div((size_t)N * (NH + 2 * NKV), warps);
                  launch(qk_norm_forward_kernel<width()>, (unsigned)blocks, warps * warp_size, 0, stream, out,
                         rstd, inp, qweight, kweight, N, NH, NKV, HS, eps);
              }));
}

inline void qk_norm_backward(floatX* dinp,           // (N, (NH + 2 NKV) * HS), may be dout
                             float* dqweight,        // (HS), accumulates
                             float* dkweight,        // (HS), accumulates
                             float* scratch,         // (qk_norm_backward_scratch(HS))
                             const floatX* dout,     // (N, (NH + 2 NKV) * HS)
                             const floatX* inp,      // (N, (NH + 2 NKV) * HS)
                             const float* rstd,      // (N, NH + NKV)
                             const floatX* qweight,  // (HS)
                             const floatX* kweight,  // (HS)
                             int N, int NH, int NKV, int HS, cudaStream_t stream) {
    ON_DEVICE(stream,
              qk_norm_backward_cpu(dinp, dqweight, dkweight, scratch, dout, inp, rstd, qweight, kweight, N,
                                   NH, NKV, HS),
              with_vec_width<floatX>(HS, [&](auto width) {
                  constexpr int warps = 8;
                  size_t items = (size_t)N * (NH + 2 * NKV);
                  int count = (int)std::min<size_t>(ceil_div(items, warps), qk_norm_partials);
                  launch(qk_norm_backward_kernel<width()>, count, warps * warp_size,
                         warps * 2 * HS * sizeof(float), stream, dinp, scratch, dout, inp, rstd, qweight,
                         kweight, N, NH, NKV, HS);
                  add_partials(dqweight, dkweight, scratch, count, HS, stream);
              }));
}
