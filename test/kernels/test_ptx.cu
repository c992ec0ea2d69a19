// The wrappers of kernels/ptx.cuh against a plain matrix product, on a GPU or the simulated one.
// devices: simt-bf16 cuda nocard
#include "test/support/testing.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int M = 16, N = 8, K = 16;

// The storage order of A and B.
enum class Layout { plain, transposed };

// One warp: out (M, N) = start (M, N) + A (M, K) @ B (K, N).
// plain: a is (M, K) and b is (N, K); transposed: a is (K, M) and b is (K, N).
template <Layout layout>
__global__ void mma_kernel(float* out, const bf16* a, const bf16* b, const float* start) {
    alignas(16) __shared__ bf16 tile_a[16 * 16], tile_b[16 * 8];
    int lane = threadIdx.x, row = lane % 8, quarter = lane / 8;
    store_shared(tile_a + lane * 8, load<8>(a + lane * 8));
    if (lane < 16) store_shared(tile_b + lane * 8, load<8>(b + lane * 8));
    __syncwarp();
    uint32_t fragment_a[4], fragment_b[2];
    if constexpr (layout == Layout::plain) {
        ldmatrix_x4(fragment_a, tile_a + (row + quarter % 2 * 8) * K + quarter / 2 * 8);
        ldmatrix_x2(fragment_b, tile_b + row * K + quarter % 2 * 8);
    } else {
        ldmatrix_x4_trans(fragment_a, tile_a + (row + quarter / 2 * 8) * M + quarter % 2 * 8);
        ldmatrix_x2_trans(fragment_b, tile_b + (row + quarter % 2 * 8) * N);
    }
    int group = lane / 4, pair = lane % 4 * 2;
    float d[4];
    for (int i = 0; i < 4; i++) d[i] = start[(group + i / 2 * 8) * N + pair + i % 2];
    mma_m16n8k16(d, fragment_a, fragment_b);
    for (int i = 0; i < 4; i++) out[(group + i / 2 * 8) * N + pair + i % 2] = d[i];
}

template <Layout layout>
void check_mma() {
    auto a = random_values<bf16>("a", M * K), b = random_values<bf16>("b", K * N);
    auto start = random_values<float>("start", M * N);
    std::vector<double> want(M * N);
    bool plain = layout == Layout::plain;
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) {
            double sum = start[m * N + n];
            for (int k = 0; k < K; k++) {
                float from_a = a[plain ? m * K + k : k * M + m], from_b = b[plain ? n * K + k : k * N + n];
                sum += (double)from_a * (double)from_b;
            }
            want[m * N + n] = sum;
        }
    }
    Buffer<bf16> device_a(a), device_b(b);
    Buffer<float> device_start(start), out(M * N);
    launch(mma_kernel<layout>, 1, 32, 0, test_stream(), (float*)out, (bf16*)device_a, (bf16*)device_b,
           (float*)device_start);
    CHECK_CLOSE(out, want, 1e-6);
}

// Doubles each 16-byte piece of inp, and writes zeros after the first `valid` pieces. Two pieces per thread
// are in flight at a time, and a thread uses what its neighbor copied.
__global__ void copy_kernel(float* out, const float* inp, int rounds, int valid) {
    auto* buffer = dynamic_shared<Vec<float, 4>>();  // (2, blockDim.x)
    int t = threadIdx.x, threads = blockDim.x, neighbour = (t + 1) % threads;
    auto fetch = [&](int round) {
        int piece = round * threads + t;
        if (piece < valid)
            cp_async_16(&buffer[round % 2 * threads + t], inp + piece * 4);
        else
            cp_async_16(&buffer[round % 2 * threads + t], inp, false);
        cp_async_commit();
    };
    fetch(0);
    for (int round = 0; round < rounds; round++) {
        if (round + 1 < rounds) fetch(round + 1);
        if (round + 1 < rounds)
            cp_async_wait<1>();
        else
            cp_async_wait<0>();
        __syncthreads();
        Vec<float, 4> piece = buffer[round % 2 * threads + neighbour];
        for (int i = 0; i < 4; i++) piece[i] *= 2;
        store(out + (round * threads + neighbour) * 4, piece);
        __syncthreads();
    }
}

// Writes 2^value for each value, then the value and its negative rounded to bf16; sum receives the total.
__global__ void arithmetic_kernel(float* powers, uint32_t* pairs, float* sum, const float* values) {
    int t = threadIdx.x;
    powers[t] = exp2_approx(values[t]);
    pairs[t] = bf16_pair(values[t], -values[t]);
    for (int turn = 0; turn < (int)blockDim.x; turn++) {
        if (turn == t) add_global(sum, values[t]);
        __syncthreads();
    }
}

}  // namespace

TEST_CASE("tensor-core products of fragments that ldmatrix loads") {
    check_mma<Layout::plain>();
    check_mma<Layout::transposed>();
}

TEST_CASE("asynchronous copies to shared memory") {
    constexpr int threads = 64, rounds = 5, valid = threads * rounds - 70;
    auto values = random_values<float>("values", threads * rounds * 4);
    Buffer<float> inp(values), out(values.size());
    launch(copy_kernel, 1, threads, 2 * threads * 16, test_stream(), (float*)out, (float*)inp, rounds, valid);
    std::vector<double> want;
    for (size_t i = 0; i < values.size(); i++) want.push_back(i < valid * 4 ? 2 * (double)values[i] : 0);
    CHECK(out.doubles() == want);
}

TEST_CASE("powers of two, pairs of bf16, sums in global memory") {
    auto values = random_values<float>("values", 62, 20.0f);
    values.insert(values.end(), {-200.0f, 0.0f});
    int size = (int)values.size();
    Buffer<float> inp(values), powers(size), sum(std::vector<float>{0.5f});
    Buffer<uint32_t> pairs(size);
    launch(arithmetic_kernel, 1, size, 0, test_stream(), (float*)powers, (uint32_t*)pairs, (float*)sum,
           (float*)inp);
    std::vector<float> got_powers = powers.host();
    std::vector<uint32_t> got_pairs = pairs.host();
    float total = 0.5f;
    for (int i = 0; i < size; i++) {
        CAPTURE(values[i]);
        CHECK(got_powers[i] == doctest::Approx(std::exp2((double)values[i])).epsilon(1e-6));
        bf16 pair[2];
        memcpy((void*)pair, &got_pairs[i], sizeof pair);
        CHECK(float(pair[0]) == float(bf16(values[i])));
        CHECK(float(pair[1]) == float(bf16(-values[i])));
        total += values[i];
    }
    CHECK(sum.host()[0] == total);
}
