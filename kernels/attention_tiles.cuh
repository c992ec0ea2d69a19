/*
What the CUDA kernels of attention are made of: tiles of heads in shared memory, and products of tiles by a
warp, on tensor cores for bf16 and with the same layout of results for float.
*/
#pragma once

#include "kernels/common.cuh"

#ifndef DEVICE_CPU

// A block is four warps. Tiles of heads in shared memory are HSP columns wide: the head size rounded up to a
// size that the kernels are compiled for, zeros beyond the head. Rows are 16 bytes apart beyond that, which
// spreads a column over the banks.
constexpr int attention_warps = 4, attention_threads = attention_warps * warp_size;
constexpr float log2_e = 1.44269504f;

template <int columns>
constexpr int tile_stride = columns + vec_width<floatX>;

// Rows [0, count) of a head to a tile in shared memory, zeros after the last row and column. Arrives as
// cp.async does.
template <int rows, int HSP>
__device__ void load_tile(floatX* to, const floatX* from, int stride, int count, int HS) {
    constexpr int W = vec_width<floatX>;
    bool aligned = HS % W == 0;
    for (int i = threadIdx.x; i < rows * HSP / W; i += attention_threads) {
        int row = i / (HSP / W), column = i % (HSP / W) * W;
        const floatX* source = from + (size_t)row * stride + column;
        floatX* target = to + row * tile_stride<HSP> + column;
        if (aligned) {
            bool valid = row < count && column < HS;
            cp_async_16(target, valid ? source : from, valid);
        } else {
            for (int c = 0; c < W; c++) {
                target[c] = row < count && column + c < HS ? source[c] : floatX(0.0f);
            }
        }
    }
}

// The reverse, from a tile that all threads have finished writing.
template <int rows, int HSP>
__device__ void store_tile(floatX* to, const floatX* from, int stride, int count, int HS) {
    constexpr int W = vec_width<floatX>;
    bool aligned = HS % W == 0;
    for (int i = threadIdx.x; i < rows * HSP / W; i += attention_threads) {
        int row = i / (HSP / W), column = i % (HSP / W) * W;
        if (row >= count) return;
        const floatX* source = from + row * tile_stride<HSP> + column;
        floatX* target = to + (size_t)row * stride + column;
        if (aligned) {
            if (column < HS) store(target, load<W>(source));
        } else {
            for (int c = 0; c < W && column + c < HS; c++) target[c] = source[c];
        }
    }
}

__device__ inline void load_tile_wait() {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
}

// 16 rows of a matrix in the registers of a warp, as mma.sync leaves them: of each 8 columns, lane 4 g + t
// holds columns 2 t and 2 t + 1 of row g, then of row g + 8.
template <int columns>
struct Fragment {
    float at[columns / 8][4];

    __device__ static int row(int i) { return threadIdx.x % warp_size / 4 + i / 2 * 8; }
    __device__ static int column(int n, int i) { return n * 8 + threadIdx.x % 4 * 2 + i % 2; }

    __device__ Fragment() {
        for (int n = 0; n < columns / 8; n++)
            for (int i = 0; i < 4; i++) at[n][i] = 0;
    }

    // Writes the rows as floatX, `row(0)` times scale_0 and `row(2)` times scale_1.
    __device__ void store(floatX* to, int stride, float scale_0, float scale_1) const {
        for (int n = 0; n < columns / 8; n++) {
            ::store(to + row(0) * stride + column(n, 0),
                    Vec<floatX, 2>{floatX(at[n][0] * scale_0), floatX(at[n][1] * scale_0)});
            ::store(to + row(2) * stride + column(n, 0),
                    Vec<floatX, 2>{floatX(at[n][2] * scale_1), floatX(at[n][3] * scale_1)});
        }
    }
};

// How the right-hand side of a product lies in shared memory.
enum class Right { rows, columns };  // (K, N), or its transpose (N, K)

// sum (16, N) += a (16, K) b (K, N) by one warp, a and b in shared memory.
template <Right right, int K, int N>
__device__ void warp_product(Fragment<N>& sum, const __nv_bfloat16* a, int a_stride, const __nv_bfloat16* b,
                             int b_stride) {
    int lane = threadIdx.x % warp_size;
    for (int k = 0; k < K; k += 16) {
        uint32_t left[4], two[4];
        ldmatrix_x4(left, a + lane % 16 * a_stride + k + lane / 16 * 8);
        for (int n = 0; n < N; n += 16) {
            if constexpr (right == Right::columns)
                ldmatrix_x4(two, b + (n + lane / 16 * 8 + lane % 8) * b_stride + k + lane / 8 % 2 * 8);
            else
                ldmatrix_x4_trans(two, b + (k + lane % 16) * b_stride + n + lane / 16 * 8);
            mma_m16n8k16(sum.at[n / 8], left, {two[0], two[1]});
            mma_m16n8k16(sum.at[n / 8 + 1], left, {two[2], two[3]});
        }
    }
}

template <Right right, int K, int N>
__device__ void warp_product(Fragment<N>& sum, const float* a, int a_stride, const float* b, int b_stride) {
    for (int k = 0; k < K; k += 4) {
        Vec<float, 4> upper = load<4>(a + sum.row(0) * a_stride + k);
        Vec<float, 4> lower = load<4>(a + sum.row(2) * a_stride + k);
        for (int n = 0; n < N / 8; n++) {
            Vec<float, 4> b0, b1;  // two columns, four rows
            if constexpr (right == Right::columns) {
                b0 = load<4>(b + sum.column(n, 0) * b_stride + k);
                b1 = load<4>(b + sum.column(n, 1) * b_stride + k);
            } else {
                for (int i = 0; i < 4; i++) {
                    Vec<float, 2> row = load<2>(b + (k + i) * b_stride + sum.column(n, 0));
                    b0[i] = row[0];
                    b1[i] = row[1];
                }
            }
            for (int i = 0; i < 4; i++) {
                sum.at[n][0] += upper[i] * b0[i];
                sum.at[n][1] += upper[i] * b1[i];
                sum.at[n][2] += lower[i] * b0[i];
                sum.at[n][3] += lower[i] * b1[i];
            }
        }
    }
}

// Over the four lanes that share the rows of a fragment.
__device__ inline float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_sum(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

#endif
