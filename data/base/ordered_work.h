/*
Processes a sequence of items in several threads, and returns results in the order of the items. A free thread
takes the next item, so a slow item does not hold up the others; the threads run only a bounded number of
items ahead of the results.

An exception is thrown in place of the result that it prevented, so which results come before it does not
depend on the timing of the threads.
*/
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "data/base/error.h"

template <typename Thing, typename Result>
class OrderedWork {
public:
    // next: sets the next item, or returns false at the end; called by one thread at a time. work: called
    // concurrently.
    OrderedWork(std::function<bool(Thing&)> next, std::function<Result(const Thing&)> work, unsigned threads)
        : next_(std::move(next)), work_(std::move(work)), slots_(2 * std::max(1u, threads) + 2) {
        try {
            for (unsigned i = 0; i < std::max(1u, threads); i++) threads_.emplace_back([this] { run(); });
        } catch (const std::system_error&) {
            stop();
            throw;  // the message of this error has a remedy
        }
    }
    OrderedWork(const OrderedWork&) = delete;
    OrderedWork& operator=(const OrderedWork&) = delete;
    ~OrderedWork() { stop(); }

    // Returns false when there are no more results.
    bool take(Result& result) {
        std::unique_lock lock(mutex_);
        Slot& slot = slots_[taken_ % slots_.size()];
        changed_.wait(lock, [&] { return slot.result || slot.failure || (ended_ && taken_ == given_); });
        if (slot.failure) std::rethrow_exception(slot.failure);
        if (!slot.result) return false;
        result = std::move(*slot.result);
        slot.result.reset();
        taken_++;
        changed_.notify_all();
        return true;
    }

private:
    struct Slot {
        std::optional<Result> result;
        std::exception_ptr failure;
    };

    void run() {
        for (;;) {
            Thing thing;
            uint64_t index;
            {
                std::lock_guard reading(reading_);
                {
                    std::unique_lock lock(mutex_);
                    changed_.wait(lock, [&] { return ended_ || given_ - taken_ < slots_.size(); });
                    if (ended_) return;
                }
                std::exception_ptr failure;
                bool any = false;
                try {
                    any = next_(thing);
                } catch (...) {
                    failure = std::current_exception();
                }
                std::lock_guard lock(mutex_);
                index = given_;
                given_ += any;
                if (failure) slots_[index % slots_.size()].failure = failure;
                if (!any) ended_ = true;
                changed_.notify_all();
                if (!any) return;
            }
            Slot made;
            try {
                made.result = work_(thing);
            } catch (...) {
                made.failure = std::current_exception();
            }
            std::lock_guard lock(mutex_);
            slots_[index % slots_.size()] = std::move(made);
            changed_.notify_all();
        }
    }

    void stop() {
        {
            std::lock_guard lock(mutex_);
            ended_ = true;
            changed_.notify_all();
        }
        for (std::thread& thread : threads_) thread.join();
    }

    std::function<bool(Thing&)> next_;
    std::function<Result(const Thing&)> work_;
    std::mutex reading_;  // guards next_
    std::mutex mutex_;    // guards slots_, given_, taken_ and ended_
    std::vector<Slot> slots_;
    uint64_t given_ = 0, taken_ = 0;
    bool ended_ = false;  // no more items are taken
    std::condition_variable changed_;
    std::vector<std::thread> threads_;
};
