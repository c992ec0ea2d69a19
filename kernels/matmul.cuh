/*
The linear layer, which takes nearly all the time of training:

    forward      out (N, OC) = inp (N, C) weight (OC, C)^T + bias (OC)
    backward     dinp (N, C) = dout (N, OC) weight
                 dweight += dout^T inp, or = for the first product that writes it
                 dbias += column sums of dout

The backward pass needs inp and weight. The products are left to the vendor's library, cuBLASLt or oneDNN
(matmul_bf16.h has the exception), with sums in fp32 on both. Work on results that are still in registers (+=,
bias, GELU, its gradient, column sums) is done in an epilogue, or by a separate kernel after the product where
that is faster (column_sums.cuh has the one for column sums).
*/
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/accumulate.cuh"
#include "kernels/column_sums.cuh"
#include "kernels/common.cuh"
#include "kernels/gelu.cuh"
#include "kernels/random.cuh"
#include "kernels/streams.cuh"

#ifdef DEVICE_CPU
#include "kernels/matmul_bf16.h"
#include "kernels/matmul_cpu.h"
#else
#include "kernels/cublas.cuh"
#endif

#ifdef DEVICE_CPU
// ----------------------------------------------------------------------------
// CPU

// Uses no dnnl_sgemm, which has no bias and is slower when C is large.
inline void matmul_forward_cpu(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias,
                               int N, int C, int OC, bool accumulate) {
    auto* multiply = cpu_products_in_bf16 ? multiply_in_bf16 : multiply_in_fp32;
    multiply(out, {inp, C, 1}, {weight, 1, C}, bias, N, OC, C, accumulate);
}

inline void matmul_backward_input_cpu(floatX* dinp, const floatX* dout, const floatX* weight, int N, int C,
                                      int OC, bool accumulate) {
    if (cpu_products_in_bf16)
        return multiply_in_bf16(dinp, {dout, OC, 1}, {weight, C, 1}, nullptr, N, C, OC, accumulate);
    auto status = dnnl_sgemm('N', 'N', N, C, OC, 1, dout, OC, weight, C, accumulate, dinp, C);
    dnnl::error::wrap_c_api(status, "dnnl_sgemm failed");
}

inline void matmul_backward_weight_cpu(float* dweight, const floatX* dout, const floatX* inp, int N, int C,
                                       int OC, float* dbias, float* scratch, bool accumulate) {
    if (dbias) matmul_backward_bias_cpu(dbias, scratch, dout, N, OC);
    if (cpu_products_in_bf16)
        return multiply_in_bf16(dweight, {dout, 1, OC}, {inp, C, 1}, nullptr, OC, C, N, accumulate);
    auto status = dnnl_sgemm('T', 'N', OC, C, N, 1, dout, OC, inp, C, accumulate, dweight, C);
    dnnl::error::wrap_c_api(status, "dnnl_sgemm failed");
}

#else
// ----------------------------------------------------------------------------
// products with their epilogues

// Runs a product with its epilogue in the library. The library cannot add to dbias.
inline cublasStatus_t multiply_fused(const Product& product, const ProductPlan& plan,
                                     const Algorithm& algorithm, const Operands& operands,
                                     cudaStream_t stream) {
    cublasStatus_t status = start_product(plan, algorithm, operands, stream);
    if (status == CUBLAS_STATUS_SUCCESS && operands.dbias)
        accumulate(operands.dbias, operands.sums, (size_t)product.n, stream);
    return status;
}

// Returns the product to request from the library if a separate kernel does the rest of the epilogue.
inline std::pair<Product, Operands> product_in_front(Product product, Operands operands) {
    if (product.epilogue == Epilogue::bias_gelu) operands.d = operands.pre_gelu;
    product.epilogue = epilogue_row(product.epilogue).in_front;
    operands.pre_gelu = operands.dbias = operands.sums = nullptr;
    return {product, operands};
}

inline void multiply_unfused(const Product& product, const Operands& with, cudaStream_t stream) {
    auto [in_front, operands] = product_in_front(product, with);
    const ProductPlan& plan = find_plan(in_front, operands);
    cublasCheck(start_product(plan, plan.algorithm, operands, stream));
    auto *d = (floatX*)with.d, *pre_gelu = (floatX*)with.pre_gelu;
    size_t size = (size_t)product.m * product.n;
    if (product.epilogue == Epilogue::bias_gelu) gelu_forward(Gelu::tanh, d, pre_gelu, size, stream);
    if (product.epilogue == Epilogue::gelu_gradient) gelu_backward(Gelu::tanh, d, d, pre_gelu, size, stream);
    if (product.epilogue == Epilogue::bias_gradient)
        launch_backward_bias(with.dbias, with.sums, (const floatX*)with.b, product.k, product.n, stream);
}

inline void multiply(const Product& product, const Operands& operands, cudaStream_t stream) {
    const ProductPlan& plan = find_plan(product, operands);
    if (plan.unfused)
        multiply_unfused(product, operands, stream);
    else
        cublasCheck(multiply_fused(product, plan, plan.algorithm, operands, stream));
}

#endif

// ----------------------------------------------------------------------------
// launchers

// The cost of d (rows, columns), in which each element is a sum of `sums` products of elements of a and b.
template <typename D, typename A, typename B>
LaunchCost product_cost(const D* d, const A* a, const B* b, double rows, double columns, double sums,
                        bool accumulate, bool fast_sums = false) {
    double out = array_bytes(d, rows, columns);
    return {.read = array_bytes(a, rows, sums) + array_bytes(b, columns, sums) + (accumulate ? out : 0),
            .written = out,
            .product = {rows, columns, sums, sizeof(A) == 1, fast_sums}};
}

// Returns whether cuBLASLt has this form of GELU as an epilogue for rows of this width.
constexpr bool gelu_may_ride(Gelu form, int width, size_t element_bytes) {
    return form == Gelu::tanh && width % 8 == 0 && element_bytes == 2;
}

// The cost of a product with GELU or its gradient, which reads or writes `size` more bytes, either in an
// epilogue or in a separate kernel.
inline std::vector<LaunchCost> gelu_costs(LaunchCost product, double size, bool gradient) {
    if (!ledger->card.has_gelu_in_products())
        return {product, {.read = gradient ? 2 * size : size, .written = size}};
    product.product.gelu = true;
    return {gradient ? product.plus(size, 0) : product.plus(0, size)};
}

// accumulate: out += the product and bias, instead of =.
inline void matmul_forward(floatX* out,           // (N, OC)
                           const floatX* inp,     // (N, C)
                           const floatX* weight,  // (OC, C)
                           const floatX* bias,    // (OC), or null
                           int N, int C, int OC, cudaStream_t stream, bool accumulate = false) {
    ON_DEVICE(stream, product_cost(out, inp, weight, N, OC, C, accumulate),
              matmul_forward_cpu(out, inp, weight, bias, N, C, OC, accumulate),
              multiply({.m = OC,
                        .n = N,
                        .k = C,
                        .transpose_a = true,
                        .accumulate = accumulate,
                        .epilogue = bias_if_any(bias)},
                       {.a = weight, .b = inp, .d = out, .bias = bias}, stream));
}

// Computes out = gelu(pre). An epilogue applies GELU to pre before pre is rounded to floatX.
inline void matmul_gelu_forward(Gelu form,
                                floatX* out,           // (N, OC)
                                floatX* pre,           // (N, OC): for gelu_backward
                                const floatX* inp,     // (N, C)
                                const floatX* weight,  // (OC, C)
                                const floatX* bias,    // (OC), or null
                                int N, int C, int OC, cudaStream_t stream) {
    if (!bias || !gelu_may_ride(form, OC, element_bytes())) {
        matmul_forward(pre, inp, weight, bias, N, C, OC, stream);
        return gelu_forward(form, out, pre, (size_t)N * OC, stream);
    }
    ON_DEVICE(stream,
              gelu_costs(product_cost(pre, inp, weight, N, OC, C, false), array_bytes(pre, N, OC), false),
              fail_on_cpu(),
              multiply({.m = OC, .n = N, .k = C, .transpose_a = true, .epilogue = Epilogue::bias_gelu},
                       {.a = weight, .b = inp, .d = out, .bias = bias, .pre_gelu = pre}, stream));
}

inline void matmul_backward_input(floatX* dinp,          // (N, C)
                                  const floatX* dout,    // (N, OC)
                                  const floatX* weight,  // (OC, C)
                                  int N, int C, int OC, cudaStream_t stream, bool accumulate = false) {
    ON_DEVICE(stream, product_cost(dinp, dout, weight, N, C, OC, accumulate),
              matmul_backward_input_cpu(dinp, dout, weight, N, C, OC, accumulate),
              multiply({.m = C, .n = N, .k = OC, .accumulate = accumulate},
                       {.a = weight, .b = dout, .d = dinp}, stream));
}

// For inp = gelu(pre): dpre = gelu'(pre) times the gradient of inp. An epilogue multiplies before that
// gradient is rounded to floatX.
inline void matmul_backward_gelu(Gelu form,
                                 floatX* dpre,          // (N, C)
                                 const floatX* pre,     // (N, C)
                                 const floatX* dout,    // (N, OC)
                                 const floatX* weight,  // (OC, C)
                                 int N, int C, int OC, cudaStream_t stream) {
    if (!gelu_may_ride(form, C, element_bytes())) {
        matmul_backward_input(dpre, dout, weight, N, C, OC, stream);
        return gelu_backward(form, dpre, dpre, pre, (size_t)N * C, stream);
    }
    ON_DEVICE(stream,
              gelu_costs(product_cost(dpre, dout, weight, N, C, OC, false), array_bytes(pre, N, C), true),
              fail_on_cpu(),
              multiply({.m = C, .n = N, .k = OC, .epilogue = Epilogue::gelu_gradient},
                       {.a = weight, .b = dout, .d = dpre, .pre_gelu = (void*)pre}, stream));
}

// Computes the gradient of the weight, and adds to that of the bias unless dbias is null.
inline void matmul_backward_weight(float* dweight,      // (OC, C) += if it accumulates, else =
                                   const floatX* dout,  // (N, OC)
                                   const floatX* inp,   // (N, C)
                                   int N, int C, int OC, cudaStream_t stream,
                                   float* dbias = nullptr,    // (OC) +=
                                   float* scratch = nullptr,  // (matmul_backward_bias_scratch(OC)), if dbias
                                   bool accumulate = true) {
    auto costs = [&] {
        std::vector<LaunchCost> costs = {product_cost(dweight, dout, inp, OC, C, N, accumulate)};
        if (dbias) costs.push_back(column_sums_cost(dbias, scratch, dout, N, OC));
        return costs;
    };
    ON_DEVICE(stream, costs(),
              matmul_backward_weight_cpu(dweight, dout, inp, N, C, OC, dbias, scratch, accumulate),
              multiply({.m = C,
                        .n = OC,
                        .k = N,
                        .transpose_b = true,
                        .accumulate = accumulate,
                        .epilogue = dbias ? Epilogue::bias_gradient : Epilogue::none,
                        .d_type = CUDA_R_32F},
                       {.a = inp, .b = dout, .d = dweight, .dbias = dbias, .sums = dbias ? scratch : nullptr},
                       stream));
}

// Returns the most device memory, in bytes, that products on a stream use in addition to their operands.
inline size_t matmul_workspace() {
#ifdef DEVICE_CPU
    return 0;
#else
    auto limits = workspace_limits(device_properties());
    return limits.front() + (limits.size() > 1 ? limits.back() : 0);
#endif
}

// While this lives, products leave `count` multiprocessors to other kernels that run concurrently.
struct SparedMultiprocessors {
    explicit SparedMultiprocessors(int count) : before(std::exchange(spared_multiprocessors, count)) {}
    ~SparedMultiprocessors() { spared_multiprocessors = before; }
    SparedMultiprocessors(const SparedMultiprocessors&) = delete;
    const int before;
};

// ----------------------------------------------------------------------------
// speed of the device

// Seconds for each of five measurements of the rate. A GPU needs a while to reach its full clock.
constexpr double rate_seconds = has_own_memory ? 0.02 : 0.006;

// Returns the FLOP/s of a product of two (size, size) matrices, as a yardstick for training.
inline double gemm_rate(int size, cudaStream_t stream) {
    SparedMultiprocessors none(0);
    size_t elements = (size_t)size * size;
    // Normally distributed numbers: constant ones would use less power and run at a higher clock. The numbers
    // may repeat.
    std::vector<floatX> numbers(std::min(elements, size_t(1) << 16));
    uint64_t key = random_key(0, "gemm rate");
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = floatX(random_normal(key, i));
    floatX* matrices[3];  // out, inp, weight
    for (floatX*& matrix : matrices) {
        cudaCheck(cudaMalloc((void**)&matrix, elements * sizeof(floatX)));
        for (size_t at = 0; at < elements; at += numbers.size()) {
            size_t count = std::min(numbers.size(), elements - at);
            copy_async(matrix + at, numbers.data(), count, stream);
        }
    }
    StreamTimer timer(stream);
    auto seconds = [&](int products) {
        timer.start();
        for (int i = 0; i < products; i++) {
            matmul_forward(matrices[0], matrices[1], matrices[2], nullptr, size, size, size, stream);
        }
        timer.stop();
        return timer.seconds() / products;
    };
    seconds(1);  // the first is slow: libraries load their code
    int products = (int)std::clamp(rate_seconds / seconds(1), 1.0, 100.0);
    std::vector<double> times(5);
    for (double& time : times) time = seconds(products);
    std::sort(times.begin(), times.end());
    for (floatX* matrix : matrices) cudaCheck(cudaFree(matrix));
    return 2.0 * size * size * size / times[times.size() / 2];
}

// Returns the GEMM rate of this device: the highest rate of products of increasing size, up to the largest
// that takes a reasonable time and fits in `available` bytes.
inline double measured_gemm_rate(size_t available, cudaStream_t stream) {
    double rate = 0;
    for (int size = 512; size <= 8192; size *= 2) {
        if (rate > 0 && 3 * sizeof(floatX) * size * size > available) break;
        rate = std::max(rate, gemm_rate(size, stream));
        if (2.0 * size * size * size / rate > rate_seconds / 2) break;
    }
    return rate;
}
