/*
The per-host agent, which `train_gpt launch` starts on every host: it reads the flight records of the run's
local ranks (data/run/rank_state.h) and periodically prints their states as one line of JSON. It depends on no
rank, device or shared disk, so it keeps reporting when none of them responds.

    {"agent": "node5", "time": 1790000000.25, "ranks": [{"rank": 40, "state": "S", ...}]}

If --hang-timeout is given, a line also has a `verdict` that names the culprits (data/run/culprit.h), once a
rank is dead or none has made progress for that long. For a run on one machine the verdict is complete; for a
run on several it covers what this host's records show.

The agent exits when its input or output is closed, or when the process that started it has ended.
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

// Idle groups say nothing about which rank waits for which; they are left out while their rank makes
// progress.
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
