/*
The types in which parameters are stored.
*/
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

enum class Dtype { fp32, bf16 };

inline const char* dtype_name(Dtype dtype) {
    return dtype == Dtype::fp32 ? "fp32" : "bf16";
}

inline uint64_t dtype_size(Dtype dtype) {
    return dtype == Dtype::fp32 ? 4 : 2;
}

// bf16 is the upper half of an fp32.
inline float bf16_to_float(uint16_t bits) {
    return std::bit_cast<float>((uint32_t)bits << 16);
}

// To the nearest, and to the even one of two that are equally near. A NaN stays one.
inline uint16_t float_to_bf16(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Numbers of a type that lie anywhere, as floats.
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

// The same back, rounded where the type is narrower.
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
