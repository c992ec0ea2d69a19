// Tests of the simulated device. Kernels with a planted error are reported, correct ones are not.
#include "test/testing.h"

#include <algorithm>
#include <numeric>
#include <set>

using simt::Kind;

namespace {

// The errors that a kernel causes.
template <typename... Parameters, typename... Arguments>
std::vector<simt::Error> errors_of(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                                   Arguments... arguments) {
    simt::Errors errors;
    launch(kernel, grid, block, shared, test_stream(), arguments...);
    cudaCheck(cudaStreamSynchronize(test_stream()));
    return errors.take();
}

// One error of this kind, whose text has all of these parts.
void check_one(const std::vector<simt::Error>& errors, Kind kind, std::vector<std::string> parts) {
    REQUIRE(errors.size() == 1);
    INFO(errors[0].text);
    CHECK(errors[0].kind == kind);
    CHECK(errors[0].text.find('\n') == std::string::npos);
    for (const auto& part : parts) CHECK_MESSAGE(errors[0].text.find(part) != std::string::npos, part);
}

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

// Lanes of a warp may hand values to each other through shared memory with __syncwarp alone.
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

// Everything that the index variables say.
__global__ void index_kernel(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread]++;
}

// Some threads leave before the warp operations of the others.
__global__ void early_exit_kernel(int* out, int n) {
    int t = threadIdx.x;
    if (t >= n) return;
    out[t] = __popc(__ballot_sync(~0u, true));
}

// Adds its thread's number to a list in the order in which threads come by.
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
// races

namespace {

__global__ void write_race_kernel(int* out) {
    __shared__ int value;
    value = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = value;
}

__global__ void missing_barrier_before_read_kernel(int* out) {
    __shared__ int values[256];
    int t = threadIdx.x;
    for (int round = 0; round < 2; round++) {
        values[t] = t;
        if (round == 0) __syncthreads();
        out[t] = values[(t + 32) % 256];
        __syncthreads();
    }
}

__global__ void missing_barrier_before_write_kernel(int* out) {
    int* values = dynamic_shared<int>();
    int t = threadIdx.x;
    for (int round = 0; round < 2; round++) {
        values[t] = t;
        __syncthreads();
        out[t] = values[(t + 32) % 256];
    }
}

__global__ void missing_syncwarp_kernel(int* out) {
    __shared__ int values[32];
    int t = threadIdx.x;
    values[t] = t;
    __syncwarp();
    out[t] = values[t ^ 1];
    values[t] = 1;
}

__global__ void warp_sync_between_warps_kernel(int* out) {
    __shared__ int values[64];
    int t = threadIdx.x;
    values[t] = t;
    __syncthreads();
    out[t] = values[(t + 32) % 64];
    __syncwarp();
    values[t] = 1;
}

// Bytes of one word that different threads write are no race; the same byte is.
template <bool same>
__global__ void byte_race_kernel(int* out) {
    __shared__ uint8_t values[64];
    values[same ? threadIdx.x / 2 : threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = values[same ? 0 : threadIdx.x];
}

template <bool plain_read>
__global__ void atomics_kernel(int* out) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);
    if (!plain_read) __syncthreads();
    out[threadIdx.x] = count;
}

}  // namespace

TEST_CASE("races on shared memory are reported") {
    Buffer<int> out(256);
    for (uint64_t seed = 1; seed <= 4; seed++) {
        simt::set_seed(seed);
        check_one(errors_of(write_race_kernel, 1, 64, 0, (int*)out), Kind::race,
                  {"thread (", "writes 4 bytes", "wrote since", "write_race_kernel", "block (0,0,0)",
                   "test_simt.cu:"});
        check_one(errors_of(missing_barrier_before_read_kernel, 1, 256, 0, (int*)out), Kind::race,
                  {"static shared"});
        check_one(errors_of(missing_barrier_before_write_kernel, 1, 256, 1024, (int*)out), Kind::race,
                  {"dynamic shared"});
        check_one(errors_of(missing_syncwarp_kernel, 1, 32, 0, (int*)out), Kind::race, {});
        check_one(errors_of(warp_sync_between_warps_kernel, 1, 64, 0, (int*)out), Kind::race, {});
        check_one(errors_of(byte_race_kernel<true>, 1, 64, 0, (int*)out), Kind::race, {"1 bytes"});
        CHECK(errors_of(byte_race_kernel<false>, 1, 64, 0, (int*)out).empty());
        check_one(errors_of(atomics_kernel<true>, 1, 64, 0, (int*)out), Kind::race, {"test_simt.cu:"});
        CHECK(errors_of(atomics_kernel<false>, 1, 64, 0, (int*)out).empty());
        CHECK(out.host()[5] == 64);
    }
    simt::set_seed(1);
}

// ----------------------------------------------------------------------------
// addresses

namespace {

template <typename T>
__global__ void store_kernel(T* at, size_t index) {
    at[index] = T{};
}

__global__ void load_kernel(int* out, const int* at, int index) {
    *out = at[index];
}

__global__ void dynamic_store_kernel(int index) {
    dynamic_shared<int>()[index] = 1;
}

}  // namespace

TEST_CASE("accesses outside of device memory are reported") {
    Buffer<int> buffer(100), out(1);
    int* data = buffer;
    CHECK(errors_of(store_kernel<int>, 1, 1, 0, data, 99).empty());
    check_one(errors_of(store_kernel<int>, 1, 1, 0, data, 100), Kind::out_of_bounds,
              {"writes 4 bytes", "store_kernel<int>", "test_simt.cu:"});
    check_one(errors_of(store_kernel<int>, 1, 1, 0, data, (size_t)-1), Kind::out_of_bounds, {});
    check_one(errors_of(store_kernel<int>, 1, 1, 0, data, 4000), Kind::out_of_bounds, {});
    check_one(errors_of(load_kernel, 1, 1, 0, (int*)out, data, 100), Kind::out_of_bounds, {"reads 4 bytes"});
    check_one(errors_of(store_kernel<Vec<int, 4>>, 1, 1, 0, (Vec<int, 4>*)data, 25), Kind::out_of_bounds,
              {"writes 16 bytes"});
    check_one(errors_of(store_kernel<int>, 1, 1, 0, (int*)nullptr, 0), Kind::out_of_bounds,
              {"not memory of the device"});
    std::vector<int> host(10);
    check_one(errors_of(store_kernel<int>, 1, 1, 0, host.data(), 0), Kind::out_of_bounds,
              {"not memory of the device"});
}

TEST_CASE("accesses to freed memory are reported") {
    int *freed, *other;
    cudaCheck(cudaMalloc((void**)&freed, 1 << 20));
    cudaCheck(cudaFree(freed));
    cudaCheck(cudaMalloc((void**)&other, 1 << 20));
    check_one(errors_of(store_kernel<int>, 1, 1, 0, freed, 5000), Kind::out_of_bounds,
              {"device memory in use"});
    cudaCheck(cudaFree(other));
}

TEST_CASE("misaligned vector accesses are reported") {
    Buffer<float> buffer(100);
    float* data = buffer;
    CHECK(errors_of(store_kernel<Vec<float, 4>>, 1, 1, 0, (Vec<float, 4>*)(data + 4), 0).empty());
    check_one(errors_of(store_kernel<Vec<float, 4>>, 1, 1, 0, (Vec<float, 4>*)(data + 1), 0),
              Kind::misaligned, {"16 bytes", "not a multiple of 16"});
    check_one(errors_of(store_kernel<Vec<float, 2>>, 1, 1, 0, (Vec<float, 2>*)(data + 1), 0),
              Kind::misaligned, {});
}

TEST_CASE("accesses outside of dynamic shared memory are reported") {
    CHECK(errors_of(dynamic_store_kernel, 1, 1, 400, 99).empty());
    check_one(errors_of(dynamic_store_kernel, 1, 1, 400, 100), Kind::out_of_bounds, {"byte 400 of 400"});
    check_one(errors_of(dynamic_store_kernel, 1, 1, 400, -1), Kind::out_of_bounds, {"byte -4 of 400"});
    check_one(errors_of(dynamic_store_kernel, 1, 1, 0, 0), Kind::out_of_bounds, {});
}

// ----------------------------------------------------------------------------
// reads of what was not written

namespace {

__global__ void unwritten_static_kernel(int* out, int written) {
    __shared__ int values[64];
    if ((int)threadIdx.x < written) values[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

// The first block writes what the other then finds.
__global__ void unwritten_in_second_block_kernel(int* out, int* turn) {
    int* values = dynamic_shared<int>();
    if (atomicAdd(turn, 1) == 0) values[0] = 1;
    *out = values[0];
}

enum class Step { none, wait, wait_and_barrier };

template <Step step>
__global__ void cp_async_kernel(float* out, const float* inp) {
    auto* values = dynamic_shared<Vec<float, 4>>();
    int t = threadIdx.x;
    cp_async_16(&values[t], inp + 4 * t);
    cp_async_commit();
    if (step != Step::none) cp_async_wait<0>();
    if (step == Step::wait_and_barrier) __syncthreads();
    store(out + 4 * t, values[(t + 32) % 64]);
}

// The copy into the buffer starts while other warps may still read it.
__global__ void cp_async_too_early_kernel(float* out, const float* inp) {
    auto* values = dynamic_shared<Vec<float, 4>>();
    int t = threadIdx.x;
    for (int round = 0; round < 2; round++) {
        cp_async_16(&values[t], inp + 4 * t);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        store(out + 4 * t, values[(t + 32) % 64]);
    }
}

__global__ void cp_async_misaligned_kernel(const float* inp) {
    cp_async_16(dynamic_shared<float>() + 4 * threadIdx.x, inp + 1);
}

}  // namespace

TEST_CASE("reads of shared memory that nothing wrote are reported") {
    Buffer<int> out(64), turn(std::vector<int>{0});
    CHECK(errors_of(unwritten_static_kernel, 1, 64, 0, (int*)out, 64).empty());
    check_one(errors_of(unwritten_static_kernel, 1, 64, 0, (int*)out, 63), Kind::unwritten,
              {"thread (63,0,0) reads 4 bytes", "which no thread of the block wrote"});
    check_one(errors_of(unwritten_in_second_block_kernel, 2, 1, 64, (int*)out, (int*)turn), Kind::unwritten,
              {});
}

TEST_CASE("an asynchronous copy must be waited for") {
    Buffer<float> inp(random_values<float>("values", 256)), out(256);
    auto errors = [&](auto kernel) { return errors_of(kernel, 1, 64, 1024, (float*)out, (float*)inp); };
    CHECK(errors(cp_async_kernel<Step::wait_and_barrier>).empty());
    check_one(errors(cp_async_kernel<Step::none>), Kind::unwritten, {});
    auto without_barrier = errors(cp_async_kernel<Step::wait>);
    REQUIRE(without_barrier.size() == 1);
    CHECK((without_barrier[0].kind == Kind::unwritten || without_barrier[0].kind == Kind::race));
    check_one(errors(cp_async_too_early_kernel), Kind::race, {});
    check_one(errors_of(cp_async_misaligned_kernel, 1, 1, 1024, (float*)inp), Kind::misaligned, {});
}

// ----------------------------------------------------------------------------
// barriers

namespace {

__global__ void divergent_barrier_kernel() {
    if (threadIdx.x < 40) __syncthreads();
}

__global__ void different_barriers_kernel(int* out) {
    if (threadIdx.x < 40)
        out[0] = __syncthreads_or(1);
    else
        __syncthreads();
}

__global__ void divergent_shuffle_kernel(int* out) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_xor_sync(~0u, (int)threadIdx.x, 1);
    else
        __syncthreads();
}

__global__ void foreign_mask_kernel() {
    __syncwarp(0xffff);
}

}  // namespace

TEST_CASE("barriers that some threads never reach are reported") {
    Buffer<int> out(64);
    check_one(
        errors_of(divergent_barrier_kernel, 1, 64, 0), Kind::divergence,
        {"40 threads (first: (0,0,0)) wait in __syncthreads", "24 threads (first: (40,0,0)) have ended"});
    check_one(errors_of(different_barriers_kernel, 1, 64, 0, (int*)out), Kind::divergence,
              {"__syncthreads_or"});
    check_one(errors_of(divergent_shuffle_kernel, 1, 32, 0, (int*)out), Kind::divergence,
              {"16 threads (first: (0,0,0)) wait in a warp shuffle",
               "16 threads (first: (16,0,0)) wait in __syncthreads"});
    check_one(errors_of(foreign_mask_kernel, 1, 32, 0), Kind::divergence, {"0x0000ffff"});
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

TEST_CASE("run by the next test" * doctest::skip()) {
    Buffer<int> out(64);
    launch(write_race_kernel, 1, 64, 0, test_stream(), (int*)out);
    cudaCheck(cudaStreamSynchronize(test_stream()));
    MESSAGE("not reached");
}

TEST_CASE("unless a test asks for errors, the first one ends the process") {
    char self[4096] = {};
    REQUIRE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    FILE* pipe =
        popen(("'" + std::string(self) + "' -ns -tc='run by the next test' 2>&1 >/dev/null").c_str(), "r");
    REQUIRE(pipe);
    char line[2048] = {}, more[2];
    CHECK(fgets(line, sizeof line, pipe));
    CHECK(!fgets(more, sizeof more, pipe));
    int status = pclose(pipe);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 1);
    CHECK(std::string(line).starts_with("simt: thread ("));
}

// ----------------------------------------------------------------------------
// bfloat16

// Rounding looks at the lower half of a float only to compare it with one half, so these lower halves stand
// for all.
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
                // Away from zero the next bfloat16 is upper + 1; past the largest it stands for 2^128.
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
