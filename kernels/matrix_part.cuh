/*
Copies parts of a matrix, as ranks hold them, to and from the whole matrix.

A part is a run of consecutive elements of a box (in row-major order). A box consists of some columns of all
rows. Element i of the part is

    e = begin + i,   row = e / columns,   column = first column + e % columns

The whole matrix may be stored transposed. Parts are floatX; conversion to and from the fp32 arrays of an
optimizer is separate.
*/
#pragma once

#include <cmath>
#include <cstddef>
#include <tuple>

#include "kernels/common.cuh"

// The position of a part in a matrix of (rows, cols).
struct MatrixPart {
    size_t rows, cols;
    size_t column, columns;  // the box's first column, and its number of columns
    size_t begin, count;     // range of elements of the box
    bool transposed;         // the whole matrix is stored as (cols, rows)

    // Returns the offset of an element of the box in the whole matrix.
    HOST_DEVICE size_t place(size_t row, size_t of_row) const {
        size_t col = column + of_row;
        return transposed ? col * rows + row : row * cols + col;
    }
};

enum class PartCopy { into_matrix, out_of_matrix };

// ----------------------------------------------------------------------------
// CPU

template <PartCopy direction>
void copy_part_cpu(floatX* matrix, floatX* part, const MatrixPart& at) {
#pragma omp parallel for if (at.count > 65536)
    for (size_t i = 0; i < at.count; i++) {
        size_t e = at.begin + i;
        floatX &whole = matrix[at.place(e / at.columns, e % at.columns)], &own = part[i];
        (direction == PartCopy::into_matrix ? whole : own) = direction == PartCopy::into_matrix ? own : whole;
    }
}

template <typename To, typename From>
void convert_cpu(To* out, const From* inp, size_t n, const float* scale) {
    if (scale && std::isnan(*scale)) return;
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++) out[i] = To((float)inp[i]);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned part_block = 256;

// Each row of the box has its own blocks, because finding the row of an element by division would take longer
// than moving it.
template <PartCopy direction>
__global__ void copy_part_kernel(floatX* matrix, floatX* part, MatrixPart at, size_t first_row,
                                 unsigned blocks_of_row) {
    size_t row = first_row + blockIdx.x / blocks_of_row;
    size_t of_row = (size_t)(blockIdx.x % blocks_of_row) * blockDim.x + threadIdx.x;
    size_t i = row * at.columns + of_row - at.begin;
    if (of_row >= at.columns || i >= at.count) return;  // before the part, i wraps around to a huge number
    floatX &whole = matrix[at.place(row, of_row)], &own = part[i];
    (direction == PartCopy::into_matrix ? whole : own) = direction == PartCopy::into_matrix ? own : whole;
}

template <PartCopy direction>
void launch_copy_part(floatX* matrix, floatX* part, const MatrixPart& at, cudaStream_t stream) {
    size_t first_row = at.begin / at.columns, last_row = (at.begin + at.count - 1) / at.columns;
    unsigned blocks_of_row = ceil_div(at.columns, part_block);
    launch(copy_part_kernel<direction>, (last_row - first_row + 1) * blocks_of_row, part_block, 0, stream,
           matrix, part, at, first_row, blocks_of_row);
}

template <typename To, typename From>
__global__ void convert_kernel(To* out, const From* inp, size_t n, const float* scale) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (scale && std::isnan(*scale)) return;
    if (i < n) out[i] = To((float)inp[i]);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Copies part (count) to its positions in the matrix, or back.
template <PartCopy direction>
void copy_part(floatX* matrix, floatX* part, const MatrixPart& at, cudaStream_t stream) {
    if (at.count == 0) return;
    ON_DEVICE(
        stream, (LaunchCost{.read = array_bytes(part, at.count), .written = array_bytes(part, at.count)}),
        copy_part_cpu<direction>(matrix, part, at), launch_copy_part<direction>(matrix, part, at, stream));
}

// Copies inp (n) to out (n), converted to the type of out. Does nothing if there is a scale (1) and it is
// NaN.
template <typename To, typename From>
void convert(To* out, const From* inp, size_t n, cudaStream_t stream, const float* scale = nullptr) {
    if (n == 0) return;
    ON_DEVICE(
        stream, (LaunchCost{.read = array_bytes(inp, n), .written = array_bytes(out, n)}),
        convert_cpu(out, inp, n, scale),
        launch(convert_kernel<To, From>, ceil_div(n, part_block), part_block, 0, stream, out, inp, n, scale));
}

#ifdef __CUDA_ARCH__
// Instances for cards: nvcc compiles the kernels without the callers (Makefile).
inline const std::tuple copies_of_parts(copy_part<PartCopy::into_matrix>, copy_part<PartCopy::out_of_matrix>);
inline const std::tuple conversions(convert<float, floatX>, convert<floatX, float>);
#endif
