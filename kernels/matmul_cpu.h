/*
Matrix products on a CPU, by oneDNN, for the linear layers of kernels/matmul.cuh: in fp32, or of operands that
are rounded to bf16, which is about twice as fast on processors with dot products or matrix units for that.
Sums and results are fp32 either way.

Operands stay fp32 in memory. A product in bf16 is made block by block, so that the rounded copies are small,
and the next block finds them in the cache. The copy of a block of the right operand lies in the order that
oneDNN's kernels read, and serves all blocks of the left one that it meets:

    for each block of columns n, and each of the inner dimension k
        round right[k, n]
        for each block of rows m
            round left[m, k]
            out[m, n] += left[m, k] right[k, n]

Blocks depend on nothing but the sizes, and so do the bits of a result.
*/
#pragma once

#include <algorithm>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

#include "kernels/tile_product.h"  // Elements

// Whether the products from now on are made in bf16.
inline bool cpu_products_in_bf16 = false;

// Whether oneDNN has instructions for products in bf16 here. ONEDNN_MAX_CPU_ISA may take them away.
inline bool has_cpu_products_in_bf16() {
    auto needed = (unsigned)dnnl::cpu_isa::avx512_core_bf16;
    return ((unsigned)dnnl::get_effective_cpu_isa() & needed) == needed;
}

inline const dnnl::engine& cpu_engine() {
    static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    return engine;
}

// A matrix of so many rows and columns as oneDNN is told of it.
inline dnnl::memory::desc matrix_desc(dnnl::memory::data_type type, int rows, int columns, int row_stride,
                                      int column_stride) {
    return {{rows, columns}, type, {row_stride, column_stride}};
}

// out = or += left right + bias, on matrices that lie where they were described. Without bias it is null.
// Making one again is cheap: oneDNN keeps the code that it has compiled.
class CpuProduct {
public:
    using Desc = dnnl::memory::desc;

    CpuProduct(const Desc& left, const Desc& right, const Desc& out, bool with_bias, bool accumulate) {
        using dnnl::matmul;
        dnnl::primitive_attr attributes;
        if (accumulate) {
            dnnl::post_ops after;
            after.append_sum();
            attributes.set_post_ops(after);
        }
        int columns = (int)out.dims()[1];
        Desc bias = matrix_desc(dnnl::memory::data_type::f32, 1, columns, columns, 1);
        auto product = with_bias ? matmul::desc(left, right, bias, out) : matmul::desc(left, right, out);
        made_ = matmul::primitive_desc(product, attributes, cpu_engine());
    }

    // The right operand's place and order, where it was left open.
    Desc right() const { return made_.weights_desc(); }

    void run(float* out, const void* left, const void* right, const float* bias) const {
        auto at = [](const Desc& desc, const void* data) {
            return dnnl::memory(desc, cpu_engine(), (void*)data);
        };
        std::unordered_map<int, dnnl::memory> operands = {
            {DNNL_ARG_SRC, at(made_.src_desc(), left)},
            {DNNL_ARG_WEIGHTS, at(made_.weights_desc(), right)},
            {DNNL_ARG_DST, at(made_.dst_desc(), out)},
        };
        if (bias) operands[DNNL_ARG_BIAS] = at(made_.bias_desc(), bias);
        dnnl::stream stream(cpu_engine());
        dnnl::matmul(made_).execute(stream, operands);
        stream.wait();
    }

private:
    dnnl::matmul::primitive_desc made_;
};

// ----------------------------------------------------------------------------
// products in bf16

// Memory for one operand, kept for the next.
class RoundedOperand {
public:
    // A copy of the matrix as `desc` wants it.
    const void* round(const float* data, const dnnl::memory::desc& from, const dnnl::memory::desc& desc) {
        using dnnl::memory;
        if (!room_ || room_.get_desc().get_size() < desc.get_size()) {
            memory::dims bytes = {(memory::dim)desc.get_size()};
            room_ = memory({bytes, memory::data_type::u8, memory::format_tag::a}, cpu_engine());
        }
        memory inp(from, cpu_engine(), (void*)data), out(desc, cpu_engine(), room_.get_data_handle());
        dnnl::stream stream(cpu_engine());
        dnnl::reorder(inp, out).execute(stream, inp, out);
        stream.wait();
        return room_.get_data_handle();
    }

private:
    dnnl::memory room_;
};

constexpr int block_rows = 1024, block_columns = 3072, block_inner = 3072;

// out (M, N) = or += left (M, K) right (K, N) + bias (N), which may be null.
inline void multiply_in_bf16(float* out, Elements left, Elements right, const float* bias, int M, int N,
                             int K, bool accumulate) {
    using dnnl::memory;
    constexpr auto bf16 = memory::data_type::bf16, fp32 = memory::data_type::f32;
    thread_local RoundedOperand left_copy, right_copy;
    auto block_of = [](Elements matrix, int row, int column) {
        return matrix.data + (size_t)row * matrix.row + (size_t)column * matrix.column;
    };
    for (int n = 0; n < N; n += block_columns) {
        for (int k = 0; k < K; k += block_inner) {
            int columns = std::min(N - n, block_columns), inner = std::min(K - k, block_inner);
            const float* added = k == 0 && bias ? bias + n : nullptr;
            memory::desc order({inner, columns}, bf16, memory::format_tag::any);
            const void* right_block = nullptr;
            for (int m = 0; m < M; m += block_rows) {
                int rows = std::min(M - m, block_rows);
                memory::desc by_row = matrix_desc(bf16, rows, inner, inner, 1);
                CpuProduct product(by_row, order, matrix_desc(fp32, rows, columns, N, 1), added,
                                   accumulate || k > 0);
                if (!right_block) {
                    order = product.right();
                    right_block =
                        right_copy.round(block_of(right, k, n),
                                         matrix_desc(fp32, inner, columns, right.row, right.column), order);
                }
                const void* left_block = left_copy.round(
                    block_of(left, m, k), matrix_desc(fp32, rows, inner, left.row, left.column), by_row);
                product.run(out + (size_t)m * N + n, left_block, right_block, added);
            }
        }
    }
}
