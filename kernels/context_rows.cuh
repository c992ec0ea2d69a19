/*
Moves rows of keys and values between two orders: by context rank (ranks, B, own, W), as ranks send them, and
by position (B, T, W), as attention reads them (kernels/context_cut.h).

    order_by_position    out[b, t] = inp[owner(t), b, index(t)]
    add_by_rank          out[owner(t), b, index(t)] (+)= inp[b, t]    in float, for t < end
*/
#pragma once

#include "kernels/common.cuh"
#include "kernels/context_cut.h"

// The rows of B sequences that are split across context ranks.
struct ContextRows {
    ContextCut cut;
    int B, W;

    HOST_DEVICE size_t rows() const { return (size_t)B * cut.T; }
    // Offsets, in the two orders, of the row at a position of sequence `b`.
    HOST_DEVICE size_t by_rank(int b, int at) const {
        return (((size_t)cut.owner(at) * B + b) * cut.own() + cut.index(at)) * W;
    }
    HOST_DEVICE size_t by_position(int b, int at) const { return ((size_t)b * cut.T + at) * W; }
};

// ----------------------------------------------------------------------------
// CPU

inline void order_by_position_cpu(floatX* out, const floatX* inp, const ContextRows& s) {
#pragma omp parallel for collapse(2)
    for (int b = 0; b < s.B; b++)
        for (int at = 0; at < s.cut.T; at++)
            std::copy_n(inp + s.by_rank(b, at), s.W, out + s.by_position(b, at));
}

inline void add_by_rank_cpu(float* out, const floatX* inp, const ContextRows& s, int end, bool overwrite) {
#pragma omp parallel for collapse(2)
    for (int b = 0; b < s.B; b++)
        for (int at = 0; at < (overwrite ? s.cut.T : end); at++) {
            float* sums = out + s.by_rank(b, at);
            const floatX* more = inp + s.by_position(b, at);
            for (int w = 0; w < s.W; w++)
                sums[w] = (overwrite ? 0.0f : sums[w]) + (at < end ? (float)more[w] : 0.0f);
        }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

// Grid (positions, B): a block copies one row, W neighboring elements per thread at a time.
template <int W>
__global__ void order_by_position_kernel(floatX* out, const floatX* inp, ContextRows s) {
    int b = blockIdx.y, at = blockIdx.x;
    const floatX* from = inp + s.by_rank(b, at);
    floatX* to = out + s.by_position(b, at);
    for (int w = threadIdx.x * W; w < s.W; w += blockDim.x * W) store(to + w, load<W>(from + w));
}

template <int W>
__global__ void add_by_rank_kernel(float* out, const floatX* inp, ContextRows s, int end, bool overwrite) {
    int b = blockIdx.y, at = blockIdx.x;
    const floatX* more = inp + s.by_position(b, at);
    float* sums = out + s.by_rank(b, at);
    for (int w = threadIdx.x * W; w < s.W; w += blockDim.x * W) {
        Vec<float, W> sum = {};
        if (!overwrite) sum = load<W>(sums + w);
        if (at < end) {
            Vec<floatX, W> values = load<W>(more + w);
            for (int k = 0; k < W; k++) sum[k] += float(values[k]);
        }
        store(sums + w, sum);
    }
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
                  launch(order_by_position_kernel<W>, dim3(s.cut.T, s.B), row_threads(s.W / W, 256), 0,
                         stream, out, inp, s);
              }));
}

// overwrite: writes all rows, zeros from `end` on. Otherwise adds, and leaves rows from `end` on unchanged.
inline void add_by_rank(float* out,         // (ranks, B, own, W)
                        const floatX* inp,  // (B, T, W); only positions below `end` are read
                        const ContextRows& s, int end, bool overwrite, cudaStream_t stream) {
    auto cost = [&]() -> LaunchCost {
        double read = array_bytes(inp, s.B, end, s.W), seen = array_bytes(out, s.B, end, s.W);
        if (overwrite) return {.read = read, .written = array_bytes(out, s.rows(), s.W)};
        return {.read = read + seen, .written = seen};
    };
    ON_DEVICE(stream, cost(), add_by_rank_cpu(out, inp, s, end, overwrite),
              with_vec_width<float>(s.W, [&](auto W) {
                  launch(add_by_rank_kernel<W>, dim3(overwrite ? s.cut.T : end, s.B),
                         row_threads(s.W / W, 256), 0, stream, out, inp, s, end, overwrite);
              }));
}
