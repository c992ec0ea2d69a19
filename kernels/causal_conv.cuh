/*
The sum that turns one matrix product into a causal convolution over two tokens. For each row, the product
computes both taps side by side, inp (N, 2, C): the row's contribution to the next row, and then to itself.

    forward      out[t] = inp[t - 1][0] + inp[t][1] + bias (C)
    backward     dinp[t][0] = dout[t + 1],  dinp[t][1] = dout[t]

The first row of a document or a sequence has no row before it, so its first term is left out, as is dout[t +
1] if row t + 1 is such a row. A row's neighbor may be on another context rank. Nothing is saved.

Rows may be processed in parts, in ascending order: work on rows [first, first + count) reads, or writes, the
first taps of rows [first - 1, first + count - 1).
*/
#pragma once

#include <algorithm>

#include "kernels/common.cuh"
#include "kernels/context_cut.h"

// The rows of a micro-batch: sequences of T each or, on a context rank, pieces of sequences.
struct ConvRows {
    int N, T;
    // position at which each row's document begins, for all rows of a sequence; null: 0
    const int* doc_start = nullptr;
    // (N / T, C) first taps of the row before each sequence or piece, if sequences continue earlier ones or
    // there are several context ranks; otherwise null
    const floatX* before = nullptr;
    const floatX* after = nullptr;  // (N / T, C) likewise, the gradient of the row after each piece
    ContextCut cut = {};            // several ranks: a sequence has two pieces here

    HOST_DEVICE bool is_cut() const { return cut.ranks > 1; }

    // Returns whether the row at a position of sequence `b` begins a document or the sequence.
    HOST_DEVICE bool begins_at(int b, int at) const {
        return at == (doc_start ? doc_start[(size_t)b * (is_cut() ? cut.T : T) + at] : 0);
    }

    // Returns the first taps of the row before this one, or null if there is none.
    HOST_DEVICE const floatX* taps_before(const floatX* inp, int row, int C) const {
        bool continues = !is_cut() && before && row % T == 0;
        if (!continues && begins_at(sequence(row), position(row))) return nullptr;
        return row % T == 0 ? before + (size_t)(row / T) * C : inp + (size_t)(row - 1) * 2 * C;
    }

    // Returns the gradient of the row after this one, or null if there is none.
    HOST_DEVICE const floatX* gradient_after(const floatX* dout, int row, int C) const {
        int next = position(row) + 1;
        if (next == (is_cut() ? cut.T : T) || begins_at(sequence(row), next)) return nullptr;
        return is_cut() && (row + 1) % T == 0 ? after + (size_t)(row / T) * C : dout + (size_t)(row + 1) * C;
    }

private:
    HOST_DEVICE int sequence(int row) const { return row / (is_cut() ? 2 * T : T); }
    HOST_DEVICE int position(int row) const { return is_cut() ? cut.position(row % (2 * T)) : row % T; }
};

// ----------------------------------------------------------------------------
// CPU

inline void causal_conv_forward_cpu(floatX* out, const floatX* inp, const floatX* bias, const ConvRows& rows,
                                    int first, int count, int C) {
#pragma omp parallel for
    for (int row = first; row < first + count; row++) {
        const floatX* own = inp + ((size_t)row * 2 + 1) * C;
        const floatX* before = rows.taps_before(inp, row, C);
        floatX* o = out + (size_t)row * C;
#pragma omp simd
        for (int c = 0; c < C; c++) {
            float sum = (before ? float(before[c]) : 0.0f) + float(own[c]);
            o[c] = floatX(sum + (bias ? float(bias[c]) : 0.0f));
        }
    }
}

inline void causal_conv_backward_cpu(floatX* dinp, const floatX* dout, const ConvRows& rows, int first,
                                     int count, int C) {
#pragma omp parallel for
    for (int row = first; row < first + count; row++) {
        std::copy_n(dout + (size_t)row * C, C, dinp + ((size_t)row * 2 + 1) * C);
        for (int r = std::max(row - 1, 0); r < (row == rows.N - 1 ? rows.N : row); r++) {
            const floatX* dy = rows.gradient_after(dout, r, C);
            floatX* first = dinp + (size_t)r * 2 * C;
            dy ? (void)std::copy_n(dy, C, first) : (void)std::fill_n(first, C, floatX(0.0f));
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels
#ifndef DEVICE_CPU

// One row per block, W neighboring elements per thread at a time.
template <int W>
__global__ void causal_conv_forward_kernel(floatX* out, const floatX* inp, const floatX* bias, ConvRows rows,
                                           int first, int C) {
    int row = first + blockIdx.x;
    const floatX* own = inp + ((size_t)row * 2 + 1) * C;
    const floatX* before = rows.taps_before(inp, row, C);
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Vec<floatX, W> x = load<W>(own + c), sum;
        Vec<floatX, W> y = before ? load<W>(before + c) : Vec<floatX, W>{};
        Vec<floatX, W> b = bias ? load<W>(bias + c) : Vec<floatX, W>{};
        for (int i = 0; i < W; i++) sum[i] = floatX(float(y[i]) + float(x[i]) + float(b[i]));
        store(out + (size_t)row * C + c, sum);
    }
}

// One row of dout per block; the block writes it to both places.
template <int W>
__global__ void causal_conv_backward_kernel(floatX* dinp, const floatX* dout, ConvRows rows, int first,
                                            int C) {
    int row = first + blockIdx.x;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W)
        store(dinp + ((size_t)row * 2 + 1) * C + c, load<W>(dout + (size_t)row * C + c));
#pragma unroll 1
    for (int r = max(row - 1, 0); r < (row == rows.N - 1 ? rows.N : row); r++) {
        const floatX* dy = rows.gradient_after(dout, r, C);
        for (int c = threadIdx.x * W; c < C; c += blockDim.x * W)
            store(dinp + (size_t)r * 2 * C + c, dy ? load<W>(dy + c) : Vec<floatX, W>{});
    }
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Writes rows [first, first + count) of out.
inline void causal_conv_forward(floatX* out,         // (N, C)
                                const floatX* inp,   // (N, 2, C)
                                const floatX* bias,  // (C), or null
                                ConvRows rows, int first, int count, int C, cudaStream_t stream) {
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(inp, count, 2, C) + array_bytes(bias, C),
                          .written = array_bytes(out, count, C)}),
              causal_conv_forward_cpu(out, inp, bias, rows, first, count, C),
              with_vec_width<floatX>(C, [&](auto width) {
                  launch(causal_conv_forward_kernel<width()>, count, row_threads(C / width(), 256), 0, stream,
                         out, inp, bias, rows, first, C);
              }));
}

// Writes the gradients that follow from rows [first, first + count) of dout: those of the same rows' second
// taps and of the preceding rows' first taps; if the last of all rows is among them, also of its own first
// taps.
inline void causal_conv_backward(floatX* dinp,        // (N, 2, C)
                                 const floatX* dout,  // (N, C)
                                 ConvRows rows, int first, int count, int C, cudaStream_t stream) {
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(dout, count, C), .written = array_bytes(dinp, count, 2, C)}),
              causal_conv_backward_cpu(dinp, dout, rows, first, count, C),
              with_vec_width<floatX>(C, [&](auto width) {
                  launch(causal_conv_backward_kernel<width()>, count, row_threads(C / width(), 256), 0,
                         stream, dinp, dout, rows, first, C);
              }));
}
