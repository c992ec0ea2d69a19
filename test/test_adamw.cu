#include "kernels/adamw.cuh"
#include "kernels/global_norm.cuh"
#include "test/testing.h"

#include <algorithm>
#include <numeric>
#include <tuple>

// ----------------------------------------------------------------------------
// global norm

static float norm_squared(const std::vector<float>& values, float before, bool accumulate) {
    Buffer<float> device_values(values), scratch(sum_squares_scratch(values.size())),
        total(std::vector<float>{before});
    sum_squares(total, scratch, device_values, values.size(), accumulate, test_stream());
    return total.host()[0];
}

TEST_CASE("sum of squares") {
    for (size_t n : {0, 1, 3, 1000, 16384, 16385, 70003, 100000}) {
        CAPTURE(n);
        auto values = random_values<float>("values", n, 0.01f);
        double want = 0;
        for (float value : values) want += (double)value * value;
        CHECK(norm_squared(values, NAN, false) == doctest::Approx(want).epsilon(1e-6));
        CHECK(norm_squared(values, 2.5f, true) == doctest::Approx(want + 2.5).epsilon(1e-6));
        CHECK(norm_squared(values, NAN, false) == norm_squared(values, NAN, false));
        for (float bad : {NAN, INFINITY, -INFINITY, 1e30f}) {
            if (n == 0 || n > 16385) continue;
            auto with_bad = values;
            with_bad[n / 2] = bad;
            CHECK(!std::isfinite(norm_squared(with_bad, 0, false)));
        }
    }
}

#ifdef DEVICE_CPU
TEST_CASE("sum of ten million squares") {
    size_t n = 10'000'003;
    std::vector<float> values(n);
    double want = 0;
    for (size_t i = 0; i < n; i++) {
        values[i] = random_uniform(philox(9, i).at[0]) * 1e-3f;
        want += (double)values[i] * values[i];
    }
    CHECK(norm_squared(values, 0, false) == doctest::Approx(want).epsilon(1e-6));
}
#endif

TEST_CASE("clip scale") {
    auto clip = [](float squares, float loss, float max_norm) {
        Buffer<float> result(2), sum(std::vector<float>{squares}), device_loss(std::vector<float>{loss});
        clip_scale(result, sum, device_loss, max_norm, test_stream());
        auto got = result.host();
        return std::pair(got[0], got[1]);
    };
    CHECK(clip(16, 3, 1) == std::pair(4.0f, 0.25f));
    CHECK(clip(16, 3, 4) == std::pair(4.0f, 1.0f));
    CHECK(clip(16, 3, 5) == std::pair(4.0f, 1.0f));
    CHECK(clip(16, 3, 0) == std::pair(4.0f, 1.0f));
    CHECK(clip(0, 3, 1) == std::pair(0.0f, 1.0f));
    for (auto [squares, loss] :
         {std::pair{NAN, 1.0f}, {INFINITY, 1.0f}, {1.0f, NAN}, {1.0f, INFINITY}, {1, -INFINITY}}) {
        for (float max_norm : {0.0f, 1.0f}) CHECK(std::isnan(clip(squares, loss, max_norm).second));
    }
}

// ----------------------------------------------------------------------------
// AdamW

static const AdamW hyper = {.learning_rate = 3e-3,
                            .beta1 = 0.9,
                            .beta2 = 0.95,
                            .eps = 1e-8,
                            .weight_decay = 0.1,
                            .step = 1,
                            .stochastic_rounding = false};

// One parameter tensor and its state, on the device.
struct State {
    Buffer<floatX> params;
    Buffer<float> master, m, v;
    bool has_master;

    State(const std::vector<float>& weights, bool has_master)
        : params(weights),
          master(weights),
          m(std::vector<float>(weights.size())),
          v(std::vector<float>(weights.size())),
          has_master(has_master) {}

    void update(const std::vector<float>& grads, float scale, const AdamW& with, uint64_t key = 77) {
        Buffer<float> device_grads(grads), device_scale(std::vector<float>{scale});
        adamw_update(params, has_master ? (float*)master : nullptr, m, v, device_grads, device_scale,
                     grads.size(), with, key, test_stream());
        cudaCheck(cudaStreamSynchronize(test_stream()));
    }

    auto bits() { return std::tuple(params.doubles(), master.host(), m.host(), v.host()); }
};

// Against the published formulas in double.
TEST_CASE("ten steps of AdamW") {
    for (size_t n : {1, 77, 1032}) {
        for (double beta2 : {0.95, 0.999}) {
            for (bool has_master : {true, false}) {
                bool rounds = !std::is_same_v<floatX, float> && !has_master;
                if (rounds) continue;  // has the error of bf16, which a test below measures
                CAPTURE(n);
                CAPTURE(beta2);
                auto rounded = random_values<floatX>("weights", n, 0.02f);
                std::vector<float> weights(rounded.begin(), rounded.end());
                State state(weights, has_master);
                std::vector<double> w(weights.begin(), weights.end()), m(n), v(n);
                const float scale = 0.7f;
                for (int step = 1; step <= 10; step++) {
                    auto grads = random_values<float>(("grads" + std::to_string(step)).c_str(), n, 0.01f);
                    AdamW at = hyper;
                    at.step = step;
                    at.beta2 = beta2;
                    state.update(grads, scale, at);
                    for (size_t i = 0; i < n; i++) {
                        double g = (double)grads[i] * scale;
                        w[i] *= 1 - 3e-3 * 0.1;
                        m[i] = 0.9 * m[i] + (1 - 0.9) * g;
                        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
                        double m_hat = m[i] / (1 - std::pow(0.9, step)),
                               v_hat = v[i] / (1 - std::pow(beta2, step));
                        w[i] -= 3e-3 * m_hat / (std::sqrt(v_hat) + 1e-8);
                    }
                }
                CHECK_CLOSE(state.m, m, 1e-6);
                CHECK_CLOSE(state.v, v, 1e-6);
                auto got = has_master ? to_doubles(state.master.host()) : state.params.doubles();
                for (size_t i = 0; i < n; i++) w[i] -= weights[i], got[i] -= weights[i];
                CHECK(relative_error(got, w) < 5e-5);  // of the change
                if (!has_master) continue;
                auto master = state.master.host();
                CHECK(state.params.doubles() ==
                      to_doubles(std::vector<floatX>(master.begin(), master.end())));
            }
        }
    }
}

TEST_CASE("a NaN scale changes nothing") {
    for (size_t n : {5, 64}) {
        for (bool has_master : {true, false}) {
            State state(random_values<float>("weights", n), has_master);
            state.update(random_values<float>("grads", n), 1.0f, hyper);
            auto before = state.bits();
            state.update(std::vector<float>(n, NAN), NAN, hyper);
            state.update(random_values<float>("more", n), NAN, hyper);
            CHECK(state.bits() == before);
            state.update(random_values<float>("more", n), 1.0f, hyper);
            CHECK(state.bits() != before);
        }
    }
}

TEST_CASE("the same step gives the same bits, with stochastic rounding too") {
    for (bool stochastic : {false, true}) {
        auto weights = random_values<float>("weights", 777), grads = random_values<float>("grads", 777);
        AdamW with = hyper;
        with.stochastic_rounding = stochastic;
        State one(weights, false), two(weights, false);
        one.update(grads, 1.0f, with);
        two.update(grads, 1.0f, with);
        CHECK(one.bits() == two.bits());
    }
}

#ifdef PRECISION_BF16
// A step far below half of the last digit of bf16: rounding to nearest never moves, stochastic rounding does
// so as often as it takes to be right on average, at other elements for each step and each tensor.
TEST_CASE("stochastic rounding is exact in the mean") {
    const int n = 40000;
    const double digit = 0x1p-7;                 // between 1.5 and its neighbours in bf16
    const double step = 3e-4, p = step / digit;  // how far, and how often, a weight must move
    const double limit = 4 * std::sqrt(n * p * (1 - p)), limit_both = 4 * std::sqrt(n * p * p);
    std::vector<float> grads(n, 1.0f);
    auto sum = [](const std::vector<double>& moves) {
        return std::accumulate(moves.begin(), moves.end(), 0.0);
    };
    for (float weight : {1.5f, -1.5f}) {
        auto moved = [&](bool stochastic, int at, uint64_t key) {
            State state(std::vector<float>(n, weight), false);
            state.update(grads, 1.0f, {step, 0, 0, 0, 0, at, stochastic}, key);
            std::vector<double> moves;
            for (double w : state.params.doubles()) moves.push_back((weight - w) / digit);
            return moves;
        };
        CHECK(moved(false, 1, 77) == std::vector<double>(n, 0));
        auto first = moved(true, 1, 77), next_step = moved(true, 2, 77), other_tensor = moved(true, 1, 78);
        for (auto& moves : {first, next_step, other_tensor}) {
            CHECK(std::ranges::all_of(moves, [](double move) { return move == 0 || move == 1; }));
            CHECK(std::fabs(sum(moves) - n * p) < limit);
        }
        for (auto& moves : {next_step, other_tensor}) {
            double both = std::inner_product(moves.begin(), moves.end(), first.begin(), 0.0);
            CHECK(std::fabs(both - n * p * p) < limit_both);
        }
    }
}
#endif
