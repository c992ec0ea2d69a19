/*
Products of matrices on the host, for cublaslt.cc: matrices are stored by columns, as the library has them.
*/
#pragma once

#include <cublasLt.h>
#include <vector>

namespace nocard {

struct Matrix {
    const void* data = nullptr;
    cudaDataType type = CUDA_R_32F;
    size_t rows = 0, columns = 0,
           stride = 0;  // columns are stored whole: a column's elements follow each other
    bool transposed = false;

    size_t elements() const { return stride * (columns - 1) + rows; }
};

// D (m, n) = alpha op(A) op(B) + beta C, with an epilogue.
struct HostProduct {
    size_t m = 0, n = 0, k = 0;
    Matrix a, b, c, d;
    float alpha = 1, beta = 0;
    const float *a_scale = nullptr, *b_scale = nullptr;  // fp8
    bool fast_sums = false;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void* bias = nullptr;  // read, or written with sums of gradients
    cudaDataType bias_type = CUDA_R_32F;
    void* aux = nullptr;  // (m, n), of D's type
    size_t aux_stride = 0;
    size_t splits = 1;           // parts of k, whose sums are added at the end
    float* workspace = nullptr;  // (splits, m, n), if there are several
};

// The sums of each part of k: (splits, n, m).
std::vector<float> partial_sums(const HostProduct& product);

// Adds them and writes the results.
void finish_product(const HostProduct& product, const float* sums);

}  // namespace nocard
