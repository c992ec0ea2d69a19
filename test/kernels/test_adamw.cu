#include "kernels/adamw.cuh"
#include "kernels/global_norm.cuh"
#include "test/support/testing.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

// ----------------------------------------------------------------------------
// global norm

static double squares(const std::vector<float>& values, size_t begin, size_t end) {
    double sum = 0;
    for (size_t i = begin; i < end; i++) sum += (double)values[i] * values[i];
    return sum;
}

static float norm_squared(const std::vector<float>& values, const std::vector<SquaresRange>& ranges) {
    size_t scratch_size = 0;
    for (const SquaresRange& range : ranges) scratch_size += sum_squares_scratch(range.count);
    Buffer<float> device_values(values), scratch(scratch_size), total(1);
    sum_squares(total, scratch, device_values, ranges, test_stream());
    return total.host()[0];
}

TEST_CASE("sum of squares") {
    for (size_t n : {0, 1, 3, 1000, 16384, 16385, 70003, 100000}) {
        CAPTURE(n);
        auto values = random_values<float>("values", n, 0.01f);
        CHECK(norm_squared(values, {{0, n}}) == doctest::Approx(squares(values, 0, n)).epsilon(1e-6));
        CHECK(norm_squared(values, {{0, n}}) == norm_squared(values, {{0, n}}));
        for (float bad : {NAN, INFINITY, -INFINITY, 1e30f}) {
            if (n == 0 || n > 16385) continue;
            auto with_bad = values;
            with_bad[n / 2] = bad;
            CHECK(!std::isfinite(norm_squared(with_bad, {{0, n}})));
        }
    }
    CHECK(norm_squared({}, {}) == 0);
}

#ifdef DEVICE_CPU
TEST_CASE("sum of ten million squares") {
    size_t n = 10'000'003;
    std::vector<float> values(n);
    for (size_t i = 0; i < n; i++) values[i] = random_uniform(philox(9, i).at[0]) * 1e-3f;
    CHECK(norm_squared(values, {{0, n}}) == doctest::Approx(squares(values, 0, n)).epsilon(1e-6));
}
#endif

// Ranges like those of a model's gradients: one or more for each unit, some without values on this rank.
// Values between them do not count.
TEST_CASE("sum of squares in ranges") {
    const std::vector<float> values = random_values<float>("values", 60'000);
    auto check = [&](const std::vector<SquaresRange>& ranges) {
        std::vector<float> with_gaps(values.size(), NAN);
        double want = 0;
        for (auto [at, count, sum] : ranges) {
            std::copy_n(values.begin() + at, count, with_gaps.begin() + at);
            want += squares(values, at, at + count);
        }
        CHECK(norm_squared(with_gaps, ranges) == doctest::Approx(want).epsilon(1e-6));
    };
    check({{0, 4}, {4, 1}, {5, 1024}, {1029, 0}, {1029, 20000}, {30000, 30000}});  // anywhere in a vector
    check({{3, 1024}});  // begins after the start of a vector, with whole vectors to sum
    check({{64, 0}, {128, 40000}, {50000, 64}, {50064, 0}});
    std::vector<SquaresRange> many;  // more than one launch handles
    for (size_t i = 0; i < 300; i++) many.push_back({i * 200, i % 3 * 64});
    check(many);
}

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

// Runs a step on the device.
static void adamw_update(floatX* params, float* master, float* m, float* v, float* grads, const float* scale,
                         const std::vector<OptimizerPart>& parts, const AdamW& with) {
    adamw_optimizer(with, 5).step.on_device({params, master, {m, v}, grads, scale}, parts, test_stream());
}

// State::update() sets its count.
static const OptimizerPart a_matrix = {.at = 0, .count = 0, .first = 0, .name = 77, .decays = true};

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

    void update(const std::vector<float>& grads, float scale, const AdamW& with,
                OptimizerPart part = a_matrix) {
        Buffer<float> device_grads(grads), device_scale(std::vector<float>{scale});
        part.count = grads.size();
        adamw_update(params, has_master ? (float*)master : nullptr, m, v, device_grads, device_scale, {part},
                     with);
        cudaCheck(cudaStreamSynchronize(test_stream()));
    }

    auto bits() { return std::tuple(params.doubles(), master.host(), m.host(), v.host()); }
};

// Against the published formulas in double.
static void check_ten_steps(size_t n, double beta2, const OptimizerPart& part, bool has_master) {
    auto rounded = random_values<floatX>("weights", n, 0.02f);
    std::vector<float> weights(rounded.begin(), rounded.end());
    State state(weights, has_master);
    std::vector<double> w(weights.begin(), weights.end()), m(n), v(n);
    const float scale = 0.7f;
    const double learning_rate = 3e-3 * part.learning_rate,
                 weight_decay = part.decays ? 0.1 * part.weight_decay : 0;
    for (int step = 1; step <= 10; step++) {
        auto grads = random_values<float>(("grads" + std::to_string(step)).c_str(), n, 0.01f);
        AdamW at = hyper;
        at.step = step;
        at.beta2 = beta2;
        state.update(grads, scale, at, part);
        for (size_t i = 0; i < n; i++) {
            double g = (double)grads[i] * scale;
            w[i] *= 1 - learning_rate * weight_decay;
            m[i] = 0.9 * m[i] + (1 - 0.9) * g;
            v[i] = beta2 * v[i] + (1 - beta2) * g * g;
            double m_hat = m[i] / (1 - std::pow(0.9, step)), v_hat = v[i] / (1 - std::pow(beta2, step));
            w[i] -= learning_rate * m_hat / (std::sqrt(v_hat) + 1e-8);
        }
    }
    CHECK_CLOSE(state.m, m, 1e-6);
    CHECK_CLOSE(state.v, v, 1e-6);
    auto got = has_master ? to_doubles(state.master.host()) : state.params.doubles();
    for (size_t i = 0; i < n; i++) w[i] -= weights[i], got[i] -= weights[i];
    CHECK(relative_error(got, w) < 5e-5);  // relative to the change
    if (!has_master) return;
    auto master = state.master.host();
    CHECK(state.params.doubles() == to_doubles(std::vector<floatX>(master.begin(), master.end())));
}

TEST_CASE("ten steps of AdamW") {
    OptimizerPart bias = a_matrix, scaled = a_matrix;
    bias.decays = false, scaled.learning_rate = 2, scaled.weight_decay = 3;
    for (size_t n : {1, 77, 1032}) {
        for (double beta2 : {0.95, 0.999}) {
            for (const OptimizerPart& part : {a_matrix, bias, scaled}) {
                CAPTURE(n);
                CAPTURE(beta2);
                CAPTURE(part.decays);
                CAPTURE(part.learning_rate);
                check_ten_steps(n, beta2, part, true);
                // bf16 without a master copy has rounding errors, which a test below measures
                if (std::is_same_v<floatX, float>) check_ten_steps(n, beta2, part, false);
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

// ----------------------------------------------------------------------------
// equal bits: for parts of a tensor, on the host, by every compiler

// One tensor in host memory.
struct HostState {
    std::vector<floatX> params;
    std::vector<float> master, m, v, grads;

    // Values have both signs and many magnitudes, including denormal numbers and zeros. Squares stay finite.
    explicit HostState(size_t n)
        : params(n), master(wide("master", n)), m(wide("m", n)), v(wide("v", n)), grads(wide("grads", n)) {
        for (float& x : v) x = std::fabs(x);
        for (size_t i = 0; i < n; i++) params[i] = floatX(master[i]);
    }

    static std::vector<float> wide(const char* name, size_t n) {
        std::vector<float> values(n);
        uint64_t key = random_key(5, name);
        for (size_t i = 0; i < n; i++) {
            Random4 random = philox(key, i);
            float magnitude = random.at[1] % 8 == 0 ? -140 : 30;  // every eighth may be denormal
            float value = std::exp2(magnitude * random_uniform(random.at[2]) - (random.at[1] % 8 ? 25 : 9));
            values[i] = random.at[1] % 64 == 1 ? 0 : random.at[0] % 2 ? value : -value;
        }
        return values;
    }

    void update(float scale, const AdamW& with, bool has_master, size_t first = 0) {
        update_parts(scale, with, has_master, {{0, m.size(), first, 77, true}});
    }

    void update_parts(float scale, const AdamW& with, bool has_master,
                      const std::vector<OptimizerPart>& parts) {
        adamw_optimizer(with, 5).step.on_host(
            {params.data(), has_master ? master.data() : nullptr, {m.data(), v.data()}, grads.data(), &scale},
            parts);
    }
};

static void check_same(const HostState& got, const HostState& want) {
    CHECK(same_bits(got.params, want.params));
    CHECK(same_bits(got.master, want.master));
    CHECK(same_bits(got.m, want.m));
    CHECK(same_bits(got.v, want.v));
}

// Calls f(has_master, settings) for each way of storing and rounding the parameters.
template <typename F>
void each_rounding(F&& f) {
    for (bool has_master : {true, false}) {
        for (bool stochastic : {false, true}) {
            AdamW with = hyper;
            with.step = 3;
            with.stochastic_rounding = stochastic;
            CAPTURE(has_master);
            CAPTURE(stochastic);
            f(has_master, with);
        }
    }
}

// How many elements past a multiple of 16 bytes each of a part's arrays begins.
struct Offsets {
    size_t params, master, m, v, grads;
};

// Updates elements begin .. end - 1 of `all` on the device, in separate buffers.
static void update_part(HostState& all, size_t begin, size_t end, const Offsets& at, bool has_master,
                        const AdamW& with) {
    size_t n = end - begin;
    auto part = [&]<typename T>(const std::vector<T>& values, size_t offset) {
        std::vector<T> result(offset + n);
        std::copy_n(values.begin() + begin, n, result.begin() + offset);
        return result;
    };
    Buffer<floatX> params(part(all.params, at.params));
    Buffer<float> master(part(all.master, at.master)), m(part(all.m, at.m)), v(part(all.v, at.v)),
        grads(part(all.grads, at.grads)), scale(std::vector<float>{0.7f});
    adamw_update(params + at.params, has_master ? master + at.master : nullptr, m + at.m, v + at.v,
                 grads + at.grads, scale, {{0, n, begin, 77, true}}, with);
    auto back = [&]<typename T>(const Buffer<T>& buffer, size_t offset, std::vector<T>& values) {
        auto got = buffer.host();
        std::copy_n(got.begin() + offset, n, values.begin() + begin);
    };
    back(params, at.params, all.params);
    if (has_master) back(master, at.master, all.master);
    back(m, at.m, all.m);
    back(v, at.v, all.v);
}

TEST_CASE("the kernel and the host update to the same bits") {
    for (size_t n : {1, 3, 4, 1027, 40000}) {
        CAPTURE(n);
        each_rounding([&](bool has_master, const AdamW& with) {
            HostState on_host(n), on_device = on_host;
            on_host.update(0.7f, with, has_master);
            update_part(on_device, 0, n, {}, has_master, with);
            check_same(on_device, on_host);
        });
    }
}

// The result depends neither on where a tensor is cut nor on the alignment of the parts.
TEST_CASE("updating parts of a tensor is the same as updating it whole") {
    const std::vector<size_t> cuts = {0, 1, 2, 5, 9, 9, 16, 34, 1003, 1005, 2049, 6000, 6001};
    const size_t n = cuts.back();
    const Offsets all_offsets[] = {{0, 0, 0, 0, 0}, {1, 1, 1, 1, 1}, {3, 3, 3, 3, 3}, {1, 0, 0, 0, 0},
                                   {0, 1, 0, 0, 0}, {0, 0, 2, 0, 0}, {0, 0, 0, 3, 0}, {2, 2, 2, 2, 1}};
    each_rounding([&](bool has_master, const AdamW& with) {
        HostState whole(n), before = whole;
        whole.update(0.7f, with, has_master);
        for (const Offsets& at : all_offsets) {
            CAPTURE(at.params);
            CAPTURE(at.grads);
            HostState parts = before;
            for (size_t i = 0; i + 1 < cuts.size(); i++) {
                update_part(parts, cuts[i], cuts[i + 1], at, has_master, with);
            }
            check_same(parts, whole);
        }
    });
    // likewise on the host, where parts may begin anywhere too
    each_rounding([&](bool has_master, const AdamW& with) {
        HostState whole(n), cut = whole;
        whole.update(0.7f, with, has_master);
        std::vector<OptimizerPart> parts;
        for (size_t i = 0; i + 1 < cuts.size(); i++)
            parts.push_back({cuts[i], cuts[i + 1] - cuts[i], cuts[i], 77, true});
        cut.update_parts(0.7f, with, has_master, parts);
        check_same(cut, whole);
    });
}

// Parts like those of a unit: of many tensors, with and without decay. Nothing between them may be touched.
TEST_CASE("the parts of many tensors are updated at once, each as if alone") {
    std::vector<OptimizerPart> parts;
    size_t at = 2;
    for (uint64_t k = 0; k < 75; k++) {  // more than one launch handles
        size_t count = k % 5 == 4 ? 0 : k * 37 % 300, first = k % 3 ? k * 1000 + k % 7 : 0;
        parts.push_back({at, count, first, name_hash("tensor") + k / 2, k % 2 == 0});
        at += count + (k % 4 == 0 ? 3 : 0);
        if (k % 2) at = ceil_div(at, size_t(64)) * 64;
    }
    const size_t n = at + 5;
    each_rounding([&](bool has_master, const AdamW& with) {
        HostState want(n), before = want, at_once = want;
        for (const OptimizerPart& part : parts) want.update_parts(0.7f, with, has_master, {part});
        at_once.update_parts(0.7f, with, has_master, parts);
        check_same(at_once, want);

        Buffer<floatX> params(before.params);
        Buffer<float> master(before.master), m(before.m), v(before.v), grads(before.grads),
            scale(std::vector<float>{0.7f});
        adamw_update(params, has_master ? (float*)master : nullptr, m, v, grads, scale, parts, with);
        CHECK(same_bits(params.host(), want.params));
        CHECK(same_bits(master.host(), want.master));
        CHECK(same_bits(m.host(), want.m));
        CHECK(same_bits(v.host(), want.v));
    });
}

// `first` can exceed 2^32, in tensors with that many elements.
TEST_CASE("parts far into a tensor have random numbers of their own") {
    AdamW with = hyper;
    with.stochastic_rounding = true;
    for (size_t first : {size_t(0), size_t(5), (size_t(1) << 34) + 3}) {
        HostState on_host(1001), on_device = on_host, at_start = on_host;
        on_host.update(0.7f, with, false, first);
        at_start.update(0.7f, with, false);
        Buffer<floatX> params(on_device.params);
        Buffer<float> m(on_device.m), v(on_device.v), grads(on_device.grads), scale(std::vector<float>{0.7f});
        adamw_update(params, nullptr, m, v, grads, scale, {{0, 1001, first, 77, true}}, with);
        CHECK(same_bits(params.host(), on_host.params));
        bool rounds = !std::is_same_v<floatX, float> && first != 0;
        CHECK(same_bits(on_host.params, at_start.params) == !rounds);
    }
}

// Volatile variables force the rounding of each result, even where a compiler could fuse operations. The
// functions must match that, so that they agree across machines and compilers, which no test can compare.
TEST_CASE("products and sums are rounded as written") {
    const size_t n = 20000;
    const float scale = 0.7f;
    HostState before(n), after = before;
    update_part(after, 0, n, {}, true, hyper);
    AdamWFormula formula(hyper);
    const Moments& a = formula.moments;
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        volatile float g = before.grads[i] * scale, new_g = a.new2 * g, old_v = a.beta2 * before.v[i];
        volatile float difference = std::fma(before.grads[i], scale, -before.m[i]);
        volatile float m = std::fma(a.new1, difference, before.m[i]), v = std::fma(new_g, g, old_v);
        volatile float step = a.size * m, root = std::sqrt(v);
        volatile float divisor = std::fma(root, a.root_correction, a.eps), change = step / divisor;
        volatile float w = std::fma(before.master[i], formula.decay, -change);
        wrong += m != after.m[i] || v != after.v[i] || w != after.master[i];
    }
    CHECK(wrong == 0);
}

#ifdef PRECISION_BF16
// A step far below half of the last bf16 digit: rounding to nearest never moves a weight, stochastic rounding
// does so just often enough to be right on average, at different elements for each step and each tensor.
TEST_CASE("stochastic rounding is exact in the mean") {
    const int n = 40000;
    const double digit = 0x1p-7;                 // the distance of 1.5 to its neighbors in bf16
    const double step = 3e-4, p = step / digit;  // how far, and how often, a weight must move
    const double limit = 4 * std::sqrt(n * p * (1 - p)), limit_both = 4 * std::sqrt(n * p * p);
    std::vector<float> grads(n, 1.0f);
    auto sum = [](const std::vector<double>& moves) {
        return std::accumulate(moves.begin(), moves.end(), 0.0);
    };
    for (float weight : {1.5f, -1.5f}) {
        auto moved = [&](bool stochastic, int at, uint64_t name) {
            State state(std::vector<float>(n, weight), false);
            OptimizerPart part = a_matrix;
            part.name = name;
            state.update(grads, 1.0f, {step, 0, 0, 0, 0, at, stochastic}, part);
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
