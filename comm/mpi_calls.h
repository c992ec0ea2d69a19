/*
How MPI is called: by many threads, one at a time, and without ever waiting inside MPI. Patience lets a thread
poll without spinning.

MPI's own waits spin, and hold the library while they do. Here every call is made under one mutex
(MPI_THREAD_SERIALIZED is enough), and a wait tests under the mutex and sleeps outside it. So the threads of a
process can wait for different messages at the same time, and a process that waits uses no core.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <sched.h>
#include <thread>

#include <mutex>
#include <string>

#ifndef WITHOUT_MPI
#include <mpi.h>
#endif

#include "data/base/deadlines.h"  // WaitsForOthers
#include "data/base/error.h"      // fail

using Clock = std::chrono::steady_clock;

// Lets a thread poll, for example for a message, without spinning. Sleeps grow with the time waited: a short
// wait ends late by at most an eighth of its length, a long one by a hundredth, and a thread that waits for a
// long time uses almost no CPU time. longest_nap: the longest sleep, for when a hundredth would be too long.
class Patience {
public:
    explicit Patience(Clock::duration longest_nap = std::chrono::milliseconds(1))
        : longest_nap_(longest_nap) {}

    // Call between two polls. Returns after a while, but not later than `until`.
    void wait(Clock::time_point until = Clock::time_point::max()) {
        if (looks_++ < yields) {
            sched_yield();
            return;
        }
        auto now = Clock::now();
        if (looks_ == yields + 1) since_ = now;
        Clock::duration waited = now - since_, nap = waited / 8;
        if (nap > short_nap) nap = std::clamp<Clock::duration>(waited / 100, short_nap, longest_nap_);
        std::this_thread::sleep_until(std::min(until, now + nap));
    }

    // Starts over; called when the awaited message has arrived.
    void reset() { looks_ = 0; }

private:
    static constexpr int yields = 8;
    static constexpr std::chrono::microseconds short_nap{100};
    const Clock::duration longest_nap_;
    int looks_ = 0;
    Clock::time_point since_;
};

#ifndef WITHOUT_MPI

// Held during every MPI call of every thread.
inline std::mutex mpi_mutex;

// MPI's text for an error. The caller holds mpi_mutex.
inline std::string mpi_error_text(int code) {
    char words[MPI_MAX_ERROR_STRING] = "unknown error";
    int length = 0;
    MPI_Error_string(code, words, &length);
    return words;
}

template <typename Call>
void mpi_check(Call&& call, const char* name, const char* file, int line) {
    std::lock_guard lock(mpi_mutex);
    int code = call();
    if (code != MPI_SUCCESS)
        fail_part("MPI: %s failed: %s (%s:%d)", name, mpi_error_text(code).c_str(), file, line);
}

// Makes the call under the mutex, and throws Error if it fails (and the communicator returns errors). To wait
// for other ranks, use a nonblocking call and mpi_wait: a blocking one would keep all threads of this rank
// out of MPI meanwhile.
#define mpiCheck(call) mpi_check([&] { return call; }, #call, __FILE__, __LINE__)

// Paces the polling for messages of other ranks, and lets the watchdog see that this thread waits
// (comm/watchdog.h).
class MpiWait {
public:
    // Call between two polls.
    void again() { patience_.wait(); }

private:
    Patience patience_;
    WaitsForOthers waits_;
};

// Waits until all requests are complete. Throws Error if MPI reports an error.
inline void mpi_wait(MPI_Request* requests, int count) {
    MpiWait wait;
    for (;;) {
        int done = 0;
        mpiCheck(MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE));
        if (done) return;
        wait.again();
    }
}

#endif
