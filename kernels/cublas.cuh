/*
Products of matrices by cuBLASLt, for the kernels of matmul.cuh: multiply(what, with what, stream).

cuBLASLt runs a product in three steps: describe it, ask which algorithm is best for it, start that one. The
first two take longer than a small product, so what they give is kept for the next product of the same kind.
The algorithm decides the order of sums; keeping it also means that the same product gives the same bits for
the whole run.
*/
#pragma once

#include <array>
#include <compare>
#include <cublasLt.h>
#include <map>
#include <utility>

#include "kernels/common.cuh"

inline void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fprintf(stderr, "train_gpt: %s failed: %s (%s:%d)\n", call, cublasLtGetStatusString(status), file, line);
    exit(1);
}
#define cublasCheck(call) cublas_check((call), #call, __FILE__, __LINE__)

inline const cudaDeviceProp& cublas_device() {
    static const cudaDeviceProp properties = [] {
        cudaDeviceProp result;
        int device;
        cudaCheck(cudaGetDevice(&device));
        cudaCheck(cudaGetDeviceProperties(&result, device));
        return result;
    }();
    return properties;
}

// Memory that cuBLASLt may use while a product runs. Only Hopper's kernels gain from more than a little.
inline size_t cublas_workspace_bytes() {
    return size_t(cublas_device().major == 9 ? 32 : 4) << 20;
}

// Each stream has its own, made at the first product on it: products of two streams may run at the same time.
inline void* cublas_workspace(cudaStream_t stream) {
    static std::map<cudaStream_t, void*> workspaces;
    void*& workspace = workspaces[stream];
    if (!workspace) cudaCheck(cudaMalloc(&workspace, cublas_workspace_bytes()));
    return workspace;
}

template <typename T>
constexpr cudaDataType cuda_type = sizeof(T) == 2 ? CUDA_R_16BF : CUDA_R_32F;

// D (m, n) = op(A) op(B) in the library's terms, where matrices are stored by columns: our rows are its
// columns, so A is what has our innermost dimension.
struct Product {
    int m, n, k;
    bool transpose_a = false, transpose_b = false;
    bool accumulate = false;  // D +=
    cudaDataType d_type = cuda_type<floatX>;
    auto operator<=>(const Product&) const = default;
};

struct Operands {
    const void *a, *b;
    void* d;
    const void* bias = nullptr;  // (m): added to each column
    void* pre_gelu = nullptr;    // like d: receives the product, and d its GELU
};

// What to know about a kind of product before running it, found once.
struct ProductPlan {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
};

// Largest power of two that divides the address, up to the 256 that cudaMalloc gives; 0 for null.
inline uint32_t pointer_alignment(const void* pointer) {
    if (!pointer) return 0;
    uintptr_t address = (uintptr_t)pointer | 256;
    return (uint32_t)(address & -address);
}

template <typename T>
void set_attribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
    cublasCheck(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
}

template <typename T>
void set_attribute(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                   T value) {
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

inline void set_epilogue(cublasLtMatmulDesc_t operation, const Operands& operands) {
    set_attribute(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
    set_attribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, operands.pre_gelu);
}

inline ProductPlan make_plan(cublasLtHandle_t handle, const Product& product, const Operands& operands) {
    auto [m, n, k, transpose_a, transpose_b, accumulate, d_type] = product;
    ProductPlan plan;
    cublasCheck(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE,
                  operands.pre_gelu ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                  : operands.bias   ? CUBLASLT_EPILOGUE_BIAS
                                    : CUBLASLT_EPILOGUE_DEFAULT);
    if (operands.pre_gelu) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)m);
    set_epilogue(plan.operation, operands);  // the choice of an algorithm looks at their alignment

    auto layout = [](cublasLtMatrixLayout_t* result, cudaDataType type, int rows, int columns) {
        cublasCheck(cublasLtMatrixLayoutCreate(result, type, rows, columns, rows));
    };
    layout(&plan.a, cuda_type<floatX>, transpose_a ? k : m, transpose_a ? m : k);
    layout(&plan.b, cuda_type<floatX>, transpose_b ? n : k, transpose_b ? k : n);
    layout(&plan.d, d_type, m, n);

    cublasLtMatmulPreference_t preference;
    cublasCheck(cublasLtMatmulPreferenceCreate(&preference));
    set_attribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)cublas_workspace_bytes());
    // When a sum is split over blocks, its parts are added in fp32, not in the type of D.
    set_attribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                  (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, pointer_alignment(operands.a));
    set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, pointer_alignment(operands.b));
    set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, pointer_alignment(operands.d));
    set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, pointer_alignment(operands.d));
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, plan.operation, plan.a, plan.b, plan.d,
                                                           plan.d, preference, 1, &best, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
        fprintf(stderr,
                "train_gpt: cuBLASLt has no algorithm for a %s product of m = %d, n = %d, k = %d%s: %s\n",
                floatX_name, m, n, k, operands.pre_gelu ? " with GELU" : "", cublasLtGetStatusString(status));
        exit(1);
    }
    cublasCheck(cublasLtMatmulPreferenceDestroy(preference));
    plan.algorithm = best.algo;
    return plan;
}

// Called by one host thread, the one that launches.
inline void multiply(const Product& product, const Operands& operands, cudaStream_t stream) {
    static const cublasLtHandle_t handle = [] {
        cublasLtHandle_t created;
        cublasCheck(cublasLtCreate(&created));
        return created;
    }();
    // All that a choice of algorithm depends on. Which epilogue it is shows in which pointers are null.
    using Key = std::pair<Product, std::array<uint32_t, 5>>;
    static std::map<Key, ProductPlan> plans;
    Key key = {product,
               {pointer_alignment(operands.a), pointer_alignment(operands.b), pointer_alignment(operands.d),
                pointer_alignment(operands.bias), pointer_alignment(operands.pre_gelu)}};
    auto plan = plans.find(key);
    if (plan == plans.end()) plan = plans.emplace(key, make_plan(handle, product, operands)).first;

    auto& [operation, a, b, d, algorithm] = plan->second;
    set_epilogue(operation, operands);
    float alpha = 1, beta = product.accumulate;
    cublasCheck(cublasLtMatmul(handle, operation, &alpha, operands.a, a, operands.b, b, &beta, operands.d, d,
                               operands.d, d, &algorithm, cublas_workspace(stream), cublas_workspace_bytes(),
                               stream));
}
