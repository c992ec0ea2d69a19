// Tests of the simulated device: reports kernels that misuse Hopper's instructions.
#include "kernels/ptx_hopper.cuh"
#include "test/simt/errors.h"

using simt::Kind;

// ----------------------------------------------------------------------------
// barriers and copies

namespace {

enum class Mistake {
    none,
    no_wait_for_full,
    no_wait_for_empty,
    early_arrival,
    more_bytes,
    other_phase,
    no_init,
    no_barrier_after_init
};

// Thread 0 copies in 512 bytes, three times; the threads of warps 1 and 2 read them.
template <Mistake mistake>
__global__ void pipeline_kernel(float* out, const float* inp) {
    float* buffer = dynamic_shared<float>();
    auto* full = (Mbarrier*)(buffer + 128);
    Mbarrier* empty = full + 1;
    int t = threadIdx.x, warp = t / 32;
    if (t == 0 && mistake != Mistake::no_init) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 2);
        fence_mbarrier_init();
    }
    if (mistake != Mistake::no_barrier_after_init) __syncthreads();
    for (int round = 0; round < 3; round++) {
        if (t == 0) {
            if (mistake != Mistake::no_wait_for_empty) mbarrier_wait(empty, round % 2 ^ 1);
            mbarrier_arrive_expect(full, mistake == Mistake::more_bytes ? 528 : 512);
            bulk_load(buffer, inp + round * 128, 512, full);
        } else if (warp == 1 || warp == 2) {
            if (mistake != Mistake::no_wait_for_full)
                mbarrier_wait(full, mistake == Mistake::other_phase ? 1 : round % 2);
            if (mistake == Mistake::early_arrival && t % 32 == 0) mbarrier_arrive(empty);
            __syncwarp();
            for (int i = t - 32; i < 128; i += 64) out[round * 128 + i] = buffer[i];
            __syncwarp();
            if (mistake != Mistake::early_arrival && t % 32 == 0) mbarrier_arrive(empty);
        }
    }
}

std::vector<simt::Error> pipeline_errors(void (*kernel)(float*, const float*)) {
    Buffer<float> inp(random_values<float>("values", 384)), out(384);
    return errors_of(kernel, 1, 96, 528, (float*)out, (float*)inp);
}

enum class Order { none, arrive_and_sync, other_count, one_missing };

// Warp 0 writes, warp 1 reads.
template <Order order>
__global__ void named_barrier_kernel(int* out) {
    __shared__ int values[32];
    int t = threadIdx.x;
    if (t < 32) {
        values[t] = t;
        if (order == Order::arrive_and_sync) named_barrier_arrive(2, 64);
        if (order == Order::other_count) named_barrier_arrive(2, 96);
    } else {
        if (order != Order::none) named_barrier_sync(2, 64);
        out[t - 32] = values[t - 32];
    }
}

template <bool fenced, bool waits>
__global__ void bulk_store_kernel(float* out) {
    float* values = dynamic_shared<float>();
    values[threadIdx.x] = threadIdx.x;
    if (fenced) fence_async();
    __syncthreads();
    if (threadIdx.x > 0) return;
    bulk_store(out, values, 128);
    bulk_commit();
    if (waits) bulk_wait_read<0>();
}

__global__ void unmade_map_kernel(const __grid_constant__ CUtensorMap map) {
    auto* barrier = swizzled_shared<Mbarrier>();
    mbarrier_init(barrier, 1);
    copy_box(swizzled_shared<char>() + 128, map, 0, 0, 0, 0, barrier);
}

__global__ void unfinished_copy_kernel(const float* inp) {
    float* values = dynamic_shared<float>();
    auto* barrier = (Mbarrier*)(values + 4);
    mbarrier_init(barrier, 1);
    mbarrier_arrive_expect(barrier, 16);
    bulk_load(values, inp, 16, barrier);
}

template <int registers>
__global__ void registers_kernel() {
    if (threadIdx.x < 128)
        give_registers_up<40>();
    else
        take_registers<registers>();
}

}  // namespace

TEST_CASE("roles that hand over a buffer in the wrong order are reported") {
    for (uint64_t seed = 1; seed <= 4; seed++) {
        simt::set_seed(seed);
        CHECK(pipeline_errors(pipeline_kernel<Mistake::none>).empty());
        for (auto kernel :
             {pipeline_kernel<Mistake::no_wait_for_full>, pipeline_kernel<Mistake::early_arrival>}) {
            auto errors = pipeline_errors(kernel);
            REQUIRE(errors.size() == 1);
            INFO(errors[0].text);
            CHECK((errors[0].kind == Kind::unwritten || errors[0].kind == Kind::race));
        }
        check_one(pipeline_errors(pipeline_kernel<Mistake::no_wait_for_empty>), Kind::misuse,
                  {"mbarrier_arrive more often"});
        check_one(pipeline_errors(pipeline_kernel<Mistake::more_bytes>), Kind::divergence,
                  {"wait in mbarrier_wait", "have ended"});
        CHECK(pipeline_errors(pipeline_kernel<Mistake::other_phase>).size() == 1);
    }
    simt::set_seed(1);
    check_one(pipeline_errors(pipeline_kernel<Mistake::no_init>), Kind::unwritten, {});
    CHECK(pipeline_errors(pipeline_kernel<Mistake::no_barrier_after_init>).size() == 1);
}

TEST_CASE("named barriers order what stands before them") {
    Buffer<int> out(32);
    auto errors = [&](auto kernel) { return errors_of(kernel, 1, 64, 0, (int*)out); };
    CHECK(errors(named_barrier_kernel<Order::arrive_and_sync>).empty());
    CHECK(errors(named_barrier_kernel<Order::none>).size() == 1);
    check_one(errors(named_barrier_kernel<Order::other_count>), Kind::misuse, {"named barrier 2"});
    check_one(errors(named_barrier_kernel<Order::one_missing>), Kind::divergence,
              {"wait in a named barrier"});
}

TEST_CASE("bulk copies that are not ordered, not made or not waited for are reported") {
    Buffer<float> out(32);
    auto errors = [&](auto kernel) { return errors_of(kernel, 1, 32, 128, (float*)out); };
    CHECK(errors(bulk_store_kernel<true, true>).empty());
    check_one(errors(bulk_store_kernel<false, true>), Kind::unfenced, {"did not fence_async"});
    check_one(errors(bulk_store_kernel<true, false>), Kind::misuse, {"ends while a bulk store"});
    check_one(errors_of(unmade_map_kernel, 1, 1, 1024, CUtensorMap{}), Kind::misuse, {"not made"});
    check_one(errors_of(unfinished_copy_kernel, 1, 1, 24, (float*)out), Kind::misuse,
              {"ends while a bulk copy"});
}

TEST_CASE("registers that nobody gave up are not to be had") {
    CHECK(errors_of(registers_kernel<240>, 1, 384, 0).size() == 1);  // for two warpgroups
    CHECK(errors_of(registers_kernel<232>, 1, 384, 0).empty());
    check_one(errors_of(registers_kernel<160>, 1, 384, 0), Kind::misuse, {"wrong way"});
}

TEST_CASE("tensor maps that the driver refuses") {
    Buffer<float> tensor(1024);
    auto encode = [&](void* at, uint64_t stride, uint32_t width) {
        alignas(64) CUtensorMap map;
        cuuint64_t size[2] = {32, 32}, strides[1] = {stride};
        cuuint32_t box[2] = {width, 8}, one[2] = {1, 1};
        return simt::encode_tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, at, size, strides, box, one,
                                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                       CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    float* at = tensor;
    CHECK(encode(at, 128, 32) == CUDA_SUCCESS);
    CHECK(encode(at + 1, 128, 32) == CUDA_ERROR_INVALID_VALUE);  // address
    CHECK(encode(at, 120, 32) == CUDA_ERROR_INVALID_VALUE);      // stride
    CHECK(encode(at, 128, 64) == CUDA_ERROR_INVALID_VALUE);      // wider than the swizzle
    CHECK(encode(at, 128, 30) == CUDA_ERROR_INVALID_VALUE);      // not whole 16-byte units
}

// ----------------------------------------------------------------------------
// products

namespace {

enum class Slip {
    none,
    no_fence,
    result_touched,
    a_touched,
    a_read,
    stored_without_fence,
    overwritten,
    start_in_second_row,
    no_swizzle,
    three_warps
};

// One warpgroup computes d = A B with A from registers and B from shared memory, where the threads stored it.
template <Slip slip>
__global__ void product_kernel(float* out) {
    auto* b = swizzled_shared<__nv_bfloat16>();
    int t = threadIdx.x;
    for (int i = t; i < 64 * 64; i += 128) b[i] = 1.0f;
    if (slip != Slip::stored_without_fence) fence_async();
    __syncthreads();
    if (slip == Slip::three_warps && t >= 96) return;
    uint64_t right =
        matrix_descriptor(b + (slip == Slip::start_in_second_row ? 64 : 0), Swizzle::bytes_128, 0, 1024);
    if (slip == Slip::no_swizzle) right &= ~(uint64_t(3) << 62);
    float d[32];
    uint32_t a[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};  // ones
    if (slip != Slip::no_fence) wgmma_fence();
    wgmma<Major::k>(d, a, right, false);
    wgmma_commit();
    if (slip == Slip::result_touched) d[3] *= 2;
    if (slip == Slip::a_touched) a[2] = 0;
    uint32_t seen = slip == Slip::a_read ? a[1] : 0;
    if (slip == Slip::overwritten && t == 40) b[0] = 2.0f;
    wgmma_wait<0>();
    if (slip == Slip::a_read) {
        __syncthreads();
        ((uint32_t*)b)[t] = seen;
        fence_async();
        __syncthreads();
        wgmma_fence();
        wgmma<Major::k>(d, a, right, true);
        wgmma_commit();
        wgmma_wait<0>();
    }
    for (int i = 0; i < 32; i++) out[t * 32 + i] = d[i] + a[2];
}

}  // namespace

TEST_CASE("products that are used wrongly are reported") {
    Buffer<float> out(128 * 32);
    auto errors = [&](auto kernel) { return errors_of(kernel, 1, 128, 64 * 64 * 2, (float*)out); };
    CHECK(errors(product_kernel<Slip::none>).empty());
    check_one(errors(product_kernel<Slip::no_fence>), Kind::misuse, {"without wgmma_fence"});
    check_one(errors(product_kernel<Slip::result_touched>), Kind::race, {"accumulator"});
    check_one(errors(product_kernel<Slip::a_touched>), Kind::race, {"registers of A"});
    check_one(errors(product_kernel<Slip::a_read>), Kind::race, {"what was read of registers"});
    check_one(errors(product_kernel<Slip::stored_without_fence>), Kind::unfenced,
              {"test_simt_hopper_errors.cu:"});
    auto overwritten = errors(product_kernel<Slip::overwritten>);
    REQUIRE(overwritten.size() == 1);
    CHECK((overwritten[0].kind == Kind::unfenced || overwritten[0].kind == Kind::race));
    check_one(errors(product_kernel<Slip::start_in_second_row>), Kind::misuse, {"descriptor"});
    check_one(errors(product_kernel<Slip::no_swizzle>), Kind::misuse, {"descriptor"});
    check_one(errors(product_kernel<Slip::three_warps>), Kind::divergence, {"96 threads", "wait in wgmma"});
}
