/*
The agents of a job (`train_gpt agent`): one runs on each host, started as ranks are, each by its own
launcher, so that losing a host takes down no other agent. The lines that they print are merged here into the
newest state of every rank, the last sign of life of any rank, and the ranks that hold up the others.
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
    // `command` prints the states of the ranks on its host. On this machine it needs no launcher.
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

    // Waits until an agent prints something, for at most `seconds`.
    void wait(double seconds) {
        std::vector<pollfd> files;
        for (Agent& agent : agents_) {
            if (!agent.child->is_silent()) files.push_back({agent.child->output(), POLLIN, 0});
        }
        poll(files.data(), (nfds_t)files.size(), (int)(seconds * 1e3));
    }

    void read() {
        constexpr double patience = 10;  // before an agent that ended is restarted
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
    // On the clock of seconds_now(); 0: none so far.
    double last_sign() const { return last_sign_; }
    // Returns whether a rank is writing a checkpoint.
    bool saves() const {
        return std::ranges::any_of(
            seen_, [](const auto& seen) { return seen.second.phase.find("sav") != std::string::npos; });
    }

    // Finds the ranks that hold up the others, if nothing has happened for `seconds`.
    HangDiagnosis diagnosis(double seconds) const {
        std::vector<RankState> states;
        for (const auto& [rank, state] : seen_) states.push_back(state);
        return diagnose_hang(states, seconds);
    }

private:
    struct Agent {
        Words words;
        std::unique_ptr<PipedChild> child;
        std::string text;  // the beginning of a line whose end has not arrived
        double started;
    };

    void take(std::string_view line) {
        for (RankState& state : states_in_line(line)) {
            // Processes of an earlier start may have left records; these do not count.
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
