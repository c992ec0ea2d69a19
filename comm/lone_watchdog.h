/*
The watchdog of a process that is alone: nobody can be asked, and nobody waits for it. Its device may take as
long as it likes, but a disk that does not answer is noticed, and ends the run with a line that names the
file, so that whoever started it learns of it.
*/
#pragma once

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <unistd.h>

#include "comm/recorder.h"
#include "data/base/deadlines.h"
#include "data/base/error.h"

// A process that was stopped itself (Ctrl-Z, a scheduler) finds everything older than it is when it goes on:
// time is counted anew from then.
class OwnPauses {
public:
    // Between two looks there is little time, unless the process was stopped.
    void look() {
        auto now = std::chrono::steady_clock::now();
        if (now - looked_ > longest_between_looks) went_on_ = now;
        looked_ = now;
    }
    double seconds_since() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - went_on_).count();
    }

private:
    using Time = std::chrono::steady_clock::time_point;
    static constexpr std::chrono::seconds longest_between_looks{2};
    Time looked_ = std::chrono::steady_clock::now(), went_on_ = Time() - std::chrono::hours(1000);
};

// "writing a.bin has taken 12 s", and what to do.
inline std::string alone_line(const Occupation& work) {
    return text(
        "%s has taken %.4g s: see whether the disk answers, or raise --communication-timeout (0: wait "
        "for ever)",
        work.what.c_str(), work.seconds());
}

class LoneWatchdog {
    static constexpr std::chrono::milliseconds between_looks{100};

    void watch(std::stop_token stop) {
        OwnPauses pauses;
        std::unique_lock lock(mutex_);
        while (!wake_.wait_for(lock, stop, between_looks, [&] { return stop.stop_requested(); })) {
            pauses.look();
            recorder.poll();
            recorder.look_at_threads();
            double limit = time_limit;
            if (limit <= 0 || pauses.seconds_since() < limit) continue;
            for (const Occupation& each : Occupied::all()) {
                if (each.activity != Activity::works || each.seconds() < limit) continue;
                print_error(alone_line(each));
                _exit(exit_failed_part);  // the thread itself does not come back
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable_any wake_;
    std::jthread thread_{[this](std::stop_token stop) {
        watch(stop);
    }};  // last: it starts running when everything above exists
};
