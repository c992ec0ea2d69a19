/*
The part of CUDA C++ that kernels use, for g++ and the simulated device of simt.h.
*/
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "test/simt/simt.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// All fibers of a block run on one thread, which runs nothing else. As in CUDA, the variable is not
// initialized. An alignment must precede it: alignas(16) __shared__ float tile[64].
#define __shared__ static constinit thread_local

// ----------------------------------------------------------------------------
// built-in types and variables

// clang-format off
struct uint3 { unsigned x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
// clang-format on

// The scheduler sets these. They are constant during a thread's life, as const tells the compiler.
extern const uint3 threadIdx asm("simt_thread_index"), blockIdx asm("simt_block_index");
extern const dim3 blockDim asm("simt_block_size"), gridDim asm("simt_grid_size");
constexpr int warpSize = 32;

// ----------------------------------------------------------------------------
// launching

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
    return bytes < 0 ? cudaErrorInvalidValue : simt::allow_dynamic_shared((const void*)kernel, (size_t)bytes);
}

struct cudaFuncAttributes {
    int ptxVersion;
};

// For tests of whole programs: SIMT_ARCHITECTURE is the architecture that the kernels were compiled for; 0
// means none that this device can run.
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    const char* architecture = getenv("SIMT_ARCHITECTURE");
    attributes->ptxVersion = architecture ? atoi(architecture) : 90;
    return attributes->ptxVersion ? cudaSuccess : cudaErrorNoKernelImageForDevice;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
    static_assert((std::is_trivially_copyable_v<Parameters> && ...),
                  "kernel parameters are copied byte by byte");
    using Call = std::tuple<void (*)(Parameters...), Parameters...>;
    Call call(kernel, std::forward<Arguments>(arguments)...);
    auto invoke = [](const void* parameters) {
        std::apply([](auto kernel, auto... values) { kernel(values...); },
                   *static_cast<const Call*>(parameters));
    };
    return simt::launch(*config, (const void*)kernel, invoke, &call, sizeof call);
}

// ----------------------------------------------------------------------------
// barriers, warp operations

inline void __syncthreads() {
    simt::sync_block("__syncthreads", false);
}
inline int __syncthreads_count(int predicate) {
    return simt::sync_block("__syncthreads_count", predicate);
}
inline int __syncthreads_or(int predicate) {
    return simt::sync_block("__syncthreads_or", predicate) != 0;
}
inline int __syncthreads_and(int predicate) {
    return simt::sync_block("__syncthreads_and", !predicate) == 0;
}
inline void __syncwarp(unsigned mask = ~0u) {
    simt::sync_warp(mask);
}
inline void __threadfence() {
    simt::fence_device();
}
inline void __threadfence_block() {}
[[noreturn]] inline void __trap() {
    abort();
}

inline unsigned __activemask() {
    return simt::live_lanes();
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return simt::ballot(mask, predicate);
}
inline int __any_sync(unsigned mask, int predicate) {
    return simt::ballot(mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
    return simt::ballot(mask, !predicate) == 0;
}

namespace simt {
template <typename T>
T shuffle_from(unsigned mask, T value, int source) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = shuffle(mask, bits, (unsigned)source);
    memcpy(&value, &bits, sizeof value);
    return value;
}
}  // namespace simt

// The lanes of a warp form segments of `width`; a lane whose source is outside its segment keeps its own
// value.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
    int lane = (int)simt::lane(), first = lane & ~(width - 1);
    return simt::shuffle_from(mask, value, first + (source & (width - 1)));
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    int lane = (int)simt::lane(), first = lane & ~(width - 1), source = lane - (int)delta;
    return simt::shuffle_from(mask, value, source < first ? lane : source);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    int lane = (int)simt::lane(), last = lane | (width - 1), source = lane + (int)delta;
    return simt::shuffle_from(mask, value, source > last ? lane : source);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize) {
    int lane = (int)simt::lane(), last = lane | (width - 1), source = lane ^ lane_mask;
    return simt::shuffle_from(mask, value, source > last ? lane : source);
}

namespace simt {
template <typename Combine>
unsigned reduce(unsigned mask, unsigned value, Combine combine) {
    unsigned lanes = ballot(mask, true), result = 0;
    for (bool first = true; lanes; lanes &= lanes - 1, first = false) {
        unsigned other = shuffle_from(mask, value, std::countr_zero(lanes));
        result = first ? other : combine(result, other);
    }
    return result;
}
}  // namespace simt

inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    return simt::reduce(mask, value, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return simt::reduce(mask, value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    return simt::reduce(mask, value, [](unsigned a, unsigned b) { return std::min(a, b); });
}

// ----------------------------------------------------------------------------
// atomics: each returns the old value. Inlined, so that reports name the line of the kernel

namespace simt {
template <typename T, typename Change>
__forceinline__ T atomic_change(T* at, Change change) {
    T old, changed;
    __atomic_load(at, &old, __ATOMIC_RELAXED);
    do changed = change(old);
    while (!__atomic_compare_exchange(at, &old, &changed, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
}  // namespace simt

template <typename T>
__forceinline__ T atomicAdd(T* at, std::type_identity_t<T> value) {
    return simt::atomic_change(at, [=](T old) { return T(old + value); });
}
// Counts up to `last`, then wraps to 0.
__forceinline__ unsigned atomicInc(unsigned* at, unsigned last) {
    return simt::atomic_change(at, [=](unsigned old) { return old >= last ? 0 : old + 1; });
}
template <typename T>
__forceinline__ T atomicMax(T* at, std::type_identity_t<T> value) {
    return simt::atomic_change(at, [=](T old) { return std::max(old, value); });
}
template <typename T>
__forceinline__ T atomicMin(T* at, std::type_identity_t<T> value) {
    return simt::atomic_change(at, [=](T old) { return std::min(old, value); });
}
template <typename T>
__forceinline__ T atomicOr(T* at, std::type_identity_t<T> value) {
    return simt::atomic_change(at, [=](T old) { return old | value; });
}
template <typename T>
__forceinline__ T atomicAnd(T* at, std::type_identity_t<T> value) {
    return simt::atomic_change(at, [=](T old) { return old & value; });
}
template <typename T>
__forceinline__ T atomicExch(T* at, std::type_identity_t<T> value) {
    return simt::atomic_change(at, [=](T) { return value; });
}
template <typename T>
__forceinline__ T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    return simt::atomic_change(at, [=](T old) { return old == expected ? value : old; });
}

// ----------------------------------------------------------------------------
// arithmetic

template <typename T>
T __ldg(const T* at) {
    return *at;
}
template <typename T>
T __ldcs(const T* at) {
    return *at;
}
template <typename T>
void __stcs(T* at, T value) {
    *at = value;
}

inline unsigned __float_as_uint(float x) {
    return std::bit_cast<unsigned>(x);
}
inline int __float_as_int(float x) {
    return std::bit_cast<int>(x);
}
inline float __uint_as_float(unsigned x) {
    return std::bit_cast<float>(x);
}
inline float __int_as_float(int x) {
    return std::bit_cast<float>(x);
}
// Byte i of the result is the byte of (low, high) that digit i of the selector names.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
inline int __popc(unsigned x) {
    return std::popcount(x);
}
inline int __clz(int x) {
    return std::countl_zero((unsigned)x);
}
inline int __ffs(int x) {
    return x ? std::countr_zero((unsigned)x) + 1 : 0;
}
inline unsigned __umulhi(unsigned x, unsigned y) {
    return (unsigned)((uint64_t)x * y >> 32);
}

// glibc declares functions with some of these names.
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanhf(x) tanhf(x)
inline float rsqrtf(float x) {
    return 1.0f / std::sqrt(x);
}
inline float __frsqrt_rn(float x) {
    return rsqrtf(x);
}
inline float __fsqrt_rn(float x) {
    return std::sqrt(x);
}
inline float __frcp_rn(float x) {
    return 1.0f / x;
}
inline float __fdividef(float x, float y) {
    return x / y;
}
inline float __fmaf_rn(float x, float y, float z) {
    return std::fma(x, y, z);
}
inline float __saturatef(float x) {
    return std::fmin(std::fmax(x, 0.0f), 1.0f);
}
inline int __float2int_rn(float x) {
    return (int)std::nearbyint(x);
}

template <typename A, typename B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}
template <typename A, typename B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}

#include "test/simt/kernels/ptx.cuh"
