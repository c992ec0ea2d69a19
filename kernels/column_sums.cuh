/*
Column sums of a matrix, such as the gradients of biases and of norm weights:

    dbias (OC) += sum over rows of dout (N, OC)

They are computed in two stages, partial sums of fixed sets of rows and then the sum of these, so that the
order of additions depends only on N. The first stage is a pass over the matrix, unless the kernel that makes
the matrix also sums what it writes, as the backward passes of norms and of attention do.
*/
#pragma once

#include <algorithm>

#include "kernels/common.cuh"

// Slice s is rows s, s + bias_slices, ... of dout. Stage one sums each slice, stage two adds up the slices.
constexpr int bias_slices = 64;

// Floats of scratch that matmul_backward_bias needs.
inline size_t matmul_backward_bias_scratch(int OC) {
    return (size_t)bias_slices * OC;
}

// ----------------------------------------------------------------------------
// CPU

// Sums partials (count, planes, C) over the first index. Adds plane 0 to `first`, adds plane 1 to `second`
// unless that is null, and stores plane 2 in `third` unless that is null.
inline void add_partials_cpu(float* first, float* second, const float* partials, int count, int C,
                             int planes = 2, float* third = nullptr) {
    constexpr int columns = 128;
    if (third) std::fill_n(third, C, 0.0f);
#pragma omp parallel for
    for (int start = 0; start < C; start += columns) {
        int end = std::min(start + columns, C);
        for (int k = 0; k < count; k++) {
            const float* partial = partials + (size_t)k * planes * C;
            for (float* sum : {first, second, third}) {
                if (sum) {
#pragma omp simd
                    for (int c = start; c < end; c++) sum[c] += partial[c];
                }
                partial += C;
            }
        }
    }
}

inline void matmul_backward_bias_cpu(float* dbias, float* scratch, const floatX* dout, int N, int OC) {
#pragma omp parallel for
    for (int slice = 0; slice < bias_slices; slice++) {
        float* sums = scratch + (size_t)slice * OC;
        std::fill_n(sums, OC, 0.0f);
        for (int n = slice; n < N; n += bias_slices) {
            const floatX* row = dout + (size_t)n * OC;
#pragma omp simd
            for (int o = 0; o < OC; o++) sums[o] += float(row[o]);
        }
    }
    for (int slice = 0; slice < bias_slices; slice++) {
        const float* sums = scratch + (size_t)slice * OC;
#pragma omp simd
        for (int o = 0; o < OC; o++) dbias[o] += sums[o];
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels
#ifndef DEVICE_CPU

// A block sums 32 columns of plane blockIdx.y; its warps divide the partial sums among themselves.
__global__ void add_partials_kernel(float* first, float* second, float* third, const float* partials,
                                    int count, int C, int planes) {
    __shared__ float warp_sums[warp_size][warp_size];
    int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size, warps = blockDim.x / warp_size;
    int c = blockIdx.x * warp_size + lane;
    float* to = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third;
    if (!to) return;
    float sum = 0;
    if (c < C) {
#pragma unroll 8
        for (int k = warp; k < count; k += warps) sum += partials[((size_t)k * planes + blockIdx.y) * C + c];
    }
    warp_sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < warps; w++) sum += warp_sums[w][lane];
    to[c] = blockIdx.y == 2 ? sum : to[c] + sum;
}

// Adds partial sums, as add_partials_cpu does.
inline void add_partials(float* first, float* second, const float* partials, int count, int C,
                         cudaStream_t stream, int planes = 2, float* third = nullptr) {
    launch(add_partials_kernel,
           dim3(ceil_div(C, warp_size), third    ? 3
                                        : second ? 2
                                                 : 1),
           1024, 0, stream, first, second, third, partials, count, C, planes);
}

constexpr int bias_warps = 16;

// Layout of vectors of W elements in shared memory: element i of vector v is at i * plane + v. Planes begin
// in banks far enough apart that neighboring threads use different banks, whether each accesses a vector or a
// single element.
template <int W>
HOST_DEVICE constexpr int vector_plane(int vectors) {
    constexpr int apart = warp_size / W;
    return (vectors + warp_size - apart - 1) / warp_size * warp_size + apart;
}

// Block (x, y) sums slice y, in the 32 W columns from column 32 W x on. Its warps take rows in turn.
template <int W>
__global__ void sum_columns_kernel(float* sums, const floatX* dout, int N, int OC) {
    constexpr int plane = vector_plane<W>(warp_size);
    __shared__ float per_warp[bias_warps][plane * W];
    int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size, slice = blockIdx.y;
    int first = blockIdx.x * warp_size * W, column = first + lane * W;
    float sum[W] = {};
    if (column < OC) {
#pragma unroll 4
        for (int n = slice + warp * bias_slices; n < N; n += bias_warps * bias_slices) {
            auto row = load<W>(dout + (size_t)n * OC + column);
            for (int i = 0; i < W; i++) sum[i] += float(row[i]);
        }
    }
    for (int i = 0; i < W; i++) per_warp[warp][i * plane + lane] = sum[i];
    __syncthreads();
    for (int i = threadIdx.x; i < warp_size * W; i += blockDim.x) {
        float total = 0;
        for (int w = 0; w < bias_warps; w++) total += per_warp[w][i % W * plane + i / W];
        if (first + i < OC) sums[(size_t)slice * OC + first + i] = total;
    }
}

__global__ void add_slices_kernel(float* dbias, const float* sums, int OC) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= OC) return;
    float total = 0;
#pragma unroll 16
    for (int slice = 0; slice < bias_slices; slice++) total += sums[(size_t)slice * OC + column];
    dbias[column] += total;
}

inline void launch_backward_bias(float* dbias, float* scratch, const floatX* dout, int N, int OC,
                                 cudaStream_t stream) {
    with_vec_width<floatX>(OC, [&](auto W) {
        dim3 grid(ceil_div(OC, warp_size * W), bias_slices);
        launch(sum_columns_kernel<W>, grid, bias_warps * warp_size, 0, stream, scratch, dout, N, OC);
    });
    launch(add_slices_kernel, ceil_div(OC, 64), 64, 0, stream, dbias, scratch, OC);
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline LaunchCost column_sums_cost(const float* dbias, const float* scratch, const floatX* dout, int N,
                                   int OC) {
    double sums = array_bytes(dbias, OC) + array_bytes(scratch, bias_slices, OC);
    return {.read = array_bytes(dout, N, OC) + sums, .written = sums, .launches = 2};
}

inline void matmul_backward_bias(float* dbias,        // (OC) +=
                                 float* scratch,      // (matmul_backward_bias_scratch(OC))
                                 const floatX* dout,  // (N, OC)
                                 int N, int OC, cudaStream_t stream) {
    ON_DEVICE(stream, column_sums_cost(dbias, scratch, dout, N, OC),
              matmul_backward_bias_cpu(dbias, scratch, dout, N, OC),
              launch_backward_bias(dbias, scratch, dout, N, OC, stream));
}
