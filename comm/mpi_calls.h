/*
How MPI is called (behind Patience, with which a thread looks again and again without spinning): by many
threads, one at a time, and without ever waiting inside MPI.

MPI's own waits spin, and spin while they hold the library. Here every call is made under one mutex
(MPI_THREAD_SERIALIZED is enough), and a wait is a test under the mutex with sleep outside it. So the
threads of a process wait for different messages at the same time, and a process that waits costs no core.
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

// A thread that must look for something again and again, as for a message, never spins between two looks. The
// sleeps grow with the time waited. So a short wait is noticed late by an eighth of itself, and a long one by
// a hundredth; a thread that waits for long costs no core. longest_nap: where a hundredth would be much.
class Patience {
public:
    explicit Patience(Clock::duration longest_nap = std::chrono::milliseconds(1))
        : longest_nap_(longest_nap) {}

    // Call between two looks. Returns after a while, but not later than `until`.
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

    // Begins anew: the awaited message has come.
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

// Makes the call under the mutex and throws Error if it fails (where the communicator returns errors). A call
// that waits for other ranks keeps all threads of this one out of MPI meanwhile: start it without waiting,
// and mpi_wait.
#define mpiCheck(call) mpi_check([&] { return call; }, #call, __FILE__, __LINE__)

// Looks for what other ranks send, again and again, and is seen to wait (comm/watchdog.h).
class MpiWait {
public:
    // Call between two looks.
    void again() { patience_.wait(); }

private:
    Patience patience_;
    WaitsForOthers waits_;
};

// Waits until all requests are complete. Throws Error if MPI reports one.
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
