/*
fp8: every number of each format, rounding, and matrices that are quantized in both orientations.
*/
#include "test/support/simulated.h"
#include "test/support/testing.h"

#include "comm/memory.h"
#include "kernels/fp8_matmul.cuh"
#include "kernels/norm.cuh"
#include "kernels/rope.cuh"
#include "kernels/swiglu.cuh"

namespace {

float fp8_value(Fp8 format, uint8_t bits) {
    int fraction_bits = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15;
    int size = bits & 0x7f, infinite = format == Fp8::e4m3 ? 0x7f : 0x7c;
    float sign = bits & 0x80 ? -1.0f : 1.0f;
    if (size >= infinite) return format == Fp8::e5m2 && size == infinite ? sign * INFINITY : NAN;
    int exponent = std::max(size >> fraction_bits, 1), fraction = size - ((exponent - 1) << fraction_bits);
    return sign * std::ldexp((float)fraction, exponent - bias - fraction_bits);
}

constexpr Fp8 formats[] = {Fp8::e4m3, Fp8::e5m2};

struct Quantized {
    size_t rows, columns;
    Buffer<uint8_t> values, transposed;
    Buffer<float> scale{fp8_scale_floats};

    Quantized(Fp8 format, const std::vector<floatX>& inp, size_t rows, size_t columns, bool both = true)
        : rows(rows), columns(columns), values(rows * columns), transposed(rows * columns) {
        Buffer<floatX> device(inp);
        find_amax(scale, device, inp.size(), test_stream());
        fp8_quantize({values, both ? (uint8_t*)transposed : nullptr, scale}, format, device, rows, columns,
                     test_stream());
        cudaCheck(cudaStreamSynchronize(test_stream()));
    }
};

bool same(uint8_t a, uint8_t b) {
    return a == b || ((a & 0x7f) == 0x7f && (b & 0x7f) == 0x7f);  // NaN has no sign
}

}  // namespace

TEST_CASE("fp8: every number is its own nearest, and ties go to even") {
    for (Fp8 format : formats) {
        CAPTURE((int)format);
        int finite = format == Fp8::e4m3 ? 0x7f : 0x7c;
        float before = -1;
        for (int bits = 0; bits < finite; bits++) {
            CAPTURE(bits);
            float value = fp8_value(format, (uint8_t)bits);
            CHECK(value > before);
            CHECK(fp8_round(format, value) == bits);
            CHECK(fp8_round(format, -value) == (bits | 0x80));
            if (bits > 0) {
                float middle = (before + value) / 2;
                CHECK(fp8_round(format, middle) == (bits % 2 ? bits - 1 : bits));
                CHECK(fp8_round(format, std::nextafter(middle, INFINITY)) == bits);
                CHECK(fp8_round(format, std::nextafter(middle, -INFINITY)) == bits - 1);
            }
            before = value;
        }
        CHECK(before == fp8_largest(format));
        for (float large : {before * 1.01f, before * 1000, INFINITY})
            CHECK(fp8_round(format, large) == finite - 1);
        CHECK(std::isnan(fp8_value(format, fp8_round(format, NAN))));
    }
    CHECK(fp8_value(Fp8::e4m3, 0x08) == 0x1p-6f);
    CHECK(fp8_value(Fp8::e4m3, 0x01) == 0x1p-9f);
    CHECK(fp8_value(Fp8::e5m2, 0x01) == 0x1p-16f);
    CHECK(fp8_value(Fp8::e4m3, 0xb8) == -1);
}

TEST_CASE("fp8: a matrix and its transpose, as the specification has them") {
    struct Shape {
        size_t rows, columns;
    };
    for (auto [rows, columns] :
         {Shape{1, 1}, {1, 7}, {16, 16}, {33, 65}, {48, 80}, {64, 64}, {130, 96}, {160, 208}, {257, 3}}) {
        for (Fp8 format : formats) {
            CAPTURE(rows);
            CAPTURE(columns);
            CAPTURE((int)format);
            auto inp = random_values<floatX>("inp", rows * columns, 3e-5f);
            Quantized got(format, inp, rows, columns);
            std::vector<uint8_t> values(inp.size()), transposed(inp.size());
            float scale[fp8_scale_floats] = {amax_cpu(inp.data(), inp.size())};
            fp8_quantize_cpu({values.data(), transposed.data(), scale}, format, inp.data(), rows, columns);
            CHECK(got.values.host() == values);
            CHECK(got.transposed.host() == transposed);
            for (int i : {0, fp8_one_at}) CHECK(got.scale.host()[i] == scale[i]);
            // the largest element maps to the largest number, and all are as close as the format allows
            int bad = 0;
            double half_step = format == Fp8::e4m3 ? 1.0 / 16 : 1.0 / 8;
            for (size_t i = 0; i < inp.size(); i++) {
                double x = (double)(float)inp[i],
                       back = fp8_value(format, values[i]) * (double)scale[fp8_one_at];
                double smallest = fp8_value(format, 1) * (double)scale[fp8_one_at];
                bad += std::fabs(back - x) > 1.001 * (half_step * std::fabs(x) + smallest / 2);
            }
            CHECK(bad == 0);
            CHECK(scale[fp8_one_at] * fp8_largest(format) == doctest::Approx(scale[0]));
        }
    }
}

TEST_CASE("fp8: the largest element of what a kernel makes, NaN included") {
    for (int N : {1, 3, 70}) {
        for (int C : {8, 33, 264}) {
            CAPTURE(N);
            CAPTURE(C);
            auto inp = random_values<floatX>("inp", N * 2 * C),
                 dout = random_values<floatX>("dout", N * 2 * C);
            auto weight = random_values<floatX>("weight", C);
            Buffer<floatX> inp_(inp), dout_(dout), weight_(weight);
            Buffer<float> amax(1), rstd(N), mean(N), dweight(C), scratch(norm_backward_scratch(C));
            Buffer<float> angles(random_values<float>("angles", C));
            Buffer<int> positions(std::vector<int>(N, 0));
            auto check = [&](size_t size, auto&& make) {
                Buffer<floatX> out(size);
                make((floatX*)out);
                auto made = out.host();
                float is = amax_cpu(made.data(), size);
                CHECK(memcmp(amax.host().data(), &is, sizeof is) == 0);
            };
            auto check_all = [&] {
                check(N * C, [&](floatX* out) {
                    residual_norm_forward(Norm::layernorm, out, out, mean, rstd, inp_, dout_, weight_,
                                          nullptr, N, C, 1e-5f, test_stream(), amax);
                });
                check(N * C, [&](floatX* out) {
                    norm_forward(Norm::rmsnorm, out, nullptr, rstd, inp_, weight_, nullptr, N, C, 1e-5f,
                                 test_stream(), amax);
                });
                check(N * C, [&](floatX* dinp) {
                    copy_to_device<floatX>(dinp, dout.data(), N * C, test_stream());
                    norm_backward(Norm::rmsnorm, dinp, dweight, nullptr, scratch, dout_, inp_, weight_,
                                  nullptr, rstd, N, C, test_stream(), amax);
                });
                check(2 * N * C, [&](floatX* out) {  // one head is partly rotated, one not at all
                    copy_to_device<floatX>(out, inp.data(), inp.size(), test_stream());
                    rope_backward(out, {angles, positions, C / 4 * 2}, {N, 0, 1, C}, test_stream(), amax);
                });
                check(N * C, [&](floatX* out) { swiglu_forward(out, inp_, N, C, test_stream(), amax); });
                check(2 * N * C,
                      [&](floatX* out) { swiglu_backward(out, dout_, inp_, N, C, test_stream(), amax); });
                check(N * C,
                      [&](floatX* out) { gelu_forward(Gelu::tanh, out, inp_, N * C, test_stream(), amax); });
                check(N * C, [&](floatX* out) {
                    gelu_backward(Gelu::exact, out, dout_, inp_, N * C, test_stream(), amax);
                });
                check(N * C, [&](floatX* out) {
                    copy_to_device<floatX>(out, inp.data(), N * C, test_stream());
                    find_amax(amax, out, N * C, test_stream());
                });
            };
            check_all();
            inp[N * C / 2] = floatX(NAN);
            copy_to_device<floatX>(inp_, inp.data(), inp.size(), test_stream());
            check_all();
        }
    }
}

TEST_CASE("fp8: one copy alone") {
    auto inp = random_values<floatX>("inp", 32 * 48);
    Quantized both(Fp8::e4m3, inp, 32, 48), one(Fp8::e4m3, inp, 32, 48, false);
    CHECK(one.values.host() == both.values.host());
    for (uint8_t untouched : one.transposed.host()) CHECK(untouched == 0xff);
}

TEST_CASE("fp8: zeros, numbers that are hardly there, and numbers that are none") {
    for (size_t columns : {16, 17}) {
        for (Fp8 format : formats) {
            std::vector<floatX> inp(32 * columns, floatX(0.0f));
            for (uint8_t bits : Quantized(format, inp, 32, columns).values.host()) CHECK(bits == 0);
            inp[7] = floatX(1e-38f);
            Quantized tiny(format, inp, 32, columns);
            CHECK(std::isfinite(tiny.scale.host()[fp8_one_at]));
            CHECK((tiny.values.host()[7] & 0x7f) < 0x7c);

            inp[5] = floatX(1.0f), inp[9] = floatX(NAN);
            Quantized with_nan(format, inp, 32, columns);
            CHECK(std::isnan(with_nan.scale.host()[fp8_one_at]));
            CHECK(same(with_nan.values.host()[9], 0x7f));

            inp[9] = floatX(-INFINITY);
            Quantized infinite(format, inp, 32, columns);
            float one = infinite.scale.host()[fp8_one_at];
            CHECK_FALSE(std::isfinite(fp8_value(format, infinite.values.host()[9]) * one));
        }
    }
}

#ifndef DEVICE_CPU
namespace {

// Quantizes a matrix to fp8 and back, by the specification.
std::vector<double> through_fp8(Fp8 format, const std::vector<floatX>& inp) {
    std::vector<uint8_t> bits(inp.size());
    float scale[fp8_scale_floats] = {amax_cpu(inp.data(), inp.size())};
    fp8_quantize_cpu({bits.data(), nullptr, scale}, format, inp.data(), inp.size(), 1);
    std::vector<double> values;
    for (uint8_t b : bits) values.push_back((double)fp8_value(format, b) * scale[fp8_one_at]);
    return values;
}

// x (rows, inner) y (inner, columns); x or y may be given transposed.
std::vector<double> product(const std::vector<double>& x, bool x_transposed, const std::vector<double>& y,
                            bool y_transposed, int rows, int columns, int inner, std::vector<double> sum) {
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < columns; j++) {
            for (int k = 0; k < inner; k++) {
                sum[i * columns + j] += x[x_transposed ? k * rows + i : i * inner + k] *
                                        y[y_transposed ? j * inner + k : k * columns + j];
            }
        }
    }
    return sum;
}

}  // namespace

TEST_CASE("fp8: the products of a layer are those of its rounded matrices") {
    if (sizeof(floatX) == sizeof(float) || !multiplies_fp8(capability_of(device_properties())))
        SKIP("fp8 is refused here, by precision or card");
    const int N = 48, C = 80, OC = 112;
    auto inp = random_values<floatX>("inp", N * C), weight = random_values<floatX>("weight", OC * C, 0.02f),
         bias = random_values<floatX>("bias", OC), dout = random_values<floatX>("dout", N * OC, 1e-6f),
         other = random_values<floatX>("other", OC * C, 3.0f);
    auto x = through_fp8(Fp8::e4m3, inp), w = through_fp8(Fp8::e4m3, weight),
         dy = through_fp8(Fp8::e5m2, dout);
    Buffer<floatX> inp_(inp), other_(other), bias_(bias), dout_(dout), out(N * OC), dinp(N * C);
    Buffer<char> kept(Fp8Operand::bytes(N * C));
    auto x8 = Fp8Operand::in_memory(kept, N * C, false);
    auto before = random_values<float>("before", OC * C, 1e-6f);
    std::vector<double> biases(N * OC), zero(N * C);
    for (int i = 0; i < N * OC; i++) biases[i] = (double)(float)bias[i % OC];
    auto want = product(x, false, w, true, N, OC, C, biases);
    auto want_dinp = product(dy, false, w, false, N, C, OC, zero);
    auto want_dweight = product(dy, true, x, false, OC, C, N, to_doubles(before));
    CHECK(relative_error(want, product(to_doubles(inp), false, to_doubles(weight), true, N, OC, C, biases)) <
          0.05);

    for (bool keeps_weights : {true, false}) {
        CAPTURE(keeps_weights);
        Fp8Sizes sizes = {.weights = 2 * OC * C,
                          .matrices = 2,
                          .largest_weight = OC * C,
                          .keeps_weights = keeps_weights,
                          .rows = N,
                          .width = OC};
        Arena memory;
        BlockProducts products(memory, sizes, test_stream());
        Buffer<floatX> weight_(weight);
        products.forward(out, inp_, x8, weight_, bias_, N, C, OC);
        CHECK_CLOSE(out, want, tolerance<floatX>);
        products.forward(out, inp_, x8, other_, nullptr, N, C, OC);
        products.backward_input(dinp, dout_, {}, weight_, N, C, OC);
        CHECK_CLOSE(dinp, want_dinp, tolerance<floatX>);
        products.backward_input(dinp, dout_, {}, weight_, N, C, OC, true);
        auto twice = want_dinp;
        for (double& value : twice) value *= 2;
        CHECK_CLOSE(dinp, twice, 2 * tolerance<floatX>);

        for (bool part : {false, true}) {  // the transpose is from an earlier call, or made here
            if (part) products.backward_input(dinp, dout_, {}, weight_, N / 3, C, OC);
            Buffer<float> dweight(before);
            products.backward_weight(dweight, dout_, inp_, x8, N, C, OC);
            // tensor cores keep about 14 bits of a sum in fp8
            CHECK_CLOSE(dweight, want_dweight, simulated ? tolerance<float> : 1e-3);
            // without accumulation, a product overwrites the contents
            Buffer<float> overwritten(std::vector<float>(before.size(), NAN));
            products.backward_weight(overwritten, dout_, inp_, x8, N, C, OC, nullptr, nullptr, false);
            std::vector<double> product = want_dweight;
            for (size_t i = 0; i < product.size(); i++) product[i] -= before[i];
            CHECK_CLOSE(overwritten, product, simulated ? tolerance<float> : 1e-3);
        }

        // rows that arrive in parts are quantized part by part, and kept as one matrix
        for (int first = 0; first < N; first += N / 3) {
            products.forward((floatX*)out + first * OC, (floatX*)inp_ + first * C, x8, weight_, bias_, N / 3,
                             C, OC);
        }
        CHECK(relative_error(want, out.doubles()) < 0.05);
        cudaCheck(cudaMemsetAsync(kept, 0xff, Fp8Operand::bytes(N * C), test_stream()));
        products.keep_input(inp_, x8, N, C);
        Buffer<float> dweight(before);
        products.backward_weight(dweight, dout_, inp_, x8, N, C, OC);
        CHECK_CLOSE(dweight, want_dweight, simulated ? tolerance<float> : 1e-3);

        // kernels after the product compute the gradients of GELU and of the bias
        Buffer<floatX> dpre(N * C), dinp_alone(N * C);
        Buffer<float> dbias(std::vector<float>(OC, 1.0f)), amax(1), scratch(matmul_backward_bias_scratch(OC));
        products.backward_input(dinp_alone, dout_, {}, weight_, N, C, OC);
        gelu_backward(Gelu::tanh, dinp_alone, dinp_alone, inp_, N * C, test_stream());
        products.backward_gelu(Gelu::tanh, dpre, inp_, dout_, {}, weight_, N, C, OC, amax);
        CHECK(dpre.doubles() == dinp_alone.doubles());
        auto dpre_host = dpre.host();
        CHECK(amax.host()[0] == amax_cpu(dpre_host.data(), dpre_host.size()));
        copy_to_device<float>(dweight, before.data(), before.size(), test_stream());
        products.backward_weight(dweight, dout_, inp_, x8, N, C, OC, dbias, scratch);
        CHECK_CLOSE(dweight, want_dweight, simulated ? tolerance<float> : 1e-3);
        std::vector<double> want_dbias(OC, 1.0);
        for (int i = 0; i < N * OC; i++) want_dbias[i % OC] += (double)(float)dout[i];
        CHECK_CLOSE(dbias, want_dbias, tolerance<float>);

        // the copy of a weight stays as it is until weights_changed() is called
        products.forward(out, inp_, x8, weight_, nullptr, N, C, OC);
        auto old = out.doubles();
        copy_to_device<floatX>(weight_, other.data(), other.size(), test_stream());
        products.forward(out, inp_, x8, weight_, nullptr, N, C, OC);
        CHECK(out.doubles() == old);
        for (bool at_once : {false, true}) {
            products.weights_changed(at_once);
            products.begin_work();
            products.forward(out, inp_, x8, weight_, nullptr, N, C, OC);
            CHECK_CLOSE(
                out,
                product(x, false, through_fp8(Fp8::e4m3, other), true, N, OC, C, std::vector<double>(N * OC)),
                tolerance<floatX>);
        }
    }
}

TEST_CASE("fp8: gradients whose sums are fast") {
    if (sizeof(floatX) == sizeof(float) || !multiplies_fp8(capability_of(device_properties())))
        SKIP("fp8 is refused here, by precision or card");
    const int N = 1024, C = 16, OC = 16;
    auto inp = random_values<floatX>("inp", N * C), dout = random_values<floatX>("dout", N * OC);
    Buffer<floatX> inp_(inp), dout_(dout);
    Buffer<char> kept(Fp8Operand::bytes(N * C));
    auto x8 = Fp8Operand::in_memory(kept, N * C, false);
    auto want = product(through_fp8(Fp8::e5m2, dout), true, through_fp8(Fp8::e4m3, inp), false, OC, C, N,
                        std::vector<double>(OC * C));
    double error[2];
    for (bool fast : {false, true}) {
        Arena memory;
        BlockProducts products(memory,
                               {.weights = C * OC,
                                .matrices = 1,
                                .largest_weight = C * OC,
                                .fast_gradients = fast,
                                .rows = N,
                                .width = OC},
                               test_stream());
        products.keep_input(inp_, x8, N, C);
        Buffer<float> dweight(std::vector<float>(OC * C));
        products.backward_weight(dweight, dout_, inp_, x8, N, C, OC);
        error[fast] = relative_error(want, dweight.doubles());
    }
    CHECK(error[true] < 2e-3);
    CHECK(error[true] > error[false]);
}
#endif
