/*
Sums of squares; the norm of all gradients, and the factor that clips it (Pascanu, Mikolov & Bengio, 2013).

    norm = sqrt(sum of squares),   scale = min(1, max_norm / norm)

All values are squared in one launch, and the order of additions is fixed: chunks of a fixed size within each
range are summed, then their sums, so a sum depends on neither the number of threads nor the device's size. A
norm or loss that is not finite, or exceeds a limit that the host has set beforehand, makes the scale NaN, and
the optimizer then changes nothing: a bad step is stopped on the device, without waiting for the host to look.
*/
#pragma once

#include <algorithm>
#include <cfloat>
#include <vector>

#include "kernels/block_table.cuh"
#include "kernels/common.cuh"

constexpr size_t norm_chunk = 16384;

// A range of elements in an array, and the index of the sum to which their squares are added. Ranges of one
// sum are consecutive.
struct SquaresRange {
    size_t at, count;
    int sum = 0;
};

// Floats of scratch that sum_squares needs for one range. For several ranges, add them up.
inline size_t sum_squares_scratch(size_t count) {
    return ceil_div(count, norm_chunk);
}

struct ClipLimits {
    float max_norm;                                  // 0: no clipping
    float most_loss = FLT_MAX, most_norm = FLT_MAX;  // above these, the step is skipped
    HOST_DEVICE ClipLimits(float max_norm) : max_norm(max_norm) {}
};

HOST_DEVICE inline void write_clip_scale(float* norm_and_scale, float sum_squares, float loss,
                                         const ClipLimits& limits) {
    float norm = sqrtf(sum_squares), max_norm = limits.max_norm;
    float scale = max_norm > 0 && norm > max_norm ? max_norm / norm : 1.0f;
    bool steps = norm <= limits.most_norm && loss <= limits.most_loss && loss >= -FLT_MAX;  // false for NaN
    norm_and_scale[0] = norm;
    norm_and_scale[1] = steps ? scale : NAN;
}

// ----------------------------------------------------------------------------
// CPU

template <typename T>
void add_squares_cpu(float* total, float* scratch, const T* values, size_t n) {
    size_t chunks = ceil_div(n, norm_chunk);
#pragma omp parallel for
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        double sum = 0;
        size_t end = std::min(n, (chunk + 1) * norm_chunk);
#pragma omp simd reduction(+ : sum)
        for (size_t i = chunk * norm_chunk; i < end; i++) sum += (double)values[i] * (double)values[i];
        scratch[chunk] = (float)sum;
    }
    double sum = *total;
    for (size_t chunk = 0; chunk < chunks; chunk++) sum += scratch[chunk];
    *total = (float)sum;
}

// Like sums_of_squares(), but runs at once and on host memory.
template <typename T>
void sums_of_squares_on_host(float* sums, float* scratch, const T* values,
                             const std::vector<SquaresRange>& ranges) {
    for (const SquaresRange& range : ranges) sums[range.sum] = 0;
    for (auto [at, count, sum] : ranges) add_squares_cpu(sums + sum, scratch, values + at, count);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

using SquaresTable = BlockTable<SquaresRange, 128>;
constexpr unsigned norm_block = 256;

// One block per chunk.
template <int W, typename T>
__global__ void sum_squares_kernel(float* scratch, const T* values,
                                   const __grid_constant__ SquaresTable table) {
    int number = table.find(blockIdx.x);
    const SquaresRange& range = table.part[number];
    size_t start = table.place(blockIdx.x, number) * norm_chunk, end = min(range.count, start + norm_chunk);
    float sum = 0;
#pragma unroll 4
    for (size_t i = start + threadIdx.x * W; i < end; i += norm_block * W) {
        auto x = load<W>(values + range.at + i);
        for (int k = 0; k < W; k++) sum += (float)x[k] * (float)x[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) scratch[blockIdx.x] = sum;
}

// One block per sum. The ranges of this table are ranges of chunks' sums in scratch.
__global__ void sum_chunks_kernel(float* sums, const float* scratch,
                                  const __grid_constant__ SquaresTable table) {
    const SquaresRange& chunks = table.part[table.find(blockIdx.x)];
    float sum = 0;
#pragma unroll 8
    for (size_t i = threadIdx.x; i < chunks.count; i += blockDim.x) sum += scratch[chunks.at + i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[chunks.sum] = sum;
}

template <typename T>
void launch_sums_of_squares(float* sums, float* scratch, const T* values,
                            const std::vector<SquaresRange>& ranges, cudaStream_t stream) {
    size_t row = (uintptr_t)values / sizeof(T);  // a multiple of W only if all offsets and counts are
    for (const SquaresRange& range : ranges) row |= range.at | range.count;
    auto chunks_of = [](const SquaresRange& range) { return (unsigned)ceil_div(range.count, norm_chunk); };
    size_t chunks = 0;
    with_vec_width<T>(row, [&](auto width) {
        each_block_table<SquaresTable>(ranges, chunks_of, [&](const SquaresTable& table) {
            launch(sum_squares_kernel<width, T>, table.blocks(), norm_block, 0, stream, scratch + chunks,
                   values, table);
            chunks += table.blocks();
        });
    });
    std::vector<SquaresRange> of_chunks;
    chunks = 0;
    for (const SquaresRange& range : ranges) {
        if (of_chunks.empty() || of_chunks.back().sum != range.sum)
            of_chunks.push_back({chunks, 0, range.sum});
        of_chunks.back().count += chunks_of(range);
        chunks += chunks_of(range);
    }
    auto one_block = [](const SquaresRange&) { return 1u; };
    each_block_table<SquaresTable>(of_chunks, one_block, [&](const SquaresTable& table) {
        launch(sum_chunks_kernel, table.blocks(), 1024, 0, stream, sums, scratch, table);
    });
}

__global__ void clip_scale_kernel(float* norm_and_scale, const float* sum_squares, const float* loss,
                                  ClipLimits limits) {
    write_clip_scale(norm_and_scale, *sum_squares, *loss, limits);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Sets the sums that occur in the ranges; the others keep their values. T: float or floatX. If any range
// begins or ends at an address that is not a multiple of 16 bytes, all are summed in a different order.
template <typename T>
void sums_of_squares(float* sums, float* scratch, const T* values, const std::vector<SquaresRange>& ranges,
                     cudaStream_t stream) {
    auto cost = [&]() -> LaunchCost {
        size_t elements = 0;
        for (const SquaresRange& range : ranges) elements += range.count;
        return {
            .read = array_bytes(values, elements), .launches = elements ? 2 : 1, .place = holder_of(values)};
    };
    ON_DEVICE(stream, cost(), sums_of_squares_on_host(sums, scratch, values, ranges),
              launch_sums_of_squares(sums, scratch, values, ranges, stream));
}

// Sums all ranges into one total. If there are none, it is 0, and values and scratch are not read.
inline void sum_squares(float* total /* (1) */, float* scratch, const float* values,
                        std::vector<SquaresRange> ranges, cudaStream_t stream) {
    if (ranges.empty()) ranges.push_back({0, 0});
    sums_of_squares(total, scratch, values, ranges, stream);
}

inline void clip_scale(float* norm_and_scale /* (2) */, const float* sum_squares /* (1) */,
                       const float* loss /* (1) */, ClipLimits limits, cudaStream_t stream) {
    ON_DEVICE(stream, (LaunchCost{}), write_clip_scale(norm_and_scale, *sum_squares, *loss, limits),
              launch(clip_scale_kernel, 1, 1, 0, stream, norm_and_scale, sum_squares, loss, limits));
}
