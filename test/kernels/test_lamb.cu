#include "kernels/global_norm.cuh"
#include "kernels/lamb.cuh"
#include "test/support/testing.h"

namespace {

const AdamW hyper = {.learning_rate = 2e-2,
                     .beta1 = 0.9,
                     .beta2 = 0.95,
                     .eps = 1e-6,
                     .weight_decay = 0.1,
                     .step = 1,
                     .stochastic_rounding = false};

// Sections of two tensors, in parts: the first section consists of two parts, the second does not decay.
struct Table {
    std::vector<OptimizerPart> parts;
    std::vector<SquaresRange> ranges;
    size_t n;
    int sections = 4;

    explicit Table(size_t length) {
        size_t first = length / 3, behind = ceil_div(length, size_t(64)) * 64;
        add(0, first, 0, true, 0);
        add(first, length - first, first, true, 0);
        add(behind, length, 0, false, 1);
        add(behind + length, length + 5, length, true, 3);
        n = behind + 2 * length + 7;
    }

    void add(size_t at, size_t count, size_t begin, bool decays, int section) {
        parts.push_back({at, count, begin, 7, decays, section});
        ranges.push_back({at, count, section});
    }
};

struct State {
    Buffer<floatX> params;
    Buffer<float> master, m, v, grads, scale, squares, scratch;
    bool has_master;
    const Table& table;

    State(const Table& table, const std::vector<float>& weights, bool has_master)
        : params(weights),
          master(weights),
          m(std::vector<float>(table.n)),
          v(std::vector<float>(table.n)),
          grads(table.n),
          scale(1),
          squares(std::vector<float>(2 * table.sections)),
          scratch(table.n),
          has_master(has_master),
          table(table) {}

    void step(const std::vector<float>& gradient, float by, const AdamW& with) {
        copy_to_device<float>(grads, gradient.data(), gradient.size(), test_stream());
        copy_to_device<float>(scale, &by, 1, test_stream());
        float* updates = squares + table.sections;
        OptimizerArrays arrays = {
            params, has_master ? (float*)master : nullptr, {m, v}, grads, scale, squares, updates};
        Optimizer optimizer = lamb_optimizer(with, 5);
        optimizer.prepare.on_device(arrays, table.parts, test_stream());
        if (has_master)
            sums_of_squares<float>(squares, scratch, master, table.ranges, test_stream());
        else
            sums_of_squares<floatX>(squares, scratch, params, table.ranges, test_stream());
        sums_of_squares<float>(updates, scratch, grads, table.ranges, test_stream());
        optimizer.step.on_device(arrays, table.parts, test_stream());
        cudaCheck(cudaStreamSynchronize(test_stream()));
    }
};

// The published formulas in double, with norms of whole sections.
struct Reference {
    std::vector<double> w, m, v;
    std::vector<double> ratios;

    void step(const Table& table, const std::vector<float>& gradient, double scale, const AdamW& a) {
        std::vector<double> u(w.size());
        std::vector<double> weights(table.sections), updates(table.sections);
        for (const OptimizerPart& part : table.parts) {
            for (size_t i = part.at; i < part.at + part.count; i++) {
                double g = gradient[i] * scale;
                m[i] = a.beta1 * m[i] + (1 - a.beta1) * g;
                v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
                double m_hat = m[i] / (1 - std::pow(a.beta1, a.step)),
                       v_hat = v[i] / (1 - std::pow(a.beta2, a.step));
                u[i] = m_hat / (std::sqrt(v_hat) + a.eps) + (part.decays ? a.weight_decay * w[i] : 0);
                weights[part.section] += w[i] * w[i], updates[part.section] += u[i] * u[i];
            }
        }
        ratios.assign(table.sections, 1);
        for (const OptimizerPart& part : table.parts) {
            double ratio = std::sqrt(weights[part.section] / updates[part.section]);
            if (!part.decays || weights[part.section] == 0) ratio = 1;
            ratios[part.section] = ratio;
            for (size_t i = part.at; i < part.at + part.count; i++) w[i] -= a.learning_rate * ratio * u[i];
        }
    }
};

}  // namespace

TEST_CASE("ten steps of LAMB") {
    for (size_t length : {1, 77, 1032, 20001}) {
        for (bool has_master : {true, false}) {
            if (!has_master && sizeof(floatX) < sizeof(float)) continue;  // has bf16 rounding errors
            CAPTURE(length);
            Table table(length);
            auto rounded = random_values<floatX>("weights", table.n, 0.02f);
            std::vector<float> weights(rounded.begin(), rounded.end());
            State state(table, weights, has_master);
            Reference want = {{weights.begin(), weights.end()},
                              std::vector<double>(table.n),
                              std::vector<double>(table.n),
                              {}};
            AdamW with = hyper;
            for (with.step = 1; with.step <= 10; with.step++) {
                auto grads = random_values<float>(text("grads %d", with.step).c_str(), table.n, 0.01f);
                state.step(grads, 0.7f, with);
                want.step(table, grads, 0.7f, with);
            }
            CHECK_CLOSE(state.m, want.m, 1e-6);
            CHECK_CLOSE(state.v, want.v, 1e-6);
            auto got = has_master ? to_doubles(state.master.host()) : state.params.doubles();
            CHECK(relative_error(got, want.w) < 1e-5);
            auto squares = state.squares.host();
            for (int section : {0, 3}) {
                CHECK(trust_ratio(squares[section], squares[table.sections + section]) ==
                      doctest::Approx(want.ratios[section]).epsilon(1e-5));
            }
        }
    }
}

// The ratio must be defined for a matrix that is zero when training begins.
TEST_CASE("a section without weights, or without an update, takes a ratio of 1") {
    CHECK(trust_ratio(4, 16) == 0.5f);
    CHECK(trust_ratio(0, 16) == 1);
    CHECK(trust_ratio(4, 0) == 1);
    Table table(50);
    State state(table, std::vector<float>(table.n), true);
    auto grads = random_values<float>("grads", table.n, 0.01f);
    state.step(grads, 1, hyper);
    Reference want = {
        std::vector<double>(table.n), std::vector<double>(table.n), std::vector<double>(table.n), {}};
    want.step(table, grads, 1, hyper);
    CHECK(relative_error(to_doubles(state.master.host()), want.w) < 1e-5);
}

TEST_CASE("a NaN scale skips all of a step of LAMB") {
    Table table(300);
    State state(table, random_values<float>("weights", table.n), true);
    state.step(random_values<float>("grads", table.n), 1, hyper);
    auto bits = [&] {
        return std::tuple(state.params.doubles(), state.master.host(), state.m.host(), state.v.host());
    };
    auto before = bits();
    state.step(random_values<float>("more", table.n), NAN, hyper);
    CHECK(bits() == before);
    state.step(random_values<float>("more", table.n), 1, hyper);
    CHECK(bits() != before);
}

// The host is given the device's norms, because the device sums in another order.
TEST_CASE("both passes of LAMB give the same bits on the host") {
    for (bool has_master : {true, false}) {
        Table table(1027);
        std::vector<float> weights = random_values<float>("weights", table.n, 0.02f),
                           grads = random_values<float>("grads", table.n, 0.01f);
        State state(table, weights, has_master);
        state.step(grads, 0.7f, hyper);

        std::vector<floatX> params(weights.begin(), weights.end());
        std::vector<float> master = weights, m(table.n), v(table.n), squares = state.squares.host();
        float scale = 0.7f;
        OptimizerArrays arrays = {
            params.data(),  has_master ? master.data() : nullptr, {m.data(), v.data()}, grads.data(), &scale,
            squares.data(), squares.data() + table.sections};
        Optimizer optimizer = lamb_optimizer(hyper, 5);
        optimizer.prepare.on_host(arrays, table.parts);
        CHECK(same_bits(grads, state.grads.host()));
        optimizer.step.on_host(arrays, table.parts);
        CHECK(same_bits(params, state.params.host()));
        CHECK(same_bits(m, state.m.host()));
        CHECK(same_bits(v, state.v.host()));
        if (has_master) CHECK(same_bits(master, state.master.host()));
    }
}
