/*
Spikes: steps whose loss or gradient norm stands out from those of earlier steps. The update of such a step is
skipped, because one bad batch can undo what many good ones did (Chowdhery et al., "PaLM", 2022, section 5.1,
whose remedy is used here).

Two running means are kept: of the loss, and of the logarithm of the gradient norm, which spikes by factors.
After n steps, with a = max(1 / n, 1 / 100),

    mean     <- mean + a (x - mean)
    variance <- (1 - a) (variance + a (x - mean)^2)        with the old mean

so the first hundred steps count equally, and afterwards the weight of a step decays with its age. Once 20
steps have been seen, a step is a spike if its x exceeds

    mean + sigma * max(sqrt(variance), least deviation)

The least deviation is 1% of the mean loss, and 0.2 for the norm's logarithm, so that small fluctuations among
nearly equal steps are not spikes. A spike changes no weight and no mean, as if its step had not happened, but
it counts as a step of the schedule, and its samples are used up. The limits are known before a step begins,
so the step is judged on the device, in the same way as a loss that is not finite, and by numbers that are the
same on all ranks.

After `spike_skips` spikes in a row, the weights may be in a region where spike follows spike: the run goes
back to a checkpoint from before the first of them, and continues from there with the samples after the last
of them. All samples in between are passed over. Every checkpoint holds this state, so a run that resumes from
one, in any layout, judges steps as if it had never been interrupted.
*/
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/base/error.h"
#include "data/base/json.h"

struct RunningMean {
    static constexpr int64_t memory = 100;  // steps
    int64_t steps = 0;                      // seen
    double mean = 0, variance = 0;

    void add(double x) {
        steps++;
        double a = 1 / (double)std::min(steps, memory), d = x - mean;
        mean += a * d;
        variance = (1 - a) * (variance + a * d * d);
    }

    double limit(double sigma, double least_deviation) const {
        return mean + sigma * std::max(std::sqrt(variance), least_deviation);
    }
};

// The largest loss and gradient norm that are not a spike.
struct SpikeLimits {
    double loss = HUGE_VAL, norm = HUGE_VAL;

    // The limits in float, for the device; the one for the loss applies to its sum over `targets` tokens.
    // They are clamped because the means are read from a checkpoint and may be any numbers.
    float most_loss(double targets) const { return within_float(loss * targets); }
    float most_norm() const { return within_float(norm); }

private:
    static float within_float(double value) { return (float)std::clamp<double>(value, -FLT_MAX, FLT_MAX); }
};

// The spikes of a run so far. A range of samples is [first, second), in the order of the run.
struct SpikeHistory {
    static constexpr int64_t steps_to_warm_up = 20;
    using Samples = std::pair<uint64_t, uint64_t>;

    RunningMean loss, log_norm;
    int in_a_row = 0;                  // consecutive spikes, up to the last step
    std::vector<Samples> passed_over;  // in order

    // sigma 0: nothing is a spike.
    SpikeLimits limits(double sigma) const {
        if (sigma == 0 || loss.steps < steps_to_warm_up) return {};
        return {loss.limit(sigma, 0.01 * std::fabs(loss.mean)), std::exp(log_norm.limit(sigma, 0.2))};
    }

    void add_step(float step_loss, float gradient_norm) {
        in_a_row = 0;
        loss.add(step_loss);
        log_norm.add(std::log(std::max(gradient_norm, FLT_MIN)));
    }

    uint64_t samples_passed_over() const {
        uint64_t sum = 0;
        for (auto [begin, end] : passed_over) sum += end - begin;
        return sum;
    }

    bool is_empty() const { return loss.steps == 0 && passed_over.empty(); }

    nlohmann::ordered_json to_json() const {
        auto numbers = [](const RunningMean& of) {
            return nlohmann::ordered_json{{"steps", of.steps}, {"mean", of.mean}, {"variance", of.variance}};
        };
        return {{"loss", numbers(loss)},
                {"log_norm", numbers(log_norm)},
                {"in_a_row", in_a_row},
                {"passed_over", passed_over}};
    }
};

// Reads the result of to_json(); null gives an empty history. `what` names the JSON in messages.
inline SpikeHistory spike_history_from_json(const nlohmann::json& json, const std::string& what) {
    constexpr int64_t most_steps = 1 << 30;  // the run continues counting from the stored number
    SpikeHistory history;
    if (json.is_null()) return history;
    JsonObject fields(json, what);
    auto read = [&](const char* name) {
        JsonObject numbers = fields.child(name);
        RunningMean mean = {numbers.integer("steps", 0, most_steps)};
        for (auto [field, value] : {std::pair("mean", &mean.mean), std::pair("variance", &mean.variance)}) {
            const nlohmann::json& number = numbers.get(field);
            if (!number.is_number())
                fail("%s is %s; it must be a number", numbers.where(field).c_str(),
                     json_text(number).c_str());
            *value = number.get<double>();
        }
        if (mean.variance < 0)
            fail("%s is %g; it must not be negative", numbers.where("variance").c_str(), mean.variance);
        return mean;
    };
    history.loss = read("loss"), history.log_norm = read("log_norm");
    history.in_a_row = (int)fields.integer("in_a_row", 0, most_steps);
    uint64_t from = 0;
    for (const nlohmann::json& range : fields.array("passed_over")) {
        std::string where = fields.where("passed_over");
        if (!range.is_array() || range.size() != 2)
            fail("%s holds %s; it must hold pairs of numbers", where.c_str(), json_text(range).c_str());
        auto begin = (uint64_t)json_integer(range[0], (int64_t)from, INT64_MAX, where);
        from = (uint64_t)json_integer(range[1], (int64_t)begin, INT64_MAX, where);
        history.passed_over.push_back({begin, from});
    }
    return history;
}
