/*
The actions of each pipeline stage, as lists that can be read, tested and timed without running anything.
Below the lists: how long they take, and how many micro-batches a stage has to hold.

The model's layers are cut into stages * chunks parts; part c * stages + s is chunk c of stage s. A
micro-batch goes forward through the parts in order, and backward through them in reverse. With 4 stages and 4
micro-batches (0 .. 3 forward, a .. d backward, which takes twice as long; time goes to the right):

    gpipe  0123.........aabbccdd      1f1b  0123......aa.bb.cc.dd      zero-bubble  0123...awbwcwdw
           .0123......aabbccdd..            .012....aa3bb.cc.dd..                   .012..a3bwcwdww
           ..0123...aabbccdd....            ..01..aa2bb3cc.dd....                   ..01.a2b3cwdwww
           ...0123aabbccdd......            ...0aa1bb2cc3dd......                   ...0a1b2c3dwwww

    gpipe         all forward, then all backward: a stage keeps the activations of every micro-batch.
    1f1b          backward as soon as possible: stage s keeps those of at most stages - s micro-batches.
    interleaved   1f1b with several chunks on each stage: a micro-batch returns to a stage sooner, so the
                  stages begin and end closer together.
    zero-bubble   1f1b with the backward pass in two halves: first the gradient of the input, for which the
                  previous stage waits, and later that of the weights (w), for which no stage waits.

GPipe: Huang et al. (2019). 1F1B: Narayanan et al., PipeDream-Flush (2021). Interleaved: Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters" (2021). Zero-bubble: ZB-H1 of Qi et al., "Zero
Bubble Pipeline Parallelism" (2023).
*/
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "data/base/error.h"
#include "data/options/options.h"  // PipelineSchedule
#include "kernels/common.cuh"      // floatX

enum class PipelineWork {
    forward,
    backward,        // both gradients at once
    input_gradient,  // the first half of a backward pass
    weight_gradient  // the second
};

struct PipelineAction {
    PipelineWork work;
    int micro_batch, chunk;
    bool operator==(const PipelineAction&) const = default;
};

struct PipelineShape {
    PipelineSchedule schedule;
    int stages, micro_batches, chunks = 1;  // chunks of each stage
};

inline void check_pipeline(const PipelineShape& shape) {
    auto [schedule, stages, micro_batches, chunks] = shape;
    if (stages < 1 || micro_batches < 1 || chunks < 1)
        fail("pipeline: %d stages, %d micro-batches, %d chunks: each must be at least 1; correct them",
             stages, micro_batches, chunks);
    bool interleaved = schedule == PipelineSchedule::interleaved;
    if (chunks > 1 && !interleaved)
        fail("pipeline: %d chunks on a stage need the interleaved schedule; choose it, or 1 chunk", chunks);
}

// ----------------------------------------------------------------------------
// the lists

// Returns the k-th of a stage's micro_batches * chunks pieces of forward work, the same for all stages. With
// several chunks, a group of `stages` micro-batches goes through the first chunk, then through the next.
inline PipelineAction forward_action(const PipelineShape& shape, int k) {
    int round = shape.stages * shape.chunks, in_round = k % round;
    return {PipelineWork::forward, k / round * shape.stages + in_round % shape.stages,
            in_round / shape.stages};
}

// Backward work comes in the same order, with the chunks reversed.
inline PipelineAction backward_action(const PipelineShape& shape, int k,
                                      PipelineWork work = PipelineWork::backward) {
    PipelineAction forward = forward_action(shape, k);
    return {work, forward.micro_batch, shape.chunks - 1 - forward.chunk};
}

// Returns how many forward passes a stage runs before it alternates: enough for a gradient to return.
inline int warm_up(const PipelineShape& shape, int stage) {
    int behind = shape.stages - 1 - stage, all = shape.micro_batches * shape.chunks;
    switch (shape.schedule) {
    case PipelineSchedule::gpipe:
        return all;
    case PipelineSchedule::interleaved:
        return shape.chunks == 1 ? std::min(behind, all)
                                 : std::min(2 * behind + (shape.chunks - 1) * shape.stages, all);
    case PipelineSchedule::one_f_one_b:
    case PipelineSchedule::zero_bubble:
        return std::min(behind, all);
    }
    __builtin_unreachable();
}

// Lists are made for whole groups, and the micro-batches that the last group lacks are removed afterwards. So
// the order is the same with fewer micro-batches, and no stage deadlocks or keeps more.
inline PipelineShape in_whole_groups(PipelineShape shape) {
    int groups = (shape.micro_batches + shape.stages - 1) / shape.stages;
    if (shape.chunks > 1) shape.micro_batches = groups * shape.stages;
    return shape;
}

inline std::vector<PipelineAction> first_micro_batches(std::vector<PipelineAction> actions, int count) {
    std::erase_if(actions, [&](const PipelineAction& action) { return action.micro_batch >= count; });
    return actions;
}

// Everything that stage `stage` does in a step, in order.
inline std::vector<PipelineAction> pipeline_actions(const PipelineShape& asked, int stage) {
    check_pipeline(asked);
    PipelineShape shape = in_whole_groups(asked);
    bool splits = shape.schedule == PipelineSchedule::zero_bubble;
    int all = shape.micro_batches * shape.chunks, ahead = warm_up(shape, stage);
    int forwards = 0, backwards = 0, weights = 0;
    std::vector<PipelineAction> actions;
    auto weight = [&] {
        actions.push_back(backward_action(shape, weights++, PipelineWork::weight_gradient));
    };
    while (forwards < ahead) actions.push_back(forward_action(shape, forwards++));
    while (backwards < all) {
        bool steady = forwards < all;
        if (steady) actions.push_back(forward_action(shape, forwards++));
        PipelineWork work = splits ? PipelineWork::input_gradient : PipelineWork::backward;
        actions.push_back(backward_action(shape, backwards++, work));
        // Later stages are ahead by fewer forwards, and may instead keep that many more activations for w:
        // even so, no stage keeps more than the first. When no forward passes are left, w fills the time
        // between gradients.
        if (splits && backwards - weights > (steady ? stage : 0)) weight();
    }
    while (splits && weights < all) weight();
    return first_micro_batches(std::move(actions), asked.micro_batches);
}

// Returns the list of a pass that only computes losses, the same for all stages; nothing is kept.
inline std::vector<PipelineAction> forward_actions(const PipelineShape& asked) {
    check_pipeline(asked);
    PipelineShape shape = in_whole_groups(asked);
    std::vector<PipelineAction> actions;
    for (int k = 0; k < shape.micro_batches * shape.chunks; k++) actions.push_back(forward_action(shape, k));
    return first_micro_batches(std::move(actions), asked.micro_batches);
}

// ----------------------------------------------------------------------------
// timing

struct PipelineCosts {
    double forward = 1, input_gradient = 1, weight_gradient = 1;  // costs of one chunk
    double transfer = 0;  // to the next stage; a stage's messages leave one after another
    bool overlap = true;  // otherwise a stage is idle while it sends

    double of(PipelineWork work) const {
        switch (work) {
        case PipelineWork::forward:
            return forward;
        case PipelineWork::backward:
            return input_gradient + weight_gradient;
        case PipelineWork::input_gradient:
            return input_gradient;
        case PipelineWork::weight_gradient:
            return weight_gradient;
        }
        __builtin_unreachable();
    }
};

struct TimedAction {
    PipelineAction action;
    double begin, end;
};

struct PipelineTiming {
    double seconds = 0;          // the step's length, in the unit of the costs
    std::vector<double> busy;    // (stages)
    std::vector<int> most_kept;  // (stages) the most micro-batches held at once, counted in each chunk
    std::vector<std::vector<TimedAction>> actions = {};  // (stages, actions)
    // The time that the stages wait, as a share of the time that they compute.
    double bubble() const {
        double idle = 0, work = 0;
        for (double stage : busy) idle += seconds - stage, work += stage;
        return idle / work;
    }
};

// Times the lists: an action begins once the stage's previous one has ended and its input has arrived. Throws
// Error on a deadlock.
inline PipelineTiming time_pipeline(const PipelineShape& shape, const PipelineCosts& costs) {
    int S = shape.stages, M = shape.micro_batches, parts = S * shape.chunks;
    std::vector<std::vector<PipelineAction>> lists;
    for (int stage = 0; stage < S; stage++) lists.push_back(pipeline_actions(shape, stage));
    constexpr double never = -1;
    std::vector<double> input_at((size_t)parts * M, never), gradient_at((size_t)parts * M, never);
    std::fill_n(input_at.begin(), M, 0);  // the first part has its input
    std::vector<size_t> next(S, 0);
    std::vector<double> free_at(S, 0), link_free_at(S, 0);
    std::vector<int> kept(S, 0);
    PipelineTiming timing = {0, std::vector<double>(S, 0), std::vector<int>(S, 0)};
    timing.actions.resize(S);
    for (bool any = true; any;) {
        any = false;
        for (int stage = 0; stage < S; stage++) {
            while (next[stage] < lists[stage].size()) {
                const PipelineAction& action = lists[stage][next[stage]];
                PipelineWork work = action.work;
                int part = action.chunk * S + stage;
                auto at = [&](int of_part) { return (size_t)of_part * M + action.micro_batch; };
                double input = work == PipelineWork::forward           ? input_at[at(part)]
                               : work == PipelineWork::weight_gradient ? 0
                                                                       : gradient_at[at(part)];
                if (input == never) break;
                double begin = std::max(free_at[stage], input), end = begin + costs.of(work);
                timing.actions[stage].push_back({action, begin, end});
                auto sent = [&] {
                    if (S == 1) return end;
                    double& free = link_free_at[stage];
                    free = std::max(free, end) + costs.transfer;
                    if (!costs.overlap) end = free;
                    return free;
                };
                if (work == PipelineWork::forward) {
                    timing.most_kept[stage] = std::max(timing.most_kept[stage], ++kept[stage]);
                    if (part == parts - 1)
                        gradient_at[at(part)] = end;
                    else
                        input_at[at(part + 1)] = sent();
                } else {
                    if (work != PipelineWork::weight_gradient && part > 0) gradient_at[at(part - 1)] = sent();
                    if (work != PipelineWork::input_gradient) kept[stage]--;
                }
                free_at[stage] = end;
                timing.busy[stage] += costs.of(action.work);
                timing.seconds = std::max(timing.seconds, end);
                next[stage]++;
                any = true;
            }
        }
    }
    for (int stage = 0; stage < S; stage++) {
        if (next[stage] < lists[stage].size())
            fail("pipeline: stage %d waits forever at action %zu of its list", stage, next[stage]);
    }
    return timing;
}

// ----------------------------------------------------------------------------
// capacity: how much a stage has to hold at the same time, found by walking through its list of work

struct PipelineCapacity {
    std::vector<int> kept;      // (chunks) micro-batches from forward to the end of backward, at least 1
    std::vector<int> pending;   // (chunks) micro-batches from input_gradient to weight_gradient
    int micro_batches = 1;      // in work at the same time, over all chunks
    bool has_backward = false;  // otherwise nothing is kept after a forward

    // Returns whether there is room for what a list needs.
    bool holds(const PipelineCapacity& need) const {
        auto fits = [](const std::vector<int>& have, const std::vector<int>& wanted) {
            return std::equal(have.begin(), have.end(), wanted.begin(), wanted.end(), std::greater_equal<>());
        };
        return fits(kept, need.kept) && fits(pending, need.pending) && micro_batches >= need.micro_batches &&
               has_backward >= need.has_backward;
    }
};

// Returns the widest span of the numbers of micro-batches in work at the same time, each from its first
// action that counts to its last. So their numbers modulo this span are distinct slots.
template <typename Counts>
int most_in_work(const std::vector<PipelineAction>& list, Counts&& counts) {
    std::map<int, const PipelineAction*> last;
    for (const PipelineAction& action : list) {
        if (counts(action)) last[action.micro_batch] = &action;
    }
    std::set<int> in_work;
    int most = 0;
    for (const PipelineAction& action : list) {
        if (!counts(action)) continue;
        in_work.insert(action.micro_batch);
        most = std::max(most, *in_work.rbegin() - *in_work.begin() + 1);
        if (last[action.micro_batch] == &action) in_work.erase(action.micro_batch);
    }
    return most;
}

inline PipelineCapacity pipeline_capacity(const std::vector<PipelineAction>& list, int chunks) {
    using enum PipelineWork;
    PipelineCapacity capacity;
    for (int chunk = 0; chunk < chunks; chunk++) {
        auto of_chunk = [&](const PipelineAction& action) { return action.chunk == chunk; };
        auto halves = [&](const PipelineAction& action) {
            return of_chunk(action) && (action.work == input_gradient || action.work == weight_gradient);
        };
        capacity.kept.push_back(std::max(1, most_in_work(list, of_chunk)));
        capacity.pending.push_back(most_in_work(list, halves));
    }
    capacity.micro_batches = std::max(1, most_in_work(list, [](const PipelineAction&) { return true; }));
    capacity.has_backward = std::any_of(list.begin(), list.end(),
                                        [](const PipelineAction& action) { return action.work != forward; });
    return capacity;
}

// ----------------------------------------------------------------------------
// slots of what layers keep

// The slots in which the layers of a pipeline stage keep what they need of a micro-batch, from its forward
// pass to the end of its backward pass. The chunks of a stage share the slots: one reuses what another has
// released. So there are no more slots than are in use at the same time, the fewest that the schedule allows.
// A slot is for one layer, because chunks may have different numbers of layers.
//
// The last of 2 stages with 2 one-layer chunks (interleaved; 0 .. 3 forward, a .. d backward, ' for chunk 1):
//
//     work      0  1  0' a' 1' b' 2  a  3  b  2' c' 3' d' c  d
//     slot 0    0  0  0  0  0  0  0  0  3  3  3  3  3  3  3  3
//     slot 1       1  1  1  1  1  1  1  1  1  2' 2' 3' 3'
//     slot 2          0' 0' 1' 1' 2  2  2  2  2  2  2  2  2
class ActivationSlots {
public:
    // layers: the number of layers of each chunk.
    explicit ActivationSlots(std::vector<int> layers) : layers_(std::move(layers)) {}

    // has_backward: if false, nothing is kept, and each layer has its own slot.
    void begin_run(bool has_backward) {
        has_backward_ = has_backward;
        kept_.clear();
        free_.clear();
        slot_count_ = 0;
    }

    // Returns the slots of the chunk's layers for an action. Actions come in the order of the list.
    std::vector<int> enter(const PipelineAction& action) {
        auto [work, micro_batch, chunk] = action;
        if (!has_backward_) return of_their_own(chunk);
        auto& kept = kept_[{chunk, micro_batch}];
        if (work == PipelineWork::forward) kept = take(layers_[chunk]);
        std::vector<int> slots = kept;
        if (work == PipelineWork::backward || work == PipelineWork::weight_gradient) {
            free_.insert(kept.begin(), kept.end());
            kept_.erase({chunk, micro_batch});
        }
        return slots;
    }

    // Returns the number of slots that the actions of a list need.
    static size_t most(const std::vector<int>& layers, const std::vector<PipelineAction>& list,
                       bool has_backward) {
        ActivationSlots kept(layers);
        kept.begin_run(has_backward);
        int most = 0;
        for (const PipelineAction& action : list) {
            for (int slot : kept.enter(action)) most = std::max(most, slot + 1);
        }
        return (size_t)most;
    }

private:
    std::vector<int> of_their_own(int chunk) const {
        int first = 0;
        for (int before = 0; before < chunk; before++) first += layers_[before];
        std::vector<int> slots;
        for (int i = 0; i < layers_[chunk]; i++) slots.push_back(first + i);
        return slots;
    }

    // Takes the lowest free slots, so that there are never more slots than are in use at the same time.
    std::vector<int> take(int count) {
        std::vector<int> slots;
        for (int i = 0; i < count; i++)
            slots.push_back(free_.empty() ? slot_count_++ : free_.extract(free_.begin()).value());
        return slots;
    }

    std::vector<int> layers_;
    bool has_backward_ = false;
    std::map<std::pair<int, int>, std::vector<int>> kept_;  // by chunk and micro-batch
    std::set<int> free_;  // those of the first `slot_count_` slots that are not in use
    int slot_count_ = 0;
};

// ----------------------------------------------------------------------------
// a piece of work

// A piece of work, and its memory. `count` is the run's.
struct PipelineTask {
    PipelineWork work;
    int micro_batch, chunk, part;  // part = chunk * stages + stage
    int slot;          // place of the activations kept from forward to backward: below kept[chunk]
    int pending_slot;  // place of the tensors kept from input_gradient to weight_gradient
    int batch_slot;    // place of the batch, kept while any chunk works on it
    floatX* input;     // (count) the previous part's output; the first part may write its own input there
    floatX* output;    // forward: (count) to be written, for the next part; null on the last part
    floatX* gradient;  // backward, input_gradient: (count) of the output, undefined on the last part; the
                       // work turns it into that of the input
};
