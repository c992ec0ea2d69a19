/*
Matrix products on the host, for cublaslt.cc. Matrices are column-major, as in the library.
*/
#pragma once

#include <cublasLt.h>
#include <vector>

namespace nocard {

struct Matrix {
    const void* data = nullptr;
    cudaDataType type = CUDA_R_32F;
    size_t rows = 0, columns = 0,
           stride = 0;  // between columns; the elements of a column are contiguous
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

// Returns the sums of each part of k: (splits, n, m).
std::vector<float> partial_sums(const HostProduct& product);

// Adds the parts and writes the results.
void finish_product(const HostProduct& product, const float* sums);

}  // namespace nocard
