/*
Rows of keys and values between two orders: by context rank (ranks, B, own, W), as ranks send them, and by
position (B, T, W), as attention reads them (kernels/context_cut.h).

    order_by_position    out[b, t] = inp[owner(t), b, index(t)]
    add_by_rank          out[owner(t), b, index(t)] (+)= inp[b, t]    in float, for t < end
*/
#pragma once

#include "kernels/common.cuh"
#include "kernels/context_cut.h"

// The rows of B sequences, cut over contexts.
struct ContextRows {
    ContextCut cut;
    int B, W;

    HOST_DEVICE size_t rows() const { return (size_t)B * cut.T; }
    // Offset by rank of row `row` by position.
    HOST_DEVICE size_t by_rank(size_t row) const {
        int b = (int)(row / cut.T), at = (int)(row % cut.T);
        return (((size_t)cut.owner(at) * B + b) * cut.own() + cut.index(at)) * W;
    }
};

// ----------------------------------------------------------------------------
// CPU

inline void order_by_position_cpu(floatX* out, const floatX* inp, const ContextRows& s) {
#pragma omp parallel for
    for (size_t row = 0; row < s.rows(); row++) std::copy_n(inp + s.by_rank(row), s.W, out + row * s.W);
}

inline void add_by_rank_cpu(float* out, const floatX* inp, const ContextRows& s, int end, bool overwrite) {
#pragma omp parallel for
    for (size_t row = 0; row < s.rows(); row++) {
        bool has_value = (int)(row % s.cut.T) < end;
        float* sums = out + s.by_rank(row);
        for (int w = 0; w < s.W && (has_value || overwrite); w++)
            sums[w] = (overwrite ? 0.0f : sums[w]) + (has_value ? (float)inp[row * s.W + w] : 0.0f);
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned context_rows_block = 256;  // threads, of W elements of a row each

template <int W>
__global__ void order_by_position_kernel(floatX* out, const floatX* inp, ContextRows s) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W, row = i / s.W;
    if (row < s.rows()) store(out + i, load<W>(inp + s.by_rank(row) + i % s.W));
}

template <int W>
__global__ void add_by_rank_kernel(float* out, const floatX* inp, ContextRows s, int end, bool overwrite) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W, row = i / s.W;
    if (row >= s.rows()) return;
    bool has_value = (int)(row % s.cut.T) < end;
    if (!has_value && !overwrite) return;
    float* sums = out + s.by_rank(row) + i % s.W;
    Vec<float, W> sum = {};
    if (!overwrite) sum = load<W>(sums);
    if (has_value) {
        Vec<floatX, W> more = load<W>(inp + i);
        for (int k = 0; k < W; k++) sum[k] += float(more[k]);
    }
    store(sums, sum);
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void order_by_position(floatX* out,        // (B, T, W)
                              const floatX* inp,  // (ranks, B, own, W)
                              const ContextRows& s, cudaStream_t stream) {
    auto cost = [&]() -> LaunchCost {
        return {.read = array_bytes(inp, s.rows(), s.W), .written = array_bytes(out, s.rows(), s.W)};
    };
    ON_DEVICE(stream, cost(), order_by_position_cpu(out, inp, s), with_vec_width<floatX>(s.W, [&](auto W) {
                  size_t blocks = ceil_div(s.rows() * s.W / W, context_rows_block);
                  launch(order_by_position_kernel<W>, blocks, context_rows_block, 0, stream, out, inp, s);
              }));
}

// overwrite: writes all rows, zeros from `end` on. Otherwise adds, and leaves rows from `end` on.
inline void add_by_rank(float* out,         // (ranks, B, own, W)
                        const floatX* inp,  // (B, T, W), of which positions below `end` are read
                        const ContextRows& s, int end, bool overwrite, cudaStream_t stream) {
    auto cost = [&]() -> LaunchCost {
        double read = array_bytes(inp, s.B, end, s.W), seen = array_bytes(out, s.B, end, s.W);
        if (overwrite) return {.read = read, .written = array_bytes(out, s.rows(), s.W)};
        return {.read = read + seen, .written = seen};
    };
    ON_DEVICE(
        stream, cost(), add_by_rank_cpu(out, inp, s, end, overwrite), with_vec_width<float>(s.W, [&](auto W) {
            size_t blocks = ceil_div(s.rows() * s.W / W, context_rows_block);
            launch(add_by_rank_kernel<W>, blocks, context_rows_block, 0, stream, out, inp, s, end, overwrite);
        }));
}
