/*
A training step, simulated on all pipeline stages, with one tensor and one data rank of each: which rank waits
for what, and how long the step takes. Nothing is described again for it. Stages go through the very lists
that the executor runs (comm/pipeline_schedule.h); what an action takes is made of the passes of a step
(comm/passes.h) at the rates that are expected of a machine (comm/step_time.h); units are gathered and reduced
when ZeroState does it (comm/zero.h).

A stage has streams: one that computes, one that sends to the stages beside, and one for the messages of data
ranks, which the executor has two for, but they share the way. What is put on a stream comes after all that is
there already, and after what it waits for. So the end of each piece of work is the latest of some others plus
what it takes itself: whatever becomes shorter, no step becomes longer.

    compute     optimizer | F0 | F1 | B0 | F2 | B1 | B2
    link                       | F0 | F1 | B0 | ...
    data          gathered parameters | ...          reduced gradients

The step begins where the global norm of the gradients is known, and ends there: that is the one place where
all ranks wait for each other. Rows that tensor ranks send are a part of the time of a product, as far as that
does not hide them.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "comm/layout.h"             // Layout
#include "comm/matrix_homes.h"       // choose_homes
#include "comm/message_time.h"       // RankGroup, gather_seconds
#include "comm/parameters.h"         // ParameterLayout
#include "comm/passes.h"             // StepPasses
#include "comm/pipeline_schedule.h"  // pipeline_actions
#include "comm/stage.h"              // Stage
#include "comm/step_time.h"          // predicted_time
#include "data/base/error.h"         // fail

// ----------------------------------------------------------------------------
// what the pieces of a micro-batch take

// Seconds of work, and what tensor ranks wait for each other beside it.
struct WorkTime {
    double work = 0, sending = 0;

    double all(bool sends) const { return work + (sends ? sending : 0); }
    WorkTime& operator+=(const WorkTime& other) {
        work += other.work, sending += other.sending;
        return *this;
    }
};

struct LayerTime {
    WorkTime forward;
    WorkTime first;  // forward, as the first of its chunk
    WorkTime input_gradient, weight_gradient;
    WorkTime backward;  // both at once
};

// Seconds of the optimizer's passes for each parameter that a rank steps (StepPart).
struct OptimizerTime {
    double prepare = 0, transform = 0, step = 0;
};

// One micro-batch on one tensor rank.
struct MicroBatchTime {
    std::vector<LayerTime> layers;
    WorkTime embedding_forward, embedding_backward, head_forward, head_backward;
    WorkTime stream;  // for the next part
    // For each parameter that a rank steps: of the global norm; and of the optimizer, which treats the blocks'
    // matrices otherwise where it transforms them. They are made on the host with offload, but for transforming.
    double norm = 0;
    OptimizerTime others = {}, matrices = {};
    double clearing = 0;  // for each gradient that it keeps
    double flops = 0;     // of all layers, with what is made again

    double optimizer() const { return norm + others.prepare + others.step; }

    // Layers [begin, end) one after another, as a chunk.
    LayerTime chunk(int begin, int end) const {
        LayerTime sum;
        for (int i = begin; i < end; i++) {
            sum.forward += i == begin ? layers[i].first : layers[i].forward;
            sum.backward += layers[i].backward;
            sum.input_gradient += layers[i].input_gradient;
            sum.weight_gradient += layers[i].weight_gradient;
        }
        return sum;
    }
};

// Multiprocessors that communication holds are not there for other work.
inline Machine machine_without(Machine machine, int multiprocessors) {
    double rest = machine.multiprocessors - std::min(multiprocessors, machine.multiprocessors / 2);
    for (double* rate : {&machine.products, &machine.attention_forward, &machine.attention_backward})
        *rate *= rest / machine.multiprocessors;
    machine.multiprocessors = (int)rest;
    return machine;
}

// Tensor ranks send all rows of a micro-batch at once, in pieces.
struct RowsToSend {
    RankGroup ranks;
    double bytes;  // of all rows
    int pieces;
    bool overlap;

    double piece_seconds(const Machine& machine) const {
        return gather_seconds(machine, ranks, bytes / pieces);
    }
};

// Seconds of one pass. A product at which rows are sent is made in pieces, each while others are on their
// way: the first to be gathered, and the last to be scattered, nothing hides. What hides those that come
// together again is not known here.
inline WorkTime pass_time(const Machine& machine, int head_size, Pass pass, RowsToSend rows) {
    if (pass.sent == RowsSent::none || rows.ranks.ranks == 1)
        return {predicted_time(machine, head_size, {pass}).all(), 0};
    bool in_pieces = pass.product.sums > 0 && pass.part != StepPart::head_backward;
    if (pass.sent == RowsSent::gathered_again)
        return {predicted_time(machine, head_size, {pass}).all(), rows.pieces * rows.piece_seconds(machine)};
    if (!in_pieces) rows.pieces = 1;
    pass.product.rows /= rows.pieces, pass.read /= rows.pieces, pass.written /= rows.pieces;
    double sent = rows.piece_seconds(machine), piece = predicted_time(machine, head_size, {pass}).all();
    double hidden = rows.overlap ? std::min(sent, piece) : 0;
    return {rows.pieces * piece, rows.pieces * sent - (rows.pieces - 1) * hidden};
}

// Seconds that the gradients of an input and of its weight, which are made one after the other, wait for what
// is sent meanwhile: rows for the second, which are there `gathered` seconds after the first begins, and then
// the sums of the first, each piece in so many seconds.
inline double sending_beside(double input, double weight, double gathered, int pieces, double piece) {
    double sent = gathered;
    for (int i = 1; i <= pieces; i++) sent = std::max(sent, i * input / pieces) + piece;
    return std::max(std::max(input, gathered) + weight, sent) - input - weight;
}

inline bool takes_as_long(const Pass& a, const Pass& b) {
    return a.launcher == b.launcher && a.times == b.times && a.read == b.read && a.written == b.written &&
           a.flops() == b.flops() && a.product.rows == b.product.rows && a.sent == b.sent &&
           (a.part == StepPart::head_backward) == (b.part == StepPart::head_backward);
}

// The optimizer's passes that go over `parameters` elements. The host has no launches to wait for.
inline OptimizerTime optimizer_time(const Machine& machine, const std::vector<Pass>& passes,
                                    const ZeroSettings& settings, double parameters) {
    Machine at_work = machine;
    if (settings.offload) at_work.streams = machine.host_streams, at_work.launch = 0;
    OptimizerTime time;
    for (const Pass& pass : passes) {
        double seconds = predicted_time(at_work, 0, {pass}).all() / parameters;
        if (pass.part == StepPart::prepare) time.prepare += seconds;
        if (pass.part == StepPart::optimizer && pass.launcher == std::string_view("optimizer_pass"))
            time.step += seconds;
        bool converts = (pass.part == StepPart::transform && pass.layer < 0) ||
                        (pass.part == StepPart::optimizer && pass.launcher == std::string_view("convert"));
        if (converts) time.transform += predicted_time(machine, 0, {pass}).all() / parameters;
    }
    return time;
}

// What the matrices of so many blocks take at their homes, on the rank of the stage that has most to do: to
// become others, and to come and go.
struct HomesTime {
    double work = 0, sending = 0;
};

inline HomesTime homes_time(const Machine& machine, const ModelConfig& config, const MeshShape& mesh,
                            double number_bytes, int blocks) {
    int ranks = mesh.tp * mesh.dp, sharing = sharers(mesh);
    MatrixRound round;
    std::map<std::pair<size_t, size_t>, double> seconds;  // of each shape
    for (const TensorRow& row : tensor_table(config)) {
        if (!row.is_block_matrix()) continue;
        for (const Section& section : row.all_sections()) {
            auto [less, more] = std::minmax(section.rows, row.cols);
            auto passes = orthogonal_passes((double)less, (double)more, number_bytes);
            seconds[{section.rows, row.cols}] = predicted_time(machine, 0, passes).all();
            for (int block = 0; block < blocks; block++)
                round.matrices.push_back({block + 1, section.rows, row.cols});
        }
    }
    choose_homes(round, ranks);
    std::vector<double> work((size_t)ranks), bytes((size_t)ranks);
    for (const HomedMatrix& matrix : round.matrices) {
        work[matrix.home] += seconds[{matrix.rows, matrix.cols}];
        bytes[matrix.home] += number_bytes * (double)matrix.size();
    }
    auto rate = [&](int group) {
        bool crosses = RankGroup{group, 1}.crosses_nodes(machine);
        return crosses ? std::min(machine.network, machine.links) : machine.links;
    };
    HomesTime time = {std::ranges::max(work), 0};
    if (ranks == 1) return time;
    double most = std::ranges::max(bytes);
    time.sending =
        most * (sharing - 1) / sharing / rate(sharing) + most * (ranks - 1) / sharing / rate(ranks) +
        2 * (RankGroup{ranks, 1}.crosses_nodes(machine) ? machine.network_latency : machine.link_latency);
    return time;
}

// Blocks whose matrices are at their homes at the same time: as few as give every rank one.
inline int blocks_of_round(const ModelConfig& config, int ranks) {
    int matrices = 0;
    for (const TensorRow& row : tensor_table(config))
        if (row.is_block_matrix()) matrices += (int)row.all_sections().size();
    return std::max(1, ceil_div(ranks, std::max(1, matrices)));
}

// layout.row_chunks: pieces of what tensor ranks send.
inline MicroBatchTime micro_batch_time(const ModelConfig& config, const Workload& workload,
                                       const Layout& layout, const Machine& machine,
                                       const ZeroSettings& settings, bool overlap = true) {
    constexpr double parameters = 1e9;  // that the optimizer steps, to know what it takes for one
    int tp = layout.mesh.tp, L = config.layers;
    RowsToSend sent = {{tp, 1},
                       (double)workload.number_bytes * workload.B * workload.T * config.channels,
                       layout.row_chunks,
                       overlap};
    auto passes_of = [&](const ModelConfig& model, const Layout& cut) {
        return StepPasses(model, workload, Stage(model, cut, {}, true), 1, parameters, settings).rows;
    };
    // Most layers are alike, so there are few passes of different sizes.
    std::vector<std::pair<Pass, WorkTime>> known;
    auto time = [&](const Pass& pass) {
        for (auto& [other, seconds] : known)
            if (takes_as_long(other, pass)) return seconds;
        known.push_back({pass, pass_time(machine, config.head_size, pass, sent)});
        return known.back().second;
    };

    MicroBatchTime result;
    result.layers.resize(L);
    std::vector<Pass> rows = passes_of(config, {.mesh = {.tp = tp}, .row_chunks = layout.row_chunks});
    double piece = sent.piece_seconds(machine);
    double weight_before = 0, work_since = 0;  // of the last gradient of a weight, and of all since it began
    for (size_t i = 0; i < rows.size(); i++) {
        const Pass& pass = rows[i];
        WorkTime seconds = time(pass);
        LayerTime* layer = pass.layer < 0 ? nullptr : &result.layers[pass.layer];
        result.flops += pass.times * pass.flops();
        switch (pass.part) {
        case StepPart::embedding_forward:
            result.embedding_forward += seconds;
            break;
        case StepPart::embedding_backward:
            result.embedding_backward += seconds;
            break;
        case StepPart::head_forward:
            result.head_forward += seconds;
            break;
        case StepPart::head_backward:
            result.head_backward += seconds;
            break;
        case StepPart::block_forward:
            layer->forward += seconds;
            break;
        case StepPart::block_backward:
            layer->backward += seconds;
            (pass.is_weight_gradient() ? layer->weight_gradient : layer->input_gradient) += seconds;
            work_since += seconds.work;
            if (!pass.is_weight_gradient() || pass.product.sums == 0) break;
            if (tp > 1 && overlap) {
                WorkTime input = time(rows[i - 1]);
                bool scatters = rows[i - 1].sent == RowsSent::scattered;
                double left = std::max(0.0, seconds.sending - (work_since - seconds.work - input.work));
                layer->backward.sending +=
                    sending_beside(input.work, seconds.work, left, scatters ? sent.pieces : 0, piece) -
                    seconds.sending - (scatters ? input.sending : 0);
                layer->weight_gradient.sending -= std::min(seconds.sending, weight_before);
            }
            weight_before = work_since = seconds.work;
            break;
        case StepPart::gradient_norm:
            (pass.launcher ? result.norm : result.clearing) += seconds.work / parameters;
            break;
        case StepPart::prepare:
        case StepPart::transform:
        case StepPart::optimizer:
        case StepPart::stream:
            break;
        }
    }
    result.others = optimizer_time(machine, rows, settings, parameters);
    if (settings.transform_scratch) {
        StepPasses of_matrices(config, workload, Stage(config, {.mesh = {.tp = tp}}, {}, true), 1,
                               {parameters, parameters}, settings);
        result.matrices = optimizer_time(machine, of_matrices.rows, settings, parameters);
    }
    // A weight's gradient that is made later takes more in fp8.
    if (workload.fp8) {
        Layout late = {.mesh = {.tp = tp},
                       .row_chunks = layout.row_chunks,
                       .pipeline = {PipelineSchedule::zero_bubble, 1, 1}};
        for (const Pass& pass : passes_of(config, late))
            if (pass.part == StepPart::block_backward && pass.for_weight)
                result.layers[pass.layer].weight_gradient.work += time(pass).work;
        for (const Pass& pass : rows)
            if (pass.part == StepPart::block_backward && pass.for_weight)
                result.layers[pass.layer].weight_gradient.work -= time(pass).work;
    }

    // The first layer of a chunk reads a stream that is whole, and the last one's is made whole for the next:
    // what that comes to is seen on two layers in chunks of their own.
    ModelConfig two = config;
    two.layers = 2;
    double sum = 0, whole = 0;  // forward passes of the second layer
    for (const Pass& pass : passes_of(two, {.mesh = {.tp = tp}}))
        if (pass.part == StepPart::block_forward && pass.layer == 1) sum += time(pass).work;
    Layout chunks_of_one = {
        .mesh = {.tp = tp}, .pipeline = {PipelineSchedule::interleaved, 1, 1, 2}, .split = {1, 1}};
    for (const Pass& pass : passes_of(two, chunks_of_one)) {
        if (pass.part == StepPart::stream) result.stream += time(pass);
        if (pass.part == StepPart::block_forward && pass.layer == 1) whole += time(pass).work;
    }
    for (LayerTime& layer : result.layers) layer.first = layer.forward;
    for (int i = 1; i < L; i++) result.layers[i].first.work -= sum - whole;
    result.layers[0].forward.work += sum - whole;
    return result;
}

// ----------------------------------------------------------------------------
// the step

// Messages of these kinds are hidden behind work, as far as that goes on meanwhile. The executor hides all of
// them or none (--overlap); one kind without the others shows what hiding it is worth.
struct Overlap {
    bool tensor, pipeline, data;
    Overlap(bool all = true) : tensor(all), pipeline(all), data(all) {}
};

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
    const ParameterLayout& parameters;  // of the whole model, as a tensor rank has it
    int zero = 0, prefetch = 1;
    Overlap overlap = true;
    double stream_bytes = 0;  // that go from stage to stage
    size_t number_bytes = 2;
    double norm_bytes = 0;  // that all ranks sum between two passes of the optimizer; 0: it takes no norms
    bool offload = false;   // of the optimizer
    // What the matrices of so many blocks take where the optimizer transforms them; null: it does not.
    std::function<HomesTime(int blocks)> homes = nullptr;
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
          shard_{step.layout.mesh.shard, step.layout.mesh.tp},
          replica_{step.layout.mesh.replicas(), step.layout.mesh.tp * step.layout.mesh.shard},
          cut_gradients_(step.zero >= 2 && shard_.ranks > 1),
          cut_parameters_(step.zero >= 3 && shard_.ranks > 1),
          places_((size_t)step.prefetch + 3),
          place_of_((size_t)step.config.layers + 2, -1),
          turn_of_((size_t)step.config.layers + 2, 0),
          updated_((size_t)step.config.layers + 2, 0) {
        auto& shape = step.layout.pipeline;
        int part = 0, layer = 0, blocks = 0;
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
        if (has_head()) hold(head_unit(), step.prefetch + (tables_take_turns() ? 1 : 2));
        for (auto [begin, end] : chunks_) of_chunk_.push_back(step.times.chunk(begin, end));
    }

    // The optimizer, ahead of all actions: what comes before norms of all ranks are summed, if they are. Returns
    // when that is done.
    double prepare_updates() {
        const MicroBatchTime& times = step_.times;
        for (int unit : held_) {
            double own = size(unit) / shard_.ranks, matrices = matrices_of(unit);
            compute += times.norm * own;
            optimizer_clock() += times.others.prepare * (own - matrices) + times.matrices.prepare * matrices;
        }
        if (step_.offload) host_free_ += compute;  // which sends the norm there
        return optimizer_clock();
    }
    // And the rest: units whose matrices are transformed together are stepped behind that, one by one.
    void step_parameters(double begin) {
        const MicroBatchTime& times = step_.times;
        if (step_.norm_bytes > 0) optimizer_clock() = begin;
        for (int unit : held_)
            compute += times.clearing * (cut_gradients_ ? 1 : shard_.ranks) * size(unit) / shard_.ranks;
        int number = 0;
        for (const std::vector<int>& round : rounds()) {
            if (step_.homes) transform(round);
            for (int unit : round) {
                double own = size(unit) / shard_.ranks, matrices = matrices_of(unit);
                optimizer_clock() += times.others.step * (own - matrices) + times.matrices.step * matrices;
                if (step_.offload) host_free_ += (double)step_.number_bytes * own / step_.machine.host_link;
                if (!cut_parameters_) {
                    gather(optimizer_clock(), unit);
                    updated_[unit] = data_free_;
                } else if (number++ <= step_.prefetch && unit < head_unit()) {
                    gather_in_place(unit, optimizer_clock());
                }
            }
        }
        if (cut_parameters_) data_free_ = std::max(data_free_, optimizer_clock());
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
    struct Place {  // of a unit's parameters, where they are cut
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
    // The embedding and the head have one place for both, unless they are used together.
    bool tables_take_turns() const { return has_embedding() && has_head() && !step_.config.tie_embeddings; }
    int head_unit() const { return step_.config.layers + 1; }
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
        if (!step_.homes || unit == 0 || unit >= head_unit()) return 0;
        return (size(unit) - (double)step_.parameters.before_matrices(unit)) / shard_.ranks;
    }
    // Units that are stepped one after another, behind the transformation of all their matrices: each by itself,
    // if there is none.
    std::vector<std::vector<int>> rounds() const {
        int blocks = 0,
            most =
                step_.homes ? blocks_of_round(step_.config, step_.layout.mesh.tp * step_.layout.mesh.dp) : 1;
        std::vector<std::vector<int>> rounds;
        for (int unit : held_) {
            bool is_block = unit > 0 && unit < head_unit();
            if (rounds.empty() || !step_.homes || blocks >= most) rounds.emplace_back(), blocks = 0;
            rounds.back().push_back(unit);
            blocks += is_block;
        }
        return rounds;
    }
    // With offload, updates visit the device.
    void transform(const std::vector<int>& round) {
        int blocks = 0;
        double own = 0, matrices = 0;
        for (int unit : round) {
            blocks += unit > 0 && unit < head_unit();
            own += size(unit) / shard_.ranks, matrices += matrices_of(unit);
        }
        if (blocks == 0) return;
        double copy = step_.offload ? 4 * own / step_.machine.host_link : 0;
        HomesTime homes = step_.homes(blocks);
        compute = std::max(compute, host_free_) + copy + step_.times.matrices.transform * matrices +
                  homes.work + (taken_.data ? homes.sending : 0);
        if (step_.offload) host_free_ = compute + copy;
    }

    // ---- parameters

    void gather(double begin, int unit) {
        double bytes = (double)step_.number_bytes * size(unit);
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
    // What the passes wait for the host is a part of the optimizer's time.
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
        bool own_place = unit == head_unit() && !tables_take_turns();
        return gradient_places_[own_place ? 3 : unit == 0 || unit == head_unit() ? 2 : turn_of_[unit]];
    }
    void begin_gradients(int unit) {
        if (!cut_gradients_) return;
        GradientPlace& place = gradient_place(unit);
        if (place.in_use) return;
        place.in_use = true;
        compute = std::max(compute, place.free);
        work({.work = 4 * size(unit) / step_.machine.streams});
    }
    void reduce_gradients(int unit, bool last) {
        if (!cut_gradients_ && !last) return;
        double bytes = 4 * size(unit);
        sent.gradients += share_of_others(shard_) * bytes;
        if (last) sent.gradients += 2 * share_of_others(replica_) * bytes / shard_.ranks;
        data_free_ = std::max(data_free_, compute) +
                     data_seconds(gather_seconds(step_.machine, shard_, bytes), shard_);
        if (cut_gradients_) gradient_place(unit) = {false, data_free_};
        if (last)
            data_free_ += data_seconds(sum_seconds(step_.machine, replica_, bytes / shard_.ranks), replica_);
        if (last && step_.offload)
            host_free_ = std::max(host_free_, data_free_) + bytes / shard_.ranks / step_.machine.host_link;
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
            acquire(head_unit(), +1);
            work(times.head_forward);
            release(head_unit());
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
            if (step_.config.tie_embeddings && !has_embedding()) reduce_gradients(0, last);
            begin_gradients(head_unit());
            reduce_gradients(head_unit(), last);
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
    GradientPlace gradient_places_[4];
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
    double begin = 0;  // of the optimizer's last pass, for which all ranks wait where it needs norms
    for (SimulatedStage& stage : stages) begin = std::max(begin, stage.prepare_updates());
    if (step.norm_bytes > 0 && taken.data) begin += sum_seconds(machine, {mesh.ranks(), 1}, step.norm_bytes);
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
    if (taken.data) result.seconds += sum_seconds(machine, {mesh.ranks(), 1}, statistics_bytes);
    return result;
}
