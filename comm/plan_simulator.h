/*
A training step, simulated on all pipeline stages, with one tensor and one data rank of each: which rank waits
for what, and how long the step takes. Nothing is described again for it. Stages go through the very lists
that the executor runs (comm/pipeline_schedule.h); what an action takes is made of the passes of a step
(comm/plan_times.h); units are gathered and reduced when ZeroState does it (comm/zero.h).

A stage has streams: one that computes, one that sends to the stages beside, one for the messages of data
ranks, which the executor has two for, but they share the way, and with offload that of the host. What is put
on a stream comes after all that is there already, and after what it waits for. So the end of each piece of
work is the latest of some others plus what it takes itself: whatever becomes shorter, no step becomes longer.

    compute     optimizer | F0 | F1 | B0 | F2 | B1 | B2
    link                       | F0 | F1 | B0 | ...
    data          gathered parameters | ...          reduced gradients

The step begins where the global norm of the gradients is known, and ends there: that is the one place where
all ranks wait for each other, unless the optimizer takes norms of its own. What tensor ranks wait for each
other is known from the ledger of a micro-batch.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "comm/layout.h"             // Layout
#include "comm/plan_times.h"         // MicroBatchTime
#include "comm/parameters.h"         // ParameterLayout
#include "comm/pipeline_schedule.h"  // pipeline_actions
#include "data/base/error.h"         // fail

// Messages of these kinds take time. A step without those of a kind shows what waiting for them comes to.
struct MessagesTaken {
    bool tensor = true, pipeline = true, data = true;
};

// A step that is to be simulated. What it refers to must outlive it.
struct StepToSimulate {
    const Machine& machine;
    const ModelConfig& config;
    const Layout& layout;
    const MicroBatchTime& times;
    const ParameterLayout& parameters;  // a tensor rank's, over all stages
    int zero = 0, prefetch = 1;
    Overlap overlap = true;
    double stream_bytes = 0;  // sent from stage to stage
    size_t element_bytes = 2;
    double norm_bytes = 0;  // summed over all ranks between two passes of the optimizer; 0: no norms
    Dtype reduce_dtype = Dtype::fp32;  // of gradients on their way
    bool offload = false;              // the optimizer's state is on the host
    // The cost of the matrices of so many blocks if the optimizer transforms them; null if it does not.
    std::function<AtOwners(int blocks)> owners = nullptr;
};

// Bytes that a rank sends in a step.
struct BytesSent {
    double pipeline = 0, parameters = 0, gradients = 0;
    double all() const { return pipeline + parameters + gradients; }
};

struct SimulatedStep {
    double seconds = 0;
    std::vector<double> busy;     // (stages) the part that the micro-batches take
    double optimizer = 0;         // the most of any stage
    std::vector<BytesSent> sent;  // (stages)
    // The stages wait for so long, as a share of the time that they compute.
    double bubble() const {
        double idle = 0, work = 0;
        for (double stage : busy) idle += seconds - stage, work += stage;
        return idle / work;
    }
};

// A stage on its way through its list: when each of its streams is free.
class SimulatedStage {
public:
    const std::vector<PipelineAction> list;
    size_t next = 0;  // in the list
    double compute = 0, link = 0;
    double busy = 0;  // seconds of the actions
    double optimizer = 0;
    BytesSent sent;
    double network = 0;  // seconds that messages to other nodes take

    SimulatedStage(const StepToSimulate& step, const MessagesTaken& taken, int number)
        : list(pipeline_actions(step.layout.pipeline, number)),
          step_(step),
          taken_(taken),
          number_(number),
          shard_(group_along(Axis::shard, step.layout.mesh)),
          replica_(group_along(Axis::replica, step.layout.mesh)),
          cut_gradients_(step.zero >= 2 && shard_.ranks > 1),
          cut_parameters_(step.zero >= 3 && shard_.ranks > 1),
          places_((size_t)step.prefetch + 2),
          place_of_((size_t)step.config.layers + 2, -1),
          turn_of_((size_t)step.config.layers + 2, 0),
          updated_((size_t)step.config.layers + 2, 0) {
        auto& shape = step.layout.pipeline;
        int part = 0, layer = 0, blocks = 0;
        // The embedding and the head have one place for both.
        if (has_embedding() || (has_head() && step.config.tie_embeddings)) hold(0, step.prefetch + 1);
        for (int layers : step.layout.split) {
            if (part++ % shape.stages == number) {
                chunks_.push_back({layer, layer + layers});
                for (int i = layer; i < layer + layers; i++, blocks++) {
                    hold(i + 1, blocks % (step.prefetch + 1));
                    turn_of_[i + 1] = blocks % 2;
                }
            }
            layer += layers;
        }
        if (has_head() && !step.config.tie_embeddings) hold(head_unit(), step.prefetch + 1);
        for (auto [begin, end] : chunks_) of_chunk_.push_back(step.times.chunk(begin, end));
    }

    // The optimizer, ahead of all actions: what comes before norms of all ranks are summed, if they are.
    // Returns when that is done.
    double prepare_updates() {
        const MicroBatchTime& times = step_.times;
        for (int unit : held_) {
            double own = size(unit) / shard_.ranks, matrices = matrices_of(unit);
            compute += times.others.norm * own;
            optimizer_clock() += times.others.prepare * (own - matrices) + times.matrices.prepare * matrices;
        }
        if (step_.offload) host_free_ += compute;  // which sends the norm there
        return optimizer_clock();
    }
    // And the rest: units whose matrices are transformed together are stepped behind that, one by one.
    void step_parameters(double begin) {
        const MicroBatchTime& times = step_.times;
        if (step_.norm_bytes > 0) optimizer_clock() = begin;
        int number = 0;
        for (const std::vector<int>& round : rounds()) {
            if (step_.owners) transform(round);
            for (int unit : round) {
                double own = size(unit) / shard_.ranks, matrices = matrices_of(unit);
                optimizer_clock() += times.others.step * (own - matrices) + times.matrices.step * matrices;
                if (step_.offload) host_free_ += (double)step_.element_bytes * own / step_.machine.host_link;
                if (!cut_parameters_) {
                    gather(optimizer_clock(), unit);
                    updated_[unit] = data_free_;
                } else if (number++ <= step_.prefetch && unit < head_unit()) {
                    gather_in_place(unit, optimizer_clock());
                }
            }
        }
        if (cut_parameters_) data_free_ = std::max(data_free_, optimizer_clock());
        for (int unit : held_)
            compute +=
                times.others.clearing * (cut_gradients_ ? 1 : shard_.ranks) * size(unit) / shard_.ranks;
        for (auto [begin, end] : chunks_) compute += times.once * (end - begin) / step_.config.layers;
        optimizer = compute;
    }

    // Does the next action, once what it needs has arrived.
    void act(double arrived) {
        auto [work, micro_batch, chunk] = list[next++];
        compute = std::max(compute, arrived);
        bool last = micro_batch == step_.layout.pipeline.micro_batches - 1;
        switch (work) {
        case PipelineWork::forward:
            return forward(chunk);
        case PipelineWork::backward:
        case PipelineWork::input_gradient:
            return backward(chunk, work == PipelineWork::backward, last);
        case PipelineWork::weight_gradient:
            return weight_gradients(chunk, last);
        }
    }
    // Sends what was made last to another stage; returns when it is there.
    double send(double seconds, bool to_other_node) {
        if (step_.layout.pipeline.stages > 1) sent.pipeline += step_.stream_bytes;
        link = std::max(link, compute) + seconds;
        if (!step_.overlap.pipeline) compute = link;
        if (to_other_node) network += seconds;
        return link;
    }
    double end() const { return std::max({compute, data_free_, host_free_}); }
    // The ends of a model sum the gradients of the table that both have.
    void sum_table(double begin, const RankGroup& ends) {
        double seconds = sum_seconds(step_.machine, ends, 4 * size(0) / shard_.ranks);
        sent.gradients += 4 * size(0) / shard_.ranks;
        data_free_ = std::max(begin, end()) + (taken_.data ? seconds : 0);
    }

private:
    struct Place {  // for a unit's gathered parameters
        int unit = -1;
        bool in_use = false;
        double ready = 0, free = 0;
    };
    struct GradientPlace {
        bool in_use = false;
        double free = 0;
    };
    struct Chunk {
        int begin, end;  // layers
    };

    bool has_embedding() const { return number_ == 0; }
    bool has_head() const { return number_ == step_.layout.pipeline.stages - 1; }
    bool is_first(int chunk) const { return has_embedding() && chunk == 0; }
    bool is_last(int chunk) const { return has_head() && chunk == step_.layout.pipeline.chunks - 1; }
    int head_unit() const { return step_.config.layers + 1; }
    int last_block() const { return step_.config.layers; }  // its unit includes the last norm
    double size(int unit) const { return (double)step_.parameters.unit_size(unit); }

    void hold(int unit, int place) {
        held_.push_back(unit);
        place_of_[unit] = place;
    }
    void work(const WorkTime& time) {
        double seconds = time.all(taken_.tensor);
        compute += seconds, busy += seconds;
    }

    static double share_of_others(const RankGroup& group) { return (group.ranks - 1.0) / group.ranks; }

    // Seconds of data ranks; those in other nodes have the network.
    double data_seconds(double seconds, const RankGroup& group) {
        if (!taken_.data) return 0;
        if (group.crosses_nodes(step_.machine)) network += seconds;
        return seconds;
    }

    // ---- the optimizer

    // It works on the compute stream, or with offload on the host.
    double& optimizer_clock() { return step_.offload ? host_free_ : compute; }

    // Elements of the blocks' matrices that this rank owns of a unit, where they are transformed.
    double matrices_of(int unit) const {
        if (!step_.owners || unit == 0 || unit >= head_unit()) return 0;
        return (size(unit) - (double)step_.parameters.before_matrices(unit)) / shard_.ranks;
    }
    // Units that are stepped one after another, behind the transformation of all their matrices; without one,
    // each by itself.
    std::vector<std::vector<int>> rounds() const {
        int ranks = step_.layout.mesh.tp * step_.layout.mesh.dp, blocks = 0,
            most = step_.owners ? blocks_of_round(step_.config, ranks) : 1;
        std::vector<std::vector<int>> rounds;
        for (int unit : held_) {
            bool is_block = unit > 0 && unit < head_unit();
            if (rounds.empty() || !step_.owners || blocks >= most) rounds.emplace_back(), blocks = 0;
            rounds.back().push_back(unit);
            blocks += is_block;
        }
        return rounds;
    }
    // Simulates the updates of whole matrices, which visit the device even if the optimizer is offloaded.
    void transform(const std::vector<int>& round) {
        int blocks = 0;
        double own = 0, matrices = 0;
        for (int unit : round) {
            blocks += unit > 0 && unit < head_unit();
            own += size(unit) / shard_.ranks, matrices += matrices_of(unit);
        }
        if (blocks == 0) return;
        double copy = step_.offload ? 4 * own / step_.machine.host_link : 0;
        AtOwners owners = step_.owners(blocks);
        compute = std::max(compute, host_free_) + copy + step_.times.matrices.transform * matrices +
                  owners.work + (taken_.data ? owners.sending : 0);
        if (step_.offload) host_free_ = compute + copy;
    }

    // ---- parameters

    void gather(double begin, int unit) {
        double bytes = (double)step_.element_bytes * size(unit);
        double seconds = gather_seconds(step_.machine, shard_, bytes);
        sent.parameters += share_of_others(shard_) * bytes;
        data_free_ = std::max(data_free_, begin) + data_seconds(seconds, shard_);
        if (!step_.overlap.data) compute = std::max(compute, data_free_);
    }
    void gather_in_place(int unit, double begin = 0) {
        Place& place = places_[place_of_[unit]];
        if (place.unit == unit) return;
        place.unit = unit;
        gather(std::max(begin, place.free), unit);
        place.ready = data_free_;
    }
    void acquire(int unit, int direction) {
        if (!cut_parameters_) {
            await(updated_[unit]);
            return;
        }
        gather_in_place(unit);
        Place& place = places_[place_of_[unit]];
        place.in_use = true;
        await(place.ready);
        for (int ahead = 1; direction != 0 && ahead <= step_.prefetch; ahead++) {
            int unit_ahead = unit + direction * ahead;
            bool is_held = unit_ahead >= (direction > 0 ? 0 : 1) && unit_ahead <= head_unit() &&
                           place_of_[unit_ahead] >= 0;
            if (!is_held) break;
            if (!places_[place_of_[unit_ahead]].in_use) gather_in_place(unit_ahead);
        }
    }
    // Time for which the passes wait for the host counts as the optimizer's.
    void await(double ready) {
        if (step_.offload) optimizer += std::max(0.0, std::min(ready, host_free_) - compute);
        compute = std::max(compute, ready);
    }
    void release(int unit) {
        if (!cut_parameters_) return;
        Place& place = places_[place_of_[unit]];
        place.in_use = false;
        place.free = compute;
    }

    // ---- gradients

    // There are two places for those of the blocks in turn.
    GradientPlace& gradient_place(int unit) {
        return gradient_places_[unit == 0 || unit == head_unit() ? 2 : turn_of_[unit]];
    }
    void begin_gradients(int unit) {
        if (!cut_gradients_) return;
        GradientPlace& place = gradient_place(unit);
        if (place.in_use) return;
        place.in_use = true;
        compute = std::max(compute, place.free);
        work({.work = 4 * size(unit) / step_.machine.memory_bandwidth});
    }
    void reduce_gradients(int unit, bool last) {
        if (!cut_gradients_ && !last) return;
        const GradientMessages messages = {step_.machine, step_.reduce_dtype};
        double gradients = size(unit), part = gradients / shard_.ranks;
        sent.gradients += share_of_others(shard_) * messages.bytes(gradients);
        if (last) sent.gradients += 2 * share_of_others(replica_) * messages.bytes(part);
        data_free_ =
            std::max(data_free_, compute) + data_seconds(messages.scatter_seconds(shard_, gradients), shard_);
        if (cut_gradients_) gradient_place(unit) = {false, data_free_};
        if (last) data_free_ += data_seconds(messages.sum_seconds(replica_, part), replica_);
        if (last && step_.offload)
            host_free_ = std::max(host_free_, data_free_) + 4 * part / step_.machine.host_link;
        if (!step_.overlap.data) compute = std::max(compute, data_free_);
    }

    // ---- actions, as stage_forward() and stage_backward() do them

    void forward(int chunk) {
        auto& times = step_.times;
        if (is_first(chunk)) {
            acquire(0, +1);
            work(times.embedding_forward);
            release(0);
        }
        if (cut_parameters_ || data_free_ > compute) {
            for (int layer = chunks_[chunk].begin; layer < chunks_[chunk].end; layer++) {
                acquire(layer + 1, +1);
                work(layer == chunks_[chunk].begin ? times.layers[layer].first : times.layers[layer].forward);
                release(layer + 1);
            }
        } else {
            work(of_chunk_[chunk].forward);
        }
        if (is_last(chunk)) {
            acquire(last_block(), +1);
            work(times.head_forward);
            release(last_block());
        } else {
            work(times.stream);
        }
    }
    void backward(int chunk, bool now, bool last) {
        auto& times = step_.times;
        if (is_last(chunk)) {
            int classifier = step_.config.tie_embeddings ? 0 : head_unit();
            acquire(classifier, 0);
            begin_gradients(classifier);
            work(times.head_backward);
            release(classifier);
            if (!step_.config.tie_embeddings || !has_embedding()) reduce_gradients(classifier, last);
            acquire(last_block(), -1);
            begin_gradients(last_block());
            release(last_block());
        }
        if (cut_parameters_ || cut_gradients_ || last) {
            for (int layer = chunks_[chunk].end - 1; layer >= chunks_[chunk].begin; layer--) {
                acquire(layer + 1, -1);
                begin_gradients(layer + 1);
                work(now ? times.layers[layer].backward : times.layers[layer].input_gradient);
                release(layer + 1);
                reduce_gradients(layer + 1, last && now);
            }
        } else {
            work(now ? of_chunk_[chunk].backward : of_chunk_[chunk].input_gradient);
        }
        if (!is_first(chunk)) return;
        begin_gradients(0);
        work(times.embedding_backward);
        reduce_gradients(0, last);
    }
    void weight_gradients(int chunk, bool last) {
        if (!cut_gradients_ && !last) return work(of_chunk_[chunk].weight_gradient);
        for (int layer = chunks_[chunk].end - 1; layer >= chunks_[chunk].begin; layer--) {
            begin_gradients(layer + 1);
            work(step_.times.layers[layer].weight_gradient);
            reduce_gradients(layer + 1, last);
        }
    }

    const StepToSimulate& step_;
    const MessagesTaken taken_;
    const int number_;
    const RankGroup shard_, replica_;
    const bool cut_gradients_, cut_parameters_;
    double data_free_ = 0;  // when messages of data ranks have come to their end
    double host_free_ = 0;  // when the host has nothing more to do
    std::vector<int> held_;
    std::vector<Place> places_;
    std::vector<int> place_of_;    // each unit, or -1
    std::vector<int> turn_of_;     // gradients of each block that is here: 0 or 1
    std::vector<double> updated_;  // each unit
    GradientPlace gradient_places_[3];
    std::vector<Chunk> chunks_;
    std::vector<LayerTime> of_chunk_;
};

// Lets all stages go through their lists, each action as soon as what it needs has arrived.
inline SimulatedStep simulate_step(const StepToSimulate& step, const MessagesTaken& taken = {}) {
    const MeshShape& mesh = step.layout.mesh;
    const PipelineShape& shape = step.layout.pipeline;
    const Machine& machine = step.machine;
    int S = shape.stages, M = shape.micro_batches, parts = S * shape.chunks;
    std::vector<SimulatedStage> stages;
    stages.reserve(S);
    for (int stage = 0; stage < S; stage++) stages.emplace_back(step, taken, stage);
    double begin = 0;  // when the optimizer's last pass starts: ranks wait for norms before it
    for (SimulatedStage& stage : stages) begin = std::max(begin, stage.prepare_updates());
    if (step.norm_bytes > 0 && taken.data)
        begin += sum_seconds(machine, group_along(all_axes, mesh), step.norm_bytes);
    for (SimulatedStage& stage : stages) stage.step_parameters(begin);
    constexpr double never = -1;
    std::vector<double> input_at((size_t)parts * M, never), gradient_at((size_t)parts * M, never);
    std::fill_n(input_at.begin(), M, 0);  // the first part has its input
    int apart = mesh.tp * mesh.dp;        // ranks of stages side by side
    auto send = [&](int from, int to) {
        bool same_node = true;  // for all their ranks
        for (int rank = 0; rank < std::min(apart, machine.node); rank++)
            same_node &= (from * apart + rank) / machine.node == (to * apart + rank) / machine.node;
        double seconds = S > 1 && taken.pipeline ? message_seconds(machine, same_node, step.stream_bytes) : 0;
        return stages[from].send(seconds, !same_node);
    };
    size_t left = 0;
    for (SimulatedStage& stage : stages) left += stage.list.size();
    for (bool any = true; any;) {
        any = false;
        for (int s = 0; s < S; s++) {
            SimulatedStage& stage = stages[s];
            for (; stage.next < stage.list.size(); any = true, left--) {
                const PipelineAction& action = stage.list[stage.next];
                int part = action.chunk * S + s;
                auto at = [&](int of_part) { return (size_t)of_part * M + action.micro_batch; };
                bool forward = action.work == PipelineWork::forward,
                     later = action.work == PipelineWork::weight_gradient;
                double arrived = later ? 0 : forward ? input_at[at(part)] : gradient_at[at(part)];
                if (arrived == never) break;
                stage.act(arrived);
                if (forward && part == parts - 1)
                    gradient_at[at(part)] = stage.compute;
                else if (forward)
                    input_at[at(part + 1)] = send(s, (s + 1) % S);
                else if (!later && part > 0)
                    gradient_at[at(part - 1)] = send(s, (s + S - 1) % S);
            }
        }
    }
    if (left > 0) fail("pipeline: %zu actions wait for ever; see the lists of the schedule", left);

    if (step.config.tie_embeddings && S > 1) {
        RankGroup ends = {2, apart * (S - 1)};
        double begin = std::max(stages.front().end(), stages.back().end());
        for (SimulatedStage* stage : {&stages.front(), &stages.back()}) stage->sum_table(begin, ends);
    }
    SimulatedStep result;
    for (const SimulatedStage& stage : stages) {
        // No stage sends more at once than its network takes.
        result.seconds = std::max({result.seconds, stage.end(), stage.network});
        result.busy.push_back(stage.busy);
        result.sent.push_back(stage.sent);
        result.optimizer = std::max(result.optimizer, stage.optimizer);
    }
    constexpr double statistics_bytes = 20;
    if (taken.data) result.seconds += sum_seconds(machine, group_along(all_axes, mesh), statistics_bytes);
    return result;
}
