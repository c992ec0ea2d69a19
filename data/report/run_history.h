/*
A run directory read from end to end, for a report: options.json, log.jsonl and, if present, ranks.jsonl and
incidents.jsonl. All of these except the log may be missing or damaged: notes say so, and the readable part is
used. The memory needed does not grow with the length of the run.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <map>
#include <string>
#include <sys/stat.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/figures.h"
#include "data/base/json.h"
#include "data/report/rank_history.h"
#include "data/report/records.h"
#include "data/report/series.h"
#include "data/run/run_log.h"

// Refuses a path that is not the directory of a run.
inline void check_run_log(const std::string& run_dir) {
    struct stat status;
    if (stat(run_dir.c_str(), &status) != 0) fail_with_errno(run_dir, "open it");
    if (!S_ISDIR(status.st_mode))
        fail("%s: is not a directory; name the directory of a run", printable(run_dir).c_str());
    if (!exists(log_path(run_dir)))
        fail("%s: has no log.jsonl; name the directory of a run", printable(run_dir).c_str());
}

// Converts a time that utc_time() wrote to seconds since 1970. Returns NaN for any other text.
inline double seconds_of(const std::string& time) {
    struct tm parts = {};
    double seconds = 0;
    int read = sscanf(time.c_str(), "%4d-%2d-%2dT%2d:%2d:%lf", &parts.tm_year, &parts.tm_mon, &parts.tm_mday,
                      &parts.tm_hour, &parts.tm_min, &seconds);
    if (read != 6) return NAN;
    parts.tm_year -= 1900;
    parts.tm_mon--;
    return (double)timegm(&parts) + seconds;
}

// Returns whether a process on this machine has locked a file, as a run locks its log. Reads the kernel's
// list of locks, because trying the lock, as is_locked() does, would disturb a run that is just starting.
// Compares only inodes, because overlay file systems report different device numbers.
inline bool is_locked_here(const std::string& path) {
    struct stat status;
    FILE* locks = stat(path.c_str(), &status) == 0 ? fopen("/proc/locks", "re") : nullptr;
    if (!locks) return false;
    bool found = false;
    char line[256];
    while (!found && fgets(line, sizeof line, locks)) {
        unsigned long long inode = 0;
        bool is_flock = sscanf(line, "%*d: FLOCK %*s WRITE %*d %*x:%*x:%llu", &inode) == 1;
        found = is_flock && inode == status.st_ino;
    }
    fclose(locks);
    return found;
}

enum class RunState {
    complete,   // the last step is done
    running,    // a process has locked the log
    recent,     // the last line is so recent that the run may be active elsewhere
    stopped,    // steps are left, and the run was asked to stop
    cut_short,  // steps are left, and no process is active
    unknown     // the number of steps is not known
};

class RunHistory {
public:
    static constexpr size_t most_rows = 200;  // in each table
    static constexpr size_t most_samples = 24;
    static constexpr size_t most_phases = 32;

    explicit RunHistory(const std::string& run_dir) : run_dir_(run_dir) {
        check_run_log(run_dir);
        read_options();
        attempt([&] { supervisor_ = supervisor_json(run_dir); });
        note(read_records(log_path(run_dir), [&](const nlohmann::json& line) { add(line); }), "log.jsonl");
        if (exists(ranks_path(run_dir))) {
            note(read_records(ranks_path(run_dir), [&](const nlohmann::json& line) { ranks_.add(line); }),
                 "ranks.jsonl");
        }
        if (exists(incidents_path(run_dir))) {
            note(read_records(incidents_path(run_dir),
                              [&](const nlohmann::json& line) { incidents_.add(line); }),
                 "incidents.jsonl");
        }
        if (dropped_ > 0)
            notes_.push_back("log.jsonl: " + counted(dropped_, "line") +
                             " could never be written, because the disk failed");
        std::vector<std::string> may_be_nan = validation_losses();
        may_be_nan.insert(may_be_nan.begin(), {"loss", "grad_norm"});
        for (const std::string& name : may_be_nan) {
            const Series& curve = series(name);
            if (curve.not_finite() == 0) continue;
            notes_.push_back(name + " is not a finite number at " + counted(curve.not_finite(), "step") +
                             ", first at step " + std::to_string(curve.without_number()[0]));
        }
        if (steps_back_ > 0)
            notes_.push_back("log.jsonl: steps go back " + counted(steps_back_, "time") +
                             "; what was measured twice is shown as one range");
        is_locked_ = is_locked_here(log_path(run_dir));
    }

    // Adds a note if another run measured its validation loss on different tokens. The tokens are compared by
    // content or, for runs of earlier programs, by the options that select them.
    void compare_validation(const RunHistory& other) {
        if (validation_losses().empty() || other.validation_losses().empty()) return;
        const nlohmann::json &own_set = object_in(start_, "validation"),
                             &other_set = object_in(other.start_, "validation");
        bool known = !own_set.empty() && !other_set.empty();
        bool same = known
                        ? are_comparable(own_set, other_set)
                        : text_in(options_, "val_data") == text_in(other.options_, "val_data") &&
                              integer_in(options_, "val_tokens") == integer_in(other.options_, "val_tokens");
        if (same) return;
        notes_.push_back("its validation loss is computed on different tokens from that of " +
                         other.run_dir_ + ": the two cannot be compared");
    }

    const std::string& run_dir() const { return run_dir_; }
    const nlohmann::json& options() const { return options_; }        // an object
    const nlohmann::json& supervisor() const { return supervisor_; }  // train_gpt launch's state; null: none
    const nlohmann::json& start() const { return start_; }  // the record of the last start, an object
    uint64_t starts() const { return starts_; }
    const std::vector<std::string>& notes() const { return notes_; }

    // Curves by the name of their field in the log.
    const std::map<std::string, Series>& series() const { return series_; }
    const Series& series(const std::string& name) const {
        static const Series none;
        auto found = series_.find(name);
        return found == series_.end() ? none : found->second;
    }
    // Returns the names of the validation curves: "val_loss", or "val_loss/NAME" for each set.
    std::vector<std::string> validation_losses() const {
        std::vector<std::string> names;
        for (const auto& [name, series] : series_)
            if (is_validation_loss(name)) names.push_back(name);
        return names;
    }
    const std::vector<std::pair<std::string, Series>>& phases() const { return phases_; }
    const Series& waited() const { return waited_; }

    // The tokens, and the seconds of training, up to each step.
    const Series& tokens() const { return series("tokens"); }
    const Series& seconds() const { return seconds_; }

    const SpreadOf<nlohmann::json>& samples() const { return samples_; }
    const LastOf<nlohmann::json>& checkpoints() const { return checkpoints_; }
    const LastOf<nlohmann::json>& skipped() const { return skipped_; }
    const LastOf<nlohmann::json>& incidents() const { return incidents_; }
    const LastOf<nlohmann::json>& evaluations() const { return evaluations_; }
    const nlohmann::json& planned() const { return planned_; }
    const RankHistory& ranks() const { return ranks_; }
    const SlowRanks& slow() const { return ranks_.slow().empty() ? slow_ : ranks_.slow(); }
    bool measures_ranks() const { return !phases_.empty() || ranks_.records() > 0; }

    int64_t last_step() const { return last_step_; }
    int64_t steps() const { return integer_in(options_, "steps"); }  // the run's length; 0: not known
    const std::string& first_time() const { return first_time_; }
    const std::string& last_time() const { return last_time_; }

    // `now`: seconds since 1970.
    RunState state(double now) const {
        if (is_locked_) return RunState::running;
        if (steps() == 0) return RunState::unknown;
        if (last_step_ >= steps()) return RunState::complete;
        if (was_asked_) return RunState::stopped;
        constexpr double patience = 60, some_steps = 10;
        double step = series("ms").points() > 0 ? series("ms").last() / 1e3 : 0;
        double age = now - seconds_of(last_time_);
        return age < patience + some_steps * step ? RunState::recent : RunState::cut_short;
    }

private:
    void read_options() {
        options_ = nlohmann::json::object();
        if (!exists(options_path(run_dir_))) {
            notes_.push_back("options.json: is missing, so neither the model nor the length of the run is "
                             "known");
            return;
        }
        attempt([&] {
            nlohmann::json options = run_options_json(run_dir_);
            if (options.is_object()) options_ = in_todays_form(std::move(options), "options.json");
        });
    }

    // Calls work(); an error becomes a note.
    void attempt(auto&& work) {
        std::string error;
        note_error(error, work);
        if (!error.empty()) notes_.push_back(error);
    }

    void note(const Reading& reading, const char* name) {
        for (std::string& note : reading.notes(name)) notes_.push_back(std::move(note));
        bool may_be_empty = name == std::string_view("incidents.jsonl");  // launch makes it, whatever follows
        if (reading.records == 0 && !may_be_empty)
            notes_.push_back(std::string(name) + ": holds no record yet");
    }

    void add(const nlohmann::json& line) {
        int64_t step = integer_in(line, "step");
        steps_back_ += step < last_step_ && line.contains("loss");
        if (std::string time = text_in(line, "time"); !time.empty()) {
            if (first_time_.empty()) first_time_ = time;
            last_time_ = time;
        }
        if (line.contains("start")) add_start(step, object_in(line, "start"));
        if (line.contains("timings")) add_timings(step, object_in(line, "timings"));
        if (line.contains("sample")) samples_.add(line);
        if (line.contains("checkpoint") || line.contains("weights")) checkpoints_.add(line);
        if (line.contains("eval")) evaluations_.add(line);
        if (line.contains("planned_ms")) planned_ = line;
        dropped_ += (uint64_t)std::max<int64_t>(integer_in(line, "dropped_lines"), 0);
        slow_.add(line);
        bool is_skipped = line.value("skipped", nlohmann::json()) == true;
        if (is_skipped) skipped_.add(line);
        if (line.contains("loss")) add_step(step, line, is_skipped);
        for (const auto& [name, value] : line.items())
            if (is_validation_loss(name)) series_[name].add(step, number_of(value));
        if (line.contains("loss") || is_skipped) last_step_ = step;
        was_asked_ =
            line.contains("stopped") || (was_asked_ && !line.contains("start") && !line.contains("loss"));
    }

    void add_start(int64_t step, const nlohmann::json& start) {
        const nlohmann::json &before = object_in(start_, "validation"), &now = object_in(start, "validation");
        if (!before.empty() && !now.empty() && !are_comparable(before, now))
            notes_.push_back(text("its validation loss is computed on different tokens from step %lld on",
                                  (long long)step));
        start_ = start;
        starts_++;
        if (first_time_.empty()) first_time_ = text_in(start, "time");
        if (std::string time = text_in(start, "time"); !time.empty()) last_time_ = time;
    }

    void add_step(int64_t step, const nlohmann::json& line, bool is_skipped) {
        for (const char* name :
             {"loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "gemm_share", "ms", "sent_bytes"}) {
            auto value = line.find(name);
            // Null in a share means that its reference is not known; in any other field, it replaces a NaN.
            bool is_share = std::string_view(name) == "mfu" || std::string_view(name) == "gemm_share";
            bool missing = value == line.end() || (value->is_null() && (is_share || is_skipped));
            if (!missing) series_[name].add(step, number_of(*value));
        }
        double ms = number_in(line, "ms");
        if (std::isfinite(ms)) trained_ += ms / 1e3;
        seconds_.add(step, trained_);
    }

    void add_timings(int64_t step, const nlohmann::json& timings) {
        const nlohmann::json& ms = object_in(timings, "ms");
        for (const char* phase : step_phase_names) add_range(step, phase, array_in(ms, phase));
        for (const auto& [phase, range] : ms.items()) {
            if (!is_step_phase(phase)) add_range(step, phase, range);
        }
        // A phase that no rank was in is left out of the line.
        for (auto& [phase, series] : phases_)
            if (!ms.empty() && !ms.contains(phase)) series.add(step, 0, 0, 0, -1);
        const nlohmann::json& waited = array_in(timings, "waited");
        if (waited.size() >= 3)
            waited_.add(step, number_of(waited[0]), number_of(waited[1]), number_of(waited[2]),
                        rank_in(waited));
    }

    void add_range(int64_t step, const std::string& phase, const nlohmann::json& range) {
        if (!range.is_array() || range.size() < 3) return;
        auto found = std::find_if(phases_.begin(), phases_.end(),
                                  [&](const auto& known) { return known.first == phase; });
        if (found == phases_.end()) {
            if (phases_.size() >= most_phases) return;
            found = phases_.insert(phases_.end(), {phase, Series()});
        }
        found->second.add(step, number_of(range[0]), number_of(range[1]), number_of(range[2]),
                          rank_in(range));
    }

    static int rank_in(const nlohmann::json& range) {
        int64_t rank = range.size() > 3 ? integer_of(number_of(range[3]), -1) : -1;
        return rank >= 0 && rank <= INT_MAX ? (int)rank : -1;
    }

    std::string run_dir_;
    nlohmann::json options_, supervisor_, start_ = nlohmann::json::object(), planned_;
    std::vector<std::string> notes_;
    std::map<std::string, Series> series_;
    std::vector<std::pair<std::string, Series>> phases_;
    Series waited_, seconds_;
    double trained_ = 0;  // seconds
    SpreadOf<nlohmann::json> samples_{most_samples};
    LastOf<nlohmann::json> checkpoints_{most_rows}, skipped_{most_rows}, incidents_{most_rows},
        evaluations_{most_rows};
    SlowRanks slow_;
    RankHistory ranks_;
    bool was_asked_ = false;  // asked to stop, after the last start
    uint64_t starts_ = 0, steps_back_ = 0, dropped_ = 0;
    int64_t last_step_ = 0;
    std::string first_time_, last_time_;
    bool is_locked_ = false;
};
