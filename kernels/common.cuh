/*
Common to all kernel files: the activation type floatX, checked API calls, vector loads and stores, warp and
block sums, and the two ways to start work on a stream (a CUDA kernel, or a plain function on the cpu device).
*/
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "kernels/error.h"
#include "kernels/host_device.h"
#include "kernels/ledger.h"

#ifdef DEVICE_CPU
#include "kernels/host_cuda.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>
#include "kernels/ptx.cuh"
#endif

// ----------------------------------------------------------------------------
// types

// The type of parameters and activations. Gradients of parameters, and all sums, are float.
#ifdef PRECISION_BF16
using floatX = __nv_bfloat16;
constexpr const char* floatX_name = "bf16";
#else
using floatX = float;
constexpr const char* floatX_name = "fp32";
#endif

#ifdef DEVICE_CPU
constexpr const char* device_name = "cpu";
#else
constexpr const char* device_name = "cuda";
#endif

// True if the device's memory is separate from the host's.
#ifdef __CUDACC__
constexpr bool has_own_memory = true;
#else
constexpr bool has_own_memory = false;
#endif

template <typename Integer>
HOST_DEVICE constexpr Integer ceil_div(Integer a, std::type_identity_t<Integer> b) {
    return (a + b - 1) / b;
}

template <typename Integer>
HOST_DEVICE constexpr Integer round_up(Integer size, std::type_identity_t<Integer> to) {
    return ceil_div(size, to) * to;
}

// Returns the smallest number of workers that finish the items (at least one) as early as `most` would.
constexpr int even_share(int items, int most) {
    return ceil_div(items, ceil_div(items, most));
}

// Returns the bytes of a floatX on the device that work is launched on, which may be a ledger's card.
inline size_t element_bytes() {
    return ledger ? ledger->card.element_bytes : sizeof(floatX);
}

// Elements of T in 16 bytes, the widest access of a thread.
template <typename T>
constexpr int vec_width = 16 / sizeof(T);

constexpr int warp_size = 32;

// Returns the number of threads that share a row of items: even_share(), rounded up to whole warps.
constexpr int row_threads(int items, int most) {
    return ceil_div(even_share(items, most), warp_size) * warp_size;
}

// ----------------------------------------------------------------------------
// checked calls

// "rank 11 of 16 on HOST, GPU 3 (0000:1b:00.0)", for messages; empty until the process has chosen its device.
inline std::string& process_place() {
    static std::string place;
    return place;
}

// Throws FailedPart, which names the process, the call, the reason and the place in the source.
[[noreturn]] inline void fail_call(const char* call, const char* reason, const char* file, int line) {
    const std::string& place = process_place();
    fail_part("%s%s%s failed: %s (%s:%d)", place.c_str(), place.empty() ? "" : ": ", call, reason, file,
              line);
}

inline void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
    if (error != cudaSuccess) fail_call(call, cudaGetErrorString(error), file, line);
}
#define cudaCheck(call) cuda_check((call), #call, __FILE__, __LINE__)

// Returns the properties of the current device.
inline const cudaDeviceProp& device_properties() {
    int device;
    cudaCheck(cudaGetDevice(&device));
    static std::mutex mutex;
    static std::map<int, cudaDeviceProp> known;
    std::lock_guard lock(mutex);
    auto [at, is_new] = known.try_emplace(device);
    if (is_new) cudaCheck(cudaGetDeviceProperties(&at->second, device));
    return at->second;
}

// The compute capability as a number, such as 90 for 9.0.
inline int capability_of(const cudaDeviceProp& device) {
    return 10 * device.major + device.minor;
}

// Tensor cores support fp8 since Ada (89) and Hopper (90).
constexpr bool multiplies_fp8(int capability) {
    return capability >= 89;
}

// ----------------------------------------------------------------------------
// starting work on a stream

// Names the enclosing function in profiles (Nsight Systems) for as long as it runs.
struct ProfileRange {
#ifndef DEVICE_CPU
    explicit ProfileRange(const char* name) {
        nvtxRangePushA(name);
    }
    ~ProfileRange() {
        nvtxRangePop();
    }
#else
    explicit ProfileRange(const char*) {}
#endif
};

// The CPU's part of a launcher that is implemented only for GPUs.
[[noreturn]] inline void fail_on_cpu() {
    fail("matrix products in fp8 or with a fused GELU need a GPU; build with DEVICE=cuda");
}

// A launcher's body is one ON_DEVICE. After the stream it is passed the cost on a card, for a ledger (a
// LaunchCost, or several); the plain loop for the cpu device; and the kernel launch for other devices. It
// throws Error if the work cannot be started (or notes the error; see NotedLaunchErrors).
#ifdef DEVICE_CPU

#define ON_DEVICE(stream, cost, cpu_call, ...)                                                               \
    ProfileRange profile_range(__func__);                                                                    \
    if (ledger) return ledger->launched(__func__, stream, cost);                                             \
    host_stream(stream).enqueue([=] { cpu_call; })

#else

#define ON_DEVICE(stream, cost, cpu_call, ...)                                                               \
    ProfileRange profile_range(__func__);                                                                    \
    if (ledger) return ledger->launched(__func__, stream, cost);                                             \
    NotedLaunchErrors::run([&] { __VA_ARGS__; })

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...), with arguments converted and errors checked.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            Arguments... arguments) {
    static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
    constexpr size_t shared_bytes_without_asking = 32 * 1024;  // the 48 KiB limit includes static arrays
    if (shared_bytes > shared_bytes_without_asking) {
        cudaCheck(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)shared_bytes));
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    cudaCheck(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

// ----------------------------------------------------------------------------
// inside kernels

// N elements moved by one load or store.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
    T at[N];
    __device__ T& operator[](int i) { return at[i]; }
    __device__ const T& operator[](int i) const { return at[i]; }
};

template <int N, typename T>
__device__ Vec<T, N> load(const T* from) {
    return *reinterpret_cast<const Vec<T, N>*>(from);
}

// Stores to global memory. The compiler may split a plain assignment of a vector, hence store_global.
template <int N, typename T>
__device__ void store(T* to, const Vec<T, N>& values) {
    if constexpr (sizeof values == 16)
        store_global(to, std::bit_cast<uint4>(values));
    else if constexpr (sizeof values == 8)
        store_global(to, std::bit_cast<uint2>(values));
    else
        *reinterpret_cast<Vec<T, N>*>(to) = values;
}

template <int N, typename T>
__device__ void store_shared(T* to, const Vec<T, N>& values) {
    *reinterpret_cast<Vec<T, N>*>(to) = values;
}

// Loads data that is not needed again soon: it is the first to be evicted from the caches.
template <int N, typename T>
__device__ Vec<T, N> load_last(const T* from) {
    if constexpr (sizeof(Vec<T, N>) == 16)
        return std::bit_cast<Vec<T, N>>(__ldcs(reinterpret_cast<const uint4*>(from)));
    else
        return load<N>(from);
}

template <int N, typename T>
__device__ void store_last(T* to, const Vec<T, N>& values) {
    if constexpr (sizeof(Vec<T, N>) == 16)
        __stcs(reinterpret_cast<uint4*>(to), std::bit_cast<uint4>(values));
    else
        store(to, values);
}

// Calls f with vec_width<T>, or 1 if that does not divide `row` elements, as a std::integral_constant.
template <typename T, typename F>
void with_vec_width(size_t row, F&& f) {
    if (row % vec_width<T> == 0)
        f(std::integral_constant<int, vec_width<T>>{});
    else
        f(std::integral_constant<int, 1>{});
}

// Returns the sum over a warp, in every lane. The order of additions is fixed.
__device__ inline float warp_sum(float value) {
    for (int offset = warp_size / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

// Returns, in every lane, the sum over its group of `lanes` neighboring lanes (a power of two).
__device__ inline float group_sum(float value, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

__device__ inline float warp_max(float value) {
    for (int offset = warp_size / 2; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    }
    return value;
}

// Combines one value per thread, and returns the result in every thread. All threads of a one-dimensional
// block must take part.
template <float (*warp_combine)(float)>
__device__ float block_combine(float value, float neutral) {
    __shared__ float per_warp[warp_size];
    int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    int warps = blockDim.x / warp_size;
    value = warp_combine(value);
    __syncthreads();  // per_warp may still be read from an earlier call
    if (lane == 0) per_warp[warp] = value;
    __syncthreads();
    return warp_combine(lane < warps ? per_warp[lane] : neutral);
}

__device__ inline float block_sum(float value) {
    return block_combine<warp_sum>(value, 0.0f);
}
__device__ inline float block_max(float value) {
    return block_combine<warp_max>(value, -INFINITY);
}

#endif
