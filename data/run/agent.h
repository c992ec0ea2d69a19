/*
The agent of a host, which `train_gpt launch` starts on each: it reads the flight records of a run's ranks
there (data/run/rank_state.h), and prints what they say as a line of JSON, again and again. It asks no rank, no
device and no shared disk for anything, so it goes on telling when none of them answers.

    {"agent": "node5", "time": 1790000000.25, "ranks": [{"rank": 40, "host": "node5", "state": "S", ...}, ...]}

It ends when its input or its output does, or the process that has started it.
*/
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/json.h"  // json_line
#include "data/base/strings.h"
#include "data/run/rank_state.h"

struct AgentOptions {
    std::string run_dir;
    double every = 1;  // seconds
};

// `arguments` behind the name of the command, which only other programs call.
inline AgentOptions agent_options(const std::vector<std::string>& arguments) {
    AgentOptions options;
    for (size_t i = 0; i < arguments.size(); i += 2) {
        const std::string& name = arguments[i];
        if (i + 1 == arguments.size())
            fail("agent: %s: value missing; use agent --run-dir DIR [--every SECONDS]",
                 printable(name).c_str());
        const std::string& value = arguments[i + 1];
        if (name == "--run-dir")
            options.run_dir = value;
        else if (name == "--every")
            options.every = atof(value.c_str());
        else
            fail("agent: %s: no such option; use agent --run-dir DIR [--every SECONDS]",
                 printable(name).c_str());
    }
    if (options.run_dir.empty()) fail("agent: --run-dir: missing; name the directory of the run to watch");
    if (!(options.every >= 0.01 && options.every <= 3600))
        fail("agent: --every: not from 0.01 to 3600 seconds; leave it out for 1");
    return options;
}

// Groups that tell nothing about who waits for whom are left out, while their rank gets on.
inline std::string agent_line(const std::string& host, const std::string& run_dir) {
    constexpr double gets_on = 1;  // seconds since the last sign of life
    std::vector<RankState> ranks = read_rank_states(run_dir);
    for (RankState& rank : ranks) {
        if (rank.quiet_seconds < gets_on)
            std::erase_if(rank.groups, [](const GroupState& group) { return group.issued == group.done; });
    }
    double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    return json_line(nlohmann::json({{"agent", host}, {"time", now}, {"ranks", ranks}}));
}

inline void run_agent(const AgentOptions& options) {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    const pid_t parent = getppid();
    while (getppid() == parent) {
        fputs(agent_line(host, options.run_dir).c_str(), stdout);
        if (fflush(stdout) != 0) return;
        pollfd input = {STDIN_FILENO, POLLIN, 0};
        char ignored[256];
        if (poll(&input, 1, (int)(1e3 * options.every)) <= 0) continue;
        if (read(STDIN_FILENO, ignored, sizeof ignored) <= 0) return;
    }
}
