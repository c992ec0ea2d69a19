/*
The run directory: options.json records how the run was started; log.jsonl records how it went, as one JSON
object per line; ranks.jsonl records what each rank did; and checkpoints/ holds the results. A log line is
written before the next step begins, so a killed run leaves a complete log. The log stays locked while the run
lasts. A run that resumes from a checkpoint continues the log after the line of that step.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/checkpoint/folder.h"
#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/base/log_file.h"
#include "data/base/strings.h"

// The run's copy of its tokenizer, in this format whatever kind of file it was read from.
inline std::string tokenizer_path(const std::string& run_dir) {
    return run_dir + "/tokenizer.json";
}

inline std::string log_path(const std::string& run_dir) {
    return run_dir + "/log.jsonl";
}

// Returns the log field of a validation loss. set: the name of the validation set; empty if there is only
// one.
inline std::string validation_field(const std::string& set) {
    return set.empty() ? "val_loss" : "val_loss/" + set;
}
inline bool is_validation_loss(std::string_view field) {
    return field == validation_field("") || field.starts_with(validation_field("") + "/");
}

// Returns whether two records of validation sets describe the same tokens, as far as they can be compared: a
// named set is compared with the set of the same name, and an unnamed one with any set.
inline bool are_comparable(const nlohmann::json& a, const nlohmann::json& b) {
    auto is_alone = [](const nlohmann::json& record) { return record.contains("content"); };
    if (is_alone(a) && is_alone(b)) return a == b;
    if (is_alone(b)) return are_comparable(b, a);
    bool any = false;
    for (const auto& [name, set] : b.items()) {
        if (is_alone(a) ? set != a : !a.contains(name)) continue;
        if (!is_alone(a) && a[name] != set) return false;
        any = true;
    }
    return any;
}

// The files of a supervisor, train_gpt launch (data/supervisor/state.h).
inline std::string supervisor_path(const std::string& run_dir) {
    return run_dir + "/supervisor.json";
}
inline std::string incidents_path(const std::string& run_dir) {
    return run_dir + "/incidents.jsonl";
}

// The state of a run's supervisor; null if there is none. Throws Error if the file cannot be read.
inline nlohmann::json supervisor_json(const std::string& run_dir) {
    constexpr uint64_t most_bytes = 64 << 20;
    const std::string path = supervisor_path(run_dir);
    if (access(path.c_str(), F_OK) != 0) return {};
    return parse_json(read_whole(path, most_bytes, "too large for the state of a supervisor"), path);
}

inline std::string ranks_path(const std::string& run_dir) {
    return run_dir + "/ranks.jsonl";
}

// How a run that begins treats its directory.
enum class RunFolder {
    fresh,     // it must not hold a run yet
    replaced,  // the run in it is removed
    continued  // the run in it is continued
};

// The file that records how a run was started, or what is known about an imported model.
inline std::string options_path(const std::string& run_dir) {
    return run_dir + "/options.json";
}

// Throws Error if the file cannot be read.
inline nlohmann::json run_options_json(const std::string& run_dir) {
    constexpr uint64_t most_bytes = 1 << 20;
    return parse_json(read_whole(options_path(run_dir), most_bytes, "too large for an options file"),
                      "options.json");
}

inline void write_run_options(const std::string& run_dir, const nlohmann::ordered_json& options) {
    write_whole(options_path(run_dir),
                options.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

class RunLog {
public:
    // Creates the directory and locks it. If `use` is fresh, fails if the directory holds a run (a log line
    // or a checkpoint); leftovers of a run that failed before its first step do not count. The files do not
    // change before begin(). `option` is the command-line option that names the directory.
    RunLog(const std::string& run_dir, RunFolder use, const char* option = "--run-dir")
        : run_dir_(run_dir), use_(use) {
        make_folder(run_dir, text("check the path or name another with %s", option));
        check_folder_of_run(checkpoints_folder(run_dir));
        struct stat log;
        bool holds_run = (stat(log_path(run_dir).c_str(), &log) == 0 && log.st_size > 0) ||
                         !checkpoint_steps(run_dir).empty();
        if (holds_run && use == RunFolder::fresh) {
            bool trains = option == std::string_view("--run-dir");
            fail("%s: already holds a run; %sreplace it with --overwrite, or name another directory with %s",
                 run_dir.c_str(), trains ? "resume it with --resume auto, " : "", option);
        }
        file_.emplace(log_path(run_dir));
        if (!file_->lock()) {
            fail("%s: another process is training there; let it end or name another directory with %s",
                 run_dir.c_str(), option);
        }
    }

    // Begins the run after `step` finished steps, and removes what is in its way. If the program is killed
    // meanwhile, the directory holds a consistent run with fewer checkpoints, or no run. Returns notes, one
    // line each.
    std::vector<std::string> begin(const nlohmann::ordered_json& options, int64_t step) {
        std::vector<std::string> notes;
        remove_unfinished(run_dir_);
        if (use_ == RunFolder::continued) {
            for (int64_t newer : set_aside_newer(run_dir_, step)) {
                notes.push_back(text("%s: newer than step %lld, where the run resumes; renamed to %s.aside",
                                     checkpoint_folder(run_dir_, newer).c_str(), (long long)step,
                                     checkpoint_name(newer).c_str()));
            }
            cut_behind(*file_, step, !notes.empty());
            if (access(ranks_path(run_dir_).c_str(), F_OK) == 0) cut_behind(ranks(), step, false);
        } else {
            clear(-1);
        }
        write_run_options(run_dir_, options);
        return notes;
    }

    // Takes a run in progress back to an earlier checkpoint. As in begin(), newer checkpoints and lines are
    // set aside.
    void go_back(int64_t step) {
        set_aside_newer(run_dir_, step);
        cut_behind(*file_, step, true);
        if (ranks_ || access(ranks_path(run_dir_).c_str(), F_OK) == 0) cut_behind(ranks(), step, false);
    }

    // Returns how the run was last started (start_record), from its log; null if the log does not say. Must
    // be called before begin().
    nlohmann::json last_start() const {
        nlohmann::json last;
        MappedFile file(file_->path());
        std::string_view rest(file.data(), file.size());
        while (!rest.empty()) {
            std::string_view line = next_line(rest);
            if (line.find("\"start\"") == line.npos) continue;
            nlohmann::json value = try_json(line);
            if (value.is_object() && value.contains("start")) last = std::move(value["start"]);
        }
        return last;
    }

    // Replaces begin() for a run that consists of the checkpoint of `step` and does not train.
    void begin_as(const nlohmann::ordered_json& options, int64_t step) {
        remove_unfinished(run_dir_);
        clear(step);
        write_run_options(run_dir_, options);
    }

    // These forward to the functions of LogFile.
    std::string write(nlohmann::ordered_json line) { return file_->add(std::move(line)); }
    std::string sync() { return file_->sync(); }
    // Writes a line to ranks.jsonl. Unlike a line of the log, it may be lost.
    std::string write_ranks(nlohmann::ordered_json line) { return ranks().add(std::move(line)); }
    size_t waiting() const { return file_->waiting(); }

private:
    LogFile& ranks() {
        if (!ranks_) ranks_.emplace(ranks_path(run_dir_));
        return *ranks_;
    }

    // Removes the old run, except the checkpoint of step `kept`. The newest checkpoint is removed last, so a
    // program that is killed leaves either the old run with fewer checkpoints or the new one.
    void clear(int64_t kept) {
        std::vector<int64_t> steps = checkpoint_steps(run_dir_);
        for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
            if (*step != kept) remove_checkpoint(run_dir_, *step);
        }
        remove_weights(run_dir_, INT64_MAX);
        file_->truncate_to(0);
        unlink(ranks_path(run_dir_).c_str());
    }

    // Keeps the lines of the log up to `step`. A checkpoint is logged once it is on disk, so its line may
    // follow those of later steps. keep_aside: the removed lines are saved beside the log, because the
    // checkpoints of the removed steps were set aside too.
    void cut_behind(LogFile& log, int64_t step, bool keep_aside) {
        uint64_t kept = 0;
        std::string kept_later, lost;
        {
            MappedFile file(log.path());
            std::string_view rest(file.data(), file.size());
            for (bool cut = false; !rest.empty();) {
                bool whole = rest.find('\n') != rest.npos;
                std::string_view line = next_line(rest);
                bool stays = whole && is_done_by(line, step);
                cut = cut || !stays;
                if (!cut) kept = file.size() - rest.size();
                if (cut && stays) kept_later.append(line).append("\n");
                if (whole && !stays) lost.append(line).append("\n");
            }
        }
        if (keep_aside) write_whole(log.path() + ".aside", lost);
        log.truncate_to(kept);
        log.append(kept_later);
    }

    // Returns whether a line of the log belongs to a step up to `last`. Measurements made after step `last`
    // do not count, because a run that resumes there repeats them.
    bool is_done_by(std::string_view line, int64_t last) const {
        try {
            nlohmann::json value = parse_json(line, file_->path());
            if (!value.is_object()) return false;
            int64_t step = json_integer(value["step"], 0, INT64_MAX, file_->path());
            bool of_step = false;
            for (const char* kind :
                 {"loss", "checkpoint", "start", "eval", "dropped_lines", "timings", "slow", "ms", "pipeline",
                  "health", "stopped", "trust_ratios", "weights"})
                of_step = of_step || value.contains(kind);
            return step < last || (step == last && of_step);
        } catch (const Error&) {
            return false;  // cut short
        }
    }

    std::string run_dir_;
    RunFolder use_;
    std::optional<LogFile> file_, ranks_;
};
