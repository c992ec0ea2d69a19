#include "kernels/known_numbers.cuh"
#include "kernels/matmul.cuh"
#include "test/support/testing.h"

TEST_CASE("known numbers are those of their formula, whatever their count") {
    for (size_t n : {1, 3, 4, 5, 1023, 4097}) {
        CAPTURE(n);
        Buffer<floatX> out(n + 1);
        known_numbers(out, 77, n, test_stream());
        std::vector<floatX> got = out.host();
        bool same = true;
        for (size_t i = 0; i < n; i++) {
            Random4 random = philox(77, i / 4);
            same &= (float)got[i] == (float)(random.at[i % 4] / (1u << 25)) - 64;
            same &= (float)got[i] == (float)known_number(77, i);
        }
        CHECK(same);
        CHECK(std::isnan((float)got[n]));  // nothing is written after them
    }
}

TEST_CASE("known numbers take all values from -64 to 63") {
    std::vector<int> seen(128);
    for (size_t i = 0; i < 10000; i++) seen.at((size_t)(known_number(5, i) + 64))++;
    CHECK(*std::ranges::min_element(seen) > 30);
    CHECK(*std::ranges::max_element(seen) < 160);
}

TEST_CASE("a product of known numbers is exact: the same as with integers") {
    constexpr int N = 96, C = 32, OC = 64;
    Buffer<floatX> inp((size_t)N * C), dout((size_t)N * OC);
    Buffer<float> out(std::vector<float>((size_t)OC * C, 0));
    known_numbers(inp, 1, (size_t)N * C, test_stream());
    known_numbers(dout, 2, (size_t)N * OC, test_stream());
    matmul_backward_weight(out, dout, inp, N, C, OC, test_stream());
    std::vector<float> want((size_t)OC * C);
    for (int o = 0; o < OC; o++) {
        for (int c = 0; c < C; c++) {
            long sum = 0;
            for (int n = 0; n < N; n++)
                sum += (long)known_number(2, (uint64_t)n * OC + o) * known_number(1, (uint64_t)n * C + c);
            want[(size_t)o * C + c] = (float)sum;
        }
    }
    CHECK(out.host() == want);
}
