/*
The output of a run for its user, as lines on the screen, and for its log, as JSON in log.jsonl. The log has
every step. A line on the screen summarizes the steps since the previous line, which may be several
(--log-every): it shows their means and the slowest of them. Only rank 0 has a log.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/base/file.h"
#include "data/base/figures.h"
#include "data/run/meter.h"
#include "data/run/rank_times.h"  // RankPlace
#include "data/run/spike_rule.h"  // SpikeLimits, SpikeHistory
#include "data/options/options.h"
#include "data/options/schedule.h"
#include "data/run/run_log.h"
#include "data/checkpoint/save_report.h"
#include "data/base/screen.h"
#include "data/base/strings.h"

// The steps that one line on the screen summarizes.
struct StepInterval {
    int steps = 0;
    double tokens = 0, loss = 0, norm = 0, seconds = 0;  // sums
    double slowest = 0;                                  // seconds
    int slowest_step = 0;

    void add(int step, long long tokens_of_step, float loss_of_step, float norm_of_step, double took) {
        steps++;
        tokens += (double)tokens_of_step, loss += loss_of_step, norm += norm_of_step, seconds += took;
        if (took > slowest) slowest = took, slowest_step = step;
    }
};

class StepLog {
public:
    // `log` may be null.
    StepLog(const Options& o, Meter& meter, RunLog* log) : o_(o), meter_(meter), log_(log) {}

    ~StepLog() {
        if (!log_) return;
        warn(log_->sync());
        if (size_t lost = log_->waiting())
            warn(text("log.jsonl: %zu lines could not be written, and are lost", lost));
    }

    // Logs that the run begins, or resumes, after this step.
    void start(int step, const nlohmann::ordered_json& how) {
        first_step_ = step;
        write({{"step", step}, {"start", how}});
    }

    // Sets the planner's time of a step in seconds, which is compared with the first steps of the run; 0: not
    // known.
    void expect(double seconds) {
        expected_ = seconds;
        if (seconds > 0)
            print("planned      %.4g ms a step, from %s\n", 1e3 * seconds,
                  o_.machine.empty() ? "the rates expected of this kind of GPU"
                                     : ("the rates of " + printable(o_.machine)).c_str());
    }

    // ratios: by matrix name.
    void trust_ratios(int step, const std::vector<std::pair<std::string, float>>& ratios) {
        nlohmann::ordered_json by_name;
        for (auto& [name, ratio] : ratios) by_name[name] = ratio;
        write({{"step", step}, {"trust_ratios", by_name}});
    }

    // Keeps the places of the ranks, which are written to ranks.jsonl before the first times.
    void rank_places(const std::vector<RankPlace>& places) {
        nlohmann::ordered_json hosts = nlohmann::ordered_json::array(), at = hosts;
        for (const RankPlace& place : places) {
            hosts.push_back(place.host);
            at.push_back(place.at.of);
        }
        places_ = {{"step", first_step_},
                   {"start", {{"time", utc_time()}, {"hosts", hosts}, {"axes", axis_names}, {"places", at}}}};
    }
    // These two log what all ranks reported: about one step to log.jsonl, and about several to ranks.jsonl.
    void timings(const nlohmann::ordered_json& line) { write(line); }
    void ranks(const nlohmann::ordered_json& line) {
        if (!log_) return;
        if (!places_.is_null()) warn(log_->write_ranks(std::exchange(places_, nullptr)));
        warn(log_->write_ranks(line));
    }
    // Logs the ranks that were slow in the last steps; the screen shows them only when they change.
    void slow(int step, const std::vector<std::string>& names, const nlohmann::ordered_json& record) {
        if (!names.empty()) write({{"step", step}, {"slow", record}});
        std::set<int> ranks;
        for (auto& each : record) ranks.insert(each["rank"].get<int>());
        if (std::exchange(slow_, ranks) == ranks) return;
        for (const std::string& name : names) warn("slow         " + name + ": the others wait for it");
        if (names.empty()) note("slow         no rank is slow anymore");
    }
    // Logs that the run ends early, as asked.
    void stopped(int step) { write({{"step", step}, {"stopped", "as asked"}}); }
    // Prints a separate line.
    void note(const std::string& line) {
        Screen::Turn turn(screen);
        print("%s\n", line.c_str());
    }

    // tokens: trained on so far. sent_bytes: by this rank. skipped: the weights were left unchanged.
    void step(int step, uint64_t tokens, float loss, float gradient_norm, float learning_rate, double seconds,
              uint64_t sent_bytes, bool skipped = false, float late_rows = NAN,
              float context_imbalance = NAN) {
        double rate = tokens_of_step(o_, step - 1) / seconds;
        meter_.add_step(rate);
        recent_ = recent_ == 0 ? 1 / rate : 0.95 * recent_ + 0.05 / rate;
        nlohmann::ordered_json line = {{"step", step},
                                       {"loss", loss},
                                       {"grad_norm", gradient_norm},
                                       {"lr", learning_rate},
                                       {"tokens", tokens},
                                       {"tokens_per_s", rate},
                                       {"mfu", nullptr},
                                       {"gemm_share", meter_.gemm_share(rate)},
                                       {"ms", seconds * 1e3},
                                       {"time", utc_time()}};
        if (meter_.has_peak()) line["mfu"] = meter_.mfu(rate);
        if (o_.ranks() > 1) line["sent_bytes"] = sent_bytes;
        if (!std::isnan(late_rows)) line["late_rows"] = late_rows;
        if (!std::isnan(context_imbalance)) line["context_imbalance"] = context_imbalance;
        if (skipped) line["skipped"] = true;
        write(line);
        interval_.add(step, tokens_of_step(o_, step - 1), loss, gradient_norm, seconds);
        if (step % o_.log_every == 0 || step == 1 || step == o_.steps) {
            Screen::Turn turn(screen);
            print("%s\n", interval_line(step, learning_rate).c_str());
            interval_ = {};
        }
        compare_with_plan(step, seconds);
    }

    // Reports a step that changed nothing, because it was a spike.
    void spike(int step, float loss, float gradient_norm, const SpikeLimits& limits) {
        note(text(
            "spike        step %d: loss %.4f, norm %.3f, but at most %.4f and %.3f are considered normal; "
            "its update is skipped",
            step, loss, gradient_norm, limits.loss, limits.norm));
    }
    // Reports that the run goes back to the state after an earlier step, and passes over the spikes' samples.
    void went_back(int step, int from_step, int spikes, const SpikeHistory::Samples& passed_over) {
        note(
            text("spikes       %d in a row up to step %d: back to the checkpoint of step %d; samples %llu to "
                 "%llu are passed over",
                 spikes, from_step, step, (unsigned long long)passed_over.first,
                 (unsigned long long)passed_over.second - 1));
        write(
            {{"step", step},
             {"went_back", {{"from_step", from_step}, {"passed_over", passed_over}, {"time", utc_time()}}}});
    }

    // Logs a step that changed nothing because its loss or gradient is not finite. Values that are not finite
    // are logged as null.
    void not_finite(int step, float loss, float gradient_norm) {
        write({{"step", step}, {"loss", loss}, {"grad_norm", gradient_norm}, {"time", utc_time()}});
    }

    // Returns the seconds from this step to the end of the run, estimated from recent steps.
    double seconds_left(int step) const {
        return recent_ * (double)(tokens_until(o_, o_.steps) - tokens_until(o_, step));
    }

    // set: the name of the validation set; empty if there is only one.
    void validation(int step, const std::string& set, float loss) {
        Screen::Turn turn(screen);
        print("step %6d/%d  validation loss %.4f%s\n", step, o_.steps, loss,
              set.empty() ? "" : (" of " + set).c_str());
        write({{"step", step}, {validation_field(set), loss}});
    }
    // words: the result as `eval` prints it; record: the result for the log.
    void evaluation(int step, const std::string& words, const nlohmann::ordered_json& record) {
        Screen::Turn turn(screen);
        print("step %6d/%d  %s\n", step, o_.steps, words.c_str());
        write({{"step", step}, {"eval", record}});
    }

    void sample(int step, const std::string& sample) {
        Screen::Turn turn(screen);
        print("---- sample at step %d\n", step);
        print("%s\n----\n", sample.c_str());
        write({{"step", step}, {"sample", sample}});
    }

    void checkpoint(const SaveReport& report) {
        if (!report.error.empty()) {
            checkpoint_failed(report);
            return;
        }
        if (!report.weights_alone) last_checkpoint_ = report.folder;
        double rate = (double)report.bytes / report.seconds;
        Screen::Turn turn(screen);
        print("%s after step %lld: %sB, training waited %.2f s, written in %.2f s (%sB/s)\n",
              report.weights_alone ? "weights only" : "checkpoint", (long long)report.step,
              human((double)report.bytes).c_str(), report.stalled, report.seconds, human(rate).c_str());
        if (!report.remark.empty()) print("older checkpoints kept: %s\n", one_line(report.remark).c_str());
        write({{"step", report.step},
               {report.weights_alone ? "weights" : "checkpoint", report.folder},
               {"bytes", report.bytes},
               {"stall_ms", report.stalled * 1e3},
               {"write_ms", report.seconds * 1e3}});
    }

    // Prints a warning, unless it is empty.
    void warn(const std::string& words) {
        if (!words.empty()) screen.warn(one_line(words));
    }

private:
    // Returns the line that summarizes the steps since the previous line.
    std::string interval_line(int step, float learning_rate) const {
        double rate = interval_.tokens / interval_.seconds;
        std::string mfu = meter_.has_peak() ? text("  MFU %4.1f%%", 100 * meter_.mfu(rate)) : "";
        std::string slowest = interval_.steps == 1 ? ""
                                                   : text("  slowest %.1f ms at step %d",
                                                          interval_.slowest * 1e3, interval_.slowest_step);
        return text(
            "step %6d/%d  loss %.4f  norm %6.3f  lr %.2e  %7.1f ms  %6s tok/s%s  %4.1f%% of GEMM rate "
            " %s left%s",
            step, o_.steps, interval_.loss / interval_.steps, interval_.norm / interval_.steps, learning_rate,
            interval_.seconds / interval_.steps * 1e3, human(rate).c_str(), mfu.c_str(),
            100 * meter_.gemm_share(rate), duration(seconds_left(step)).c_str(), slowest.c_str());
    }

    // The first step is a warm-up; the median of the following ones counts.
    void compare_with_plan(int step, double seconds) {
        constexpr size_t steps = 11;
        if (expected_ == 0) return;
        first_.push_back(seconds);
        if (first_.size() < steps && step < o_.steps) return;
        if (first_.size() > 1) {
            std::sort(first_.begin() + 1, first_.end());
            double measured = first_[(first_.size() + 1) / 2];
            Screen::Turn turn(screen);
            print("planned %.4g ms a step, measured %.4g (%+.1f%%)\n", 1e3 * expected_, 1e3 * measured,
                  100 * (measured / expected_ - 1));
            write({{"step", step}, {"planned_ms", 1e3 * expected_}, {"measured_ms", 1e3 * measured}});
        }
        expected_ = 0;
    }

    void checkpoint_failed(const SaveReport& report) {
        screen.warn(text("checkpoint after step %lld: NOT saved: %s; %s", (long long)report.step,
                         one_line(report.error).c_str(),
                         last_checkpoint_.empty() ? "older ones are unchanged"
                                                  : ("the last one is " + last_checkpoint_).c_str()));
        // "trouble" is the name that readers of the log know
        write({{"step", report.step}, {"checkpoint", nullptr}, {"trouble", report.error}});
    }

    void write(const nlohmann::ordered_json& line) {
        if (log_) warn(log_->write(line));
    }

    const Options& o_;
    Meter& meter_;
    RunLog* log_;
    std::string last_checkpoint_;  // the newest that this process has written
    StepInterval interval_;
    double recent_ = 0;              // seconds per token, averaged
    double expected_ = 0;            // planned seconds per step; 0 after the comparison
    std::vector<double> first_;      // seconds of the first steps
    int first_step_ = 0;             // the step that the run was started after
    std::set<int> slow_;             // ranks that were last reported as slow
    nlohmann::ordered_json places_;  // the ranks' places, until they are written
};
