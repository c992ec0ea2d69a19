/*
Decides when a run saves: every n steps, every n seconds, or at the cheapest interval (--save-every). A
save costs its stall; a failure costs the training since the last save, half an interval on average. With a
failure every M seconds and a stall of s, the best interval is about sqrt(2 s M) (Young, "A First Order
Approximation to the Optimum Checkpoint Interval", 1974); best_interval() is more accurate (Daly, "A Higher
Order Estimate of the Optimum Checkpoint Interval for Restart Dumps", 2006).
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "data/run/failures.h"            // seconds_of_day
#include "data/base/figures.h"            // seconds_now, duration, rough_duration
#include "data/checkpoint/save_report.h"  // SaveReport
#include "data/options/options.h"         // Options, Interval

// Returns the cheapest interval between two saves, in seconds of training.
inline double best_interval(double stall, double between_failures) {
    if (stall >= 2 * between_failures) return between_failures;
    double share = stall / (2 * between_failures);
    return std::sqrt(2 * stall * between_failures) * (1 + std::sqrt(share) / 3 + share / 9) - stall;
}

// Returns whether a run of `steps` steps saves before its end.
inline bool saves_on_the_way(const Interval& every, int steps) {
    if (every.unit == Interval::best) return true;
    return every.count > 0 && (every.unit == Interval::seconds || every.count < steps);
}

// Returns the maximum number of checkpoints on disk at the same time in the next `steps_left` steps: those
// kept, and the one being written. Returns 1 if all are kept and saves are due by time, because their number
// is unknown.
inline int64_t most_checkpoints(const Options& o, int steps_left) {
    bool by_steps = o.save_every.unit == Interval::steps;
    int64_t saves = by_steps && o.save_every.count ? 1 + steps_left / o.save_every.count : 1;
    if (o.keep == 0) return saves;
    int64_t kept = o.keep + o.keep_best + 1 + (o.keep_every ? steps_left / o.keep_every : 0);
    return by_steps && !o.keep_best ? std::min(saves, kept) : kept;
}

// Uses the clock of the rank that decides for all, because clocks of machines differ.
class SaveClock {
public:
    SaveClock(const Interval& every, double failures_per_1000_days, int devices)
        : every_(every),
          between_failures_(1000 * seconds_of_day / (failures_per_1000_days * devices)),
          devices_(devices) {
        if (every.unit == Interval::best)
            choose(1);
        else if (every.unit == Interval::seconds)
            seconds_ = every.count;
    }
    SaveClock(const Options& o, int devices) : SaveClock(o.save_every, o.failure_rate, devices) {}

    // Returns whether the state after this step is to be saved.
    bool due(int step, double now = seconds_now()) const {
        if (every_.unit == Interval::steps) return every_.count > 0 && step % every_.count == 0;
        return now - last_ >= seconds_;
    }

    // Describes when the next save is due, during `step` of `steps`: "in 188 steps"; empty: at the end.
    std::string next(int step, int steps, double now = seconds_now()) const {
        if (every_.unit != Interval::steps)
            return "in " + rough_duration(std::max(0., last_ + seconds_ - now));
        int left = every_.count ? (every_.count - step % every_.count) % every_.count : steps;
        if (step + left >= steps) return "";
        return left == 0 ? "after this step" : "in " + counted(left, "step");
    }

    // Restarts the interval when a save begins.
    void restart(double now = seconds_now()) { last_ = now; }

    // Chooses the interval from the cost of saves measured so far. Returns whether the choice has changed
    // enough to report it.
    bool learn(const SaveReport& report) {
        if (every_.unit != Interval::best) return false;
        saves_++, stalls_ += report.stalled, written_ = report.seconds;
        choose(stalls_ / saves_);
        if (saves_ > 1 && std::abs(seconds_ - told_) <= told_ / 5) return false;
        told_ = seconds_;
        return true;
    }

    // Seconds between two saves.
    double seconds() const { return seconds_; }

    // Describes the chosen interval and its reason; empty if the options set it.
    std::string summary() const {
        if (every_.unit != Interval::best) return "";
        std::string failures = std::isinf(between_failures_)
                                   ? "no failures"
                                   : text("a failure every %s on %s", long_time(between_failures_).c_str(),
                                          counted(devices_, "device").c_str());
        std::string stall = saves_ ? text("training waits %.3f s for a save, which takes %.1f s to write",
                                          stalls_ / saves_, written_)
                                   : "no save has been measured yet";
        return text("every %s: %s, %s", duration(seconds_).c_str(), stall.c_str(), failures.c_str());
    }

private:
    static constexpr double longest = 3600, longest_first = 600;

    void choose(double stall) {
        seconds_ = std::isinf(between_failures_) ? longest : best_interval(stall, between_failures_);
        seconds_ = std::min(seconds_, saves_ ? longest : longest_first);
        seconds_ = std::max(seconds_, 2 * written_);
    }

    static std::string long_time(double seconds) {
        double days = seconds / seconds_of_day;
        return days < 2 ? duration(seconds) : text("%.0f days", days);
    }

    Interval every_;
    double between_failures_;  // seconds between failures of any device of the run
    int devices_;
    double seconds_ = 0, last_ = seconds_now();
    double told_ = 0;                  // seconds_ when it was last reported
    int saves_ = 0;                    // saves measured
    double stalls_ = 0, written_ = 0;  // seconds: all stalls, and writing the last save
};
