/*
Causal self-attention with grouped key/value heads, without a (T, T) matrix in memory (Dao, FlashAttention-2,
2023).

    out_i = sum_j p_ij v_j,  p_ij = exp(s_ij - lse_i),  s_ij = q_i . k_j / sqrt(HS),  lse_i = log sum_j
exp(s_ij)

where j runs over the keys that query i sees: those of its document, no more than `window`, none after i.

Saved for the backward pass: qkv, out and lse. From these the probabilities come back tile by tile, and with
dp_ij = dout_i . v_j and ds_ij = p_ij (dp_ij - dout_i . out_i) / sqrt(HS)

    dv_j = sum_i p_ij dout_i,  dk_j = sum_i ds_ij q_i,  dq_i = sum_j ds_ij k_j

All sums are made in a fixed order, and the bits are the same on every run.
*/
#pragma once

#include "kernels/attention_cpu.h"
#include "kernels/attention_mma_backward.cuh"
#include "kernels/attention_mma_forward.cuh"
#include "kernels/attention_shape.h"
#include "kernels/common.cuh"

#if defined(PRECISION_BF16) && !defined(DEVICE_CPU)
#include "kernels/attention_hopper.cuh"
#include "kernels/attention_hopper_backward.cuh"
#endif

// ----------------------------------------------------------------------------
// CPU: attention_cpu.h

// ----------------------------------------------------------------------------
// CUDA kernels: attention_mma_*.cuh, of every card since Ampere; attention_hopper*.cuh, of Hopper, in bf16

#ifndef DEVICE_CPU

enum class AttentionKernels { fastest, mma, wgmma };

// Those that are asked for. Set before the first pass.
inline AttentionKernels attention_kernels = AttentionKernels::fastest;

// Whether there are kernels of Hopper for heads of this shape here.
inline bool has_wgmma_attention([[maybe_unused]] const AttentionShape& shape) {
#ifdef PRECISION_BF16
    return hopper_attention_fits(shape);
#else
    return false;
#endif
}

// The same for both passes of a layer.
[[maybe_unused]] inline bool takes_wgmma(const AttentionShape& shape) {
    return attention_kernels != AttentionKernels::mma && has_wgmma_attention(shape);
}

inline void launch_attention_forward(floatX* out, float* lse, const floatX* qkv, const AttentionShape& shape,
                                     cudaStream_t stream) {
#ifdef PRECISION_BF16
    if (takes_wgmma(shape)) return attention_hopper_forward(out, lse, qkv, shape, stream);
#endif
    attention_mma_forward(out, lse, qkv, shape, stream);
}

inline void launch_attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv,
                                      const floatX* out, const float* lse, const AttentionShape& shape,
                                      cudaStream_t stream) {
#ifdef PRECISION_BF16
    if (takes_wgmma(shape))
        return attention_hopper_backward(dqkv, scratch, dout, qkv, out, lse, shape, stream);
#endif
    attention_mma_backward(dqkv, scratch, dout, qkv, out, lse, shape, stream);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Floats of scratch that attention_backward needs.
inline size_t attention_backward_scratch(int B, int T, [[maybe_unused]] int NH, [[maybe_unused]] int NKV,
                                         int HS) {
#ifdef DEVICE_CPU
    return attention_backward_scratch_cpu(B, T, NKV, HS);
#else
    size_t floats = 0;
    auto count = [&](int width) { floats = BackwardScratch(nullptr, B, T, NH, width).floats(); };
    with_head_width(HS, count);
#ifdef PRECISION_BF16
    if (has_wgmma_attention(attention_shape(B, T, NH, NKV, HS, 0, nullptr)))
        with_hopper_width(HS, count);  // as wide as the other tiles, or wider
#endif
    return floats;
#endif
}

// Position i of a sequence attends to max(doc_start[i], i - window + 1) ... i (window 0: no limit; doc_start
// null: 0). doc_start[i] <= i, and it never decreases along a sequence. Query head h reads key/value head h /
// (NH / NKV).
inline void attention_forward(floatX* out,           // (B, T, NH, HS)
                              float* lse,            // (B, NH, T)
                              const floatX* qkv,     // (B, T, NH + 2*NKV, HS)
                              const int* doc_start,  // (B, T), nullable
                              int B, int T, int NH, int NKV, int HS, int window, cudaStream_t stream) {
    AttentionShape shape = attention_shape(B, T, NH, NKV, HS, window, doc_start);
    ON_DEVICE(stream, attention_forward_cpu(out, lse, qkv, shape),
              launch_attention_forward(out, lse, qkv, shape, stream));
}

// out and lse are those of the forward pass.
inline void attention_backward(floatX* dqkv,          // (B, T, NH + 2*NKV, HS)
                               float* scratch,        // (attention_backward_scratch(B, T, NH, NKV, HS))
                               const floatX* dout,    // (B, T, NH, HS)
                               const floatX* qkv,     // (B, T, NH + 2*NKV, HS)
                               const floatX* out,     // (B, T, NH, HS)
                               const float* lse,      // (B, NH, T)
                               const int* doc_start,  // (B, T), nullable
                               int B, int T, int NH, int NKV, int HS, int window, cudaStream_t stream) {
    AttentionShape shape = attention_shape(B, T, NH, NKV, HS, window, doc_start);
    ON_DEVICE(stream, attention_backward_cpu({dqkv, dout, qkv, out, lse, shape}, scratch),
              launch_attention_backward(dqkv, scratch, dout, qkv, out, lse, shape, stream));
}
