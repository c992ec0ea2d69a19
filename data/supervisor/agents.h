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
#include "data/supervisor/host_checks.h"
#include "data/supervisor/hosts.h"
#include "data/supervisor/launcher.h"
#include "data/supervisor/processes.h"

// What an agent says of a rank, as far as it is of interest here.
struct RankSign {
    int64_t step = 0;
    std::string phase;
    double quiet_seconds = 0;  // since its last sign of life
    std::string state;         // of the process, a letter as in /proc/PID/stat
    bool alive = true;
};

// Who holds a job up: these ranks, and why, in one sentence.
struct Blame {
    std::vector<int> ranks;
    std::string sentence;
};

class Agents {
public:
    // `command` prints the states of the ranks of its host. On this machine it needs no launcher.
    void start(const Launcher& launcher, bool on_this_machine, const std::vector<HostRanks>& places,
               Scratch& scratch, const Words& command) {
        stop();
        seen_.clear();
        last_sign_ = 0;
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
        for (const auto& [rank, sign] : seen_) last = std::max(last, sign.step);
        return last;
    }
    // On the clock of seconds_now(); 0: there was none.
    double last_sign() const { return last_sign_; }
    // Whether a rank writes a checkpoint.
    bool saves() const {
        return std::ranges::any_of(
            seen_, [](const auto& seen) { return seen.second.phase.find("sav") != std::string::npos; });
    }

    // Ranks whose processes are gone or stopped, for all others wait for these.
    Blame blame() const {
        Blame blame;
        for (const auto& [rank, sign] : seen_) {
            bool is_stopped = sign.state == "T" || sign.state == "t";
            if (sign.alive && !is_stopped) continue;
            blame.ranks.push_back(rank);
            blame.sentence += (blame.sentence.empty() ? "" : ", ") +
                              text("rank %d is %s", rank, is_stopped ? "stopped" : "gone");
        }
        if (blame.ranks.empty()) blame.sentence = "no rank is known to be stopped or gone";
        return blame;
    }

private:
    struct Agent {
        Words words;
        std::unique_ptr<PipedChild> child;
        std::string text;  // of a line that is not whole yet
        double started;
    };

    void take(std::string_view line) {
        nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
        if (!json.is_object() || !json.contains("ranks")) return;  // of the launcher
        try {
            for (const nlohmann::json& one : json["ranks"]) {
                RankSign sign = {one.at("step"), one.at("phase"), one.at("quiet_seconds"), one.at("state"),
                                 one.at("alive")};
                auto [seen, is_new] = seen_.try_emplace(one.at("rank"), sign);
                bool moved = is_new || sign.step != seen->second.step || sign.phase != seen->second.phase;
                last_sign_ = std::max(last_sign_, seconds_now() - (moved ? 0 : sign.quiet_seconds));
                seen->second = std::move(sign);
            }
        } catch (const nlohmann::json::exception&) {
            // An agent of another version; its ranks count as silent.
        }
    }

    std::vector<Agent> agents_;
    std::map<int, RankSign> seen_;
    double last_sign_ = 0;
};
