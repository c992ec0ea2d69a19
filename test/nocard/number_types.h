/*
The reduced-precision formats that cards compute with: bf16, and the two of fp8.
*/
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <library_types.h>

namespace nocard {

inline size_t bytes_of(cudaDataType type) {
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1;
}

inline bool is_fp8(cudaDataType type) {
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

inline float from_bf16(uint16_t bits) {
    return std::bit_cast<float>((uint32_t)bits << 16);
}

// Rounds to nearest, ties to even.
inline uint16_t to_bf16(float value) {
    auto bits = std::bit_cast<uint32_t>(value);
    constexpr uint16_t nan = 0x7fff;
    if (std::isnan(value)) return nan;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// e4m3 has no infinities, and NaN only where all bits but the sign are set; e5m2 follows IEEE 754.
inline float from_fp8(uint8_t bits, bool e4m3) {
    const int fraction_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, last_exponent = e4m3 ? 16 : 31;
    int exponent = (bits & 0x7f) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
    float value = exponent ? std::ldexp(1 + (float)fraction / (float)(1 << fraction_bits), exponent - bias)
                           : std::ldexp((float)fraction / (float)(1 << fraction_bits), 1 - bias);
    if (e4m3 && (bits & 0x7f) == 0x7f) value = NAN;
    if (exponent == last_exponent) value = fraction ? NAN : INFINITY;
    return bits & 0x80 ? -value : value;
}

inline float load_number(const void* data, cudaDataType type, size_t i) {
    switch (type) {
    case CUDA_R_32F:
        return ((const float*)data)[i];
    case CUDA_R_16BF:
        return from_bf16(((const uint16_t*)data)[i]);
    default:
        return from_fp8(((const uint8_t*)data)[i], type == CUDA_R_8F_E4M3);
    }
}

inline void store_number(void* data, cudaDataType type, size_t i, float value) {
    if (type == CUDA_R_32F)
        ((float*)data)[i] = value;
    else
        ((uint16_t*)data)[i] = to_bf16(value);
}

}  // namespace nocard
