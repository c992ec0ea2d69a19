/*
GELU (Hendrycks & Gimpel, 2016): x times the probability that a standard normal number is below x.

    exact   out = x Phi(x)
    tanh    out = x/2 (1 + tanh(u)) = x sigmoid(2u),   u = sqrt(2/pi) (x + 0.044715 x^3)       (GPT-2)

inp, out and their gradients are n elements of any shape; the backward pass needs inp.
Each form costs one exponential (tanh is computed as a sigmoid), so the CPU loops run at memory speed.
*/
#pragma once

#include "kernels/elementwise.cuh"
#include "kernels/fast_math.cuh"

enum class Gelu { tanh, exact };

constexpr float gelu_cubic = 0.044715f, gelu_twice_root = 1.5957691216f;  // 2 sqrt(2/pi)

template <Gelu form>
HOST_DEVICE float gelu(float x) {
    static_assert(form == Gelu::exact || form == Gelu::tanh);
    if constexpr (form == Gelu::exact) {
        return x * fast_normal(x).below;
    } else {
        return x * fast_sigmoid(gelu_twice_root * (x + gelu_cubic * x * x * x));
    }
}

// The derivative of gelu at x.
template <Gelu form>
HOST_DEVICE float gelu_slope(float x) {
    static_assert(form == Gelu::exact || form == Gelu::tanh);
    if constexpr (form == Gelu::exact) {
        Normal normal = fast_normal(x);
        return normal.below + x * normal.density;
    } else {
        float twice_u = gelu_twice_root * (x + gelu_cubic * x * x * x);
        float e = fast_exp(-fabsf(twice_u));
        // the sigmoids of |2u| and -|2u|, both without cancellation
        float above = fast_inverse(1 + e), below = e * above;
        float slope_u = gelu_twice_root * (1 + 3 * gelu_cubic * x * x);
        return (twice_u > 0 ? above : below) + x * above * below * slope_u;
    }
}

// Returns the gradient of x, given that of gelu(x).
template <Gelu form>
HOST_DEVICE float gelu_gradient(float dout, float x) {
    return gelu_slope<form>(x) * dout;
}

// ----------------------------------------------------------------------------
// launchers

// amax: (1) receives the amax of out, or, in the backward pass, of dinp; may be null.
inline void gelu_forward(Gelu form, floatX* out /* (n), may be inp */, const floatX* inp /* (n) */, size_t n,
                         cudaStream_t stream, float* amax = nullptr) {
    switch (form) {
    case Gelu::tanh:
        return elementwise<gelu<Gelu::tanh>>(out, amax, n, stream, inp);
    case Gelu::exact:
        return elementwise<gelu<Gelu::exact>>(out, amax, n, stream, inp);
    }
}

inline void gelu_backward(Gelu form, floatX* dinp /* (n), may be dout */, const floatX* dout /* (n) */,
                          const floatX* inp /* (n) */, size_t n, cudaStream_t stream, float* amax = nullptr) {
    switch (form) {
    case Gelu::tanh:
        return elementwise<gelu_gradient<Gelu::tanh>>(dinp, amax, n, stream, dout, inp);
    case Gelu::exact:
        return elementwise<gelu_gradient<Gelu::exact>>(dinp, amax, n, stream, dout, inp);
    }
}
