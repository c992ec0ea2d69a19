/*
Matrix products with cuBLASLt, for the launchers of matmul.cuh: how each kind is planned and started.

cuBLASLt runs a product in three steps: describe it, ask for the best algorithm, start that. The first two
take longer than a small product, so their results are kept for the next product of the same kind. The
algorithm determines the order of sums, so keeping it also makes the results of equal products bit-identical
throughout the run.

The library only estimates which algorithm is best: it does not know what the caches hold, or that a product
is added to its output. If the products of a model have been timed (product_tuning.cuh), the fastest algorithm
is used instead: AlgorithmChoices holds it, as bytes that are valid for this library version and card.
*/
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstring>
#include <cublasLt.h>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common.cuh"

inline void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fail("%s failed: %s (%s:%d)", call, cublasLtGetStatusString(status), file, line);
}
#define cublasCheck(call) cublas_check((call), #call, __FILE__, __LINE__)

// Throws Error if the library is older than its card: it would find no algorithm for any product.
inline void check_cublas_version(const cudaDeviceProp& card, size_t version = cublasLtGetVersion()) {
    constexpr size_t first_for_blackwell = 120800;
    if (card.major < 10 || version >= first_for_blackwell) return;
    fail("cuBLASLt: version %zu does not support %s; install the version of CUDA 12.8 or later", version,
         card.name);
}

// Returns the limits of the workspace that cuBLASLt may use while a product runs, in bytes. The first is
// always allowed; cards older than Hopper have a small one, because their kernels gain little from more. The
// others are offered when products are timed, if the card has 256 times as much memory: with them, some
// kernels split the sums of small matrices over more blocks.
inline std::vector<size_t> workspace_limits(const cudaDeviceProp& device) {
    std::vector<size_t> limits = {size_t(device.major >= 9 ? 32 : 4) << 20};
    for (size_t more : {size_t(128) << 20, size_t(256) << 20}) {
        if (more <= device.totalGlobalMem / 256) limits.push_back(more);
    }
    return limits;
}

// Each stream has its own workspace, because products of two streams may run at the same time.
class Workspaces {
public:
    std::vector<size_t> limits = workspace_limits(device_properties());

    // Returns the size of the workspace to use. A stream may have workspaces of two sizes.
    size_t size_for(size_t needed) const { return needed <= limits.front() ? limits.front() : limits.back(); }

    // Returns null if out of memory. A stream keeps its smaller workspace when it gets the larger one,
    // because a CUDA graph may still use the smaller one.
    void* of_stream(cudaStream_t stream, size_t bytes) {
        void*& workspace = made_[{stream, bytes}];
        if (workspace) return workspace;
        cudaError_t error = cudaMalloc(&workspace, bytes);
        if (error == cudaErrorMemoryAllocation)
            cudaGetLastError();
        else
            cudaCheck(error);
        return workspace;
    }

private:
    std::map<std::pair<cudaStream_t, size_t>, void*> made_;
};

template <typename T>
constexpr cudaDataType cuda_type = sizeof(T) == 2 ? CUDA_R_16BF : CUDA_R_32F;

// Work fused into a product, on results that are still in registers. gelu is the tanh form.
enum class Epilogue {
    none,
    bias,           // D = the product + bias
    bias_gelu,      // pre_gelu = the product + bias, D = gelu(pre_gelu)
    gelu_gradient,  // D = gelu'(pre_gelu) times the product
    bias_gradient,  // dbias += the sums of B over k
};

// The library's epilogue for gelu_gradient and bias_gradient together is not used: its dbias has D's type.
struct EpilogueRow {
    cublasLtEpilogue_t name;
    const char* text;
    Epilogue in_front;     // stays fused if a separate kernel does the rest; itself: no kernel can
    bool fused_on_hopper;  // default on Hopper if both ways are possible; on other cards: false
};

constexpr EpilogueRow epilogue_rows[] = {
    // in the order of Epilogue
    {CUBLASLT_EPILOGUE_DEFAULT, "", Epilogue::none, true},
    {CUBLASLT_EPILOGUE_BIAS, " + bias", Epilogue::bias, true},
    {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, " + bias, GELU", Epilogue::bias, true},
    {CUBLASLT_EPILOGUE_DGELU, ", gradient of GELU", Epilogue::none, true},
    {CUBLASLT_EPILOGUE_BGRADB, ", gradient of bias", Epilogue::none, false},
};

constexpr const EpilogueRow& epilogue_row(Epilogue epilogue) {
    return epilogue_rows[(int)epilogue];
}

constexpr bool can_be_unfused(Epilogue epilogue) {
    return epilogue_row(epilogue).in_front != epilogue;
}

constexpr Epilogue bias_if_any(const void* bias) {
    return bias ? Epilogue::bias : Epilogue::none;
}

// D (m, n) = op(A) op(B) in the library's terms, with matrices in column-major order: our rows are its
// columns, so A is the operand that has the innermost dimension of D.
struct Product {
    int m, n, k;
    bool transpose_a = false, transpose_b = false;
    bool accumulate = false;  // D +=
    Epilogue epilogue = Epilogue::none;
    cudaDataType d_type = cuda_type<floatX>;
    // fp8: only with A transposed and B not, and scales for both
    cudaDataType a_type = cuda_type<floatX>, b_type = cuda_type<floatX>;
    bool fast_sums = false;  // fp8: tensor cores sum in fewer bits, about 14 on Hopper
    int spared = spared_multiprocessors;
    auto operator<=>(const Product&) const = default;
};

struct Operands {
    const void *a, *b;
    void* d;
    const void* bias = nullptr;                          // (m)
    void* pre_gelu = nullptr;                            // like d
    float* dbias = nullptr;                              // (n)
    float* sums = nullptr;                               // scratch of matmul_backward_bias(), for dbias
    const float *a_scale = nullptr, *b_scale = nullptr;  // (1) fp8: the value of q = 1 (fp8.cuh)

    // The library's bias pointer: read by epilogues that add a bias, written by those that compute its
    // gradient.
    const void* vector() const { return sums ? sums : bias; }
};

// Largest power of two that divides the address, up to 256, the alignment of cudaMalloc; 0 for null.
inline uint32_t pointer_alignment(const void* pointer) {
    if (!pointer) return 0;
    uintptr_t address = (uintptr_t)pointer | 256;
    return (uint32_t)(address & -address);
}

// Everything that the choice of an algorithm depends on, except the card and the library.
struct ProductKind {
    Product product;
    std::array<uint32_t, 5> alignments;  // a, b, d, vector() and pre_gelu; 0: there is none
    auto operator<=>(const ProductKind&) const = default;

    ProductKind(const Product& product, const Operands& with)
        : product(product),
          alignments{pointer_alignment(with.a), pointer_alignment(with.b), pointer_alignment(with.d),
                     pointer_alignment(with.vector()), pointer_alignment(with.pre_gelu)} {}
};

inline const char* type_text(cudaDataType type) {
    return type == CUDA_R_32F       ? "fp32"
           : type == CUDA_R_16BF    ? "bf16"
           : type == CUDA_R_8F_E4M3 ? "e4m3"
                                    : "e5m2";
}

inline std::string kind_text(const ProductKind& kind) {
    auto& [m, n, k, transpose_a, transpose_b, accumulate, epilogue, d_type, a_type, b_type, fast_sums,
           spared] = kind.product;
    auto& at = kind.alignments;
    char text[256];
    snprintf(text, sizeof text, "%d x %d x %d %c%c %s x %s%s %s%s aligned %u %u %u %u %u", m, n, k,
             transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', type_text(a_type), type_text(b_type),
             accumulate ? " +=" : " =", type_text(d_type), epilogue_row(epilogue).text, at[0], at[1], at[2],
             at[3], at[4]);
    std::string fast = fast_sums ? ", fast sums" : "";
    return text + fast + (spared ? ", " + std::to_string(spared) + " multiprocessors spared" : "");
}

// Names the card, the library and the largest workspace: algorithms of a different setup are not valid here.
inline std::string cublas_setup() {
    const cudaDeviceProp& device = device_properties();
    return std::string(device.name) + ", " + std::to_string(device.multiProcessorCount) +
           " multiprocessors, cuBLASLt " + std::to_string(cublasLtGetVersion()) + ", workspace " +
           std::to_string(workspace_limits(device).back());
}

// The library's type is an unnamed struct, which nvcc does not accept as the element of a std::vector.
struct Algorithm {
    cublasLtMatmulAlgo_t opaque;
    size_t workspace;  // bytes that it needs

    std::string bytes() const { return std::string((const char*)&opaque, sizeof opaque); }
};

// The bytes of the algorithm for each kind_text(); no bytes: a separate kernel does the epilogue.
using AlgorithmChoices = std::map<std::string, std::string>;

// How to run a kind of product: determined once, before it first runs.
struct ProductPlan {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    float beta;
    Algorithm algorithm;
    bool unfused;  // a separate kernel does the epilogue, because it is faster or there is no other way
    bool chosen;   // by AlgorithmChoices
};

struct Cublas {
    cublasLtHandle_t handle;
    Workspaces workspaces;
    std::map<ProductKind, ProductPlan> plans;
    AlgorithmChoices choices;
    // receives every kind of product that runs, with its last operands; null: nothing is recorded
    std::map<ProductKind, Operands>* noted = nullptr;

    Cublas() { cublasCheck(cublasLtCreate(&handle)); }
};

// Used by one host thread, the one that launches.
inline Cublas& cublas() {
    static Cublas cublas;
    return cublas;
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

inline void set_pointers(cublasLtMatmulDesc_t operation, const Operands& operands) {
    set_attribute(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.vector());
    set_attribute(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, operands.pre_gelu);
    if (!operands.a_scale) return;
    set_attribute(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.a_scale);
    set_attribute(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.b_scale);
}

inline ProductPlan describe(const ProductKind& kind, const Operands& operands) {
    auto [m, n, k, transpose_a, transpose_b, accumulate, epilogue, d_type, a_type, b_type, fast_sums,
          spared] = kind.product;
    ProductPlan plan = {};
    plan.beta = accumulate;
    cublasCheck(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_row(epilogue).name);
    if (operands.pre_gelu) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)m);
    if (spared > 0) {
        int32_t others = std::max(device_properties().multiProcessorCount - spared, 1);
        set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, others);
    }
    if (fast_sums) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)1);
    set_pointers(plan.operation, operands);  // the choice of an algorithm looks at their alignment

    auto layout = [](cublasLtMatrixLayout_t* result, cudaDataType type, int rows, int columns) {
        cublasCheck(cublasLtMatrixLayoutCreate(result, type, rows, columns, rows));
    };
    layout(&plan.a, a_type, transpose_a ? k : m, transpose_a ? m : k);
    layout(&plan.b, b_type, transpose_b ? n : k, transpose_b ? k : n);
    layout(&plan.d, d_type, m, n);
    return plan;
}

constexpr int most_candidates = 16;

// Returns up to `most` algorithms for a product that need no more than `workspace` bytes, fastest first by
// the library's estimate.
inline std::vector<Algorithm> proposed_algorithms(const ProductKind& kind, const ProductPlan& plan, int most,
                                                  size_t workspace) {
    auto [a, b, d, vector, pre_gelu] = kind.alignments;
    // GELU epilogues read and write pre_gelu in vectors, but no attribute specifies its alignment.
    constexpr uint32_t least_of_gelu = 16;
    if (pre_gelu > 0 && pre_gelu < least_of_gelu) return {};
    cublasLtMatmulPreference_t preference;
    cublasCheck(cublasLtMatmulPreferenceCreate(&preference));
    set_attribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)workspace);
    // When a sum is split over blocks, its parts are added in fp32, not in the type of D.
    set_attribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                  (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a);
    set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b);
    set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, d);
    set_attribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d);
    std::array<cublasLtMatmulHeuristicResult_t, most_candidates> results;
    int found = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(cublas().handle, plan.operation, plan.a, plan.b, plan.d, plan.d,
                                       preference, most, results.data(), &found);
    cublasCheck(cublasLtMatmulPreferenceDestroy(preference));
    std::vector<Algorithm> algorithms;
    if (status != CUBLAS_STATUS_SUCCESS) found = 0;
    for (int i = 0; i < found; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS)
            algorithms.push_back({results[i].algo, results[i].workspaceSize});
    }
    if (algorithms.empty() && !can_be_unfused(kind.product.epilogue)) {
        fail("cuBLASLt: has no algorithm for the product %s: %s", kind_text(kind).c_str(),
             cublasLtGetStatusString(status));
    }
    return algorithms;
}

// Applies the choice for this kind of product, if there is one and the library accepts it.
inline void take_choice(const ProductKind& kind, ProductPlan& plan) {
    auto choice = cublas().choices.find(kind_text(kind));
    if (choice == cublas().choices.end()) return;
    const std::string& bytes = choice->second;
    if (bytes.empty()) {
        plan.unfused = plan.chosen = can_be_unfused(kind.product.epilogue);
        return;
    }
    Algorithm algorithm;
    cublasLtMatmulHeuristicResult_t result;
    if (bytes.size() != sizeof algorithm.opaque) return;
    memcpy(&algorithm.opaque, bytes.data(), sizeof algorithm.opaque);
    cublasStatus_t status = cublasLtMatmulAlgoCheck(cublas().handle, plan.operation, plan.a, plan.b, plan.d,
                                                    plan.d, &algorithm.opaque, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > cublas().workspaces.limits.back()) return;
    algorithm.workspace = result.workspaceSize;
    plan.algorithm = algorithm;
    plan.unfused = false;
    plan.chosen = true;
}

inline ProductPlan make_plan(const ProductKind& kind, const Operands& operands) {
    ProductPlan plan = describe(kind, operands);
    auto algorithms = proposed_algorithms(kind, plan, 1, cublas().workspaces.limits.front());
    if (!algorithms.empty()) plan.algorithm = algorithms[0];
    // On cards other than Hopper, cuBLASLt's GELU epilogue also starts a second kernel, which is slow.
    Epilogue epilogue = kind.product.epilogue;
    bool usual = device_properties().major == 9 && epilogue_row(epilogue).fused_on_hopper;
    plan.unfused = can_be_unfused(epilogue) && (algorithms.empty() || !usual);
    take_choice(kind, plan);
    return plan;
}

inline ProductPlan& find_plan(const Product& product, const Operands& operands) {
    Cublas& c = cublas();
    ProductKind kind(product, operands);
    if (c.noted) c.noted->insert_or_assign(kind, operands);
    auto plan = c.plans.find(kind);
    if (plan == c.plans.end()) plan = c.plans.emplace(kind, make_plan(kind, operands)).first;
    return plan->second;
}

// Applies the choices to all products from now on.
inline void choose_algorithms(const AlgorithmChoices& choices) {
    cublas().choices = choices;
    for (auto& [kind, plan] : cublas().plans) take_choice(kind, plan);
}

// Allocates in advance the workspaces that the algorithms in use will need on a stream.
inline void take_workspaces(cudaStream_t stream) {
    Workspaces& workspaces = cublas().workspaces;
    for (const auto& [kind, plan] : cublas().plans) {
        size_t bytes = workspaces.size_for(plan.algorithm.workspace);
        if (workspaces.of_stream(stream, bytes)) continue;
        fail("matrix products: no memory is left for their workspace of %zu MiB; choose a smaller "
             "--micro-batch, or give --matmul-tuning off",
             bytes >> 20);
    }
}

inline cublasStatus_t start_product(const ProductPlan& plan, const Algorithm& algorithm,
                                    const Operands& operands, cudaStream_t stream) {
    set_pointers(plan.operation, operands);
    size_t bytes = cublas().workspaces.size_for(algorithm.workspace);
    void* workspace = cublas().workspaces.of_stream(stream, bytes);
    if (!workspace) return CUBLAS_STATUS_ALLOC_FAILED;
    float alpha = 1;
    return cublasLtMatmul(cublas().handle, plan.operation, &alpha, operands.a, plan.a, operands.b, plan.b,
                          &plan.beta, operands.d, plan.d, operands.d, plan.d, &algorithm.opaque, workspace,
                          bytes, stream);
}
