/*
How a test case ends: passed, failed or skipped. A case that cannot show anything where it runs says so with
SKIP; a case that ends without a single check, and does not say why, has failed: nobody would notice if it
never did anything.
*/
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <vector>

// One case as it ended in this process, or, after RankHooks::add_up, in all ranks of the job.
struct CaseOutcome {
    std::string name;
    int checks = 0;
    bool failed = false;
    std::string skipped;  // why, or empty
};

// The reason for which the running case is skipped.
extern std::string skip_reason;

// Ends the case, or the lambda that it stands in. `reason` names what is missing here.
#define SKIP(reason)                                                                                         \
    do {                                                                                                     \
        skip_reason = reason;                                                                                \
        return;                                                                                              \
    } while (0)

// The hooks of test/support/ranks.h in the main function of the tests.
struct RankHooks {
    void (*join)(int* argc, char*** argv);          // before the first case
    bool (*is_root)();                              // the rank that reports
    void (*add_up)(std::vector<CaseOutcome>& all);  // outcomes of this rank in, of the whole job out
    void (*leave)();
};
extern const RankHooks* rank_hooks;

// A test program that is another program too, when it is started by that one's name (test/support/group.sh).
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
