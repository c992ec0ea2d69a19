/*
The agents of a job (`train_gpt agent`), one on each host. They are started like ranks, but by a separate
launcher each, so the loss of a host ends no other agent. The lines that they print are merged here into the
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
            agents_.push_back({place.name, words, std::make_unique<PipedChild>(words, true), seconds_now()});
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

    // Reads the agents' output, and restarts those that have ended. Returns a note for each that has failed.
    std::vector<std::string> read() {
        constexpr double patience = 10;  // seconds between two starts of an agent
        constexpr size_t longest = 16 << 20;
        std::vector<std::string> notes;
        for (Agent& agent : agents_) {
            const int code = agent.child->code();  // queried first, so the output has its last words
            agent.text += agent.child->read();
            if (agent.text.size() > longest) agent.text.clear();
            std::string_view rest = agent.text;
            while (rest.find('\n') != rest.npos) take(next_line(rest), agent);
            agent.text = std::string(rest);
            if (code > 0 && !std::exchange(agent.is_told, true))
                notes.push_back(text("the agent on %s, which watches its ranks, ended with exit code %d: %s",
                                     agent.host.c_str(), code, last_words(agent.said + agent.text).c_str()));
            if (code < 0 || seconds_now() < agent.started + patience) continue;
            agent.child = std::make_unique<PipedChild>(agent.words, true);
            agent.started = seconds_now();
            agent.text.clear();
        }
        return notes;
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
        std::string host;
        Words words;
        std::unique_ptr<PipedChild> child;
        double started;
        std::string text = {};  // the beginning of a line whose end has not arrived
        std::string said = {};  // lines that are not states, such as its launcher's
        bool is_told = false;   // the user knows that it failed
    };

    void take(std::string_view line, Agent& agent) {
        constexpr size_t most_said = 4096;
        if (agent.said.size() > most_said) agent.said.clear();
        if (!line.starts_with('{')) agent.said += std::string(line) + "\n";
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
