/*
Tensor maps describe a tensor in global memory to the copy engine of Hopper, which copies boxes of it.
*/
#pragma once

#include <cuda.h>

#include "kernels/common.cuh"

// A tensor of four dimensions, the first contiguous in memory and the others `stride` elements apart, and the
// box that one copy moves, whose width is a swizzle width (32, 64 or 128 bytes).
struct TensorMapShape {
    int size[4];
    size_t stride[3];
    int box[4];
};

// The driver makes the map. Its function is looked up by name, so that the program also starts on machines
// without a driver.
inline CUtensorMap tensor_map(const __nv_bfloat16* tensor, const TensorMapShape& shape) {
    using Encode =
        CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static const Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        constexpr unsigned since = 12000;
        cudaCheck(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, since,
                                                   cudaEnableDefault, &result));
        if (result != cudaDriverEntryPointSuccess || !function) {
            fail("CUDA: the driver has no cuTensorMapEncodeTiled; install a driver for CUDA 12 or later");
        }
        return (Encode)function;
    }();
    cuuint64_t size[4], stride[3];
    cuuint32_t box[4], one[4] = {1, 1, 1, 1};
    for (int i = 0; i < 4; i++) size[i] = (cuuint64_t)shape.size[i], box[i] = (cuuint32_t)shape.box[i];
    for (int i = 0; i < 3; i++) stride[i] = shape.stride[i] * sizeof *tensor;
    CUtensorMapSwizzle swizzle = box[0] * sizeof *tensor == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                 : box[0] * sizeof *tensor == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                 : CU_TENSOR_MAP_SWIZZLE_32B;
    CUtensorMap map;
    CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)tensor, size, stride, box, one,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        fail("CUDA: error %d for a tensor map of %d x %d x %d x %d at %p, strides %zu, %zu, %zu; strides "
             "and address must be multiples of 16 bytes",
             (int)result, shape.size[0], shape.size[1], shape.size[2], shape.size[3], (const void*)tensor,
             (size_t)stride[0], (size_t)stride[1], (size_t)stride[2]);
    }
    return map;
}
