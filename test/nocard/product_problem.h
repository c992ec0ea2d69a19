/*
A product as a program describes it to cuBLASLt, whether the library supports it on the card, and the
algorithms for it.

The supported types, layouts, epilogues and alignments (of fp8 and of epilogue matrices) are those that the
library's documentation lists. Each product has several algorithms, which differ in the order of their sums
and in the workspace that they need, so the bits of a result depend on the algorithm, as they do on a card.
*/
#pragma once

#include <cstdint>
#include <cublasLt.h>
#include <span>

namespace nocard {

struct Layout {
    cudaDataType type;
    uint64_t rows, columns;
    int64_t stride;
};

struct Description {
    cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void *bias = nullptr, *aux = nullptr;
    int64_t aux_stride = 0;
    const float *a_scale = nullptr, *b_scale = nullptr;
    int32_t multiprocessors = 0;  // 0: all
    int8_t fast_sums = 0;
};

struct Preference {
    uint64_t workspace = 0;
    uint32_t reduction_schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t align_a = 256, align_b = 256, align_c = 256, align_d = 256;
};

struct Problem {
    const Description& description;
    const Layout &a, &b, &c, &d;

    bool transposed_a() const { return description.transpose_a != CUBLAS_OP_N; }
    bool transposed_b() const { return description.transpose_b != CUBLAS_OP_N; }
    uint64_t m() const { return transposed_a() ? a.columns : a.rows; }
    uint64_t n() const { return transposed_b() ? b.rows : b.columns; }
    uint64_t k() const { return transposed_a() ? a.rows : a.columns; }
};

bool has_aux(cublasLtEpilogue_t epilogue);
bool writes_aux(cublasLtEpilogue_t epilogue);
bool reads_bias(cublasLtEpilogue_t epilogue);
bool writes_bias(cublasLtEpilogue_t epilogue);

// Returns the status with which the library refuses the problem, or success.
cublasStatus_t check(const Problem& problem);

struct AlgorithmRow {
    size_t splits;
    uint32_t alignment;  // 0: that of an element suffices
    size_t more_workspace;
    double share;  // the fraction of the card's rate that it reaches
};

std::span<const AlgorithmRow> algorithms();

// Returns whether an algorithm supports the product at all, and the workspace that it needs.
bool suits(const AlgorithmRow& row, const Problem& problem);
size_t workspace_of(const AlgorithmRow& row, const Problem& problem);

// Returns the algorithm of a row, as bytes that are valid only for this problem.
cublasLtMatmulHeuristicResult_t result_of(size_t row, const Problem& problem);

// Finds the row that such bytes stand for. Fails unless they were made for this problem.
cublasStatus_t find_algorithm(const cublasLtMatmulAlgo_t& bytes, const Problem& problem, size_t& row);

}  // namespace nocard
