// Tests of the simulated device: kernels with planted errors, each of which must be reported, and correct kernels,
// which must not.
#include "test/testing.h"

#include <numeric>
#include <set>

using simt::Kind;

namespace {

// The errors that `body` causes.
template <typename Body>
std::vector<simt::Error> errors_of(Body body) {
    simt::Errors errors;
    body();
    cudaCheck(cudaStreamSynchronize(test_stream()));
    return errors.take();
}

template <typename... Parameters, typename... Arguments>
std::vector<simt::Error> errors_of_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                                          Arguments... arguments) {
    return errors_of([&] { launch(kernel, grid, block, shared, test_stream(), arguments...); });
}

#define CHECK_ONE_ERROR(errors, expected, ...)                                                               \
    do {                                                                                                     \
        auto found = errors;                                                                                 \
        REQUIRE(found.size() == 1);                                                                          \
        CHECK(found[0].kind == expected);                                                                    \
        for (std::string part : {__VA_ARGS__}) CHECK_MESSAGE(found[0].text.find(part) != std::string::npos, found[0].text); \
    } while (0)

// ----------------------------------------------------------------------------
// correct kernels

__global__ void block_reverse_kernel(int* values) {
    __shared__ int copy[256];
    int t = threadIdx.x;
    copy[t] = values[blockIdx.x * 256 + t];
    __syncthreads();
    values[blockIdx.x * 256 + t] = copy[255 - t];
}

__global__ void block_sum_kernel(float* out, const float* inp, int n) {
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += inp[i];
    float total = block_sum(sum), largest = block_max(sum);
    if (threadIdx.x == 0) out[0] = total, out[1] = largest;
}

// ----------------------------------------------------------------------------
// planted errors

__global__ void race_kernel(int* out) {
    __shared__ int value;
    value = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = value;
}

__global__ void missing_barrier_kernel(int* out) {
    __shared__ int values[256];
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[(threadIdx.x + 32) % 256];
}

}  // namespace

TEST_CASE("correct kernels run without a report") {
    std::vector<int> values(3 * 256);
    std::iota(values.begin(), values.end(), 0);
    Buffer<int> buffer(values);
    CHECK(errors_of_kernel(block_reverse_kernel, 3, 256, 0, (int*)buffer).empty());
    auto reversed = buffer.host();
    for (int i = 0; i < 768; i++) CHECK(reversed[i] == i / 256 * 256 + 255 - i % 256);

    std::vector<float> ones(1000, 1.0f);
    Buffer<float> inp(ones), out(2);
    launch(block_sum_kernel, 1, 128, 0, test_stream(), (float*)out, (float*)inp, 1000);
    CHECK(out.host()[0] == 1000);
    CHECK(out.host()[1] == 8);
}

TEST_CASE("races on shared memory") {
    Buffer<int> out(256);
    auto e = errors_of_kernel(race_kernel, 1, 64, 0, (int*)out);
    for (auto& x : e) MESSAGE(x.text);
    e = errors_of_kernel(missing_barrier_kernel, 1, 256, 0, (int*)out);
    for (auto& x : e) MESSAGE(x.text);
}
