/*
Data types of the parameters in files of this program and of others, and of the integers stored with them.
*/
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/bf16_bits.h"  // bf16_to_float, float_to_bf16

enum class Dtype { fp32, bf16, uint64 };

inline const char* dtype_name(Dtype dtype) {
    constexpr const char* names[] = {"fp32", "bf16", "uint64"};
    return names[(int)dtype];
}

inline uint64_t dtype_size(Dtype dtype) {
    constexpr uint64_t bytes[] = {4, 2, 8};
    return bytes[(int)dtype];
}

// Converts parameters to floats. `from` need not be aligned.
inline void to_floats(Dtype dtype, const void* from, uint64_t count, float* to) {
    if (dtype == Dtype::fp32) {
        memcpy(to, from, count * sizeof(float));
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, (const char*)from + i * sizeof bits, sizeof bits);
        to[i] = bf16_to_float(bits);
    }
}

// Converts floats back, rounding if the type is narrower. `to` need not be aligned.
inline void from_floats(Dtype dtype, const float* from, uint64_t count, void* to) {
    if (dtype == Dtype::fp32) {
        memcpy(to, from, count * sizeof(float));
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint16_t bits = float_to_bf16(from[i]);
        memcpy((char*)to + i * sizeof bits, &bits, sizeof bits);
    }
}

// Floating-point formats in files of other programs; they are converted to float.
enum class FloatFormat { f16, bf16, f32, f64 };

inline uint64_t float_bytes(FloatFormat format) {
    return format == FloatFormat::f64 ? 8 : format == FloatFormat::f32 ? 4 : 2;
}

// IEEE 754 binary16: a sign bit, 5 exponent bits with a bias of 15, 10 fraction bits. A float represents
// every such value exactly.
inline float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);  // infinite, or NaN
    if (exponent > 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
    float tiny = (float)fraction * 0x1p-24f;
    return sign ? -tiny : tiny;
}

// Converts n numbers to float; doubles are rounded. `from` need not be aligned.
inline void widen(FloatFormat format, const char* from, uint64_t n, float* to) {
    auto each = [&]<typename Stored>(Stored, auto&& convert) {
        for (uint64_t i = 0; i < n; i++) {
            Stored value;
            memcpy(&value, from + i * sizeof value, sizeof value);
            to[i] = convert(value);
        }
    };
    switch (format) {
    case FloatFormat::f16:
        return each(uint16_t(), half_to_float);
    case FloatFormat::bf16:
        return to_floats(Dtype::bf16, from, n, to);
    case FloatFormat::f32:
        return to_floats(Dtype::fp32, from, n, to);
    case FloatFormat::f64:
        return each(double(), [](double value) { return (float)value; });
    }
}
