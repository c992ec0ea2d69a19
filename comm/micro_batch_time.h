/*
What the pieces of a step take on one tensor rank, in seconds, by the passes of a step (comm/passes.h) at the
rates that are expected of a machine (comm/step_time.h): each layer's passes over one micro-batch, the ends of
the model, and the optimizer. Rows that tensor ranks send are a part of the time of a product, as far as that
does not hide them. comm/step_simulator.h puts the pieces together.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "comm/layout.h"             // Layout
#include "comm/matrix_homes.h"       // choose_homes
#include "comm/message_time.h"       // RankGroup, gather_seconds
#include "comm/passes.h"             // StepPasses
#include "comm/pipeline_schedule.h"  // PipelineSchedule
#include "comm/stage.h"              // Stage
#include "comm/step_time.h"          // predicted_time

// ----------------------------------------------------------------------------
// a micro-batch

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
    // For each parameter that a rank steps: of the global norm; and of the optimizer, which treats matrices
    // of blocks otherwise where it transforms them. With offload all of it but that is on the host.
    double norm = 0;
    OptimizerTime others = {}, matrices = {};
    double clearing = 0;  // for each gradient that it keeps
    double flops = 0;     // all layers', recomputation included

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
    double bytes;  // for all rows together
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

// ----------------------------------------------------------------------------
// the optimizer

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

// The cost of the matrices of so many blocks at their homes, on the rank of the stage that has most to do:
// seconds to become others, and to come and go; and elements of memory, as MatrixArrays has them.
struct AtHomes {
    double work = 0, sending = 0;
    double elements = 0;
};

// parameters: of the whole model, as a tensor rank has it.
inline AtHomes matrices_at_homes(const Machine& machine, const ModelConfig& config, const MeshShape& mesh,
                                 const ParameterLayout& parameters, const ZeroSettings& settings,
                                 double number_bytes, int blocks) {
    int ranks = mesh.tp * mesh.dp, sharing = sharers(mesh);
    MatrixRound round;
    std::map<std::pair<size_t, size_t>, double> seconds;  // by shape
    double copies = 0, largest = 0, scratch = 0;  // copies: of heads that several tensor ranks have, together
    for (const TensorRow& row : tensor_table(config)) {
        if (!row.is_block_matrix()) continue;
        for (const Section& section : row.all_sections()) {
            auto [less, more] = std::minmax(section.rows, row.cols);
            auto passes = orthogonal_passes((double)less, (double)more, number_bytes);
            seconds[{section.rows, row.cols}] = predicted_time(machine, 0, passes).all();
            double size = (double)section.rows * (double)row.cols;
            largest = std::max(largest, size);
            scratch = std::max(scratch, (double)settings.transform_scratch(less, more));
            if (section.pieces > 0 && mesh.tp > section.pieces)
                copies = std::max(copies, size * mesh.tp / section.pieces);
            for (int block = 0; block < blocks; block++)
                round.matrices.push_back({block + 1, section.rows, row.cols});
        }
    }
    choose_homes(round, ranks);
    std::vector<double> work((size_t)ranks), size((size_t)ranks);
    for (const HomedMatrix& matrix : round.matrices) {
        work[matrix.home] += seconds[{matrix.rows, matrix.cols}];
        size[matrix.home] += (double)matrix.size();
    }
    double most = std::ranges::max(size), unit = (double)parameters.unit_size(1),
           own = std::min(unit / mesh.shard, unit - (double)parameters.before_matrices(1));
    AtHomes at_homes = {std::ranges::max(work), 0, blocks * own + std::max(most, copies) + largest + scratch};
    if (ranks == 1) return at_homes;
    auto rate = [&](int group) {
        bool crosses = RankGroup{group, 1}.crosses_nodes(machine);
        return crosses ? std::min(machine.network, machine.links) : machine.links;
    };
    bool crosses = RankGroup{ranks, 1}.crosses_nodes(machine);
    double bytes = number_bytes * most / sharing;
    at_homes.sending = bytes * (sharing - 1) / rate(sharing) + bytes * (ranks - 1) / rate(ranks) +
                       2 * (crosses ? machine.network_latency : machine.link_latency);
    return at_homes;
}

// Blocks whose matrices are at their homes at the same time: as few as give every rank one.
inline int blocks_of_round(const ModelConfig& config, int ranks) {
    return std::max(1, ceil_div(ranks, matrices_of_block(config)));
}

// ----------------------------------------------------------------------------
// all of it

// layout.row_chunks: pieces of what tensor ranks send.
inline MicroBatchTime micro_batch_time(const ModelConfig& config, const Workload& workload,
                                       const Layout& layout, const Machine& machine,
                                       const ZeroSettings& settings, bool overlap = true) {
    constexpr double parameters = 1e9;  // a large number to step, for the time per parameter
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
    // the time of the last weight gradient, and of all work since it began
    double weight_before = 0, work_since = 0;
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
