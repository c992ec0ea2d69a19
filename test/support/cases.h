/*
How a test case ends: passed, failed or skipped. A case that cannot show anything in its environment says so
with SKIP; a case that ends without a single check and without a reason has failed: otherwise nobody would
notice that it never checks anything.
*/
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <vector>

// The outcome of one case in this process or, after RankHooks::add_up, on all ranks of the job.
struct CaseOutcome {
    std::string name;
    int checks = 0;
    bool failed = false;
    std::string skipped;  // the reason; empty if not skipped
};

// Why the running case is skipped.
extern std::string skip_reason;

// Ends the case, or the lambda that contains it. `reason` names what is missing here.
#define SKIP(reason)                                                                                         \
    do {                                                                                                     \
        skip_reason = reason;                                                                                \
        return;                                                                                              \
    } while (0)

// The hooks that test/support/ranks.h installs in the main function of the tests.
struct RankHooks {
    void (*join)(int* argc, char*** argv);          // before the first case
    bool (*is_root)();                              // the rank that reports
    void (*add_up)(std::vector<CaseOutcome>& all);  // in: outcomes of this rank; out: of the whole job
    void (*leave)();
};
extern const RankHooks* rank_hooks;

// Makes a test program also act as another program when it is started under that name
// (test/support/group.sh).
struct OtherProgram {
    std::string name;
    int (*run)(int argc, char** argv);
};
inline std::vector<OtherProgram>& other_programs() {
    static std::vector<OtherProgram> all;
    return all;
}
inline bool is_also(const char* name, int (*run)(int argc, char** argv)) {
    other_programs().push_back({name, run});
    return true;
}
