// Products of small matrices on the CPU, in fp32 and in bf16, against plain sums in double precision.
// devices: cpu address
#include "test/kernels/bf16_products.h"

namespace {

struct Sizes {
    int M, N, K;
};

// c += a b, computed in double precision.
std::vector<double> product(const Sizes& s, Elements a, const float* b, int ldb, std::vector<double> c) {
    for (int m = 0; m < s.M; m++)
        for (int n = 0; n < s.N; n++)
            for (int k = 0; k < s.K; k++)
                c[m * s.N + n] += (double)a.data[m * a.row + k * a.column] * b[k * ldb + n];
    return c;
}

// All numbers are representable in bf16, so that both modes multiply the same ones.
std::vector<float> numbers(const char* name, size_t size) {
    std::vector<float> values = random_values<float>(name, size);
    for (float& value : values) value = in_bf16(value);
    return values;
}

void check_products() {
    for (Sizes s : {Sizes{64, 64, 64},
                    {64, 64, 1},
                    {64, 64, 33},
                    {64, 16, 64},
                    {16, 48, 20},
                    {64, 256, 64},
                    {64, 64, 256},
                    {64, 64, 17}}) {
        for (bool across : {false, true}) {
            for (bool accumulate : {false, true}) {
                CAPTURE(s.M);
                CAPTURE(s.N);
                CAPTURE(s.K);
                CAPTURE(across);
                CAPTURE(accumulate);
                int lda = (across ? s.M : s.K) + 3, ldb = s.N + 5;
                std::vector<float> a = numbers("a", (size_t)(across ? s.K : s.M) * lda),
                                   b = numbers("b", (size_t)s.K * ldb);
                Elements left = across ? Elements{a.data(), 1, lda} : Elements{a.data(), lda, 1};
                std::vector<float> c(s.M * s.N, NAN);
                if (accumulate) c = random_values<float>("c", c.size());
                auto want = product(s, left, b.data(), ldb,
                                    accumulate ? to_doubles(c) : std::vector<double>(c.size()));
                TileOperand a_left(OperandSide::left, left, s.M, s.K),
                    b_right(OperandSide::right, {b.data(), ldb, 1}, s.K, s.N);
                tile_product(c.data(), s.N, a_left, b_right, s.M, s.N, s.K, accumulate);
                CHECK(relative_error(to_doubles(c), want) < 2e-6);
            }
        }
    }
}

}  // namespace

TEST_CASE("products of tiles are exact to the rounding of sums") {
    check_products();
}

TEST_CASE("and so they are in bf16, of operands that are") {
    if (!has_cpu_products_in_bf16()) SKIP("no products in bf16 on this processor");
    ProductsInBf16 mode;
    check_products();
}

TEST_CASE("in bf16 operands are rounded to the nearest, and what is not finite stays so") {
    if (!has_cpu_products_in_bf16()) SKIP("no products in bf16 on this processor");
    ProductsInBf16 mode;
    alignas(64) float a[16 * 16] = {}, b[16 * 16] = {}, c[16 * 16];
    a[0] = 1.0f + 3 * 0x1p-9f, a[16] = 1.0f + 0x1p-8f, a[32] = INFINITY, a[48] = NAN;  // the second is a tie
    b[0] = 1, b[1] = -1;
    TileOperand left(OperandSide::left, {a, 16, 1}, 16, 16), right(OperandSide::right, {b, 16, 1}, 16, 16);
    tile_product(c, 16, left, right, 16, 16, 16, false);
    CHECK(c[0] == 1.0f + 0x1p-7f);
    CHECK(c[1] == -1.0f - 0x1p-7f);
    CHECK(c[16] == 1.0f);
    CHECK(c[32] == INFINITY);
    CHECK(c[33] == -INFINITY);
    CHECK(std::isnan(c[48]));
}
