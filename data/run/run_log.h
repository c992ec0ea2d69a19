/*
The run directory: options.json says how the run was started, log.jsonl tells how it went, one JSON object
to a line, ranks.jsonl what each rank was at, and checkpoints/ has what came of it. A line of the log is on
its way to disk before the next step begins, so that a killed run leaves a whole log. The log stays locked for
as long as the run lasts. A run that goes on from a checkpoint writes on where the log has the line of that
step.
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

// A copy, whatever kind of file the tokenizer came from.
inline std::string tokenizer_path(const std::string& run_dir) {
    return run_dir + "/tokenizer.json";
}

inline std::string log_path(const std::string& run_dir) {
    return run_dir + "/log.jsonl";
}

// The field of a validation loss in the log: of the one set, or of a set with a name.
inline std::string validation_field(const std::string& set) {
    return set.empty() ? "val_loss" : "val_loss/" + set;
}
inline bool is_validation_loss(std::string_view field) {
    return field == validation_field("") || field.starts_with(validation_field("") + "/");
}

// Tells whether two records of validation sets have the same tokens, as far as they can be compared: sets of
// one name, or one set without a name and any other.
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
    return parse_json(read_whole(path, most_bytes, "that is no state of a supervisor"), path);
}

inline std::string ranks_path(const std::string& run_dir) {
    return run_dir + "/ranks.jsonl";
}

// The meaning of a run directory to a run that begins.
enum class RunFolder {
    fresh,     // it must not hold a run
    replaced,  // the run in it goes
    continued  // the run in it goes on
};

// Tells how a run was started, or what is known of a model from elsewhere.
inline std::string options_path(const std::string& run_dir) {
    return run_dir + "/options.json";
}

// Throws Error if the file cannot be read.
inline nlohmann::json run_options_json(const std::string& run_dir) {
    constexpr uint64_t most_bytes = 1 << 20;
    return parse_json(read_whole(options_path(run_dir), most_bytes, "that is no file of options"),
                      "options.json");
}

inline void write_run_options(const std::string& run_dir, const nlohmann::ordered_json& options) {
    write_whole(options_path(run_dir),
                options.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

class RunLog {
public:
    // Makes the directory and locks it. One that holds a run (a line of log, or a checkpoint) is refused
    // where it must not; what a run left that failed before its first step is not in the way. Nothing is
    // changed before begin(). `option` is the one that names the directory.
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
                 run_dir.c_str(), trains ? "go on with it with --resume auto, " : "", option);
        }
        file_.emplace(log_path(run_dir));
        if (!file_->lock()) {
            fail("%s: another process is training there; wait for its end or name another directory with %s",
                 run_dir.c_str(), option);
        }
    }

    // The run has begun, after `step` steps that were done before: what is in the way of it goes. If the
    // program is killed in between, there is a whole run of fewer checkpoints, or none. Returns what there is
    // to tell, one line each.
    std::vector<std::string> begin(const nlohmann::ordered_json& options, int64_t step) {
        std::vector<std::string> notes;
        remove_unfinished(run_dir_);
        if (use_ == RunFolder::continued) {
            for (int64_t newer : set_aside_newer(run_dir_, step)) {
                notes.push_back(
                    text("%s: newer than step %lld, which the run goes on from; renamed to %s.aside",
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

    // The run itself goes on from an earlier checkpoint: as in begin(), what is newer goes aside.
    void go_back(int64_t step) {
        set_aside_newer(run_dir_, step);
        cut_behind(*file_, step, true);
        if (ranks_ || access(ranks_path(run_dir_).c_str(), F_OK) == 0) cut_behind(ranks(), step, false);
    }

    // How the run was last started (start_record), as its log tells; null: it does not. Before begin().
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

    // In place of begin(), for a run that is already there as the checkpoint of `step`, and does not go on.
    void begin_as(const nlohmann::ordered_json& options, int64_t step) {
        remove_unfinished(run_dir_);
        clear(step);
        write_run_options(run_dir_, options);
    }

    // These three do what the functions of LogFile do that they call.
    std::string write(nlohmann::ordered_json line) { return file_->add(std::move(line)); }
    std::string sync() { return file_->sync(); }
    // A line of ranks.jsonl, which may be lost where the log may not.
    std::string write_ranks(nlohmann::ordered_json line) { return ranks().add(std::move(line)); }
    size_t waiting() const { return file_->waiting(); }

private:
    LogFile& ranks() {
        if (!ranks_) ranks_.emplace(ranks_path(run_dir_));
        return *ranks_;
    }

    // Removes what was there, but for the checkpoint of one step. The newest goes last: a program that is
    // killed leaves the run that was there, with fewer checkpoints, or the one that comes.
    void clear(int64_t kept) {
        std::vector<int64_t> steps = checkpoint_steps(run_dir_);
        for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
            if (*step != kept) remove_checkpoint(run_dir_, *step);
        }
        remove_weights(run_dir_, INT64_MAX);
        file_->truncate_to(0);
        unlink(ranks_path(run_dir_).c_str());
    }

    // Leaves of the log what was done up to a step. A checkpoint is told of when it is on disk, so its line
    // can stand behind those of later steps. What goes is kept beside it where checkpoints of it are.
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

    // Tells whether a line of the log is of a step up to this one. Measurements after a step are made again
    // when the run goes on from there.
    bool is_done_by(std::string_view line, int64_t last) const {
        try {
            nlohmann::json value = parse_json(line, file_->path());
            if (!value.is_object()) return false;
            int64_t step = json_integer(value["step"], 0, INT64_MAX, file_->path());
            bool of_step = false;
            for (const char* kind : {"loss", "checkpoint", "start", "eval", "dropped_lines", "timings",
                                     "slow", "ms", "pipeline", "health", "stopped"})
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
