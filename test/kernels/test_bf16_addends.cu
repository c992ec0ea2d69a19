#include "kernels/bf16_addends.cuh"
#include "test/support/testing.h"

namespace {

constexpr size_t sizes[] = {8, 16, 24, 248, 2048, 2056, 4096, 4104, 300'008};

// The neighbors of a bf16 value are the adjacent bit patterns, so no rounding is needed to find them.
bool is_nearest(float value, uint16_t rounded) {
    double distance = std::abs((double)bf16_to_float(rounded) - value);
    for (int step : {-1, 1}) {
        auto other = (uint16_t)(rounded + step);
        double there = std::abs((double)bf16_to_float(other) - value);
        if (there < distance || (there == distance && rounded % 2)) return false;
    }
    return true;
}

}  // namespace

TEST_CASE("addends are rounded to the nearest, ties to even") {
    for (size_t n : sizes) {
        CAPTURE(n);
        auto values = random_values<float>("values", n);
        values[1] = 1 + 0x1p-8f, values[2] = 1 + 0x3p-8f, values[3] = -(1 + 0x1p-8f);  // ties
        values[4] = 0, values[5] = 1e-30f, values[6] = -3e30f;
        Buffer<float> inp(values);
        Buffer<uint16_t> out(n);
        round_addends(out, inp, n, test_stream());
        auto got = out.host();
        size_t wrong = 0;
        for (size_t i = 0; i < n; i++) wrong += !is_nearest(values[i], got[i]);
        CHECK(wrong == 0);
        CHECK(bf16_to_float(got[1]) == 1);
        CHECK(bf16_to_float(got[2]) == 1 + 0x4p-8f);
    }
}

TEST_CASE("addends of all ranks but the own one are added in their order") {
    for (size_t n : sizes) {
        for (auto [ranks, own] : {std::pair(2, 0), {2, 1}, {3, 1}, {5, 4}, {8, 0}}) {
            CAPTURE(n);
            CAPTURE(ranks);
            CAPTURE(own);
            size_t stride = n + 16;
            auto values = random_values<float>("own", n),
                 of_ranks = random_values<float>("all", ranks * stride);
            std::vector<uint16_t> bits(ranks * stride);
            for (size_t i = 0; i < bits.size(); i++) bits[i] = float_to_bf16(of_ranks[i]);
            std::fill_n(bits.begin() + own * stride, stride, (uint16_t)0xffff);  // NaN: must not be read
            Buffer<float> out(values);
            Buffer<uint16_t> inp(bits);
            add_addends(out, {inp, stride, ranks, own}, n, test_stream());
            auto want = values;
            for (int rank = 0; rank < ranks; rank++) {
                for (size_t i = 0; i < n && rank != own; i++)
                    want[i] += bf16_to_float(bits[rank * stride + i]);
            }
            CHECK(out.host() == want);
            CHECK(inp.host() == bits);
        }
    }
}

TEST_CASE("sums are widened, and what is not finite stays so") {
    for (size_t n : sizes) {
        CAPTURE(n);
        auto values = random_values<float>("values", n);
        values[0] = INFINITY, values[1] = -INFINITY, values[2] = NAN, values[3] = 3.4e38f;  // beyond bf16
        Buffer<float> inp(values), out(n);
        Buffer<uint16_t> bits(n);
        round_addends(bits, inp, n, test_stream());
        widen_sum(out, bits, n, test_stream());
        auto got = out.host();
        CHECK(got[0] == INFINITY);
        CHECK(got[1] == -INFINITY);
        CHECK(std::isnan(got[2]));
        CHECK(got[3] == INFINITY);
        auto rounded = bits.host();
        for (size_t i = 4; i < n; i++) REQUIRE(got[i] == bf16_to_float(rounded[i]));
    }
}

TEST_CASE("no addends") {
    round_addends(nullptr, nullptr, 0, test_stream());
    add_addends(nullptr, {nullptr, 0, 2, 0}, 0, test_stream());
    widen_sum(nullptr, nullptr, 0, test_stream());
    CHECK(cudaStreamSynchronize(test_stream()) == cudaSuccess);
}
