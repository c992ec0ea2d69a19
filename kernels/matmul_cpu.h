/*
Matrix products on a CPU, for the linear layers of kernels/matmul.cuh. oneDNN computes them in fp32, or with
operands rounded to bf16 if the processor has bf16 dot products: up to twice as fast on some processors, half
as fast on others. A processor with a matrix unit computes those in bf16 by matmul_amx.h. Sums and results are
fp32 in all three.

Operands stay fp32 in memory. A product in bf16 is computed block by block, so that the rounded copies are
small and stay in the cache. The copy of a right block serves all left blocks that it is multiplied with, and
has the layout that oneDNN's loops prefer:

    for each block of columns n, and each of the inner dimension k
        round right[k, n]
        for each block of rows m
            round left[m, k]
            out[m, n] += left[m, k] right[k, n]

The blocks depend only on the sizes, so a product is bit-identical every time.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>
#include <vector>

#include "kernels/bf16_bits.h"     // float_to_bf16
#include "kernels/matmul_amx.h"    // has_matrix_unit, multiply_in_tiles
#include "kernels/tile_product.h"  // Elements, cpu_products_in_bf16

// Returns whether oneDNN has instructions for products in bf16 here. ONEDNN_MAX_CPU_ISA may disable them.
inline bool has_cpu_products_in_bf16() {
    auto needed = (unsigned)dnnl::cpu_isa::avx512_core_bf16;
    return ((unsigned)dnnl::get_effective_cpu_isa() & needed) == needed;
}

inline const dnnl::engine& cpu_engine() {
    static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    return engine;
}

// Returns oneDNN's description of a matrix with these rows, columns and strides.
inline dnnl::memory::desc matrix_desc(dnnl::memory::data_type type, int rows, int columns, int row_stride,
                                      int column_stride) {
    return {{rows, columns}, type, {row_stride, column_stride}};
}

// Computes out = or += left right + bias, for matrices with the given layouts. bias is null if there is none.
// Constructing an equal one again is cheap: oneDNN keeps the code that it has compiled.
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

    Desc right_desc() const { return made_.weights_desc(); }

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

// The rounded copy of a block of a matrix, stored by rows or by columns like the matrix.
class RoundedBlock {
public:
    void round(Elements block, int rows, int columns) {
        bool by_row = block.column == 1;
        int lines = by_row ? rows : columns, length = by_row ? columns : rows;
        size_t stride = by_row ? block.row : block.column;
        values_.resize(std::max(values_.size(), (size_t)lines * length));
#pragma omp parallel for
        for (int line = 0; line < lines; line++) {
            const float* from = block.data + line * stride;
            uint16_t* to = values_.data() + (size_t)line * length;
#pragma omp simd
            for (int i = 0; i < length; i++) to[i] = float_to_bf16(from[i]);
        }
        desc_ = matrix_desc(dnnl::memory::data_type::bf16, rows, columns, by_row ? length : 1,
                            by_row ? 1 : length);
    }

    const void* data() const {
        return values_.data();
    }
    const dnnl::memory::desc& desc() const {
        return desc_;
    }

private:
    std::vector<uint16_t> values_;  // sized for the largest block so far
    dnnl::memory::desc desc_;
};

// The rounded copy of a block as the right operand. If the matrix is stored by rows, oneDNN chooses the
// layout. For one stored by columns, reordering would cost more than it gains, because its stride is often a
// power of two.
class RightBlock {
public:
    void round(Elements block, int rows, int columns) {
        chosen_ = block.column == 1;
        if (!chosen_) return by_columns_.round(block, rows, columns);
        source_ = block.data;
        source_desc_ = matrix_desc(dnnl::memory::data_type::f32, rows, columns, block.row, 1);
        desc_ = {};
    }

    // desc() is the layout to request for a product, and data() returns the copy in the layout that the
    // product has chosen.
    dnnl::memory::desc desc() const {
        if (!chosen_) return by_columns_.desc();
        return {source_desc_.dims(), dnnl::memory::data_type::bf16, dnnl::memory::format_tag::any};
    }
    const void* data(const dnnl::memory::desc& taken) {
        if (!chosen_) return by_columns_.data();
        if (taken == desc_) return lines_.data();
        desc_ = taken;
        lines_.resize(std::max(lines_.size(), taken.get_size() / sizeof(Line) + 1));
        dnnl::memory from(source_desc_, cpu_engine(), (void*)source_), to(taken, cpu_engine(), lines_.data());
        dnnl::stream stream(cpu_engine());
        dnnl::reorder(from, to).execute(stream, from, to);
        stream.wait();
        return lines_.data();
    }

private:
    struct alignas(64) Line {
        uint16_t at[32];
    };

    bool chosen_ = false;
    RoundedBlock by_columns_;
    const float* source_ = nullptr;
    dnnl::memory::desc source_desc_, desc_;
    std::vector<Line> lines_;  // sized for the largest block so far
};

constexpr int block_rows = 1024, block_columns = 1024, block_inner = 3072;

// Computes out (M, N) = or += left (M, K) right (K, N) + bias (N), which may be null.
inline void multiply_in_bf16(float* out, Elements left, Elements right, const float* bias, int M, int N,
                             int K, bool accumulate) {
#ifdef CPU_BF16_INSTRUCTIONS
    if (has_matrix_unit()) return multiply_in_tiles(out, left, right, bias, M, N, K, accumulate);
#endif
    thread_local RoundedBlock left_block;
    thread_local RightBlock right_block;
    for (int n = 0; n < N; n += block_columns) {
        for (int k = 0; k < K; k += block_inner) {
            int columns = std::min(N - n, block_columns), inner = std::min(K - k, block_inner);
            const float* added = k == 0 && bias ? bias + n : nullptr;
            right_block.round(right.from(k, n), inner, columns);
            for (int m = 0; m < M; m += block_rows) {
                int rows = std::min(M - m, block_rows);
                left_block.round(left.from(m, k), rows, inner);
                auto out_desc = matrix_desc(dnnl::memory::data_type::f32, rows, columns, N, 1);
                CpuProduct product(left_block.desc(), right_block.desc(), out_desc, added,
                                   accumulate || k > 0);
                const void* right_data = right_block.data(product.right_desc());
                product.run(out + (size_t)m * N + n, left_block.data(), right_data, added);
            }
        }
    }
}
