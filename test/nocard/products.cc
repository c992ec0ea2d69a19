#include "test/nocard/products.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "test/nocard/number_types.h"

namespace nocard {
namespace {

constexpr size_t lanes = 8, tile = 4;
using Lanes = float __attribute__((vector_size(lanes * sizeof(float))));

// Returns rows of k numbers, padded to whole vectors: A's are the rows of the result, B's its columns.
std::vector<float> rows_over_k(const Matrix& matrix, size_t rows, size_t k, size_t padded_k,
                               bool k_runs_along_columns) {
    std::vector<float> numbers(rows * padded_k);
    float of_bits[256];
    bool small = is_fp8(matrix.type);
    for (unsigned bits = 0; small && bits < 256; bits++)
        of_bits[bits] = from_fp8((uint8_t)bits, matrix.type == CUDA_R_8F_E4M3);
#pragma omp parallel for
    for (size_t row = 0; row < rows; row++) {
        for (size_t i = 0; i < k; i++) {
            size_t at = k_runs_along_columns ? row * matrix.stride + i : i * matrix.stride + row;
            numbers[row * padded_k + i] = small ? of_bits[((const uint8_t*)matrix.data)[at]]
                                                : load_number(matrix.data, matrix.type, at);
        }
    }
    return numbers;
}

// Sets sums (tile, tile) to the products of rows x and y over k from `begin` to `end`, in whole vectors.
void add_tile(float (*sums)[tile], const float* x, const float* y, size_t stride, size_t begin, size_t end) {
    Lanes sum[tile][tile] = {};
    for (size_t k = begin; k < end; k += lanes) {
        Lanes a[tile], b[tile];
        for (size_t i = 0; i < tile; i++) memcpy(&a[i], x + i * stride + k, sizeof a[i]);
        for (size_t j = 0; j < tile; j++) memcpy(&b[j], y + j * stride + k, sizeof b[j]);
        for (size_t i = 0; i < tile; i++)
            for (size_t j = 0; j < tile; j++) sum[i][j] += a[i] * b[j];
    }
    for (size_t i = 0; i < tile; i++) {
        for (size_t j = 0; j < tile; j++) {
            sums[i][j] = 0;
            for (size_t lane = 0; lane < lanes; lane++) sums[i][j] += sum[i][j][lane];
        }
    }
}

// Hopper's tensor cores keep 14 bits of a sum of fp8 products.
float shortened(float sum) {
    constexpr uint32_t kept = ~((1u << 10) - 1);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(sum) & kept);
}

// fp8 sums grow by 32 products at a time and, unless they are fast, are added to fp32 sums after every 128.
float fp8_sum(const float* x, const float* y, size_t begin, size_t end, bool fast) {
    constexpr size_t step = 32, promoted = 128;
    float total = 0, sum = 0;
    for (size_t k = begin; k < end; k += step) {
        Lanes parts = {};
        for (size_t i = k; i < std::min(k + step, end); i += lanes) {
            Lanes a, b;
            memcpy(&a, x + i, sizeof a);
            memcpy(&b, y + i, sizeof b);
            parts += a * b;
        }
        float part = 0;
        for (size_t lane = 0; lane < lanes; lane++) part += parts[lane];
        sum = shortened(sum + part);
        bool last = k + step >= end || (!fast && (k + step - begin) % promoted == 0);
        if (last) total += sum, sum = 0;
    }
    return total;
}

constexpr float gelu_slope = 0.7978845608f, gelu_cube = 0.044715f;

float gelu(float x) {
    return 0.5f * x * (1 + std::tanh(gelu_slope * (x + gelu_cube * x * x * x)));
}

float gelu_gradient(float x) {
    float t = std::tanh(gelu_slope * (x + gelu_cube * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * gelu_slope * (1 + 3 * gelu_cube * x * x);
}

bool adds_bias(cublasLtEpilogue_t epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_BIAS ||
           epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

bool has_gelu(cublasLtEpilogue_t epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_GELU || epilogue == CUBLASLT_EPILOGUE_GELU_BIAS ||
           epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

// Writes the sum of each row over k, which is a bias gradient.
void write_row_sums(const HostProduct& p, const Matrix& matrix, size_t rows, bool k_runs_along_columns) {
    std::vector<float> numbers = rows_over_k(matrix, rows, p.k, p.k, k_runs_along_columns);
    for (size_t row = 0; row < rows; row++) {
        float sum = 0;
        for (size_t i = 0; i < p.k; i++) sum += numbers[row * p.k + i];
        store_number(p.bias, p.bias_type, row, sum);
    }
}

}  // namespace

std::vector<float> partial_sums(const HostProduct& p) {
    const size_t m = (p.m + tile - 1) / tile * tile, n = (p.n + tile - 1) / tile * tile;
    const size_t k = (p.k + lanes - 1) / lanes * lanes;
    std::vector<float> x = rows_over_k(p.a, p.m, p.k, k, p.a.transposed);
    std::vector<float> y = rows_over_k(p.b, p.n, p.k, k, !p.b.transposed);
    x.resize(m * k);
    y.resize(n * k);
    std::vector<float> sums(p.splits * p.m * p.n);
    const size_t part = (k / lanes + p.splits - 1) / p.splits * lanes;
    const bool small = is_fp8(p.a.type);
#pragma omp parallel for schedule(dynamic)
    for (size_t j = 0; j < n; j += tile) {
        for (size_t split = 0; split < p.splits; split++) {
            size_t begin = std::min(split * part, k), end = std::min(begin + part, k);
            for (size_t i = 0; i < m; i += tile) {
                float of_tile[tile][tile];
                if (!small) add_tile(of_tile, &x[i * k], &y[j * k], k, begin, end);
                for (size_t jj = j; jj < std::min(j + tile, p.n); jj++) {
                    for (size_t ii = i; ii < std::min(i + tile, p.m); ii++) {
                        sums[(split * p.n + jj) * p.m + ii] =
                            small ? fp8_sum(&x[ii * k], &y[jj * k], begin, end, p.fast_sums)
                                  : of_tile[ii - i][jj - j];
                    }
                }
            }
        }
    }
    return sums;
}

void finish_product(const HostProduct& p, const float* sums) {
    const float alpha = p.alpha * (p.a_scale ? *p.a_scale : 1) * (p.b_scale ? *p.b_scale : 1);
    const bool gradient =
        p.epilogue == CUBLASLT_EPILOGUE_DGELU || p.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD;
    // Bias gradients are sums of the operands, so they are made before results may overwrite those.
    if (p.epilogue == CUBLASLT_EPILOGUE_BGRADA) write_row_sums(p, p.a, p.m, p.a.transposed);
    if (p.epilogue == CUBLASLT_EPILOGUE_BGRADB) write_row_sums(p, p.b, p.n, !p.b.transposed);
    std::vector<float> row_sums(p.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD ? p.m : 0);
#pragma omp parallel for if (row_sums.empty())
    for (size_t j = 0; j < p.n; j++) {
        for (size_t i = 0; i < p.m; i++) {
            float value = 0;
            for (size_t split = 0; split < p.splits; split++) value += sums[(split * p.n + j) * p.m + i];
            value *= alpha;
            if (p.beta != 0) value += p.beta * load_number(p.c.data, p.c.type, i + j * p.c.stride);
            if (adds_bias(p.epilogue)) value += load_number(p.bias, p.bias_type, i);
            size_t at = i + j * p.aux_stride;
            if (has_gelu(p.epilogue)) {
                if (p.aux) store_number(p.aux, p.d.type, at, value);
                value = gelu(value);
            }
            if (gradient) value *= gelu_gradient(load_number(p.aux, p.d.type, at));
            if (!row_sums.empty()) row_sums[i] += value;
            store_number((void*)p.d.data, p.d.type, i + j * p.d.stride, value);
        }
    }
    for (size_t i = 0; i < row_sums.size(); i++) store_number(p.bias, p.bias_type, i, row_sums[i]);
}

}  // namespace nocard
