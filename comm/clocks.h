/*
The clocks of the machines of a job, compared over the control plane.

Processes of a machine have one clock. The first rank asks one process of each other machine for its time, a
few times, and takes the answer that came back soonest (Cristian, "Probabilistic clock synchronization",
1989): the time in the answer is then that of the middle of the wait, give or take half of it.
*/
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "comm/world.h"
#include "data/base/figures.h"  // seconds_now

struct ClockOffset {
    double ahead = 0;  // seconds by which a rank's seconds_now() is ahead of the first rank's
    double error = 0;  // by which that may be wrong
};

// For all ranks: those of all ranks, on the first one.
inline std::vector<ClockOffset> clock_offsets(const World& world) {
    constexpr int rounds = 16;
    std::map<std::string, int> first_of_host;
    for (int rank = 0; rank < world.size(); rank++) first_of_host.try_emplace(world.host(rank), rank);
    if (!world.is_root()) {
        bool answers = first_of_host[world.host()] == world.rank() && world.host() != world.host(0);
        for (int round = 0; answers && round < rounds; round++) {
            world.receive_from(0);
            double now = seconds_now();
            world.send_to(0, {(const char*)&now, sizeof now});
        }
        return {};
    }
    std::map<std::string, ClockOffset> of_host;
    for (auto& [host, rank] : first_of_host) {
        if (host == world.host(0)) continue;
        ClockOffset best = {0, 1e9};
        for (int round = 0; round < rounds; round++) {
            double before = seconds_now(), theirs;
            world.send_to(rank, "?");
            std::string answer = world.receive_from(rank);
            double after = seconds_now();
            memcpy(&theirs, answer.data(), sizeof theirs);
            double error = (after - before) / 2;
            if (error < best.error) best = {theirs - (before + after) / 2, error};
        }
        of_host[host] = best;
    }
    std::vector<ClockOffset> offsets;
    for (int rank = 0; rank < world.size(); rank++) offsets.push_back(of_host[world.host(rank)]);
    return offsets;
}
