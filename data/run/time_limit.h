/*
When a run ends by the clock (--max-time): after the last step that leaves the time to save. How long things
will take is what they have taken so far.
*/
#pragma once

#include <algorithm>

#include "data/base/figures.h"  // seconds_now

inline const double process_begun = seconds_now();

// Keeps how long something takes at most: the longest time, but one that is long ago counts less and less.
class TimeTaken {
public:
    void add(double seconds) { seconds_ = std::max(seconds, 0.9 * seconds_ + 0.1 * seconds); }
    // guess: as long as none is known
    double seconds(double guess = 0) const { return seconds_ > 0 ? seconds_ : guess; }

private:
    double seconds_ = 0;
};

class TimeLimit {
public:
    // most: seconds since the process began; 0: any number
    explicit TimeLimit(int most, double begun = process_begun) : most_(most), begun_(begun) {}

    TimeTaken token, save;  // token: of a step

    // Tells whether less time than this is left.
    bool is_over(double seconds, double now = seconds_now()) const {
        constexpr double to_leave = 1;  // seconds from the last save to the end of the process
        return most_ > 0 && now - begun_ + seconds + to_leave > most_;
    }

private:
    int most_;
    double begun_;
};
