/*
One task at a time beside the thread that asks for it.
*/
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <system_error>

class Background {
public:
    // The task before must be finished. Where the system has no thread left, the task is done at once.
    void start(std::function<void()> task) {
        try {
            result_ = std::async(std::launch::async, task);
        } catch (const std::system_error&) {
            std::packaged_task<void()> now(task);
            result_ = now.get_future();
            now();
        }
    }

    // Tells whether finish() would return at once.
    bool is_done() const {
        return !result_.valid() || result_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    }

    // Waits for the task, if there is one, and throws what it threw.
    void finish() {
        if (result_.valid()) result_.get();
    }

private:
    std::future<void> result_;  // which waits where it ends
};
