/*
Sums of two buffers of any type that NCCL has. A sum of bf16 numbers is rounded to bf16 at once, as NCCL does,
so the order of the additions shows in the result.
*/
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "comm/nccl_types.h"  // ncclDataType_t

struct HostBfloat16 {
    uint16_t bits;

    explicit HostBfloat16(float value) {  // to nearest even; NaN stays NaN
        uint32_t word = std::bit_cast<uint32_t>(value);
        bits = (uint16_t)(value != value ? word >> 16 | 0x40 : (word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
    operator float() const { return std::bit_cast<float>((uint32_t)bits << 16); }
};

// out = a + b. (count)
template <typename T>
void host_add(char* out, const char* a, const char* b, size_t count) {
    auto* to = (T*)out;
    auto *first = (const T*)a, *second = (const T*)b;
    for (size_t i = 0; i < count; i++) to[i] = T(first[i] + second[i]);
}

struct HostType {
    size_t bytes = 0;
    void (*add)(char* out, const char* a, const char* b, size_t count) = nullptr;
};

template <typename T>
constexpr HostType host_type = {sizeof(T), host_add<T>};

// By ncclDataType_t, which has fp16 at 6.
inline constexpr HostType host_types[] = {
    host_type<int8_t>,  host_type<uint8_t>,     host_type<int32_t>, host_type<uint32_t>,
    host_type<int64_t>, host_type<uint64_t>,    HostType(),         host_type<float>,
    host_type<double>,  host_type<HostBfloat16>};
