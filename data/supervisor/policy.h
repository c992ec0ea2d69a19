/*
The decision about a job that has ended, as a function of how it ended and of what was tried before.

    done, or asked to stop     end
    a user's error             end: the same input gives the same error
    values not finite          once more, from the checkpoint before the newest; if they recur: end
    a part that failed         restart, except in these cases:
                                   the same step failed twice in the same way: the data or the program
                                   two restarts without progress
                                   more restarts in the window than allowed

Progress is a step beyond all earlier ones. A failure after which a host was replaced, or one that ended the
job's keeper too, is not evidence against the data or the program, so the count of failures starts again after
it.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "data/base/error.h"
#include "data/base/this_machine.h"  // shell_signals
#include "data/options/choice.h"

enum class JobEnd {
    done,         // exit code 0
    bad_input,    // 1, with a message from the program; or the launcher started no rank the first time
    not_finite,   // 70
    failed_part,  // 75
    killed,       // by a signal
    hung,         // ended by the supervisor, because there was no progress
    launcher  // a code of the launcher's own, for a host that it lost or could not reach; or an unknown code
};
NAMES_OF(JobEnd, "done", "bad input", "not finite", "failed part", "killed", "hung", "launcher");

// Returns how a job ended. code: its exit code, as a shell reports it.
inline JobEnd end_of_job(int code, bool program_said_why) {
    constexpr int last_signal = 64;
    if (code == 0) return JobEnd::done;
    if (code == exit_not_finite) return JobEnd::not_finite;
    if (code == exit_failed_part) return JobEnd::failed_part;
    if (code == exit_bad_input && program_said_why) return JobEnd::bad_input;
    if (code > shell_signals && code <= shell_signals + last_signal) return JobEnd::killed;
    return JobEnd::launcher;
}

// One start of the job, and how it ended.
struct Attempt {
    JobEnd end = JobEnd::done;
    int code = 0;
    int64_t last_step = -1;  // the last finished step; -1: none
    double begun = 0;        // seconds since 1970
    double ended = 0;
    int ranks = 0;
    bool exchanged = false;  // hosts were replaced after it, or its keeper ended too
    std::string why = {};    // one line
};

struct RestartLimits {
    int most = 20;          // restarts in the window
    double window = 86400;  // seconds
    double backoff = 5;     // seconds before a restart
    double longest = 3600;  // upper limit of the growing back-off
};

struct Restart {
    enum Kind { finish, give_up, from_newest, from_before } kind;
    double wait = 0;          // seconds
    std::string reason = {};  // why the job ended badly; empty: it did not
};

inline int64_t best_step(const std::vector<Attempt>& attempts) {
    int64_t best = -1;
    for (const Attempt& attempt : attempts) best = std::max(best, attempt.last_step);
    return best;
}

// Returns whether an attempt got further than all before it.
inline bool made_progress(const std::vector<Attempt>& attempts, size_t i) {
    int64_t best = -1;
    for (size_t j = 0; j < i; j++) best = std::max(best, attempts[j].last_step);
    return attempts[i].last_step > best;
}

// Returns the number of restarts at the end of the list that made no progress; with_exchanged: including
// those after which hosts were replaced.
inline int restarts_in_vain(const std::vector<Attempt>& attempts, bool with_exchanged = false) {
    int count = 0;
    for (size_t i = attempts.size(); i-- > 1;) {
        if (made_progress(attempts, i) || (attempts[i].exchanged && !with_exchanged)) break;
        count++;
    }
    return count;
}

// Returns whether the last two attempts failed at the same step in the same way, with no host replaced.
inline bool failed_alike(const std::vector<Attempt>& attempts) {
    if (attempts.size() < 2) return false;
    const Attempt &last = attempts.back(), &before = attempts[attempts.size() - 2];
    return last.last_step >= 0 && last.last_step == before.last_step && last.end == before.end &&
           last.code == before.code && !last.exchanged && !before.exchanged;
}

// `attempts`: all attempts so far; the last has just ended.
inline Restart decide(const std::vector<Attempt>& attempts, const RestartLimits& limits, bool asked_to_stop) {
    const Attempt& last = attempts.back();
    if (last.end == JobEnd::done) return {Restart::finish};
    if (asked_to_stop) return {Restart::give_up, 0, "it was asked to stop"};
    if (last.end == JobEnd::bad_input) return {Restart::give_up, 0, "its input has to be changed"};

    long long failing = last.last_step + 1;
    int in_vain = restarts_in_vain(attempts);
    if (last.end == JobEnd::not_finite) {
        bool again =
            in_vain > 0 && std::ranges::any_of(attempts.end() - 1 - in_vain, attempts.end() - 1,
                                               [](const Attempt& a) { return a.end == JobEnd::not_finite; });
        if (again)
            return {Restart::give_up, 0,
                    text("numbers were not finite again by step %lld, although it went back one checkpoint",
                         failing)};
    } else if (failed_alike(attempts)) {
        return {
            Restart::give_up, 0,
            text("step %lld failed twice in the same way on the same data (%s, code %d): the cause is in the "
                 "data or in the program",
                 failing, name_of(last.end), last.code)};
    }
    constexpr int most_in_vain = 2;
    if (in_vain >= most_in_vain)
        return {Restart::give_up, 0,
                text("%d restarts made no progress beyond step %lld", in_vain,
                     (long long)std::max<int64_t>(best_step(attempts), 0))};
    // All attempts in the window are restarts, except perhaps the first start; the next restart is not yet
    // among them.
    int recent = (int)std::ranges::count_if(
        attempts, [&](const Attempt& a) { return a.ended > last.ended - limits.window; });
    if (recent > limits.most)
        return {Restart::give_up, 0,
                text("it was restarted %d times in %.3g hours (--max-restarts)", recent - 1,
                     limits.window / 3600)};

    double wait = std::min(limits.longest, std::ldexp(limits.backoff, restarts_in_vain(attempts, true)));
    return {last.end == JobEnd::not_finite ? Restart::from_before : Restart::from_newest, wait};
}
