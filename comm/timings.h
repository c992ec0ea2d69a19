/*
The times of a run's steps, collected from all ranks by the first one.

Every rank records the work that it launches on its device (comm/recorder.h), reads the times of a step once
the device has completed it, and posts them to the first rank. After each of its own steps, the first rank
takes the posts that have arrived, so no rank waits for another. It logs the spread of each step and, every
few steps, the means of all ranks, which ranks are slow (data/run/rank_times.h), and how a pipeline ran, next
to its schedule without delays.

Events cost a little. The number of events per step, and the cost of one, are known after a few steps; if they
cost more than 1/200 of a step, waits and communication are recorded in only one step out of several.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/base/strings.h"  // name_of_words
#include "data/run/device_health.h"
#include "comm/mesh.h"
#include "comm/pipeline_schedule.h"
#include "comm/placement.h"  // bus_of_device
#include "comm/recorder.h"
#include "comm/stage.h"
#include "comm/trace.h"
#include "comm/world.h"
#include "data/options/options.h"
#include "data/options/schedule.h"  // StepRange
#include "data/run/rank_state.h"    // path_of_run
#include "data/run/rank_times.h"
#include "data/run/step_log.h"

// ----------------------------------------------------------------------------
// a pipeline as measured

// The passes of one stage in a step; times are seconds on its own clock.
struct StagePasses {
    int stage = 0;
    std::vector<FlightEntry> passes;
};

// Shifts the times of each stage so that it begins when the previous stage ends its first pass. Clocks then
// need not be compared; the time of the message between the two passes is left out.
inline void align_stages(std::vector<StagePasses>& stages) {
    for (size_t s = 0; s < stages.size(); s++) {
        double begin = s == 0 ? 0 : stages[s - 1].passes.front().end;
        double shift = begin - stages[s].passes.front().begin;
        for (FlightEntry& pass : stages[s].passes) pass.begin += shift, pass.end += shift;
    }
}

// Returns the total idle time of all stages, relative to their total busy time.
inline double idle_share(const std::vector<StagePasses>& stages) {
    double busy = 0, end = 0;
    for (const StagePasses& stage : stages) {
        for (const FlightEntry& pass : stage.passes)
            busy += pass.end - pass.begin, end = std::max(end, pass.end);
    }
    return (end * (double)stages.size() - busy) / busy;
}

// Averages the time of each kind of pass on one chunk, over all stages.
inline PipelineCosts costs_of(const std::vector<StagePasses>& stages) {
    std::map<Operation, std::vector<double>> seconds;
    for (const StagePasses& stage : stages) {
        for (const FlightEntry& pass : stage.passes) seconds[pass.operation].push_back(pass.end - pass.begin);
    }
    auto mean = [&](Operation operation) {
        const std::vector<double>& all = seconds[operation];
        double sum = 0;
        for (double one : all) sum += one;
        return all.empty() ? 0 : sum / (double)all.size();
    };
    PipelineCosts costs;
    costs.forward = mean(Operation::forward);
    double backward = mean(Operation::backward);
    costs.input_gradient = backward ? backward / 2 : mean(Operation::input_gradient);
    costs.weight_gradient = backward ? backward / 2 : mean(Operation::weight_gradient);
    return costs;
}

// Returns a record for the log: what the stages did, and the same schedule as it would be if each pass took
// the mean time of its kind in this step, without any delay between passes.
inline nlohmann::ordered_json pipeline_record(std::vector<StagePasses> stages, PipelineShape shape) {
    align_stages(stages);
    auto forwards = std::ranges::count(stages[0].passes, Operation::forward, &FlightEntry::operation);
    shape.micro_batches = (int)forwards / shape.chunks;
    PipelineTiming ideal = time_pipeline(shape, costs_of(stages));
    auto action = [](const std::string& name, int micro_batch, int chunk, double begin, double end) {
        return nlohmann::ordered_json::array(
            {name, micro_batch, chunk, short_number(1e3 * begin), short_number(1e3 * end)});
    };
    nlohmann::ordered_json measured = nlohmann::ordered_json::array(), planned = measured;
    for (const StagePasses& stage : stages) {
        nlohmann::ordered_json actions = nlohmann::ordered_json::array();
        for (const FlightEntry& pass : stage.passes)
            actions.push_back(action(name_of_words(name_of(pass.operation)), pass.micro_batch, pass.chunk,
                                     pass.begin, pass.end));
        measured.push_back({{"stage", stage.stage}, {"actions", actions}});
    }
    for (int stage = 0; stage < shape.stages; stage++) {
        nlohmann::ordered_json actions = nlohmann::ordered_json::array();
        for (auto& [what, begin, end] : ideal.actions[(size_t)stage])
            actions.push_back(action(name_of_words(name_of(recorded_as(what.work))), what.micro_batch,
                                     what.chunk, begin, end));
        planned.push_back({{"stage", stage}, {"actions", actions}});
    }
    return {{"measured", measured},
            {"ideal", planned},
            {"measured_idle", short_number(idle_share(stages))},
            {"ideal_idle", short_number(ideal.bubble())}};
}

// ----------------------------------------------------------------------------
// the times of a run

class Timings {
public:
    // For all ranks: starts recording, if the run wants it.
    Timings(const Options& o, const World& world, const Mesh& mesh, const Stage& stage, cudaStream_t compute,
            StepLog& progress)
        : on_(o.timings),
          run_dir_(o.run_dir),
          world_(world),
          mesh_(mesh),
          shape_(stage.layout().pipeline),
          progress_(progress) {
        if (!on_) return;
        if (!o.trace_steps.empty()) trace_ = parse_step_range("--trace-steps", o.trace_steps);
        mesh.record_groups();
        recording_.emplace(compute, RecordedRank{world.rank(), world.size(), mesh.shape, world.host(),
                                                 path_of_run(o.run_dir)});
        cost_of_event_ = recorder.cost_of_event();
        std::string layers = std::to_string(layers_of(stage));
        std::vector<std::string> layers_of_ranks = world.gather(layers);
        if (!world.is_root()) return;
        std::vector<RankPlace> places;
        for (int rank = 0; rank < world.size(); rank++) {
            MeshPosition at = position_of(rank, mesh.shape);
            int stage = at[Axis::pipeline];
            places.push_back({world.host(rank), at, std::stoi(layers_of_ranks[(size_t)rank]),
                              stage > 0 && stage < mesh.shape.pp - 1});
        }
        ranks_.emplace(places, interval_);
        progress_.rank_places(places);
    }

    // step: counted from 1, as in the log.
    void begin_step(int step) {
        if (!on_) return;
        bool traced = trace_ && step >= trace_->first && step <= trace_->last;
        if (traced && step == trace_->first) recorder.keep_entries(true);
        if (traced) sample_memory();
        recorder.begin_step(step, traced || step % period_ == 0);
    }

    void end_step() {
        if (on_) recorder.end_step();
    }

    // For all ranks, after a step: logs what has arrived. host_seconds: the time of the step on this host
    void collect(int step, double host_seconds) {
        if (!on_) return;
        steps_++;
        if (steps_ == steps_to_warm_up) choose_period(host_seconds);
        if (trace_ && step == trace_->last) finish_trace();
        post_what_is_done();
        if (step % interval_ == 0) post('h', json_line({{"step", step}, {"health", health_.read()}}));
        take_posts();
    }

    // For all ranks, once the device has done everything: logs what has not been logged yet.
    void finish() {
        if (!on_) return;
        post_what_is_done();
        world_.await_posts();
        take_posts();
        if (ranks_ && ranks_->has_any()) tell_interval();
    }

    // Describes the slowest rank for the screen, on the first rank; empty if no rank is slow.
    std::string slowest_text() const { return ranks_ ? ranks_->slowest_text() : ""; }

private:
    static constexpr int steps_to_warm_up = 3;
    static constexpr double most_cost = 0.005;  // largest cost of timings, as a fraction of the step

    static int layers_of(const Stage& stage) {
        int layers = 0;
        for (int chunk = 0; chunk < stage.chunks(); chunk++)
            layers += stage.end_layer(chunk) - stage.first_layer(chunk);
        return layers;
    }

    // Log lines with numbers of every rank grow with the number of ranks, so large runs write them less
    // often.
    int interval_of_run() const { return 20 * (int)ceil_div(world_.size(), 512); }

    void choose_period(double host_seconds) {
        double share = recorder.events_of_step() * cost_of_event_ / host_seconds;
        period_ = world_.largest(std::max(1, (int)std::ceil(share / most_cost)));
        std::string seldom =
            period_ > 1 ? text("; communication and waits timed every %d steps", period_) : std::string();
        progress_.note(text("timings      %d events a step, %.2f us each: %.3f%% of its time%s",
                            recorder.events_of_step(), 1e6 * cost_of_event_, 100 * share, seldom.c_str()));
    }

    void sample_memory() {
        size_t available, total;
        cudaCheck(cudaMemGetInfo(&available, &total));
        memory_.push_back({recorder.host_time(), total - available});
    }

    // All ranks meet at the next step's statistics anyway, so they may wait for each other here.
    void finish_trace() {
        {
            WaitsForOthers wait("the end of the steps of --trace-steps");
            for (Patience patience; recorder.poll(), !recorder.is_idle();) patience.wait();
        }
        sample_memory();
        recorder.keep_entries(false);
        std::string path = text("%s/trace_%06d.json.gz", run_dir_.c_str(), trace_->first);
        std::string error = write_trace(world_, path, recorder.take_kept(), memory_);
        if (world_.is_root())
            error.empty() ? progress_.note(text("trace        %s: steps %d to %d of %d ranks", path.c_str(),
                                                trace_->first, trace_->last, world_.size()))
                          : progress_.warn("trace: " + error + "; the run continues without it");
        trace_.reset();
    }

    // A post is 't' and the rank's times; 'p' and its stage's passes; or 'h' and its device's health.
    void post_what_is_done() {
        recorder.poll();
        bool speaks = shape_.stages > 1 && index_along(stage_axes, mesh_.position, mesh_.shape) == 0;
        while (std::optional<RecordedStep> step = recorder.take_step()) {
            post('t', {(const char*)&step->times, sizeof step->times});
            const std::vector<FlightEntry>& passes = step->passes;
            if (speaks && step->times.step % interval_ == 0 && !passes.empty())
                post('p', {(const char*)passes.data(), passes.size() * sizeof(FlightEntry)});
        }
    }

    void post(char kind, const std::string& bytes) {
        if (world_.is_root())
            take(0, kind + bytes);
        else
            world_.post(kind + bytes);
    }

    void take_posts() {
        if (!world_.is_root()) return;
        for (auto& [rank, message] : world_.posted()) take(rank, message);
    }

    void take(int rank, const std::string& message) {
        const char* bytes = message.data() + 1;
        if (message[0] == 'p') return take_passes(rank, bytes, message.size() - 1);
        if (message[0] == 'h') return take_health(rank, nlohmann::ordered_json::parse(bytes));
        StepTimes times;
        memcpy((void*)&times, bytes, sizeof times);
        if (auto line = ranks_->add(rank, times)) progress_.timings(*line);
        if (ranks_->is_due()) tell_interval();
    }

    void take_passes(int rank, const char* bytes, size_t size) {
        StagePasses stage = {position_of(rank, mesh_.shape)[Axis::pipeline], {}};
        stage.passes.resize(size / sizeof(FlightEntry));
        memcpy((void*)stage.passes.data(), bytes, size);
        int step = stage.passes[0].step;
        if (pipelines_.size() > 1 && !pipelines_.contains(step))
            pipelines_.erase(pipelines_.begin());  // some stage posted no passes
        std::vector<StagePasses>& stages = pipelines_[step];
        stages.push_back(std::move(stage));
        if ((int)stages.size() < shape_.stages) return;
        std::ranges::sort(stages, {}, &StagePasses::stage);
        progress_.ranks({{"step", step}, {"pipeline", pipeline_record(stages, shape_)}});
        pipelines_.erase(step);
    }

    // Ranks whose device reports nothing are left out.
    void take_health(int rank, const nlohmann::ordered_json& told) {
        const int step = told["step"];
        const nlohmann::ordered_json& now = told["health"];
        Readings& readings = readings_[step];
        if (!now.empty()) {
            nlohmann::ordered_json record = {{"rank", rank}};
            record.update(now);
            readings.of_ranks.push_back(record);
            std::string alarm = DeviceHealth::alarm(last_readings_[rank], now);
            if (!alarm.empty())
                progress_.warn(text("health       %s: %s", world_.name_of(rank).c_str(), alarm.c_str()));
            last_readings_[rank] = now;
        }
        if (++readings.told < world_.size()) return;
        if (!readings.of_ranks.empty()) progress_.ranks({{"step", step}, {"health", readings.of_ranks}});
        readings_.erase(step);
    }

    void tell_interval() {
        nlohmann::ordered_json line = ranks_->take_interval();
        std::vector<std::string> slow;
        for (const SlowRank& each : ranks_->slow()) slow.push_back(ranks_->slow_text(each));
        progress_.slow(line["step"], slow, ranks_->slow_record());
        progress_.ranks(line);
    }

    const bool on_;
    const std::string run_dir_;
    const World& world_;
    const Mesh& mesh_;
    const PipelineShape shape_;
    StepLog& progress_;
    std::optional<TraceSession> recording_;
    std::optional<RankTimes> ranks_;                     // on the first rank
    std::map<int, std::vector<StagePasses>> pipelines_;  // by step, of stages that have posted
    struct Readings {
        nlohmann::ordered_json of_ranks = nlohmann::ordered_json::array();
        int told = 0;  // ranks that have posted
    };
    DeviceHealth health_{bus_of_device()};
    std::map<int, Readings> readings_;                     // by step, until all ranks have posted
    std::map<int, nlohmann::ordered_json> last_readings_;  // by rank
    std::optional<StepRange> trace_;                       // pending or under way
    std::vector<MemorySample> memory_;
    const int interval_ = interval_of_run();
    double cost_of_event_ = 0;
    int period_ = 1;  // details are recorded in every period_-th step
    int steps_ = 0;
};
