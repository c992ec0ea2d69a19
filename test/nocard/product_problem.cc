#include "test/nocard/product_problem.h"

#include <cstring>

#include "test/nocard/cards.h"
#include "test/nocard/number_types.h"

namespace nocard {
namespace {

constexpr size_t large_workspace = 40 << 20;
constexpr AlgorithmRow algorithm_rows[] = {
    {1, 16, 0, 0.70}, {2, 16, 0, 0.68}, {1, 0, 0, 0.40},
    {4, 16, 0, 0.62}, {8, 0, 0, 0.35},  {3, 16, large_workspace, 0.72},
};

// The content of a cublasLtMatmulAlgo_t here.
struct Choice {
    uint64_t magic, row, problem, unused[5];
};
static_assert(sizeof(Choice) == sizeof(cublasLtMatmulAlgo_t));
constexpr uint64_t magic_of_choice = 0x6f6c6c614c74ull;

uint64_t number_of(const Problem& p) {
    uint64_t number = magic_of_choice;
    auto add = [&](uint64_t part) { number = (number ^ part) * 0x9e3779b97f4a7c15 + (number >> 29); };
    for (const Layout* layout : {&p.a, &p.b, &p.c, &p.d})
        add(layout->type), add(layout->rows), add(layout->columns), add((uint64_t)layout->stride);
    add(p.transposed_a()), add(p.transposed_b()), add(p.description.epilogue);
    add((uint64_t)p.description.aux_stride), add((uint64_t)p.description.fast_sums);
    add((uint64_t)p.description.multiprocessors);
    return number;
}

}  // namespace

// ----------------------------------------------------------------------------
// supported products

bool has_aux(cublasLtEpilogue_t epilogue) {
    switch (epilogue) {
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
        return true;
    default:
        return false;
    }
}

bool writes_aux(cublasLtEpilogue_t epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

bool reads_bias(cublasLtEpilogue_t epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_BIAS ||
           epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

bool writes_bias(cublasLtEpilogue_t epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_BGRADA || epilogue == CUBLASLT_EPILOGUE_BGRADB ||
           epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD;
}

bool is_known(cublasLtEpilogue_t epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_DEFAULT || epilogue == CUBLASLT_EPILOGUE_GELU ||
           reads_bias(epilogue) || writes_bias(epilogue) || has_aux(epilogue);
}

bool has_fp8() {
    return card().major > 8 || (card().major == 8 && card().minor == 9);
}

// Only compute capability 10 supports fp8 matrices in layouts other than A transposed and B not.
bool takes_all_layouts_of_fp8() {
    return card().major == 10;
}

bool fits_fp8(const Problem& p) {
    constexpr uint64_t unit = 16;
    if (!has_fp8()) return false;
    if (!takes_all_layouts_of_fp8() && (!p.transposed_a() || p.transposed_b())) return false;
    if (p.a.type == CUDA_R_8F_E5M2 && p.b.type == CUDA_R_8F_E5M2) return false;
    if (p.k() % unit || p.m() * bytes_of(p.d.type) % unit) return false;
    if ((uint64_t)p.a.stride % unit || (uint64_t)p.b.stride % unit) return false;
    if ((uint64_t)p.d.stride * bytes_of(p.d.type) % unit) return false;
    bool gradients = writes_bias(p.description.epilogue) || p.description.epilogue == CUBLASLT_EPILOGUE_DGELU;
    return !gradients && (p.d.type == CUDA_R_16BF || p.d.type == CUDA_R_32F);
}

bool fits_types(const Problem& p) {
    if (is_fp8(p.a.type) || is_fp8(p.b.type)) return is_fp8(p.a.type) && is_fp8(p.b.type) && fits_fp8(p);
    if (p.a.type != p.b.type) return false;
    if (p.a.type == CUDA_R_32F) return p.d.type == CUDA_R_32F;
    if (p.a.type != CUDA_R_16BF) return false;
    return p.d.type == CUDA_R_16BF || (p.d.type == CUDA_R_32F && !has_aux(p.description.epilogue));
}

cublasStatus_t check(const Problem& p) {
    const Description& description = p.description;
    for (const Layout* layout : {&p.a, &p.b, &p.c, &p.d}) {
        if (!layout->rows || !layout->columns || layout->stride < (int64_t)layout->rows)
            return CUBLAS_STATUS_INVALID_VALUE;
    }
    uint64_t k_of_b = p.transposed_b() ? p.b.columns : p.b.rows;
    if (p.k() != k_of_b || p.d.rows != p.m() || p.d.columns != p.n()) return CUBLAS_STATUS_INVALID_VALUE;
    if (p.c.rows != p.m() || p.c.columns != p.n()) return CUBLAS_STATUS_INVALID_VALUE;
    if (description.multiprocessors < 0 || description.multiprocessors > card().multiprocessors)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!is_known(description.epilogue) || p.c.type != p.d.type || !fits_types(p))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    constexpr int64_t unit_of_aux = 8;
    bool bad_aux = description.aux_stride < (int64_t)p.m() || description.aux_stride % unit_of_aux;
    if (has_aux(description.epilogue) && bad_aux) return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

// ----------------------------------------------------------------------------
// algorithms

std::span<const AlgorithmRow> algorithms() {
    return algorithm_rows;
}

// Returns whether an algorithm of this row supports the product at all.
bool suits(const AlgorithmRow& row, const Problem& p) {
    constexpr size_t least_part = 32;
    if (row.alignment == 0 && is_fp8(p.a.type)) return false;
    if (row.splits > 1 && p.k() < row.splits * least_part) return false;
    if (row.alignment == 0) return true;
    // The algorithm reads in pieces of this size, so strides must be multiples of it.
    for (const Layout* layout : {&p.a, &p.b, &p.d}) {
        if ((uint64_t)layout->stride * bytes_of(layout->type) % row.alignment) return false;
    }
    return true;
}

size_t workspace_of(const AlgorithmRow& row, const Problem& p) {
    size_t sums = row.splits > 1 ? row.splits * p.m() * p.n() * sizeof(float) : 0;
    return (sums + row.more_workspace + 255) / 256 * 256;
}

cublasLtMatmulHeuristicResult_t result_of(size_t row, const Problem& p) {
    cublasLtMatmulHeuristicResult_t result = {};
    Choice choice = {magic_of_choice, row, number_of(p), {}};
    memcpy(&result.algo, &choice, sizeof choice);
    result.workspaceSize = workspace_of(algorithm_rows[row], p);
    result.state = CUBLAS_STATUS_SUCCESS;
    result.wavesCount = 1;
    return result;
}

cublasStatus_t find_algorithm(const cublasLtMatmulAlgo_t& bytes, const Problem& problem, size_t& row) {
    Choice choice;
    memcpy(&choice, &bytes, sizeof choice);
    if (choice.magic != magic_of_choice || choice.row >= std::size(algorithm_rows))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (choice.problem != number_of(problem)) return CUBLAS_STATUS_NOT_SUPPORTED;
    row = choice.row;
    return CUBLAS_STATUS_SUCCESS;
}

}  // namespace nocard
