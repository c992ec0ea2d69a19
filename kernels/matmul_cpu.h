/*
The forward product of a linear layer in fp32 on a CPU: oneDNN computes it. (Those of the backward pass need
no bias, so kernels/matmul.cuh calls sgemm.)
*/
#pragma once

#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

#include "kernels/elements.h"  // Elements

// Computes out (M, N) = or += left (M, K) right (K, N) + bias (N), which may be null. A second call for the
// same sizes is cheap: oneDNN keeps the code that it has compiled.
inline void multiply_in_fp32(float* out, Elements left, Elements right, const float* bias, int M, int N,
                             int K, bool accumulate) {
    static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    auto matrix = [](int rows, int columns, Elements e) {
        dnnl::memory::desc desc({rows, columns}, dnnl::memory::data_type::f32, {e.row, e.column});
        return dnnl::memory(desc, engine, (void*)e.data);
    };
    std::unordered_map<int, dnnl::memory> operands = {{DNNL_ARG_SRC, matrix(M, K, left)},
                                                      {DNNL_ARG_WEIGHTS, matrix(K, N, right)},
                                                      {DNNL_ARG_DST, matrix(M, N, {out, N, 1})}};
    if (bias) operands[DNNL_ARG_BIAS] = matrix(1, N, {bias, N, 1});
    auto desc = [&](int operand) {
        return operands.contains(operand) ? operands[operand].get_desc() : dnnl::memory::desc();
    };
    dnnl::primitive_attr attributes;
    if (accumulate) {
        dnnl::post_ops after;
        after.append_sum();
        attributes.set_post_ops(after);
    }
    dnnl::matmul::desc product(desc(DNNL_ARG_SRC), desc(DNNL_ARG_WEIGHTS), desc(DNNL_ARG_BIAS),
                               desc(DNNL_ARG_DST));
    dnnl::stream stream(engine);
    dnnl::matmul({product, attributes, engine}).execute(stream, operands);
    stream.wait();
}
