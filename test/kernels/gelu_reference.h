// GELU and its slope by definition, in double, for the tests of the kernel and of the fused products.
#pragma once

#include <cmath>

#include "kernels/gelu.cuh"

inline double gelu_reference(Gelu form, double x) {
    if (form == Gelu::exact) return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

inline double gelu_slope_reference(Gelu form, double x) {
    double h = 1e-5;  // central differences: accurate to about 1e-10
    return (gelu_reference(form, x + h) - gelu_reference(form, x - h)) / (2 * h);
}
