/*
Products of matrices small enough to stay in the cache, in plain loops over vectors: the building block of
attention on the CPU. A block of the result stays in registers for the whole inner dimension.

On processors with bf16 dot products, two steps of the inner dimension are taken at once: both operands are
rounded into pairs of neighbors along it, a vector of pairs of the right operand is multiplied by one pair of
the left one, and the sums are fp32. A matrix unit (matmul_amx.h) multiplies whole tiles. An operand is
rounded once for all its products (TileOperand).
*/
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements.h"    // Elements
#include "kernels/matmul_amx.h"  // Panels, multiply_near

// If set, products on the CPU use operands rounded to bf16 from now on (kernels/matmul_cpu.h).
inline bool cpu_products_in_bf16 = false;

// The number of floats in a vector register, and the number of registers that hold a product's sums.
#if defined __AVX512F__
constexpr int vector_lanes = 16, sum_registers = 16;
#elif defined __AVX__
constexpr int vector_lanes = 8, sum_registers = 8;
#else
constexpr int vector_lanes = 4, sum_registers = 8;
#endif
typedef float Lanes
    __attribute__((vector_size(vector_lanes * sizeof(float)), aligned(alignof(float)), may_alias));

// Computes the first `vectors` vectors of columns of c (M, N) = or += a (M, K) b (K, N).
template <int vectors>
inline void tile_product_columns(float* c, int ldc, Elements a, const float* b, int ldb, int M, int K,
                                 bool accumulate) {
    constexpr int rows = sum_registers / vectors;
    for (int m = 0; m < M; m += rows) {
        Lanes sum[rows][vectors];
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < vectors; v++) {
                sum[i][v] = accumulate ? *(const Lanes*)(c + (m + i) * ldc + v * vector_lanes) : Lanes{};
            }
        const float* a_rows = a.data + m * a.row;
        for (int k = 0; k < K; k++) {
            Lanes right[vectors];
            for (int v = 0; v < vectors; v++) right[v] = *(const Lanes*)(b + k * ldb + v * vector_lanes);
            for (int i = 0; i < rows; i++) {
                float left = a_rows[i * a.row + k * a.column];
                for (int v = 0; v < vectors; v++) sum[i][v] += left * right[v];
            }
        }
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < vectors; v++) *(Lanes*)(c + (m + i) * ldc + v * vector_lanes) = sum[i][v];
    }
}

#ifdef CPU_BF16_INSTRUCTIONS
// ----------------------------------------------------------------------------
// in bf16

#define WITH_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

// A tile in bf16: the pair (m, k) holds elements 2 k and 2 k + 1 of the inner dimension.
struct TileOfPairs {
    uint32_t* at;
    int row, column;  // strides of m and of k

    // Rounds an operand whose inner dimension is contiguous: (lines, K).
    WITH_BF16 void round_along(const float* from, int stride, int lines, int K) {
        column = 1, row = (K + 15) / 16 * 8;
        for (int line = 0; line < lines; line++)
            for (int k = 0; k < K; k += 16) {
                __m512 values = _mm512_maskz_loadu_ps(_cvtu32_mask16(0xffff >> std::max(k + 16 - K, 0)),
                                                      from + line * stride + k);
                _mm256_store_si256((__m256i*)(at + line * row + k / 2), (__m256i)_mm512_cvtneps_pbh(values));
            }
    }

    // Rounds an operand whose inner dimension is across its lines: (K, columns), with columns a multiple of
    // 16.
    WITH_BF16 void round_across(const float* from, int stride, int K, int columns) {
        column = columns, row = 1;
        // the lower half of a vector holds the even line's elements, and the upper half the odd line's
        __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __m512i in_pairs =
            _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16));
        for (int k = 0; k < K; k += 2)
            for (int i = 0; i < columns; i += 16) {
                __m512 even = _mm512_loadu_ps(from + k * stride + i);
                __m512 odd = k + 1 < K ? _mm512_loadu_ps(from + (k + 1) * stride + i) : _mm512_setzero_ps();
                __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
                _mm512_store_si512(at + k / 2 * columns + i, _mm512_permutexvar_epi16(in_pairs, halves));
            }
    }
};

// Computes 16 * vectors columns of c = or += a b.
template <int vectors>
WITH_BF16 inline void tile_product_columns_in_bf16(float* c, int ldc, const TileOfPairs& a, const uint32_t* b,
                                                   int ldb, int M, int pairs, bool accumulate) {
    constexpr int rows = 16 / vectors;
    for (int m = 0; m < M; m += rows) {
        __m512 sum[rows][vectors];
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < vectors; v++) {
                sum[i][v] = accumulate ? _mm512_loadu_ps(c + (m + i) * ldc + v * 16) : _mm512_setzero_ps();
            }
        for (int k = 0; k < pairs; k++) {
            __m512bh right[vectors];
            for (int v = 0; v < vectors; v++) right[v] = (__m512bh)_mm512_load_si512(b + k * ldb + v * 16);
            for (int i = 0; i < rows; i++) {
                auto left = (__m512bh)_mm512_set1_epi32((int)a.at[(m + i) * a.row + k * a.column]);
                for (int v = 0; v < vectors; v++) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], left, right[v]);
            }
        }
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < vectors; v++) _mm512_storeu_ps(c + (m + i) * ldc + v * 16, sum[i][v]);
    }
}

WITH_BF16 inline void tile_product_in_bf16(float* c, int ldc, const TileOfPairs& a, const TileOfPairs& b,
                                           int M, int N, int K, bool accumulate) {
    int n = 0, pairs = (K + 1) / 2;
    for (; n + 32 <= N; n += 32) {
        tile_product_columns_in_bf16<2>(c + n, ldc, a, b.at + n, N, M, pairs, accumulate);
    }
    if (n < N) tile_product_columns_in_bf16<1>(c + n, ldc, a, b.at + n, N, M, pairs, accumulate);
}
#endif

// ----------------------------------------------------------------------------
// products of operands

enum class OperandSide { left, right };

// An operand in the layout that products read: a rounded copy for products in bf16, otherwise the matrix
// itself, or a copy by rows for the right side. It serves any number of products.
class TileOperand {
public:
    // (M, K) on the left, (K, N) on the right; M and N are multiples of 16. At most 64 x 256 elements.
    TileOperand(OperandSide side, Elements matrix, int rows, int columns) : elements(matrix) {
#ifdef CPU_BF16_INSTRUCTIONS
        if (cpu_products_in_bf16 && has_matrix_unit()) {
            auto* tiles = (AmxTile*)copy_;
            panels = side == OperandSide::left ? Panels(tiles, matrix, rows, columns, false)
                                               : Panels(tiles, matrix.transposed(), columns, rows, true);
            panels.round();
            return;
        }
#endif
        if (side == OperandSide::right && matrix.column != 1) copy_by_rows(matrix, rows, columns);
#ifdef CPU_BF16_INSTRUCTIONS
        if (!cpu_products_in_bf16) return;
        pairs.at = (uint32_t*)copy_;
        if (side == OperandSide::right)
            pairs.round_across(elements.data, elements.row, rows, columns);  // perhaps in place
        else if (matrix.column == 1)
            pairs.round_along(matrix.data, matrix.row, rows, columns);
        else
            pairs.round_across(matrix.data, matrix.column, columns, rows);
#endif
    }
    TileOperand(const TileOperand&) = delete;

    Elements elements;
#ifdef CPU_BF16_INSTRUCTIONS
    Panels panels;
    TileOfPairs pairs;
#endif

private:
    void copy_by_rows(Elements matrix, int rows, int columns) {
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < columns; j++)
                copy_[i * columns + j] = matrix.data[i * matrix.row + j * matrix.column];
        elements = {copy_, columns, 1};
    }

    alignas(64) float copy_[64 * 256];
};

// Computes c (M, N) = or += a (M, K) b (K, N).
inline void tile_product(float* c, int ldc, const TileOperand& a, const TileOperand& b, int M, int N, int K,
                         bool accumulate) {
#ifdef CPU_BF16_INSTRUCTIONS
    if (cpu_products_in_bf16)
        return has_matrix_unit() ? multiply_near(c, ldc, a.panels, b.panels, M, N, accumulate)
                                 : tile_product_in_bf16(c, ldc, a.pairs, b.pairs, M, N, K, accumulate);
#endif
    const float* right = b.elements.data;
    int n = 0, ldb = b.elements.row;
    for (; n + 2 * vector_lanes <= N; n += 2 * vector_lanes) {
        tile_product_columns<2>(c + n, ldc, a.elements, right + n, ldb, M, K, accumulate);
    }
    if (n < N) tile_product_columns<1>(c + n, ldc, a.elements, right + n, ldb, M, K, accumulate);
}
