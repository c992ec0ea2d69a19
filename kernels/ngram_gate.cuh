/*
The gate of n-gram memory (Cheng et al., "Conditional Memory via Scalable Lookup", 2026, arXiv:2601.07372).
The n-grams that end with a token look up rows of a table, a matrix turns these into a key and a value, and
the token's hidden state, the query, decides how much of the value is added to the residual stream:

    score = average over c of query[c] * key[c] * rstd * sqrt(C),   rstd = 1 / sqrt(average of key[c]^2 + eps)
    out   = sigmoid(score) * value

So the score is the product of query and key, each normalized by RMSNorm, over sqrt(C). The query's norm has a
weight; one for the key's norm would be redundant, because the two would only be multiplied. query is (N, C),
and a row of kv is [key | value], (N, 2C). Saved for the backward pass: score and rstd (N). With gate =
sigmoid(score), xhat = key * rstd:

    dvalue = gate * dout
    dscore = gate (1 - gate) * sum of dout * value
    dquery = dscore / sqrt(C) * xhat
    dkey   = dscore / sqrt(C) * rstd * (query - xhat * score / sqrt(C))

The last line is RMSNorm's gradient, in which the average of query * xhat is already known: score / sqrt(C).
*/
#pragma once

#include <cmath>

#include "kernels/common.cuh"
#include "kernels/fast_math.cuh"

// The factors of the gradient for one token's row.
struct NgramGateSlope {
    float gate, key, rstd;
    float mean;  // average of query * xhat

    HOST_DEVICE NgramGateSlope(float score, float rstd, float dgate, float root)
        : gate(fast_sigmoid(score)), key(dgate * gate * (1 - gate) / root), rstd(rstd), mean(score / root) {}
    HOST_DEVICE float dquery(float k) const { return key * k * rstd; }
    HOST_DEVICE float dkey(float q, float k) const { return key * rstd * (q - k * rstd * mean); }
};

// ----------------------------------------------------------------------------
// CPU

inline void ngram_gate_forward_cpu(floatX* out, float* score, float* rstd, const floatX* query,
                                   const floatX* kv, int N, int C, float eps) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX *q = query + (size_t)n * C, *k = kv + (size_t)n * 2 * C, *v = k + C;
        floatX* o = out + (size_t)n * C;
        float squares = 0, products = 0;
#pragma omp simd reduction(+ : squares, products)
        for (int c = 0; c < C; c++) {
            squares += float(k[c]) * float(k[c]);
            products += float(q[c]) * float(k[c]);
        }
        rstd[n] = 1.0f / sqrtf(squares / C + eps);
        score[n] = products * rstd[n] / sqrtf(C);
        float gate = fast_sigmoid(score[n]);
#pragma omp simd
        for (int c = 0; c < C; c++) o[c] = floatX(gate * float(v[c]));
    }
}

inline void ngram_gate_backward_cpu(floatX* dquery, floatX* dkv, const floatX* dout, const float* score,
                                    const float* rstd, const floatX* query, const floatX* kv, int N, int C) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX *q = query + (size_t)n * C, *k = kv + (size_t)n * 2 * C, *v = k + C,
                     *dy = dout + (size_t)n * C;
        floatX *dq = dquery + (size_t)n * C, *dk = dkv + (size_t)n * 2 * C, *dv = dk + C;
        float dgate = 0;
#pragma omp simd reduction(+ : dgate)
        for (int c = 0; c < C; c++) dgate += float(dy[c]) * float(v[c]);
        NgramGateSlope slope(score[n], rstd[n], dgate, sqrtf(C));
#pragma omp simd
        for (int c = 0; c < C; c++) {
            float qc = float(q[c]), kc = float(k[c]);
            dq[c] = floatX(slope.dquery(kc));
            dk[c] = floatX(slope.dkey(qc, kc));
            dv[c] = floatX(slope.gate * float(dy[c]));
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels: one block per row; a thread handles W neighbors at a time

#ifndef DEVICE_CPU

template <int W>
__global__ void ngram_gate_forward_kernel(floatX* out, float* score, float* rstd, const floatX* query,
                                          const floatX* kv, int C, float eps) {
    size_t n = blockIdx.x;
    const floatX *q = query + n * C, *k = kv + n * 2 * C;
    float squares = 0, products = 0;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        auto qc = load<W>(q + c), kc = load<W>(k + c);
        for (int i = 0; i < W; i++) {
            squares += float(kc[i]) * float(kc[i]);
            products += float(qc[i]) * float(kc[i]);
        }
    }
    float r = 1.0f / sqrtf(block_sum(squares) / C + eps);
    float s = block_sum(products) * r / sqrtf(C), gate = fast_sigmoid(s);
    if (threadIdx.x == 0) score[n] = s, rstd[n] = r;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        auto v = load<W>(k + C + c);
        for (int i = 0; i < W; i++) v[i] = floatX(gate * float(v[i]));
        store(out + n * C + c, v);
    }
}

template <int W>
__global__ void ngram_gate_backward_kernel(floatX* dquery, floatX* dkv, const floatX* dout,
                                           const float* score, const float* rstd, const floatX* query,
                                           const floatX* kv, int C) {
    size_t n = blockIdx.x;
    const floatX *q = query + n * C, *k = kv + n * 2 * C, *dy = dout + n * C;
    floatX* dk = dkv + n * 2 * C;
    float dgate = 0;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        auto dyc = load<W>(dy + c), v = load<W>(k + C + c);
        for (int i = 0; i < W; i++) dgate += float(dyc[i]) * float(v[i]);
    }
    NgramGateSlope slope(score[n], rstd[n], block_sum(dgate), sqrtf(C));
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        auto qc = load<W>(q + c), kc = load<W>(k + c), dyc = load<W>(dy + c);
        for (int i = 0; i < W; i++) {
            float one = float(qc[i]), other = float(kc[i]);
            qc[i] = floatX(slope.dquery(other));
            kc[i] = floatX(slope.dkey(one, other));
            dyc[i] = floatX(slope.gate * float(dyc[i]));
        }
        store(dquery + n * C + c, qc);
        store(dk + c, kc);
        store(dk + C + c, dyc);
    }
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void ngram_gate_forward(floatX* out,          // (N, C)
                               float* score,         // (N)
                               float* rstd,          // (N)
                               const floatX* query,  // (N, C)
                               const floatX* kv,     // (N, 2, C)
                               int N, int C, float eps, cudaStream_t stream) {
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(query, N, C) + array_bytes(kv, N, 2, C),
                          .written = array_bytes(out, N, C) + array_bytes(score, N) + array_bytes(rstd, N)}),
              ngram_gate_forward_cpu(out, score, rstd, query, kv, N, C, eps),
              with_vec_width<floatX>(C, [=](auto width) {
                  launch(ngram_gate_forward_kernel<width()>, N, row_threads(C / width(), 256), 0, stream, out,
                         score, rstd, query, kv, C, eps);
              }));
}

inline void ngram_gate_backward(floatX* dquery,       // (N, C)
                                floatX* dkv,          // (N, 2, C), may be kv
                                const floatX* dout,   // (N, C)
                                const float* score,   // (N)
                                const float* rstd,    // (N)
                                const floatX* query,  // (N, C), may be dquery
                                const floatX* kv,     // (N, 2, C)
                                int N, int C, cudaStream_t stream) {
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(dout, N, C) + array_bytes(query, N, C) +
                                  array_bytes(kv, N, 2, C) + array_bytes(score, N) + array_bytes(rstd, N),
                          .written = array_bytes(dquery, N, C) + array_bytes(dkv, N, 2, C)}),
              ngram_gate_backward_cpu(dquery, dkv, dout, score, rstd, query, kv, N, C),
              with_vec_width<floatX>(C, [=](auto width) {
                  launch(ngram_gate_backward_kernel<width()>, N, row_threads(C / width(), 256), 0, stream,
                         dquery, dkv, dout, score, rstd, query, kv, C);
              }));
}
