/*
bf16 as its bits (the upper half of an fp32), for code that moves and converts it without a bf16 type.
*/
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/host_device.h"

HOST_DEVICE inline float bf16_to_float(uint16_t bits) {
    return std::bit_cast<float>((uint32_t)bits << 16);
}

// Rounds to nearest, ties to even. A NaN stays a NaN.
HOST_DEVICE inline uint16_t float_to_bf16(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return (uint16_t)((nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds a finite value to one of its two neighbors in bf16, the nearer one more often: the 16 bits that bf16
// drops are a fraction, and adding a random fraction carries with exactly that probability. Only the upper
// 16 bits of random are used.
HOST_DEVICE inline float rounded_at_random(float value, uint32_t random) {
    return std::bit_cast<float>((std::bit_cast<uint32_t>(value) + (random >> 16)) & 0xffff0000u);
}
