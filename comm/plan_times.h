/*
What the pieces of a step take, in seconds, by the rates that are expected of a machine (kernels/cards.h),
before anything is measured: messages between ranks; kernels, by their passes over memory
(comm/plan_passes.h); and of both, what a micro-batch takes on each layer, at the ends of the model, and in
the optimizer. comm/plan_simulator.h puts the pieces together.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/layout.h"             // Layout
#include "comm/matrix_owners.h"      // choose_owners
#include "comm/plan_task.h"          // RankGroup, group_along
#include "comm/plan_passes.h"        // Pass, StepPasses
#include "comm/pipeline_schedule.h"  // PipelineSchedule
#include "comm/settings.h"           // zero_settings
#include "comm/stage.h"              // Stage
#include "data/base/dtype.h"         // Dtype
#include "data/base/error.h"         // text
#include "data/options/options.h"
#include "data/options/schedule.h"  // tokens_of_step
#include "data/run/meter.h"         // flops_per_token
#include "kernels/cards.h"          // Machine

// ----------------------------------------------------------------------------
// messages
//
// How long messages between ranks take, by the rates and latencies of a machine. Nodes are filled in the
// order of ranks, so a group whose ranks are `stride` apart has several in a node if the stride is less than
// a node.
//
// A ring (comm/rings.h) goes through a node once, in by the network of one of its ranks and out by another's:
// ring after ring, each through other ranks, so a group gets as much of the network as its ranks in one node
// have. Its steps come one after another, which is what latencies cost. Sums over all may go up and down a
// tree instead: as many bytes, and two steps for each level between nodes (Sanders, Speck and Traff,
// "Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan", 2009).

// Bytes per second in one direction that each rank of the group has.
inline double group_rate(const Machine& machine, const RankGroup& group) {
    if (!group.crosses_nodes(machine)) return machine.node_bandwidth;
    return std::min(machine.node_bandwidth, group.in_node(machine) * machine.network);
}

// An all-gather or a reduce-scatter of `bytes`, the parts of all ranks together.
inline double gather_seconds(const Machine& machine, const RankGroup& group, double bytes) {
    if (group.ranks == 1) return 0;
    int steps = group.ranks - 1, to_nodes = group.crosses_nodes(machine) ? group.nodes(machine) : 0;
    to_nodes = std::min(to_nodes, steps);
    double latency = to_nodes * machine.network_latency + (steps - to_nodes) * machine.link_latency;
    return latency + bytes * (group.ranks - 1) / group.ranks / group_rate(machine, group);
}

// An all-reduce of `bytes` on each rank.
inline double sum_seconds(const Machine& machine, const RankGroup& group, double bytes) {
    if (group.ranks == 1) return 0;
    double ring = 2 * gather_seconds(machine, group, bytes);
    double levels = std::ceil(std::log2(group.nodes(machine)));
    double tree =
        2 * (levels * machine.network_latency + (group.in_node(machine) - 1) * machine.link_latency +
             bytes / group_rate(machine, group));
    return std::min(ring, tree);
}

// Each rank sends a part of `bytes` straight to each other one, those to other nodes all by its own network.
inline double exchange_seconds(const Machine& machine, const RankGroup& group, double bytes) {
    if (group.ranks == 1) return 0;
    int near = (group.crosses_nodes(machine) ? group.in_node(machine) : group.ranks) - 1,
        far = group.ranks - 1 - near;
    double part = bytes / group.ranks;
    return near * machine.link_latency + (far > 0 ? machine.network_latency : 0) +
           std::max(near * part / machine.node_bandwidth, far * part / machine.network);
}

// How long it takes to bring gradients together that travel in a type: a reduce-scatter and an all-reduce of
// so many, of which those in bf16 go as comm/gradient_sums.h sends them.
struct GradientMessages {
    const Machine& machine;
    Dtype dtype;

    double bytes(double gradients) const { return (double)dtype_size(dtype) * gradients; }
    double scatter_seconds(const RankGroup& group, double gradients) const {
        if (dtype == Dtype::fp32) return gather_seconds(machine, group, bytes(gradients));
        return exchange_seconds(machine, group, bytes(gradients)) + rounding(group, gradients);
    }
    double sum_seconds(const RankGroup& group, double gradients) const {
        if (dtype == Dtype::fp32) return ::sum_seconds(machine, group, bytes(gradients));
        return exchange_seconds(machine, group, bytes(gradients)) + 2 * rounding(group, gradients) +
               gather_seconds(machine, group, bytes(gradients));
    }

private:
    // Every gradient is read in fp32 and written in bf16, and read so again where it is added.
    double rounding(const RankGroup& group, double gradients) const {
        return group.ranks == 1 ? 0 : 8 * gradients / machine.memory_bandwidth;
    }
};

// A message from one rank to another.
inline double message_seconds(const Machine& machine, bool same_node, double bytes) {
    return same_node ? machine.link_latency + bytes / machine.node_bandwidth
                     : machine.network_latency + bytes / machine.network;
}

// ----------------------------------------------------------------------------
// kernels
//
// How long a step may take on a card: a prediction from its passes (comm/plan_passes.h) and the rates that
// are expected of it (kernels/cards.h), before anything is measured.
//
// A product is as fast as the machine's large ones, less what its tiles waste: those at the edges, those of a
// last wave that does not fill all multiprocessors, and the start of each sum. A kernel that reads and writes
// has a share of the rate of memory. Attention has the rate of its inner loop, less the halves of tiles at
// the diagonal and the ends of each row of tiles.

// ----------------------------------------------------------------------------
// products

// On a host, the rate of long sums. On a card that of the best tiles, of those that libraries have for
// Hopper. A sum may be split over multiprocessors where there are few tiles, as long as its parts fit in the
// workspace.
inline double expected_product_rate(const Machine& machine, const ProductShape& p) {
    constexpr double workspace = 256 << 20;
    constexpr struct {
        double rows, columns, share;
    } tiles[] = {{128, 256, 1}, {256, 128, 1},    {192, 128, 0.96}, {128, 192, 0.96},
                 {256, 192, 1}, {128, 160, 0.96}, {128, 128, 0.93}};
    constexpr double split_share = 0.95;
    if (machine.element_bytes == sizeof(float))
        return machine.gemm_flops * p.sums / (p.sums + machine.gemm_half_k);
    double best = 0;
    for (auto [rows, columns, share] : tiles) {
        double down = std::ceil(p.rows / rows), across = std::ceil(p.columns / columns),
               count = down * across;
        double used = p.rows * p.columns / (down * rows * across * columns);
        double most = count >= 3 * machine.multiprocessors
                          ? 1
                          : std::clamp(workspace / (4 * p.rows * p.columns), 1.0, 16.0);
        for (int parts = 1; parts <= (int)most; parts++) {
            double waves = count * parts / machine.multiprocessors, sums = p.sums / parts;
            best = std::max(best, share * used * waves / std::ceil(waves) * sums /
                                      (sums + machine.gemm_half_k) * (parts > 1 ? split_share : 1));
        }
    }
    // fp8 has twice the peak, which operands' ways to the tensor cores and sums in more bits leave less of.
    double numbers = !p.fp8 ? 1 : p.fast_sums ? 1.62 : 1.45;
    return machine.gemm_flops * numbers * best;
}

// ----------------------------------------------------------------------------
// attention

// Whole rows of tiles have a share of the inner loop's rate; small heads have fewer products for each
// exponential. What orders of tiles leave of that is simulated with the kernels' own functions, by
// test/kernels/test_attention_order.cu. The shares of small heads are those that give 300 TFLOP/s forward and
// 280 backward at T = 1,024 on an H200, which loops like these reach in orders that leave 0.94 and 0.895.
inline double expected_attention_rate(const Machine& machine, int HS, double mean_keys, bool forward) {
    constexpr double tile = 128, of_diagonal = 0.5, of_ends = 1;
    double loop = forward ? machine.attention_forward : machine.attention_backward;
    if (HS <= 64) loop *= forward ? 0.65 : 0.855;
    double scheduled = forward ? 0.98 : mean_keys > 768 ? 0.97 : 0.9;
    double tiles = mean_keys / tile;
    return loop * scheduled * tiles / (tiles + of_diagonal + of_ends);
}

// ----------------------------------------------------------------------------
// kernels that read and write

// Shares of the rate of streams. What machine code shows of these kernels is in test/tools: that they move
// whole vectors (check_sass.py), and how many issue slots their loops take (sass_loops.json). A
// multiprocessor does 128 instructions of threads in a clock, in which memory brings it some 20 bytes.
inline double expected_stream_share(std::string_view launcher) {
    constexpr struct {
        std::string_view launcher;
        double share;
    } shares[] = {
        {"attention_backward", 0.8},       // its statistics, of short rows; and sums for a bias
        {"classifier", 0.82},              // two passes over a row, the second in the L2 cache
        {"embedding_forward", 0.6},        // rows from all over a table
        {"embedding_backward", 0.6},       // likewise
        {"matmul_backward_weight", 0.75},  // gradients of biases, which are short
        {"matmul_backward_bias", 0.75},    // likewise
        {"fp8_quantize", 0.88},            // some 14 instructions for an element's 4 bytes
        {"norm_backward", 0.82},           // in one pass, but it waits for the sums of a row
        {"", 0.95},                        // fills
    };
    for (auto [name, share] : shares)
        if (name == launcher) return share;
    return 0.88;
}

// ----------------------------------------------------------------------------
// a step

struct StepTime {
    double products = 0, attention = 0, streams = 0;  // seconds
    double all() const { return products + attention + streams; }
};

inline StepTime predicted_time(const Machine& machine, int head_size, const std::vector<Pass>& passes) {
    StepTime time;
    for (const Pass& pass : passes) {
        std::string_view launcher = pass.launcher ? pass.launcher : "";
        double memory = (pass.read + pass.written) / machine.memory_bandwidth,
               launches = pass.launches * machine.launch;
        if (pass.product.sums > 0) {
            double fused = launcher == "matmul_gelu_forward"    ? 0.88
                           : launcher == "matmul_backward_gelu" ? 0.85
                                                                : 1;
            double seconds = pass.flops() / (fused * expected_product_rate(machine, pass.product));
            time.products += pass.times * (std::max(seconds, memory / 0.95) + launches);
        } else if (pass.attention_flops > 0) {
            double rate =
                expected_attention_rate(machine, head_size, pass.mean_keys, launcher == "attention_forward");
            time.attention += pass.times * (pass.flops() / rate + launches);
        } else {
            time.streams += pass.times * (memory / expected_stream_share(launcher) + launches);
        }
    }
    return time;
}

// For the header of a run on one device; empty where too little is known of the device, or of such a step: of
// others than those with the attention kernels of Hopper, and an optimizer on the device that steps each
// element by itself. peak: FLOP/s that MFU is a share of.
inline std::string prediction_text(const Machine& machine, double peak, bool takes_wgmma, const Options& o,
                                   const Workload& workload, const Stage& stage, double parameters) {
    bool known_machine = machine.gemm_flops > 0 && machine.memory_bandwidth > 0 && peak > 0 && takes_wgmma;
    bool known_step = sizeof(floatX) == 2 && o.optimizer != OptimizerKind::muon && o.offload == Offload::none;
    if (!known_machine || !known_step) return "";
    StepPasses passes(o, workload, stage, micro_batches_of_rank(o, 0), parameters, zero_settings(o));
    StepTime time = predicted_time(machine, o.head_size, passes.rows);
    double rate = flops_per_token(o, o.sequence_length, false) * tokens_of_step(o, 0) / time.all();
    return text(
        "%.3g ms a step and %.1f%% MFU (products %.0f%%, attention %.0f%%, memory %.0f%%), by rates that "
        "are expected of such cards; nothing of it is measured",
        1e3 * time.all(), 100 * rate / peak, 100 * time.products / time.all(),
        100 * time.attention / time.all(), 100 * time.streams / time.all());
}

// ----------------------------------------------------------------------------
// a micro-batch, on one tensor rank
//
// Rows that tensor ranks send are a part of the time of a product, as far as that does not hide them.

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
    for (double* rate : {&machine.gemm_flops, &machine.attention_forward, &machine.attention_backward})
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
    if (pass.sent == RowsSent::regathered)
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
    if (settings.offload) at_work.memory_bandwidth = machine.host_bandwidth, at_work.launch = 0;
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

// The cost of transforming the matrices of some blocks, on the busiest rank of the stage: seconds to compute
// and to send them, and elements of memory, as MatrixArrays has them.
struct AtOwners {
    double work = 0, sending = 0;
    double elements = 0;
};

// parameters: of the whole model, as a tensor rank has it.
inline AtOwners matrices_at_owners(const Machine& machine, const ModelConfig& config, const MeshShape& mesh,
                                   const ParameterLayout& parameters, const ZeroSettings& settings,
                                   double element_bytes, int blocks) {
    int ranks = mesh.along(stage_axes), sharing = mesh.along(sharing_axes);
    MatrixRound round;
    std::map<std::pair<size_t, size_t>, double> seconds;  // by shape
    double copies = 0, largest = 0, scratch = 0;  // copies: of heads that several tensor ranks have, together
    for (const TensorRow& row : tensor_table(config)) {
        if (!row.is_block_matrix()) continue;
        for (const Section& section : row.all_sections()) {
            auto [less, more] = std::minmax(section.rows, row.cols);
            auto passes = orthogonal_passes((double)less, (double)more, element_bytes);
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
    choose_owners(round, ranks);
    std::vector<double> work((size_t)ranks), size((size_t)ranks);
    for (const OwnedMatrix& matrix : round.matrices) {
        work[matrix.owner] += seconds[{matrix.rows, matrix.cols}];
        size[matrix.owner] += (double)matrix.size();
    }
    double most = std::ranges::max(size), unit = (double)parameters.unit_size(1),
           own = std::min(unit / mesh.shard, unit - (double)parameters.before_matrices(1));
    AtOwners at_owners = {std::ranges::max(work), 0,
                          blocks * own + std::max(most, copies) + largest + scratch};
    if (ranks == 1) return at_owners;
    auto rate = [&](int group) {
        bool crosses = RankGroup{group, 1}.crosses_nodes(machine);
        return crosses ? std::min(machine.network, machine.node_bandwidth) : machine.node_bandwidth;
    };
    bool crosses = RankGroup{ranks, 1}.crosses_nodes(machine);
    double bytes = element_bytes * most / sharing;
    at_owners.sending = bytes * (sharing - 1) / rate(sharing) + bytes * (ranks - 1) / rate(ranks) +
                        2 * (crosses ? machine.network_latency : machine.link_latency);
    return at_owners;
}

// Blocks whose matrices are at their owners at the same time: as few as give every rank one.
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
                       (double)workload.element_bytes * workload.B * workload.T * config.channels,
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
