/*
The records of RUN/ranks.jsonl about every rank: how long each phase of a step took, which ranks were slow,
the timeline of a pipeline, and the health of the devices. A line has values for all ranks, so only the newest
line of each kind and sums over all lines are kept.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/report/records.h"
#include "data/run/step_times.h"  // step_phase_names

// Returns whether the name is one of step_phase_names; a file may have others, which are shown after these.
inline bool is_step_phase(std::string_view name) {
    return std::ranges::find(step_phase_names, name) != step_phase_names.end();
}

// A rank that was slower than its peers in a phase, according to records of the run itself.
struct SlowRankHistory {
    int64_t count = 0, first_step = 0, last_step = 0;
    double last_ratio = NAN, worst_ratio = 0;  // to the median of its peers
    std::string host;
};

class SlowRanks {
public:
    static constexpr size_t most = 1000;  // pairs of a rank and a phase

    // Adds the field "slow" of a record.
    void add(const nlohmann::json& record) {
        int64_t step = integer_in(record, "step");
        for (const nlohmann::json& item : array_in(record, "slow")) {
            if (!item.is_object()) continue;
            std::pair<int64_t, std::string> key = {integer_in(item, "rank", -1), text_in(item, "phase")};
            if (key.first < 0 || (ranks_.size() >= most && !ranks_.contains(key))) continue;
            SlowRankHistory& rank = ranks_[key];
            double ratio = number_in(item, "ratio");
            if (rank.count++ == 0) rank.first_step = step;
            rank.last_step = step;
            rank.last_ratio = ratio;
            if (ratio > rank.worst_ratio) rank.worst_ratio = ratio;
            if (std::string host = text_in(item, "host"); !host.empty()) rank.host = host;
        }
    }

    bool empty() const { return ranks_.empty(); }

    // By rank and phase.
    const std::map<std::pair<int64_t, std::string>, SlowRankHistory>& ranks() const { return ranks_; }

private:
    std::map<std::pair<int64_t, std::string>, SlowRankHistory> ranks_;
};

// Milliseconds of a step by phase, one number per rank: the known phases, then others in order of the file.
using PhaseMeans = std::vector<std::pair<std::string, std::vector<double>>>;

class RankHistory {
public:
    void add(const nlohmann::json& record) {
        if (record.contains("start")) begin(object_in(record, "start"));
        if (record.contains("ms")) add_times(record);
        if (record.contains("pipeline")) pipeline_ = record;
        if (record.contains("health")) health_ = array_in(record, "health");
        slow_.add(record);
    }

    // The newest interval: its last step, and its number of steps.
    int64_t step() const { return step_; }
    int64_t steps() const { return steps_; }
    const PhaseMeans& last() const { return last_; }

    // Returns the mean over all intervals since the ranks or the phases last changed.
    PhaseMeans mean() const {
        PhaseMeans result = sums_;
        for (auto& [phase, times] : result) {
            for (double& time : times) time /= (double)std::max<int64_t>(summed_steps_, 1);
        }
        return result;
    }
    int64_t summed_steps() const { return summed_steps_; }

    size_t ranks() const { return last_.empty() ? 0 : last_[0].second.size(); }
    uint64_t records() const { return records_; }
    const SlowRanks& slow() const { return slow_; }
    const nlohmann::json& pipeline() const { return object_in(pipeline_, "pipeline"); }
    int64_t pipeline_step() const { return integer_in(pipeline_, "step"); }
    const nlohmann::json& health() const { return health_; }

    // Empty if unknown.
    std::string host(size_t rank) const { return rank < hosts_.size() ? hosts_[rank] : ""; }

    // Returns the rank's position along each axis; empty if unknown.
    std::vector<int64_t> place(size_t rank) const {
        return rank < places_.size() ? places_[rank] : std::vector<int64_t>();
    }

    // The names of the axes; the usual ones if the log does not have them.
    const std::vector<std::string>& axes() const { return axes_; }

private:
    void begin(const nlohmann::json& start) {
        axes_.clear(), hosts_.clear();
        for (const nlohmann::json& axis : array_in(start, "axes"))
            axes_.push_back(axis.is_string() ? axis.get<std::string>() : "");
        if (axes_.empty()) axes_ = {"tensor", "shard", "replica", "pipeline"};
        for (const nlohmann::json& host : array_in(start, "hosts"))
            hosts_.push_back(host.is_string() ? host.get<std::string>() : "");
        places_.clear();
        for (const nlohmann::json& place : array_in(start, "places")) {
            std::vector<int64_t> coordinates;
            for (const nlohmann::json& c : place)
                if (c.is_number()) coordinates.push_back(integer_of(number_of(c), -1));
            places_.push_back(std::move(coordinates));
        }
    }

    static std::vector<double> numbers_of(const nlohmann::json& array) {
        std::vector<double> numbers;
        for (const nlohmann::json& value : array) numbers.push_back(number_of(value));
        return numbers;
    }

    // Leaves out phases with a different number of values than the first one, which has one per rank.
    void add_times(const nlohmann::json& record) {
        PhaseMeans times;
        auto take = [&](const std::string& phase, const nlohmann::json& of_ranks) {
            bool fits = of_ranks.is_array() && !of_ranks.empty() &&
                        (times.empty() || of_ranks.size() == times[0].second.size());
            if (fits) times.push_back({phase, numbers_of(of_ranks)});
        };
        for (const char* phase : step_phase_names) take(phase, array_in(object_in(record, "ms"), phase));
        for (const auto& [phase, of_ranks] : object_in(record, "ms").items()) {
            if (!is_step_phase(phase)) take(phase, of_ranks);
        }
        take("step", array_in(record, "step_ms"));
        if (times.empty()) return;
        records_++;
        step_ = integer_in(record, "step");
        steps_ = std::clamp<int64_t>(integer_in(record, "steps", 1), 1, INT32_MAX);
        bool alike = sums_.size() == times.size() && sums_[0].second.size() == times[0].second.size();
        for (size_t i = 0; alike && i < times.size(); i++) alike = sums_[i].first == times[i].first;
        if (!alike) {
            summed_steps_ = 0;
            sums_ = times;
            for (auto& [phase, sum] : sums_) std::fill(sum.begin(), sum.end(), 0.0);
        }
        summed_steps_ += steps_;
        for (size_t i = 0; i < times.size(); i++) {
            for (size_t rank = 0; rank < times[i].second.size(); rank++)
                sums_[i].second[rank] += (double)steps_ * times[i].second[rank];
        }
        last_ = std::move(times);
    }

    std::vector<std::string> axes_, hosts_;
    std::vector<std::vector<int64_t>> places_;
    uint64_t records_ = 0;
    int64_t step_ = 0, steps_ = 0, summed_steps_ = 0;
    PhaseMeans last_, sums_;
    SlowRanks slow_;
    nlohmann::json pipeline_, health_;
};
