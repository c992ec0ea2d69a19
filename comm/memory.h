/*
Memory is taken at the start, one allocation for each class, in sizes that are known (and printed) before.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "data/error.h"        // fail, text
#include "kernels/common.cuh"  // the CUDA runtime, cudaCheck

// Whether the device's memory is another than the host's.
#ifdef __CUDACC__
constexpr bool has_own_memory = true;
#else
constexpr bool has_own_memory = false;
#endif

// Bytes that a class of memory takes on this rank.
struct MemoryClass {
    const char* name;
    size_t bytes;
    bool on_host = false;  // pinned host memory
};

// On the device.
inline size_t memory_total(const std::vector<MemoryClass>& classes) {
    size_t total = 0;
    for (const MemoryClass& part : classes) total += part.on_host && has_own_memory ? 0 : part.bytes;
    return total;
}

inline std::string size_text(size_t bytes) {
    return bytes < (size_t)1 << 30 ? text("%.1f MiB", bytes / 0x1p20) : text("%.2f GiB", bytes / 0x1p30);
}

constexpr size_t library_memory = (size_t)256 << 20;  // for the libraries' code and their workspaces

// What a rank may take when `ranks` of them share the device: its part of the free memory, less what is kept
// back for the libraries.
inline size_t available_memory(int ranks = 1) {
    size_t available, total;
    cudaCheck(cudaMemGetInfo(&available, &total));
    available /= ranks;
    return available - std::min(available, library_memory);
}

template <typename T>
void allocate(T*& pointer, size_t count, bool on_host = false) {
    auto take = on_host ? [](void** to, size_t bytes) { return cudaMallocHost(to, bytes); }
                        : [](void** to, size_t bytes) { return cudaMalloc(to, bytes); };
    cudaError_t error = take((void**)&pointer, count * sizeof(T));
    if (error == cudaErrorMemoryAllocation) {
        fail("%s: %s are not to be had at once; free some, or %s", on_host ? "host memory" : "memory",
             size_text(count * sizeof(T)).c_str(),
             on_host ? "do without --async-save and --offload" : "choose a smaller --micro-batch or --model");
    }
    cudaCheck(error);
}

// Memory for as long as this lives.
template <typename T, bool on_host>
struct OwnedArray {
    T* data;

    explicit OwnedArray(size_t count) { allocate(data, count, on_host); }
    ~OwnedArray() { on_host ? cudaFreeHost(data) : cudaFree(data); }
    OwnedArray(const OwnedArray&) = delete;
    OwnedArray& operator=(const OwnedArray&) = delete;
};
template <typename T>
using DeviceArray = OwnedArray<T, false>;
template <typename T>
using HostArray = OwnedArray<T, true>;  // pinned

// The stream that computes; it ends when its work does.
struct ComputeStream {
    cudaStream_t stream;
    ComputeStream() { cudaCheck(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
    ~ComputeStream() {
        cudaStreamSynchronize(stream);
        cudaStreamDestroy(stream);
    }
    ComputeStream(const ComputeStream&) = delete;
    ComputeStream& operator=(const ComputeStream&) = delete;
};
