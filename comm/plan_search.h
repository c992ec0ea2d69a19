/*
Searches the layouts of a training run on many devices for the fastest. A layout is a way to cut the model and
the batch: tensor, context and data ranks, pipeline stages, micro-batch, schedule, ZeRO, recomputation.

Each layout that divides the model and the batch evenly has a lower bound: a step takes at least a stage's
work on all micro-batches, plus the work of the previous stages before its first micro-batch and after its
last; and at least as long as data ranks take to sum their gradients. Layouts are taken in the order of their
bounds: first completed with what fits into memory, which raises the bound, then simulated
(comm/plan_player.h), until a bound exceeds the best results so far: the remaining layouts cannot be faster.
Some are not tried, because another is never slower:

    gpipe              1f1b waits as long, and keeps fewer micro-batches
    zero 0             zero 1 sends as much, and updates only a part of the parameters
    more recomputing   the least that fits is fastest; a higher level of ZeRO helps only if it allows less
    more chunks        if the largest chunk does not get smaller, they only send more
    a shard group      if a larger one sends and updates in less time, since it also keeps less per rank
    tensor groups      that cross nodes, if a layout with groups within nodes fits
    context ranks      other than powers of two, or with few tokens of a sequence
*/
#pragma once

#include <algorithm>
#include <array>
#include <climits>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/gradient_sums.h"      // GradientSums
#include "comm/layout.h"             // Layout, mesh_shape, pipeline_split
#include "comm/memory_plan.h"        // stage_memory, stream_size
#include "comm/mesh.h"               // Mesh
#include "comm/plan_task.h"          // PlanTask
#include "comm/settings.h"           // training_workload, zero_settings, held_multiprocessors
#include "comm/plan_player.h"        // StepPlayer
#include "comm/plan_times.h"         // MicroBatchTime, record_steps
#include "data/base/error.h"         // fail
#include "data/options/cut_rules.h"  // cut_refusal

inline std::vector<long long> divisors(long long number) {
    std::vector<long long> low, high;
    for (long long i = 1; i * i <= number; i++) {
        if (number % i) continue;
        low.push_back(i);
        if (i != number / i) high.push_back(number / i);
    }
    low.insert(low.end(), high.rbegin(), high.rend());
    return low;
}

class Planner {
public:
    // The task must outlive this.
    explicit Planner(const PlanTask& task)
        : task_(task),
          machine_(in_world(task.machine, task.devices)),
          element_bytes_((size_t)task.machine.element_bytes),
          sequences_(task.options.global_batch / task.options.sequence_length) {}

    // Bytes that a rank may use: the memory of a card, less what library_memory() reserves there.
    size_t available() const {
        constexpr size_t of_products = (size_t)(32 + 256) << 20;
        size_t kept = library_code_memory + (element_bytes_ == 2 ? of_products : 0);
        auto memory = (size_t)machine_.memory;
        return memory - std::min(memory, kept);
    }
    // Bytes of host memory for each device.
    size_t host_room() const { return (size_t)machine_.host_memory; }
    // Micro-batches of the data ranks with the most; in layouts that are searched, all have the same number.
    long long micro_batches(const Cut& cut) const {
        return ceil_div(sequences_ / cut.micro_batch, (long long)cut.dp);
    }

    // Returns the fastest number of pieces in which tensor ranks send rows. More pieces hide more of the
    // sending, but make products slower.
    int fastest_row_chunks(Cut cut) {
        const Options& o = task_.options;
        if (cut.tp == 1) return 1;
        if (o.tp_overlap > 0) return o.tp_overlap;
        auto [known, is_new] = row_chunks_.try_emplace({cut.tp, cut.cp, cut.micro_batch, cut.pp > 1}, 1);
        double least = HUGE_VAL;
        for (int chunks = 1; is_new && chunks <= 4; chunks++) {
            if (rows_of_rank(cut) % chunks) continue;
            cut.tp_overlap = chunks;
            double seconds = 0;
            for (const LayerTime& one : times(cut).layers) seconds += one.forward + one.backward;
            if (seconds < least) least = seconds, known->second = chunks;
        }
        return known->second;
    }

    // Returns whether the sizes of the model and the batch allow this cut.
    bool is_possible(const Cut& cut) const {
        const Options& o = task_.options;
        bool interleaved = cut.pp_schedule == PipelineSchedule::interleaved;
        long long tokens = (long long)cut.micro_batch * o.sequence_length;
        return tokens <= INT_MAX && rows_of_rank(cut) % cut.tp_overlap == 0 &&
               sequences_ % ((long long)cut.dp * cut.micro_batch) == 0 && cut.dp % cut.shard_group == 0 &&
               can_simulate(cut) && (interleaved || cut.pp_chunks == 1) &&
               (long long)cut.pp * cut.pp_chunks <= o.layers &&
               (kind_of<PipelineLayers>(o.pp_layers) != PipelineLayers::list ||
                comma_separated(o.pp_layers).size() == (size_t)cut.pp * cut.pp_chunks) &&
               (o.matmul_dtype != MatmulDtype::fp8 || fp8_refusal(options_of(cut)).empty());
    }

    // Returns whether the step's micro-batches are few enough, if all of them have to be simulated.
    bool can_simulate(const Cut& cut) const { return !keeps_all(cut) || micro_batches(cut) <= most_of_gpipe; }

    // Returns up to `count` layouts, the fastest first, one per division of the ranks; empty if none fits.
    std::vector<PlannedStep> best(int count) {
        std::vector<PlannedStep> found = best_of(count, false);
        return found.empty() ? best_of(count, true) : found;
    }

    // The layout that needs the least memory; its seconds are not computed.
    PlannedStep smallest() {
        PlannedStep least;
        for (bool across : {false, true}) {
            each_division(across, [&](const Cut& division) {
                for (long long dp : data_ranks(division, 1)) {
                    Cut cut = division;
                    cut.dp = (int)dp;
                    if (cut.dp * cut.cp > 1) cut.zero = most_zero(), cut.shard_group = cut.dp;
                    cut.recompute = Recompute::block;
                    keep_options(cut);
                    if (!is_possible(cut)) continue;
                    auto memory = this->memory(cut, SIZE_MAX);
                    if (least.memory.empty() || total(memory) < total(least.memory)) least = {cut, 0, memory};
                }
            });
        }
        return least;
    }

    bool fits(const Cut& cut) { return !memory(cut, available()).empty(); }

    // A lower bound for the seconds of a step.
    double bound(const Cut& cut) {
        // times of passes during messages of data ranks, and without these
        const MicroBatchTime &beside = times(cut, cut.dp * cut.cp > 1), &alone = times(cut);
        const bool is_sharded = shards_of(cut) > 1;
        bool cut_params = cut.zero == 3 && is_sharded, cut_grads = cut.zero >= 2 && is_sharded;
        const double all = (double)micro_batches(cut);
        const std::vector<int>& split = this->split(cut);
        bool drains = cut.pp_schedule != PipelineSchedule::zero_bubble;  // zero-bubble defers the last work
        struct OfStage {
            double work = 0;    // on one micro-batch
            double more = 0;    // additionally, on the first and the last
            double before = 0;  // on the previous stages, before its first and after its last work
        };
        std::vector<OfStage> stages((size_t)cut.pp);
        double before = 0;
        for (int part = 0, layer = 0; part < (int)split.size(); part++) {
            auto time = [&](const MicroBatchTime& t) {
                LayerTime time = t.chunk(layer, layer + split[part]);
                if (part == 0) time += t.embedding;
                if (part == (int)split.size() - 1) time += t.head;
                return time;
            };
            LayerTime slow = time(beside), fast = time(alone);
            layer += split[part];
            auto seconds = [&](const PassOfStep& pass) {
                DataMessages data = messages_beside(pass, cut_params, cut_grads);
                const LayerTime& time = (data.parameters && is_sharded) || data.gradients ? slow : fast;
                return pass.forward ? time.forward : time.backward;
            };
            double forward = seconds({.forward = true}), backward = seconds({.forward = false}),
                   first = seconds({.forward = true, .first = true}),
                   last = seconds({.forward = false, .last = true});
            stages[part % cut.pp].work += forward + backward;
            stages[part % cut.pp].more += first - forward + last - backward;
            if (part >= cut.pp) continue;
            stages[part].before = before;
            before += forward + (drains ? backward : 0);
        }
        double longest = 0;
        for (auto [work, more, before] : stages) longest = std::max(longest, before + all * work + more);
        // A stage sums the gradients of its blocks one after another.
        double sums = cut.zero > 0 ? ceil_div(task_.options.layers, cut.pp) * sums_of_block(cut) : 0;
        return std::max(longest + largest_transform(), sums);
    }

    // Returns one layout with its time and memory, whether it fits or not.
    PlannedStep planned(const Cut& cut) { return {cut, simulated(cut, {}).seconds, memory(cut, SIZE_MAX)}; }

    // Seconds of a step whose gradients are sent in this type.
    double seconds_with_gradients_in(Dtype dtype, Cut cut) const {
        PlanTask task = task_;
        task.options.reduce_dtype = cut.reduce_dtype = dtype;
        return Planner(task).simulated(cut, {}).seconds;
    }

    // Simulates enough micro-batches, and extrapolates: each further one takes as long as the one before.
    SimulatedStep simulated(const Cut& cut, const MessagesTaken& taken) {
        int enough = enough_micro_batches(cut);
        long long more = micro_batches(cut) - enough;
        std::vector<int> counts = {enough};
        if (more > 0) counts.push_back(enough - cut.pp);
        // If the host has the optimizer or tables, a step overlaps the end of the previous one: simulate
        // both.
        bool offload = steps_on_host(task_.options);
        if (offload) counts.insert(counts.begin(), counts.back());
        std::vector<SimulatedStep> steps = simulated(cut, taken, counts);
        if (offload) steps.erase(steps.begin());
        SimulatedStep& step = steps[0];
        if (more == 0) return step;
        double times = (double)more / cut.pp;
        auto go_on = [&](double& value, double before) { value += times * (value - before); };
        go_on(step.seconds, steps[1].seconds);
        for (int stage = 0; stage < cut.pp; stage++) {
            BytesSent &sent = step.sent[stage], &before = steps[1].sent[stage];
            go_on(step.busy[stage], steps[1].busy[stage]);
            go_on(sent.pipeline, before.pipeline);
            go_on(sent.parameters, before.parameters);
            go_on(sent.gradients, before.gradients);
            go_on(sent.updates, before.updates);
        }
        return step;
    }

    // Simulates steps of these numbers of micro-batches.
    std::vector<SimulatedStep> simulated(const Cut& cut, const MessagesTaken& taken,
                                         const std::vector<int>& micro_batches) {
        auto key = std::pair(cut, micro_batches);
        if (!player_ || player_key_ != key) player_ = recorded(cut, micro_batches), player_key_ = key;
        return player_->play(taken);
    }

    // Bytes of host memory, for a device with its own memory; otherwise 0.
    size_t pinned(const std::vector<MemoryClass>& classes) const {
        return element_bytes_ == 2 ? pinned_total(classes) : 0;
    }
    // Bytes on the device.
    size_t total(const std::vector<MemoryClass>& classes) const {
        return memory_total(classes, element_bytes_ == 2);
    }

    // Bytes that a rank sends in a step, on the stage that sends most.
    BytesSent sent(const Cut& cut) {
        SimulatedStep step = simulated(cut, {});
        return *std::ranges::max_element(step.sent, {}, &BytesSent::all);
    }

    StepBreakdown parts(const Cut& cut) {
        StepBreakdown parts;
        double all = simulated(cut, {}).seconds;
        SimulatedStep none = simulated(cut, {false, false, false});
        parts.tensor = all - simulated(cut, {false, true, true}).seconds;
        parts.pipeline = all - simulated(cut, {true, false, true}).seconds;
        parts.data = all - simulated(cut, {true, true, false}).seconds;
        parts.together = all - none.seconds - parts.tensor - parts.pipeline - parts.data;
        double busy = *std::max_element(none.busy.begin(), none.busy.end());
        parts.optimizer = none.optimizer;
        parts.bubble = std::max(0.0, none.seconds - busy - none.optimizer);
        const StepTime& kinds = times(cut).kinds;
        parts.products = busy * kinds.products / kinds.all();
        parts.attention = busy * kinds.attention / kinds.all();
        parts.other_kernels = busy * kinds.streams / kinds.all();
        return parts;
    }
    // FLOPs of a step on all ranks, including recomputation.
    double executed_flops(const Cut& cut) {
        return times(cut).flops * (double)(sequences_ / cut.micro_batch) * cut.tp * cut.cp;
    }

    std::vector<PlannedMessage> messages(const Cut& cut) {
        simulated(cut, {});
        return player_->messages();
    }

    Options options_of(const Cut& cut) const {
        Options o = task_.options;
        static_cast<Cut&>(o) = cut;
        return o;
    }
    const std::vector<int>& split(const Cut& cut) {
        std::vector<int>& split = splits_[splits_memory() ? cut : Cut{.pp = cut.pp * cut.pp_chunks}];
        if (split.empty()) split = training_layout(options_of(cut), workload(cut)).split;
        return split;
    }
    // The layout of the parameters of a tensor rank that has all layers.
    const ParameterLayout& parameters(const Cut& cut) {
        auto [known, is_new] = parameters_.try_emplace({cut.tp, shards_of(cut)}, nullptr);
        if (is_new)
            known->second = std::make_unique<ParameterLayout>(
                parameter_layout(task_.options, shards_of(cut), {.tp = cut.tp}));
        return *known->second;
    }

    // Returns how a cut divides the model and a step of `micro_batches`.
    Layout layout(const Cut& cut, int micro_batches) {
        Options o = options_of(cut);
        return {
            mesh_shape(o), o.tp_overlap, {cut.pp_schedule, cut.pp, micro_batches, cut.pp_chunks}, split(cut)};
    }

private:
    // Layouts to consider, by their bounds. Complete ones have their memory, the others nothing.
    using Open = std::map<std::pair<double, Cut>, std::vector<MemoryClass>>;
    using Division = std::tuple<int, int, int, int>;  // tp, cp, pp, dp

    bool splits_memory() const {
        return kind_of<PipelineLayers>(task_.options.pp_layers) == PipelineLayers::memory;
    }
    // If there are fewer devices than a node has, all are in one node.
    static Machine in_world(Machine machine, int devices) {
        machine.node = std::min(machine.node, devices);
        return machine;
    }

    // Seconds to transform the largest matrix of a block, which some rank of each stage has to do.
    double largest_transform() {
        if (largest_transform_) return *largest_transform_;
        const Optimizer optimizer = make_optimizer(task_.options, 0);
        const TransformScratch scratch_of = zero_settings(task_.options, element_bytes_).transform_scratch;
        double most = 0;
        for (const TensorRow& row : tensor_table(task_.options)) {
            if (!optimizer.transform || !row.is_block_matrix()) continue;
            for (const Section& section : row.all_sections()) {
                auto [less, more] = std::minmax(section.rows, row.cols);
                Ledger book(machine_.ledger_card());
                Arena memory;
                memory.of("whole matrices");
                optimizer.transform(memory.take_elements(less * more), (int)less, (int)more,
                                    memory.take_elements(scratch_of(less, more, element_bytes_)), nullptr);
                most = std::max(most, seconds_of(machine_, book));
            }
        }
        largest_transform_ = most;
        return most;
    }

    // ---- all layouts

    static constexpr long long most_of_gpipe = 1 << 12;
    static bool keeps_all(const Cut& cut) { return cut.pp_schedule == PipelineSchedule::gpipe && cut.pp > 1; }
    // fp8 copies of weights are identified by address, and level 3 moves weights.
    int most_zero() const { return task_.options.matmul_dtype == MatmulDtype::fp8 ? 2 : 3; }

    void keep_options(Cut& cut) const {
        const Options& o = task_.options;
        if (task_.keeps_micro_batch) cut.micro_batch = o.micro_batch;
        if (task_.keeps_schedule && cut.pp > 1) cut.pp_schedule = o.pp_schedule;
        if (task_.keeps_chunks && cut.pp > 1) cut.pp_chunks = o.pp_chunks;
        if (cut.pp_chunks > 1 && !task_.keeps_schedule) cut.pp_schedule = PipelineSchedule::interleaved;
        if (task_.keeps_zero) cut.zero = o.zero;
        if (task_.keeps_shard) cut.shard_group = o.shard_group;
        if (cut.zero == 0) cut.shard_group = 1;
        if (task_.keeps_recompute) cut.recompute = o.recompute;
    }
    // Parts into which ZeRO cuts a unit, and rows of a micro-batch on a tensor rank.
    static int shards_of(const Cut& cut) { return cut.shard_group * cut.cp; }
    int rows_of_rank(const Cut& cut) const {
        return (int)((long long)cut.micro_batch * task_.options.sequence_length / cut.cp / cut.tp);
    }
    // Numbers of context ranks to try. Parts of fewer than least_tokens tokens make no layout faster.
    std::vector<int> context_numbers() const {
        constexpr int least_tokens = 8192;
        const Options& o = task_.options;
        if (task_.keeps_cp) return {o.cp};
        std::vector<int> numbers = {1};
        for (int cp = 2; cp <= task_.devices && o.sequence_length / cp >= least_tokens; cp *= 2)
            numbers.push_back(cp);
        return numbers;
    }
    // Calls visit(cut) for each tp, cp and pp that the model and the devices allow.
    template <typename Visit>
    void each_division(bool across_nodes, Visit&& visit) const {
        const Options& o = task_.options;
        int most = std::min(task_.devices, o.heads);
        for (int tp = 1; tp <= most; tp++) {
            bool crosses = tp > machine_.node;
            bool fills = crosses ? tp % machine_.node == 0 : machine_.node % tp == 0;
            bool wanted = task_.keeps_tp ? tp == o.tp && !across_nodes : fills && crosses == across_nodes;
            if (!wanted) continue;
            for (int cp : context_numbers()) {
                for (int pp = 1; pp <= std::min(task_.devices / tp / cp, o.layers); pp++) {
                    if (task_.keeps_pp && pp != o.pp) continue;
                    if (!cut_refusal(o, tp, cp, pp).empty() || !is_soon_split(pp)) continue;
                    Cut cut = on_one_rank(o);
                    cut.tp = tp, cut.cp = cp, cut.pp = pp;
                    visit(cut);
                }
            }
        }
    }
    // Returns whether the best split into `parts` is found quickly: its time is proportional to the product.
    bool is_soon_split(int parts) const {
        return parts == 1 || (double)parts * task_.options.layers * task_.options.layers < 5e7;
    }

    // Numbers of data ranks that can share a step's sequences evenly, in micro-batches of this size.
    std::vector<long long> data_ranks(const Cut& cut, int micro_batch) const {
        std::vector<long long> ranks;
        if (sequences_ % micro_batch) return ranks;
        for (long long dp : divisors(sequences_ / micro_batch))
            if (dp <= task_.devices / cut.ranks_of_data()) ranks.push_back(dp);
        return ranks;
    }

    // Numbers of chunks for which the largest chunk is smaller than with one chunk fewer.
    std::vector<int> chunk_numbers(int pp) const {
        if (task_.keeps_chunks) return {task_.options.pp_chunks};
        std::vector<int> numbers;
        int before = ceil_div(task_.options.layers, pp);
        for (int chunks = 2; (long long)pp * chunks <= task_.options.layers; chunks++) {
            int largest = ceil_div(task_.options.layers, pp * chunks);
            if (largest < before && is_soon_split(pp * chunks)) numbers.push_back(chunks);
            before = largest;
        }
        return numbers;
    }

    Open points(bool across_nodes) {
        constexpr long long most_tokens = 1 << 20;  // in a micro-batch: more make no product faster
        Open points;
        std::vector<int> sizes;
        for (long long size : divisors(sequences_))
            if (size == 1 || size * task_.options.sequence_length <= most_tokens) sizes.push_back((int)size);
        if (task_.keeps_micro_batch) sizes = {task_.options.micro_batch};
        for (int size : sizes) {
            each_division(across_nodes, [&](const Cut& division) {
                const int pp = division.pp;
                const std::vector<long long> all = data_ranks(division, size);
                std::vector<Cut> schedules = {division};
                schedules[0].micro_batch = size;
                schedules[0].tp_overlap = fastest_row_chunks(schedules[0]);
                if (pp > 1) {
                    schedules.push_back(schedules[0]);
                    schedules.back().pp_schedule = PipelineSchedule::zero_bubble;
                    for (int chunks : chunk_numbers(pp)) {
                        schedules.push_back(schedules[0]);
                        schedules.back().pp_schedule = PipelineSchedule::interleaved;
                        schedules.back().pp_chunks = chunks;
                    }
                    bool only_gpipe =
                        task_.keeps_schedule && task_.options.pp_schedule == PipelineSchedule::gpipe;
                    if (only_gpipe) schedules[0].pp_schedule = PipelineSchedule::gpipe;
                }
                for (Cut cut : schedules) {
                    bool is_other =
                        (task_.keeps_schedule && pp > 1 && cut.pp_schedule != task_.options.pp_schedule) ||
                        (task_.keeps_chunks && cut.pp_chunks != task_.options.pp_chunks);
                    if (is_other) continue;
                    for (long long dp : all) {
                        cut.dp = (int)dp;
                        // what completes a cut may change its split, and so lower the bound
                        if (is_possible(cut)) points[{splits_memory() ? 0 : bound(cut), cut}];
                    }
                }
            });
        }
        return points;
    }

    // ---- the search

    std::vector<PlannedStep> best_of(int count, bool across_nodes) {
        std::map<Division, PlannedStep> best;
        double worst = HUGE_VAL;  // slower layouts are of no interest
        Open open = points(across_nodes);
        while (!open.empty() && open.begin()->first.first < worst) {
            auto [bound, cut] = open.begin()->first;
            std::vector<MemoryClass> memory = std::move(open.begin()->second);
            open.erase(open.begin());
            Division division = {cut.tp, cut.cp, cut.pp, cut.dp};
            auto known = best.find(division);
            double to_beat = known == best.end() ? worst : std::min(worst, known->second.seconds);
            if (bound >= to_beat) continue;
            if (memory.empty()) {
                complete(cut, to_beat, open);
                continue;
            }
            double step = simulated(cut, {}).seconds;
            if (step >= to_beat) continue;
            best[division] = {cut, step, std::move(memory)};
            std::vector<double> seconds;
            for (auto& [other, its] : best) seconds.push_back(its.seconds);
            std::sort(seconds.begin(), seconds.end());
            if ((int)seconds.size() >= count) worst = seconds[(size_t)count - 1];
        }
        std::vector<PlannedStep> steps;
        for (auto& [division, step] : best) steps.push_back(step);
        std::stable_sort(steps.begin(), steps.end(), [](auto& a, auto& b) { return a.seconds < b.seconds; });
        if ((int)steps.size() > count) steps.resize(count);
        return steps;
    }

    // Adds the cut with each ZeRO level, shard group and recomputation that fit and may take less than
    // `worst`.
    void complete(Cut cut, double worst, Open& open) {
        if (takes_too_much(cut)) return;
        std::vector<int> levels = {1, 2, 3};
        if (cut.dp * cut.cp == 1) levels = {0};
        if (task_.keeps_zero) levels = {task_.options.zero};
        std::map<int, Recompute> least;  // the least recomputation that fits, by shard group
        for (int level : levels) {
            if (level > most_zero()) break;
            cut.zero = level;
            for (int shard : shard_groups(cut)) {
                cut.shard_group = shard;
                Recompute first = Recompute::none, last = Recompute::block;
                if (task_.keeps_recompute) first = last = task_.options.recompute;
                for (Recompute kind = first; kind <= last; kind = Recompute((int)kind + 1)) {
                    cut.recompute = kind;
                    if (least.contains(shard) && kind >= least[shard]) break;
                    double bound = this->bound(cut);
                    if (bound >= worst) break;
                    auto memory = this->memory(cut, available());
                    if (memory.empty()) continue;
                    least[shard] = kind;
                    open.emplace(std::pair(bound, cut), std::move(memory));
                    break;
                }
            }
        }
    }

    // Returns whether the layout does not fit even with everything that saves memory. If so, larger
    // micro-batches do not fit either.
    bool takes_too_much(Cut cut) {
        int size = cut.micro_batch;
        cut.micro_batch = 0, cut.tp_overlap = 1;
        auto [least, is_new] = too_large_.try_emplace(cut, INT_MAX);
        if (size >= least->second) return true;
        cut.micro_batch = size;
        if (cut.dp * cut.cp > 1) cut.zero = most_zero(), cut.shard_group = cut.dp;
        cut.recompute = Recompute::block;
        keep_options(cut);
        if (!is_possible(cut)) return true;
        if (!memory(cut, available()).empty()) return false;
        least->second = size;
        return true;
    }

    std::vector<int> shard_groups(Cut cut) {
        bool alone = cut.zero == 0 || cut.dp == 1;
        int kept = task_.keeps_shard ? task_.options.shard_group : 0;
        if (alone) return kept > 1 ? std::vector<int>() : std::vector<int>{1};
        if (kept > 0) return {kept};  // it divides dp, else nothing is tried
        const ZeroSettings settings = zero_settings(task_.options, element_bytes_);
        double least = HUGE_VAL;
        // A step reads and writes everything that is kept of an element, and reads its gradient twice.
        double state = (double)element_bytes_ + 4.0 * (settings.slots.size() + settings.keep_master),
               step = (2 * state + 8) / machine_.memory_bandwidth;
        double gathered = cut.zero >= 3 ? 2 * (double)micro_batches(cut) : 1;  // times in a step
        std::vector<int> groups;
        std::vector<long long> sizes = divisors(cut.dp);
        for (auto shard = sizes.rbegin(); shard != sizes.rend() && *shard > 1; ++shard) {
            cut.shard_group = (int)*shard;
            const BlockMessages& messages = messages_of_block(cut);
            double seconds = step * (double)messages.part + gathered * messages.gather + sums_of_block(cut);
            if (seconds < least) least = seconds, groups.push_back(cut.shard_group);
        }
        return groups;
    }

    // Messages between data ranks for the parameters of the smallest block, of which a rank has a part of
    // this size.
    struct BlockMessages {
        size_t part = 0;
        double gather = 0, scatter = 0, reduce = 0;  // seconds
    };
    const BlockMessages& messages_of_block(const Cut& cut) {
        auto [known, is_new] = block_messages_.try_emplace({cut.tp, cut.cp, cut.pp, cut.dp, cut.shard_group});
        BlockMessages& messages = known->second;
        if (!is_new) return messages;
        Cut whole = cut;
        whole.shard_group = 1;
        const ParameterLayout& layout = parameters(whole);
        MeshShape shape = {.tp = cut.tp, .cp = cut.cp, .pp = cut.pp, .dp = cut.dp, .shard = cut.shard_group};
        size_t least = SIZE_MAX;
        for (int layer = 0; layer < task_.options.layers; layer++)
            least = std::min(least, layout.unit_size(layer + 1));
        Ledger book(machine_.ledger_card());
        const Mesh mesh(shape, {});
        Arena memory;
        const GradientSums sums(
            GradientSumArrays(memory, layout, shape, zero_settings(task_.options, element_bytes_)));
        auto seconds = [&](auto&& calls) {
            book.forget();
            calls();
            return seconds_of(machine_, book);
        };
        floatX* params = book.imagine<floatX*>(1, true);
        float* grads = book.imagine<float*>();
        const size_t part = messages.part = ceil_div(least, (size_t)shape.shards());
        messages.gather =
            seconds([&] { mesh.shard().all_gather(params, part, Traffic::parameters, nullptr); });
        messages.scatter = seconds([&] { sums.reduce_scatter(mesh.shard(), grads, part, nullptr); });
        messages.reduce = seconds([&] { sums.all_reduce(mesh.replica(), grads, part, nullptr); });
        return messages;
    }
    // Seconds of a step in which data ranks sum the gradients of one block: in every micro-batch if they are
    // cut.
    double sums_of_block(const Cut& cut) {
        const BlockMessages& messages = messages_of_block(cut);
        return (cut.zero >= 2 ? (double)micro_batches(cut) : 1) * messages.scatter + messages.reduce;
    }

    // the costs of a layout

    Workload workload(const Cut& cut) const {
        return training_workload(options_of(cut), cut.recompute, element_bytes_);
    }
    // Returns how many micro-batches to simulate, because more would show nothing new; all of them for gpipe,
    // which keeps them all.
    int enough_micro_batches(const Cut& cut) const {
        long long all = micro_batches(cut);
        if (!can_simulate(cut))
            fail("--pp-schedule gpipe: keeps all %lld micro-batches of a step, but at most %lld can be "
                 "simulated; give 1f1b",
                 all, most_of_gpipe);
        if (keeps_all(cut)) return (int)all;
        // The last group of an interleaved pipeline may be smaller, and stages wait longer for it.
        long long left = cut.pp_chunks > 1 ? all % cut.pp : 0;
        return (int)std::min(all, left + std::max(2 * cut.pp, ceil_div(32, cut.pp) * cut.pp));
    }

    // Returns the times of a micro-batch. beside_data: while data ranks send messages.
    const MicroBatchTime& times(const Cut& cut, bool beside_data = false) {
        Options o = options_of(cut);
        Layout tensor = {.mesh = mesh_shape(o), .row_chunks = o.tp_overlap};
        auto all = [&](const MeshShape& mesh) {
            return held_multiprocessors(mesh, o.tp_overlap, {.gradients = beside_data});
        };
        // the ledger accounts for the multiprocessors that tensor ranks hold
        int held = machine_.capability > 0 ? all(tensor.mesh) - all({.tp = cut.tp, .cp = cut.cp}) : 0;
        auto key = std::tuple(cut.tp, cut.cp, cut.micro_batch, cut.recompute, cut.tp_overlap, held);
        auto known = times_.find(key);
        if (known == times_.end()) {
            Workload w = workload(cut);
            Machine rest = machine_without(machine_, held);
            known = times_.emplace(key, micro_batch_time(o, w, tensor, rest, task_.overlap().tensor)).first;
        }
        return known->second;
    }

    // Records the ledgers of one rank of each stage.
    std::unique_ptr<StepPlayer> recorded(const Cut& cut, const std::vector<int>& micro_batches) {
        Options o = options_of(cut);
        const Workload w = workload(cut);
        const Layout cut_layout = layout(cut, std::ranges::max(micro_batches));
        ZeroSettings settings = zero_settings(o, element_bytes_);
        settings.overlap = task_.overlap();
        std::vector<int> numbers;
        for (int stage = 0; stage < cut.pp; stage++)
            numbers.push_back(rank_of(first_of_stage(stage), cut_layout.mesh));
        auto player = std::make_unique<StepPlayer>(machine_, numbers);
        Ledger book(machine_.ledger_card(), w.sequence(), o.vocab_size);
        for (int stage = 0; stage < cut.pp; stage++) {
            book.forget();
            record_steps(o, w, settings, make_optimizer(o, 0), cut_layout, first_of_stage(stage),
                         micro_batches);
            player->add(book);
        }
        return player;
    }

    // Returns the memory classes of the stages that need most; empty if a stage needs more than `most`, or
    // more than the host has.
    std::vector<MemoryClass> memory(const Cut& cut, size_t most) {
        Options o = options_of(cut);
        Workload w = workload(cut);
        ZeroSettings settings = zero_settings(o, element_bytes_);
        Layout cut_layout = layout(cut, enough_micro_batches(cut));
        std::vector<std::vector<MemoryClass>> stages;
        for (int number = 0; number < cut.pp; number++) {
            const Stage& stage = this->stage(cut, cut_layout, number);
            auto classes = stage_memory(o, w, settings, cut_layout, stage,
                                        parameter_layout(o, shards_of(cut), stage.units()));
            if (element_bytes_ == 2)
                classes.push_back({"communicators", communicator_memory(cut_layout.mesh, machine_.node)});
            if (total(classes) > most || (most < SIZE_MAX && pinned(classes) > host_room())) return {};
            stages.push_back(std::move(classes));
        }
        return most_of_stages(stages, element_bytes_ == 2);
    }
    const Stage& stage(const Cut& cut, const Layout& layout, int number) {
        auto key = std::tuple(cut.tp, cut.cp, cut.pp, cut.pp_schedule, cut.pp_chunks,
                              layout.pipeline.micro_batches, layout.split);
        auto& stages = stages_[key];
        stages.resize((size_t)cut.pp);
        if (!stages[number])
            stages[number] = std::make_unique<Stage>(task_.options, layout, first_of_stage(number), true);
        return *stages[number];
    }

    const PlanTask& task_;
    const Machine machine_;
    const size_t element_bytes_;
    const long long sequences_;           // sequences in a step
    std::unique_ptr<StepPlayer> player_;  // has the ledgers of the last cut
    std::pair<Cut, std::vector<int>> player_key_;
    std::map<std::tuple<int, int, int, Recompute, int, int>, MicroBatchTime> times_;
    // by tensor and context ranks, micro-batch and whether stages send
    std::map<std::tuple<int, int, int, bool>, int> row_chunks_;
    std::map<std::pair<int, int>, std::unique_ptr<ParameterLayout>> parameters_;
    std::map<std::array<int, 5>, BlockMessages> block_messages_;  // by tp, cp, pp, dp and shard group
    std::optional<double> largest_transform_;
    std::map<Cut, int> too_large_;            // smallest too-large micro-batch, by the rest of the cut
    std::map<Cut, std::vector<int>> splits_;  // by the number of parts alone, unless they even out memory
    std::map<std::tuple<int, int, int, PipelineSchedule, int, int, std::vector<int>>,
             std::vector<std::unique_ptr<Stage>>>
        stages_;
};
