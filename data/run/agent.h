/*
The agent of a host, which `train_gpt launch` starts on each: it reads the flight records of a run's ranks
there (data/run/rank_state.h), and prints what they say as a line of JSON, again and again. It asks no rank,
no device and no shared disk for anything, so it goes on telling when none of them answers.

    {"agent": "node5", "time": 1790000000.25, "ranks": [{"rank": 40, "state": "S", ...}]}

With --hang-timeout it also says in `verdict` who is to blame (data/run/culprit.h), once a rank is dead or
none has got on for so long: of a run on one machine that is all, and of one on several, what can be said
here.

It ends when its input or its output does, or the process that has started it.
*/
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"  // unix_seconds
#include "data/base/json.h"     // json_line
#include "data/base/strings.h"
#include "data/base/this_machine.h"
#include "data/options/options.h"  // AgentOptions
#include "data/run/culprit.h"
#include "data/run/rank_state.h"

// Groups that tell nothing about who waits for whom are left out, while their rank gets on.
inline std::string agent_line(const std::string& host, const std::string& run_dir, double hang_timeout = 0) {
    constexpr double gets_on = 1;  // seconds since the last sign of life
    std::vector<RankState> ranks = read_rank_states(run_dir);
    HangDiagnosis diagnosis;
    if (hang_timeout > 0) diagnosis = diagnose_hang(ranks, hang_timeout, false);
    for (RankState& rank : ranks) {
        if (rank.quiet_seconds < gets_on)
            std::erase_if(rank.groups, [](const GroupState& group) { return group.issued == group.done; });
    }
    nlohmann::ordered_json line = {{"agent", host}, {"time", unix_seconds()}};
    if (diagnosis.kind != Fault::nobody) line["verdict"] = nlohmann::json(diagnosis);
    line["ranks"] = nlohmann::json(ranks);
    return json_line(line);
}

inline void run_agent(const AgentOptions& options) {
    const std::string host = host_name();
    const pid_t parent = getppid();
    while (getppid() == parent) {
        print_text(agent_line(host, options.run_dir, options.hang_timeout));
        if (fflush(stdout) != 0) return;
        pollfd input = {STDIN_FILENO, POLLIN, 0};
        char ignored[256];
        if (poll(&input, 1, (int)(1e3 * options.every)) <= 0) continue;
        if (read(STDIN_FILENO, ignored, sizeof ignored) <= 0) return;
    }
}
