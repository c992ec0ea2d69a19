/*
A line on the terminal that says how far long work is, and how long it will still take. It appears after a
second, is drawn over again in place and goes away at the end; where stderr is no terminal there is none.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <unistd.h>
#include <utility>

class ProgressLine {
public:
    // `what` begins the line: "tokenize". Work is counted in bytes and shown in MB, or in units of 1.
    ProgressLine(std::string what, double total, const char* units = nullptr)
        : what_(std::move(what)),
          units_(units ? units : "MB"),
          scale_(units ? 1 : 1e-6),
          total_(total),
          shown_(isatty(STDERR_FILENO)) {}
    ProgressLine(const ProgressLine&) = delete;
    ProgressLine& operator=(const ProgressLine&) = delete;
    ~ProgressLine() { clear(); }

    void add(double work) {
        done_ += work;
        if (!shown_) return;
        double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
        if (seconds < next_) return;
        next_ = seconds + 0.2;
        drawn_ = true;
        double share = std::min(1.0, done_ / total_);
        fprintf(stderr, "\r\033[K%s: %3.0f%% of %.0f %s, %.0f %s/s, %.0f s left", what_.c_str(), 100 * share,
                total_ * scale_, units_, done_ * scale_ / seconds, units_, seconds * (1 / share - 1));
    }

    // Takes the line away, so that something can be printed; the next add() may draw it again.
    void clear() {
        if (drawn_) fprintf(stderr, "\r\033[K");
        drawn_ = false;
    }

private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point start_ = Clock::now();
    std::string what_;
    const char* units_;
    double scale_;
    double total_, done_ = 0, next_ = 1;
    bool shown_, drawn_ = false;
};
