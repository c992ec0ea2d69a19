// Rotary embedding against complex multiplication in double precision.
#include "test/support/testing.h"

#include <complex>

#include "kernels/rope.cuh"

using Doubles = std::vector<double>;

// N rows, each at a position of a table of T positions.
struct Shape {
    int N, T, NH, NKV, HS, R;
    std::vector<int> positions = random_rows("positions", N, T);
    int heads() const { return NH + 2 * NKV; }
    size_t size() const { return (size_t)N * heads() * HS; }
};

constexpr float theta = 10000.0f;

static Buffer<float> table_of(const Shape& s) {
    std::vector<float> table((size_t)s.T * s.R);
    rope_table(table.data(), s.T, s.R, theta, {});
    return Buffer<float>(table);
}

// A pair is a complex number, rotated by position * theta^(-2i/R); `direction` -1 rotates it back.
static Doubles reference(Doubles qkv, const Shape& s, int direction) {
    for (int row = 0; row < s.N; row++) {
        for (int h = 0; h < s.NH + s.NKV; h++) {
            double* x = &qkv[(size_t)(row * s.heads() + h) * s.HS];
            for (int i = 0; i < s.R / 2; i++) {
                double angle = direction * s.positions[row] * std::pow((double)theta, -2.0 * i / s.R);
                std::complex<double> turned = std::complex(x[i], x[i + s.R / 2]) * std::polar(1.0, angle);
                x[i] = turned.real();
                x[i + s.R / 2] = turned.imag();
            }
        }
    }
    return qkv;
}

TEST_CASE("rope: forward and backward over shapes") {
    Shape shapes[] = {
        {1, 1, 1, 1, 2, 2},
        {5, 5, 2, 1, 8, 8},
        {14, 7, 3, 1, 33, 16},
        {18, 9, 4, 2, 64, 64},
        {70, 70, 2, 2, 36, 24},
        {6, 3, 9, 3, 64, 32},
        {2, 2, 40, 8, 128, 128},
        {3, 300, 2, 1, 16, 16},
        {9, 9, 2, 2, 8, 8, {0, 1, 2, 0, 1, 2, 3, 4, 0}},
        {4, 100, 1, 1, 8, 8, {99, 99, 0, 98}},
    };
    for (const Shape& s : shapes) {
        CAPTURE(s.N);
        CAPTURE(s.T);
        CAPTURE(s.HS);
        CAPTURE(s.R);
        auto values = random_values<floatX>("qkv", s.size());
        Buffer<float> table = table_of(s);
        Buffer<int> positions(s.positions);
        Buffer<floatX> forward(values), backward(values);
        rope_forward(forward, {table, positions, s.R}, {s.N, s.NH, s.NKV, s.HS}, test_stream());
        rope_backward(backward, {table, positions, s.R}, {s.N, s.NH, s.NKV, s.HS}, test_stream());
        CHECK_CLOSE(forward, reference(to_doubles(values), s, 1), tolerance<floatX>);
        CHECK_CLOSE(backward, reference(to_doubles(values), s, -1), tolerance<floatX>);
    }
}

TEST_CASE("rope: value heads and elements beyond R keep their bits") {
    Shape s{6, 3, 2, 1, 24, 16};
    auto values = random_values<floatX>("qkv", s.size());
    Buffer<float> table = table_of(s);
    Buffer<int> positions(s.positions);
    Buffer<floatX> qkv(values);
    rope_forward(qkv, {table, positions, s.R}, {s.N, s.NH, s.NKV, s.HS}, test_stream());
    Doubles got = qkv.doubles(), before = to_doubles(values);
    for (size_t i = 0; i < s.size(); i++) {
        int head = (int)(i / s.HS % s.heads()), element = (int)(i % s.HS);
        if (head >= s.NH + s.NKV || element >= s.R) CHECK(got[i] == before[i]);
    }
}

TEST_CASE("rope: two runs give the same bits") {
    Shape s{22, 11, 3, 1, 40, 40};
    auto values = random_values<floatX>("qkv", s.size());
    Buffer<float> table = table_of(s);
    Buffer<int> positions(s.positions);
    Buffer<floatX> first(values), second(values);
    rope_forward(first, {table, positions, s.R}, {s.N, s.NH, s.NKV, s.HS}, test_stream());
    rope_forward(second, {table, positions, s.R}, {s.N, s.NH, s.NKV, s.HS}, test_stream());
    CHECK(first.doubles() == second.doubles());
}

TEST_CASE("rope: the table is exact at large positions") {
    constexpr int T = 40000, R = 4;
    std::vector<float> table((size_t)T * R);
    rope_table(table.data(), T, R, 500000.0f, {});
    for (int t : {0, 1, 12345, T - 1}) {
        for (int i = 0; i < R / 2; i++) {
            double angle = i == 0 ? t : t / std::sqrt(500000.0);
            CHECK(std::abs(table[t * R + 2 * i] - std::cos(angle)) < 1e-7);
            CHECK(std::abs(table[t * R + 2 * i + 1] - std::sin(angle)) < 1e-7);
        }
    }
}

TEST_CASE("rope: Llama 3.1 scaling") {
    constexpr int R = 128;
    RopeScaling scaling{.factor = 8, .low_frequency = 1, .high_frequency = 4, .original_context = 8192};
    int kept = 0, slowed = 0, between = 0;
    std::vector<float> table(2 * R);
    rope_table(table.data(), 2, R, 500000.0f, scaling);
    for (int i = 0; i < R / 2; i++) {
        double frequency = std::pow(500000.0, -2.0 * i / R);
        double wavelength = 2 * M_PI / frequency;
        double want = frequency;
        if (wavelength > 8192.0 / 1) {
            want = frequency / 8;
            slowed++;
        } else if (wavelength >= 8192.0 / 4) {
            double smooth = (8192.0 / wavelength - 1) / (4 - 1);
            want = (1 - smooth) * frequency / 8 + smooth * frequency;
            between++;
        } else {
            kept++;
        }
        double angle = std::atan2(table[R + 2 * i + 1], table[R + 2 * i]);  // the angle of position 1
        CHECK(angle == doctest::Approx(want).epsilon(1e-6));
    }
    CHECK(kept > 0);
    CHECK(slowed > 0);
    CHECK(between > 0);
}
