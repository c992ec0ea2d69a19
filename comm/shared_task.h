/*
Work that every rank does for itself, in a thread of its own or at once, and of which all ranks learn what
came. The work talks to no other rank.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "comm/world.h"  // World

struct TaskOutcome {
    std::string trouble;  // of the first rank that is in trouble, with its name; empty: none is
    std::string remark;   // of the first rank that has one
    double seconds = 0;   // that the slowest rank took
};

class SharedTask {
public:
    SharedTask(const World& world, bool in_thread) : world_(world), in_thread_(in_thread) {}
    ~SharedTask() { join(); }
    SharedTask(const SharedTask&) = delete;
    SharedTask& operator=(const SharedTask&) = delete;

    // work(remark) throws what goes wrong.
    template <typename Work>
    void start(Work&& work) {
        own_ = {};
        done_ = false;
        auto run = [this, work = std::forward<Work>(work)]() mutable {
            auto start = Clock::now();
            note([&] { work(own_.remark); });
            own_.seconds = std::chrono::duration<double>(Clock::now() - start).count();
            done_ = true;
        };
        if (!in_thread_) {
            run();
            return;
        }
        note([&] { thread_ = std::thread(std::move(run)); });
        if (!thread_.joinable()) done_ = true;  // the system has no thread left
    }

    // Whether this rank is done with it.
    bool done() const { return done_; }

    // For all ranks: waits for all of them.
    TaskOutcome finish() {
        join();
        bool name_it = !own_.trouble.empty() && world_.size() > 1;
        nlohmann::json mine = {{"trouble", name_it ? world_.name() + ": " + own_.trouble : own_.trouble},
                               {"remark", own_.remark},
                               {"seconds", own_.seconds}};
        TaskOutcome all;
        for (const std::string& text :
             world_.gather(mine.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))) {
            nlohmann::json theirs = nlohmann::json::parse(text);
            if (all.trouble.empty()) all.trouble = theirs["trouble"];
            if (all.remark.empty()) all.remark = theirs["remark"];
            all.seconds = std::max(all.seconds, theirs["seconds"].get<double>());
        }
        return all;
    }

private:
    using Clock = std::chrono::steady_clock;

    template <typename Work>
    void note(Work&& work) {
        try {
            work();
        } catch (const std::exception& error) {
            own_.trouble = message_of(error);
        }
    }

    void join() {
        if (thread_.joinable()) thread_.join();
    }

    const World& world_;
    const bool in_thread_;
    TaskOutcome own_;  // the thread's, while there is one
    std::atomic<bool> done_ = true;
    std::thread thread_;
};
