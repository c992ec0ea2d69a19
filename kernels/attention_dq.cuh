/*
Where the backward pass of attention on a GPU sums dq, and in which order; and what it notes of each query.

dq is summed over blocks, in float in global memory, yet in a fixed order: each tile of queries has a counter
of the tiles of keys that have been added to it, and these take turns in ascending order. Blocks draw tickets
for their tiles of keys. A block waits only for earlier tickets, whose blocks are running or done: whatever
order blocks start in, none waits for ever.
*/
#pragma once

#include "kernels/attention_shape.h"
#include "kernels/attention_tiles.cuh"
#include "kernels/common.cuh"

#ifndef DEVICE_CPU

// ----------------------------------------------------------------------------
// scratch

struct BackwardScratch {
    static constexpr int padding = 128, min_queries = 32;  // largest and smallest tile of queries

    int B, NH, rows, width;  // rows: T rounded up to whole tiles; width: head_width(HS)
    float* data;

    BackwardScratch(float* data, int B, int T, int NH, int HS)
        : B(B), NH(NH), rows(ceil_div(T, padding) * padding), width(head_width(HS)), data(data) {}

    HOST_DEVICE size_t all_rows() const { return (size_t)B * NH * rows; }
    HOST_DEVICE size_t tiles() const { return all_rows() / min_queries; }
    size_t floats() const { return all_rows() * (width + 2) + (size_t)B * rows + tiles() + 1; }

    // Gradients of 16 x 8 queries of a head, in the order in which a warp adds them: (4, 32), register by
    // lane. row is a multiple of 16, column of 8.
    HOST_DEVICE float* dq(int b, int h, int row, int column) const {
        return data + head_row(b, h, 0) * width + offset(row, column, width);
    }
    HOST_DEVICE static size_t offset(int row, int column, int width) {
        return (size_t)row * width + column * 16;
    }
    // Of each query lse in powers of two, and dout . out: (B, NH, rows, 2).
    HOST_DEVICE float* stats(int b, int h, int row) const {
        return data + all_rows() * width + 2 * head_row(b, h, row);
    }
    // The first key that each query sees: (B, rows).
    HOST_DEVICE int* first_keys(int b, int row) const {
        return (int*)(data + all_rows() * (width + 2)) + (size_t)b * rows + row;
    }
    // How many blocks have drawn a ticket.
    HOST_DEVICE unsigned* ticket() const { return (unsigned*)first_keys(B, 0); }
    // How many tiles of keys have been added to a tile of queries.
    HOST_DEVICE unsigned* counter(int b, int h, int tile) const {
        return ticket() + 1 + head_row(b, h, 0) / min_queries + tile;
    }

private:
    HOST_DEVICE size_t head_row(int b, int h, int row) const { return ((size_t)b * NH + h) * rows + row; }
};

// ----------------------------------------------------------------------------
// turns

// A block's turn to add to a tile of dq. One thread waits for it and passes it on, on behalf of those of its
// block: what they added before the last barrier is there when the turn of the next block comes.
struct Turn {
    unsigned* counter;
    unsigned number;
    size_t sums;  // where the tile starts in the scratch

    __device__ unsigned now() const { return *(volatile unsigned*)counter; }

    // `seen` is what now() was a while ago: mostly it was this turn already.
    __device__ void wait(unsigned seen) const {
        while (seen != number) seen = now();
        fence_device();
    }
    __device__ void pass() const {
        fence_device();
        *(volatile unsigned*)counter = number + 1;
    }
};

// ----------------------------------------------------------------------------
// kernels

// What scratch holds of each query, by eight threads. Rows after the last get no probability.
template <int W>
__global__ void attention_stats_kernel(BackwardScratch scratch, const floatX* dout, const floatX* out,
                                       const float* lse, AttentionShape s) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 8;  // (B, rows, NH)
    int h = i % s.NH, t = i / s.NH % scratch.rows;
    int b = min((int)(i / s.NH / scratch.rows), s.B);
    bool valid = b < s.B && t < s.T;
    float sum = 0;
    if (valid) {
        size_t row = s.output(b, t, h);
        for (int c = threadIdx.x % 8 * W; c < s.HS; c += 8 * W) {
            Vec<floatX, W> from_dout = load<W>(dout + row + c), from_out = load<W>(out + row + c);
            for (int x = 0; x < W; x++) sum += float(from_dout[x]) * float(from_out[x]);
        }
    }
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (b == s.B || threadIdx.x % 8 != 0) return;
    float base_2 = valid ? lse[s.lse(b, t, h)] * log2_e : INFINITY;
    store(scratch.stats(b, h, t), Vec<float, 2>{base_2, sum});
    if (h == 0) *scratch.first_keys(b, t) = s.first_key(b, min(t, s.T - 1));
}

// dq from its sums: eight columns of a query by a thread.
__global__ void attention_dq_kernel(floatX* dqkv, BackwardScratch scratch, AttentionShape s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    int pieces = ceil_div(s.HS, 8);  // (B, T, NH, pieces)
    if (i >= (size_t)s.B * s.T * s.NH * pieces) return;
    int column = i % pieces * 8, h = i / pieces % s.NH, t = i / pieces / s.NH % s.T,
        b = i / pieces / s.NH / s.T;
    const float* sums = scratch.dq(b, h, t / 16 * 16, column) + t / 8 % 2 * 64 + t % 8 * 4;
    Vec<float, 4> even = load<4>(sums), odd = load<4>(sums + 32);
    Vec<floatX, 8> dq;
    for (int c = 0; c < 8; c++) dq[c] = floatX((c % 2 ? odd[c / 2] : even[c / 2]) * s.scale());
    floatX* to = dqkv + s.query(b, t, h) + column;
    constexpr int W = vec_width<floatX>;
    if (s.HS % 8 == 0) {
        for (int c = 0; c < 8; c += W) store(to + c, load<W>(&dq[c]));
    } else {
        for (int c = 0; c < 8 && column + c < s.HS; c++) to[c] = dq[c];
    }
}

#endif
