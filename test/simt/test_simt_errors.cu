// Tests of the simulated device: kernels with a planted error are reported.
#include "test/simt/errors.h"

using simt::Kind;

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

// Different threads may write different bytes of a word; writing the same byte is a race.
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
                   "test_simt_errors.cu:"});
        check_one(errors_of(missing_barrier_before_read_kernel, 1, 256, 0, (int*)out), Kind::race,
                  {"static shared"});
        check_one(errors_of(missing_barrier_before_write_kernel, 1, 256, 1024, (int*)out), Kind::race,
                  {"dynamic shared"});
        check_one(errors_of(missing_syncwarp_kernel, 1, 32, 0, (int*)out), Kind::race, {});
        check_one(errors_of(warp_sync_between_warps_kernel, 1, 64, 0, (int*)out), Kind::race, {});
        check_one(errors_of(byte_race_kernel<true>, 1, 64, 0, (int*)out), Kind::race, {"1 bytes"});
        CHECK(errors_of(byte_race_kernel<false>, 1, 64, 0, (int*)out).empty());
        check_one(errors_of(atomics_kernel<true>, 1, 64, 0, (int*)out), Kind::race, {"test_simt_errors.cu:"});
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

// store() is for global memory; to_shared passes it shared memory instead.
template <bool to_shared>
__global__ void store_vector_kernel(float* out) {
    float* shared = dynamic_shared<float>();
    store(to_shared ? shared : out, Vec<float, 4>{});
}

}  // namespace

TEST_CASE("accesses outside of device memory are reported") {
    Buffer<int> buffer(100), out(1);
    int* data = buffer;
    CHECK(errors_of(store_kernel<int>, 1, 1, 0, data, 99).empty());
    check_one(errors_of(store_kernel<int>, 1, 1, 0, data, 100), Kind::out_of_bounds,
              {"writes 4 bytes", "store_kernel<int>", "test_simt_errors.cu:"});
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

TEST_CASE("vectors stored as if to device memory, but to shared memory, are reported") {
    Buffer<float> out(4);
    CHECK(errors_of(store_vector_kernel<false>, 1, 1, 64, (float*)out).empty());
    check_one(errors_of(store_vector_kernel<true>, 1, 1, 64, (float*)out), Kind::out_of_bounds,
              {"st.global needs an address in global memory", "test_simt_errors.cu:"});
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
// reads of unwritten memory

namespace {

__global__ void unwritten_static_kernel(int* out, int written) {
    __shared__ int values[64];
    if ((int)threadIdx.x < written) values[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

// The first block writes the value that the second one then finds.
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

// The buffer holds older values, which a GPU may also return.
__global__ void cp_async_over_old_values_kernel(float* out, const float* inp) {
    auto* values = dynamic_shared<Vec<float, 4>>();
    int t = threadIdx.x;
    values[t] = {};
    __syncthreads();
    cp_async_16(&values[t], inp + 4 * t);
    cp_async_commit();
    store(out + 4 * t, values[t]);
    cp_async_wait<0>();
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
    check_one(errors(cp_async_over_old_values_kernel), Kind::unwritten, {"before a cp.async of thread ("});
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
// without an Errors object

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
