/*
The products of a linear layer in fp8: activations and weights in e4m3, gradients in e5m2, results in floatX,
and in fp32 for the weights' gradient. As in matmul.cuh:

    forward      out (N, OC) = inp (N, C) weight (OC, C)^T + bias        of inp8, weight8
    backward     dinp (N, C) = dout (N, OC) weight                       of dout8, the transpose of weight8
                 dweight += dout^T inp                                   of the transposes of dout8 and inp8

BlockProducts has these for all matrices of the blocks that a rank holds, or the products of matmul.cuh where
fp8 is off. A weight is known by where it lies, and is quantised at its first use after it has changed, both
ways at once; what activations and gradients become lives in memory that all products share, until the next.
*/
#pragma once

#include <map>

#include "kernels/fp8.cuh"
#include "kernels/matmul.cuh"

#ifndef DEVICE_CPU
inline const float* fp8_one(const Fp8Matrix& matrix) {
    return matrix.scale + 1;
}

inline void fp8_matmul_forward(floatX* out, const Fp8Matrix& inp, const Fp8Matrix& weight, const floatX* bias,
                               int N, int C, int OC, cudaStream_t stream, bool accumulate) {
    ProfileRange profile_range(__func__);
    multiply({.m = OC,
              .n = N,
              .k = C,
              .transpose_a = true,
              .accumulate = accumulate,
              .epilogue = bias_if_any(bias),
              .a_type = CUDA_R_8F_E4M3,
              .b_type = CUDA_R_8F_E4M3},
             {.a = weight.values,
              .b = inp.values,
              .d = out,
              .bias = bias,
              .a_scale = fp8_one(weight),
              .b_scale = fp8_one(inp)},
             stream);
}

inline void fp8_matmul_backward_input(floatX* dinp, const Fp8Matrix& dout, const Fp8Matrix& weight, int N,
                                      int C, int OC, cudaStream_t stream, bool accumulate) {
    ProfileRange profile_range(__func__);
    multiply({.m = C,
              .n = N,
              .k = OC,
              .transpose_a = true,
              .accumulate = accumulate,
              .a_type = CUDA_R_8F_E4M3,
              .b_type = CUDA_R_8F_E5M2},
             {.a = weight.transposed,
              .b = dout.values,
              .d = dinp,
              .a_scale = fp8_one(weight),
              .b_scale = fp8_one(dout)},
             stream);
}

inline void fp8_matmul_backward_weight(float* dweight, const Fp8Matrix& dout, const Fp8Matrix& inp, int N,
                                       int C, int OC, cudaStream_t stream) {
    ProfileRange profile_range(__func__);
    multiply({.m = C,
              .n = OC,
              .k = N,
              .transpose_a = true,
              .accumulate = true,
              .d_type = CUDA_R_32F,
              .a_type = CUDA_R_8F_E4M3,
              .b_type = CUDA_R_8F_E5M2},
             {.a = inp.transposed,
              .b = dout.transposed,
              .d = dweight,
              .a_scale = fp8_one(inp),
              .b_scale = fp8_one(dout)},
             stream);
}
#endif

// The sizes of all that fp8 products are made of.
struct Fp8Sizes {
    size_t weights = 0;          // elements of all matrices
    size_t matrices = 0;         // how many these are; 0: fp8 is off
    size_t rows = 0, width = 0;  // of the largest activation or gradient
};

// The memory of these products: each weight both ways, an activation, and a gradient both ways.
struct Fp8Arrays {
    Fp8Matrix inp = {}, dout = {};
    uint8_t* weights = nullptr;  // of all matrices, one behind the other
    float* scales = nullptr;     // of all matrices, scale_stride apart
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
        weights = bytes(2 * sizes.weights);
        scales = scale(sizes.matrices);
    }
};

class BlockProducts {
public:
    // The memory must outlive this.
    template <typename Memory>
    BlockProducts(Memory& memory, const Fp8Sizes& sizes, cudaStream_t stream)
        : on_(sizes.matrices > 0), rows_(sizes.rows), stream_(stream), arrays_(memory, sizes) {}

    // at_once: they are quantised now and not at their next use, for that may be in a CUDA graph, which does
    // on every launch what it did when it was captured.
    void weights_changed([[maybe_unused]] bool at_once) {
        for (auto& [place, weight] : weights_) {
            weight.is_fresh = false;
#ifndef DEVICE_CPU
            if (at_once) quantized(place, weight.OC, weight.C);
#endif
        }
    }

    void forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C,
                 int OC, bool accumulate = false) {
#ifndef DEVICE_CPU
        if (on_) {
            fp8_quantize(arrays_.inp, Fp8::e4m3, inp, N, C, stream_);
            return fp8_matmul_forward(out, arrays_.inp, quantized(weight, OC, C), bias, N, C, OC, stream_,
                                      accumulate);
        }
#endif
        matmul_forward(out, inp, weight, bias, N, C, OC, stream_, accumulate);
    }

    void gelu_forward(Gelu form, floatX* out, floatX* pre, const floatX* inp, const floatX* weight,
                      const floatX* bias, int N, int C, int OC) {
        if (!on_) return matmul_gelu_forward(form, out, pre, inp, weight, bias, N, C, OC, stream_);
        forward(pre, inp, weight, bias, N, C, OC);
        ::gelu_forward(form, out, pre, (size_t)N * OC, stream_);
    }

    void backward_input(floatX* dinp, const floatX* dout, const floatX* weight, int N, int C, int OC,
                        bool accumulate = false) {
#ifndef DEVICE_CPU
        if (on_) {
            bool whole = (size_t)N == rows_;  // what backward_weight() needs as well
            fp8_quantize({arrays_.dout.values, whole ? arrays_.dout.transposed : nullptr, arrays_.dout.scale},
                         Fp8::e5m2, dout, N, OC, stream_);
            transposed_ = whole ? dout : nullptr;
            return fp8_matmul_backward_input(dinp, arrays_.dout, quantized(weight, OC, C), N, C, OC, stream_,
                                             accumulate);
        }
#endif
        matmul_backward_input(dinp, dout, weight, N, C, OC, stream_, accumulate);
    }

    // As matmul_backward_gelu().
    void backward_gelu(Gelu form, floatX* dpre, const floatX* pre, const floatX* dout, const floatX* weight,
                       int N, int C, int OC) {
        if (!on_) return matmul_backward_gelu(form, dpre, pre, dout, weight, N, C, OC, stream_);
        backward_input(dpre, dout, weight, N, C, OC);
        gelu_backward(form, dpre, dpre, pre, (size_t)N * C, stream_);
    }

    // dout: as it was for the gradient of inp. dbias, scratch: as for matmul_backward_weight().
    void backward_weight(float* dweight, const floatX* dout, const floatX* inp, int N, int C, int OC,
                         float* dbias = nullptr, float* scratch = nullptr) {
#ifndef DEVICE_CPU
        if (on_) {
            if (dout != transposed_) {
                fp8_quantize({nullptr, arrays_.dout.transposed, arrays_.dout.scale}, Fp8::e5m2, dout, N, OC,
                             stream_);
                transposed_ = dout;
            }
            Fp8Matrix columns = {nullptr, arrays_.inp.values, arrays_.inp.scale};
            fp8_quantize(columns, Fp8::e4m3, inp, N, C, stream_);
            if (dbias) matmul_backward_bias(dbias, scratch, dout, N, OC, stream_);
            return fp8_matmul_backward_weight(dweight, arrays_.dout, columns, N, C, OC, stream_);
        }
#endif
        matmul_backward_weight(dweight, dout, inp, N, C, OC, stream_, dbias, scratch);
    }

private:
    const Fp8Matrix& quantized(const floatX* weight, int OC, int C) {
        Weight& known = weights_[weight];
        size_t size = (size_t)OC * C;
        if (!known.matrix.values) {
            known = {{arrays_.weights, arrays_.weights + size, arrays_.scales}, OC, C};
            arrays_.weights += 2 * size;
            arrays_.scales += Fp8Arrays::scale_stride;
        }
        if (!known.is_fresh) fp8_quantize(known.matrix, Fp8::e4m3, weight, OC, C, stream_);
        known.is_fresh = true;
        return known.matrix;
    }

    struct Weight {
        Fp8Matrix matrix = {};
        int OC = 0, C = 0;
        bool is_fresh = false;
    };

    const bool on_;
    const size_t rows_;
    cudaStream_t stream_;
    Fp8Arrays arrays_;                    // weights and scales: from the first that no matrix has yet
    const floatX* transposed_ = nullptr;  // whose transpose is in arrays_.dout
    std::map<const floatX*, Weight> weights_;
};
