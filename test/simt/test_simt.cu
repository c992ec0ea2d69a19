// Tests of the simulated device: correct kernels run, have the results of a GPU, and are not reported.
#include "test/simt/errors.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <set>

namespace {

std::vector<int> numbers(int count) {
    std::vector<int> values(count);
    std::iota(values.begin(), values.end(), 0);
    return values;
}

// ----------------------------------------------------------------------------
// correct kernels

__global__ void reverse_blocks_kernel(int* values) {
    __shared__ int copy[256];
    int t = threadIdx.x, base = blockIdx.x * 256;
    copy[t] = values[base + t];
    __syncthreads();
    values[base + t] = copy[255 - t];
}

__global__ void block_sum_kernel(float* out, const float* inp, int n) {
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += inp[i];
    float total = block_sum(sum), largest = block_max(sum);
    if (threadIdx.x == 0) out[0] = total, out[1] = largest;
}

// Lanes of a warp may exchange values through shared memory with only __syncwarp.
__global__ void rotate_warp_kernel(int* values) {
    __shared__ int copy[64];
    int t = threadIdx.x, next = t / 32 * 32 + (t + 1) % 32;
    for (int round = 0; round < 3; round++) {
        copy[t] = values[t];
        __syncwarp();
        values[t] = copy[next];
        __syncwarp();
    }
}

// Uses all index variables.
__global__ void index_kernel(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread]++;
}

// Some threads exit before the others' warp operations.
__global__ void early_exit_kernel(int* out, int n) {
    int t = threadIdx.x;
    if (t >= n) return;
    out[t] = __popc(__ballot_sync(~0u, true));
}

// Appends its thread's number to a list, in the order in which threads run.
__global__ void order_kernel(int* order, int* count) {
    order[atomicAdd(count, 1)] = blockIdx.x * 64 + threadIdx.x;
}

}  // namespace

TEST_CASE("correct kernels run without a report, whatever the order of threads") {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        simt::set_seed(seed);
        Buffer<int> buffer(numbers(768)), few(numbers(64));
        CHECK(errors_of(reverse_blocks_kernel, 3, 256, 0, (int*)buffer).empty());
        CHECK(errors_of(rotate_warp_kernel, 1, 64, 0, (int*)few).empty());
        auto reversed = buffer.host(), rotated = few.host();
        for (int i = 0; i < 768; i++) REQUIRE(reversed[i] == i / 256 * 256 + 255 - i % 256);
        for (int i = 0; i < 64; i++) REQUIRE(rotated[i] == i / 32 * 32 + (i + 3) % 32);

        Buffer<float> ones(std::vector<float>(1000, 1.0f)), sums(2);
        CHECK(errors_of(block_sum_kernel, 1, 128, 0, (float*)sums, (float*)ones, 1000).empty());
        CHECK(sums.host() == std::vector<float>{1000, 8});
    }
    simt::set_seed(1);
}

TEST_CASE("each thread of each block runs once") {
    constexpr int threads = 5 * 3 * 2, blocks = 3 * 4 * 2;
    Buffer<int> counts(std::vector<int>(threads * blocks, 0));
    CHECK(errors_of(index_kernel, dim3(3, 4, 2), dim3(5, 3, 2), 0, (int*)counts).empty());
    CHECK(counts.host() == std::vector<int>(threads * blocks, 1));
}

TEST_CASE("warp operations do not wait for threads that have ended") {
    Buffer<int> counts(std::vector<int>(64, 0));
    CHECK(errors_of(early_exit_kernel, 1, 64, 0, (int*)counts, 40).empty());
    auto result = counts.host();
    for (int i = 0; i < 64; i++) CHECK(result[i] == (i < 32 ? 32 : i < 40 ? 8 : 0));
}

TEST_CASE("the seed decides the order of threads") {
    auto order_with = [](uint64_t seed) {
        simt::set_seed(seed);
        Buffer<int> order(256), count(std::vector<int>{0});
        launch(order_kernel, 4, 64, 0, test_stream(), (int*)order, (int*)count);
        return order.host();
    };
    std::set<std::vector<int>> orders;
    for (uint64_t seed = 0; seed < 10; seed++) {
        auto order = order_with(seed);
        CHECK(order == order_with(seed));
        orders.insert(order);
        std::sort(order.begin(), order.end());
        CHECK(order == numbers(256));
    }
    CHECK(orders.size() == 10);
    simt::set_seed(1);
}

// ----------------------------------------------------------------------------
// warp operations, votes, atomics

namespace {

template <typename T>
__global__ void shuffle_kernel(T* out, const T* inp, int width) {
    int t = threadIdx.x;
    T value = inp[t];
    out[t * 4 + 0] = __shfl_sync(~0u, value, 5, width);
    out[t * 4 + 1] = __shfl_up_sync(~0u, value, 3, width);
    out[t * 4 + 2] = __shfl_down_sync(~0u, value, 3, width);
    out[t * 4 + 3] = __shfl_xor_sync(~0u, value, 3, width);
}

template <typename T>
void check_shuffles(int width) {
    std::vector<T> inp;
    for (int i = 0; i < 64; i++) inp.push_back(T(i + 1));
    Buffer<T> device(inp), out(256);
    CHECK(errors_of(shuffle_kernel<T>, 1, 64, 0, (T*)out, (T*)device, width).empty());
    auto got = out.host();
    for (int i = 0; i < 64; i++) {
        int first = i / width * width, inside = i % width;
        CHECK(got[i * 4 + 0] == inp[first + 5 % width]);
        CHECK(got[i * 4 + 1] == inp[inside >= 3 ? i - 3 : i]);
        CHECK(got[i * 4 + 2] == inp[inside + 3 < width ? i + 3 : i]);
        CHECK(got[i * 4 + 3] == inp[(i ^ 3) <= (i | (width - 1)) ? i ^ 3 : i]);
    }
}

__global__ void vote_kernel(unsigned* out) {
    int t = threadIdx.x;
    unsigned half = t < 16 ? 0xffffu : 0xffff0000u;
    out[t * 8 + 0] = __ballot_sync(~0u, t % 3 == 0);
    out[t * 8 + 1] = __ballot_sync(half, t % 2);
    out[t * 8 + 2] = __any_sync(half, t == 20);
    out[t * 8 + 3] = __all_sync(half, t != 20);
    out[t * 8 + 4] = __reduce_add_sync(~0u, t);
    out[t * 8 + 5] = __reduce_max_sync(half, t);
    out[t * 8 + 6] = __syncthreads_count(t < 7);
    out[t * 8 + 7] = __syncthreads_or(t == 9) * 2 + __syncthreads_and(t != 9);
}

__global__ void atomics_on_memory_kernel(int* ints, float* floats) {
    int t = threadIdx.x;
    atomicAdd(&ints[0], t);
    atomicMax(&ints[1], t);
    atomicMin(&ints[2], -t);
    atomicOr(&ints[3], 1 << t % 8);
    int old = atomicCAS(&ints[4], 0, t + 1);
    if (old == 0) ints[5] = atomicExch(&ints[4], 1000);
    atomicAdd(floats, 0.5f);
}

}  // namespace

TEST_CASE("shuffles move values between lanes") {
    for (int width : {32, 16, 8, 4, 2}) {
        check_shuffles<int>(width);
        check_shuffles<float>(width);
        check_shuffles<double>(width);
        check_shuffles<int8_t>(width);
        check_shuffles<__nv_bfloat16>(width);
    }
}

TEST_CASE("votes and reductions") {
    Buffer<unsigned> out(32 * 8);
    CHECK(errors_of(vote_kernel, 1, 32, 0, (unsigned*)out).empty());
    auto got = out.host();
    for (unsigned t = 0; t < 32; t++) {
        bool low = t < 16;
        CHECK(got[t * 8 + 0] == 0x49249249u);
        CHECK(got[t * 8 + 1] == (low ? 0xaaaau : 0xaaaa0000u));
        CHECK(got[t * 8 + 2] == !low);
        CHECK(got[t * 8 + 3] == low);
        CHECK(got[t * 8 + 4] == 496);
        CHECK(got[t * 8 + 5] == (low ? 15 : 31));
        CHECK(got[t * 8 + 6] == 7);
        CHECK(got[t * 8 + 7] == 2);
    }
}

TEST_CASE("atomics") {
    Buffer<int> ints(std::vector<int>(6, 0));
    Buffer<float> floats(std::vector<float>{0});
    CHECK(errors_of(atomics_on_memory_kernel, 1, 100, 0, (int*)ints, (float*)floats).empty());
    auto got = ints.host();
    CHECK(got[0] == 4950);
    CHECK(got[1] == 99);
    CHECK(got[2] == -99);
    CHECK(got[3] == 255);
    CHECK(got[4] == 1000);
    CHECK((got[5] >= 1 && got[5] <= 100));
    CHECK(floats.host()[0] == 50);
}

// ----------------------------------------------------------------------------
// launching

namespace {

__global__ void empty_kernel(int) {}

}  // namespace

TEST_CASE("launches that a GPU refuses are refused") {
    auto launch_with = [](dim3 grid, dim3 block, size_t shared) {
        cudaLaunchConfig_t config = {grid, block, shared, test_stream()};
        return cudaLaunchKernelEx(&config, empty_kernel, 0);
    };
    CHECK(launch_with(1, 1, 48 * 1024) == cudaSuccess);
    CHECK(launch_with(1, 1, 48 * 1024 + 1) == cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 * 1024) ==
          cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute((const void*)empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               227 * 1024) == cudaSuccess);
    CHECK(launch_with(1, 1, 227 * 1024) == cudaSuccess);
    CHECK(launch_with(1, 1, 227 * 1024 + 1) == cudaErrorInvalidValue);
    CHECK(launch_with(1, 1024, 4) == cudaSuccess);
    CHECK(launch_with(1, dim3(1024, 2), 4) == cudaErrorInvalidConfiguration);
    CHECK(launch_with(1, dim3(1, 1, 65), 4) == cudaErrorInvalidConfiguration);
    CHECK(launch_with(0, 1, 4) == cudaErrorInvalidConfiguration);
    CHECK(launch_with(1, 0, 4) == cudaErrorInvalidConfiguration);
    CHECK(launch_with(dim3(1, 65536), 1, 4) == cudaErrorInvalidConfiguration);
    cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, 0));
    CHECK(properties.major == 9);
}

TEST_CASE("kernels of two streams run one after the other") {
    cudaStream_t other;
    cudaCheck(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    Buffer<int> a(numbers(256)), b(numbers(256));
    for (int i = 0; i < 20; i++) {
        launch(reverse_blocks_kernel, 1, 256, 0, test_stream(), (int*)a);
        launch(reverse_blocks_kernel, 1, 256, 0, other, (int*)b);
    }
    cudaCheck(cudaStreamSynchronize(other));
    CHECK(a.host() == numbers(256));
    CHECK(b.host() == numbers(256));
    cudaCheck(cudaStreamDestroy(other));
}

// ----------------------------------------------------------------------------
// memory

namespace {

__global__ void fill_kernel(float* out, size_t count) {
    size_t threads = gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) out[i] = 1;
}

}  // namespace

TEST_CASE("what is remembered of freed memory takes no memory") {
    auto resident_bytes = [] {
        size_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages >> pages;
        return pages * 4096;
    };
    size_t before = 0;
    for (int round = 0; round < 10; round++) {
        Buffer<float> values(1 << 19);
        CHECK(errors_of(fill_kernel, 8, 256, 0, (float*)values, values.size()).empty());
        if (round == 0) before = resident_bytes();
    }
    CHECK(resident_bytes() < before + (32 << 20));
}

// ----------------------------------------------------------------------------
// bfloat16

// Rounding depends on the lower half of a float only through a comparison with one half, so these lower
// halves represent all.
TEST_CASE("conversion to bfloat16 rounds to nearest even") {
    for (uint32_t upper = 0; upper < 0x10000; upper++) {
        for (uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            float number = std::bit_cast<float>(upper << 16 | lower);
            uint16_t got = __nv_bfloat16(number).bits, want;
            if (std::isnan(number)) {
                want = 0x7fff;
            } else if (std::isinf(number)) {
                want = (uint16_t)upper;
            } else {
                // Away from zero the next bfloat16 is upper + 1; past the largest it represents 2^128.
                auto magnitude = [](uint32_t bits) {
                    return (bits & 0x7fff) == 0x7f80 ? 0x1p128
                                                     : std::abs((double)std::bit_cast<float>(bits << 16));
                };
                double down = std::abs((double)number) - magnitude(upper);
                double up = magnitude(upper + 1) - std::abs((double)number);
                want = (uint16_t)(down < up || (down == up && upper % 2 == 0) ? upper : upper + 1);
            }
            if (got != want)
                FAIL_CHECK("float bits ", (upper << 16 | lower), " give ", got, " instead of ", want);
        }
        float exact = __ushort_as_bfloat16((uint16_t)upper);
        if (std::bit_cast<uint32_t>(exact) != upper << 16) FAIL_CHECK(upper);
    }
    CHECK(__nv_bfloat16(3).bits == 0x4040);
    CHECK(__nv_bfloat16(1.5).bits == 0x3fc0);
}
