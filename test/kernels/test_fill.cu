#include "kernels/fill.cuh"
#include "test/support/testing.h"

TEST_CASE("fill sets each element, and none before or behind them") {
    constexpr size_t margin = 3;
    for (size_t n : {1, 2, 255, 256, 257, 1000}) {
        CAPTURE(n);
        auto want = random_values<float>("out", n + 2 * margin);
        Buffer<float> out(want);
        fill(out + margin, 2.5f, n, test_stream());
        std::fill_n(want.begin() + margin, n, 2.5f);
        CHECK(out.host() == want);
    }
}

TEST_CASE("fill with NaN") {
    Buffer<float> out(std::vector<float>{1, 2});
    fill(out, NAN, 1, test_stream());
    CHECK(std::isnan(out.host()[0]));
    CHECK(out.host()[1] == 2);
}
