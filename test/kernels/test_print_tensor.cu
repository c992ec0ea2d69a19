#include "kernels/fill.cuh"
#include "kernels/print_tensor.cuh"
#include "test/support/testing.h"

TEST_CASE("a small tensor is shown whole, after the work that its stream was given") {
    Buffer<float> data(6);
    fill(data, 0.25f, 6, test_stream());
    fill(data + 4, -3, 1, test_stream());
    CHECK(tensor_text("out", (const float*)data, 2, 3, test_stream()) ==
          "out (2, 3): amax 3, 0 not finite\n"
          "        0.25        0.25        0.25\n"
          "        0.25          -3        0.25\n");
}

TEST_CASE("of a large one the corners are shown, and what is not finite is counted") {
    std::vector<float> values(8 * 9);
    for (size_t i = 0; i < values.size(); i++) values[i] = (float)i;
    values[4 * 9 + 4] = NAN;
    values[0] = INFINITY;
    CHECK(tensor_text("x", (const floatX*)Buffer<floatX>(values), 8, 9, test_stream()) ==
          "x (8, 9): amax 71, 2 not finite\n"
          "         inf           1           2   ...           6           7           8\n"
          "           9          10          11   ...          15          16          17\n"
          "          18          19          20   ...          24          25          26\n"
          "  ...\n"
          "          45          46          47   ...          51          52          53\n"
          "          54          55          56   ...          60          61          62\n"
          "          63          64          65   ...          69          70          71\n");
}

TEST_CASE("tokens") {
    CHECK(tensor_text("tokens", (const int*)Buffer<int>(std::vector<int>{7, 50256}), 1, 2, test_stream()) ==
          "tokens (1, 2): amax 50256, 0 not finite\n"
          "           7       50256\n");
}
