/*
What the agents tell (`train_gpt agent`): one on each host of a job, started as ranks are, each in a launcher
of its own, so that a host which is lost takes no other agent along. Their lines are put together here to the
newest state of every rank, when a rank last gave a sign of life, and who holds the others up.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <poll.h>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/base/figures.h"
#include "data/base/strings.h"
#include "data/run/culprit.h"
#include "data/run/rank_state.h"
#include "data/supervisor/host_checks.h"
#include "data/supervisor/hosts.h"
#include "data/supervisor/launcher.h"
#include "data/supervisor/processes.h"

class Agents {
public:
    // `command` prints the states of the ranks of its host. On this machine it needs no launcher.
    void start(const Launcher& launcher, bool on_this_machine, const std::vector<HostRanks>& places,
               Scratch& scratch, const Words& command) {
        stop();
        seen_.clear();
        last_sign_ = 0, started_ = seconds_now();
        for (const HostRanks& place : places) {
            std::vector<HostRanks> one = {{place.name, 0, 1}};
            Words words = on_this_machine ? command : launcher.start(one, scratch.hosts_file(one), command);
            agents_.push_back({words, std::make_unique<PipedChild>(words), "", seconds_now()});
        }
    }
    void stop() { agents_.clear(); }

    // Until one of them says something, or for so many seconds.
    void wait(double seconds) {
        std::vector<pollfd> files;
        for (Agent& agent : agents_) {
            if (!agent.child->is_silent()) files.push_back({agent.child->output(), POLLIN, 0});
        }
        poll(files.data(), (nfds_t)files.size(), (int)(seconds * 1e3));
    }

    void read() {
        constexpr double patience = 10;  // before one that ended is started again
        constexpr size_t longest = 16 << 20;
        for (Agent& agent : agents_) {
            agent.text += agent.child->read();
            if (agent.text.size() > longest) agent.text.clear();
            std::string_view rest = agent.text;
            while (rest.find('\n') != rest.npos) take(next_line(rest));
            agent.text = std::string(rest);
        }
        for (Agent& agent : agents_) {
            if (agent.child->code() < 0 || seconds_now() < agent.started + patience) continue;
            agent.child = std::make_unique<PipedChild>(agent.words);
            agent.started = seconds_now();
        }
    }

    int64_t last_step() const {
        int64_t last = -1;
        for (const auto& [rank, state] : seen_) last = std::max<int64_t>(last, state.step);
        return last;
    }
    // On the clock of seconds_now(); 0: there was none.
    double last_sign() const { return last_sign_; }
    // Tells whether a rank writes a checkpoint.
    bool saves() const {
        return std::ranges::any_of(
            seen_, [](const auto& seen) { return seen.second.phase.find("sav") != std::string::npos; });
    }

    // Who holds the others up, who have been quiet for so many seconds.
    HangDiagnosis diagnosis(double seconds) const {
        std::vector<RankState> states;
        for (const auto& [rank, state] : seen_) states.push_back(state);
        return diagnose_hang(states, seconds);
    }

private:
    struct Agent {
        Words words;
        std::unique_ptr<PipedChild> child;
        std::string text;  // the beginning of a line whose end has not come yet
        double started;
    };

    void take(std::string_view line) {
        for (RankState& state : states_in_line(line)) {
            // Processes of an earlier start have left their records.
            if (!state.alive && state.quiet_seconds > seconds_now() - started_) continue;
            auto [seen, is_new] = seen_.try_emplace(state.rank, state);
            bool moved = is_new || state.step != seen->second.step || state.phase != seen->second.phase;
            last_sign_ = std::max(last_sign_, seconds_now() - (moved ? 0 : state.quiet_seconds));
            seen->second = std::move(state);
        }
    }

    std::vector<Agent> agents_;
    std::map<int, RankState> seen_;
    double started_ = 0, last_sign_ = 0;  // on the clock of seconds_now()
};
