/*
The times of all ranks, gathered by rank 0: a step's time on the fastest, the median and the slowest
rank, and which ranks hold up the others.

A rank is slow if it computes for longer than its peers, which wait for it. Its peers are ranks with the same
kind of work: the other ranks of its pipeline stage or, if a stage is a single rank, the other inner stages,
compared per layer (the first and the last stage have additional work). A slow rank meets three conditions
over an interval of steps:

    its own work in the median step takes at least a tenth longer than that of its peers,
    it takes over 5% longer than theirs in three steps of four, so it is not a single freeze,
    and the peers waited longer than it by at least half of the difference.

A rank that has been slow for fewer than 100 steps is named only if it is slower still, because the
uncertainty of a mean is proportional to the inverse square root of the number of steps: after 25 steps, it
must take a fifth longer than its peers.

MegaScale (Jiang et al., "MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs", 2024)
found its slow machines, half a percent of all, by such a comparison.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"  // median_of
#include "data/base/strings.h"  // words_of_name
#include "data/run/axes.h"
#include "data/run/step_times.h"

// A rank of a run: its place, and its part of the model.
struct RankPlace {
    std::string host;
    PerAxis at;
    int layers = 1;
    bool inner_stage = false;  // neither the first stage nor the last
};

struct SlowRank {
    int rank;
    StepPhase phase;  // in which it loses the most time
    double ratio;     // its own work divided by its peers'
};

// The spread of a number over the ranks.
struct Spread {
    double least = 0, median = 0, most = 0;
    int rank = 0;  // the one with the largest value
};

inline Spread spread_of(const std::vector<double>& values) {
    auto [least, most] = std::ranges::minmax_element(values);
    return {*least, median_of(values), *most, (int)(most - values.begin())};
}

// Rounds milliseconds, or a share, to four decimals.
inline double short_number(double value) {
    return std::round(value * 1e4) / 1e4;
}

class RankTimes {
public:
    // interval: the number of steps over which ranks are judged.
    RankTimes(std::vector<RankPlace> places, int interval)
        : places_(std::move(places)), interval_(interval) {}

    // Adds a rank's times of a step; each rank reports once, in any order. Returns the step's log line once
    // all ranks have reported.
    std::optional<nlohmann::ordered_json> add(int rank, const StepTimes& times) {
        Step& step = steps_[times.step];
        step.ranks.resize(places_.size());
        step.ranks[(size_t)rank] = times;
        if (++step.told < places_.size()) return {};
        std::vector<StepTimes> whole = std::move(step.ranks);
        steps_.erase(times.step);
        nlohmann::ordered_json line = {{"step", times.step}, {"timings", summary(whole)}};
        last_ = times.step;
        if (times.detailed) kept_.push_back(std::move(whole));
        return line;
    }

    // Returns whether enough steps have been gathered to judge the ranks.
    bool is_due() const { return (int)kept_.size() >= interval_; }
    bool has_any() const { return !kept_.empty(); }

    // Returns the interval's means by rank and its slow ranks, and begins the next interval.
    nlohmann::ordered_json take_interval() {
        slow_ = find_slow();
        nlohmann::ordered_json ms;
        for (size_t phase = 0; phase < step_phases; phase++) {
            std::vector<double> means = means_of([&](const StepTimes& t) { return 1e3 * t.phases[phase]; });
            if (std::ranges::any_of(means, [](double mean) { return mean != 0; }))
                ms[step_phase_names[phase]] = means;
        }
        nlohmann::ordered_json line = {
            {"step", last_},
            {"steps", kept_.size()},
            {"ms", ms},
            {"step_ms", means_of([](const StepTimes& t) { return 1e3 * t.seconds; })},
            {"slow", slow_record()}};
        kept_.clear();
        return line;
    }

    // The ranks that were slow in the last interval, the slowest first.
    const std::vector<SlowRank>& slow() const { return slow_; }

    nlohmann::ordered_json slow_record() const {
        nlohmann::ordered_json record = nlohmann::ordered_json::array();
        for (const SlowRank& each : slow_)
            record.push_back({{"rank", each.rank},
                              {"host", places_[(size_t)each.rank].host},
                              {"phase", step_phase_names[(size_t)each.phase]},
                              {"ratio", short_number(each.ratio)}});
        return record;
    }

    // "rank 5 on HOST: 1.31 times as slow as its peers, mostly in forward"
    std::string slow_text(const SlowRank& slow) const {
        const std::string phase = words_of_name(step_phase_names[(size_t)slow.phase]);
        return text("rank %d on %s: %.2f times as slow as its peers, mostly in %s", slow.rank,
                    places_[(size_t)slow.rank].host.c_str(), slow.ratio, phase.c_str());
    }

    // "slowest rank 5 (backward 1.3x)" of the last interval; empty: no rank was slow.
    std::string slowest_text() const {
        if (slow_.empty()) return "";
        const std::string phase = words_of_name(step_phase_names[(size_t)slow_[0].phase]);
        return text("slowest rank %d (%s %.1fx)", slow_[0].rank, phase.c_str(), slow_[0].ratio);
    }

private:
    struct Step {
        std::vector<StepTimes> ranks;
        size_t told = 0;
    };

    static nlohmann::ordered_json summary(const std::vector<StepTimes>& ranks) {
        auto record = [&](auto&& value) -> nlohmann::ordered_json {
            std::vector<double> values;
            for (const StepTimes& times : ranks) values.push_back(value(times));
            Spread spread = spread_of(values);
            if (spread.least == 0 && spread.most == 0) return nullptr;
            return {short_number(spread.least), short_number(spread.median), short_number(spread.most),
                    spread.rank};
        };
        nlohmann::ordered_json result, ms;
        for (size_t phase = 0; phase < step_phases; phase++) {
            auto of_phase = record([&](const StepTimes& times) { return 1e3 * times.phases[phase]; });
            if (!of_phase.is_null()) ms[step_phase_names[phase]] = of_phase;
        }
        result["ms"] = ms;
        if (!ranks[0].detailed) return result;
        auto share = [](const StepTimes& times) {
            return times.seconds > 0 ? times.waited() / times.seconds : 0.0;
        };
        if (auto waited = record(share); !waited.is_null()) result["waited"] = waited;
        return result;
    }

    template <typename Value>
    std::vector<double> means_of(Value&& value) const {
        std::vector<double> means(places_.size());
        for (size_t rank = 0; rank < means.size(); rank++) {
            for (const auto& step : kept_) means[rank] += value(step[rank]);
            means[rank] = short_number(means[rank] / (double)kept_.size());
        }
        return means;
    }

    // Ranks that do the same work; by_layer: times are compared per layer.
    struct Peers {
        std::vector<size_t> ranks;
        bool by_layer;
    };

    std::vector<Peers> groups_of_peers() const {
        std::map<int, Peers> stages;
        for (size_t rank = 0; rank < places_.size(); rank++)
            stages[places_[rank].at[Axis::pipeline]].ranks.push_back(rank);
        std::vector<Peers> groups;
        Peers inner = {{}, true};
        for (auto& [stage, group] : stages) {
            if (group.ranks.size() > 1)
                groups.push_back(group);
            else if (places_[group.ranks[0]].inner_stage)
                inner.ranks.push_back(group.ranks[0]);
        }
        if (inner.ranks.size() > 1) groups.push_back(inner);
        return groups;
    }

    // A step's time on a rank, and the median of its peers.
    struct Compared {
        double mine, theirs;
        double excess() const { return mine - theirs; }
    };

    // (ranks of the group, steps)
    template <typename Value>
    std::vector<std::vector<Compared>> compare(const Peers& peers, Value&& value) const {
        const size_t ranks = peers.ranks.size(), others = ranks - 1;
        std::vector<std::vector<Compared>> result(ranks);
        for (const std::vector<StepTimes>& step : kept_) {
            std::vector<double> values, sorted;
            for (size_t rank : peers.ranks)
                values.push_back(value(step[rank]) / (peers.by_layer ? places_[rank].layers : 1));
            sorted = values;
            std::ranges::sort(sorted);
            for (size_t i = 0; i < ranks; i++) {
                auto own = (size_t)(std::ranges::lower_bound(sorted, values[i]) - sorted.begin());
                auto other = [&](size_t at) { return sorted[at + (at >= own)]; };  // in sorted order
                result[i].push_back({values[i], (other(others / 2) + other((others - 1) / 2)) / 2});
            }
        }
        return result;
    }

    static double typical_excess(const std::vector<Compared>& steps) {
        std::vector<double> excess;
        for (const Compared& step : steps) excess.push_back(step.excess());
        return median_of(excess);
    }

    std::vector<SlowRank> find_slow() {
        constexpr double least_ratio = 1.1, ratio_of_a_step = 1.05, steps_above = 0.75, share_waited = 0.5;
        std::map<size_t, double> before = std::exchange(slow_steps_, {});
        std::vector<SlowRank> found;
        for (const Peers& peers : groups_of_peers()) {
            auto own = compare(peers, [](const StepTimes& times) { return (double)times.own_work(); });
            auto waited = compare(peers, [](const StepTimes& times) { return (double)times.waited(); });
            for (size_t i = 0; i < peers.ranks.size(); i++) {
                std::vector<double> mine, theirs;
                for (const Compared& step : own[i]) mine.push_back(step.mine), theirs.push_back(step.theirs);
                double usual = median_of(theirs), ratio = median_of(mine) / usual;
                auto above = std::ranges::count_if(
                    own[i], [](const Compared& step) { return step.mine > ratio_of_a_step * step.theirs; });
                if (usual <= 0 || ratio < least_ratio ||
                    (double)above < steps_above * (double)own[i].size() ||
                    -typical_excess(waited[i]) < share_waited * typical_excess(own[i]))
                    continue;
                double steps = slow_steps_[peers.ranks[i]] = before[peers.ranks[i]] + (double)kept_.size();
                if (ratio - 1 >= (least_ratio - 1) * std::sqrt(100 / std::min(100.0, steps)))
                    found.push_back({(int)peers.ranks[i], slowest_phase(peers, i), ratio});
            }
        }
        std::ranges::sort(found, std::ranges::greater(), &SlowRank::ratio);
        return found;
    }

    // Returns the phase in which rank i of the group loses the most time to the others.
    StepPhase slowest_phase(const Peers& peers, size_t i) const {
        StepPhase slowest = StepPhase::forward;
        double most = 0;
        for (auto phase = (size_t)StepPhase::forward; phase <= (size_t)StepPhase::optimizer; phase++) {
            auto times_of = [&](const StepTimes& times) { return (double)times.phases[phase]; };
            double lost = typical_excess(compare(peers, times_of)[i]);
            if (lost > most) most = lost, slowest = (StepPhase)phase;
        }
        return slowest;
    }

    const std::vector<RankPlace> places_;
    const int interval_;
    std::map<int, Step> steps_;                 // steps that not all ranks have reported
    std::vector<std::vector<StepTimes>> kept_;  // complete steps of the interval
    std::map<size_t, double> slow_steps_;       // by rank: the consecutive steps for which it has been slow
    std::vector<SlowRank> slow_;
    int last_ = 0;
};
