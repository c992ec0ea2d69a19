/*
RMSNorm of every query head and every key head (Dehghani et al., "Scaling Vision Transformers to 22 Billion
Parameters", 2023; used by Qwen3 and Gemma 3), which bounds the attention logits. It is fused with the rotary
embedding that follows (rope.cuh), so that heads are read and written once for both.

A row of qkv is [NH query heads | NKV key heads | NKV value heads], each HS wide. Each of the first two kinds
has one weight (HS), shared by its heads:

    out = inp * rstd * weight         rstd = 1/sqrt(average of the squares of the head + eps)

Then heads are rotated; value heads are copied. Saved for the backward pass: inp and rstd (N, NH + NKV). With
xhat = inp * rstd, dout rotated back, and dxhat = dout * weight:

    dinp     = rstd * (dxhat - xhat * average(dxhat * xhat))        (value heads: dout)
    dweight += sum over rows and heads of dout * xhat

A head is short, so on a GPU only a part of a warp handles it: one lane for each of its vectors.
*/
#pragma once

#include <bit>
#include <numeric>

#include "kernels/norm.cuh"
#include "kernels/rope.cuh"

constexpr int qk_norm_partials = 512;

// Returns the floats of scratch that qk_norm_backward needs for any N.
inline size_t qk_norm_backward_scratch(int HS) {
    return (size_t)qk_norm_partials * 2 * HS;
}

// ----------------------------------------------------------------------------
// CPU

inline void qk_norm_forward_cpu(floatX* out, float* rstd, const floatX* inp, const floatX* qweight,
                                const floatX* kweight, Rotation rope, QkvRows rows, float eps) {
    int HS = rows.HS;
#pragma omp parallel for
    for (int row = 0; row < rows.N; row++) {
        for (int h = 0; h < rows.heads(); h++) {
            const floatX* x = inp + rows.offset(row, h);
            floatX* o = out + rows.offset(row, h);
            if (h >= rows.qk_heads()) {
                std::copy_n(x, HS, o);
                continue;
            }
            const floatX* weight = h < rows.NH ? qweight : kweight;
            float r = 1.0f / sqrtf(row_variance_cpu(x, 0.0f, HS) + eps);
            rstd[(size_t)row * rows.qk_heads() + h] = r;
#pragma omp simd
            for (int c = 0; c < HS; c++) o[c] = floatX(float(x[c]) * r * float(weight[c]));
        }
    }
    if (rope.R > 0) rope_cpu(out, rope, 1.0f, rows);
}

inline void qk_norm_backward_cpu(floatX* dinp, float* dqweight, float* dkweight, float* scratch,
                                 const floatX* dout, const floatX* inp, const float* rstd,
                                 const floatX* qweight, const floatX* kweight, Rotation rope, QkvRows rows) {
    int N = rows.N, HS = rows.HS, together = rows_per_partial_cpu(N), count = ceil_div(N, together);
    if (rope.R > 0) {
        if (dinp != dout) std::copy_n(dout, rows.offset(N, 0), dinp);
        rope_cpu(dinp, rope, -1.0f, rows);
        dout = dinp;
    }
#pragma omp parallel for
    for (int k = 0; k < count; k++) {
        float* partial = scratch + (size_t)k * 2 * HS;
        std::fill_n(partial, 2 * HS, 0.0f);
        for (int row = k * together; row < std::min(N, (k + 1) * together); row++) {
            for (int h = 0; h < rows.heads(); h++) {
                size_t start = rows.offset(row, h);
                const floatX *dy = dout + start, *x = inp + start;
                floatX* dx = dinp + start;
                if (h >= rows.qk_heads()) {
                    if (dx != dy) std::copy_n(dy, HS, dx);
                    continue;
                }
                const floatX* weight = h < rows.NH ? qweight : kweight;
                float* dw = h < rows.NH ? partial : partial + HS;
                float r = rstd[(size_t)row * rows.qk_heads() + h];

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

// Returns the number of lanes that handle a head: a power of two.
inline int qk_norm_lanes(int vectors) {
    return std::min((int)std::bit_ceil((unsigned)vectors), warp_size);
}

// One block per row. All its threads run the same number of iterations, even if there are no heads left for
// some, because all lanes of a warp take part in its sums.
template <int W>
__global__ void qk_norm_forward_kernel(floatX* out, float* rstd, const floatX* inp, const floatX* qweight,
                                       const floatX* kweight, Rotation rope, int lanes, QkvRows rows,
                                       float eps) {
    int NH = rows.NH, HS = rows.HS, heads = rows.heads(), qk_heads = rows.qk_heads(),
        groups = blockDim.x / lanes, group = threadIdx.x / lanes;
    int first = threadIdx.x % lanes * W, step = lanes * W;
    size_t row = blockIdx.x;
    const float* angles = rope.R > 0 ? rope.angles(row) : nullptr;
    for (int begin = 0; begin < heads; begin += groups) {
        int h = begin + group, end = h < heads ? HS : 0;
        const floatX* x = inp + rows.offset(row, h);
        floatX* o = out + rows.offset(row, h);
        const floatX* weight = h < NH ? qweight : h < qk_heads ? kweight : nullptr;

        float squares = 0;
        for (int c = first; c < end; c += step) {
            Vec<floatX, W> xc = load<W>(x + c);
            for (int i = 0; i < W; i++) squares += float(xc[i]) * float(xc[i]);
        }
        float r = 1.0f / sqrtf(group_sum(squares, lanes) / HS + eps);
        if (weight && first == 0) rstd[row * qk_heads + h] = r;
        auto normed = [&](int c) {
            Vec<floatX, W> y = load<W>(x + c), w = load<W>(weight + c);
            for (int i = 0; i < W; i++) y[i] = floatX(float(y[i]) * r * float(w[i]));
            return y;
        };
        for (int c = first; c < end; c += step) {
            store(o + c, !weight      ? load<W>(x + c)
                         : c < rope.R ? turned<W>(c, rope.R, angles, 1.0f, normed)
                                      : normed(c));
        }
    }
}

// A block handles every gridDim.x-th row. Each thread owns the same columns of all its heads, and keeps their
// sums for both weights in shared memory, interleaved with those of other threads. At the end the block adds
// the sums of its groups of lanes and writes one partial sum (2, HS). dinp may be dout: the rotated-back
// gradients of a thread stay in shared memory until its group has read all of the head.
template <int W>
__global__ void qk_norm_backward_kernel(floatX* dinp, float* partials, const floatX* dout, const floatX* inp,
                                        const float* rstd, const floatX* qweight, const floatX* kweight,
                                        Rotation rope, int lanes, QkvRows rows) {
    int NH = rows.NH, HS = rows.HS, heads = rows.heads(), qk_heads = rows.qk_heads(), threads = blockDim.x,
        groups = threads / lanes, group = threadIdx.x / lanes;
    int first = threadIdx.x % lanes * W, step = lanes * W, visits = ceil_div(HS, step);
    float* sums = dynamic_shared<float>();                      // (2, visits, W, threads)
    floatX* kept = (floatX*)(sums + 2 * visits * W * threads);  // (visits, threads, W)
    kept += threadIdx.x * W;
    for (int i = threadIdx.x; i < 2 * visits * W * threads; i += threads) sums[i] = 0;
    __syncthreads();

    for (size_t row = blockIdx.x; row < (size_t)rows.N; row += gridDim.x) {
        const float* angles = rope.R > 0 ? rope.angles(row) : nullptr;
        for (int begin = 0; begin < heads; begin += groups) {
            int h = begin + group, end = h < qk_heads ? HS : 0;
            size_t start = rows.offset(row, h);
            const floatX *dy = dout + start, *x = inp + start, *weight = h < NH ? qweight : kweight;
            floatX* dx = dinp + start;
            float r = end > 0 ? rstd[row * qk_heads + h] : 0.0f;

            auto as_is = [&](int c) { return load<W>(dy + c); };
            float sum_xhat = 0;
            floatX* turned_back = kept;
            for (int c = first; c < end; c += step, turned_back += W * threads) {
                Vec<floatX, W> xc = load<W>(x + c), w = load<W>(weight + c);
                Vec<floatX, W> dyc = c < rope.R ? turned<W>(c, rope.R, angles, -1.0f, as_is) : as_is(c);
                for (int i = 0; i < W; i++) sum_xhat += float(dyc[i]) * float(w[i]) * (float(xc[i]) * r);
                store_shared(turned_back, dyc);
            }
            float average_xhat = group_sum(sum_xhat, lanes) / HS;
            __syncwarp();
            float* dweight = sums + (h < NH ? 0 : visits * W * threads) + threadIdx.x;
            turned_back = kept;
            for (int c = first; c < end; c += step, dweight += W * threads, turned_back += W * threads) {
                Vec<floatX, W> dyc = load<W>(turned_back);
                Vec<floatX, W> xc = load<W>(x + c), w = load<W>(weight + c), dxc;
                for (int i = 0; i < W; i++) {
                    float xhat = float(xc[i]) * r;
                    dweight[i * threads] += float(dyc[i]) * xhat;
                    dxc[i] = floatX(r * (float(dyc[i]) * float(w[i]) - xhat * average_xhat));
                }
                store(dx + c, dxc);
            }
            if (h < qk_heads || h >= heads || dx == dy) continue;
            for (int c = first; c < HS; c += step) store(dx + c, load<W>(dy + c));
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * HS; c += threads) {
        int column = c % HS, visit = column / step, lane = column % step / W;
        const float* of_column = sums + ((c / HS * visits + visit) * W + column % W) * threads + lane;
        float sum = 0;
        for (int g = 0; g < groups; g++) sum += of_column[g * lanes];
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
                            Rotation rope, QkvRows rows, float eps, cudaStream_t stream) {
    ON_DEVICE(
        stream,
        (LaunchCost{.read = array_bytes(inp, rows.N, rows.heads(), rows.HS) + rotation_bytes(rope, rows.N),
                    .written = array_bytes(out, rows.N, rows.heads(), rows.HS) +
                               array_bytes(rstd, rows.N, rows.qk_heads())}),
        qk_norm_forward_cpu(out, rstd, inp, qweight, kweight, rope, rows, eps),
        with_vec_width<floatX>(std::gcd(rope.R / 2, rows.HS), [&](auto width) {
            int lanes = qk_norm_lanes(rows.HS / width());
            launch(qk_norm_forward_kernel<width()>, rows.N, row_threads(rows.heads() * lanes, 512), 0, stream,
                   out, rstd, inp, qweight, kweight, rope, lanes, rows, eps);
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
                             Rotation rope, QkvRows rows, cudaStream_t stream) {
    auto cost = [&]() -> LaunchCost {
        double heads = array_bytes(dinp, rows.N, rows.qk_heads(), rows.HS),
               partials = array_bytes(scratch, even_share(rows.N, qk_norm_partials), 2, rows.HS);
        return {.read = 2 * heads + array_bytes(rstd, rows.N, rows.qk_heads()) +
                        rotation_bytes(rope, rows.N) + partials,
                .written = heads + partials,
                .launches = 2};
    };
    ON_DEVICE(stream, cost(),
              qk_norm_backward_cpu(dinp, dqweight, dkweight, scratch, dout, inp, rstd, qweight, kweight, rope,
                                   rows),
              with_vec_width<floatX>(std::gcd(rope.R / 2, rows.HS), [&](auto width) {
                  int lanes = qk_norm_lanes(rows.HS / width()), count = even_share(rows.N, qk_norm_partials);
                  int threads = row_threads(rows.heads() * lanes, 256);
                  int elements = ceil_div(rows.HS, lanes * width()) * width() * threads;
                  launch(qk_norm_backward_kernel<width()>, count, threads,
                         elements * (2 * sizeof(float) + sizeof(floatX)), stream, dinp, scratch, dout, inp,
                         rstd, qweight, kweight, rope, lanes, rows);
                  add_partials(dqweight, dkweight, scratch, count, rows.HS, stream);
              }));
}
