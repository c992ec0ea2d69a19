/*
The two functions of the driver that the program obtains from the runtime: one encodes tensor maps, the other
makes a stream wait for a number in memory.
*/
#include <algorithm>
#include <atomic>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <string>

#include "test/nocard/device_memory.h"
#include "test/nocard/errors.h"
#include "test/nocard/fault.h"
#include "test/nocard/kernels.h"
#include "test/nocard/streams.h"

namespace nocard {
namespace {

constexpr const char* encode_call = "cuTensorMapEncodeTiled";

// Returns 0 for unknown types.
int element_bytes(CUtensorMapDataType type) {
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
        return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
        return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
        return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
        return 8;
    default:
        return 0;
    }
}

// Returns why the driver refuses a tensor map with CUDA_ERROR_INVALID_VALUE, or an empty string. The rules
// are those of its documentation.
std::string reason_against(const TensorMap& map) {
    constexpr uint64_t most_size = uint64_t(1) << 32, most_stride = uint64_t(1) << 40;
    constexpr uint64_t unit = 16, most_box = 256, most_element_stride = 8;
    if (map.element_bytes == 0) return text("a type of number %d", map.type);
    if ((uintptr_t)map.address % unit) return text("the address %p is no multiple of 16", (void*)map.address);
    for (int i = 0; i < map.rank; i++) {
        if (map.size[i] == 0 || map.size[i] > most_size)
            return text("dimension %d has %zu elements", i, (size_t)map.size[i]);
        if (map.box[i] == 0 || map.box[i] > most_box)
            return text("the box has %d elements of dimension %d", map.box[i], i);
        if (map.element_stride[i] == 0 || map.element_stride[i] > most_element_stride)
            return text("an element stride of %d", map.element_stride[i]);
        if (i + 1 == map.rank) break;
        if (map.stride[i] % unit || map.stride[i] >= most_stride)
            return text("dimension %d has a stride of %zu bytes", i + 1, (size_t)map.stride[i]);
    }
    uint64_t row = (uint64_t)map.box[0] * map.element_bytes,
             swizzled = map.swizzle ? unit << map.swizzle : row;
    if (map.interleave == 0 && row % unit)
        return text("rows of the box have %zu bytes, no multiple of 16", (size_t)row);
    if (map.interleave == 0 && row > swizzled)
        return text("rows of the box have %zu bytes, and the swizzle %zu", (size_t)row, (size_t)swizzled);
    return "";
}

CUresult encode_tiled(CUtensorMap* result, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                      const cuuint32_t* element_stride, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
    constexpr uintptr_t map_alignment = 64;
    constexpr cuuint32_t most_rank = 5;
    std::string reason;
    TensorMap map;
    map.address = (char*)address;
    map.element_bytes = (uint8_t)element_bytes(type);
    map.type = (uint8_t)type;
    map.interleave = (uint8_t)interleave;
    map.swizzle = (uint8_t)swizzle;
    map.l2 = (uint8_t)l2;
    map.fill = (uint8_t)fill;
    if ((uintptr_t)result % map_alignment) reason = "the map itself must be at a multiple of 64";
    if (rank == 0 || rank > most_rank) reason = text("a rank of %u", rank);
    for (cuuint32_t i = 0; reason.empty() && i < rank; i++) {
        map.size[i] = size[i];
        map.box[i] = (uint16_t)std::min<cuuint32_t>(box[i], UINT16_MAX);
        map.element_stride[i] = (uint8_t)std::min<cuuint32_t>(element_stride[i], UINT8_MAX);
        if (i + 1 < rank) map.stride[i] = stride[i];
    }
    map.rank = (uint8_t)rank;
    if (reason.empty()) reason = reason_against(map);
    if (!reason.empty()) {
        fprintf(stderr, "nocard: %s: %s\n", encode_call, reason.c_str());
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t bytes = map.size[0] * map.element_bytes;
    for (cuuint32_t i = 1; i < rank; i++) bytes += (map.size[i] - 1) * map.stride[i - 1];
    require_device(encode_call, "the tensor", address, bytes);
    memset(result, 0, sizeof *result);
    memcpy(result, &map, sizeof map);
    return CUDA_SUCCESS;
}

CUresult wait_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    constexpr const char* call = "cuStreamWaitValue32";
    if (flags != CU_STREAM_WAIT_VALUE_GEQ) fault(call, text("flags %u are not known here", flags));
    auto number = (uint32_t*)address;
    require_reachable(call, "the number", number, sizeof *number);
    if (is_capturing(stream)) fault(call, "in a capture, which is not known here");
    Operation operation;
    operation.call = call;
    operation.touched = {{number, sizeof *number}};
    operation.begin = [=]() -> Advance {
        return
            [=] { return (int32_t)(std::atomic_ref(*number).load(std::memory_order_acquire) - value) >= 0; };
    };
    return enqueue(stream, operation) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace
}  // namespace nocard

using namespace nocard;

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
    *function = nullptr;
    if (strcmp(symbol, encode_call) == 0) *function = (void*)encode_tiled;
    if (strcmp(symbol, "cuStreamWaitValue32") == 0) *function = (void*)wait_value;
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
}
