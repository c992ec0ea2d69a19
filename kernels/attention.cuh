/*
Causal self-attention with grouped key/value heads, without a (T, T) matrix in memory (Dao, FlashAttention-2,
2023).

    out_i = sum_j p_ij v_j,  p_ij = exp(s_ij - lse_i),  s_ij = q_i . k_j / sqrt(HS)
    lse_i = log sum_j exp(s_ij)

Here j runs over the keys that query i sees: those of its document, at most the last `window`, and none after
its own position. A call may cover the queries of only a contiguous range of positions of each sequence.

Saved for the backward pass: qkv, out and lse. The backward pass recomputes the probabilities from these tile
by tile, and with dp_ij = dout_i . v_j and ds_ij = p_ij (dp_ij - dout_i . out_i) / sqrt(HS)

    dv_j = sum_i p_ij dout_i,  dk_j = sum_i ds_ij q_i,  dq_i = sum_j ds_ij k_j

All sums run in a fixed order, so the results of all runs are bit-identical.
*/
#pragma once

#include "kernels/attention_backward.cuh"
#include "kernels/attention_cpu.h"
#include "kernels/attention_mma_backward.cuh"
#include "kernels/attention_mma_forward.cuh"
#include "kernels/attention_shape.h"
#include "kernels/column_sums.cuh"
#include "kernels/common.cuh"
#include "kernels/kernel_image.cuh"

#if defined(PRECISION_BF16) && !defined(DEVICE_CPU)
#include "kernels/attention_hopper.cuh"
#include "kernels/attention_hopper_backward.cuh"
#endif

// ----------------------------------------------------------------------------
// CPU: attention_cpu.h

// ----------------------------------------------------------------------------
// CUDA kernels: attention_mma_*.cuh, for every card since Ampere; attention_hopper*.cuh, for Hopper in bf16

#ifndef DEVICE_CPU

enum class AttentionKernels { fastest, mma, wgmma };

// The kernels to use. Set before the first pass.
inline AttentionKernels attention_kernels = AttentionKernels::fastest;

// Returns whether this GPU is a Hopper, the code was compiled for it, and the kernels support heads of this
// shape.
inline bool has_wgmma_attention([[maybe_unused]] const AttentionShape& shape,
                                [[maybe_unused]] int architecture = kernel_architecture()) {
#ifdef PRECISION_BF16
    return hopper_attention_fits(shape) && device_properties().major == 9 && architecture >= 90;
#else
    return false;
#endif
}

// Returns whether both passes of a layer use the wgmma kernels.
[[maybe_unused]] inline bool takes_wgmma(const AttentionShape& shape) {
    return attention_kernels != AttentionKernels::mma && has_wgmma_attention(shape);
}

inline void launch_attention_forward(floatX* out, float* lse, float* amax, Qkv<const floatX> qkv,
                                     const AttentionShape& shape, cudaStream_t stream) {
    begin_amax(amax, stream);
#ifdef PRECISION_BF16
    if (takes_wgmma(shape)) return attention_hopper_forward(out, lse, amax, qkv, shape, stream);
#endif
    attention_mma_forward(out, lse, amax, qkv, shape, stream);
}

inline void launch_attention_backward(Qkv<floatX> dqkv, float* scratch, const floatX* dout,
                                      Qkv<const floatX> qkv, const floatX* out, const float* lse,
                                      const AttentionShape& shape, cudaStream_t stream, float* dbias) {
#ifdef PRECISION_BF16
    if (takes_wgmma(shape))
        return attention_hopper_backward(dqkv, scratch, dout, qkv, out, lse, shape, stream, dbias);
#endif
    attention_mma_backward(dqkv, scratch, dout, qkv, out, lse, shape, stream);
    if (dbias) launch_backward_bias(dbias, scratch, dqkv.queries, shape.B * shape.Tk, shape.q_row, stream);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Returns how many floats of scratch attention_backward needs in a program whose activations have
// `element_bytes` bytes: enough for any card, or for the host if that program runs on the host. dbias:
// whether the gradient of a bias is wanted.
inline size_t attention_backward_scratch(const AttentionShape& shape, bool dbias = false,
                                         size_t element_bytes = sizeof(floatX)) {
    size_t floats = 0;
#ifdef DEVICE_CPU
    bool is_host = element_bytes == sizeof(float);
#else
    bool is_host = element_bytes > sizeof(floatX);
#endif
    if (is_host)
        floats = attention_backward_scratch_cpu(shape);
    else if (element_bytes < sizeof(float) && hopper_attention_fits(shape))  // Hopper's tiles are the widest
        with_hopper_width(shape.HS,
                          [&](int width) { floats = BackwardScratchSize(shape, width, dbias).floats(); });
    else
        with_head_width(shape.HS,
                        [&](int width) { floats = BackwardScratchSize(shape, width, false).floats(); });
    return std::max(floats, dbias ? matmul_backward_bias_scratch(shape.q_row) : 0);
}

// Returns the work of `products` matrix products, each as large as the one that computes the scores.
inline AttentionWork attention_work(const AttentionShape& s, int products, bool forward) {
    return {2.0 * products * s.mean_keys() * s.B * s.Tq * s.A(), s.mean_keys(), s.HS, forward};
}

// Keys of a tile; fewer on cards with little shared memory.
inline int keys_of_tile(const AttentionShape& s) {
    return s.HS <= 128 ? 128 : 64;
}

// The first key that query i sees, if a sequence is one document: the actual documents are not known here.
inline int first_key_of_one_document(AttentionShape s, int i) {
    s.doc_start = nullptr;
    return s.first_key(0, i);
}

// The first key of the first tile of keys that queries see.
inline int first_tile_begin(const AttentionShape& s) {
    return first_key_of_one_document(s, 0) / keys_of_tile(s) * keys_of_tile(s);
}

inline LaunchCost attention_forward_cost(const floatX* out, const float* lse, const floatX* qkv,
                                         const AttentionShape& s) {
    return {.read = array_bytes(qkv, s.B, s.Tq, s.A()) +
                    array_bytes(qkv, s.B, s.keys_end() - first_tile_begin(s), 2 * s.NKV * s.HS),
            .written = array_bytes(out, s.B, s.Tq, s.A()) + array_bytes(lse, s.B, s.NH, s.Tq),
            .attention = attention_work(s, 2, true)};
}

// Returns the costs of the kernel that computes statistics of the rows of out and dout, and of the kernels
// that compute gradients. Hopper's kernel sums dq in scratch only where queries see keys of more than one
// tile, and leaves column sums of every 16 rows for the bias. Other cards sum all of dq in scratch; one more
// kernel converts the sums, and the bias gradient is summed from dqkv.
inline std::vector<LaunchCost> attention_backward_costs(const floatX* dqkv, const float* scratch,
                                                        const floatX* dout, const float* lse,
                                                        const AttentionShape& s, const float* dbias) {
    const int keys = keys_of_tile(s), queries = s.HS <= 64 ? 128 : s.HS <= 192 ? 64 : 32;  // of a tile
    const bool wgmma = ledger->card.has_wgmma() && hopper_attention_fits(s),
               mma = !wgmma && ledger->card.capability > 0;
    // Hopper's kernel writes gradients of all keys. Others visit the tiles that queries see, after a memset.
    const int first = mma ? first_tile_begin(s) : 0,
              end = mma ? std::min(round_up(s.keys_end(), keys), s.Tk) : s.Tk;
    int width = 0;
    auto take = [&](int of_tiles) { width = of_tiles; };
    wgmma ? with_hopper_width(s.HS, take) : with_head_width(s.HS, take);
    double rows_of_several_tiles = 0;
    for (int i = 0; i < s.Tq; i += queries) {
        int last = s.position(std::min(i + queries, s.Tq) - 1);
        if (first_key_of_one_document(s, i) / keys < last / keys) rows_of_several_tiles += queries;
    }
    double summed = round_up(s.Tq, queries), out = array_bytes(dout, s.B, s.Tq, s.A()),
           seen_keys = array_bytes(dqkv, s.B, s.keys_end() - first, 2 * s.NKV * s.HS),
           written_keys = array_bytes(dqkv, s.B, end - first, 2 * s.NKV * s.HS),
           statistics =
               array_bytes(scratch, s.B, 2.0 * s.NH + 1, round_up(s.Tq, BackwardScratchSize::padding)),
           sums_of_row = array_bytes(scratch, s.B, s.NH * width), sums = rows_of_several_tiles * sums_of_row,
           partials = dbias ? array_bytes(scratch, s.B, ceil_div(s.Tk, 16), s.q_row) : 0;
    std::vector<LaunchCost> costs = {
        {.read = 2 * out + array_bytes(lse, s.B, s.NH, s.Tq), .written = statistics},
        {.read = 2 * out + seen_keys + statistics + sums,
         .written = written_keys + (mma ? summed * sums_of_row : out + sums + partials),
         .attention = attention_work(s, 5, false)}};
    if (mma) costs.push_back({.read = array_bytes(scratch, s.B, s.Tq, s.A()), .written = out});
    double bias = array_bytes(dbias, s.q_row);
    if (dbias && !mma) costs.push_back({.read = partials + bias, .written = bias});
    if (dbias && mma) costs.push_back(column_sums_cost(dbias, scratch, dqkv, s.B * s.Tk, s.q_row));
    return costs;
}

// Position t of a sequence attends to max(doc_start[t], t - window + 1) ... t (window 0: no limit; doc_start
// null: 0). doc_start[t] <= t, and it never decreases along a sequence. Query head h reads key/value head h /
// (NH / NKV). The queries of the call are those at the positions q0 ... q0 + Tq - 1. Other queries in qkv are
// not read, and neither are keys and values after these positions. AttentionShape defines where heads are.
inline void attention_forward(floatX* out,  // (B, out_rows, out_heads, HS), from the first query on, like lse
                              float* lse,   // (B, out_heads, out_rows)
                              Qkv<const floatX> qkv, const AttentionShape& shape, cudaStream_t stream,
                              float* amax = nullptr) {  // (1) amax of out, or null
    ON_DEVICE(stream, attention_forward_cost(out, lse, qkv.queries, shape),
              (attention_forward_cpu(out, lse, qkv, shape),
               keep_amax_cpu(amax, out, (size_t)shape.B * shape.Tq * shape.A())),
              launch_attention_forward(out, lse, amax, qkv, shape, stream));
}

// out and lse are those of the forward pass. dqkv receives what the queries of the call contribute: gradients
// of keys and values at all Tk positions (zeros where no query sees them), and gradients of queries at q0 ...
// q0 + Tq - 1 only; those of other queries are left as they are. Unless dbias is null, also adds the gradient
// of the bias of the layer that made qkv, which requires a query at every position, in the same rows as keys.
inline void attention_backward(Qkv<floatX> dqkv,    // laid out like qkv
                               float* scratch,      // (attention_backward_scratch(shape, dbias))
                               const floatX* dout,  // (B, out_rows, out_heads, HS)
                               Qkv<const floatX> qkv,
                               const floatX* out,  // (B, out_rows, out_heads, HS)
                               const float* lse,   // (B, out_heads, out_rows)
                               const AttentionShape& shape, cudaStream_t stream,
                               float* dbias = nullptr) {  // (NH + 2*NKV, HS) +=
    if (dbias && shape.Tq < shape.Tk) fail("attention: the gradient of a bias needs all queries");
    ON_DEVICE(stream, attention_backward_costs(dqkv.queries, scratch, dout, lse, shape, dbias),
              attention_backward_cpu({dqkv, dout, out, qkv, lse, shape}, scratch, dbias),
              launch_attention_backward(dqkv, scratch, dout, qkv, out, lse, shape, stream, dbias));
}

// These overloads are for calls with all heads in one array (B, Tk, NH + 2*NKV, HS).
inline void attention_forward(floatX* out, float* lse, const floatX* qkv, const AttentionShape& shape,
                              cudaStream_t stream, float* amax = nullptr) {
    attention_forward(out, lse, in_rows(qkv, shape), shape, stream, amax);
}
inline void attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv,
                               const floatX* out, const float* lse, const AttentionShape& shape,
                               cudaStream_t stream, float* dbias = nullptr) {
    attention_backward(in_rows(dqkv, shape), scratch, dout, in_rows(qkv, shape), out, lse, shape, stream,
                       dbias);
}
