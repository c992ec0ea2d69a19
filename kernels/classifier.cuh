/*
Classifier: softmax, cross-entropy, and its gradient written over the logits.

    losses[n]  = log(sum_v exp(logits[n, v])) - logits[n, target]
    logits[n, v] becomes (exp(logits[n, v]) / sum - [v == target]) * dloss

logits are (N, Vp): V words, then padding columns that have no probability and get zero gradient. A row with
target -1 has loss 0 and zero gradient. Nothing is saved: the gradient takes the place of the logits, the
largest activation. The maximum (subtracted, so that exp does not overflow) and the sum come from one pass: a
sum relative to the maximum so far is rescaled when the maximum grows (Milakov & Gimelshein, "Online
normalizer calculation for softmax", 2018).
*/
#pragma once

#include <cfloat>

#include "kernels/common.cuh"
#include "kernels/fast_math.cuh"

// sum_v exp(x_v - max). It starts with a finite maximum, so that logits of -Inf count as 0.
struct SoftmaxSum {
    float max = -FLT_MAX, sum = 0;
};

HOST_DEVICE inline SoftmaxSum merge(SoftmaxSum a, SoftmaxSum b) {
    float max = fmaxf(a.max, b.max);
    return {max, a.sum * fast_exp(a.max - max) + b.sum * fast_exp(b.max - max)};
}

// ----------------------------------------------------------------------------
// CPU

inline SoftmaxSum softmax_sum_cpu(const floatX* x, int size) {
    float max = -FLT_MAX, sum = 0;
#pragma omp simd reduction(max : max)
    for (int i = 0; i < size; i++) max = float(x[i]) > max ? float(x[i]) : max;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < size; i++) sum += fast_exp(float(x[i]) - max);
    return {max, sum};
}

inline void classifier_cpu(floatX* logits, float* losses, const int* targets, float dloss, int N, int V,
                           int Vp, bool want_gradient) {
    constexpr int chunk = 2048;  // stays in the first-level cache between its maximum and its sum
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* row = logits + (size_t)n * Vp;
        if (targets[n] < 0) {
            losses[n] = 0;
            if (want_gradient) std::fill(row, row + Vp, floatX(0.0f));
            continue;
        }
        SoftmaxSum total;
        for (int v = 0; v < V; v += chunk)
            total = merge(total, softmax_sum_cpu(row + v, std::min(chunk, V - v)));
        float target_logit = float(row[targets[n]]);
        losses[n] = logf(total.sum) + total.max - target_logit;
        if (!want_gradient) continue;

        float scale = dloss / total.sum;
#pragma omp simd
        for (int v = 0; v < V; v++) row[v] = floatX(fast_exp(float(row[v]) - total.max) * scale);
        float probability = fast_exp(target_logit - total.max) / total.sum;
        row[targets[n]] = floatX((probability - 1) * dloss);
        std::fill(row + V, row + Vp, floatX(0.0f));
    }
}

inline void sum_losses_cpu(float* total, const float* losses, int N) {
    double sum = 0;
    for (int n = 0; n < N; n++) sum += losses[n];
    *total += (float)sum;
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

// A block for each row.
constexpr unsigned classifier_block = 512;

template <int W>
__device__ SoftmaxSum softmax_sum(const floatX* row, int V) {
    SoftmaxSum total;
    for (int v = threadIdx.x * W; v < V; v += blockDim.x * W) {
        auto x = load<W>(row + v);
        int words = min(W, V - v);
        float max = total.max;
        for (int k = 0; k < words; k++) max = fmaxf(max, float(x[k]));
        total.sum *= expf(total.max - max);
        for (int k = 0; k < words; k++) total.sum += expf(float(x[k]) - max);
        total.max = max;
    }
    float max = block_max(total.max);
    return {max, block_sum(total.sum * expf(total.max - max))};
}

template <int W>
__global__ void classifier_kernel(floatX* logits, float* losses, const int* targets, float dloss, int V,
                                  int Vp, bool want_gradient) {
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    SoftmaxSum total;
    if (target >= 0) total = softmax_sum<W>(row, V);
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = target < 0 ? 0.0f : logf(total.sum) + total.max - float(row[target]);
    }
    if (!want_gradient) return;
    __syncthreads();  // the loss was read from the logits that are now replaced

    float inverse = 1 / total.sum;
    for (int v = threadIdx.x * W; v < Vp; v += blockDim.x * W) {
        auto x = load<W>(row + v);
        for (int k = 0; k < W; k++) {
            bool counts = target >= 0 && v + k < V;
            float probability = counts ? expf(float(x[k]) - total.max) * inverse : 0.0f;
            x[k] = floatX((probability - (v + k == target)) * dloss);
        }
        store(row + v, x);
    }
}

__global__ void sum_losses_kernel(float* total, const float* losses, int N) {
    float sum = 0;
    for (int n = threadIdx.x; n < N; n += blockDim.x) sum += losses[n];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}

#endif

// ----------------------------------------------------------------------------
// launchers

// dloss is the gradient of the objective by each of the losses: 1 / (number of targets in the global batch).
inline void classifier(floatX* logits /* (N, Vp) */, float* losses /* (N) */, const int* targets /* (N) */,
                       float dloss, int N, int V, int Vp, bool want_gradient, cudaStream_t stream) {
    ON_DEVICE(stream, classifier_cpu(logits, losses, targets, dloss, N, V, Vp, want_gradient),
              with_vec_width<floatX>(Vp, [=](auto width) {
                  launch(classifier_kernel<width>, N, classifier_block, 0, stream, logits, losses, targets,
                         dloss, V, Vp, want_gradient);
              }));
}

inline void sum_losses(float* total /* (1) += */, const float* losses /* (N) */, int N, cudaStream_t stream) {
    ON_DEVICE(stream, sum_losses_cpu(total, losses, N),
              launch(sum_losses_kernel, 1, 1024, 0, stream, total, losses, N));
}
