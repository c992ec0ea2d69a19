/*
How a run handles spikes (defined in data/run/spike_rule.h): it skips their updates and, after several in a
row, goes back to a checkpoint. All ranks judge by the same numbers, so they need no communication.
*/
#pragma once

#include <optional>

#include "comm/run_checkpoints.h"   // RunCheckpoints, RunPosition
#include "comm/whole_tensors.h"     // exit_not_finite
#include "comm/world.h"             // World
#include "data/options/options.h"   // Options
#include "data/run/run_log.h"       // RunLog
#include "data/run/step_log.h"      // StepLog
#include "kernels/global_norm.cuh"  // ClipLimits

class SpikeGuard {
public:
    // log: null except on the first rank
    SpikeGuard(const Options& o, const World& world, RunCheckpoints& checkpoints, StepLog& progress,
               RunLog* log)
        : o_(o), world_(world), checkpoints_(checkpoints), progress_(progress), log_(log) {}

    // Returns the limits for the next step, whose losses are summed over `targets` targets.
    ClipLimits limits(const RunPosition& at, double targets) const {
        SpikeLimits most = at.spikes.limits(o_.spike_sigma);
        ClipLimits limits = o_.gradient_clip;
        limits.most_loss = most.most_loss(targets);
        limits.most_norm = most.most_norm();
        return limits;
    }

    // For all ranks: notes the loss and gradient norm of the latest step, and whether its update was skipped.
    void add_step(RunPosition& at, float loss, float norm, bool skipped) {
        if (o_.spike_sigma == 0) return;
        if (!skipped) return at.spikes.add_step(loss, norm);
        at.spikes.in_a_row++;
        progress_.spike(at.step, loss, norm, at.spikes.limits(o_.spike_sigma));
    }

    // Returns whether the run should go back.
    bool has_enough(const RunPosition& at) const {
        return o_.spike_skips > 0 && at.spikes.in_a_row >= o_.spike_skips;
    }

    // For all ranks, while nothing works on the state: goes back to the newest checkpoint from before the
    // spikes. If there is none, the run continues with its current weights.
    void go_back(RunPosition& at) {
        const RunPosition from = at;
        std::optional<RunPosition> to = checkpoints_.go_back(from.step - from.spikes.in_a_row);
        at.spikes.in_a_row = 0;
        if (!to) {
            progress_.note(text("spikes       %d in a row up to step %d, and no checkpoint from before them: "
                                "the run continues with its current weights",
                                from.spikes.in_a_row, from.step));
            return;
        }
        SpikeHistory::Samples passed_over = {to->samples, from.samples};
        at = *to;
        at.spikes.in_a_row = 0;
        at.spikes.passed_over.push_back(passed_over);
        at.samples = from.samples;
        world_.on_all_ranks([&] {
            if (log_) log_->go_back(at.step);
        });
        progress_.went_back(at.step, from.step, from.spikes.in_a_row, passed_over);
        times_ = at.step == last_ ? times_ + 1 : 1;
        last_ = at.step;
        // Only now: this error saves the run, and `at` must match the weights.
        if (times_ > most_times) {
            world_.fail_on_all(
                text("--spike-sigma %g: after step %d there were %d spikes in a row, %d times; "
                     "give a larger value, a lower --learning-rate or different --train-data",
                     o_.spike_sigma, at.step, o_.spike_skips, times_),
                exit_not_finite);
        }
    }

private:
    static constexpr int most_times = 3;  // times that a run may go back to the same checkpoint

    const Options& o_;
    const World& world_;
    RunCheckpoints& checkpoints_;
    StepLog& progress_;
    RunLog* log_;
    int last_ = -1, times_ = 0;  // the step it last went back to, and how often in a row
};
