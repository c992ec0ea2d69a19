/*
Work that every rank does for itself, and of which all ranks learn what came.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>

#include "comm/world.h"  // World

struct WorkOutcome {
    std::string trouble;     // of the first rank that is in trouble, with its name; empty: none is
    bool disk_full = false;  // that is the trouble
    std::string remark;      // of the first rank that has one
    double seconds = 0;      // that the slowest rank took
};

// For all ranks: work(remark) throws what goes wrong, and talks to no other rank. Returns when all are done.
template <typename Work>
WorkOutcome do_shared_work(const World& world, Work&& work) {
    using Clock = std::chrono::steady_clock;
    auto start = Clock::now();
    std::string trouble, remark;
    bool disk_full = false;
    try {
        work(remark);
    } catch (const DiskFull& error) {
        trouble = error.what();
        disk_full = true;
    } catch (const std::exception& error) {
        trouble = message_of(error);
    }
    if (!trouble.empty() && world.size() > 1) trouble = world.name() + ": " + trouble;
    nlohmann::json mine = {{"trouble", trouble},
                           {"disk_full", disk_full},
                           {"remark", remark},
                           {"seconds", std::chrono::duration<double>(Clock::now() - start).count()}};
    WorkOutcome all;
    for (const std::string& text :
         world.gather(mine.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))) {
        nlohmann::json theirs = nlohmann::json::parse(text);
        if (all.trouble.empty()) {
            all.trouble = theirs["trouble"];
            all.disk_full = theirs["disk_full"];
        }
        if (all.remark.empty()) all.remark = theirs["remark"];
        all.seconds = std::max(all.seconds, theirs["seconds"].get<double>());
    }
    return all;
}
