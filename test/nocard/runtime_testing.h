/*
Helpers for the tests of the stand-in runtime: streams, events and memory that end with their scope, work
under many seeds, graphs, tensor maps, and a kernel.
*/
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "test/nocard/schedule.h"
#include "test/support/cases.h"

using nocard::use_seed;

static __global__ void double_kernel(float* values, int count) {
    __shared__ float copies[64];
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    copies[threadIdx.x % 64] = i < count ? values[i] : 0;
    __syncthreads();
    if (i < count) values[i] = 2 * copies[threadIdx.x % 64];
}

inline void require(cudaError_t error) {
    REQUIRE_MESSAGE(error == cudaSuccess, cudaGetErrorString(error));
}

struct TestStream {
    cudaStream_t stream;
    explicit TestStream(unsigned flags = cudaStreamNonBlocking) {
        require(cudaStreamCreateWithFlags(&stream, flags));
    }
    ~TestStream() { cudaStreamDestroy(stream); }
    operator cudaStream_t() const { return stream; }
    void wait() const { require(cudaStreamSynchronize(stream)); }
};

struct TestEvent {
    cudaEvent_t event;
    TestEvent() { require(cudaEventCreate(&event)); }
    ~TestEvent() { cudaEventDestroy(event); }
    operator cudaEvent_t() const { return event; }
};

// Memory of the card, or pinned.
template <typename T>
struct TestMemory {
    T* data = nullptr;
    bool pinned;
    explicit TestMemory(size_t count, bool pinned = false) : pinned(pinned) {
        size_t bytes = count * sizeof(T);
        require(pinned ? cudaMallocHost((void**)&data, bytes) : cudaMalloc((void**)&data, bytes));
    }
    explicit TestMemory(const std::vector<T>& values) : TestMemory(values.size()) {
        require(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
        require(cudaDeviceSynchronize());
    }
    TestMemory(const TestMemory&) = delete;
    ~TestMemory() { pinned ? cudaFreeHost(data) : cudaFree(data); }
    operator T*() const { return data; }
};

constexpr int seeds = 32;

// Returns the number of seeds under which work() returns true.
inline int right_under_seeds(const std::function<bool()>& work) {
    int right = 0;
    for (int seed = 1; seed <= seeds; seed++) {
        require(cudaDeviceSynchronize());
        use_seed((uint64_t)seed);
        right += work();
    }
    return right;
}

inline cudaGraphExec_t captured(cudaStream_t stream, const std::function<void()>& work) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    work();
    require(cudaStreamEndCapture(stream, &graph));
    require(cudaGraphInstantiate(&executable, graph, 0));
    require(cudaGraphDestroy(graph));
    return executable;
}

using Encode = decltype(&cuTensorMapEncodeTiled);

inline Encode encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                             &result));
    return (Encode)function;
}

struct MapArguments {
    cuuint64_t size[2] = {64, 32}, stride[1] = {128};
    cuuint32_t box[2] = {64, 8}, step[2] = {1, 1};
    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
};

inline CUresult encode(void* address, const MapArguments& with) {
    CUtensorMap map;
    return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address, with.size, with.stride, with.box,
                     with.step, CU_TENSOR_MAP_INTERLEAVE_NONE, with.swizzle,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
