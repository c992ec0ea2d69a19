/*
Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024), at the scale of AdamW's
updates (Liu et al., "Muon is scalable for LLM training", 2025). For each matrix (rows, cols) of a block:

    m = m + (1 - momentum) (g - m)                           Nesterov:  u = g + momentum (m - g)
    o = approximately the nearest matrix to u with orthonormal rows or columns
    w = w (1 - learning_rate weight_decay) - learning_rate 0.2 sqrt(max(rows, cols)) o

The elements of an AdamW update have a root mean square of about 0.2, and those of an orthogonal matrix 1 /
sqrt(max(rows, cols)), so a learning rate that suits AdamW suits Muon too. Embeddings, the head, norms and
biases are updated by AdamW. Queries, keys and values count as separate matrices, and so do the gates and
values of SwiGLU.

Newton-Schulz steps, X = a X + (b A + c A^2) X with A = X X^T, push all singular values towards 1 using only
matrix products. With these coefficients, five steps bring every value that is not tiny into 0.65 .. 1.2,
which works as well as exact orthogonality and takes fewer steps.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/adamw.cuh"
#include "kernels/elementwise.cuh"
#include "kernels/global_norm.cuh"
#include "kernels/matmul.cuh"
#include "kernels/optimizer_pass.cuh"

struct Muon {
    AdamW adamw;      // updates the other tensors; Muon uses its learning rate and decay too
    double momentum;  // for the matrices
};

// ----------------------------------------------------------------------------
// orthogonal matrices

constexpr int newton_schulz_steps = 5;
constexpr float newton_schulz_a = 3.4445f, newton_schulz_b = -4.7750f, newton_schulz_c = 2.0315f;

// X divided by its Frobenius norm has no singular value above 1.
HOST_DEVICE inline float divide_by_norm(float x, float squares) {
    return x / (sqrtf(squares) + 1e-7f);
}

#ifndef DEVICE_CPU
__global__ void divide_by_norm_kernel(floatX* matrix, const float* squares, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) matrix[i] = floatX(divide_by_norm((float)matrix[i], *squares));
}
#endif

inline void divide_by_norm_cpu(floatX* matrix, const float* squares, size_t n) {
#pragma omp parallel for simd if (n > 65536)
    for (size_t i = 0; i < n; i++) matrix[i] = floatX(divide_by_norm((float)matrix[i], *squares));
}

// matrix = matrix / |matrix|
inline void divide_by_norm(floatX* matrix /* (n) */, const float* squares /* (1) */, size_t n,
                           cudaStream_t stream) {
    ON_DEVICE(stream, (LaunchCost{.read = array_bytes(matrix, n), .written = array_bytes(matrix, n)}),
              divide_by_norm_cpu(matrix, squares, n),
              launch(divide_by_norm_kernel, ceil_div(n, size_t(256)), 256, 0, stream, matrix, squares, n));
}

HOST_DEVICE inline float newton_schulz_polynomial(float a, float a_squared) {
    return fmaf(newton_schulz_b, a, newton_schulz_c * a_squared);
}
HOST_DEVICE inline float newton_schulz_sum(float x, float product) {
    return fmaf(newton_schulz_a, x, product);
}

// Rounds up to 256 bytes: products are fastest on matrices with that alignment.
constexpr size_t whole_lines(size_t elements, size_t element_bytes = sizeof(floatX)) {
    return round_up(elements, 256 / element_bytes);
}

// Returns the scratch of orthogonalise(), in elements of element_bytes each: the product of the polynomial
// and the matrix, two matrices (rows, rows), and in fp32 the sum of squares and its partial sums.
inline size_t orthogonalise_scratch(size_t rows, size_t cols, size_t element_bytes) {
    size_t n = rows * cols, in_float = sizeof(float) / element_bytes;
    return whole_lines(n, element_bytes) + 2 * whole_lines(rows * rows, element_bytes) +
           in_float * (1 + sum_squares_scratch(n));
}

// Replaces a matrix (rows, cols) by approximately the nearest one whose rows are orthonormal, which exists
// only for rows <= cols.
inline void orthogonalise(floatX* matrix, int rows, int cols, floatX* scratch, cudaStream_t stream) {
    size_t n = (size_t)rows * cols, square = (size_t)rows * rows;
    floatX *product = scratch, *gram = product + whole_lines(n), *polynomial = gram + whole_lines(square);
    float *squares = (float*)(polynomial + whole_lines(square)), *sums = squares + 1;
    sums_of_squares(squares, sums, matrix, {{0, n}}, stream);
    divide_by_norm(matrix, squares, n, stream);
    for (int step = 0; step < newton_schulz_steps; step++) {
        matmul_forward(gram, matrix, matrix, nullptr, rows, cols, rows, stream);
        matmul_forward(polynomial, gram, gram, nullptr, rows, rows, rows, stream);  // gram is symmetric
        elementwise<newton_schulz_polynomial>(polynomial, nullptr, square, stream, gram, polynomial);
        matmul_backward_input(product, polynomial, matrix, rows, cols, rows, stream);
        elementwise<newton_schulz_sum>(matrix, nullptr, n, stream, matrix, product);
    }
}

// ----------------------------------------------------------------------------
// the optimizer

// Computes u from the gradient.
struct MuonUpdate {
    static constexpr int slots = 1;
    static constexpr bool steps = false;
    static constexpr bool reads_weight = false;

    float new1, momentum;

    MuonUpdate() = default;
    explicit MuonUpdate(const Muon& a) : new1((float)(1 - a.momentum)), momentum((float)a.momentum) {}

    HOST_DEVICE MuonUpdate at_work() const { return *this; }
    HOST_DEVICE float operator()(float, float grad, float scale, float& m) const {
        float g = grad * scale;
        m = fmaf(new1, fmaf(grad, scale, -m), m);
        return fmaf(momentum, fmaf(-grad, scale, m), g);
    }
};

// Decays the weight, and subtracts o times the learning rate and the scale.
struct MuonStep {
    static constexpr int slots = 0;
    static constexpr bool steps = true;
    static constexpr bool reads_weight = true;

    float rate, decay;

    MuonStep() = default;
    MuonStep(const AdamW& a, const OptimizerPart& part)
        : rate((float)(a.learning_rate * 0.2 * std::sqrt((double)std::max(part.rows, part.cols)))),
          decay((float)(1 - a.learning_rate * a.weight_decay)) {}

    HOST_DEVICE MuonStep at_work() const { return *this; }
    HOST_DEVICE float operator()(float w, float update, float) const {
        float left = w * decay;
        return fmaf(-rate, update, left);
    }
};

// Returns the parts that belong to matrices of blocks, or the other parts.
inline std::vector<OptimizerPart> muon_parts(const std::vector<OptimizerPart>& parts, bool matrices) {
    std::vector<OptimizerPart> some;
    for (const OptimizerPart& part : parts) {
        if (part.of_block_matrix() == matrices) some.push_back(part);
    }
    return some;
}

// Returns a pass that runs `matrices` over the matrices of blocks and `others`, if there is one, over the
// other parts.
inline OptimizerPass muon_pass(const OptimizerPass& matrices, const OptimizerPass& others = {}) {
    auto each = [=](const OptimizerPass::Parts& parts, auto&& run) {
        run(matrices, muon_parts(parts, true));
        if (others) run(others, muon_parts(parts, false));
    };
    return {.on_device =
                [=](const OptimizerArrays& arrays, const OptimizerPass::Parts& parts, cudaStream_t stream) {
                    each(parts, [&](const OptimizerPass& pass, const OptimizerPass::Parts& some) {
                        pass.on_device(arrays, some, stream);
                    });
                },
            .on_host =
                [=](const OptimizerArrays& arrays, const OptimizerPass::Parts& parts) {
                    each(parts, [&](const OptimizerPass& pass, const OptimizerPass::Parts& some) {
                        pass.on_host(arrays, some);
                    });
                }};
}

// Returns a step of Muon. Its slots are AdamW's; matrices of blocks use only m.
inline Optimizer muon_optimizer(const Muon& hyper, uint64_t seed) {
    Rounding rounding = {hyper.adamw.stochastic_rounding, hyper.adamw.step, seed};
    auto update = [=](const OptimizerPart&, const OptimizerArrays&) { return MuonUpdate(hyper); };
    auto step = [=](const OptimizerPart& part, const OptimizerArrays&) {
        return MuonStep(of_part(hyper.adamw, part), part);
    };
    return {.learning_rate = hyper.adamw.learning_rate,
            .prepare = muon_pass(make_pass(update, rounding)),
            .transform = orthogonalise,
            .step = muon_pass(make_pass(step, rounding), adamw_optimizer(hyper.adamw, seed).step)};
}
