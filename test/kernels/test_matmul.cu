#include "test/kernels/gelu_reference.h"
#include "test/support/simulated.h"
#include "test/kernels/bf16_products.h"
#include "test/support/testing.h"

#include "kernels/matmul.cuh"

namespace {

struct Shape {
    int N, C, OC;
};
const Shape shapes[] = {{1, 1, 1},    {1, 7, 5},      {3, 16, 8},     {33, 65, 17},
                        {64, 48, 80}, {130, 96, 200}, {300, 200, 264}};

// x (rows, inner) y (inner, columns), each read through a function of its indices, so that transposing needs
// no copy.
template <typename X, typename Y>
std::vector<double> product(int rows, int columns, int inner, X x, Y y) {
    std::vector<double> result((size_t)rows * columns);
    for (int row = 0; row < rows; row++) {
        for (int i = 0; i < inner; i++) {
            double factor = x(row, i);
            for (int column = 0; column < columns; column++)
                result[(size_t)row * columns + column] += factor * y(i, column);
        }
    }
    return result;
}

auto by_row(const std::vector<double>& matrix, int columns) {
    return [&matrix, columns](int i, int j) { return matrix[(size_t)i * columns + j]; };
}
auto transposed(const std::vector<double>& matrix, int columns) {
    return [&matrix, columns](int i, int j) { return matrix[(size_t)j * columns + i]; };
}

std::vector<double> gelu_reference(Gelu form, std::vector<double> values) {
    for (double& value : values) value = gelu_reference(form, value);
    return values;
}

// Random operands of one layer, and their products in double precision.
struct Layer {
    int N, C, OC;
    std::vector<floatX> inp, weight, bias, dout;
    Buffer<floatX> inp_device{inp}, weight_device{weight}, bias_device{bias}, dout_device{dout};

    explicit Layer(Shape shape)
        : N(shape.N),
          C(shape.C),
          OC(shape.OC),
          inp(random_values<floatX>("inp", (size_t)N * C)),
          weight(random_values<floatX>("weight", (size_t)OC * C)),
          bias(random_values<floatX>("bias", OC)),
          dout(random_values<floatX>("dout", (size_t)N * OC)) {}

    // inp weight^T + bias + before
    std::vector<double> forward(bool with_bias, const std::vector<double>& before = {}) const {
        auto x = to_doubles(inp), w = to_doubles(weight), b = to_doubles(bias);
        auto out = product(N, OC, C, by_row(x, C), transposed(w, C));
        for (size_t i = 0; i < out.size(); i++) {
            if (with_bias) out[i] += b[i % OC];
            if (!before.empty()) out[i] += before[i];
        }
        return out;
    }

    // gelu'(inp) dout weight
    std::vector<double> backward_gelu(Gelu form) const {
        auto dy = to_doubles(dout), w = to_doubles(weight);
        auto dpre = product(N, C, OC, by_row(dy, OC), by_row(w, C));
        for (size_t i = 0; i < dpre.size(); i++) dpre[i] *= gelu_slope_reference(form, (double)(float)inp[i]);
        return dpre;
    }

    // before + dout^T inp
    std::vector<double> backward_weight(const std::vector<float>& before) const {
        auto dy = to_doubles(dout), x = to_doubles(inp);
        auto dweight = product(OC, C, N, transposed(dy, OC), by_row(x, C));
        for (size_t i = 0; i < dweight.size(); i++) dweight[i] += before[i];
        return dweight;
    }

    // before + the column sums of dout
    std::vector<double> backward_bias(const std::vector<float>& before) const {
        auto dbias = to_doubles(before);
        for (size_t i = 0; i < dout.size(); i++) dbias[i % OC] += (double)(float)dout[i];
        return dbias;
    }
};

// Calls f(layer, N, C, OC) for all shapes.
template <typename F>
void each_layer(F&& f) {
    for (Shape shape : shapes) {
        CAPTURE(shape.N);
        CAPTURE(shape.C);
        CAPTURE(shape.OC);
        Layer layer(shape);
        f(layer, shape.N, shape.C, shape.OC);
    }
}

// The values, preceded by `offset` others.
std::vector<floatX> behind(const std::vector<floatX>& values, int offset) {
    std::vector<floatX> moved(values.size() + offset);
    std::copy(values.begin(), values.end(), moved.begin() + offset);
    return moved;
}

}  // namespace

TEST_CASE("matmul_forward") {
    each_layer([](Layer& layer, int N, int C, int OC) {
        auto before = random_values<floatX>("before", (size_t)N * OC);
        for (bool with_bias : {false, true}) {
            for (bool accumulate : {false, true}) {
                CAPTURE(with_bias);
                CAPTURE(accumulate);
                auto run = [&](Buffer<floatX>& out) {
                    matmul_forward(out, layer.inp_device, layer.weight_device,
                                   with_bias ? (floatX*)layer.bias_device : nullptr, N, C, OC, test_stream(),
                                   accumulate);
                };
                auto want = layer.forward(with_bias, accumulate ? to_doubles(before) : std::vector<double>{});
                Buffer<floatX> poisoned((size_t)N * OC), filled(before), again(before);
                Buffer<floatX>& out = accumulate ? filled : poisoned;
                run(out);
                run(again);
                CHECK_CLOSE(out, want, tolerance<floatX>);
                CHECK(out.doubles() == again.doubles());
            }
        }
    });
}

TEST_CASE("matmul_forward of operands that start anywhere") {
    int N = 9, C = 24, OC = 16;
    Layer layer({N, C, OC});
    for (int offset : {1, 2, 4, 8}) {
        CAPTURE(offset);
        Buffer<floatX> inp(behind(layer.inp, offset)), weight(behind(layer.weight, offset)),
            bias(behind(layer.bias, offset)), out((size_t)N * OC);
        matmul_forward(out, inp + offset, weight + offset, bias + offset, N, C, OC, test_stream());
        CHECK_CLOSE(out, layer.forward(true), tolerance<floatX>);
    }
}

TEST_CASE("matmul_gelu_forward") {
    each_layer([](Layer& layer, int N, int C, int OC) {
        for (bool with_bias : {false, true}) {
            for (Gelu form : {Gelu::tanh, Gelu::exact}) {
                CAPTURE(with_bias);
                CAPTURE((int)form);
                Buffer<floatX> out((size_t)N * OC), pre((size_t)N * OC);
                matmul_gelu_forward(form, out, pre, layer.inp_device, layer.weight_device,
                                    with_bias ? (floatX*)layer.bias_device : nullptr, N, C, OC,
                                    test_stream());
                auto want = layer.forward(with_bias);
                CHECK_CLOSE(pre, want, tolerance<floatX>);
                CHECK_CLOSE(out, gelu_reference(form, want), 2 * tolerance<floatX>);
            }
        }
    });
}

#ifdef DEVICE_CPU
TEST_CASE("products in bf16 are those of rounded operands, with sums in fp32") {
    if (!has_cpu_products_in_bf16()) SKIP("no products in bf16 on this processor");
    ProductsInBf16 mode;
    std::vector<Shape> all(std::begin(shapes), std::end(shapes));
    // more than one block in each dimension of each product
    for (Shape shape : {Shape{1, 768, 33}, {3100, 17, 9}, {4100, 9, 7}, {7, 4100, 5}, {9, 5, 4100}}) {
        all.push_back(shape);
    }
    for (Shape shape : all) {
        auto [N, C, OC] = shape;
        CAPTURE(N);
        CAPTURE(C);
        CAPTURE(OC);
        Layer layer(shape);  // the device keeps unrounded operands; the reference rounds them
        for (auto* operand : {&layer.inp, &layer.weight, &layer.dout})
            for (float& value : *operand) value = in_bf16(value);
        auto before = random_values<float>("before", (size_t)N * OC);
        for (bool accumulate : {false, true}) {
            Buffer<float> poisoned((size_t)N * OC), filled(before), again(before);
            Buffer<float>& out = accumulate ? filled : poisoned;
            auto want = layer.forward(true, accumulate ? to_doubles(before) : std::vector<double>{});
            for (Buffer<float>* result : {&out, &again}) {
                matmul_forward(*result, layer.inp_device, layer.weight_device, layer.bias_device, N, C, OC,
                               test_stream(), accumulate);
            }
            CHECK_CLOSE(out, want, tolerance<float>);
            CHECK(out.doubles() == again.doubles());
        }
        auto dinp_before = random_values<float>("before", (size_t)N * C);
        auto dinp_want =
            product(N, C, OC, by_row(to_doubles(layer.dout), OC), by_row(to_doubles(layer.weight), C));
        Buffer<float> dinp((size_t)N * C), dinp_sum(dinp_before);
        matmul_backward_input(dinp, layer.dout_device, layer.weight_device, N, C, OC, test_stream());
        matmul_backward_input(dinp_sum, layer.dout_device, layer.weight_device, N, C, OC, test_stream(),
                              true);
        CHECK_CLOSE(dinp, dinp_want, tolerance<float>);
        for (size_t i = 0; i < dinp_want.size(); i++) dinp_want[i] += dinp_before[i];
        CHECK_CLOSE(dinp_sum, dinp_want, tolerance<float>);

        auto dweight_before = random_values<float>("before", (size_t)OC * C);
        Buffer<float> dweight(dweight_before);
        matmul_backward_weight(dweight, layer.dout_device, layer.inp_device, N, C, OC, test_stream());
        CHECK_CLOSE(dweight, layer.backward_weight(dweight_before), tolerance<float>);
    }
}

TEST_CASE("products in bf16 keep what is not finite") {
    if (!has_cpu_products_in_bf16()) SKIP("no products in bf16 on this processor");
    ProductsInBf16 mode;
    int N = 5, C = 40, OC = 24;
    uint32_t bits = 0x7fffffff;  // a NaN that rounding by addition would turn into -0
    float nan;
    memcpy(&nan, &bits, sizeof nan);
    for (float bad : {nan, INFINITY}) {
        Layer layer({N, C, OC});
        layer.inp[2 * C + 7] = bad;
        Buffer<float> inp(layer.inp), out((size_t)N * OC);
        matmul_forward(out, inp, layer.weight_device, nullptr, N, C, OC, test_stream());
        auto values = out.host();
        for (int i = 0; i < N * OC; i++) CHECK(std::isfinite(values[i]) == (i / OC != 2));
    }
}
#else
TEST_CASE("products on two streams have a workspace each") {
    cudaStream_t other;
    cudaCheck(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    Workspaces& workspaces = cublas().workspaces;
    size_t bytes = workspaces.size_for(1);
    CHECK(workspaces.of_stream(other, bytes) != workspaces.of_stream(test_stream(), bytes));
    CHECK(workspaces.of_stream(other, bytes) == workspaces.of_stream(other, bytes));
    cudaCheck(cudaStreamDestroy(other));
}
#endif

TEST_CASE("matmul_backward_input") {
    each_layer([](Layer& layer, int N, int C, int OC) {
        auto dout = to_doubles(layer.dout), weight = to_doubles(layer.weight);
        auto want = product(N, C, OC, by_row(dout, OC), by_row(weight, C));
        Buffer<floatX> dinp((size_t)N * C);
        matmul_backward_input(dinp, layer.dout_device, layer.weight_device, N, C, OC, test_stream());
        CHECK_CLOSE(dinp, want, tolerance<floatX>);

        auto before = random_values<floatX>("before", (size_t)N * C);
        Buffer<floatX> sum(before), again(before);
        for (Buffer<floatX>* result : {&sum, &again}) {
            matmul_backward_input(*result, layer.dout_device, layer.weight_device, N, C, OC, test_stream(),
                                  true);
        }
        for (size_t i = 0; i < want.size(); i++) want[i] += (double)(float)before[i];
        CHECK_CLOSE(sum, want, tolerance<floatX>);
        CHECK(sum.doubles() == again.doubles());
    });
}

TEST_CASE("matmul_backward_weight") {
    each_layer([](Layer& layer, int N, int C, int OC) {
        auto before = random_values<float>("before", (size_t)OC * C);
        auto want = layer.backward_weight(before);
        Buffer<float> dweight(before), again(before);
        for (Buffer<float>* result : {&dweight, &again}) {
            matmul_backward_weight(*result, layer.dout_device, layer.inp_device, N, C, OC, test_stream());
        }
        CHECK_CLOSE(dweight, want, tolerance<float>);  // float in every build
        CHECK(dweight.doubles() == again.doubles());
        // without accumulation, a product overwrites the contents
        Buffer<float> poisoned(std::vector<float>((size_t)OC * C, NAN));
        matmul_backward_weight(poisoned, layer.dout_device, layer.inp_device, N, C, OC, test_stream(),
                               nullptr, nullptr, false);
        CHECK_CLOSE(poisoned, layer.backward_weight(std::vector<float>((size_t)OC * C)), tolerance<float>);
    });
}

TEST_CASE("matmul_backward_bias") {
    for (Shape shape :
         {Shape{1, 1, 1}, {1, 1, 5}, {63, 1, 8}, {64, 1, 257}, {130, 1, 96}, {1100, 1, 520}, {2300, 1, 33}}) {
        CAPTURE(shape.N);
        CAPTURE(shape.OC);
        Layer layer(shape);
        int N = shape.N, OC = shape.OC;
        auto before = random_values<float>("before", OC);
        Buffer<float> scratch(matmul_backward_bias_scratch(OC)), dbias(before), again(before);
        for (Buffer<float>* result : {&dbias, &again}) {
            matmul_backward_bias(*result, scratch, layer.dout_device, N, OC, test_stream());
        }
        CHECK_CLOSE(dbias, layer.backward_bias(before), tolerance<float>);
        CHECK(dbias.doubles() == again.doubles());
    }
}

TEST_CASE("matmul_backward_weight with the gradient of the bias") {
    each_layer([](Layer& layer, int N, int C, int OC) {
        auto before = random_values<float>("before", (size_t)OC * C),
             bias_before = random_values<float>("before", OC);
        Buffer<float> dweight(before), dbias(bias_before), scratch(matmul_backward_bias_scratch(OC));
        matmul_backward_weight(dweight, layer.dout_device, layer.inp_device, N, C, OC, test_stream(), dbias,
                               scratch);
        CHECK_CLOSE(dweight, layer.backward_weight(before), tolerance<float>);
        CHECK_CLOSE(dbias, layer.backward_bias(bias_before), tolerance<float>);
    });
}

TEST_CASE("matmul_backward_gelu") {
    each_layer([](Layer& layer, int N, int C, int OC) {
        for (Gelu form : {Gelu::tanh, Gelu::exact}) {
            CAPTURE((int)form);
            Buffer<floatX> dpre((size_t)N * C);
            matmul_backward_gelu(form, dpre, layer.inp_device, layer.dout_device, layer.weight_device, N, C,
                                 OC, test_stream());
            CHECK_CLOSE(dpre, layer.backward_gelu(form), 2 * tolerance<floatX>);
        }
    });
}

#ifndef DEVICE_CPU
namespace {

bool has_epilogue(const Product& product, const Operands& operands) {
    return !proposed_algorithms({product, operands}, find_plan(product, operands), 1,
                                cublas().workspaces.limits.front())
                .empty();
}

// Multiplies with the epilogue in the product, or as a kernel after it. Returns false if the library has no
// such epilogue.
bool multiply_one_way(bool unfused, const Product& product, const Operands& operands) {
    if (unfused) {
        multiply_unfused(product, operands, test_stream());
        return true;
    }
    if (!has_epilogue(product, operands)) {
        CHECK_FALSE(simulated);
        return false;
    }
    const ProductPlan& plan = find_plan(product, operands);
    cublasCheck(multiply_fused(product, plan, plan.algorithm, operands, test_stream()));
    return true;
}

}  // namespace

TEST_CASE("an epilogue in the product, and by a kernel behind it") {
    for (Shape shape : shapes) {
        for (bool unfused : {false, true}) {
            CAPTURE(shape.N);
            CAPTURE(shape.C);
            CAPTURE(shape.OC);
            CAPTURE(unfused);
            auto [N, C, OC] = shape;
            Layer layer(shape);
            Buffer<floatX> out((size_t)N * OC), pre((size_t)N * OC), dpre((size_t)N * C);
            if (OC % 8 == 0 &&
                multiply_one_way(
                    unfused, {.m = OC, .n = N, .k = C, .transpose_a = true, .epilogue = Epilogue::bias_gelu},
                    {.a = layer.weight_device,
                     .b = layer.inp_device,
                     .d = out,
                     .bias = layer.bias_device,
                     .pre_gelu = pre})) {
                CHECK_CLOSE(pre, layer.forward(true), tolerance<floatX>);
                CHECK_CLOSE(out, gelu_reference(Gelu::tanh, layer.forward(true)), 2 * tolerance<floatX>);
            }
            if (C % 8 == 0 &&
                multiply_one_way(unfused, {.m = C, .n = N, .k = OC, .epilogue = Epilogue::gelu_gradient},
                                 {.a = layer.weight_device,
                                  .b = layer.dout_device,
                                  .d = dpre,
                                  .pre_gelu = layer.inp_device})) {
                CHECK_CLOSE(dpre, layer.backward_gelu(Gelu::tanh), 2 * tolerance<floatX>);
                CHECK(layer.inp_device.doubles() == to_doubles(layer.inp));
            }
            auto before = random_values<float>("before", (size_t)OC * C),
                 bias_before = random_values<float>("bias before", OC);
            Buffer<float> dweight(before), dbias(bias_before), sums(matmul_backward_bias_scratch(OC));
            Buffer<float> dweight_again(before), dbias_again(bias_before);
            auto weight_product = [&](float* dweight, float* dbias) {
                return multiply_one_way(unfused,
                                        {.m = C,
                                         .n = OC,
                                         .k = N,
                                         .transpose_b = true,
                                         .accumulate = true,
                                         .epilogue = Epilogue::bias_gradient,
                                         .d_type = CUDA_R_32F},
                                        {.a = layer.inp_device,
                                         .b = layer.dout_device,
                                         .d = dweight,
                                         .dbias = dbias,
                                         .sums = sums});
            };
            if (weight_product(dweight, dbias)) {
                CHECK_CLOSE(dweight, layer.backward_weight(before), tolerance<float>);
                CHECK_CLOSE(dbias, layer.backward_bias(bias_before), tolerance<float>);
                weight_product(dweight_again, dbias_again);
                CHECK(dweight.doubles() == dweight_again.doubles());
                CHECK(dbias.doubles() == dbias_again.doubles());
            }
        }
    }
}

TEST_CASE("GELU's epilogues of operands that start anywhere") {
    int N = 9, C = 24, OC = 16;
    Layer layer({N, C, OC});
    for (int offset : {1, 2, 4, 8}) {
        CAPTURE(offset);
        Buffer<floatX> out((size_t)N * OC), pre((size_t)N * OC + offset), dpre((size_t)N * C),
            inp(behind(layer.inp, offset));
        matmul_gelu_forward(Gelu::tanh, out, pre + offset, layer.inp_device, layer.weight_device,
                            layer.bias_device, N, C, OC, test_stream());
        CHECK_CLOSE(out, gelu_reference(Gelu::tanh, layer.forward(true)), 2 * tolerance<floatX>);
        matmul_backward_gelu(Gelu::tanh, dpre, inp + offset, layer.dout_device, layer.weight_device, N, C, OC,
                             test_stream());
        CHECK_CLOSE(dpre, layer.backward_gelu(Gelu::tanh), 2 * tolerance<floatX>);
        if (simulated) {
            CHECK(has_epilogue({.m = C, .n = N, .k = OC, .epilogue = Epilogue::gelu_gradient},
                               {.a = layer.weight_device,
                                .b = layer.dout_device,
                                .d = dpre,
                                .pre_gelu = inp + offset}) == (offset * sizeof(floatX) % 16 == 0));
        }
    }
}

TEST_CASE("a library that is older than its card is refused") {
    cudaDeviceProp card = {};
    strcpy(card.name, "NVIDIA B200");
    card.major = 10;
    CHECK_THROWS_WITH(
        check_cublas_version(card, 120604),
        "cuBLASLt: version 120604 does not support NVIDIA B200; install the version of CUDA 12.8 or later");
    CHECK_NOTHROW(check_cublas_version(card, 120800));
    card.major = 9;
    CHECK_NOTHROW(check_cublas_version(card, 120604));
    CHECK_NOTHROW(check_cublas_version(device_properties()));
}
#endif

TEST_CASE("gemm_rate") {
    double rate = gemm_rate(192, test_stream());
    CHECK(std::isfinite(rate));
    CHECK(rate > 1e7);
}
