/*
The progress of a run, read from its log: the last step, how long the latest ones took, and the total seconds
of the steps that were kept. A run that goes back to a checkpoint truncates its log after that step, so what
is read here always describes the current state of the run.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/base/strings.h"
#include "data/run/run_log.h"

class Progress {
public:
    explicit Progress(std::string run_dir) : run_dir_(std::move(run_dir)) {}

    // Reads what was appended to the log or, if it was truncated, all of it. Then its steps since the newest
    // start count as new. Returns whether there are new steps.
    bool update() {
        std::string error;
        bool grown = false;
        note_error(error, [&] { grown = read_new(); });
        return grown;
    }

    bool is_visible() const { return visible_; }  // there is a log that can be read
    int64_t last_step() const { return last_step_; }
    // Returns the step after which the run was last started.
    int64_t started_after() const { return started_after_; }
    // Returns the seconds spent in the run's steps after this one.
    double trained_since(int64_t step) {
        if (step != since_) since_ = step, restart();
        update();
        return trained_;
    }
    // Returns the seconds of the longest of the latest steps; 0: there are none.
    double longest_step() const { return *std::ranges::max_element(recent_); }

private:
    void restart() {
        read_to_ = 0, last_step_ = -1, trained_ = 0;
        recent_.fill(0);
        half_line_.clear(), last_bytes_.clear();
    }

    bool read_new() {
        const std::string path = log_path(run_dir_);
        struct stat status;
        visible_ = false;
        FileHandle file = open_regular(path, &status);
        visible_ = true;
        if (!begins_as_before(file)) restart();
        int64_t before = last_step_;
        std::string buffer(1 << 16, '\0');
        for (ssize_t got; (got = pread(file.get(), buffer.data(), buffer.size(), (off_t)read_to_)) > 0;) {
            read_to_ += (uint64_t)got;
            half_line_.append(buffer, 0, (size_t)got);
            last_bytes_.append(buffer, 0, (size_t)got);
            constexpr size_t compared = 512, longest_line = 64 << 20;
            if (last_bytes_.size() > compared) last_bytes_.erase(0, last_bytes_.size() - compared);
            std::string_view rest = half_line_;
            while (rest.find('\n') != rest.npos) add(next_line(rest));
            half_line_ = rest.size() > longest_line ? "" : std::string(rest);
        }
        return last_step_ > std::max(before, started_after_);
    }

    // Returns whether the bytes read last are still there: a truncated log may have grown again since.
    bool begins_as_before(const FileHandle& file) const {
        std::string now(last_bytes_.size(), '\0');
        ssize_t got = pread(file.get(), now.data(), now.size(), (off_t)(read_to_ - now.size()));
        return got == (ssize_t)now.size() && now == last_bytes_;
    }

    void add(std::string_view line) {
        const nlohmann::json record = try_json(line);
        if (!record.is_object()) return;
        auto number = [&](const char* name) {
            auto value = record.find(name);
            return value != record.end() && value->is_number() ? value->get<double>() : -1;
        };
        const int64_t step = integer_of(number("step"), -1);
        const double ms = number("ms");
        if (record.contains("start")) started_after_ = std::max<int64_t>(step, 0);
        if (step < 0 || (!record.contains("loss") && !record.contains("skipped"))) return;
        last_step_ = step;
        if (ms < 0) return;
        if (last_step_ > since_) trained_ += ms / 1e3;
        recent_[count_++ % recent_.size()] = ms / 1e3;
    }

    const std::string run_dir_;
    bool visible_ = false;
    uint64_t read_to_ = 0, count_ = 0;
    int64_t last_step_ = -1, started_after_ = 0, since_ = 0;
    double trained_ = 0;
    std::array<double, 32> recent_ = {};
    std::string half_line_, last_bytes_;
};
