/*
The table of cards, and the runtime calls that query it. The numbers are those that drivers report
(deviceQuery) and those of CUDA's table of compute capabilities.
*/
#include "test/nocard/cards.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "test/nocard/errors.h"
#include "test/nocard/fault.h"

namespace nocard {
namespace {

constexpr size_t MiB = 1 << 20;

constexpr Card cards[] = {
    // key, name, capability, multiprocessors, memory, shared memory, threads, blocks, L2, clocks, bits,
    // FLOP/s
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 81154 * MiB, 166912, 167936, 2048, 32, 40 << 20, 1410000,
     1593000, 5120, 312e12},
    {"4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 24082 * MiB, 101376, 102400, 1536, 24, 72 << 20, 2520000,
     10501000, 384, 165.2e12},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 81079 * MiB, 232448, 233472, 2048, 32, 50 << 20, 1980000,
     2619000, 5120, 989.4e12},
    {"h200", "NVIDIA H200", 9, 0, 132, 143167 * MiB, 232448, 233472, 2048, 32, 60 << 20, 1980000, 3201000,
     6144, 989.4e12},
    {"b200", "NVIDIA B200", 10, 0, 148, 182642 * MiB, 232448, 233472, 2048, 32, 126 << 20, 1965000, 3996000,
     8192, 2250e12},
    {"5090", "NVIDIA GeForce RTX 5090", 12, 0, 170, 32110 * MiB, 101376, 102400, 1536, 24, 96 << 20, 2407000,
     14001000, 512, 209.5e12},
};

thread_local int device_of_thread = 0;

}  // namespace

const Card& card() {
    static const Card chosen = [] {
        const char* key = getenv("NOCARD") ? getenv("NOCARD") : "h100";
        for (Card card : cards) {
            if (strcmp(card.key, key) != 0) continue;
            if (long mebibytes = setting("NOCARD_MEMORY", 0)) card.memory = (size_t)mebibytes * MiB;
            return card;
        }
        fault("NOCARD", text("%s is no card; give h100, h200, a100, 4090, 5090 or b200", key));
    }();
    return chosen;
}

int device_count() {
    return (int)setting("NOCARD_GPUS", 8);
}

int current_device() {
    return device_of_thread;
}

void fill_properties(cudaDeviceProp& properties, int device) {
    const Card& c = card();
    properties = {};
    strcpy(properties.name, c.name);
    for (int i = 0; i < 16; i++) properties.uuid.bytes[i] = (char)(17 * i + 31 * device + 1);
    properties.totalGlobalMem = c.memory;
    properties.sharedMemPerBlock = shared_without_asking;
    properties.sharedMemPerBlockOptin = c.shared_optin;
    properties.sharedMemPerMultiprocessor = c.shared_per_multiprocessor;
    properties.reservedSharedMemPerBlock = shared_of_system;
    properties.regsPerBlock = properties.regsPerMultiprocessor = registers_per_multiprocessor;
    properties.warpSize = 32;
    properties.maxThreadsPerBlock = 1024;
    properties.maxThreadsPerMultiProcessor = c.threads_per_multiprocessor;
    properties.maxBlocksPerMultiProcessor = c.blocks_per_multiprocessor;
    properties.maxThreadsDim[0] = properties.maxThreadsDim[1] = 1024;
    properties.maxThreadsDim[2] = 64;
    properties.maxGridSize[0] = 2147483647;
    properties.maxGridSize[1] = properties.maxGridSize[2] = 65535;
    properties.multiProcessorCount = c.multiprocessors;
    properties.major = c.major;
    properties.minor = c.minor;
    properties.l2CacheSize = c.l2_bytes;
    properties.memoryBusWidth = c.memory_bits;
    properties.unifiedAddressing = properties.canMapHostMemory = properties.concurrentKernels = 1;
    properties.asyncEngineCount = 3;
    properties.streamPrioritiesSupported = 1;
    properties.pciBusID = 16 + device;
}

}  // namespace nocard

using namespace nocard;

// cuda_runtime.h declares that no exception passes through its C interface, and none does.
extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    *count = device_count();
    return noted(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return noted(cudaErrorInvalidDevice);
    device_of_thread = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = device_of_thread;
    return noted(device_count() ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= device_count()) return noted(cudaErrorInvalidDevice);
    fill_properties(*properties, device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= device_count()) return noted(cudaErrorInvalidDevice);
    const Card& c = card();
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
        *value = c.multiprocessors;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = c.major;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = c.minor;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = (int)c.shared_optin;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = c.threads_per_multiprocessor;
        break;
    case cudaDevAttrClockRate:
        *value = c.clock_khz;
        break;
    case cudaDevAttrMemoryClockRate:
        *value = c.memory_clock_khz;
        break;
    case cudaDevAttrGlobalMemoryBusWidth:
        *value = c.memory_bits;
        break;
    case cudaDevAttrL2CacheSize:
        *value = c.l2_bytes;
        break;
    default:
        fault("cudaDeviceGetAttribute", text("attribute %d is not known here", (int)attribute));
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
    if (device < 0 || device >= device_count()) return noted(cudaErrorInvalidDevice);
    snprintf(id, (size_t)length, "0000:%02x:00.0", 16 + device);
    return cudaSuccess;
}
}
