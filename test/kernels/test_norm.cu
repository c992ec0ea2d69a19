// LayerNorm and RMSNorm against a double-precision reference, which is itself checked by finite differences.
#include "test/support/testing.h"

#include <omp.h>

#include "kernels/norm.cuh"

using Doubles = std::vector<double>;

constexpr float eps = 1e-5f;

struct Reference {
    Doubles out, mean, rstd;
    Doubles dinp, dweight, dbias;
    Doubles dinp_column_sums = {};  // sums over the columns of norm_backward's output
};

static Reference reference_forward(Norm norm, const Doubles& inp, const Doubles& weight, const Doubles& bias,
                                   int N, int C) {
    Reference ref{Doubles(N * C), Doubles(N), Doubles(N), {}, {}, {}};
    for (int n = 0; n < N; n++) {
        const double* x = &inp[n * C];
        double variance = 0;
        if (norm == Norm::layernorm) {
            for (int c = 0; c < C; c++) ref.mean[n] += x[c] / C;
        }
        for (int c = 0; c < C; c++) variance += std::pow(x[c] - ref.mean[n], 2) / C;
        ref.rstd[n] = 1 / std::sqrt(variance + eps);
        for (int c = 0; c < C; c++) {
            ref.out[n * C + c] =
                (x[c] - ref.mean[n]) * ref.rstd[n] * weight[c] + (bias.empty() ? 0 : bias[c]);
        }
    }
    return ref;
}

// Computes only the gradients, those of sum(dout * out).
static void reference_backward(Reference& ref, Norm norm, const Doubles& dout, const Doubles& inp,
                               const Doubles& weight, int N, int C) {
    ref.dinp.assign(N * C, 0);
    ref.dweight.assign(C, 0);
    ref.dbias.assign(C, 0);
    for (int n = 0; n < N; n++) {
        double dmean = 0, drstd = 0, r = ref.rstd[n];
        for (int c = 0; c < C; c++) {
            double dy = dout[n * C + c], centred = inp[n * C + c] - ref.mean[n];
            ref.dweight[c] += dy * centred * r;
            ref.dbias[c] += dy;
            ref.dinp[n * C + c] = dy * weight[c] * r;
            dmean -= dy * weight[c] * r;
            drstd += dy * weight[c] * centred;
        }
        double dvariance = -0.5 * r * r * r * drstd;
        for (int c = 0; c < C; c++) {
            ref.dinp[n * C + c] += dvariance * 2 * (inp[n * C + c] - ref.mean[n]) / C;
            if (norm == Norm::layernorm) ref.dinp[n * C + c] += dmean / C;
        }
    }
}

static Doubles plus(Doubles a, const Doubles& b) {
    for (size_t i = 0; i < a.size(); i++) a[i] += b[i];
    return a;
}

// Inputs and outputs of one norm; the accumulating outputs start from random values.
struct Layer {
    Norm norm;
    bool biased;
    int N, C;
    std::vector<floatX> inp, weight, bias, dout, dinp;
    std::vector<float> dweight, dbias;

    Layer(Norm norm, bool biased, int N, int C, float scale = 1.5f, float shift = 0.5f)
        : norm(norm),
          biased(biased),
          N(N),
          C(C),
          inp(random_values<floatX>("inp", N * C, scale, shift)),
          weight(random_values<floatX>("weight", C, 0.5f, 1.0f)),
          bias(random_values<floatX>("bias", C)),
          dout(random_values<floatX>("dout", N * C)),
          dinp(random_values<floatX>("dinp", N * C)),
          dweight(random_values<float>("dweight", C)),
          dbias(random_values<float>("dbias", C)) {
        if (!biased) bias.clear();
    }

    Reference reference() const {
        Doubles x = to_doubles(inp), w = to_doubles(weight);
        Reference ref = reference_forward(norm, x, w, to_doubles(bias), N, C);
        reference_backward(ref, norm, to_doubles(dout), x, w, N, C);
        return ref;
    }

    Reference run(bool want_sums = true) const {
        Buffer<floatX> inp_(inp), weight_(weight), bias_(bias), dout_(dout), dinp_(dinp), out_(N * C);
        Buffer<float> mean_(N), rstd_(N), dweight_(dweight), dbias_(dbias), dinp_sums_(C),
            scratch_(norm_backward_scratch(C));
        bool centred = norm == Norm::layernorm;
        float *m = centred ? (float*)mean_ : nullptr, *db = biased ? (float*)dbias_ : nullptr;
        floatX* b = biased ? (floatX*)bias_ : nullptr;
        norm_forward(norm, out_, m, rstd_, inp_, weight_, b, N, C, eps, test_stream());
        norm_backward(norm, dinp_, dweight_, db, scratch_, dout_, inp_, weight_, m, rstd_, N, C,
                      test_stream(), nullptr, want_sums ? (float*)dinp_sums_ : nullptr);
        return {out_.doubles(),
                centred ? mean_.doubles() : Doubles(N),
                rstd_.doubles(),
                dinp_.doubles(),
                dweight_.doubles(),
                dbias_.doubles(),
                want_sums ? dinp_sums_.doubles() : Doubles()};
    }

    void check(double limit = tolerance<float>) const {
        double rounded = std::max(limit, tolerance<floatX>);
        Reference got = run(), want = reference();
        CHECK(relative_error(got.out, want.out) < rounded);
        if (norm == Norm::layernorm) CHECK(relative_error(got.mean, want.mean) < limit);
        CHECK(relative_error(got.rstd, want.rstd) < limit);
        CHECK(relative_error(got.dinp, plus(want.dinp, to_doubles(dinp))) < rounded);
        CHECK(relative_error(got.dweight, plus(want.dweight, to_doubles(dweight))) < limit);
        if (biased)
            CHECK(relative_error(got.dbias, plus(want.dbias, to_doubles(dbias))) < limit);
        else
            CHECK(got.dbias == to_doubles(dbias));
        Doubles sums(C);
        for (int i = 0; i < N * C; i++) sums[i % C] += got.dinp[i];
        CHECK(relative_error(got.dinp_column_sums, sums) < tolerance<float>);
        Reference without = run(false);
        CHECK(without.dinp == got.dinp);
        CHECK(without.dweight == got.dweight);
        CHECK(without.dbias == got.dbias);
    }
};

static void for_each_kind(void (*check)(Norm, bool)) {
    check(Norm::layernorm, true);
    check(Norm::layernorm, false);
    check(Norm::rmsnorm, false);
}

TEST_CASE("norm: forward and backward over shapes") {
    for_each_kind([](Norm norm, bool biased) {
        CAPTURE((int)norm);
        CAPTURE(biased);
        struct {
            int N, C;
        } shapes[] = {{1, 2},     {1, 7},     {3, 33},   {5, 64},   {37, 40},  {50, 384},
                      {1100, 24}, {600, 264}, {2, 6152}, {2, 2051}, {3, 8200}, {2, 16384}};
        for (auto [N, C] : shapes) {
            CAPTURE(N);
            CAPTURE(C);
            Layer(norm, biased, N, C).check();
        }
    });
}

// A block processes 16 short rows at a time, and there are as many blocks as partial sums, so the last rows
// need a second round. Rows of 1030 exceed what a block's threads process at once.
TEST_CASE("norm: more rows than blocks do at once") {
    Layer(Norm::layernorm, true, 16 * norm_partials(7) + 100, 7).check();
    Layer(Norm::rmsnorm, false, 2 * 16 * norm_partials(7) + 5, 7).check();
    Layer(Norm::layernorm, true, 16 * norm_partials(24) + 100, 24).check();
    Layer(Norm::layernorm, true, norm_partials(1030) + 1, 1030).check();
}

// Blocks do equal work, and a card runs `slots` of them at once. A full wave uses all of the memory
// bandwidth; one that fills a fraction of the slots uses at most 1.5 times that fraction of it.
TEST_CASE("norm: the last turn of the backward pass's blocks costs no card more than a third") {
    auto seconds = [](int blocks, int slots) {
        int last = blocks % slots;
        double rate = std::min(1.5 * last / slots, 1.0);
        return (blocks / slots * slots + (last ? last / rate : 0)) / blocks;
    };
    for (int C : {768, 1600, 4096, 5120, 8192, 12288}) {
        NormBackwardBlocks blocks(1 << 16, C, C / 8);
        int beside[] = {132, 116, 124, 108, 114, 128, 148, 170};  // SMs, some less those that NCCL uses
        for (int multiprocessors : beside) {
            int slots =
                blocks.threads * blocks.rows > norm_threads / 2 ? multiprocessors : 2 * multiprocessors;
            CAPTURE(C);
            CAPTURE(slots);
            CHECK(seconds(blocks.count, slots) < 1.34);
        }
    }
    CHECK(seconds(264, 2 * 116) > 1.4);  // a grid for all SMs of an H100
}

TEST_CASE("norm: a large mean does not cancel the variance, and eps counts where the variance is small") {
    Layer(Norm::layernorm, true, 8, 768, 1.0f, 1000.0f).check(1e-3);
    Layer(Norm::layernorm, true, 8, 96, 1e-3f, 0.0f).check();
    Layer(Norm::rmsnorm, false, 8, 96, 1e-3f, 0.0f).check();
}

TEST_CASE("norm: the reference agrees with finite differences") {
    for_each_kind([](Norm norm, bool biased) {
        Layer layer(norm, biased, 2, 9);
        Reference ref = layer.reference();
        Doubles inp = to_doubles(layer.inp), weight = to_doubles(layer.weight), dout = to_doubles(layer.dout);
        auto slope = [&](double& at) {
            double h = 1e-5, kept = at, loss[2] = {};
            for (int side = 0; side < 2; side++) {
                at = kept + (side ? h : -h);
                Doubles out = reference_forward(norm, inp, weight, {}, layer.N, layer.C).out;
                for (size_t i = 0; i < out.size(); i++) loss[side] += out[i] * dout[i];
            }
            at = kept;
            return (loss[1] - loss[0]) / (2 * h);
        };
        for (size_t i = 0; i < inp.size(); i++)
            CHECK(slope(inp[i]) == doctest::Approx(ref.dinp[i]).epsilon(1e-6));
        for (int c = 0; c < layer.C; c++)
            CHECK(slope(weight[c]) == doctest::Approx(ref.dweight[c]).epsilon(1e-6));
    });
}

TEST_CASE("norm: fused with the residual addition, bit for bit the addition and then the norm") {
    for_each_kind([](Norm norm, bool biased) {
        struct {
            int N, C;
        } shapes[] = {{1, 5}, {9, 33}, {6, 768}};
        for (auto [N, C] : shapes) {
            CAPTURE(N);
            CAPTURE(C);
            auto a = random_values<floatX>("a", N * C), b = random_values<floatX>("b", N * C), sum = a;
            for (int i = 0; i < N * C; i++) sum[i] = floatX((float)a[i] + (float)b[i]);

            Layer layer(norm, biased, N, C);
            layer.inp = sum;
            Reference want = layer.run();

            for (bool in_place : {false, true}) {
                Buffer<floatX> inp1(a), inp2(b), weight(layer.weight), bias(layer.bias), residual(N * C),
                    out(N * C);
                Buffer<float> mean(N), rstd(N);
                Buffer<floatX>& target = in_place ? inp1 : residual;
                bool centred = norm == Norm::layernorm;
                residual_norm_forward(norm, target, out, centred ? (float*)mean : nullptr, rstd, inp1, inp2,
                                      weight, biased ? (floatX*)bias : nullptr, N, C, eps, test_stream());
                CHECK(target.doubles() == to_doubles(sum));
                CHECK(out.doubles() == want.out);
                CHECK(rstd.doubles() == want.rstd);
                if (centred) CHECK(mean.doubles() == want.mean);
            }
        }
    });
}

TEST_CASE("norm: the same bits on every run and for any number of threads") {
    Layer layer(Norm::layernorm, true, 300, 50);
    Reference first = layer.run();
    for (int threads : {1, 3}) {
        cudaCheck(cudaLaunchHostFunc(
            test_stream(), [](void* count) { omp_set_num_threads(*(int*)count); }, &threads));
        Reference again = layer.run();
        CHECK(again.out == first.out);
        CHECK(again.dinp == first.dinp);
        CHECK(again.dweight == first.dweight);
        CHECK(again.dbias == first.dbias);
    }
}
