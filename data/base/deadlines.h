/*
What the threads of a process are at that may never end: they wait for other processes, for a disk, or for
room in the queue of a device. Each is noted for as long as it takes, so that somebody else can see how long
that is (comm/watchdog.h): the thread itself may be stuck in a call that does not return.
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

// Seconds that one of these may take; 0: as long as it likes.
inline std::atomic<double> time_limit = 600;

// Locks a mutex that a stuck thread may hold. Returns false if that took longer than `seconds`.
// A timed mutex would do the same, but ThreadSanitizer does not see that it is locked.
template <typename Mutex>
bool lock_within(double seconds, Mutex& mutex) {
    for (double end = seconds_now() + seconds; !mutex.try_lock(); usleep(1000))
        if (seconds_now() > end) return false;
    return true;
}

// The part of the program that a thread is in, for messages.
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
    // The phase of the thread that the program began with.
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
    works,    // for them among others, on a file
    launches  // gives its device work, which other processes may take part in
};

struct BusyState {
    Activity activity;
    std::string phase, what;
    double since;  // seconds_now()

    double seconds() const { return seconds_now() - since; }
};

// For as long as it exists, its thread is at something.
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

    // Time is counted anew: something has been done.
    void progress() {
        std::lock_guard lock(mutex_);
        place_->since = seconds_now();
    }

    // The occupations of all threads.
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

// A device holds only so many launches: whoever gives it one more waits inside that call, and for ever if the
// work before it never ends. Within another one of the same thread it is that one's progress.
class LaunchGuard {
public:
    LaunchGuard() {
        tick();
        if (current_) return;
        current_ = &noted_.emplace(Activity::launches, "giving work to its device");
    }
    ~LaunchGuard() {
        tick();
        if (noted_) current_ = nullptr;
    }
    LaunchGuard(const LaunchGuard&) = delete;
    LaunchGuard& operator=(const LaunchGuard&) = delete;

    // The calling thread has given some of it.
    static void tick() {
        if (current_) current_->progress();
    }

private:
    inline static thread_local BusyScope* current_ = nullptr;
    std::optional<BusyScope> noted_;
};
