/*
For tests of bf16 products on the CPU.
*/
#pragma once

#ifdef DEVICE_CPU
#include <bit>

#include "kernels/matmul.cuh"
#include "test/support/testing.h"

// Rounds to the nearest bf16, ties to even.
inline float in_bf16(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    return std::bit_cast<float>(bits);
}

// Products are computed in bf16 while one of these exists.
struct ProductsInBf16 {
    ProductsInBf16() { cpu_products_in_bf16 = true; }
    ~ProductsInBf16() {
        cudaStreamSynchronize(test_stream());
        cpu_products_in_bf16 = false;
    }
};
#endif
