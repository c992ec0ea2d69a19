#include "kernels/accumulate.cuh"
#include "test/support/testing.h"

#include <utility>

namespace {

constexpr size_t margin = 9;  // elements around the arrays, which must not change

struct Part {
    size_t n, out_at, inp_at;  // out_at, inp_at: offsets at which the arrays begin
};

void check_part(const Part& part) {
    CAPTURE(part.n);
    CAPTURE(part.out_at);
    CAPTURE(part.inp_at);
    size_t size = part.n + part.out_at + part.inp_at + 2 * margin;
    auto out = random_values<float>("out", size), inp = random_values<float>("inp", size);
    Buffer<float> device_out(out), device_inp(inp);
    accumulate(device_out + part.out_at, device_inp + part.inp_at, part.n, test_stream());
    auto want = out;
    for (size_t i = 0; i < part.n; i++) want[part.out_at + i] += inp[part.inp_at + i];
    CHECK(device_out.host() == want);
    CHECK(device_inp.host() == inp);
}

}  // namespace

TEST_CASE("accumulate arrays of every size and alignment") {
    for (size_t n : {0, 1, 2, 3, 4, 5, 7, 8, 9, 255, 1023, 1024, 1025, 4099}) {
        for (size_t at : {0, 1, 2, 3}) check_part({n, at, at});
        for (auto [out_at, inp_at] : {std::pair(0, 1), {1, 0}, {2, 3}, {0, 4}, {7, 3}, {5, 2}}) {
            check_part({n, (size_t)out_at, (size_t)inp_at});
        }
    }
}

TEST_CASE("accumulate a large array") {
    check_part({300'001, 0, 0});
    check_part({300'000, 3, 3});
}

#ifndef DEVICE_CPU
TEST_CASE("vectors are moved whole only where all arrays allow it") {
    Buffer<float> a(16), b(16);
    Buffer<floatX> c(16);
    for (int at = 0; at < 8; at++) {
        CAPTURE(at);
        RaggedVectors alike = ragged_vectors(a + at, b + at, c + at);
        CHECK(alike.width == 4);
        CHECK(alike.skip == at % 4);
        CHECK(ragged_vectors(a + at, b + at + 4, c + at).width == 4);
        for (int off : {1, 2, 3}) {
            CHECK(ragged_vectors(a + at + off, b + at, c + at).width == 1);
            CHECK(ragged_vectors(a + at, b + at + off, c + at).width == 1);
            CHECK(ragged_vectors(a + at, b + at, c + at + off).width == 1);
            CHECK(ragged_vectors(a + at, b + at, c + at + off).skip == 0);
        }
    }
}
#endif

// Memory may end right after the arrays: nothing beyond them may be accessed.
TEST_CASE("accumulate at the end of memory") {
    for (size_t n : {1, 3, 4, 6, 1025}) {
        CAPTURE(n);
        auto values = random_values<float>("values", n);
        Buffer<float> out(values), inp(values);
        accumulate(out, inp, n, test_stream());
        auto got = out.host();
        for (size_t i = 0; i < n; i++) CHECK(got[i] == 2 * values[i]);
    }
}

TEST_CASE("accumulate nothing") {
    accumulate(nullptr, nullptr, 0, test_stream());
    CHECK(cudaStreamSynchronize(test_stream()) == cudaSuccess);
}

TEST_CASE("accumulate adds once for each call, in the order of the stream") {
    size_t n = 1000;
    Buffer<float> out(std::vector<float>(n, 1.0f)), inp(std::vector<float>(n, 0.5f));
    for (int i = 0; i < 10; i++) accumulate(out, inp, n, test_stream());
    CHECK(out.host() == std::vector<float>(n, 6.0f));
}

TEST_CASE("accumulate keeps NaN and Inf") {
    std::vector<float> values = {NAN, INFINITY, -INFINITY, 1e38f};
    Buffer<float> out(std::vector<float>(4, 3e38f)), inp(values);
    accumulate(out, inp, 4, test_stream());
    auto got = out.host();
    CHECK(std::isnan(got[0]));
    CHECK(got[1] == INFINITY);
    CHECK(got[2] == -INFINITY);
    CHECK(got[3] == INFINITY);
}
