/*
The exponential and the normal distribution as branch-free float arithmetic, so that compilers can vectorize
loops over them: they vectorize the C library's versions only under -ffast-math, which breaks NaN and Inf.

A GPU has instructions for 2^x and 1/x. They are accurate enough for bf16 (relative error of the exponential:
2^-16) and need a third of the instructions of the accurate versions, which would make kernels wait for
arithmetic rather than memory.
*/
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/common.cuh"

// Returns e^x, on the CPU to 2 ulp. Inf for x > 88.376 (1/2 ln 2 below the overflow threshold), 0 where the
// result would be denormal, NaN for NaN. Uses x = n ln 2 + r with n an integer: e^x = 2^n e^r, and |r| < 0.35
// needs only a short series. Always inlined: a call would keep the caller's loop from being vectorized.
[[gnu::always_inline]] HOST_DEVICE inline float fast_exp(float x) {
#ifdef __CUDA_ARCH__
    return sizeof(floatX) == sizeof(float) ? expf(x) : exp2_approx(x * 1.44269504f);
#else
    constexpr float round_to_integer = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the integer n
    constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;  // n * ln2_high is exact
    float shifted = x * 1.44269504f + round_to_integer;
    float n = shifted - round_to_integer;
    float r = (x - n * ln2_high) - n * ln2_low;
    float series = 1 / 5040.0f;
    series = series * r + 1 / 720.0f;
    series = series * r + 1 / 120.0f;
    series = series * r + 1 / 24.0f;
    series = series * r + 1 / 6.0f;
    series = series * r + 1 / 2.0f;
    series = series * r * r + r + 1.0f;
    // Builds 2^n from its exponent bits. They cannot hold n at the ends of the range, whose results are set
    // below.
    float power =
        std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + std::bit_cast<uint32_t>(1.0f));
    float result = series * power;
    result = x < -87.33654f ? 0.0f : result;
    return x > 88.37626f ? INFINITY : result;
#endif
}

// Returns 1 / x, or possibly 0 where that would be denormal.
HOST_DEVICE inline float fast_inverse(float x) {
#ifdef __CUDA_ARCH__
    return sizeof(floatX) == sizeof(float) ? 1 / x : inverse_approx(x);
#else
    return 1 / x;
#endif
}

HOST_DEVICE inline float fast_sigmoid(float x) {
    return fast_inverse(1 + fast_exp(-x));
}

// The density of the standard normal distribution at x, and the probability of a value below x.
struct Normal {
    float density, below;
};

// Accurate to 3e-7 (absolute): Abramowitz & Stegun, Handbook of Mathematical Functions, 26.2.17.
HOST_DEVICE inline Normal fast_normal(float x) {
    float density = 0.39894228f * fast_exp(-0.5f * x * x);
    float t = fast_inverse(1 + 0.2316419f * fabsf(x));
    float series = 1.330274429f;
    series = series * t - 1.821255978f;
    series = series * t + 1.781477937f;
    series = series * t - 0.356563782f;
    series = series * t + 0.319381530f;
    float tail = density * series * t;
    return {density, x > 0 ? 1 - tail : tail};
}
