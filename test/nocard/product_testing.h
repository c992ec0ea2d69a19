/*
A cuBLASLt product with operands, and its expected results: plain sums.
*/
#pragma once

#include <cublasLt.h>

#include <algorithm>
#include <cmath>

#include "test/nocard/number_types.h"
#include "test/nocard/runtime_testing.h"

using nocard::bytes_of;
using nocard::from_fp8;
using nocard::is_fp8;
using nocard::load_number;
using nocard::store_number;

// A product in the library's terms, with random operands.
struct Product {
    int m, n, k;
    bool transpose_a = false, transpose_b = false;
    cudaDataType a_type = CUDA_R_16BF, b_type = CUDA_R_16BF, d_type = CUDA_R_16BF;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    float beta = 0;
    bool fast = false;
    uint64_t workspace = 64 << 20;
    int aux_stride = 0;  // 0: m
};

// The library's own type is an unnamed struct, which nvcc rejects as the element type of a std::vector.
struct Found {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
};

class ProductTest {
public:
    explicit ProductTest(const Product& p) : p_(p) {
        cublasLtCreate(&handle_);
        cublasLtMatmulDescCreate(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)(p.aux_stride ? p.aux_stride : p.m));
        if (p.fast) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)1);
        int a_rows = p.transpose_a ? p.k : p.m, b_rows = p.transpose_b ? p.n : p.k;
        cublasLtMatrixLayoutCreate(&a_, p.a_type, a_rows, p.transpose_a ? p.m : p.k, a_rows);
        cublasLtMatrixLayoutCreate(&b_, p.b_type, b_rows, p.transpose_b ? p.k : p.n, b_rows);
        cublasLtMatrixLayoutCreate(&d_, p.d_type, p.m, p.n, p.m);
        A.resize(p.m * p.k), B.resize(p.k * p.n), D.resize(p.m * p.n), aux.resize(p.m * p.n),
            bias.resize(std::max(p.m, p.n));
        unsigned state = 1;
        for (auto* numbers : {&A, &B, &D, &aux, &bias})
            for (double& x : *numbers)
                state = state * 1664525 + 1013904223, x = (double)((state >> 16) % 2001) / 1000 - 1;
        to_card(card_a_, A, p.a_type), to_card(card_b_, B, p.b_type), to_card(card_d_, D, p.d_type);
        to_card(card_aux_, aux, p.d_type), to_card(card_bias_, bias, p.d_type);
        const std::vector<float> scales = {0.5f, 0, 0, 0, 4};  // at multiples of 16 bytes
        require(cudaMalloc(&scales_, scales.size() * sizeof(float)));
        require(cudaMemcpy(scales_, scales.data(), scales.size() * sizeof(float), cudaMemcpyHostToDevice));
        require(cudaMalloc(&workspace_, p.workspace));
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, card_bias_);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, card_aux_);
        set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales_);
        set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales_ + 16);
    }

    ~ProductTest() {
        cudaDeviceSynchronize();
        for (char* memory : {card_a_, card_b_, card_d_, card_aux_, card_bias_, scales_, workspace_})
            cudaFree(memory);
    }

    // Moves the scale of B to another offset.
    void move_scale(size_t bytes) { set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales_ + bytes); }

    template <typename T>
    void set(cublasLtMatmulDescAttributes_t attribute, T value) {
        REQUIRE(cublasLtMatmulDescSetAttribute(description_, attribute, &value, sizeof value) ==
                CUBLAS_STATUS_SUCCESS);
    }

    cublasStatus_t find(uint32_t alignment = 256) {
        cublasLtMatmulPreference_t preference;
        cublasLtMatmulPreferenceCreate(&preference);
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &p_.workspace, sizeof p_.workspace);
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                             &alignment, sizeof alignment);
        cublasLtMatmulHeuristicResult_t results[16];
        int count = 0;
        cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, description_, a_, b_, d_, d_,
                                                               preference, 16, results, &count);
        cublasLtMatmulPreferenceDestroy(preference);
        found.clear();
        for (int i = 0; i < count; i++) found.push_back({results[i].algo, results[i].workspaceSize});
        return status;
    }

    cublasStatus_t run(size_t algorithm, cudaStream_t stream = nullptr, size_t a_offset = 0,
                       size_t workspace_bytes = 64 << 20) {
        float alpha = 1;
        return cublasLtMatmul(handle_, description_, &alpha, card_a_ + a_offset, a_, card_b_, b_, &p_.beta,
                              card_d_, d_, card_d_, d_, &found[algorithm].algo, workspace_, workspace_bytes,
                              stream);
    }

    // Returns the largest difference between the card's results and plain sums of the same rounded numbers.
    double error() {
        require(cudaDeviceSynchronize());
        double worst = 0;
        std::vector<double> row_sums(p_.m), want_aux = aux;
        std::vector<double> got = from_card(card_d_, p_.m * p_.n),
                            got_aux = from_card(card_aux_, p_.m * p_.n);
        std::vector<double> got_bias = from_card(card_bias_, bias.size());
        bool fp8 = is_fp8(p_.a_type);
        for (int j = 0; j < p_.n; j++) {
            for (int i = 0; i < p_.m; i++) {
                double sum = 0;
                for (int x = 0; x < p_.k; x++) sum += a(i, x) * b(x, j);
                if (fp8) sum *= 2;  // the scales
                sum += (double)p_.beta * D[i + j * p_.m];
                auto e = p_.epilogue;
                if (e == CUBLASLT_EPILOGUE_BIAS || e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) sum += bias[i];
                if (e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
                    worst = std::max(worst, std::fabs(got_aux[i + j * p_.m] - sum));
                    sum = gelu(sum);
                }
                if (e == CUBLASLT_EPILOGUE_DGELU || e == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
                    double x = aux[i + j * p_.m], step = 1e-4;
                    sum *= (gelu(x + step) - gelu(x - step)) / (2 * step);
                }
                row_sums[i] += sum;
                worst = std::max(worst, std::fabs(got[i + j * p_.m] - sum));
            }
        }
        auto compare = [&](int count, const std::function<double(int)>& want) {
            for (int i = 0; i < count; i++) worst = std::max(worst, std::fabs(got_bias[i] - want(i)));
        };
        auto sum_over_k = [&](auto&& value) {
            double sum = 0;
            for (int x = 0; x < p_.k; x++) sum += value(x);
            return sum;
        };
        if (p_.epilogue == CUBLASLT_EPILOGUE_BGRADA)
            compare(p_.m, [&](int i) { return sum_over_k([&](int x) { return a(i, x); }); });
        if (p_.epilogue == CUBLASLT_EPILOGUE_BGRADB)
            compare(p_.n, [&](int j) { return sum_over_k([&](int x) { return b(x, j); }); });
        if (p_.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) compare(p_.m, [&](int i) { return row_sums[i]; });
        return worst;
    }

    std::vector<double> results() {
        require(cudaDeviceSynchronize());
        return from_card(card_d_, p_.m * p_.n);
    }

    std::vector<double> A, B, D, aux, bias;
    std::vector<Found> found;

private:
    double a(int i, int x) const { return p_.transpose_a ? A[x + i * p_.k] : A[i + x * p_.m]; }
    double b(int x, int j) const { return p_.transpose_b ? B[j + x * p_.n] : B[x + j * p_.k]; }
    static double gelu(double x) {
        return 0.5 * x * (1 + std::tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
    }

    // Also rounds `numbers` to the values that the card holds.
    static void to_card(char*& card, std::vector<double>& numbers, cudaDataType type) {
        size_t unit = bytes_of(type);
        std::vector<char> bytes(numbers.size() * unit);
        for (size_t i = 0; i < numbers.size(); i++) {
            if (is_fp8(type)) {
                int best = 0;  // the nearest of all 256 values
                auto distance = [&](int bits) {
                    return std::fabs((double)from_fp8((uint8_t)bits, type == CUDA_R_8F_E4M3) - numbers[i]);
                };
                for (int bits = 0; bits < 256; bits++)
                    if (distance(bits) < distance(best)) best = bits;
                bytes[i] = (char)best;
            } else {
                store_number(bytes.data(), type, i, (float)numbers[i]);
            }
            numbers[i] = load_number(bytes.data(), type, i);
        }
        require(cudaMalloc(&card, bytes.size()));
        require(cudaMemcpy(card, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }

    std::vector<double> from_card(const char* card, size_t count) const {
        std::vector<char> bytes(count * bytes_of(p_.d_type));
        require(cudaMemcpy(bytes.data(), card, bytes.size(), cudaMemcpyDeviceToHost));
        std::vector<double> numbers(count);
        for (size_t i = 0; i < count; i++) numbers[i] = load_number(bytes.data(), p_.d_type, i);
        return numbers;
    }

    Product p_;
    cublasLtHandle_t handle_;
    cublasLtMatmulDesc_t description_;
    cublasLtMatrixLayout_t a_, b_, d_;
    char *card_a_, *card_b_, *card_d_, *card_aux_, *card_bias_, *scales_, *workspace_;
};

inline bool card_has_fp8() {
    cudaDeviceProp card;
    require(cudaGetDeviceProperties(&card, 0));
    return card.major * 10 + card.minor >= 89;
}
