/*
The formats of small floating-point numbers: bf16, fp16 and the two of fp8.
*/
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace nocard::ptx {

inline float from_bf16(uint16_t bits) {
    return std::bit_cast<float>((uint32_t)bits << 16);
}

// To nearest, ties to even.
inline uint16_t to_bf16(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A format of a sign, `exponent` bits and `mantissa` bits.
struct SmallFormat {
    int exponent, mantissa;
    bool has_infinity;  // e4m3 has none, and only its largest pattern is NaN

    int bias() const { return (1 << (exponent - 1)) - 1; }
    uint32_t nan() const { return has_infinity ? (1u << (exponent + mantissa)) - 1 : 0x7f; }
    uint32_t infinity() const { return ((1u << exponent) - 1) << mantissa; }
    uint32_t largest() const { return has_infinity ? infinity() - 1 : 0x7e; }

    float decode(uint32_t bits) const {
        uint32_t magnitude = bits & ((1u << (exponent + mantissa)) - 1);
        float sign = bits >> (exponent + mantissa) & 1 ? -1.f : 1.f;
        if (has_infinity && magnitude >= infinity()) {
            return magnitude == infinity() ? sign * INFINITY : std::numeric_limits<float>::quiet_NaN();
        }
        if (!has_infinity && magnitude == nan()) return std::numeric_limits<float>::quiet_NaN();
        int e = (int)(magnitude >> mantissa);
        float m = (float)(magnitude & ((1u << mantissa) - 1));
        if (e == 0) return sign * std::ldexp(m, 1 - bias() - mantissa);
        return sign * std::ldexp(m + (float)(1 << mantissa), e - bias() - mantissa);
    }

    // Rounds to nearest, ties to even. Overflow gives infinity (NaN in e4m3) or, with `saturate`, the largest
    // number.
    uint32_t encode(float value, bool saturate) const {
        uint32_t sign = std::signbit(value) ? 1u << (exponent + mantissa) : 0;
        if (std::isnan(value)) return nan();
        float magnitude = std::fabs(value);
        if (magnitude == 0) return sign;
        if (std::isinf(magnitude)) return sign | (saturate ? largest() : has_infinity ? infinity() : nan());
        int e;
        std::frexp(magnitude, &e);
        e = std::max(e - 1, 1 - bias());
        // In units of the last place it is an integer; a carry moves into the exponent by itself.
        double units = std::nearbyint(std::ldexp((double)magnitude, mantissa - e));
        uint64_t bits = (uint64_t)units + ((uint64_t)(e + bias() - 1) << mantissa);
        uint32_t limit = largest();
        if (bits > limit) return sign | (saturate ? limit : has_infinity ? infinity() : nan());
        return sign | (uint32_t)bits;
    }
};

constexpr SmallFormat fp16{5, 10, true}, e4m3{4, 3, false}, e5m2{5, 2, true};

template <const SmallFormat& format>
float from_small(uint32_t bits) {
    static const auto table = [] {
        std::array<float, 1 << (format.exponent + format.mantissa + 1)> values;
        for (size_t i = 0; i < values.size(); i++) values[i] = format.decode((uint32_t)i);
        return values;
    }();
    return table[bits & (table.size() - 1)];
}

inline float from_fp16(uint16_t bits) {
    return from_small<fp16>(bits);
}
inline uint16_t to_fp16(float value) {
    return (uint16_t)fp16.encode(value, false);
}

// Flushes denormal numbers to zero (ftz).
inline float flushed(float value) {
    return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.f, value) : value;
}

}  // namespace nocard::ptx
