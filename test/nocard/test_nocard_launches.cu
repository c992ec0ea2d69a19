// Kernels in the stand-in runtime (test/nocard/): the code that a driver would pick, the registers that ptxas
// allocated, and launches and tensor maps that a card refuses.
#include "test/nocard/fat_binary.h"
#include "test/nocard/runtime_testing.h"

using nocard::choose_image;
using nocard::CodeEntry;
using nocard::Image;

// ----------------------------------------------------------------------------
// kernels

TEST_CASE("registers and shared memory of a kernel are those that ptxas gave it") {
    cudaDeviceProp card;
    require(cudaGetDeviceProperties(&card, 0));
    cudaFuncAttributes attributes;
    require(cudaFuncGetAttributes(&attributes, (const void*)double_kernel));
    CHECK(attributes.numRegs >= 8);
    CHECK(attributes.numRegs <= 32);
    CHECK(attributes.sharedSizeBytes == 256);
    CHECK(attributes.binaryVersion / 10 == card.major);
    CHECK(attributes.ptxVersion <= card.major * 10 + card.minor);
}

TEST_CASE("a driver takes machine code for its card, or else the newest PTX that it can compile") {
    std::vector<CodeEntry> entries = {{false, 80, false, false, "", {}},
                                      {true, 80, false, false, "", {}},
                                      {false, 90, true, false, "", {}},
                                      {true, 90, true, false, "", {}},
                                      {true, 75, false, false, "", {}}};
    auto chosen = [&](int capability) {
        Image image = choose_image(entries, capability);
        return std::pair(image.cubin ? image.cubin - entries.data() : -1,
                         image.ptx ? image.ptx - entries.data() : -1);
    };
    CHECK(chosen(90) == std::pair<long, long>{2, 3});
    CHECK(chosen(80) == std::pair<long, long>{0, 1});
    CHECK(chosen(89) == std::pair<long, long>{0, 1});
    CHECK(chosen(100) == std::pair<long, long>{-1, 1});  // 90a is for Hopper only
    CHECK(chosen(120) == std::pair<long, long>{-1, 1});
    CHECK(chosen(75) == std::pair<long, long>{-1, 4});
    CHECK(chosen(70) == std::pair<long, long>{-1, -1});
}

TEST_CASE("a kernel runs on its stream, in its turn") {
    TestStream stream;
    TestMemory<float> values(std::vector<float>{1, 2, 3});
    int count = 3;
    float* data = values;
    void* arguments[] = {&data, &count};
    for (int i = 0; i < 2; i++)
        require(cudaLaunchKernel((const void*)double_kernel, 2, 64, arguments, 0, stream));
    stream.wait();
    std::vector<float> got(3);
    require(cudaMemcpy(got.data(), values, 12, cudaMemcpyDeviceToHost));
    CHECK(got == std::vector<float>{4, 8, 12});
}

TEST_CASE("launches that no card takes are refused") {
    TestMemory<float> values(std::vector<float>{1});
    int count = 1;
    float* data = values;
    void* arguments[] = {&data, &count};
    cudaDeviceProp card;
    require(cudaGetDeviceProperties(&card, 0));
    auto launch = [&](dim3 grid, dim3 block, size_t shared) {
        cudaError_t error =
            cudaLaunchKernel((const void*)double_kernel, grid, block, arguments, shared, nullptr);
        cudaGetLastError();
        return error;
    };
    CHECK(launch(0, 32, 0) == cudaErrorInvalidConfiguration);
    CHECK(launch(dim3(1, 65536), 32, 0) == cudaErrorInvalidConfiguration);
    CHECK(launch(1, 1025, 0) == cudaErrorInvalidConfiguration);
    CHECK(launch(1, 0, 0) == cudaErrorInvalidConfiguration);
    constexpr size_t without_asking = (48 << 10) - 256;
    CHECK(launch(1, 32, without_asking) == cudaSuccess);
    CHECK(launch(1, 32, without_asking + 1) == cudaErrorInvalidValue);
    auto ask = [](size_t bytes) {
        return cudaFuncSetAttribute((const void*)double_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)bytes);
    };
    CHECK(ask(card.sharedMemPerBlockOptin - 255) == cudaErrorInvalidValue);
    CHECK(ask(card.sharedMemPerBlockOptin - 256) == cudaSuccess);
    CHECK(launch(1, 32, card.sharedMemPerBlockOptin - 256) == cudaSuccess);
    cudaGetLastError();
    require(cudaDeviceSynchronize());
}

// ----------------------------------------------------------------------------
// tensor maps

TEST_CASE("the driver refuses tensor maps that the copy engine cannot follow") {
    TestMemory<char> memory(64 * 32 * 2 + 16);
    CHECK(encode(memory, {}) == CUDA_SUCCESS);
    CHECK(encode(memory + 8, {}) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(memory, {.stride = {120}}) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(memory, {.box = {64, 257}}) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(memory, {.box = {64, 0}}) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(memory, {.box = {4, 8}}) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(memory, {.swizzle = CU_TENSOR_MAP_SWIZZLE_64B}) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(memory, {.step = {0, 1}}) == CUDA_ERROR_INVALID_VALUE);
}
