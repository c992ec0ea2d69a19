/*
The conversion of cuda_fp8.h that kernels use: to nearest even, with saturation. It searches all fp8 numbers
for the nearest.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include <cuda_runtime.h>

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
using __nv_fp8_storage_t = uint8_t;
using __nv_fp8x2_storage_t = uint16_t;

namespace simt {

// The finite non-negative numbers, in the order of their bits.
inline const std::array<float, 127>& fp8_numbers(__nv_fp8_interpretation_t kind) {
    static const auto make = [](int fraction_bits, int bias, int finite) {
        std::array<float, 127> numbers;
        numbers.fill(INFINITY);
        int whole = 1 << fraction_bits;
        for (int bits = 0; bits < finite; bits++) {
            int exponent = bits / whole, fraction = bits % whole;
            numbers[bits] = exponent ? std::ldexp(1 + (float)fraction / whole, exponent - bias)
                                     : std::ldexp((float)fraction / whole, 1 - bias);
        }
        return numbers;
    };
    static const std::array<float, 127> e4m3 = make(3, 7, 0x7f), e5m2 = make(2, 15, 0x7c);
    return kind == __NV_E4M3 ? e4m3 : e5m2;
}

inline float fp8_number(__nv_fp8_interpretation_t kind, uint8_t bits) {
    float size = (bits & 0x7f) == 0x7f ? NAN : fp8_numbers(kind)[bits & 0x7f];
    if (kind == __NV_E5M2 && (bits & 0x7f) > 0x7c) size = NAN;
    return bits & 0x80 ? -size : size;
}

}  // namespace simt

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t, __nv_fp8_interpretation_t kind) {
    if (std::isnan(x)) return 0x7f;
    auto& numbers = simt::fp8_numbers(kind);
    int finite = kind == __NV_E4M3 ? 0x7f : 0x7c;
    float size = std::fabs(x);
    int above = (int)(std::lower_bound(numbers.begin(), numbers.begin() + finite, size) - numbers.begin());
    int nearest = std::min(above, finite - 1);
    if (above > 0 && above < finite) {
        float up = numbers[above] - size, down = size - numbers[above - 1];
        if (down < up || (down == up && (above - 1) % 2 == 0)) nearest = above - 1;
    }
    return (uint8_t)(nearest | (std::signbit(x) ? 0x80 : 0));
}

inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturate,
                                                     __nv_fp8_interpretation_t kind) {
    return (uint16_t)(__nv_cvt_float_to_fp8(x.x, saturate, kind) | __nv_cvt_float_to_fp8(x.y, saturate, kind)
                                                                       << 8);
}
