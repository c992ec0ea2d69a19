// Spikes: the running means compared with sums written out, what is a spike and what is not, and what a
// checkpoint keeps.
#include <random>

#include "data/run/spike_rule.h"
#include "test/support/file_testing.h"

// The weight, after n steps, of the step that was seen `age` steps before the last.
static double weight(int64_t n, int64_t age) {
    double w = 1;
    for (int64_t step = n; step > n - age; step--) w *= 1 - 1 / (double)std::min<int64_t>(step, 100);
    return w / (double)std::min<int64_t>(n - age, 100);
}

TEST_CASE("running mean and variance are those of weighted steps") {
    std::mt19937 random(1);
    std::normal_distribution<double> normal(3, 0.5);
    std::vector<double> seen;
    RunningMean running;
    for (int64_t n = 1; n <= 300; n++) {
        seen.push_back(normal(random));
        running.add(seen.back());
        if (n % 37 && n > 3) continue;
        double mean = 0, squares = 0, weights = 0;
        for (int64_t i = 0; i < n; i++) {
            double w = weight(n, n - 1 - i);
            weights += w, mean += w * seen[(size_t)i], squares += w * seen[(size_t)i] * seen[(size_t)i];
        }
        CHECK(weights == doctest::Approx(1));
        CHECK(running.mean == doctest::Approx(mean));
        CHECK(running.variance + 1e-9 == doctest::Approx(squares - mean * mean + 1e-9).epsilon(1e-6));
    }
    // mean + 2 * max(deviation, second argument)
    CHECK(running.limit(2, 0) == doctest::Approx(running.mean + 2 * std::sqrt(running.variance)));
    CHECK(running.limit(2, 10) == doctest::Approx(running.mean + 20));
}

TEST_CASE("nothing is a spike before twenty steps, without a sigma, or within the least deviations") {
    SpikeHistory history;
    for (int step = 0; step < 20; step++) {
        CHECK(history.limits(3).loss == HUGE_VAL);
        CHECK(history.limits(3).norm == HUGE_VAL);
        history.add_step(2.0f, 0.5f);
    }
    CHECK(history.limits(0).loss == HUGE_VAL);
    CHECK(history.limits(3).loss == doctest::Approx(2.06));
    CHECK(history.limits(3).norm == doctest::Approx(0.5 * std::exp(0.6)));
    history.in_a_row = 2;
    history.add_step(2.0f, 0.0f);  // a norm of zero has no logarithm
    CHECK(history.in_a_row == 0);
    CHECK(std::isfinite(history.limits(3).norm));
}

TEST_CASE("a checkpoint brings back every bit of it") {
    SpikeHistory history;
    for (int step = 0; step < 50; step++) history.add_step(1 / (1 + (float)step), 1 / (3 + (float)step));
    history.in_a_row = 2;
    history.passed_over = {{8, 24}, {40, 48}};
    auto again = spike_history_from_json(nlohmann::json::parse(history.to_json().dump()), "spikes");
    CHECK(again.limits(3).loss == history.limits(3).loss);
    CHECK(again.limits(3).norm == history.limits(3).norm);
    CHECK(again.loss.variance == history.loss.variance);
    CHECK(again.loss.steps == 50);
    CHECK(again.in_a_row == 2);
    CHECK(again.passed_over == history.passed_over);
    CHECK(again.samples_passed_over() == 24);
    CHECK(!again.is_empty());
    CHECK(spike_history_from_json(nullptr, "spikes").is_empty());
}

TEST_CASE("limits that are beyond a float are the largest float") {
    SpikeLimits limits = {-1e308, 1e300};
    CHECK(limits.most_loss(1e3) == -FLT_MAX);
    CHECK(limits.most_norm() == FLT_MAX);
    CHECK(SpikeLimits().most_loss(8) == FLT_MAX);
    CHECK(SpikeLimits{2, 1}.most_loss(8) == 16);
}

TEST_CASE("what a damaged checkpoint holds is refused by name") {
    SpikeHistory history;
    history.add_step(1, 1);
    history.passed_over = {{8, 24}};
    const nlohmann::json good = nlohmann::json::parse(history.to_json().dump());
    auto refused = [&](const char* place, const nlohmann::json& value, const std::string& message) {
        nlohmann::json bad = good;
        bad[nlohmann::json::json_pointer(place)] = value;
        CHECK_REFUSED(spike_history_from_json(bad, "F: spikes"), message);
    };
    refused("/loss/variance", -1, "F: spikes: loss: variance is -1; ");
    refused("/loss/mean", "x", "F: spikes: loss: mean is \"x\"; ");
    refused("/loss", nullptr, "F: spikes: loss is null; ");
    refused("/log_norm/steps", -1, "F: spikes: log_norm: steps is -1; ");
    refused("/loss/steps", INT64_MAX, "F: spikes: loss: steps is 9223372036854775807; ");
    refused("/in_a_row", 0.5, "F: spikes: in_a_row is 0.5; ");
    refused("/in_a_row", INT32_MAX, "F: spikes: in_a_row is 2147483647; ");
    refused("/passed_over", {{8}}, "F: spikes: passed_over holds an array; ");
    refused("/passed_over", {{8, 4}}, "F: spikes: passed_over is 4; ");
    CHECK_REFUSED(spike_history_from_json(7, "F: spikes"), "F: spikes is 7; ");
}
