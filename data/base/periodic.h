/*
Repeats work periodically on its own thread.
*/
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

// Calls work() after every `pause` until it is destroyed; the destructor waits for the last call. The first
// call may come before later members of the owner are constructed, so this should be the owner's last member.
// Throws std::system_error if the system cannot create a thread.
class Periodic {
public:
    Periodic(std::chrono::milliseconds pause, std::function<void()> work)
        : thread_([this, pause, work = std::move(work)](std::stop_token stop) {
              std::unique_lock lock(mutex_);
              while (!wake_.wait_for(lock, stop, pause, [&] { return stop.stop_requested(); })) work();
          }) {}
    Periodic(const Periodic&) = delete;
    Periodic& operator=(const Periodic&) = delete;

private:
    std::mutex mutex_;  // only for the condition variable
    std::condition_variable_any wake_;
    std::jthread thread_;
};
