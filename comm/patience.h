/*
How a thread waits for something that it must look at again and again, as for a message: it never spins.
The sleeps grow with the time waited. So a short wait is noticed late by an eighth of itself, and a long one
by a hundredth; a thread that waits for long costs no core.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <sched.h>
#include <thread>

using Clock = std::chrono::steady_clock;

class Patience {
public:
    // Call between two looks. Returns after a while, but not later than `until`.
    void wait(Clock::time_point until = Clock::time_point::max()) {
        if (looks_++ < yields) {
            sched_yield();
            return;
        }
        auto now = Clock::now();
        if (looks_ == yields + 1) since_ = now;
        Clock::duration waited = now - since_, nap = waited / 8;
        if (nap > short_nap) nap = std::clamp<Clock::duration>(waited / 100, short_nap, longest_nap);
        std::this_thread::sleep_until(std::min(until, now + nap));
    }

    // What was waited for has come.
    void reset() { looks_ = 0; }

private:
    static constexpr int yields = 8;
    static constexpr std::chrono::microseconds short_nap{100}, longest_nap{1000};
    int looks_ = 0;
    Clock::time_point since_;
};
