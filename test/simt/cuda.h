/*
The part of CUDA's driver API that the program uses: making tensor maps. Rejects what the driver rejects.
*/
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/host_cuda.h"

using CUresult = int;
constexpr CUresult CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1;
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

// clang-format off
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B,
                          CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE = 0, CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };
// clang-format on

struct alignas(64) CUtensorMap {
    uint64_t opaque[16];
};

namespace simt {

// The contents of a CUtensorMap on the simulated device.
struct TensorMap {
    uint32_t is_map;  // the constant below, so that memory which holds no map is noticed
    uint16_t rank, element;
    uint8_t* address;
    uint32_t dim[5];
    uint64_t stride[4];  // bytes, of dimensions 1 and up
    uint16_t box[5], swizzle_bytes;
    static constexpr uint32_t magic = 0x7e5041a9;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

inline CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                  const cuuint64_t* dim, const cuuint64_t* strides, const cuuint32_t* box,
                                  const cuuint32_t* element_strides, CUtensorMapInterleave,
                                  CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                  CUtensorMapFloatOOBfill) {
    TensorMap result = {};
    result.is_map = TensorMap::magic;
    result.rank = (uint16_t)rank;
    result.element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    result.address = (uint8_t*)address;
    result.swizzle_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : (uint16_t)(16 << swizzle);
    bool good = rank >= 1 && rank <= 5 && (uintptr_t)map % 64 == 0 && (uintptr_t)address % 16 == 0;
    for (cuuint32_t i = 0; good && i < rank; i++) {
        good = dim[i] > 0 && dim[i] <= UINT32_MAX && box[i] > 0 && box[i] <= 256 && element_strides[i] == 1;
        if (i) good = good && strides[i - 1] % 16 == 0 && strides[i - 1] < uint64_t(1) << 40;
        result.dim[i] = (uint32_t)dim[i];
        result.box[i] = (uint16_t)box[i];
        if (i) result.stride[i - 1] = strides[i - 1];
    }
    size_t inner = good ? box[0] * result.element : 0;
    if (!good || inner % 16 != 0 || (result.swizzle_bytes && inner > result.swizzle_bytes))
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(map->opaque, &result, sizeof result);
    return CUDA_SUCCESS;
}

}  // namespace simt

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
constexpr unsigned long long cudaEnableDefault = 0;

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
    bool found = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *function = found ? (void*)&simt::encode_tensor_map : nullptr;
    *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
