// Counter-based random numbers: the published words, the same on host and device, and their distribution.
// devices: cpu simt-bf16 cuda address nocard
#include "kernels/random.cuh"
#include "test/support/testing.h"

#include <algorithm>
#include <set>

static std::vector<uint32_t> words(Random4 random) {
    return {random.at, random.at + 4};
}

// kat_vectors of the Random123 distribution: philox4x32 with 10 rounds.
TEST_CASE("philox gives the published numbers") {
    using Words = std::vector<uint32_t>;
    CHECK(words(philox(0, 0, 0)) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    CHECK(words(philox(~0ull, ~0ull, ~0ull)) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    CHECK(words(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e)) ==
          Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("uniform numbers") {
    CHECK(random_uniform(0) == 0);
    CHECK(random_uniform(~0u) < 1);
    const int buckets = 64, n = 1 << 18;
    std::vector<int> count(buckets);
    for (int i = 0; i < n / 4; i++) {
        for (uint32_t bits : words(philox(random_key(1, "uniform"), i)))
            count[(int)(random_uniform(bits) * buckets)]++;
    }
    double expected = (double)n / buckets, chi_squared = 0;
    for (int c : count) chi_squared += (c - expected) * (c - expected) / expected;
    // Chi squared with 63 degrees of freedom: mean 63, standard deviation 11.2.
    CHECK(chi_squared > 63 - 4 * 11.2);
    CHECK(chi_squared < 63 + 4 * 11.2);
}

TEST_CASE("normal numbers") {
    const int n = 1 << 20;
    double moment[5] = {}, neighbours[4] = {}, last[4] = {};  // last: the four before x; a call makes four
    for (int i = 0; i < n; i++) {
        double x = random_normal(random_key(2, "normal"), i);
        for (int k = 1; k <= 4; k++) moment[k] += std::pow(x, k) / n;
        for (int k = 0; k < 4; k++) neighbours[k] += x * last[(i + 3 - k) % 4] / n;
        last[i % 4] = x;
    }
    // Bounds of four standard deviations: the variance of the mean of x^k is (E x^2k - (E x^k)^2) / n.
    CHECK(std::fabs(moment[1]) < 4 * std::sqrt(1.0 / n));
    CHECK(std::fabs(moment[2] - 1) < 4 * std::sqrt(2.0 / n));
    CHECK(std::fabs(moment[3]) < 4 * std::sqrt(15.0 / n));
    CHECK(std::fabs(moment[4] - 3) < 4 * std::sqrt(96.0 / n));
    for (double products : neighbours) CHECK(std::fabs(products) < 4 * std::sqrt(1.0 / n));
}

TEST_CASE("names and seeds give different keys, and the same ones the same key") {
    std::set<uint64_t> keys;
    for (uint64_t seed : {0, 1, 2, 1337}) {
        for (const char* name : {"", "a", "b", "ab", "ba", "wte", "wpe", "data order"})
            keys.insert(random_key(seed, name));
    }
    CHECK(keys.size() == 4 * 8);
    CHECK(random_key(7, "wte") == random_key(7, "wte"));
}

#ifndef DEVICE_CPU

__global__ void philox_kernel(uint32_t* bits, float* uniform, uint64_t key, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Random4 random = philox(key, (uint64_t)i << 30, i);
    for (int k = 0; k < 4; k++) {
        bits[4 * i + k] = random.at[k];
        uniform[4 * i + k] = random_uniform(random.at[k]);
    }
}

TEST_CASE("the device has the numbers of the host") {
    const int n = 1000;
    uint64_t key = random_key(3, "device");
    Buffer<uint32_t> bits(4 * n);
    Buffer<float> uniform(4 * n);
    launch(philox_kernel, ceil_div(n, 128), 128, 0, test_stream(), (uint32_t*)bits, (float*)uniform, key, n);
    std::vector<uint32_t> want;
    std::vector<float> want_uniform;
    for (int i = 0; i < n; i++) {
        for (uint32_t word : words(philox(key, (uint64_t)i << 30, i))) {
            want.push_back(word);
            want_uniform.push_back(random_uniform(word));
        }
    }
    CHECK(bits.host() == want);
    CHECK(uniform.host() == want_uniform);
}

#endif
