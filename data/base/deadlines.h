/*
Notes every activity that may never end: waits of a thread for other processes, for a disk, or for room in the
queue of a device. An activity is noted while it lasts, so that another thread can see how long it has taken
(comm/watchdog.h): the thread itself may be stuck in a call that does not return.
*/
#pragma once

#include <atomic>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/base/figures.h"  // seconds_now

// Seconds that one activity may take; 0: no limit.
inline std::atomic<double> time_limit = 600;

// Locks a mutex that a stuck thread may hold. Returns false if that takes longer than `seconds`. A timed
// mutex would do the same, but ThreadSanitizer does not see that it is locked.
template <typename Mutex>
bool lock_within(double seconds, Mutex& mutex) {
    for (double end = seconds_now() + seconds; !mutex.try_lock(); usleep(1000))
        if (seconds_now() > end) return false;
    return true;
}

// The part of the program that a thread is executing, for messages.
class Phase {
public:
    explicit Phase(const char* name) : outer_(current()) { set(name); }
    ~Phase() { set(outer_); }
    Phase(const Phase&) = delete;
    Phase& operator=(const Phase&) = delete;

    // The phase of the calling thread.
    static const char*& current() {
        static thread_local const char* phase = "start";
        return phase;
    }
    // The phase of the thread that the program started with.
    static const char* of_process() { return of_first_thread_; }

private:
    static void set(const char* name) {
        current() = name;
        if (std::this_thread::get_id() == first_thread_) of_first_thread_ = name;
    }

    inline static const std::thread::id first_thread_ = std::this_thread::get_id();
    inline static std::atomic<const char*> of_first_thread_ = "start";
    const char* const outer_;
};

enum class Activity {
    waits,    // for other processes
    works,    // on a file; other processes may be waiting for that
    launches  // enqueues work on its device, possibly a collective with other processes
};

struct BusyState {
    Activity activity;
    std::string phase, what;
    double since;  // seconds_now()

    double seconds() const { return seconds_now() - since; }
};

// Notes, while it exists, what its thread is busy with.
class BusyScope {
public:
    BusyScope(Activity activity, std::string what) {
        std::lock_guard lock(mutex_);
        place_ = all_.insert(all_.end(), {activity, Phase::current(), std::move(what), seconds_now()});
    }
    ~BusyScope() {
        std::lock_guard lock(mutex_);
        all_.erase(place_);
    }
    BusyScope(const BusyScope&) = delete;
    BusyScope& operator=(const BusyScope&) = delete;

    // Restarts the clock: some of the work is done.
    void progress() {
        std::lock_guard lock(mutex_);
        place_->since = seconds_now();
    }

    // The current activities of all threads.
    static std::vector<BusyState> all() {
        std::lock_guard lock(mutex_);
        return {all_.begin(), all_.end()};
    }

private:
    inline static std::mutex mutex_;
    inline static std::list<BusyState> all_;
    std::list<BusyState>::iterator place_;
};

struct WaitsForOthers : BusyScope {
    explicit WaitsForOthers(std::string what = "") : BusyScope(Activity::waits, std::move(what)) {}
};

struct WorksOn : BusyScope {
    explicit WorksOn(std::string what) : BusyScope(Activity::works, std::move(what)) {}
};

// A device queues a limited number of launches: a thread that launches one more waits inside that call, and
// forever if the work queued before it never ends. A guard nested in another guard of the same thread counts
// as progress of the outer one.
class LaunchGuard {
public:
    LaunchGuard() {
        tick();
        if (current_) return;
        current_ = &noted_.emplace(Activity::launches, "launching work on its device");
    }
    ~LaunchGuard() {
        tick();
        if (noted_) current_ = nullptr;
    }
    LaunchGuard(const LaunchGuard&) = delete;
    LaunchGuard& operator=(const LaunchGuard&) = delete;

    // Reports that the calling thread has launched some of the work.
    static void tick() {
        if (current_) current_->progress();
    }

private:
    inline static thread_local BusyScope* current_ = nullptr;
    std::optional<BusyScope> noted_;
};
