/*
bfloat16 as in cuda_bf16.h: the upper half of a float, rounded to nearest even; every NaN becomes 0x7fff.
*/
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

struct __nv_bfloat16 {
    uint16_t bits;

    __nv_bfloat16() = default;
    template <typename Number>
    requires std::is_arithmetic_v<Number>
    constexpr __nv_bfloat16(Number number) : bits(round((float)number)) {}

    constexpr operator float() const { return std::bit_cast<float>((uint32_t)bits << 16); }

private:
    static constexpr uint16_t round(float number) {
        uint32_t exact = std::bit_cast<uint32_t>(number);
        if (number != number) return 0x7fff;
        return (uint16_t)((exact + 0x7fff + (exact >> 16 & 1)) >> 16);
    }
};
static_assert(sizeof(__nv_bfloat16) == 2 && std::is_trivially_copyable_v<__nv_bfloat16> &&
              std::is_trivially_default_constructible_v<__nv_bfloat16>);

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

constexpr __nv_bfloat16 __float2bfloat16(float number) {
    return number;
}
constexpr __nv_bfloat16 __float2bfloat16_rn(float number) {
    return number;
}
constexpr __nv_bfloat16 __double2bfloat16(double number) {
    return number;
}
constexpr float __bfloat162float(__nv_bfloat16 number) {
    return number;
}
constexpr uint16_t __bfloat16_as_ushort(__nv_bfloat16 number) {
    return number.bits;
}
constexpr __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) {
    return std::bit_cast<__nv_bfloat16>(bits);
}
constexpr __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {x, y};
}
