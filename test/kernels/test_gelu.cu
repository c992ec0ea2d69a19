#include "kernels/gelu.cuh"
#include "kernels/swiglu.cuh"
#include "test/kernels/gelu_reference.h"
#include "test/support/testing.h"

static double silu_reference(double x) {
    return x / (1 + std::exp(-x));
}

static double silu_slope_reference(double x) {
    double h = 1e-5;
    return (silu_reference(x + h) - silu_reference(x - h)) / (2 * h);
}

TEST_CASE("gelu forward and backward") {
    for (Gelu form : {Gelu::tanh, Gelu::exact}) {
        for (size_t n : {1, 7, 8, 255, 1000, 4096, 20011}) {
            CAPTURE((int)form);
            CAPTURE(n);
            auto x = random_values<floatX>("x", n, 3.0f), d = random_values<floatX>("d", n);
            std::vector<double> want(n), want_d(n);
            for (size_t i = 0; i < n; i++) {
                want[i] = gelu_reference(form, float(x[i]));
                want_d[i] = gelu_slope_reference(form, float(x[i])) * float(d[i]);
            }
            Buffer<floatX> inp(x), dout(d), out(n), dinp(n), again(n);
            gelu_forward(form, out, inp, n, test_stream());
            gelu_backward(form, dinp, dout, inp, n, test_stream());
            gelu_backward(form, again, dout, inp, n, test_stream());
            CHECK_CLOSE(out, want, tolerance<floatX>);
            CHECK_CLOSE(dinp, want_d, tolerance<floatX>);
            CHECK(dinp.doubles() == again.doubles());

            gelu_backward(form, dout, dout, inp, n, test_stream());  // in place
            gelu_forward(form, inp, inp, n, test_stream());
            CHECK(dout.doubles() == dinp.doubles());
            CHECK(inp.doubles() == out.doubles());
        }
    }
}

TEST_CASE("gelu far from zero, and of NaN") {
    std::vector<float> x = {-60, -20, -9, -1e-20f, 0, 1e-20f, 9, 20, 60, 1e5f, -1e5f, NAN};
    for (Gelu form : {Gelu::tanh, Gelu::exact}) {
        Buffer<floatX> inp(x), dout(std::vector<float>(x.size(), 1.0f)), out(x.size()), dinp(x.size());
        gelu_forward(form, out, inp, x.size(), test_stream());
        gelu_backward(form, dinp, dout, inp, x.size(), test_stream());
        auto y = out.doubles(), slope = dinp.doubles(), rounded = inp.doubles();
        for (size_t i = 0; i + 1 < x.size(); i++) {
            CAPTURE(x[i]);
            double want = std::fabs(x[i]) < 1 ? x[i] / 2 : std::max(rounded[i], 0.0);
            double want_slope = std::fabs(x[i]) < 1 ? 0.5 : x[i] > 0;
            CHECK(y[i] == doctest::Approx(want).epsilon(tolerance<floatX>));
            CHECK(slope[i] == doctest::Approx(want_slope).epsilon(tolerance<floatX>));
        }
        CHECK(std::isnan(y.back()));
        CHECK(std::isnan(slope.back()));
    }
}

TEST_CASE("swiglu forward and backward") {
    for (auto [N, F] : {std::pair{1, 1}, {1, 8}, {3, 7}, {5, 24}, {4, 300}, {2, 2056}, {17, 129}}) {
        CAPTURE(N);
        CAPTURE(F);
        size_t size = (size_t)N * F;
        auto x = random_values<floatX>("x", 2 * size, 2.0f), d = random_values<floatX>("d", size);
        std::vector<double> want(size), want_d(2 * size);
        for (int n = 0; n < N; n++) {
            for (int f = 0; f < F; f++) {
                size_t g = (size_t)n * 2 * F + f, u = g + F, o = (size_t)n * F + f;
                double gate = float(x[g]), up = float(x[u]), dout = float(d[o]);
                want[o] = silu_reference(gate) * up;
                want_d[g] = dout * up * silu_slope_reference(gate);
                want_d[u] = dout * silu_reference(gate);
            }
        }
        Buffer<floatX> inp(x), dout(d), out(size), dinp(2 * size);
        swiglu_forward(out, inp, N, F, test_stream());
        swiglu_backward(dinp, dout, inp, N, F, test_stream());
        CHECK_CLOSE(out, want, tolerance<floatX>);
        CHECK_CLOSE(dinp, want_d, tolerance<floatX>);
        swiglu_backward(inp, dout, inp, N, F, test_stream(), nullptr, dout);  // in place
        CHECK(inp.doubles() == dinp.doubles());
        CHECK(dout.doubles() == out.doubles());  // recomputed
    }
}

TEST_CASE("swiglu far from zero, and of NaN") {
    Buffer<floatX> inp(std::vector<float>{-100, -1000, 100, NAN, 1, 2, 3, 4}), out(4), dinp(8);
    Buffer<floatX> dout(std::vector<float>(4, 1.0f));
    swiglu_forward(out, inp, 1, 4, test_stream());
    swiglu_backward(dinp, dout, inp, 1, 4, test_stream());
    auto y = out.doubles(), d = dinp.doubles();
    CHECK(y[0] == doctest::Approx(0));
    CHECK(y[1] == doctest::Approx(0));
    CHECK(y[2] == 300);
    CHECK(std::isnan(y[3]));
    CHECK(d[0] == doctest::Approx(0));
    CHECK(d[1] == doctest::Approx(0));
    CHECK(d[2] == 3);
    CHECK(d[6] == 100);
    CHECK(std::isnan(d[3]));
    CHECK(std::isnan(d[7]));
}
