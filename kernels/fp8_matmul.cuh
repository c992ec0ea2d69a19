/*
The products of a linear layer in fp8: activations and weights in e4m3, gradients in e5m2, results in floatX,
the weights' gradient in fp32. As in matmul.cuh:

    forward      out (N, OC) = inp (N, C) weight (OC, C)^T + bias        reads inp8, weight8
    backward     dinp (N, C) = dout (N, OC) weight                       reads dout8, weight8 transposed
                 dweight += or = dout^T inp                              reads dout8 and inp8, both transposed

BlockProducts computes these for all matrices of the blocks that a rank holds, or calls matmul.cuh if fp8 is
off. A weight is identified by its address. It is quantized in both orientations at its first use after a
change or, where memory is short, in one orientation at each use. A layer's input is quantized in both at
once: as it is, into memory that all products share, until the next one overwrites it; and transposed, into
memory that the layer owns until its backward pass, because the weight's gradient reads nothing else of the
input. The gradient of a layer's output is also quantized in both, but neither copy is kept.
*/
#pragma once

#include <map>
#include <utility>

#include "kernels/fp8.cuh"
#include "kernels/matmul.cuh"

inline const float* fp8_one(const Fp8Matrix& matrix) {
    return matrix.scale + fp8_one_at;
}

inline void fp8_matmul_forward(floatX* out, const Fp8Matrix& inp, const Fp8Matrix& weight,
                               [[maybe_unused]] const floatX* bias, int N, int C, int OC, cudaStream_t stream,
                               bool accumulate) {
    ON_DEVICE(stream, product_cost(out, inp.values, weight.values, N, OC, C, accumulate, true), fail_on_cpu(),
              multiply({.m = OC,
                        .n = N,
                        .k = C,
                        .transpose_a = true,
                        .accumulate = accumulate,
                        .epilogue = bias_if_any(bias),
                        .a_type = CUDA_R_8F_E4M3,
                        .b_type = CUDA_R_8F_E4M3,
                        .fast_sums = true},
                       {.a = weight.values,
                        .b = inp.values,
                        .d = out,
                        .bias = bias,
                        .a_scale = fp8_one(weight),
                        .b_scale = fp8_one(inp)},
                       stream));
}

inline void fp8_matmul_backward_input(floatX* dinp, const Fp8Matrix& dout, const Fp8Matrix& weight, int N,
                                      int C, int OC, cudaStream_t stream, bool accumulate, bool fast_sums) {
    ON_DEVICE(stream, product_cost(dinp, dout.values, weight.transposed, N, C, OC, accumulate, fast_sums),
              fail_on_cpu(),
              multiply({.m = C,
                        .n = N,
                        .k = OC,
                        .transpose_a = true,
                        .accumulate = accumulate,
                        .a_type = CUDA_R_8F_E4M3,
                        .b_type = CUDA_R_8F_E5M2,
                        .fast_sums = fast_sums},
                       {.a = weight.transposed,
                        .b = dout.values,
                        .d = dinp,
                        .a_scale = fp8_one(weight),
                        .b_scale = fp8_one(dout)},
                       stream));
}

inline void fp8_matmul_backward_weight(float* dweight, const Fp8Matrix& dout, const Fp8Matrix& inp, int N,
                                       int C, int OC, cudaStream_t stream, bool accumulate, bool fast_sums) {
    ON_DEVICE(stream, product_cost(dweight, dout.transposed, inp.transposed, OC, C, N, accumulate, fast_sums),
              fail_on_cpu(),
              multiply({.m = C,
                        .n = OC,
                        .k = N,
                        .transpose_a = true,
                        .accumulate = accumulate,
                        .d_type = CUDA_R_32F,
                        .a_type = CUDA_R_8F_E4M3,
                        .b_type = CUDA_R_8F_E5M2,
                        .fast_sums = fast_sums},
                       {.a = inp.transposed,
                        .b = dout.transposed,
                        .d = dweight,
                        .a_scale = fp8_one(inp),
                        .b_scale = fp8_one(dout)},
                       stream));
}

// The sizes that determine the memory of fp8 products.
struct Fp8Sizes {
    size_t weights = 0;         // elements of all matrices
    size_t matrices = 0;        // number of matrices; 0: fp8 is off
    size_t largest_weight = 0;  // elements of the largest matrix
    bool keeps_weights = true;  // keeps copies in both orientations until the weights change
    // Tensor cores can accumulate in fewer bits, which is faster and enough for the forward pass; this makes
    // the gradients' products do so too.
    bool fast_gradients = false;
    // The shape of the largest activation or gradient. In training, a micro-batch has exactly this many rows;
    // a call with fewer rows works on a part of a micro-batch.
    size_t rows = 0, width = 0;
};

// Memory for an activation or a gradient in fp8, an operand of products.
struct Fp8Operand {
    float* scale = nullptr;         // (fp8_scale_floats), not shared
    uint8_t* transposed = nullptr;  // (columns, rows) of an activation, kept for the weight's gradient
    bool measured = false;          // the kernel that makes it leaves its amax in scale[0]

    float* amax() const { return measured ? scale : nullptr; }

    // Layout of an activation's copy: its elements, followed by the scale.
    static constexpr size_t scale_offset(size_t elements) { return ceil_div(elements, 16) * 16; }
    static constexpr size_t bytes(size_t elements) {
        return scale_offset(elements) + fp8_scale_floats * sizeof(float);
    }
    static Fp8Operand in_memory(char* memory, size_t elements, bool measured) {
        if (!memory) return {};
        return {(float*)(memory + scale_offset(elements)), (uint8_t*)memory, measured};
    }
    // For a gradient. scale: the kernel that makes the gradient leaves its amax in scale[0]; null: it does
    // not.
    static Fp8Operand of_gradient(float* scale) { return {scale, nullptr, scale != nullptr}; }
};

// The memory of these products: copies of weights, one activation, and one gradient (in both orientations).
struct Fp8Arrays {
    Fp8Matrix inp = {}, dout = {};
    uint8_t* weights = nullptr;  // all matrices, one after another; or only one, in one orientation
    float* scales = nullptr;     // scales of all matrices, scale_stride apart
    static constexpr size_t scale_stride = 64;

    // Memory: an Arena (comm/memory.h).
    template <typename Memory>
    Fp8Arrays(Memory& memory, const Fp8Sizes& sizes) {
        if (sizes.matrices == 0) return;
        memory.of("fp8 copies");
        size_t activation = sizes.rows * sizes.width;
        auto bytes = [&](size_t count) { return memory.template take<uint8_t>(count); };
        auto scale = [&](size_t count) { return memory.template take<float>(count * scale_stride); };
        inp = {bytes(activation), nullptr, scale(1)};
        dout = {bytes(activation), bytes(activation), scale(1)};
        weights = bytes(sizes.keeps_weights ? 2 * sizes.weights : sizes.largest_weight);
        scales = scale(sizes.matrices);
    }
};

class BlockProducts {
public:
    // The memory must outlive this.
    template <typename Memory>
    BlockProducts(Memory& memory, const Fp8Sizes& sizes, cudaStream_t stream)
        : on_(sizes.matrices > 0),
          keeps_weights_(sizes.keeps_weights),
          fast_gradients_(sizes.fast_gradients),
          rows_(sizes.rows),
          stream_(stream),
          arrays_(memory, sizes) {}

    // Marks the amax and the copies of every weight as stale. at_once: updates them now, because the next use
    // may be in a CUDA graph, which repeats on every launch what was captured.
    void weights_changed(bool at_once) {
        shared_weight_ = {};
        for (auto& [place, weight] : weights_) {
            weight.is_fresh = false;
            if (at_once) refresh(place, weight);
        }
    }

    // Call before work that may run as a CUDA graph: forgets what is in the memory that products share.
    void begin_work() {
        transposed_ = nullptr;
        shared_weight_ = {};
    }

    // inp8: belongs to inp; used if inp has all rows.
    void forward(floatX* out, const floatX* inp, const Fp8Operand& inp8, const floatX* weight,
                 const floatX* bias, int N, int C, int OC, bool accumulate = false) {
        if (on_) {
            Fp8Matrix x = quantized(arrays_.inp, inp8.transposed, Fp8::e4m3, inp, inp8, N, C);
            return fp8_matmul_forward(out, x, quantized(weight, OC, C, false), bias, N, C, OC, stream_,
                                      accumulate);
        }
        matmul_forward(out, inp, weight, bias, N, C, OC, stream_, accumulate);
    }

    // Makes the fp8 copy of an input that forward() would have kept, if forward() was passed only some rows
    // at a time.
    void keep_input(const floatX* inp, const Fp8Operand& inp8, int N, int C) {
        if (on_ && (size_t)N == rows_)
            quantized({nullptr, nullptr, inp8.scale}, inp8.transposed, Fp8::e4m3, inp, inp8, N, C);
    }

    // amax: (1) receives the amax of out, in fp8 only; or null.
    void gelu_forward(Gelu form, floatX* out, floatX* pre, const floatX* inp, const Fp8Operand& inp8,
                      const floatX* weight, const floatX* bias, int N, int C, int OC, float* amax) {
        if (!on_) return matmul_gelu_forward(form, out, pre, inp, weight, bias, N, C, OC, stream_);
        forward(pre, inp, inp8, weight, bias, N, C, OC);
        ::gelu_forward(form, out, pre, (size_t)N * OC, stream_, amax);
    }

    void backward_input(floatX* dinp, const floatX* dout, const Fp8Operand& dout8, const floatX* weight,
                        int N, int C, int OC, bool accumulate = false) {
        if (on_) {
            bool all = (size_t)N == rows_;  // backward_weight() needs all rows
            Fp8Matrix dy = quantized(arrays_.dout, all ? arrays_.dout.transposed : nullptr, Fp8::e5m2, dout,
                                     dout8, N, OC);
            transposed_ = all ? dout : nullptr;
            transposed_scale_ = dy.scale;
            return fp8_matmul_backward_input(dinp, dy, quantized(weight, OC, C, true), N, C, OC, stream_,
                                             accumulate, fast_gradients_);
        }
        matmul_backward_input(dinp, dout, weight, N, C, OC, stream_, accumulate);
    }

    // In fp8, the equivalent of matmul_backward_gelu(). amax: (1) receives the amax of dpre, in fp8 only; or
    // null.
    void backward_gelu(Gelu form, floatX* dpre, const floatX* pre, const floatX* dout,
                       const Fp8Operand& dout8, const floatX* weight, int N, int C, int OC, float* amax) {
        if (!on_) return matmul_backward_gelu(form, dpre, pre, dout, weight, N, C, OC, stream_);
        backward_input(dpre, dout, dout8, weight, N, C, OC);
        gelu_backward(form, dpre, dpre, pre, (size_t)N * C, stream_, amax);
    }

    // dout: must not have changed since backward_input(), if that has read it. dbias, scratch, accumulate:
    // see matmul_backward_weight().
    void backward_weight(float* dweight, const floatX* dout, const floatX* inp, const Fp8Operand& inp8, int N,
                         int C, int OC, float* dbias = nullptr, float* scratch = nullptr,
                         bool accumulate = true) {
        if (on_) {
            if ((size_t)N != rows_) fail("fp8: a weight's gradient needs all rows, not %d of %zu", N, rows_);
            if (dout != transposed_) {
                Fp8Matrix columns = {nullptr, nullptr, arrays_.dout.scale};
                quantized(columns, arrays_.dout.transposed, Fp8::e5m2, dout, {}, N, OC);
                transposed_ = dout;
                transposed_scale_ = arrays_.dout.scale;
            }
            if (dbias) matmul_backward_bias(dbias, scratch, dout, N, OC, stream_);
            return fp8_matmul_backward_weight(dweight, {nullptr, arrays_.dout.transposed, transposed_scale_},
                                              {nullptr, inp8.transposed, inp8.scale}, N, C, OC, stream_,
                                              accumulate, fast_gradients_);
        }
        matmul_backward_weight(dweight, dout, inp, N, C, OC, stream_, dbias, scratch, accumulate);
    }

private:
    struct Weight {
        Fp8Matrix matrix = {};
        int OC = 0, C = 0;
        bool is_fresh = false;
    };

    // Quantizes inp (rows, columns) into to.values and, if it has all rows, into `transposed`; either may be
    // null. A part of the rows is scaled by its own amax, in to.scale.
    Fp8Matrix quantized(Fp8Matrix to, uint8_t* transposed, Fp8 format, const floatX* inp,
                        const Fp8Operand& operand, int rows, int columns) {
        bool all = (size_t)rows == rows_;
        to.transposed = all ? transposed : nullptr;
        if (all && operand.scale) to.scale = operand.scale;
        if (!all || !operand.measured) find_amax(to.scale, inp, (size_t)rows * columns, stream_);
        fp8_quantize(to, format, inp, rows, columns, stream_);
        return to;
    }

    // Computes what is kept of a weight: its amax, and perhaps its copies.
    void refresh(const floatX* place, Weight& weight) {
        size_t size = (size_t)weight.OC * weight.C;
        find_amax(weight.matrix.scale, place, size, stream_);
        if (keeps_weights_) fp8_quantize(weight.matrix, Fp8::e4m3, place, weight.OC, weight.C, stream_);
        weight.is_fresh = true;
    }

    // Returns the weight (OC, C), or its transpose, in fp8; quantizes it if it has changed or is not kept.
    Fp8Matrix quantized(const floatX* weight, int OC, int C, bool transposed) {
        Weight& known = weights_[weight];
        size_t size = (size_t)OC * C;
        if (!known.matrix.scale) {
            known = {{nullptr, nullptr, arrays_.scales}, OC, C};
            arrays_.scales += Fp8Arrays::scale_stride;
            if (keeps_weights_) {
                known.matrix.values = arrays_.weights, known.matrix.transposed = arrays_.weights + size;
                arrays_.weights += 2 * size;
            }
        }
        if (!known.is_fresh) refresh(weight, known);
        if (keeps_weights_) return known.matrix;
        Fp8Matrix one_way = {transposed ? nullptr : arrays_.weights, transposed ? arrays_.weights : nullptr,
                             known.matrix.scale};
        if (shared_weight_ != std::pair(weight, transposed))
            fp8_quantize(one_way, Fp8::e4m3, weight, OC, C, stream_);
        shared_weight_ = {weight, transposed};
        return one_way;
    }

    const bool on_, keeps_weights_, fast_gradients_;
    const size_t rows_;
    cudaStream_t stream_;
    Fp8Arrays arrays_;                    // weights, scales: point to the first ones not yet assigned
    const floatX* transposed_ = nullptr;  // the gradient whose transpose is in arrays_.dout
    float* transposed_scale_ = nullptr;
    std::pair<const floatX*, bool> shared_weight_ = {};  // weight in arrays_.weights; whether transposed
    std::map<const floatX*, Weight> weights_;
};
