/*
The functions of the program's kernels/ptx.cuh on the simulated device; fragment layouts are described there.
Inlined, so that reports name the line of the kernel.
*/
#ifndef KERNELS_PTX_CUH
#define KERNELS_PTX_CUH

#include <bit>
#include <cmath>

#include "test/simt/cuda_bf16.h"
#include "test/simt/simt.h"

template <typename T>
T* dynamic_shared() {
    return static_cast<T*>(simt::dynamic_shared());
}

[[gnu::always_inline]] inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                                const uint32_t (&b)[2]) {
    simt::mma_m16n8k16(d, a, b);
}

[[gnu::always_inline]] inline void ldmatrix_x4(uint32_t (&out)[4], const void* row) {
    simt::ldmatrix(out, row, 4, false);
}
[[gnu::always_inline]] inline void ldmatrix_x4_trans(uint32_t (&out)[4], const void* row) {
    simt::ldmatrix(out, row, 4, true);
}
[[gnu::always_inline]] inline void ldmatrix_x2(uint32_t (&out)[2], const void* row) {
    simt::ldmatrix(out, row, 2, false);
}
[[gnu::always_inline]] inline void ldmatrix_x2_trans(uint32_t (&out)[2], const void* row) {
    simt::ldmatrix(out, row, 2, true);
}

inline int pinned(int number) {
    return number;
}

inline float exp2_approx(float x) {
    float result = exp2f(x);
    return result < 0x1p-126f ? 0.0f : result;
}
inline uint32_t bf16_pair(float low, float high) {
    return __nv_bfloat16(low).bits | (uint32_t)__nv_bfloat16(high).bits << 16;
}

// uint4 or uint2
template <typename Words>
[[gnu::always_inline]] inline void store_global(void* to, const Words& words) {
    simt::need_global(to, "st.global");
    *static_cast<Words*>(to) = words;
}

[[gnu::always_inline]] inline void add_global(float* sum, float value) {
    simt::add_global(sum, value);
}
[[gnu::always_inline]] inline unsigned counter_now(const unsigned* counter) {
    return simt::counter_now(counter);
}
[[gnu::always_inline]] inline void counter_wait(const unsigned* counter, unsigned value, unsigned seen) {
    simt::counter_wait(counter, value, seen);
}
[[gnu::always_inline]] inline void counter_wait(const unsigned* counter, unsigned value) {
    counter_wait(counter, value, counter_now(counter));
}
[[gnu::always_inline]] inline void counter_set(unsigned* counter, unsigned value) {
    simt::counter_set(counter, value);
}

[[gnu::always_inline]] inline void cp_async_16(void* shared, const void* global, bool valid = true) {
    simt::cp_async_16(shared, global, valid);
}
[[gnu::always_inline]] inline void cp_async_commit() {
    simt::cp_async_commit();
}
template <int pending>
[[gnu::always_inline]] inline void cp_async_wait() {
    simt::cp_async_wait(pending);
}

inline void prefetch_to_l2(const void*) {}

#endif
