/*
The subset of the CUDA runtime API that train_gpt uses, for machines without a GPU.

"Device" memory is host memory. A stream is a worker thread that runs its tasks in order; only events order
the tasks of different streams, so code that forgets an event misbehaves here as it would on a card (and
ThreadSanitizer reports it). Like non-blocking CUDA streams, streams made here do not synchronize with the
default stream.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <unistd.h>

#include "kernels/host_graphs.h"
#include "kernels/host_memory.h"
#include "kernels/host_streams.h"

// ----------------------------------------------------------------------------
// memory

// Checks that the memory is available: Linux would overcommit it, and kill the process later.
inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    *pointer = nullptr;
    if (host_captures > 0) return cudaErrorStreamCaptureUnsupported;
    if (bytes == 0) return cudaSuccess;
    if (bytes > host_available_memory()) return cudaErrorMemoryAllocation;
    *pointer = host_device.allocate(bytes);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

inline cudaError_t cudaFree(void* pointer) {
    if (host_captures > 0) return cudaErrorStreamCaptureUnsupported;
    if (pointer) host_device.release(pointer);
    return cudaSuccess;
}

inline cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
    return cudaMalloc(pointer, bytes);
}
inline cudaError_t cudaFreeHost(void* pointer) {
    return cudaFree(pointer);
}

inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *free_bytes = host_available_memory();
    *total_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGE_SIZE);
    return cudaSuccess;
}

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault,
};

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
    if (bytes) host_stream(stream).enqueue([=] { memcpy(to, from, bytes); });
    return cudaSuccess;
}

inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
    if (width > std::min(to_pitch, from_pitch) || std::max(to_pitch, from_pitch) > INT_MAX)
        return cudaErrorInvalidPitchValue;
    host_stream(stream).enqueue([=] {
#pragma omp parallel for if (width * height > (size_t(1) << 20))
        for (size_t row = 0; row < height; row++)
            memcpy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
    });
    return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (host_captures > 0) return cudaErrorStreamCaptureUnsupported;
    cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return cudaStreamSynchronize(nullptr);
}

inline cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    host_stream(stream).enqueue([=] {
        constexpr size_t piece = size_t(1) << 20;
#pragma omp parallel for if (bytes > piece)
        for (size_t at = 0; at < bytes; at += piece) {
            memset((char*)pointer + at, value, std::min(piece, bytes - at));
        }
    });
    return cudaSuccess;
}

inline cudaError_t cudaMemset2DAsync(void* pointer, size_t pitch, int value, size_t width, size_t height,
                                     cudaStream_t stream) {
    host_stream(stream).enqueue([=] {
        for (size_t row = 0; row < height; row++) memset((char*)pointer + row * pitch, value, width);
    });
    return cudaSuccess;
}

// ----------------------------------------------------------------------------
// devices

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
    int multiProcessorCount;
    int l2CacheSize;
    size_t sharedMemPerBlockOptin;
    int major, minor;
};

inline cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    std::string name = "CPU";
    if (FILE* file = fopen("/proc/cpuinfo", "r")) {
        char line[256];
        while (fgets(line, sizeof line, file)) {
            const char* colon = strchr(line, ':');
            if (strncmp(line, "model name", 10) == 0 && colon) {
                name = colon + 2;
                name.erase(name.find_last_not_of(" \n") + 1);
                break;
            }
        }
        fclose(file);
    }
    snprintf(properties->name, sizeof properties->name, "%s", name.c_str());
    size_t free_bytes;
    cudaMemGetInfo(&free_bytes, &properties->totalGlobalMem);
    properties->major = host_device.major;
    properties->minor = host_device.minor;
    properties->sharedMemPerBlockOptin = host_device.shared_bytes;
    properties->multiProcessorCount = (int)std::thread::hardware_concurrency();
    properties->l2CacheSize = (int)std::max(sysconf(_SC_LEVEL2_CACHE_SIZE), 0l);
    return cudaSuccess;
}

enum cudaDeviceAttr { cudaDevAttrClockRate, cudaDevAttrMemoryClockRate, cudaDevAttrGlobalMemoryBusWidth };

// Sets every attribute to 0: none is known here.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = 0;
    return cudaSuccess;
}
