// QK-norm, with and without the rotation that follows, against a double-precision reference.
#include "test/support/testing.h"

#include <omp.h>

#include <complex>

#include "kernels/qk_norm.cuh"

using Doubles = std::vector<double>;

constexpr float eps = 1e-6f;

struct Reference {
    Doubles out, rstd;
    Doubles dinp, dqweight, dkweight;
};

constexpr float theta = 100.0f;

struct Layer {
    int N, NH, NKV, HS;
    int R = 0, T = 1;  // rotated elements of a head; positions of the table
    std::vector<int> positions = random_rows("positions", N, T);
    int heads = NH + 2 * NKV;
    size_t size = (size_t)N * heads * HS;
    std::vector<floatX> inp = random_values<floatX>("inp", size, 2.0f);
    std::vector<floatX> dout = random_values<floatX>("dout", size);
    std::vector<floatX> qweight = random_values<floatX>("qweight", HS, 0.5f, 1.0f);
    std::vector<floatX> kweight = random_values<floatX>("kweight", HS, 0.5f, 1.0f);
    std::vector<float> dqweight = random_values<float>("dqweight", HS);
    std::vector<float> dkweight = random_values<float>("dkweight", HS);

    // By the chain rule through the mean square. Weight gradients include their starting values.
    Reference reference() const { return reference(to_doubles(inp)); }

    // Rotates query and key heads, or rotates them back for direction -1.
    void rotate(Doubles& qkv, int direction) const {
        for (int n = 0; n < N; n++) {
            for (int h = 0; h < NH + NKV; h++) {
                double* x = &qkv[(size_t)(n * heads + h) * HS];
                for (int i = 0; i < R / 2; i++) {
                    double angle = direction * positions[n] * std::pow((double)theta, -2.0 * i / R);
                    auto turned = std::complex(x[i], x[i + R / 2]) * std::polar(1.0, angle);
                    x[i] = turned.real(), x[i + R / 2] = turned.imag();
                }
            }
        }
    }

    Reference reference(const Doubles& qkv) const {
        Reference ref{qkv, {}, to_doubles(dout), to_doubles(dqweight), to_doubles(dkweight)};
        rotate(ref.dinp, -1);
        for (int n = 0; n < N; n++) {
            for (int h = 0; h < NH + NKV; h++) {
                double* y = &ref.out[(size_t)(n * heads + h) * HS];
                double* dx = &ref.dinp[(size_t)(n * heads + h) * HS];
                Doubles x(y, y + HS), w = to_doubles(h < NH ? qweight : kweight);
                Doubles& dw = h < NH ? ref.dqweight : ref.dkweight;
                double mean_square = 0, dr = 0;
                for (int c = 0; c < HS; c++) mean_square += x[c] * x[c] / HS;
                double r = 1 / std::sqrt(mean_square + eps);
                ref.rstd.push_back(r);
                for (int c = 0; c < HS; c++) {
                    y[c] = x[c] * r * w[c];
                    dw[c] += dx[c] * x[c] * r;
                    dr += dx[c] * w[c] * x[c];
                }
                double dmean_square = -0.5 * r * r * r * dr;
                for (int c = 0; c < HS; c++) dx[c] = dx[c] * w[c] * r + dmean_square * 2 * x[c] / HS;
            }
        }
        rotate(ref.out, 1);
        return ref;
    }

    Reference run(bool in_place) const {
        Buffer<floatX> inp_(inp), dout_(dout), qweight_(qweight), kweight_(kweight), out_(size), dinp_(size);
        Buffer<float> rstd_(N * (NH + NKV)), dqweight_(dqweight), dkweight_(dkweight);
        Buffer<float> scratch_(qk_norm_backward_scratch(HS));
        Buffer<floatX>& target = in_place ? dout_ : dinp_;
        std::vector<float> angles((size_t)T * R);
        rope_table(angles.data(), T, R, theta, {});
        Buffer<float> table(angles);
        Buffer<int> positions_(positions);
        Rotation rope;
        if (R > 0) rope = {table, positions_, R};
        qk_norm_forward(out_, rstd_, inp_, qweight_, kweight_, rope, {N, NH, NKV, HS}, eps, test_stream());
        qk_norm_backward(target, dqweight_, dkweight_, scratch_, dout_, inp_, rstd_, qweight_, kweight_, rope,
                         {N, NH, NKV, HS}, test_stream());
        return {out_.doubles(), rstd_.doubles(), target.doubles(), dqweight_.doubles(), dkweight_.doubles()};
    }
};

TEST_CASE("qk_norm: forward and backward over shapes") {
    Layer layers[] = {
        {1, 1, 1, 1},
        {1, 2, 1, 7},
        {3, 3, 1, 33},
        {5, 4, 2, 64},
        {7, 2, 2, 128},
        {2, 3, 3, 264},
        {600, 6, 1, 8},
        {6, 4, 2, 64, 64, 3},
        {5, 16, 8, 128, 128, 5},
        {4, 3, 1, 33, 32, 2},
        {9, 2, 1, 96, 32, 9},
        {3, 2, 1, 40, 20, 3},
        {2, 3, 3, 264, 264, 2},
        {600, 3, 1, 16, 16, 300},
        {4, 3, 1, 32, 32, 500},
        {5, 2, 1, 16, 16, 90, {89, 0, 1, 89, 0}},
    };
    for (const Layer& layer : layers) {
        CAPTURE(layer.N);
        CAPTURE(layer.HS);
        CAPTURE(layer.R);
        Reference got = layer.run(false), want = layer.reference();
        CHECK(relative_error(got.out, want.out) < tolerance<floatX>);
        CHECK(relative_error(got.rstd, want.rstd) < tolerance<float>);
        CHECK(relative_error(got.dinp, want.dinp) < tolerance<floatX>);
        double summed = layer.R > 0 ? tolerance<floatX> : tolerance<float>;  // the summed terms are rounded
        CHECK(relative_error(got.dqweight, want.dqweight) < summed);
        CHECK(relative_error(got.dkweight, want.dkweight) < summed);

        Reference in_place = layer.run(true);
        CHECK(in_place.dinp == got.dinp);
        CHECK(in_place.dqweight == got.dqweight);
    }
}

TEST_CASE("qk_norm: value heads pass through unchanged, both ways") {
    Layer layer{4, 3, 2, 24, 16, 4};
    Reference got = layer.run(false);
    for (int n = 0; n < layer.N; n++) {
        size_t values = (size_t)(n * layer.heads + layer.NH + layer.NKV) * layer.HS;
        for (size_t i = values; i < values + layer.NKV * layer.HS; i++) {
            CHECK(got.out[i] == (double)(float)layer.inp[i]);
            CHECK(got.dinp[i] == (double)(float)layer.dout[i]);
        }
    }
}

TEST_CASE("qk_norm: the reference agrees with finite differences") {
    Layer layer{2, 2, 1, 6, 4, 2};
    Doubles dinp = layer.reference().dinp, dout = to_doubles(layer.dout), inp = to_doubles(layer.inp);
    for (size_t i = 0; i < layer.size; i++) {
        double h = 1e-5, kept = inp[i], loss[2] = {};
        for (int side = 0; side < 2; side++) {
            inp[i] = kept + (side ? h : -h);
            Doubles out = layer.reference(inp).out;
            for (size_t k = 0; k < out.size(); k++) loss[side] += out[k] * dout[k];
        }
        inp[i] = kept;
        CHECK((loss[1] - loss[0]) / (2 * h) == doctest::Approx(dinp[i]).epsilon(1e-6));
    }
}

TEST_CASE("qk_norm: the same bits on every run and for any number of threads") {
    Layer layer{300, 2, 1, 10};
    Reference first = layer.run(false);
    for (int threads : {1, 3}) {
        cudaCheck(cudaLaunchHostFunc(
            test_stream(), [](void* count) { omp_set_num_threads(*(int*)count); }, &threads));
        Reference again = layer.run(false);
        CHECK(again.out == first.out);
        CHECK(again.dinp == first.dinp);
        CHECK(again.dqweight == first.dqweight);
        CHECK(again.dkweight == first.dkweight);
    }
}
