#include "kernels/norm.cuh"
#include "kernels/elementwise.cuh"
#include "test/support/testing.h"

// The sum, rounded once.
static std::vector<double> rounded_sum(const std::vector<floatX>& a, const std::vector<floatX>& b) {
    std::vector<double> sum(a.size());
    for (size_t i = 0; i < a.size(); i++) sum[i] = float(floatX(float((double)float(a[i]) + float(b[i]))));
    return sum;
}

TEST_CASE("residual of every size") {
    for (size_t n : {1, 3, 7, 8, 9, 255, 1000, 2048, 2049, 70'001}) {
        CAPTURE(n);
        auto a = random_values<floatX>("a", n), b = random_values<floatX>("b", n, 3.0f);
        auto want = rounded_sum(a, b);
        Buffer<floatX> inp1(a), inp2(b), out(n);
        residual_forward(out, inp1, inp2, n, test_stream());
        CHECK(out.doubles() == want);
        CHECK(inp1.doubles() == to_doubles(a));
        CHECK(inp2.doubles() == to_doubles(b));

        Buffer<floatX> in_place1(a), in_place2(b);
        residual_forward(in_place1, in_place1, inp2, n, test_stream());
        residual_forward(in_place2, inp1, in_place2, n, test_stream());
        CHECK(in_place1.doubles() == want);
        CHECK(in_place2.doubles() == want);
    }
}

TEST_CASE("residual of rows that begin anywhere, and only those") {
    const size_t size = 200;
    auto a = random_values<floatX>("a", size), b = random_values<floatX>("b", size),
         before = random_values<floatX>("before", size);
    Buffer<floatX> inp1(a), inp2(b);
    for (size_t n : {1, 5, 8, 64, 96}) {
        for (size_t at : {0, 1, 4, 8, 24}) {
            for (size_t apart : {0, 1, 2, 8}) {
                CAPTURE(n);
                CAPTURE(at);
                CAPTURE(apart);
                Buffer<floatX> out(before);
                residual_forward(out + at, inp1 + at + apart, inp2 + at, n, test_stream());
                auto want = to_doubles(before);
                for (size_t i = at; i < at + n; i++)
                    want[i] = float(floatX(float(a[i + apart]) + float(b[i])));
                CHECK(out.doubles() == want);
            }
        }
    }
}

#ifndef DEVICE_CPU
TEST_CASE("residual moves whole vectors only where the number and all three arrays allow it") {
    constexpr int W = vec_width<floatX>;
    Buffer<floatX> memory[3] = {Buffer<floatX>(2 * W), Buffer<floatX>(2 * W), Buffer<floatX>(2 * W)};
    const floatX *a = memory[0], *b = memory[1], *c = memory[2];
    CHECK(common_row(W, a, b, c) % W == 0);
    CHECK(common_row(W + 1, a, b, c) % W != 0);
    CHECK(common_row(W, a + 1, b, c) % W != 0);
    CHECK(common_row(W, a, b + 1, c) % W != 0);
    CHECK(common_row(W, a, b, c + 1) % W != 0);
}
#endif

TEST_CASE("residual has the bits of the sum before a norm") {
    for (auto [N, C] : {std::pair(5, 7), {4, 64}, {3, 257}, {2, 2056}}) {
        CAPTURE(C);
        size_t n = (size_t)N * C;
        Buffer<floatX> inp1(random_values<floatX>("inp1", n, 5.0f)), inp2(random_values<floatX>("inp2", n));
        Buffer<floatX> weight(random_values<floatX>("weight", C)), sum(n), norm(n), out(n);
        Buffer<float> rstd(N);
        residual_norm_forward(Norm::rmsnorm, sum, norm, nullptr, rstd, inp1, inp2, weight, nullptr, N, C,
                              1e-5f, test_stream());
        residual_forward(out, inp1, inp2, n, test_stream());
        CHECK(out.doubles() == sum.doubles());
    }
}

TEST_CASE("residual of nothing, NaN and Inf") {
    residual_forward(nullptr, nullptr, nullptr, 0, test_stream());
    CHECK(cudaStreamSynchronize(test_stream()) == cudaSuccess);

    Buffer<floatX> inp1(std::vector<float>{NAN, 1, INFINITY, INFINITY, -0.0f}),
        inp2(std::vector<float>{1, NAN, 1, -INFINITY, 0}), out(5);
    residual_forward(out, inp1, inp2, 5, test_stream());
    auto got = out.doubles();
    CHECK(std::isnan(got[0]));
    CHECK(std::isnan(got[1]));
    CHECK(got[2] == INFINITY);
    CHECK(std::isnan(got[3]));
    CHECK(got[4] == 0);
}
