/*
The line at the bottom of the screen that shows the progress of a run:

    step 812/5000  micro-batch 3/8  [====>          ]  12 min left  checkpoint in 188 steps

A small thread redraws it five times a second, so it advances while the main thread waits for a step, and it
adapts to the current width. Fields that do not fit are left out, the least important first.
*/
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "data/base/error.h"
#include "data/base/figures.h"
#include "data/base/periodic.h"
#include "data/base/screen.h"
#include "data/base/stop_signals.h"
#include "data/run/step_times.h"

// The content of the line.
struct RunStatus {
    int step = 0, steps = 0;  // the one being worked on
    const char* work = "";    // "micro-batch", "validation", "saving"
    int done = 0, of = 0;     // parts of the work; of = 0: they are not counted
    double share = 0;         // fraction of the run that is done
    double seconds_left = -1;
    std::string slowest;          // "slowest rank 5 (forward 1.3x)", or empty
    std::string next_checkpoint;  // "in 188 steps", or empty
};

// Returns [====>     ], `columns` wide.
inline std::string progress_bar(double share, int columns) {
    int inside = columns - 2, filled = std::clamp((int)(share * inside), 0, inside);
    std::string bar((size_t)filled, '=');
    if (filled < inside) bar += '>';
    bar.resize((size_t)inside, ' ');
    return "[" + bar + "]";
}

// Returns the status in at most `columns` columns; with `colour`, dim except for the slowest rank.
inline std::string status_text(const RunStatus& status, int columns, bool colour = false) {
    enum Field { step, work, bar, left, slowest, checkpoint, count };
    constexpr int gap = 2, least_bar = 8, most_bar = 32;
    std::array<std::string, count> fields;
    fields[step] = text("step %d/%d", status.step, status.steps);
    fields[work] = status.work;
    if (status.of > 0) fields[work] += text(" %d/%d", status.done, status.of);
    fields[bar] = std::string(least_bar, ' ');
    if (status.seconds_left >= 0) fields[left] = rough_duration(status.seconds_left) + " left";
    fields[slowest] = status.slowest;
    if (!status.next_checkpoint.empty()) fields[checkpoint] = "checkpoint " + status.next_checkpoint;

    // The most important field first; each is shown if it fits beside the previous ones.
    int used = std::min((int)fields[step].size(), std::max(columns, 0));
    fields[step].resize((size_t)used);
    for (Field field : {left, work, slowest, checkpoint, bar}) {
        int more = gap + (int)fields[field].size();
        if (used + more > columns)
            fields[field].clear();
        else if (!fields[field].empty())
            used += more;
    }
    if (!fields[bar].empty())
        fields[bar] = progress_bar(status.share, std::min(least_bar + columns - used, most_bar));

    std::string line;
    for (int field = 0; field < count; field++) {
        if (fields[(size_t)field].empty()) continue;
        if (!line.empty()) line.append(gap, ' ');
        bool marked = colour && field == slowest;
        line += marked ? "\033[22;33m" + fields[slowest] + "\033[39;2m" : fields[(size_t)field];
    }
    return colour ? "\033[2m" + line + "\033[0m" : line;
}

class StatusLine {
public:
    // progress() is called at each redraw, from another thread.
    StatusLine(Screen& screen, int steps, std::function<PassProgress()> progress)
        : screen_(screen), progress_(std::move(progress)) {
        status_.steps = steps;
    }
    StatusLine(const StatusLine&) = delete;
    StatusLine& operator=(const StatusLine&) = delete;
    ~StatusLine() { end(); }

    // Show that this step is in progress or, after it, other work. counted: micro-batches are shown, too. The
    // first call makes the line appear.
    void begin_step(int step) { begin("micro-batch", step, true, true); }
    void begin_work(const char* name, int step, bool counted) { begin(name, step, counted, false); }

    void set_seconds_left(double seconds) {
        std::lock_guard lock(mutex_);
        status_.seconds_left = seconds;
        told_ = seconds_now();
    }
    void set_slowest(const std::string& words) {
        std::lock_guard lock(mutex_);
        status_.slowest = words;
    }
    void set_next_checkpoint(const std::string& words) {
        std::lock_guard lock(mutex_);
        status_.next_checkpoint = words;
    }

    // Returns the line as it is now.
    std::string drawn(int columns, bool colour) const {
        std::lock_guard lock(mutex_);
        RunStatus now = status_;
        double of_step = 0;
        if (PassProgress pass = counted_ ? progress_() : PassProgress(); pass.of > 0) {
            now.of = pass.of;
            now.done = std::min((int)pass.done + 1, pass.of);  // the one being worked on
            if (in_step_) of_step = std::min(1., (double)pass.done / pass.of);
        }
        int done = status_.step - (in_step_ ? 1 : 0);
        now.share = (done + of_step) / std::max(now.steps, 1);
        if (now.seconds_left >= 0)
            now.seconds_left = std::max(0., now.seconds_left - (seconds_now() - told_));
        return status_text(now, columns, colour);
    }

    // Removes the line for good.
    void end() {
        started_ = true;
        drawing_.reset();
        screen_.remove_line();
    }

private:
    void begin(const char* work, int step, bool counted, bool in_step) {
        {
            std::lock_guard lock(mutex_);
            status_.work = work;
            status_.step = step;
            counted_ = counted;
            in_step_ = in_step;
        }
        start();
    }

    // One column stays free, because some terminals leave the cursor in it after a full line.
    void start() {
        if (!screen_.is_terminal() || started_) return;
        started_ = true;
        screen_.keep_below([this](int width) { return drawn(width - 1, screen_.has_colour()); });
        try {
            drawing_.emplace(std::chrono::milliseconds(200), [this] { draw_again(); });
        } catch (const std::system_error&) {
            // No thread can be created; the line is redrawn only when other lines are printed.
        }
    }

    // A run that was asked to stop may be killed soon, so the line is removed to leave a clean screen.
    void draw_again() { stop_requested ? screen_.remove_line() : screen_.refresh(); }

    Screen& screen_;
    const std::function<PassProgress()> progress_;
    mutable std::mutex mutex_;
    RunStatus status_;
    bool counted_ = false, in_step_ = false, started_ = false;
    double told_ = 0;  // when seconds_left was set
    std::optional<Periodic> drawing_;
};
