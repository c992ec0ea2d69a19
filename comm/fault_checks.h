/*
The checks of a run for devices that compute wrongly: when they are due, and what happens when one fails. The
run ends with a line that names the rank, its host, its device and what is wrong, and with the exit code of a
part that failed, which is worth a new start; its state is not saved, for nobody knows which of it is right.
*/
#pragma once

#include <string>

#include "comm/replay_check.h"     // ReplayCheck
#include "comm/replica_check.h"    // ReplicaCheck
#include "comm/run_checkpoints.h"  // RunCheckpoints
#include "data/options/options.h"  // Options

class FaultChecks {
public:
    FaultChecks(const Options& o, ZeroState& state, const World& world, RunCheckpoints& checkpoints)
        : o_(o), world_(world), state_(state), checkpoints_(checkpoints) {}

    // For all ranks, after this step, or before the first. saves: a checkpoint comes next, which is not made
    // of what has not been checked. gradients: as in ReplayCheck::find().
    template <typename Gradients>
    void run(int step, bool saves, Gradients&& gradients) {
        bool replicas = o_.check_replicas > 0 && (saves || step % o_.check_replicas == 0);
        bool replay = o_.check_replay > 0 && step % o_.check_replay == 0;
        if (!replicas && !replay) return;
        Phase phase("checks");
        state_.synchronize();
        if (replicas) judge("--check-replicas", o_.check_replicas, step, ReplicaCheck(state_, world_).find());
        if (replay) {
            judge("--check-replay", o_.check_replay, step, ReplayCheck(state_, world_).find(gradients));
        }
        sound_ = step;
    }

private:
    void judge(const char* option, int every, int step, const std::string& found) {
        if (found.empty()) return;
        checkpoints_.distrust();
        std::string sound =
            sound_ < 0 ? "it was the first check" : text("all was well after step %d", sound_);
        world_.fail_on_all(
            text("%s %d, after step %d: %s; %s, and nothing is saved: go on without that device "
                 "from a checkpoint of then",
                 option, every, step, found.c_str(), sound.c_str()),
            exit_failed_part);
    }

    const Options& o_;
    const World& world_;
    ZeroState& state_;
    RunCheckpoints& checkpoints_;
    int sound_ = -1;  // the step of the last check
};
