/*
The calls of cuBLASLt.

Stricter than the library promises to be: an algorithm runs only the problem that it was found for, on
pointers with the promised alignment, with the workspace that it needs.
*/
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <cublasLt.h>
#include <string>

#include "test/nocard/device_memory.h"
#include "test/nocard/fault.h"
#include "test/nocard/number_types.h"
#include "test/nocard/product_problem.h"
#include "test/nocard/product_work.h"
#include "test/nocard/record.h"
#include "test/nocard/report.h"
#include "test/nocard/streams.h"

namespace nocard {
namespace {

constexpr const char* call = "cublasLtMatmul";

template <typename T>
cublasStatus_t set(T& field, const void* value, size_t bytes) {
    if (!value || bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

template <typename T>
cublasStatus_t get(const T& field, void* value, size_t bytes, size_t* written) {
    if (written) *written = sizeof field;
    if (bytes < sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
    if (value) memcpy(value, &field, sizeof field);
    return CUBLAS_STATUS_SUCCESS;
}

// Calls f with the field of an attribute.
template <typename F>
cublasStatus_t with_field(Description& d, cublasLtMatmulDescAttributes_t attribute, F&& f) {
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return f(d.transpose_a);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return f(d.transpose_b);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return f(d.epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return f(d.bias);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        return f(d.aux);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        return f(d.aux_stride);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
        return f(d.a_scale);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
        return f(d.b_scale);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
        return f(d.multiprocessors);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
        return f(d.fast_sums);
    default:
        fault("cublasLtMatmulDescSetAttribute", text("attribute %d is not known here", (int)attribute));
    }
}

bool aligned(const void* pointer, size_t to) {
    return (uintptr_t)pointer % to == 0;
}

// Ends the process unless the pointers are as promised when the algorithm was found.
void check_promises(const Problem& problem, const AlgorithmRow& row, std::array<const void*, 3> matrices,
                    const void* workspace, size_t workspace_bytes) {
    const Layout* layouts[] = {&problem.a, &problem.b, &problem.d};
    for (size_t i = 0; i < matrices.size(); i++) {
        if (!aligned(matrices[i], std::max<size_t>(row.alignment, bytes_of(layouts[i]->type))))
            fault(call, text("%p is not aligned to the %u bytes that its algorithm was found for",
                             matrices[i], row.alignment));
    }
    constexpr size_t unit = 16;
    const Description& of = problem.description;
    if (has_aux(of.epilogue) && !aligned(of.aux, unit))
        fault(call, text("the auxiliary matrix at %p is not at a multiple of 16", of.aux));
    if (is_fp8(problem.a.type) && (!of.a_scale || !of.b_scale)) fault(call, "a product in fp8 has no scales");
    size_t needed = workspace_of(row, problem);
    if (workspace_bytes < needed)
        fault(call, text("a workspace of %zu bytes, where its algorithm needs %zu", workspace_bytes, needed));
    if (needed && !aligned(workspace, unit))
        fault(call, text("the workspace at %p is not at a multiple of 16", workspace));
    require_device(call, "the workspace", workspace, needed);
}

// The library also proposes algorithms for unaligned scales, then refuses to start them (13.1 on an H200).
bool scales_are_aligned(const Problem& problem) {
    constexpr size_t unit = 16;
    const Description& of = problem.description;
    return !is_fp8(problem.a.type) || (aligned(of.a_scale, unit) && aligned(of.b_scale, unit));
}

Matrix matrix_of(const Layout& layout, bool transposed) {
    return {nullptr, layout.type, layout.rows, layout.columns, (size_t)layout.stride, transposed};
}

// Everything except the operands and what the algorithm adds.
HostProduct product_of(const Problem& problem) {
    const Description& of = problem.description;
    HostProduct product;
    product.m = problem.m(), product.n = problem.n(), product.k = problem.k();
    product.a = matrix_of(problem.a, problem.transposed_a());
    product.b = matrix_of(problem.b, problem.transposed_b());
    product.c = matrix_of(problem.c, false);
    product.d = matrix_of(problem.d, false);
    if (is_fp8(problem.a.type)) product.a_scale = of.a_scale, product.b_scale = of.b_scale;
    product.fast_sums = of.fast_sums;
    product.epilogue = of.epilogue;
    product.bias = of.bias;
    product.bias_type = problem.d.type;
    product.aux = of.aux;
    product.aux_stride = (size_t)of.aux_stride;
    return product;
}

Problem problem_of(cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                   cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t result) {
    return {*(Description*)d, *(Layout*)a, *(Layout*)b, *(Layout*)c, *(Layout*)result};
}

}  // namespace
}  // namespace nocard

using namespace nocard;

extern "C" {

// ----------------------------------------------------------------------------
// handles and descriptions

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = (cublasLtHandle_t) new char;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete (char*)handle;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion() {
    return CUBLAS_VERSION;
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "an invalid value was passed";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "the functionality is not supported";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "the function failed to launch on the GPU";
    default:
        return "unknown status";
    }
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    *description = (cublasLtMatmulDesc_t) new Description;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    delete (Description*)description;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
    return with_field(*(Description*)description, attribute,
                      [&](auto& field) { return set(field, value, bytes); });
}

cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, void* value,
                                              size_t bytes, size_t* written) {
    return with_field(*(Description*)description, attribute,
                      [&](auto& field) { return get(field, value, bytes, written); });
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
    *layout = (cublasLtMatrixLayout_t) new Layout{type, rows, columns, stride};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete (Layout*)layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    *preference = (cublasLtMatmulPreference_t) new Preference;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete (Preference*)preference;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
    Preference& preference = *(Preference*)handle;
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return set(preference.workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return set(preference.reduction_schemes, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        return set(preference.align_a, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        return set(preference.align_b, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        return set(preference.align_c, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return set(preference.align_d, value, bytes);
    default:
        fault("cublasLtMatmulPreferenceSetAttribute", text("attribute %d is not known here", (int)attribute));
    }
}

// ----------------------------------------------------------------------------
// algorithms and products

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t handle, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
    *found = 0;
    Problem problem = problem_of(description, a, b, c, d);
    const Preference& preference = *(Preference*)handle;
    if (cublasStatus_t status = check(problem)) return status;
    uint32_t alignment =
        std::min({preference.align_a, preference.align_b, preference.align_c, preference.align_d});
    for (size_t i = 0; i < algorithms().size() && *found < wanted; i++) {
        const AlgorithmRow& row = algorithms()[i];
        bool cuts =
            row.splits > 1 && !(preference.reduction_schemes & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
        if (cuts || alignment < row.alignment || !suits(row, problem)) continue;
        if (workspace_of(row, problem) <= preference.workspace) results[(*found)++] = result_of(i, problem);
    }
    return *found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t description,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
    Problem problem = problem_of(description, a, b, c, d);
    if (cublasStatus_t status = check(problem)) return status;
    size_t row;
    if (cublasStatus_t status = find_algorithm(*algorithm, problem, row)) return status;
    *result = result_of(row, problem);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t a, const void* B,
                              cublasLtMatrixLayout_t b, const void* beta, const void* C,
                              cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
    Problem problem = problem_of(description, a, b, c, d);
    if (!algorithm) fault(call, "no algorithm is given, which is not known here");
    size_t row;
    cublasStatus_t status = check(problem);
    if (status == CUBLAS_STATUS_SUCCESS) status = find_algorithm(*algorithm, problem, row);
    if (status != CUBLAS_STATUS_SUCCESS) {
        fprintf(stderr, "nocard: %s: %s\n", call, cublasLtGetStatusString(status));
        return status;
    }
    check_promises(problem, algorithms()[row], {A, B, D}, workspace, workspace_bytes);
    if (!scales_are_aligned(problem)) {
        fprintf(stderr, "nocard: %s: scales of fp8 that are not at multiples of 16\n", call);
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    HostProduct product = product_of(problem);
    product.alpha = *(const float*)alpha, product.beta = *(const float*)beta;
    product.a.data = A, product.b.data = B, product.c.data = C, product.d.data = D;
    product.splits = algorithms()[row].splits;
    if (product.splits > 1) product.workspace = (float*)workspace;
    report_work("products");
    record_kernel(stream,
                  text(" %lu x %lu x %lu%s%s", product.n, product.m, product.k,
                       is_fp8(problem.a.type) ? " fp8" : "", has_aux(product.epilogue) ? " gelu" : ""));
    bool given = enqueue(stream, product_operation(product, algorithms()[row].share)) == cudaSuccess;
    return given ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
}
