/*
Decides when a run with a time limit (--max-time) ends: after the last step that leaves time to save. Future
durations are estimated from past ones.
*/
#pragma once

#include <algorithm>

#include "data/base/figures.h"  // seconds_now

inline const double process_begun = seconds_now();

// Estimates an upper bound on how long something takes: the longest time so far, but old times lose weight.
class TimeTaken {
public:
    void add(double seconds) { seconds_ = std::max(seconds, 0.9 * seconds_ + 0.1 * seconds); }
    // guess: returned while no time is known
    double seconds(double guess = 0) const { return seconds_ > 0 ? seconds_ : guess; }

private:
    double seconds_ = 0;
};

class TimeLimit {
public:
    // most: seconds since the process began; 0: no limit
    explicit TimeLimit(int most, double begun = process_begun) : most_(most), begun_(begun) {}

    TimeTaken token, save;  // token: per token of a step

    // Returns whether less than `seconds` are left.
    bool is_over(double seconds, double now = seconds_now()) const {
        constexpr double to_leave = 1;  // seconds from the last save to the end of the process
        return most_ > 0 && now - begun_ + seconds + to_leave > most_;
    }

private:
    int most_;
    double begun_;
};
