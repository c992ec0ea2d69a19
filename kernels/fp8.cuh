/*
Numbers in 8 bits for matrix products (Micikevicius et al., "FP8 formats for deep learning", 2022):

    e4m3    4 bits of exponent, 3 of fraction, up to 448      values of the forward pass
    e5m2    5 bits of exponent, 2 of fraction, up to 57344    gradients

A matrix (rows, columns) of floatX becomes q = round(x * scale), with the scale that brings its largest
element to the largest number of the format, and a float that tells what 1 of q counts. The scale is that of
the very numbers it is applied to, so nothing is cut off. Rounding is to nearest even. NaN stays NaN, and an
infinite element makes it all NaN.

Hopper multiplies in fp8 only where the inner dimension of both factors is the fast one, so a matrix is
needed as it is for one product and transposed for another: one pass writes both, through a tile in shared
memory. The largest element is found by an atomic maximum, whose order changes nothing.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/common.cuh"

#ifndef DEVICE_CPU
#include <cuda_fp8.h>
#endif

enum class Fp8 { e4m3, e5m2 };

struct Fp8Matrix {
    uint8_t* values;      // (rows, columns), or null
    uint8_t* transposed;  // (columns, rows), or null
    float* scale;         // (2) the largest element, and what 1 counts
};

HOST_DEVICE constexpr float fp8_largest(Fp8 format) {
    return format == Fp8::e4m3 ? 448.0f : 57344.0f;
}

// Without an infinite one for numbers that are hardly there.
HOST_DEVICE inline float fp8_scale(Fp8 format, float largest_element) {
    constexpr float most = 0x1p100f;
    float scale = fp8_largest(format) / largest_element;
    return scale > most ? most : scale;
}

// ----------------------------------------------------------------------------
// CPU

// What is larger than the largest number becomes that.
inline uint8_t fp8_round(Fp8 format, float x) {
    int fraction_bits = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15;
    uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return sign | 0x7f;
    float size = std::min(std::fabs(x), fp8_largest(format));
    int exponent = std::max(size > 0 ? std::ilogb(size) : 0, 1 - bias);
    int steps = (int)std::nearbyint(std::ldexp(size, fraction_bits - exponent));
    if (size == 0) return sign;
    return (uint8_t)(sign | (((exponent + bias - 1) << fraction_bits) + steps));
}

inline float fp8_value(Fp8 format, uint8_t bits) {
    int fraction_bits = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15;
    int size = bits & 0x7f, infinite = format == Fp8::e4m3 ? 0x7f : 0x7c;
    float sign = bits & 0x80 ? -1.0f : 1.0f;
    if (size >= infinite) return format == Fp8::e5m2 && size == infinite ? sign * INFINITY : NAN;
    int exponent = std::max(size >> fraction_bits, 1), fraction = size - ((exponent - 1) << fraction_bits);
    return sign * std::ldexp((float)fraction, exponent - bias - fraction_bits);
}

inline void fp8_quantize_cpu(Fp8Matrix out, Fp8 format, const floatX* inp, size_t rows, size_t columns) {
    float largest = 0;
    for (size_t i = 0; i < rows * columns; i++) {
        float size = std::fabs(float(inp[i]));
        if (!(size <= largest)) largest = std::isnan(largest) ? largest : size;
    }
    float scale = fp8_scale(format, largest);
    for (size_t row = 0; row < rows; row++) {
        for (size_t column = 0; column < columns; column++) {
            uint8_t bits = fp8_round(format, float(inp[row * columns + column]) * scale);
            if (out.values) out.values[row * columns + column] = bits;
            if (out.transposed) out.transposed[column * rows + row] = bits;
        }
    }
    out.scale[0] = largest;
    out.scale[1] = 1 / scale;
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

// The maximum of *largest (0 before) and the sizes of all elements, as bits: in their order NaN is largest.
template <int W>
__global__ void largest_element_kernel(unsigned* largest, const floatX* inp, size_t n) {
    __shared__ unsigned per_warp[warp_size];
    unsigned bits = 0;
    size_t step = (size_t)gridDim.x * blockDim.x * W;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W; i < n; i += step) {
        auto x = load<W>(inp + i);
        for (int k = 0; k < W; k++) bits = max(bits, __float_as_uint(fabsf(float(x[k]))));
    }
    bits = __reduce_max_sync(~0u, bits);
    unsigned warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    if (lane == 0) per_warp[warp] = bits;
    __syncthreads();
    if (warp > 0) return;
    bits = __reduce_max_sync(~0u, lane < blockDim.x / warp_size ? per_warp[lane] : 0);
    if (lane == 0) atomicMax(largest, bits);
}

constexpr int fp8_tile = 64, fp8_threads = 256, fp8_per_thread = 8;
constexpr int fp8_tile_stride = fp8_tile + 4;  // bytes; a multiple of 4 that spreads columns over the banks

// A block for each tile of 64 x 64. A thread converts 8 elements of a row at a time; then it has 16 elements
// of a column, which are neighbours in the transposed matrix. W: elements that can be loaded at once, and
// W > 1 says that rows and columns are multiples of 16.
template <Fp8 format, int W>
__global__ void fp8_quantize_kernel(uint8_t* values, uint8_t* transposed, float* scale, const floatX* inp,
                                    size_t rows, size_t columns) {
    alignas(16) __shared__ uint8_t tile[fp8_tile * fp8_tile_stride];  // [column][row]
    constexpr auto kind = format == Fp8::e4m3 ? __NV_E4M3 : __NV_E5M2;
    size_t first_row = (size_t)blockIdx.y * fp8_tile, first_column = (size_t)blockIdx.x * fp8_tile;
    float factor = fp8_scale(format, scale[0]);
    constexpr int threads_per_row = fp8_tile / fp8_per_thread, rows_at_once = fp8_threads / threads_per_row;
    int of_row = threadIdx.x % threads_per_row * fp8_per_thread;
#pragma unroll
    for (int y = threadIdx.x / threads_per_row; y < fp8_tile; y += rows_at_once) {
        size_t row = first_row + y, column = first_column + of_row;
        Vec<floatX, fp8_per_thread> x;
        Vec<uint8_t, fp8_per_thread> q;
#pragma unroll
        for (int k = 0; k < fp8_per_thread; k += W) {
            bool inside = row < rows && column + k < columns;
            Vec<floatX, W> part = {};
            if (inside) part = load<W>(inp + row * columns + column + k);
            for (int i = 0; i < W; i++) x[k + i] = part[i];
        }
#pragma unroll
        for (int k = 0; k < fp8_per_thread; k += 2) {
            auto pair = __nv_cvt_float2_to_fp8x2({float(x[k]) * factor, float(x[k + 1]) * factor},
                                                 __NV_SATFINITE, kind);
            q[k] = (uint8_t)pair, q[k + 1] = (uint8_t)(pair >> 8);
        }
        if (values && row < rows) {
            if (W > 1) {
                if (column < columns) store(values + row * columns + column, q);
            } else {
                for (int k = 0; k < fp8_per_thread; k++)
                    if (column + k < columns) values[row * columns + column + k] = q[k];
            }
        }
#pragma unroll
        for (int k = 0; k < fp8_per_thread; k++) tile[(of_row + k) * fp8_tile_stride + y] = q[k];
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) scale[1] = 1 / factor;
    if (!transposed) return;
    __syncthreads();
    int x = threadIdx.x / 4, of_column = threadIdx.x % 4 * 16;
    size_t column = first_column + x, row = first_row + of_column;
    if (column >= columns) return;
    const uint8_t* from = tile + x * fp8_tile_stride + of_column;
    if (W > 1) {
        if (row >= rows) return;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
        uint4 sixteen = {words[0], words[1], words[2], words[3]};
        *reinterpret_cast<uint4*>(transposed + column * rows + row) = sixteen;
    } else {
        for (int k = 0; k < 16; k++)
            if (row + k < rows) transposed[column * rows + row + k] = from[k];
    }
}

inline void launch_fp8_quantize(Fp8Matrix out, Fp8 format, const floatX* inp, size_t rows, size_t columns,
                                cudaStream_t stream) {
    size_t n = rows * columns;
    cudaCheck(cudaMemsetAsync(out.scale, 0, sizeof(float), stream));
    with_vec_width<floatX>(rows % 16 || columns % 16 ? 1 : 16, [&](auto W) {
        unsigned blocks = (unsigned)std::min<size_t>(ceil_div(n, fp8_threads * 4 * W), 1024);
        launch(largest_element_kernel<W>, blocks, fp8_threads, 0, stream, (unsigned*)out.scale, inp, n);
        auto kernel =
            format == Fp8::e4m3 ? fp8_quantize_kernel<Fp8::e4m3, W> : fp8_quantize_kernel<Fp8::e5m2, W>;
        dim3 grid(ceil_div(columns, fp8_tile), ceil_div(rows, fp8_tile));
        launch(kernel, grid, fp8_threads, 0, stream, out.values, out.transposed, out.scale, inp, rows,
               columns);
    });
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void fp8_quantize(Fp8Matrix out, Fp8 format, const floatX* inp /* (rows, columns) */, size_t rows,
                         size_t columns, cudaStream_t stream) {
    ON_DEVICE(stream, fp8_quantize_cpu(out, format, inp, rows, columns),
              launch_fp8_quantize(out, format, inp, rows, columns, stream));
}
