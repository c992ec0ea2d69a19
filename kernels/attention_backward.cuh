/*
Scratch in global memory that the attention backward kernels share: the sums of dq, the counters that decide
whose turn it is to add to them, and statistics of each query.

dq is summed across blocks, in float, yet in a fixed order (attention_order.h): each tile of queries has a
counter of the tiles of keys that have been added to it, and the blocks of these tiles take turns.
*/
#pragma once

#include "kernels/attention_order.h"
#include "kernels/attention_shape.h"
#include "kernels/attention_tiles.cuh"
#include "kernels/common.cuh"
#include "kernels/streams.cuh"

// ----------------------------------------------------------------------------
// size of the scratch: in every build, because plans for cards need it

struct BackwardScratchSize {
    static constexpr int padding = 128, min_queries = 16;  // largest and smallest tile of queries

    static constexpr int sum_rows = 16;  // rows of dqkv per partial sum of its columns

    int B, NH, rows, width;  // rows: Tq rounded up to whole tiles; width: of a tile
    int columns;             // columns of dqkv if their sums are wanted, else 0
    int sums_of_columns;     // partial sums of columns per sequence
    size_t before_sums;      // floats before the column sums; a multiple of 4, which aligns them like `data`

    BackwardScratchSize(const AttentionShape& s, int width, bool column_sums)
        : B(s.B),
          NH(s.NH),
          rows(ceil_div(s.Tq, padding) * padding),
          width(width),
          columns(column_sums ? s.q_row : 0),
          sums_of_columns(ceil_div(s.Tq, sum_rows)) {
        before_sums = ceil_div(floats_of_turns(), 4) * 4;
    }

    HOST_DEVICE size_t all_rows() const { return (size_t)B * NH * rows; }
    HOST_DEVICE size_t counters() const { return all_rows() / min_queries; }
    HOST_DEVICE size_t floats_of_turns() const {
        return all_rows() * (width + 2) + (size_t)B * rows + 1 + counters();
    }
    size_t floats() const { return before_sums + (size_t)B * sums_of_columns * columns; }
};

#ifndef DEVICE_CPU

// ----------------------------------------------------------------------------
// turns

// A block's turn to add to a tile of dq. One thread waits for the turn and passes it on for its whole block:
// everything that the block added before its last barrier is visible to the block that has the next turn.
struct Turn {
    unsigned* counter;
    unsigned number;
    size_t sums;  // offset of the tile's sums in the scratch, in floats

    __device__ void wait() const { counter_wait(counter, number); }
    // Waits, but first checks `seen`, an earlier value of the counter, which usually is this turn's number.
    __device__ void wait(unsigned seen) const { counter_wait(counter, number, seen); }
    __device__ void pass() const { counter_set(counter, number + 1); }
};

// ----------------------------------------------------------------------------
// scratch

struct BackwardScratch : BackwardScratchSize {
    float* data;  // aligned to 16 bytes

    BackwardScratch(float* data, const AttentionShape& s, int width, bool column_sums = false)
        : BackwardScratchSize(s, width, column_sums), data(data) {}

    // Offset in data of the sums of dq for a tile of a head that begins at `row`: (queries, width), in a
    // layout that the kernel chooses.
    HOST_DEVICE size_t sums(int b, int h, int row) const { return head_row(b, h, row) * width; }
    // Statistics of each query, (B, NH, rows, 2): lse as a base-2 logarithm, and dout . out.
    HOST_DEVICE float* stats(int b, int h, int row) const {
        return data + all_rows() * width + 2 * head_row(b, h, row);
    }
    // The first key that each query sees: (B, rows).
    HOST_DEVICE int* first_keys(int b, int row) const {
        return (int*)(data + all_rows() * (width + 2)) + (size_t)b * rows + row;
    }
    // The number of tickets that blocks have drawn; the counters follow it.
    HOST_DEVICE unsigned* ticket() const { return (unsigned*)first_keys(B, 0); }
    // Turn `number` at the tile of queries that begins at `row`.
    HOST_DEVICE Turn turn(int b, int h, int row, unsigned number) const {
        return {ticket() + 1 + head_row(b, h, row) / min_queries, number, sums(b, h, row)};
    }

    // Column sums of dqkv over `sum_rows` rows from `row` on, a multiple of `sum_rows`: (B, sums_of_columns,
    // columns).
    HOST_DEVICE float* column_sums(int b, int row) const {
        return data + before_sums + ((size_t)b * sums_of_columns + row / sum_rows) * columns;
    }

private:
    HOST_DEVICE size_t head_row(int b, int h, int row) const { return ((size_t)b * NH + h) * rows + row; }
};

// ----------------------------------------------------------------------------
// before the first turn

constexpr int stats_block = 256, stats_queries = stats_block / 8;

// Eight threads write the statistics of one query. A block handles `stats_queries` queries of one head, in
// sequence blockIdx.y; blocks of different heads are neighbors in the grid because heads are neighbors in
// memory. Rows past the last query get an infinite lse, so that their probabilities are 0.
template <int W>
__global__ void attention_stats_kernel(BackwardScratch scratch, const floatX* dout, const floatX* out,
                                       const float* lse, AttentionShape s) {
    int h = blockIdx.x % s.NH, b = blockIdx.y;
    int query = blockIdx.x / s.NH * stats_queries + threadIdx.x / 8;
    bool valid = query < s.Tq;
    float sum = 0;
    if (valid) {
        size_t row = s.output(b, query, h);
        for (int c = threadIdx.x % 8 * W; c < s.HS; c += 8 * W) {
            Vec<floatX, W> from_dout = load<W>(dout + row + c), from_out = load<W>(out + row + c);
            for (int x = 0; x < W; x++) sum += float(from_dout[x]) * float(from_out[x]);
        }
    }
    sum = group_sum(sum, 8);
    if (threadIdx.x % 8 != 0) return;
    float base_2 = valid ? lse[s.lse(b, query, h)] * log2_e : INFINITY;
    store(scratch.stats(b, h, query), Vec<float, 2>{base_2, sum});
    if (h == 0) *scratch.first_keys(b, query) = s.first_key(b, min(query, s.Tq - 1));
}

inline void prepare_backward_scratch(const BackwardScratch& scratch, const floatX* dout, const floatX* out,
                                     const float* lse, const AttentionShape& s, cudaStream_t stream) {
    zero_async(scratch.ticket(), 1 + scratch.counters(), stream);
    static_assert(BackwardScratch::padding % stats_queries == 0);
    with_vec_width<floatX>(s.HS, [&](auto W) {
        launch(attention_stats_kernel<W>, dim3(scratch.rows / stats_queries * s.NH, s.B), stats_block, 0,
               stream, scratch, dout, out, lse, s);
    });
}

#endif
