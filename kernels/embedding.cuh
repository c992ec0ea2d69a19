/*
Embedding: a row of the token table plus, with learned positions, a row of the position table.

    out[n, :] = wte[tokens[n], :] + wpe[positions[n], :]

out is (N, C), wte (V, C), wpe (T, C) or null; the backward pass needs tokens and positions.

Many tokens share a row of a table, so the backward pass would need atomics, whose order changes the sum.
Instead the host sorts the tokens, and rows of dout for the same row of a table are summed one after another.
On a GPU this is a segmented reduction: the sorted list is cut into pieces of 64, one per warp, so that all
warps have the same work, whether tokens are rare or one of them fills the batch. A warp adds the sums that
begin in its piece to the table, and leaves a sum that began in an earlier piece as a carry. The carries form
a sorted list too, of 1/64 the length, which the next launch sums into the table in the same way: three
launches suffice for 64^3 = 262,144 tokens. The order of additions is fixed, so all runs are bit-identical;
and the launches do not depend on the tokens, so a CUDA graph can hold them.

The backward pass reads dout once, and it reads and writes, in float, the rows of the tables that occur. Per
table it also writes and reads carries, in float: up to 1/64 of the elements of dout, which fit in a cache. If
there are positions, dout is read a second time, from the L2 cache: the launch processes the channels in
slices of 128 (16 MiB for 65,536 tokens in bf16), each first by token, then by position.

If the vocabulary is split across devices, a VocabRange gives the rows of the table that are on this one.
Other tokens give zeros, so that the sum over the devices, one of which adds the positions, is the embedding.
*/
#pragma once

#include <algorithm>
#include <climits>
#include <tuple>

#include "kernels/common.cuh"
#include "kernels/row_order.h"

// The tokens whose rows a token table holds: first .. first + count - 1.
struct VocabRange {
    int first = 0, count = INT_MAX;

    HOST_DEVICE bool has(int token) const { return token >= first && token - first < count; }
    HOST_DEVICE size_t row(int token) const { return (size_t)(token - first); }
};

// A list of rows to add: place(i) is a row of dout, and row(i) the row of a table that it is added to, or -1
// for none. Equal rows of the table are adjacent.
struct RowList {
    const int *order, *rows;
    VocabRange vocab = {};

    HOST_DEVICE int place(int i) const { return order[i]; }
    HOST_DEVICE int row(int i) const {
        int row = rows[order[i]];
        return vocab.has(row) ? row - vocab.first : -1;
    }
};

// Length of the pieces in which a GPU sums a list, then the list of their carries, and so on.
constexpr int sum_length = 64;

// Returns the number of launches for a list of N.
inline int sum_rows_launches(int N) {
    int launches = 1;
    for (int pieces = ceil_div(N, sum_length); pieces > 1; launches++) pieces = ceil_div(pieces, sum_length);
    return launches;
}

// ----------------------------------------------------------------------------
// CPU

inline void embedding_forward_cpu(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe,
                                  const int* positions, int N, int C, VocabRange vocab) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* row = out + (size_t)n * C;
        const floatX *token = vocab.has(tokens[n]) ? wte + vocab.row(tokens[n]) * C : nullptr,
                     *position = wpe ? wpe + (size_t)positions[n] * C : nullptr;
        if (token && position)
            for (int c = 0; c < C; c++) row[c] = floatX(float(token[c]) + float(position[c]));
        else if (token || position)
            std::copy_n(token ? token : position, C, row);
        else
            std::fill_n(row, C, floatX(0.0f));
    }
}

// The iteration that meets the first of several equal rows adds them all.
template <typename T>
void add_rows_cpu(float* table, const T* dout, const RowList& list, int N, int C) {
#pragma omp parallel for schedule(dynamic, 64)
    for (int first = 0; first < N; first++) {
        int row = list.row(first);
        if (row < 0 || (first > 0 && list.row(first - 1) == row)) continue;
        float* to = table + (size_t)row * C;
        for (int i = first; i < N && list.row(i) == row; i++) {
            const T* from = dout + (size_t)list.place(i) * C;
#pragma omp simd
            for (int c = 0; c < C; c++) to[c] += float(from[c]);
        }
    }
}

inline void embedding_backward_cpu(float* dwte, float* dwpe, const floatX* dout, const RowList& tokens,
                                   const RowList& positions, int N, int C) {
    add_rows_cpu(dwte, dout, tokens, N, C);
    if (dwpe) add_rows_cpu(dwpe, dout, positions, N, C);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr int embedding_block = 256;

// blockIdx.x is the token; each thread handles W neighboring channels.
template <int W>
__global__ void embedding_forward_kernel(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe,
                                         const int* positions, int C, VocabRange vocab) {
    int c = (int)(blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (c >= C) return;
    size_t n = blockIdx.x;
    Vec<floatX, W> sum = {};
    if (vocab.has(tokens[n])) sum = load<W>(wte + vocab.row(tokens[n]) * C + c);
    if (wpe) {
        auto position = load<W>(wpe + (size_t)positions[n] * C + c);
        for (int k = 0; k < W; k++) sum[k] = floatX(float(sum[k]) + float(position[k]));
    }
    store(out + n * C + c, sum);
}

constexpr int sum_warps = 4;  // warps of a block; each sums one piece
constexpr int sum_ahead = 8;  // rows that a warp loads at once
// minimum blocks per multiprocessor: in bf16 they keep 48 KiB of loads in flight, more than an H200 delivers
// to each multiprocessor in 1 us
constexpr int sum_blocks = 6;

// The carries of pieces also form a list, of consecutive rows.
struct CarryList {
    const int* rows;

    HOST_DEVICE int place(int i) const { return i; }
    HOST_DEVICE int row(int i) const { return rows[i]; }
};

// The rows to sum, and where their sums are stored.
template <typename List, typename T>
struct RowSums {
    List list;
    int count;                  // length of the list
    const T* inp;               // (rows, C)
    float* table;               // (rows, C) +=
    float* carries = nullptr;   // (pieces, C)
    int* carry_rows = nullptr;  // (pieces) table rows; -1: no sum continues into the piece

    HOST_DEVICE int pieces() const { return ceil_div(count, sum_length); }
    HOST_DEVICE int blocks() const { return ceil_div(pieces(), sum_warps); }
    RowSums<CarryList, float> of_carries() const { return {{carry_rows}, pieces(), carries, table}; }
};

template <int W>
__device__ void add_to(float* total, Vec<float, W> sum) {
    auto before = load_last<W>(total);
    for (int w = 0; w < W; w++) sum[w] += before[w];
    store_last(total, sum);
}

// Sums one piece with a warp. Each lane handles channels c .. c + W - 1.
template <int W, typename List, typename T>
__device__ void sum_piece(const RowSums<List, T>& sums, int piece, int C, int c) {
    const List& list = sums.list;
    int lane = threadIdx.x, begin = piece * sum_length, end = min(begin + sum_length, sums.count);
    if (begin >= end) return;
    int carried_row = begin > 0 && list.row(begin) == list.row(begin - 1) ? list.row(begin) : -1;
    bool in_carry = carried_row >= 0;
    const T* inp = sums.inp + min(c, C - W);  // lanes past the last channel load too, but write nothing
    Vec<float, W> sum = {};
#pragma unroll 1
    for (int first = begin; first < end; first += warp_size) {
        // Each lane inspects one of the next 32 rows. Bit j of a mask belongs to row j of these.
        constexpr int none = -2;
        int i = first + lane, place = 0, row = -1, next = -1;
        if (i < end) place = list.place(i), row = list.row(i), next = i + 1 < end ? list.row(i + 1) : none;
        unsigned here = __ballot_sync(~0u, row >= 0), ends = __ballot_sync(~0u, row != next);
        unsigned to_carry = in_carry ? ends & -ends : 0, to_table = here & ends & ~to_carry;
        in_carry = in_carry && !ends;
        if (!here) {
            sum = {};
            continue;
        }
#pragma unroll 1
        for (int group = 0; group < warp_size; group += sum_ahead) {
            Vec<T, W> values[sum_ahead];
#pragma unroll
            for (int k = 0; k < sum_ahead; k++)
                values[k] = load<W>(inp + (size_t)__shfl_sync(~0u, place, group + k) * C);
#pragma unroll
            for (int k = 0; k < sum_ahead; k++) {
                if (!(to_table >> (group + k) & 1)) continue;
                const float* total = sums.table + (size_t)__shfl_sync(~0u, row, group + k) * C + c;
                if (c < C) prefetch_to_l2(total);
            }
#pragma unroll
            for (int k = 0; k < sum_ahead; k++) {
                int j = group + k;
                for (int w = 0; w < W; w++) sum[w] += float(values[k][w]);
                if (!(ends >> j & 1)) continue;
                if (to_table >> j & 1) {
                    float* total = sums.table + (size_t)__shfl_sync(~0u, row, j) * C + c;
                    if (c < C) add_to(total, sum);
                } else if (to_carry >> j & 1) {
                    if (c < C) store(sums.carries + (size_t)piece * C + c, sum);
                }
                sum = {};
            }
        }
    }
    if (blockIdx.y == 0 && lane == 0) sums.carry_rows[piece] = carried_row;
}

// blockIdx.x: the pieces of the first list, then those of the second. blockIdx.y: a slice of the channels.
template <int W, typename First, typename Second>
__global__ void __launch_bounds__(warp_size* sum_warps, sum_blocks)
    sum_rows_kernel(const First first, const Second second, int C) {
    int c = (int)(blockIdx.y * warp_size + threadIdx.x) * W, blocks = first.blocks();
    int piece = (int)(blockIdx.x * sum_warps + threadIdx.y);
    if ((int)blockIdx.x < blocks)
        sum_piece<W>(first, piece, C, c);
    else
        sum_piece<W>(second, piece - blocks * sum_warps, C, c);
}

// Returns the floats for the carries of `pieces` pieces and their rows: a multiple of 16 bytes if a row is.
inline size_t carry_floats(int pieces, int C) {
    return (size_t)pieces * C + ceil_div(pieces, 4) * 4;
}

template <int W, typename First, typename Second>
void launch_sum_rows(First first, Second second, float* scratch, int C, cudaStream_t stream) {
    auto place_carries = [&](auto& sums) {
        sums.carries = scratch;
        sums.carry_rows = (int*)(scratch + (size_t)sums.pieces() * C);
        scratch += carry_floats(sums.pieces(), C);
    };
    place_carries(first);
    place_carries(second);
    dim3 grid(first.blocks() + second.blocks(), ceil_div(C, warp_size * W)), block(warp_size, sum_warps);
    launch(sum_rows_kernel<W, First, Second>, grid, block, 0, stream, first, second, C);
    if (first.pieces() > 1) launch_sum_rows<W>(first.of_carries(), second.of_carries(), scratch, C, stream);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Returns the fraction of the tokens that are in `vocab`.
inline double share_here(const VocabRange& vocab) {
    return (double)std::min(vocab.count, ledger->V) / ledger->V;
}

// Returns the bytes of the table rows that N tokens use.
template <typename T>
double tables_bytes(const T* wte, const T* wpe, int N, int C, const VocabRange& vocab) {
    return array_bytes(wte, share_here(vocab) * std::min(N, ledger->V), C) + array_bytes(wpe, ledger->T, C);
}

// A token outside of `vocab` counts as zeros: its row is only that of its position, or 0 without positions.
inline void embedding_forward(floatX* out /* (N, C) */, const int* tokens /* (N) */,
                              const floatX* wte /* (vocab.count, C) */,
                              const floatX* wpe /* (T, C) or null */,
                              const int* positions /* (N) below T; null only if wpe is */, int N, int C,
                              cudaStream_t stream, VocabRange vocab = {}) {
    if (N == 0) return;
    ON_DEVICE(stream,
              (LaunchCost{.read = tables_bytes(wte, wpe, N, C, vocab) + array_bytes(tokens, N) +
                                  (wpe ? array_bytes(positions, N) : 0),
                          .written = array_bytes(out, N, C)}),
              embedding_forward_cpu(out, tokens, wte, wpe, positions, N, C, vocab),
              with_vec_width<floatX>(C, [=](auto width) {
                  constexpr int W = width;
                  int threads = row_threads(C / W, embedding_block);
                  dim3 grid(N, ceil_div(C, threads * W));
                  launch(embedding_forward_kernel<W>, grid, threads, 0, stream, out, tokens, wte, wpe,
                         positions, C, vocab);
              }));
}

// Returns the floats of scratch that embedding_backward needs for N tokens, and sum_rows for N rows.
inline size_t embedding_backward_scratch([[maybe_unused]] int N, [[maybe_unused]] int C) {
    size_t size = 0;
#ifndef DEVICE_CPU
    int pieces = N;
    do {
        pieces = ceil_div(pieces, sum_length);
        size += 2 * carry_floats(pieces, C);
    } while (pieces > 1);
#endif
    return size;
}

// dwpe receives the gradient of every token, dwte that of tokens in `vocab`.
inline void embedding_backward(float* dwte /* (vocab.count, C) += */, float* dwpe /* (T, C) +=, or null */,
                               [[maybe_unused]] float* scratch /* (embedding_backward_scratch(N, C)) */,
                               const floatX* dout /* (N, C) */, const int* tokens /* (N) */,
                               const int* by_token /* (N) of sort_by_token */,
                               const int* positions /* (N) below T; null only if dwpe is */,
                               const int* by_position /* (N) of sort_by_position; null only if dwpe is */,
                               int N, int C, cudaStream_t stream, VocabRange vocab = {}) {
    RowList of_tokens = {by_token, tokens, vocab}, of_positions = {by_position, positions};
    auto cost = [&]() -> LaunchCost {
        double rows = tables_bytes(dwte, dwpe, N, C, vocab),
               lists = array_bytes(by_token, 2, N) + (dwpe ? array_bytes(by_position, 2, N) : 0);
        return {.read = array_bytes(dout, dwpe ? N : share_here(vocab) * N, C) + rows + lists,
                .written = rows,
                .launches = sum_rows_launches(N)};
    };
    ON_DEVICE(stream, cost(), embedding_backward_cpu(dwte, dwpe, dout, of_tokens, of_positions, N, C),
              with_vec_width<float>(C, [=](auto width) {
                  RowSums<RowList, floatX> first = {of_tokens, N, dout, dwte};
                  RowSums<RowList, floatX> second = {of_positions, dwpe ? N : 0, dout, dwpe};
                  launch_sum_rows<width()>(first, second, scratch, C, stream);
              }));
}

// Adds N rows to rows of a table, one after another, in a given order in which equal table rows are adjacent.
template <typename T>
void sum_rows(float* table /* (rows, C) += */,
              [[maybe_unused]] float* scratch /* (embedding_backward_scratch(N, C)) */,
              const T* inp /* (N, C) */, const int* rows /* (N) of the table */,
              const int* order /* (N) of sort_by */, int N, int C, cudaStream_t stream) {
    if (N == 0) return;
    RowList list = {order, rows};
    auto cost = [&]() -> LaunchCost {  // assumes that all rows are different
        return {.read = array_bytes(inp, N, C) + array_bytes(table, N, C) + array_bytes(order, 2, N),
                .written = array_bytes(table, N, C),
                .launches = sum_rows_launches(N)};
    };
    ON_DEVICE(stream, cost(), add_rows_cpu(table, inp, list, N, C), with_vec_width<float>(C, [=](auto width) {
                  RowSums<RowList, T> first = {list, N, inp, table};
                  RowSums<RowList, T> second = {{}, 0, inp, table};
                  launch_sum_rows<width()>(first, second, scratch, C, stream);
              }));
}

#ifdef __CUDA_ARCH__
// Instances for cards: nvcc compiles the kernels without the callers (Makefile).
inline const std::tuple sums_of_rows(sum_rows<float>, sum_rows<floatX>);
#endif
