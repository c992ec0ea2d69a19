/*
8-bit floating point (fp8) for matrix products (Micikevicius et al., "FP8 formats for deep learning", 2022):

    e4m3    4 bits of exponent, 3 of fraction, up to 448      values of the forward pass
    e5m2    5 bits of exponent, 2 of fraction, up to 57344    gradients

A matrix (rows, columns) of floatX is stored as q = round(x * scale), together with a float, the value that q
= 1 stands for. The scale maps the largest element to the largest number of the format. It is computed from
the same elements that it is applied to, so nothing saturates. Rounding is to nearest even. A NaN or infinite
element makes the whole matrix NaN.

Hopper multiplies in fp8 only if the inner dimension of both operands is contiguous, so a matrix is needed as
it is for one product and transposed for another. One pass writes both, through a tile in shared memory. The
amax must be known by then (amax.cuh).
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/common.cuh"
#include "kernels/amax.cuh"

#ifndef DEVICE_CPU
#include <cuda_fp8.h>
#endif

enum class Fp8 { e4m3, e5m2 };

// A scale is an array aligned to 16 bytes: the amax and, at the next multiple of 16 bytes, the value of q =
// 1. If a scale has another alignment, cuBLASLt proposes algorithms and then refuses to start them.
constexpr int fp8_one_at = 4, fp8_scale_floats = 8;

struct Fp8Matrix {
    uint8_t* values;      // (rows, columns), or null
    uint8_t* transposed;  // (columns, rows), or null
    float* scale;         // (fp8_scale_floats)
};

HOST_DEVICE constexpr float fp8_largest(Fp8 format) {
    return format == Fp8::e4m3 ? 448.0f : 57344.0f;
}

// Returns the scale, capped because tiny values of amax would make it infinite.
HOST_DEVICE inline float fp8_scale(Fp8 format, float amax) {
    constexpr float most = 0x1p100f;
    float scale = fp8_largest(format) / amax;
    return scale > most ? most : scale;
}

// ----------------------------------------------------------------------------
// CPU

// Rounds to nearest even; values beyond the largest number saturate to it.
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

inline void fp8_quantize_cpu(Fp8Matrix out, Fp8 format, const floatX* inp, size_t rows, size_t columns) {
    float scale = fp8_scale(format, out.scale[0]);
    for (size_t row = 0; row < rows; row++) {
        for (size_t column = 0; column < columns; column++) {
            uint8_t bits = fp8_round(format, float(inp[row * columns + column]) * scale);
            if (out.values) out.values[row * columns + column] = bits;
            if (out.transposed) out.transposed[column * rows + row] = bits;
        }
    }
    out.scale[fp8_one_at] = 1 / scale;
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr int fp8_tile = 128, fp8_threads = 256;

// Transposes four rows of four bytes into the words of four columns.
__device__ inline void transpose_bytes(uint32_t (&columns)[4], uint32_t a, uint32_t b, uint32_t c,
                                       uint32_t d) {
    uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);  // a0 b0 a1 b1, lowest first
    columns[0] = __byte_perm(ab, cd, 0x5410), columns[1] = __byte_perm(ab, cd, 0x7632);
    ab = __byte_perm(a, b, 0x7362), cd = __byte_perm(c, d, 0x7362);
    columns[2] = __byte_perm(ab, cd, 0x5410), columns[3] = __byte_perm(ab, cd, 0x7632);
}

// One block per 128 x 128 tile. A thread converts 4 rows of 8 columns at a time, transposes them in
// registers, and leaves one word per column in shared memory; then 8 threads write each column as 128 bytes.
// Word w of column c (rows 4w to 4w + 3) is stored at w ^ (c / 8 * 2) within the column, so that the threads
// of a warp write to 32 different banks and can read whole columns.
// W: elements per load. W > 1 requires rows and columns to be multiples of 16.
template <Fp8 format, int W>
__global__ void fp8_quantize_kernel(uint8_t* values, uint8_t* transposed, float* scale, const floatX* inp,
                                    size_t rows, size_t columns) {
    constexpr int column_words = fp8_tile / 4, groups = fp8_tile / 8, words_at_once = fp8_threads / groups;
    alignas(16) __shared__ uint32_t tile[fp8_tile * column_words];
    constexpr auto kind = format == Fp8::e4m3 ? __NV_E4M3 : __NV_E5M2;
    size_t first_row = (size_t)blockIdx.y * fp8_tile, first_column = (size_t)blockIdx.x * fp8_tile;
    float factor = fp8_scale(format, scale[0]);
    int group = threadIdx.x % groups;
    size_t column = first_column + group * 8;
#pragma unroll
    for (int part = 0; part < column_words / words_at_once; part++) {
        int word = part * words_at_once + threadIdx.x / groups;
        size_t row = first_row + word * 4, at = row * columns + column;
        auto inside = [&](int y, int k) { return row + y < rows && column + k < columns; };
        bool all_inside = W > 1 && inside(0, 0);  // all 4 x 8 elements, or none
        Vec<floatX, 8> x[4] = {};
        uint32_t q[2][4];  // columns 0 to 3 and 4 to 7
#pragma unroll
        for (int i = 0; i < 32; i += W) {
            int y = i / 8, k = i % 8;
            if (!(W > 1 ? all_inside : inside(y, k))) continue;
            auto some = load<W>(inp + at + y * columns + k);
            for (int n = 0; n < W; n++) x[y][k + n] = some[n];
        }
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            int y = i / 8, k = i % 8;
            auto pair = [&](int n) -> uint32_t {
                float2 two = {float(x[y][n]) * factor, float(x[y][n + 1]) * factor};
                return __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, kind);
            };
            q[k / 4][y] = pair(k) | pair(k + 2) << 16;
        }
        for (int y = 0; y < 4 && values; y++) {
            uint8_t* to = values + at + y * columns;
            if (all_inside) store_global(to, uint2{q[0][y], q[1][y]});
            for (int k = 0; k < 8 && W == 1; k++)
                if (inside(y, k)) to[k] = (uint8_t)(q[k / 4][y] >> k % 4 * 8);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t of_column[4];
            transpose_bytes(of_column, q[half][0], q[half][1], q[half][2], q[half][3]);
            uint32_t* place = tile + (group * 8 + half * 4) * column_words + (word ^ (group * 2));
            for (int i = 0; i < 4; i++) place[i * column_words] = of_column[i];
        }
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) scale[fp8_one_at] = 1 / factor;
    if (!transposed) return;
    __syncthreads();
    constexpr int chunks = fp8_tile / 16;  // 16 bytes of a column each
#pragma unroll
    for (int i = threadIdx.x; i < fp8_tile * chunks; i += fp8_threads) {
        int x = i / chunks, chunk = i % chunks, turned = x / 8;
        size_t row = first_row + chunk * 16, of_column = first_column + x;
        if (row >= rows || of_column >= columns) continue;
        uint4 words = reinterpret_cast<const uint4*>(tile)[x * chunks + (chunk ^ (turned / 2))];
        if (turned % 2) words = {words.z, words.w, words.x, words.y};
        uint8_t* to = transposed + of_column * rows + row;
        if (W > 1) {
            store_global(to, words);
        } else {
            uint32_t at[4] = {words.x, words.y, words.z, words.w};
            for (int k = 0; k < 16; k++)
                if (row + k < rows) to[k] = (uint8_t)(at[k / 4] >> k % 4 * 8);
        }
    }
}

inline void launch_fp8_quantize(Fp8Matrix out, Fp8 format, const floatX* inp, size_t rows, size_t columns,
                                cudaStream_t stream) {
    with_vec_width<floatX>(rows % 16 || columns % 16 ? 1 : 8, [&](auto W) {
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

// out.scale[0] must hold the amax of inp.
inline void fp8_quantize(Fp8Matrix out, Fp8 format, const floatX* inp /* (rows, columns) */, size_t rows,
                         size_t columns, cudaStream_t stream) {
    ON_DEVICE(stream,
              (LaunchCost{.read = array_bytes(inp, rows, columns),
                          .written = array_bytes(out.values, rows, columns) +
                                     array_bytes(out.transposed, rows, columns)}),
              fp8_quantize_cpu(out, format, inp, rows, columns),
              launch_fp8_quantize(out, format, inp, rows, columns, stream));
}
