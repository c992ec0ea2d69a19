/*
The job that a multi-rank unit runs in. A test program with a unit that includes this joins the job before its
first case; started without mpirun, it is a job of one rank.
*/
#pragma once

#include <memory>

#include "comm/watchdog.h"
#include "comm/placement.h"
#include "test/support/cases.h"

inline std::unique_ptr<World> world_of_tests;

inline const World& test_world() {
    return *world_of_tests;
}

// Each rank sends all others one letter per case: F if it failed, c if it made checks. All ranks run the same
// cases.
inline void add_up_outcomes(std::vector<CaseOutcome>& all) {
    std::string mine;
    for (const CaseOutcome& c : all) mine += c.failed ? 'F' : c.checks ? 'c' : '-';
    for (const std::string& letters : test_world().all_gather(mine)) {
        for (size_t i = 0; i < std::min(all.size(), letters.size()); i++) {
            all[i].failed |= letters[i] == 'F';
            all[i].checks |= letters[i] == 'c';
        }
    }
}

inline const bool hooked = [] {
    static const RankHooks hooks = {
        .join =
            [](int* argc, char*** argv) {
                world_of_tests = std::make_unique<World>(argc, argv, watch_ranks);
                choose_device(test_world());
            },
        .is_root = [] { return test_world().is_root(); },
        .add_up = add_up_outcomes,
        .leave = [] { world_of_tests.reset(); },
    };
    rank_hooks = &hooks;
    return true;
}();
