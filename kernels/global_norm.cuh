/*
The norm of all gradients, and the factor that clips it (Pascanu, Mikolov & Bengio, 2013).

    norm = sqrt(sum of squares),   scale = min(1, max_norm / norm)

All values are squared in one launch, and it is fixed which thread adds what: each range of them is summed in
chunks of a fixed size, then the chunks are, so the sum depends on neither the number of threads nor the
device's size. A norm or a loss that is not finite makes the scale NaN, and the
optimizer then changes nothing: a bad step is stopped on the device, without waiting for the host to look.
*/
#pragma once

#include <algorithm>
#include <cfloat>
#include <vector>

#include "kernels/block_table.cuh"
#include "kernels/common.cuh"

constexpr size_t norm_chunk = 16384;

// Elements of an array.
struct SquaresRange {
    size_t at, count;
};

// The scratch of sum_squares, in floats: for each range, the sum of these.
inline size_t sum_squares_scratch(size_t count) {
    return ceil_div(count, norm_chunk);
}

HOST_DEVICE inline void write_clip_scale(float* norm_and_scale, float sum_squares, float loss,
                                         float max_norm) {
    float norm = sqrtf(sum_squares);
    float scale = max_norm > 0 && norm > max_norm ? max_norm / norm : 1.0f;
    bool finite = norm <= FLT_MAX && fabsf(loss) <= FLT_MAX;  // false for NaN
    norm_and_scale[0] = norm;
    norm_and_scale[1] = finite ? scale : NAN;
}

// ----------------------------------------------------------------------------
// CPU

inline void add_squares_cpu(float* total, float* scratch, const float* values, size_t n) {
    size_t chunks = ceil_div(n, norm_chunk);
#pragma omp parallel for
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        double sum = 0;
        size_t end = std::min(n, (chunk + 1) * norm_chunk);
#pragma omp simd reduction(+ : sum)
        for (size_t i = chunk * norm_chunk; i < end; i++) sum += (double)values[i] * values[i];
        scratch[chunk] = (float)sum;
    }
    double sum = *total;
    for (size_t chunk = 0; chunk < chunks; chunk++) sum += scratch[chunk];
    *total = (float)sum;
}

inline void sum_squares_cpu(float* total, float* scratch, const float* values,
                            const std::vector<SquaresRange>& ranges) {
    *total = 0;
    for (auto [at, count] : ranges) add_squares_cpu(total, scratch, values + at, count);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

using SquaresTable = BlockTable<SquaresRange, 128>;
constexpr unsigned norm_block = 256;

// A block for each chunk.
template <int W>
__global__ void sum_squares_kernel(float* scratch, const float* values,
                                   const __grid_constant__ SquaresTable table) {
    int number = table.find(blockIdx.x);
    const SquaresRange& range = table.part[number];
    size_t start = table.place(blockIdx.x, number) * norm_chunk, end = min(range.count, start + norm_chunk);
    float sum = 0;
#pragma unroll 4
    for (size_t i = start + threadIdx.x * W; i < end; i += norm_block * W) {
        auto x = load<W>(values + range.at + i);
        for (int k = 0; k < W; k++) sum += x[k] * x[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) scratch[blockIdx.x] = sum;
}

__global__ void sum_chunks_kernel(float* total, const float* scratch, size_t chunks) {
    float sum = 0;
#pragma unroll 8
    for (size_t i = threadIdx.x; i < chunks; i += blockDim.x) sum += scratch[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total = sum;
}

inline void launch_sum_squares(float* total, float* scratch, const float* values,
                               const std::vector<SquaresRange>& ranges, cudaStream_t stream) {
    size_t row = (uintptr_t)values / sizeof(float);  // what divides all places, as far as vectors go
    for (auto [at, count] : ranges) row |= at | count;
    auto chunks_of = [](const SquaresRange& range) { return (unsigned)ceil_div(range.count, norm_chunk); };
    size_t chunks = 0;
    with_vec_width<float>(row, [&](auto width) {
        each_block_table<SquaresTable>(ranges, chunks_of, [&](const SquaresTable& table) {
            launch(sum_squares_kernel<width>, table.blocks(), norm_block, 0, stream, scratch + chunks, values,
                   table);
            chunks += table.blocks();
        });
    });
    launch(sum_chunks_kernel, 1, 1024, 0, stream, total, scratch, chunks);
}

__global__ void clip_scale_kernel(float* norm_and_scale, const float* sum_squares, const float* loss,
                                  float max_norm) {
    write_clip_scale(norm_and_scale, *sum_squares, *loss, max_norm);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Without elements the sum is 0, and values and scratch are not looked at. Ranges that begin or end within 16
// bytes are summed in another order than aligned ones.
inline void sum_squares(float* total /* (1) */, float* scratch, const float* values,
                        const std::vector<SquaresRange>& ranges, cudaStream_t stream) {
    ON_DEVICE(stream, sum_squares_cpu(total, scratch, values, ranges),
              launch_sum_squares(total, scratch, values, ranges, stream));
}

// max_norm 0 does not clip.
inline void clip_scale(float* norm_and_scale /* (2) */, const float* sum_squares /* (1) */,
                       const float* loss /* (1) */, float max_norm, cudaStream_t stream) {
    ON_DEVICE(stream, write_clip_scale(norm_and_scale, *sum_squares, *loss, max_norm),
              launch(clip_scale_kernel, 1, 1, 0, stream, norm_and_scale, sum_squares, loss, max_norm));
}
