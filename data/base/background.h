/*
Runs tasks in the background, one at a time, on a thread other than the caller's.
*/
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <system_error>

class Background {
public:
    // The previous task must be finished. If the system cannot create a thread, the task runs here, before
    // start() returns.
    void start(std::function<void()> task) {
        try {
            result_ = std::async(std::launch::async, task);
        } catch (const std::system_error&) {
            std::packaged_task<void()> now(task);
            result_ = now.get_future();
            now();
        }
    }

    // Returns whether finish() would return at once.
    bool is_done() const {
        return !result_.valid() || result_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    }

    // Waits for the task, if there is one, and rethrows its exception.
    void finish() {
        if (result_.valid()) result_.get();
    }

private:
    std::future<void> result_;  // its destructor waits for the task
};
