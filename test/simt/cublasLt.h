/*
The part of cuBLASLt that kernels/cublas.cuh uses, on the host: products run on the stream through oneDNN's
sgemm, on fp32 copies, with the epilogues and the rounding of the library.

Each problem has several algorithms: number i sums over k in i + 1 parts, one after another, so their results
differ in the last bits. An algorithm is 64 bytes that are valid in other processes too.

It is stricter than the library, which only promises that a wrong call may fail: an algorithm runs only the
problem that it was found for, on pointers with the promised alignment, and with a workspace of its size,
which it overwrites.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <dnnl.h>

// clang-format off
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_INITIALIZED = 1,
                      CUBLAS_STATUS_ALLOC_FAILED = 3, CUBLAS_STATUS_INVALID_VALUE = 7,
                      CUBLAS_STATUS_EXECUTION_FAILED = 13, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16BF = 14, CUDA_R_8F_E4M3 = 28, CUDA_R_8F_E5M2 = 29 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4,
                          CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 164, CUBLASLT_EPILOGUE_DGELU = 192,
                          CUBLASLT_EPILOGUE_BGRADB = 512 };
enum cublasLtReductionScheme_t { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };
enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_TRANSB = 4, CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET = 15,
    CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,
    CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18, CUBLASLT_MATMUL_DESC_FAST_ACCUM = 25 };
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8 };
// clang-format on

struct HostMatrixLayout {
    cudaDataType type;
    uint64_t rows, columns;
    int64_t ld;
    bool operator==(const HostMatrixLayout&) const = default;
};

struct HostMatmulDesc {
    int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void* bias = nullptr;
    void* aux = nullptr;
    int64_t aux_ld = 0;
    const float *a_scale = nullptr, *b_scale = nullptr;
    int32_t multiprocessors = 0;  // 0: all
    int8_t fast = 0;
};

struct HostMatmulPreference {
    uint64_t workspace = 0;
    uint32_t reduction = 7;
    uint32_t align_a = 256, align_b = 256, align_c = 256, align_d = 256;
};

using cublasLtHandle_t = int*;
using cublasLtMatrixLayout_t = HostMatrixLayout*;
using cublasLtMatmulDesc_t = HostMatmulDesc*;
using cublasLtMatmulPreference_t = HostMatmulPreference*;

// The problem as the heuristic sees it, and the number of this algorithm among those for it.
struct cublasLtMatmulAlgo_t {
    uint64_t number, problem;
    uint32_t align_a, align_b, align_c, align_d;
    uint64_t unused[4];
};
static_assert(sizeof(cublasLtMatmulAlgo_t) == 64);

struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
};

inline const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "out of memory";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "an invalid value was passed";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "the operation is not supported";
    }
    return "unknown status";
}

inline size_t cublasLtGetVersion() {
    return 130000;
}

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    static int context;
    *handle = &context;
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t ld) {
    *layout = new HostMatrixLayout{type, rows, columns, ld};
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                               cudaDataType scale) {
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    *desc = new HostMatmulDesc;
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    *preference = new HostMatmulPreference;
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}

namespace cublas_host {

template <typename T>
cublasStatus_t set(T& field, const void* value, size_t bytes) {
    if (!value || bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

inline size_t bytes(cudaDataType type) {
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1;
}

inline bool is_fp8(cudaDataType type) {
    return bytes(type) == 1;
}

inline bool aligned(const void* pointer, size_t to) {
    return (uintptr_t)pointer % to == 0;
}

constexpr size_t workspace_needed[] = {1 << 16, 1 << 16, 1 << 20};  // by each of the algorithms
constexpr int algorithms = std::size(workspace_needed);

inline int multiprocessors() {
    static const int count = [] {
        cudaDeviceProp properties;
        cudaGetDeviceProperties(&properties, 0);
        return properties.multiProcessorCount;
    }();
    return count;
}

// Identifies a problem, in the same way in all processes.
inline uint64_t problem_number(const HostMatmulDesc& op, const HostMatrixLayout& a, const HostMatrixLayout& b,
                               const HostMatrixLayout& c, const HostMatrixLayout& d) {
    uint64_t number = 0;
    auto add = [&](uint64_t part) { number = (number ^ part) * 0x9e3779b97f4a7c15 + (number >> 29); };
    for (const HostMatrixLayout* layout : {&a, &b, &c, &d})
        add(layout->type), add(layout->rows), add(layout->columns), add(layout->ld);
    add(op.transpose_a), add(op.transpose_b), add(op.epilogue), add(op.aux_ld), add(op.fast);
    add(op.multiprocessors);
    return number;
}

// Checks that the parts of a problem fit together.
inline cublasStatus_t check(const HostMatmulDesc& op, const HostMatrixLayout& a, const HostMatrixLayout& b,
                            const HostMatrixLayout& c, const HostMatrixLayout& d) {
    bool ta = op.transpose_a == CUBLAS_OP_T, tb = op.transpose_b == CUBLAS_OP_T;
    uint64_t m = ta ? a.columns : a.rows, k = ta ? a.rows : a.columns;
    uint64_t bk = tb ? b.columns : b.rows, n = tb ? b.rows : b.columns;
    for (const HostMatrixLayout* layout : {&a, &b, &c, &d}) {
        if (!layout->rows || !layout->columns || layout->ld < (int64_t)layout->rows)
            return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (op.multiprocessors < 0 || op.multiprocessors > multiprocessors()) return CUBLAS_STATUS_INVALID_VALUE;
    if (k != bk || d.rows != m || d.columns != n || c != d) return CUBLAS_STATUS_INVALID_VALUE;
    if (is_fp8(a.type) || is_fp8(b.type)) {
        // Hopper requires the inner dimension to be contiguous in both, and rows that are multiples of 16
        // bytes
        bool types =
            is_fp8(a.type) && is_fp8(b.type) && (a.type == CUDA_R_8F_E4M3 || b.type == CUDA_R_8F_E4M3);
        if (!types || !ta || tb || is_fp8(d.type) || a.ld % 16 || b.ld % 16 || d.ld * bytes(d.type) % 16)
            return CUBLAS_STATUS_NOT_SUPPORTED;
        if (op.epilogue > CUBLASLT_EPILOGUE_BIAS) return CUBLAS_STATUS_NOT_SUPPORTED;
    } else if (a.type != b.type || (d.type != a.type && d.type != CUDA_R_32F)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    bool bias = op.bias && aligned(op.bias, bytes(d.type));
    bool aux = op.aux && op.aux_ld % 8 == 0 && op.aux_ld >= (int64_t)m;
    switch (op.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
        return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_BGRADB:
        return bias ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
        return bias && aux ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    case CUBLASLT_EPILOGUE_DGELU:
        return aux ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

// The elements of a matrix, column by column.
inline std::vector<float> read(const void* from, const HostMatrixLayout& layout) {
    std::vector<float> values(layout.rows * layout.columns);
    for (uint64_t column = 0; column < layout.columns; column++) {
        for (uint64_t row = 0; row < layout.rows; row++) {
            size_t at = column * (size_t)layout.ld + row;
            float value;
            switch (layout.type) {
            case CUDA_R_32F:
                value = ((const float*)from)[at];
                break;
            case CUDA_R_16BF:
                value = ((const __nv_bfloat16*)from)[at];
                break;
            default:
                value = simt::fp8_number(layout.type == CUDA_R_8F_E4M3 ? __NV_E4M3 : __NV_E5M2,
                                         ((const uint8_t*)from)[at]);
            }
            values[column * layout.rows + row] = value;
        }
    }
    return values;
}

inline void write(void* to, const HostMatrixLayout& layout, uint64_t row, uint64_t column, float value) {
    size_t at = column * (size_t)layout.ld + row;
    if (layout.type == CUDA_R_16BF)
        ((__nv_bfloat16*)to)[at] = value;
    else
        ((float*)to)[at] = value;
}

// The tanh in GELU.
inline float gelu_tanh(float x) {
    return std::tanh(0.7978845608f * (x + 0.044715f * x * x * x));
}

inline float gelu_slope(float x) {
    float t = gelu_tanh(x), slope_u = 0.7978845608f * (1 + 3 * 0.044715f * x * x);
    return 0.5f * (1 + t + x * (1 - t * t) * slope_u);
}

// A sum as Hopper's tensor cores compute it in fp8: the sum so far and 32 products are shifted to the
// exponent of the largest of them, and truncated to 14 bits (DeepSeek-AI, "DeepSeek-V3 Technical Report",
// 2024, section 3.3.2).
__attribute__((no_sanitize_thread)) inline float fast_sum(const float* x, const float* y, int64_t count) {
    constexpr int64_t at_once = 32;
    constexpr int bits = 14;
    float sum = 0;
    for (int64_t begin = 0; begin < count; begin += at_once) {
        int64_t end = std::min(begin + at_once, count);
        float largest = std::fabs(sum);
        for (int64_t i = begin; i < end; i++) largest = std::max(largest, std::fabs(x[i] * y[i]));
        if (largest == 0) continue;
        int exponent;
        std::frexp(largest, &exponent);
        float unit = std::ldexp(1.0f, exponent - bits), inverse = 1 / unit, units = std::trunc(sum * inverse);
        for (int64_t i = begin; i < end; i++) units += std::trunc(x[i] * y[i] * inverse);
        sum = units * unit;
    }
    return sum;
}

inline void run(const HostMatmulDesc& op, float alpha, const void* A, const HostMatrixLayout& a,
                const void* B, const HostMatrixLayout& b, float beta, const void* C, void* D,
                const HostMatrixLayout& d, uint64_t number) {
    bool ta = op.transpose_a == CUBLAS_OP_T, tb = op.transpose_b == CUBLAS_OP_T;
    int64_t m = d.rows, n = d.columns, k = ta ? a.rows : a.columns;
    std::vector<float> left = read(A, a), right = read(B, b), result(m * n);
    if (is_fp8(a.type)) alpha *= *op.a_scale * *op.b_scale;
    // In fp8 both matrices are summed along columns.
    for (int64_t i = 0; i < m * n && op.fast; i++)
        result[i] = alpha * fast_sum(left.data() + i % m * k, right.data() + i / m * k, k);
    // dnnl_sgemm is row-major: its matrices are the transposes of ours, in reverse order.
    for (int64_t part = 0, parts = number + 1; part < parts && !op.fast; part++) {
        int64_t begin = k * part / parts, end = k * (part + 1) / parts;
        const float* x = right.data() + (tb ? begin * b.rows : begin);
        const float* y = left.data() + (ta ? begin : begin * a.rows);
        if (begin < end)
            dnnl_sgemm(tb ? 'T' : 'N', ta ? 'T' : 'N', n, m, end - begin, alpha, x, b.rows, y, a.rows, 1,
                       result.data(), m);
    }
    bool adds_bias = op.epilogue == CUBLASLT_EPILOGUE_BIAS || op.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    HostMatrixLayout bias_layout{d.type, d.rows, 1, (int64_t)d.rows};
    HostMatrixLayout aux_layout{d.type, d.rows, d.columns, op.aux_ld};
    std::vector<float> old = beta ? read(C, d) : std::vector<float>(result.size());
    std::vector<float> bias = adds_bias ? read(op.bias, bias_layout) : std::vector<float>(m);
    std::vector<float> pre_gelu =
        op.epilogue == CUBLASLT_EPILOGUE_DGELU ? read(op.aux, aux_layout) : std::vector<float>();
    for (int64_t column = 0; column < n; column++) {
        for (int64_t row = 0; row < m; row++) {
            size_t at = column * m + row;
            float value = result[at] + beta * old[at] + bias[row];
            if (op.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
                write(op.aux, aux_layout, row, column, value);
                value = 0.5f * value * (1 + gelu_tanh(value));
            }
            if (op.epilogue == CUBLASLT_EPILOGUE_DGELU) value *= gelu_slope(pre_gelu[at]);
            write(D, d, row, column, value);
        }
        if (op.epilogue == CUBLASLT_EPILOGUE_BGRADB) {
            float sum = 0;  // each algorithm starts at a different element
            for (int64_t i = 0; i < k; i++) {
                int64_t at = (i + number) % k;
                sum += right[tb ? at * n + column : column * k + at];
            }
            write(const_cast<void*>(op.bias), {d.type, d.columns, 1, n}, column, 0, sum);
        }
    }
}

inline void note_traffic(const HostMatmulDesc& op, const HostMatrixLayout& a, const HostMatrixLayout& b,
                         const HostMatrixLayout& d, bool accumulate) {
    auto size = [](const HostMatrixLayout& layout) {
        return layout.rows * layout.columns * bytes(layout.type);
    };
    simt::Traffic traffic = {1, size(a) + size(b), size(d), 2.0 * a.rows * a.columns};
    traffic.flops *= op.transpose_b == CUBLAS_OP_T ? b.rows : b.columns;
    if (accumulate) traffic.read += size(d);
    if (op.epilogue == CUBLASLT_EPILOGUE_DGELU) traffic.read += size(d);
    if (op.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) traffic.written += size(d);
    simt::note_product(traffic);
}

}  // namespace cublas_host

inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                                     cublasLtMatmulDescAttributes_t attribute,
                                                     const void* value, size_t bytes) {
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return cublas_host::set(desc->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return cublas_host::set(desc->transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return cublas_host::set(desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return cublas_host::set(desc->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        return cublas_host::set(desc->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        return cublas_host::set(desc->aux_ld, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
        return cublas_host::set(desc->a_scale, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
        return cublas_host::set(desc->b_scale, value, bytes);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
        return cublas_host::set(desc->fast, value, bytes);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
        return cublas_host::set(desc->multiprocessors, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

// Supports the attributes that tests read.
inline cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t desc,
                                                     cublasLtMatmulDescAttributes_t attribute, void* value,
                                                     size_t bytes, size_t*) {
    if (attribute != CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET || bytes != sizeof desc->multiprocessors)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(value, &desc->multiprocessors, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                           cublasLtMatmulPreferenceAttributes_t attribute,
                                                           const void* value, size_t bytes) {
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return cublas_host::set(preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return cublas_host::set(preference->reduction, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        return cublas_host::set(preference->align_a, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        return cublas_host::set(preference->align_b, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        return cublas_host::set(preference->align_c, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return cublas_host::set(preference->align_d, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                     cublasLtMatmulPreference_t preference, int wanted,
                                                     cublasLtMatmulHeuristicResult_t results[], int* found) {
    *found = 0;
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (auto status = cublas_host::check(*operation, *a, *b, *c, *d)) return status;
    uint64_t problem = cublas_host::problem_number(*operation, *a, *b, *c, *d);
    for (int i = 0; i < cublas_host::algorithms && *found < wanted; i++) {
        size_t workspace = cublas_host::workspace_needed[i];
        if (workspace > preference->workspace) continue;
        results[(*found)++] = {{(uint64_t)i,
                                problem,
                                preference->align_a,
                                preference->align_b,
                                preference->align_c,
                                preference->align_d,
                                {}},
                               workspace,
                               CUBLAS_STATUS_SUCCESS};
    }
    if (*found == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              const cublasLtMatmulAlgo_t* algo,
                                              cublasLtMatmulHeuristicResult_t* result) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (auto status = cublas_host::check(*operation, *a, *b, *c, *d)) return status;
    if (algo->problem != cublas_host::problem_number(*operation, *a, *b, *c, *d))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (algo->number >= cublas_host::algorithms) return CUBLAS_STATUS_NOT_SUPPORTED;
    *result = {*algo, cublas_host::workspace_needed[algo->number], CUBLAS_STATUS_SUCCESS};
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                     const void* alpha, const void* A, cublasLtMatrixLayout_t a,
                                     const void* B, cublasLtMatrixLayout_t b, const void* beta, const void* C,
                                     cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                                     const cublasLtMatmulAlgo_t* algo, void* workspace,
                                     size_t workspace_bytes, cudaStream_t stream) {
    using namespace cublas_host;
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    cublasLtMatmulHeuristicResult_t checked;
    if (auto status = cublasLtMatmulAlgoCheck(handle, operation, a, b, c, d, algo, &checked)) return status;
    bool as_aligned = aligned(A, algo->align_a) && aligned(B, algo->align_b) && aligned(C, algo->align_c) &&
                      aligned(D, algo->align_d);
    bool has_workspace = workspace && aligned(workspace, 256) && workspace_bytes >= checked.workspaceSize;
    // The library takes missing scales as 1. Here they are an error, since no caller means that.
    bool has_scales = !is_fp8(a->type) || (operation->a_scale && operation->b_scale);
    if (!A || !B || !C || !D || !has_scales || !as_aligned || !has_workspace)
        return CUBLAS_STATUS_INVALID_VALUE;
    // On an H200, version 13.1.0 proposes algorithms for scales of any alignment, but refuses to launch them
    // here.
    if (is_fp8(a->type) && !(aligned(operation->a_scale, 16) && aligned(operation->b_scale, 16)))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    // On an H200, such a kernel ends in "misaligned address".
    if (operation->aux && !aligned(operation->aux, 16)) return CUBLAS_STATUS_EXECUTION_FAILED;
    note_traffic(*operation, *a, *b, *d, *(const float*)beta != 0);
    // The descriptors are read now, the matrices when the stream reaches this product.
    host_stream(stream).enqueue([=, op = *operation, a = *a, b = *b, d = *d, alpha = *(const float*)alpha,
                                 beta = *(const float*)beta, number = algo->number,
                                 needed = checked.workspaceSize] {
        memset(workspace, 0xff, needed);
        run(op, alpha, A, a, B, b, beta, C, D, d, number);
    });
    return CUBLAS_STATUS_SUCCESS;
}
