// The sum over taps against a convolution in double precision, as a whole and in parts.
#include <climits>
#include <sys/mman.h>

#include "test/support/testing.h"

#include "kernels/causal_conv.cuh"

using Doubles = std::vector<double>;

struct Shape {
    int N, T, C;
    std::vector<int> doc_start = {};  // empty: each sequence is one document
    bool goes_on = false;             // the tokens before each sequence are given

    bool has_before(int row) const { return row % T > (doc_start.empty() ? 0 : doc_start[row]); }
};

// Start of each row's document. Lengths are used in turn, and a sequence's end cuts its last document.
static std::vector<int> documents(int N, int T, std::vector<int> lengths) {
    std::vector<int> starts;
    for (size_t at = 0; (int)starts.size() < N; at++) {
        int t = (int)starts.size() % T, length = std::min(lengths[at % lengths.size()], T - t);
        starts.insert(starts.end(), length, t);
    }
    return starts;
}

static const Shape shapes[] = {
    {1, 1, 1},
    {1, 1, 8, {}, true},
    {6, 3, 5},
    {7, 7, 64},
    {30, 10, 33, documents(30, 10, {1, 4, 2, 9})},
    {64, 32, 24, documents(64, 32, {5})},
    {8, 4, 3, documents(8, 4, {1})},
    {5, 1, 16, {}, true},
    {12, 4, 40, {}, true},
    {3, 3, 5000},
    {2000, 500, 12, documents(2000, 500, {77, 3})},
};

// Calls check(part) with all rows as one part, and with smaller parts.
template <typename Check>
static void in_parts(int N, Check&& check) {
    for (int part : {N, ceil_div(N, 2), 1}) {
        CAPTURE(part);
        if (part > 1 || N <= 64) check(part);
    }
}

TEST_CASE("tap sum forward over shapes, with a bias and without") {
    for (const Shape& s : shapes) {
        CAPTURE(s.N);
        CAPTURE(s.C);
        size_t size = (size_t)s.N * s.C, C = s.C;
        auto inp = random_values<floatX>("inp", 2 * size), bias = random_values<floatX>("bias", C),
             before = random_values<floatX>("before", s.N / s.T * C);
        Buffer<floatX> inp_device(inp), bias_device(bias), before_device(before);
        Buffer<int> starts(s.doc_start);
        ConvRows rows = {s.N, s.T, s.doc_start.empty() ? nullptr : (int*)starts,
                         s.goes_on ? (floatX*)before_device : nullptr};
        for (bool biased : {true, false}) {
            Doubles want(size);
            for (int row = 0; row < s.N; row++) {
                for (size_t c = 0; c < C; c++) {
                    double sum = float(inp[(row * 2 + 1) * C + c]) + (biased ? float(bias[c]) : 0.0);
                    if (s.has_before(row)) sum += float(inp[(row - 1) * 2 * C + c]);
                    if (s.goes_on && row % s.T == 0) sum += float(before[row / s.T * C + c]);
                    want[row * C + c] = sum;
                }
            }
            in_parts(s.N, [&](int part) {
                Buffer<floatX> out(size);
                for (int first = 0; first < s.N; first += part) {
                    causal_conv_forward(out, inp_device, biased ? (floatX*)bias_device : nullptr, rows, first,
                                        std::min(part, s.N - first), s.C, test_stream());
                }
                CHECK_CLOSE(out, want, tolerance<floatX>);
            });
        }
        CHECK(inp_device.doubles() == to_doubles(inp));
    }
}

// Nothing is summed, so every element is one of dout's, or zero.
TEST_CASE("tap sum backward over shapes") {
    for (const Shape& s : shapes) {
        if (s.goes_on) continue;
        CAPTURE(s.N);
        CAPTURE(s.C);
        size_t size = (size_t)s.N * s.C, C = s.C;
        auto dout = random_values<floatX>("dout", size);
        Buffer<floatX> dout_device(dout);
        Buffer<int> starts(s.doc_start);
        ConvRows rows = {s.N, s.T, s.doc_start.empty() ? nullptr : (int*)starts};
        Doubles want(2 * size);
        for (int row = 0; row < s.N; row++) {
            for (size_t c = 0; c < C; c++) {
                want[(row * 2 + 1) * C + c] = float(dout[row * C + c]);
                if (s.has_before(row)) want[(row - 1) * 2 * C + c] = float(dout[row * C + c]);
            }
        }
        in_parts(s.N, [&](int part) {
            Buffer<floatX> dinp(2 * size);
            for (int first = 0; first < s.N; first += part)
                causal_conv_backward(dinp, dout_device, rows, first, std::min(part, s.N - first), s.C,
                                     test_stream());
            CHECK(dinp.doubles() == want);
        });
    }
}

TEST_CASE("columns are copied to where they belong, and nothing else is written") {
    Buffer<floatX> to(std::vector<float>(20, -1)), from(random_values<floatX>("from", 12));
    copy_columns<floatX>(to + 2, 5, from + 1, 3, 2, 4, test_stream());
    auto got = to.doubles(), inp = from.doubles();
    for (int row = 0; row < 4; row++) {
        for (int c = 0; c < 5; c++) CHECK(got[row * 5 + c] == (c == 2 || c == 3 ? inp[row * 3 + c - 1] : -1));
    }
    // overlapping rows are refused, but a single row may have any width
    CHECK_THROWS_AS(copy_columns<floatX>(to, 5, from, 1, 2, 4, test_stream()), Error);
    cudaGetLastError();  // clears the error, which would persist
    copy_columns<floatX>(to, 0, from, 0, 5, 1, test_stream());
    CHECK(to.doubles()[4] == inp[4]);
}

#ifdef DEVICE_CPU
TEST_CASE("columns of rows that are further apart than CUDA allows") {
    const size_t apart = INT_MAX / sizeof(floatX) + 9, bytes = (apart + 2) * sizeof(floatX);
    void* sparse =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(sparse != MAP_FAILED);
    auto* from = (floatX*)sparse;
    from[0] = 1, from[1] = 2, from[apart] = 3, from[apart + 1] = 4;
    Buffer<floatX> to(4);
    copy_columns<floatX>(to, 2, from, apart, 2, 2, test_stream());
    CHECK(to.doubles() == std::vector<double>{1, 2, 3, 4});
    munmap(sparse, bytes);
}
#endif
