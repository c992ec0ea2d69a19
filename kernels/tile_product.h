/*
Products of matrices small enough to stay in the cache: the building block of attention on the CPU. In fp32
they are plain loops over vectors, where a block of the result stays in registers for the whole inner
dimension. In bf16 they are products of panels (matmul_bf16.h). An operand is prepared once for all its
products (TileOperand).
*/
#pragma once

#include "kernels/elements.h"     // Elements
#include "kernels/matmul_bf16.h"  // cpu_products_in_bf16, Panels, multiply_near, TileRegisters

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
[[gnu::always_inline]] inline void tile_product_columns(float* c, int ldc, Elements a, const float* b,
                                                        int ldb, int M, int K, bool accumulate) {
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

// ----------------------------------------------------------------------------
// products of operands

enum class OperandSide { left, right };

// An operand in the layout that products read: a rounded copy for products in bf16, otherwise the matrix
// itself, or a copy by rows for the right side. It serves any number of products.
class TileOperand {
public:
    TileOperand() {}
    // (M, K) on the left, (K, N) on the right; M and N are multiples of 16. memory: as many floats as a
    // matrix with rows and columns rounded up to 32, or half as many for products in bf16, aligned to a cache
    // line
    TileOperand(OperandSide side, Elements matrix, int rows, int columns, float* memory) : elements(matrix) {
#ifdef CPU_BF16_INSTRUCTIONS
        if (cpu_products_in_bf16) {
            auto* tiles = (Bf16Tile*)memory;
            panels = side == OperandSide::left ? Panels(tiles, matrix, rows, columns, false)
                                               : Panels(tiles, matrix.transposed(), columns, rows, true);
            panels.round();
            return;
        }
#endif
        if (side == OperandSide::right && matrix.column != 1) copy_by_rows(matrix, rows, columns, memory);
    }

    Elements elements;
#ifdef CPU_BF16_INSTRUCTIONS
    Panels panels;
#endif

private:
    void copy_by_rows(Elements matrix, int rows, int columns, float* copy) {
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < columns; j++)
                copy[i * columns + j] = matrix.data[i * matrix.row + j * matrix.column];
        elements = {copy, columns, 1};
    }
};

// Computes c (M, N) = or += a (M, K) b (K, N). Needs TileRegisters.
[[gnu::always_inline]] inline void tile_product(float* c, int ldc, const TileOperand& a, const TileOperand& b,
                                                int M, int N, int K, bool accumulate) {
#ifdef CPU_BF16_INSTRUCTIONS
    if (cpu_products_in_bf16) return multiply_near(c, ldc, a.panels, b.panels, M, N, accumulate);
#endif
    const float* right = b.elements.data;
    int n = 0, ldb = b.elements.row;
    for (; n + 2 * vector_lanes <= N; n += 2 * vector_lanes) {
        tile_product_columns<2>(c + n, ldc, a.elements, right + n, ldb, M, K, accumulate);
    }
    if (n < N) tile_product_columns<1>(c + n, ldc, a.elements, right + n, ldb, M, K, accumulate);
}
