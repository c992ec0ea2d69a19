/*
Classifier: softmax, cross-entropy, and its gradient written over the logits.

    losses[n]  = log(sum_v exp(logits[n, v])) - logits[n, target]
    logits[n, v] becomes (exp(logits[n, v]) / sum - [v == target]) * dloss

logits are (N, Vp): V tokens, then padding columns that have no probability and get zero gradient. A row with
target -1 has loss 0 and zero gradient. Nothing is saved: the gradient takes the place of the logits, the
largest activation. The maximum (subtracted, so that exp does not overflow) and the sum come from one pass: a
sum relative to the maximum so far is rescaled when the maximum grows (Milakov & Gimelshein, "Online
normalizer calculation for softmax", 2018).

If the vocabulary is split across devices, each has the logits of a contiguous range of tokens, and they
exchange three numbers per row: classifier_part finds the maximum, the sum and the target's logit over one
device's tokens, and classifier merges the results of all devices in rank order, so that the results are
bit-identical on all devices.
*/
#pragma once

#include <algorithm>
#include <cfloat>

#include "kernels/common.cuh"
#include "kernels/fast_math.cuh"

// sum_v exp(x_v - max). It starts with a finite maximum, so that logits of -Inf contribute 0.
struct SoftmaxSum {
    float max = -FLT_MAX, sum = 0;
};

HOST_DEVICE inline SoftmaxSum merge(SoftmaxSum a, SoftmaxSum b) {
    float max = fmaxf(a.max, b.max);
    return {max, a.sum * fast_exp(a.max - max) + b.sum * fast_exp(b.max - max)};
}

// Returns the target's index among tokens first_token .. first_token + V - 1, or -1 if it is elsewhere or
// there is none. Padding columns do not match, although they have the indices of the next device's first
// tokens.
HOST_DEVICE inline int target_here(int target, int first_token, int V) {
    return target >= first_token && target - first_token < V ? target - first_token : -1;
}

// One device's results for a row, stored as three floats, which are easy to send.
struct ClassifierPart {
    SoftmaxSum total;
    float target_logit = 0;  // 0 if the target is not among this device's tokens
};
constexpr int classifier_part_floats = 3;

HOST_DEVICE inline void store_part(float* parts, size_t n, ClassifierPart part) {
    float* to = parts + n * classifier_part_floats;
    to[0] = part.total.max;
    to[1] = part.total.sum;
    to[2] = part.target_logit;
}

// A vocabulary that is split across devices, as one of them sees it: its own tokens begin at first_token, and
// parts (ranks, N, 3) holds each device's results of classifier_part. No parts: all tokens are on this
// device.
struct VocabParts {
    const float* parts = nullptr;
    int ranks = 1, first_token = 0;

    // Returns row n of N with all parts merged. A single part is returned unchanged, bit for bit.
    HOST_DEVICE ClassifierPart merged(int n, int N) const {
        const float* row = parts + (size_t)n * classifier_part_floats;
        size_t stride = (size_t)N * classifier_part_floats;
        ClassifierPart whole;
        for (int r = 0; r < ranks; r++) whole.total.max = fmaxf(whole.total.max, row[r * stride]);
        for (int r = 0; r < ranks; r++) {
            whole.total.sum += row[r * stride + 1] * fast_exp(row[r * stride] - whole.total.max);
            whole.target_logit += row[r * stride + 2];
        }
        return whole;
    }
};

// ----------------------------------------------------------------------------
// CPU

inline SoftmaxSum softmax_sum_cpu(const floatX* x, int size) {
    constexpr int chunk = 2048;  // stays in the L1 cache between its maximum and its sum
    SoftmaxSum total;
    for (int start = 0; start < size; start += chunk) {
        int end = std::min(start + chunk, size);
        float max = -FLT_MAX, sum = 0;
#pragma omp simd reduction(max : max)
        for (int i = start; i < end; i++) max = float(x[i]) > max ? float(x[i]) : max;
#pragma omp simd reduction(+ : sum)
        for (int i = start; i < end; i++) sum += fast_exp(float(x[i]) - max);
        total = merge(total, {max, sum});
    }
    return total;
}

// Overwrites a row's logits with their gradient. target is -1 if it is not among the row's tokens.
inline void classifier_gradient_cpu(floatX* row, SoftmaxSum total, int target, float dloss, int V, int Vp) {
    float target_logit = target < 0 ? 0.0f : float(row[target]);
    float scale = dloss / total.sum;
#pragma omp simd
    for (int v = 0; v < V; v++) row[v] = floatX(fast_exp(float(row[v]) - total.max) * scale);
    if (target >= 0) {
        float probability = fast_exp(target_logit - total.max) / total.sum;
        row[target] = floatX((probability - 1) * dloss);
    }
    std::fill(row + V, row + Vp, floatX(0.0f));
}

// here: the target's index in the row, or -1.
inline ClassifierPart part_of_row_cpu(const floatX* row, int here, int V) {
    return {softmax_sum_cpu(row, V), here < 0 ? 0.0f : float(row[here])};
}

inline void classifier_part_cpu(float* part, const floatX* logits, const int* targets, int first_token, int N,
                                int V, int Vp) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        int here = target_here(targets[n], first_token, V);
        ClassifierPart found;
        if (targets[n] >= 0) found = part_of_row_cpu(logits + (size_t)n * Vp, here, V);
        store_part(part, n, found);
    }
}

inline void classifier_cpu(floatX* logits, float* losses, const int* targets, float dloss, int N, int V,
                           int Vp, bool want_gradient, VocabParts vocab) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* row = logits + (size_t)n * Vp;
        if (targets[n] < 0) {
            losses[n] = 0;
            if (want_gradient) std::fill(row, row + Vp, floatX(0.0f));
            continue;
        }
        int here = target_here(targets[n], vocab.first_token, V);
        ClassifierPart whole = vocab.parts ? vocab.merged(n, N) : part_of_row_cpu(row, here, V);
        losses[n] = logf(whole.total.sum) + whole.total.max - whole.target_logit;
        if (want_gradient) classifier_gradient_cpu(row, whole.total, here, dloss, V, Vp);
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

// One block per row. With blocks of the largest size, only two rows per multiprocessor are in progress at a
// time, so they stay in the L2 cache from one pass to the next.
constexpr int classifier_block = 1024;

template <int W>
__device__ SoftmaxSum softmax_sum(const floatX* row, int V) {
    SoftmaxSum total;
    int whole = V / W * W;  // tokens in whole vectors
#pragma unroll 2
    for (int v = threadIdx.x * W; v < whole; v += blockDim.x * W) {
        auto x = load<W>(row + v);
        float max = total.max;
        for (int k = 0; k < W; k++) max = fmaxf(max, float(x[k]));
        total.sum *= fast_exp(total.max - max);
        for (int k = 0; k < W; k++) total.sum += fast_exp(float(x[k]) - max);
        total.max = max;
    }
    if (int v = whole + threadIdx.x; v < V) total = merge(total, {float(row[v]), 1});
    float max = block_max(total.max);
    return {max, block_sum(total.sum * fast_exp(total.max - max))};
}

// Overwrites a row's logits with their gradient. target is -1 if it is not among the row's tokens. Runs
// backward, because what softmax_sum read last is most likely still cached.
template <int W>
__device__ void classifier_gradient(floatX* row, SoftmaxSum total, int target, float target_logit,
                                    float dloss, int V, int Vp) {
    float scale = dloss / total.sum;
    auto gradient = [&](floatX logit) { return floatX(fast_exp(float(logit) - total.max) * scale); };
    int whole = V / W * W, step = blockDim.x * W;
    for (int v = whole + threadIdx.x; v < Vp; v += blockDim.x) {
        row[v] = v < V ? gradient(row[v]) : floatX(0.0f);
    }
    for (int v = whole - W - (int)threadIdx.x * W; v >= 0; v -= step) {
        auto x = load_last<W>(row + v);
        for (int k = 0; k < W; k++) x[k] = gradient(x[k]);
        store_last(row + v, x);
    }
    if (target < 0) return;
    __syncthreads();
    float probability = fast_exp(target_logit - total.max) / total.sum;
    if (threadIdx.x == 0) row[target] = floatX((probability - 1) * dloss);
}

// Writes the gradient of a row without a target.
template <int W>
__device__ void clear_row(floatX* row, int Vp) {
    for (int v = threadIdx.x * W; v < Vp; v += blockDim.x * W) store_last(row + v, Vec<floatX, W>{});
}

// here: the target's index in the row, or -1. When this returns, all threads have read the target's logit.
template <int W>
__device__ ClassifierPart part_of_row(const floatX* row, int here, int V) {
    float target_logit = here < 0 ? 0.0f : float(row[here]);
    return {softmax_sum<W>(row, V), target_logit};
}

template <int W>
__global__ void __launch_bounds__(classifier_block, 2)
    classifier_part_kernel(float* part, const floatX* logits, const int* targets, int first_token, int V,
                           int Vp) {
    int target = targets[blockIdx.x], here = target_here(target, first_token, V);
    ClassifierPart found;
    if (target >= 0) found = part_of_row<W>(logits + (size_t)blockIdx.x * Vp, here, V);
    if (threadIdx.x == 0) store_part(part, blockIdx.x, found);
}

template <int W>
__global__ void __launch_bounds__(classifier_block, 2)
    classifier_kernel(floatX* logits, float* losses, const int* targets, float dloss, int V, int Vp,
                      bool want_gradient, VocabParts vocab) {
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x], here = target_here(target, vocab.first_token, V);
    if (target < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (want_gradient) clear_row<W>(row, Vp);
        return;
    }
    ClassifierPart whole = vocab.parts ? vocab.merged(blockIdx.x, gridDim.x) : part_of_row<W>(row, here, V);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(whole.total.sum) + whole.total.max - whole.target_logit;
    if (want_gradient) classifier_gradient<W>(row, whole.total, here, whole.target_logit, dloss, V, Vp);
}

__global__ void sum_losses_kernel(float* total, const float* losses, int N) {
    float sum = 0;
#pragma unroll 8
    for (int n = threadIdx.x; n < N; n += blockDim.x) sum += losses[n];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}

#endif

// ----------------------------------------------------------------------------
// launchers

// dloss is the gradient of the objective with respect to each loss: 1 / (number of targets in the global
// batch). The logits are those of this device's V tokens; the losses are over the whole vocabulary, so they
// are the same on every device.
inline void classifier(floatX* logits /* (N, Vp) */, float* losses /* (N) */, const int* targets /* (N) */,
                       float dloss, int N, int V, int Vp, bool want_gradient, cudaStream_t stream,
                       const VocabParts& vocab = {}) {
    ON_DEVICE(
        stream,
        (LaunchCost{.read = array_bytes(logits, N, V) + array_bytes(targets, N) +
                            array_bytes(vocab.parts, vocab.ranks, N, classifier_part_floats),
                    .written = (want_gradient ? array_bytes(logits, N, Vp) : 0) + array_bytes(losses, N)}),
        classifier_cpu(logits, losses, targets, dloss, N, V, Vp, want_gradient, vocab),
        with_vec_width<floatX>(Vp, [=](auto width) {
            launch(classifier_kernel<width>, N, row_threads(Vp / width(), classifier_block), 0, stream,
                   logits, losses, targets, dloss, V, Vp, want_gradient, vocab);
        }));
}

// Writes, for each row, {maximum, sum of exp(logit - maximum), logit of the target or 0 if it is elsewhere}
// over this device's tokens, first_token .. first_token + V - 1. targets are tokens of the whole vocabulary.
inline void classifier_part(float* part /* (N, 3) */, const floatX* logits /* (N, Vp) */,
                            const int* targets /* (N) */, int first_token, int N, int V, int Vp,
                            cudaStream_t stream) {
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(logits, N, V) + array_bytes(targets, N),
                          .written = array_bytes(part, N, classifier_part_floats)}),
              classifier_part_cpu(part, logits, targets, first_token, N, V, Vp),
              with_vec_width<floatX>(Vp, [=](auto width) {
                  launch(classifier_part_kernel<width>, N, row_threads(Vp / width(), classifier_block), 0,
                         stream, part, logits, targets, first_token, V, Vp);
              }));
}

inline void sum_losses(float* total /* (1) += */, const float* losses /* (N) */, int N, cudaStream_t stream) {
    ON_DEVICE(stream, (LaunchCost{.read = array_bytes(losses, N)}), sum_losses_cpu(total, losses, N),
              launch(sum_losses_kernel, 1, 1024, 0, stream, total, losses, N));
}
