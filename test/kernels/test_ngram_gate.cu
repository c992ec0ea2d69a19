// The gate of n-gram memory, against a double-precision reference of its formula.
#include "test/support/testing.h"

#include "kernels/ngram_gate.cuh"

using Doubles = std::vector<double>;

constexpr float eps = 1e-6f;

struct Result {
    Doubles out, score, rstd;
    Doubles dquery, dkv;
};

struct Gate {
    int N, C;
    float size_of_keys = 1;
    size_t size = (size_t)N * C;
    std::vector<floatX> query = random_values<floatX>("query", size, 2.0f);
    std::vector<floatX> kv = random_values<floatX>("kv", 2 * size, size_of_keys);
    std::vector<floatX> dout = random_values<floatX>("dout", size);

    Result reference() const { return reference(to_doubles(query), to_doubles(kv)); }

    // Gradients by the chain rule: through the product, and through rstd.
    Result reference(const Doubles& q, const Doubles& k_and_v) const {
        Result ref{Doubles(size), Doubles(N), Doubles(N), Doubles(size), Doubles(2 * size)};
        Doubles dy = to_doubles(dout);
        for (size_t n = 0; n < (size_t)N; n++) {
            size_t at = n * C, k = 2 * at, v = k + C;  // beginnings of rows
            double square = 0, product = 0, dgate = 0;
            for (int c = 0; c < C; c++) {
                square += k_and_v[k + c] * k_and_v[k + c] / C;
                product += q[at + c] * k_and_v[k + c] / C;
                dgate += dy[at + c] * k_and_v[v + c];
            }
            double r = 1 / std::sqrt(square + eps), root = std::sqrt((double)C);
            double score = product * r * root, gate = 1 / (1 + std::exp(-score));
            double dscore = dgate * gate * (1 - gate);
            double dsquare = dscore * product * root * -0.5 * r * r * r;
            ref.score[n] = score, ref.rstd[n] = r;
            for (int c = 0; c < C; c++) {
                ref.out[at + c] = gate * k_and_v[v + c];
                ref.dquery[at + c] = dscore * r * root * k_and_v[k + c] / C;
                ref.dkv[k + c] = dscore * r * root * q[at + c] / C + dsquare * 2 * k_and_v[k + c] / C;
                ref.dkv[v + c] = gate * dy[at + c];
            }
        }
        return ref;
    }

    Result run(bool dquery_in_place, bool dkv_in_place) const {
        Buffer<floatX> query_(query), kv_(kv), dout_(dout), out(size), dquery(size), dkv(2 * size);
        Buffer<float> score(N), rstd(N);
        Buffer<floatX>&dquery_to = dquery_in_place ? query_ : dquery, &dkv_to = dkv_in_place ? kv_ : dkv;
        ngram_gate_forward(out, score, rstd, query_, kv_, N, C, eps, test_stream());
        ngram_gate_backward(dquery_to, dkv_to, dout_, score, rstd, query_, kv_, N, C, test_stream());
        return {out.doubles(), score.doubles(), rstd.doubles(), dquery_to.doubles(), dkv_to.doubles()};
    }
};

// The keys, or the values, of rows that hold both.
static Doubles half_of(const Doubles& kv, int C, bool values) {
    Doubles result;
    for (size_t i = 0; i < kv.size(); i++)
        if ((i / C % 2 == 1) == values) result.push_back(kv[i]);
    return result;
}

TEST_CASE("ngram gate: forward and backward over shapes") {
    for (const Gate& gate : {Gate{1, 8}, {7, 20}, {33, 96}, {5, 1030}, {1, 1}, {3, 37, 1e-3f}, {2, 2056}}) {
        CAPTURE(gate.N);
        CAPTURE(gate.C);
        Result got = gate.run(false, false), want = gate.reference();
        CHECK(relative_error(got.out, want.out) < tolerance<floatX>);
        CHECK(relative_error(got.score, want.score) < tolerance<float>);
        CHECK(relative_error(got.rstd, want.rstd) < tolerance<float>);
        CHECK(relative_error(got.dquery, want.dquery) < tolerance<floatX>);
        CHECK(relative_error(half_of(got.dkv, gate.C, true), half_of(want.dkv, gate.C, true)) <
              tolerance<floatX>);
        // a key of one element is normalized to its sign, so its gradient is only rounding error
        if (gate.C > 1)
            CHECK(relative_error(half_of(got.dkv, gate.C, false), half_of(want.dkv, gate.C, false)) <
                  tolerance<floatX>);

        for (auto [dquery, dkv] : {std::pair{true, false}, {false, true}, {true, true}}) {
            Result in_place = gate.run(dquery, dkv);
            CHECK(in_place.dquery == got.dquery);
            CHECK(in_place.dkv == got.dkv);
        }
    }
}

TEST_CASE("ngram gate: the reference agrees with finite differences") {
    Gate gate{3, 5};
    Result want = gate.reference();
    Doubles query = to_doubles(gate.query), kv = to_doubles(gate.kv), dout = to_doubles(gate.dout);
    auto check = [&](Doubles& inputs, const Doubles& gradient) {
        for (size_t i = 0; i < inputs.size(); i++) {
            double h = 1e-5, kept = inputs[i], loss[2] = {};
            for (int side = 0; side < 2; side++) {
                inputs[i] = kept + (side ? h : -h);
                Doubles out = gate.reference(query, kv).out;
                for (size_t k = 0; k < out.size(); k++) loss[side] += out[k] * dout[k];
            }
            inputs[i] = kept;
            CHECK((loss[1] - loss[0]) / (2 * h) == doctest::Approx(gradient[i]).epsilon(1e-6));
        }
    };
    check(query, want.dquery);
    check(kv, want.dkv);
}

TEST_CASE("ngram gate: a key of zeros lets half of the value through") {
    Gate gate{4, 24, 0};
    for (size_t i = 0; i < gate.kv.size(); i++)
        if (i / gate.C % 2) gate.kv[i] = floatX(0.25f * (float)(i % 7));
    Result got = gate.run(false, false), want = gate.reference();
    for (size_t i = 0; i < gate.size; i++)
        CHECK(got.out[i] == (double)(float)gate.kv[i / gate.C * 2 * gate.C + gate.C + i % gate.C] / 2);
    CHECK(got.dquery == Doubles(gate.size));
    CHECK(relative_error(got.dkv, want.dkv) < tolerance<floatX>);
}

TEST_CASE("ngram gate: a row has the same bits whatever is beside it") {
    Gate all{9, 72};
    Result want = all.run(false, false);
    for (int n : {0, 4, 8}) {
        Gate one{1, all.C};
        auto part = [n](const auto& values, size_t width) {
            auto begin = values.begin() + (long)(n * width);
            return std::vector(begin, begin + (long)width);
        };
        size_t C = (size_t)all.C;
        one.query = part(all.query, C), one.kv = part(all.kv, 2 * C), one.dout = part(all.dout, C);
        Result got = one.run(false, false);
        CHECK(got.out == part(want.out, C));
        CHECK(got.dquery == part(want.dquery, C));
        CHECK(got.dkv == part(want.dkv, 2 * C));
    }
}
