// The wrappers of kernels/ptx_hopper.cuh against plain products and copies, on Hopper or the simulated
// device.
// devices: simt-bf16 cuda nocard
#include "kernels/ptx_hopper.cuh"
#include "kernels/tensor_map.cuh"
#include "test/support/simulated.h"
#include "test/support/testing.h"

namespace hopper {

using bf16 = __nv_bfloat16;

constexpr int warpgroup = 128, threads = 3 * warpgroup;  // three, so that registers can be reassigned

// An operand is a matrix (size, 64) of m or n by k, stored as is or transposed. It is copied to shared memory
// in panels as wide as the swizzle, which is the width of the map's box.
template <int size, Major major, int width>
struct Operand {
    static constexpr int rows = major == Major::k ? size : 64, columns = major == Major::k ? 64 : size;
    static constexpr int panel = rows * width, bytes = columns * 2 * rows;
    static constexpr Swizzle swizzle = width == 128  ? Swizzle::bytes_128
                                       : width == 64 ? Swizzle::bytes_64
                                                     : Swizzle::bytes_32;

    __device__ static void load(char* to, const CUtensorMap& map, Mbarrier* barrier) {
        for (int i = 0; i < columns * 2 / width; i++)
            copy_box(to + i * panel, map, i * width / 2, 0, 0, 0, barrier);
    }

    // The descriptor of the 16 values of k of one step.
    __device__ static uint64_t descriptor(const char* at, int step) {
        uint64_t whole = matrix_descriptor(at, swizzle, panel, 8 * width);
        if (major == Major::mn) return advance(whole, step * 16 * width);
        return advance(whole, step * 32 / width * panel + step * 32 % width);
    }

    static CUtensorMap map(const bf16* from) {
        size_t all = (size_t)rows * columns;
        return tensor_map(from,
                          {{columns, rows, 1, 1}, {(size_t)columns, all, all}, {width / 2, rows, 1, 1}});
    }
};

// out (64, N) = start + 2 A (64, 64) B (64, N), added in two passes. Thread 128 copies, the first warpgroup
// multiplies.
template <typename A, typename B, int N, bool a_registers, Major a_major, Major b_major>
__device__ void product(float* out, const float* start, const bf16* a, const CUtensorMap& a_map,
                        const CUtensorMap& b_map) {
    char* shared_a = swizzled_shared<char>();
    char* shared_b = shared_a + A::bytes;
    auto* full = (Mbarrier*)(shared_b + B::bytes);
    Mbarrier* empty = full + 1;
    int t = threadIdx.x;
    if (t == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 4);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (t >= warpgroup) {
        give_registers_up<24>();
        for (int round = 0; t == warpgroup && round < 2; round++) {
            mbarrier_wait(empty, 1 - round);
            mbarrier_arrive_expect(full, A::bytes + B::bytes);
            A::load(shared_a, a_map, full);
            B::load(shared_b, b_map, full);
        }
        return;
    }
    take_registers<240>();
    int row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    constexpr int steps = 64 / 16;
    uint32_t registers[steps][4];
    for (int k = 0; k < steps; k++)
        for (int i = 0; i < 4; i++) {
            const bf16* from = a + (row + i % 2 * 8) * 64 + k * 16 + pair + i / 2 * 8;
            registers[k][i] = __bfloat16_as_ushort(from[0]) | (uint32_t)__bfloat16_as_ushort(from[1]) << 16;
        }
    auto element = [&](int i) { return (row + i / 2 % 2 * 8) * N + i / 4 * 8 + pair + i % 2; };
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = start[element(i)];
    for (int round = 0; round < 2; round++) {
        mbarrier_wait(full, round);
        pin(d);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < steps; k++) {
            if constexpr (a_registers)
                wgmma<b_major>(d, registers[k], B::descriptor(shared_b, k), true);
            else
                wgmma<a_major, b_major>(d, A::descriptor(shared_a, k), B::descriptor(shared_b, k), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(d);
        if (t % 32 == 0) mbarrier_arrive(empty);
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) out[element(i)] = d[i];
}

template <int N, bool a_registers, Major a_major, Major b_major, int width>
__global__ void __launch_bounds__(threads, 1)
    product_kernel(float* out, const float* start, const bf16* a, const __grid_constant__ CUtensorMap a_map,
                   const __grid_constant__ CUtensorMap b_map) {
    using A = Operand<64, a_major, width>;
    using B = Operand<N, b_major, width>;
    if constexpr (is_hopper)
        product<A, B, N, a_registers, a_major, b_major>(out, start, a, a_map, b_map);
    else
        __trap();
}

template <int N, bool a_registers, Major a_major, Major b_major, int width>
void check_product() {
    CAPTURE(N);
    CAPTURE(a_registers);
    CAPTURE((int)a_major);
    CAPTURE((int)b_major);
    CAPTURE(width);
    using A = Operand<64, a_major, width>;
    using B = Operand<N, b_major, width>;
    auto a = random_values<bf16>("a", 64 * 64), b = random_values<bf16>("b", 64 * N);
    auto start = random_values<float>("start", 64 * N);
    std::vector<double> want(64 * N);
    for (int m = 0; m < 64; m++)
        for (int n = 0; n < N; n++) {
            double sum = 0;
            for (int k = 0; k < 64; k++)
                sum += (double)(float)a[a_major == Major::k ? m * 64 + k : k * 64 + m] *
                       (double)(float)b[b_major == Major::k ? n * 64 + k : k * N + n];
            want[m * N + n] = start[m * N + n] + 2 * sum;
        }
    Buffer<bf16> device_a(a), device_b(b);
    Buffer<float> device_start(start), out(64 * N);
    launch(product_kernel<N, a_registers, a_major, b_major, width>, 1, threads, A::bytes + B::bytes + 16,
           test_stream(), (float*)out, (float*)device_start, (bf16*)device_a, A::map(device_a),
           B::map(device_b));
    // tensor cores truncate below the last bit of a sum
    CHECK_CLOSE(out, want, simulated ? 1e-6 : 4e-6);
}

// Copies a box that extends beyond the tensor (5, 3, 7, 2) x 8 elements on every side: out (2, 4, 3, 64).
__global__ void box_kernel(bf16* out, const __grid_constant__ CUtensorMap map, int x, int y, int z, int w) {
    if constexpr (is_hopper) {
        bf16* shared = swizzled_shared<bf16>();
        auto* barrier = (Mbarrier*)(shared + 2 * 4 * 3 * 64);
        int t = threadIdx.x;
        if (t == 0) {
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect(barrier, 2 * 4 * 3 * 64 * 2);
            copy_box(shared, map, x, y, z, w, barrier);
        }
        __syncthreads();
        mbarrier_wait(barrier, 0);
        for (int i = t; i < 2 * 4 * 3 * 64; i += blockDim.x) {
            int row = i / 64, unit = i % 64 / 8;
            out[i] = shared[row * 64 + (unit ^ row % 8) * 8 + i % 8];
        }
    } else {
        __trap();
    }
}

// Blocks add to `sum` (blockDim.x * 4) in turn, the last one first; the first to do so stores instead.
__global__ void turns_kernel(float* sum, const float* values, unsigned* turn) {
    if constexpr (is_hopper) {
        float* shared = swizzled_shared<float>();
        int t = threadIdx.x, bytes = blockDim.x * 16;
        auto* barrier = (Mbarrier*)(shared + blockDim.x * 4);
        __shared__ unsigned ticket;
        if (t == 0) {
            ticket = atomicAdd(turn + 1, 1);
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
        }
        __syncthreads();
        const float* own = values + (gridDim.x - 1 - ticket) * blockDim.x * 4;
        if (t == 0) {
            mbarrier_arrive_expect(barrier, bytes);
            bulk_load(shared, own, bytes, barrier);
        }
        mbarrier_wait(barrier, 0);
        for (int i = 0; i < 4; i++) shared[t * 4 + i] *= 2;
        fence_async();
        if (t >= 32) {
            named_barrier_arrive(3, blockDim.x);
            return;
        }
        named_barrier_sync(3, blockDim.x);
        if (t == 0) {
            counter_wait(turn, ticket);
            fence_async_global();
            if (ticket == 0)
                bulk_store(sum, shared, bytes);
            else
                bulk_add(sum, shared, bytes);
            bulk_commit();
            bulk_wait<0>();
            fence_async_global();
            counter_set(turn, ticket + 1);
        }
    } else {
        __trap();
    }
}

// Other cards have none of these instructions.
bool on_hopper() {
    return device_properties().major == 9;
}

}  // namespace hopper

using namespace hopper;

TEST_CASE("products of a warpgroup, from shared memory in every layout and from registers") {
    if (!on_hopper()) SKIP("no card of Hopper's kind here");
    constexpr Major k = Major::k, mn = Major::mn;
    check_product<64, false, k, k, 128>();
    check_product<128, false, k, k, 128>();
    check_product<64, false, mn, mn, 128>();
    check_product<128, false, k, mn, 64>();
    check_product<128, false, mn, k, 32>();
    check_product<64, true, k, mn, 128>();
    check_product<96, true, k, mn, 64>();
    check_product<128, true, k, mn, 128>();
    check_product<128, true, k, k, 64>();
}

TEST_CASE("a box that lies partly outside of its tensor") {
    if (!on_hopper()) SKIP("no card of Hopper's kind here");
    constexpr int X = 40, Y = 3, Z = 7, W = 2;
    auto values = random_values<bf16>("values", X * Y * Z * W);
    Buffer<bf16> inp(values), out(2 * 4 * 3 * 64);
    CUtensorMap map = tensor_map(inp, {{X, Y, Z, W}, {X, X * Y, X * Y * Z}, {64, 3, 4, 2}});
    for (auto [x, y, z, w] : {std::array{0, 0, 0, 0}, {8, 1, 5, 1}, {-8, -1, -2, -1}}) {
        launch(box_kernel, 1, 64, 2 * 4 * 3 * 64 * 2 + 8, test_stream(), (bf16*)out, map, x, y, z, w);
        std::vector<double> want;
        for (int i = 0; i < 2 * 4 * 3 * 64; i++) {
            int at[4] = {x + i % 64, y + i / 64 % 3, z + i / 192 % 4, w + i / 768};
            bool inside = at[0] >= 0 && at[0] < X && at[1] >= 0 && at[1] < Y && at[2] >= 0 && at[2] < Z &&
                          at[3] >= 0 && at[3] < W;
            want.push_back(inside ? (float)values[((at[3] * Z + at[2]) * Y + at[1]) * X + at[0]] : 0.0f);
        }
        CHECK(out.doubles() == want);
    }
}

TEST_CASE("blocks take turns in adding to global memory") {
    if (!on_hopper()) SKIP("no card of Hopper's kind here");
    constexpr int blocks = 7, threads = 96;
    auto values = random_values<float>("values", blocks * threads * 4);
    Buffer<float> inp(values), sum(threads * 4);
    Buffer<unsigned> turn(std::vector<unsigned>{0, 0});
    launch(turns_kernel, blocks, threads, threads * 16 + 8, test_stream(), (float*)sum, (float*)inp,
           (unsigned*)turn);
    std::vector<double> want;
    for (int i = 0; i < threads * 4; i++) {
        float total = 2 * values[(blocks - 1) * threads * 4 + i];
        for (int b = blocks - 2; b >= 0; b--) total += 2 * values[b * threads * 4 + i];
        want.push_back(total);
    }
    CHECK(sum.doubles() == want);  // in this order, to the bit
}
