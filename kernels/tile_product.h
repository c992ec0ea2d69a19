/*
Products of matrices small enough to stay in the cache, in plain loops over vectors: the building block of
attention on the CPU. A block of the result stays in registers while the whole inner dimension passes.
*/
#pragma once

// Floats in a vector register, and how many registers a product holds sums in.
#if defined __AVX512F__
constexpr int vector_lanes = 16, sum_registers = 16;
#elif defined __AVX__
constexpr int vector_lanes = 8, sum_registers = 8;
#else
constexpr int vector_lanes = 4, sum_registers = 8;
#endif
typedef float Lanes
    __attribute__((vector_size(vector_lanes * sizeof(float)), aligned(alignof(float)), may_alias));

// A matrix read one element at a time: (i, j) is at data[i * row + j * column], so a transpose costs nothing.
struct Elements {
    const float* data;
    int row, column;
    Elements transposed() const { return {data, column, row}; }
};

// The first `vectors` vectors of columns of c (M, N) = or += a (M, K) b (K, N).
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

// c (M, N) = or += a (M, K) b (K, N). M and N are multiples of 16.
inline void tile_product(float* c, int ldc, Elements a, const float* b, int ldb, int M, int N, int K,
                         bool accumulate) {
    int n = 0;
    for (; n + 2 * vector_lanes <= N; n += 2 * vector_lanes) {
        tile_product_columns<2>(c + n, ldc, a, b + n, ldb, M, K, accumulate);
    }
    if (n < N) tile_product_columns<1>(c + n, ldc, a, b + n, ldb, M, K, accumulate);
}
