/*
bf16 as bits, the upper half of an fp32: for code that moves and converts them where there is no type for it.
*/
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/host_device.h"

HOST_DEVICE inline float bf16_to_float(uint16_t bits) {
    return std::bit_cast<float>((uint32_t)bits << 16);
}

// To the nearest, and to the even one of two that are equally near. A NaN stays one.
HOST_DEVICE inline uint16_t float_to_bf16(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return (uint16_t)((nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
