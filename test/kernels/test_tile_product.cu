// Products of small matrices on the CPU, in fp32 and in bf16, against plain sums in double precision.
// devices: cpu address
#include "kernels/host_memory.h"
#include "kernels/tile_product.h"
#include "test/kernels/bf16_products.h"

namespace {

struct Sizes {
    int M, N, K;
};

// c += a b, computed in double precision.
std::vector<double> product(const Sizes& s, Elements a, Elements b, std::vector<double> c) {
    for (int m = 0; m < s.M; m++)
        for (int n = 0; n < s.N; n++)
            for (int k = 0; k < s.K; k++) c[m * s.N + n] += (double)*a.from(m, k).data * *b.from(k, n).data;
    return c;
}

// The memory that an operand asks for, full of NaN.
struct Room {
    KeptMemory<float> memory;
    float* of(int rows, int columns) {
        size_t size = round_up(rows, 32) * round_up(columns, 32) / (cpu_products_in_bf16 ? 2 : 1);
        return std::fill_n(memory.of(size), size, NAN) - size;
    }
};

// A matrix (rows, columns) by rows, or by columns.
Elements matrix(const std::vector<float>& values, int rows, int columns, bool by_columns) {
    return by_columns ? Elements{values.data(), 1, rows + 3} : Elements{values.data(), columns + 3, 1};
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
        for (int mode = 0; mode < 8; mode++) {
            const bool left_by_columns = mode & 1, right_by_columns = mode & 2, accumulate = mode & 4;
            CAPTURE(s.M);
            CAPTURE(s.N);
            CAPTURE(s.K);
            CAPTURE(mode);
            std::vector<float> a = numbers("a", (s.M + 3) * (s.K + 3)),
                               b = numbers("b", (s.K + 3) * (s.N + 3));
            Elements left = matrix(a, s.M, s.K, left_by_columns),
                     right = matrix(b, s.K, s.N, right_by_columns);
            std::vector<float> c(s.M * s.N, NAN);
            if (accumulate) c = random_values<float>("c", c.size());
            auto want = product(s, left, right, accumulate ? to_doubles(c) : std::vector<double>(c.size()));
            Room rooms[2];
            TileOperand a_left(OperandSide::left, left, s.M, s.K, rooms[0].of(s.M, s.K)),
                b_right(OperandSide::right, right, s.K, s.N, rooms[1].of(s.K, s.N));
            TileRegisters registers;
            tile_product(c.data(), s.N, a_left, b_right, s.M, s.N, s.K, accumulate);
            CHECK(relative_error(to_doubles(c), want) < 2e-6);
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
    Room rooms[2];
    TileOperand left(OperandSide::left, {a, 16, 1}, 16, 16, rooms[0].of(16, 16)),
        right(OperandSide::right, {b, 16, 1}, 16, 16, rooms[1].of(16, 16));
    TileRegisters registers;
    tile_product(c, 16, left, right, 16, 16, 16, false);
    CHECK(c[0] == 1.0f + 0x1p-7f);
    CHECK(c[1] == -1.0f - 0x1p-7f);
    CHECK(c[16] == 1.0f);
    CHECK(c[32] == INFINITY);
    CHECK(c[33] == -INFINITY);
    CHECK(std::isnan(c[48]));
}

#ifdef CPU_BF16_INSTRUCTIONS
TEST_CASE("dot products and the matrix unit multiply the same panels") {
    if (!has_matrix_unit()) SKIP("no matrix unit");
    ProductsInBf16 mode;
    for (int tiles : {1, 2, 7}) {
        const int inner = tiles * Bf16Tile::inner;
        std::vector<float> a = numbers("a", panel_lines * inner), b = numbers("b", panel_lines * inner);
        Room rooms[2];
        TileOperand left(OperandSide::left, {a.data(), inner, 1}, panel_lines, inner,
                         rooms[0].of(panel_lines, inner)),
            right(OperandSide::right, {b.data(), 1, inner}, inner, panel_lines,
                  rooms[1].of(inner, panel_lines));
        TileRegisters registers;
        for (bool accumulate : {false, true}) {
            std::vector<float> sums[2];
            for (auto& s : sums) s = random_values<float>("c", panel_lines * panel_lines);
            multiply_panels(sums[0].data(), panel_lines, left.panels.at(0, 0), right.panels.at(0, 0), tiles,
                            accumulate, {});
            multiply_panels_by_dots(sums[1].data(), panel_lines, left.panels.at(0, 0), right.panels.at(0, 0),
                                    tiles, accumulate);
            CHECK(relative_error(to_doubles(sums[1]), to_doubles(sums[0])) < 1e-6);
        }
    }
}
#endif
