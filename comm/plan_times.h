/*
Seconds of the pieces of a step: a micro-batch on each layer and at the ends of the model, and the optimizer.
No layer is described here: the program's own passes are written down (kernels/ledger.h), and their ledger is
played (comm/plan_player.h). comm/plan_simulator.h puts the pieces together.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comm/layout.h"             // Layout
#include "comm/matrix_owners.h"      // choose_owners
#include "comm/plan_player.h"        // play, WorkTime
#include "comm/pipeline_schedule.h"  // PipelineSchedule
#include "comm/settings.h"           // zero_settings
#include "data/base/error.h"         // text
#include "data/options/options.h"
#include "data/options/schedule.h"  // tokens_of_step
#include "data/run/meter.h"         // flops_per_token
#include "kernels/cards.h"          // Machine

// ----------------------------------------------------------------------------
// a micro-batch, on one tensor rank

struct LayerTime {
    WorkTime forward;
    WorkTime first;  // forward, as the first of its chunk
    WorkTime input_gradient, weight_gradient;
    WorkTime backward;  // both at once
};

// Seconds per parameter that a rank steps: the gradients' norm, updates that have a pass of their own, whole
// matrices on their way to their owners and back, and new weights; and per gradient that is cleared.
struct OptimizerTime {
    double norm = 0, prepare = 0, transform = 0, step = 0, clearing = 0;
};

// One micro-batch on one tensor rank.
struct MicroBatchTime {
    std::vector<LayerTime> layers;
    WorkTime embedding_forward, embedding_backward, head_forward, head_backward;
    WorkTime stream;  // for the next part
    // The optimizer's, for elements of blocks' matrices and for others: they differ where it transforms
    // matrices. With offload, `prepare` and `step` are on the host.
    OptimizerTime others = {}, matrices = {};
    double once = 0;   // all layers' in a step, by its first micro-batch: copies of weights in fp8
    double flops = 0;  // all layers', recomputation included
    StepTime kinds;    // all passes, without the optimizer

    double optimizer() const { return others.norm + others.prepare + others.step; }

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

// A section is of one of these; stream: what is done for the part before or behind.
enum class PassPart { embedding, block, head, stream };

struct PassSection : SectionTime {
    PassPart part;
    PipelineWork work;
};

// Says what each section is a part of. The last norm lies in the unit of the last block, which is entered for
// both; and embeddings may be tied, so the unit of the embedding may be that of the classifier. In a backward
// pass, everything before the last block belongs to the head.
inline std::vector<PassSection> named_sections(const std::vector<SectionTime>& played, int layers) {
    std::vector<PassSection> sections;
    int task = -1, last_entered = 0;
    bool begun = false, in_head = false;
    for (const SectionTime& one : played) {
        auto [its_task, its_work, micro_batch, unit] = one.section;
        auto work = (PipelineWork)its_work;
        if (its_task != task) task = its_task, last_entered = 0, begun = in_head = false;
        bool forward = work == PipelineWork::forward;
        last_entered += unit == layers;
        if (!forward && !begun && unit >= 0) begun = true, in_head = unit == 0 || unit > layers;
        bool is_head = forward ? last_entered == 2 : in_head && last_entered < 2;
        PassPart part = is_head     ? PassPart::head
                        : unit == 0 ? PassPart::embedding
                        : unit > 0  ? PassPart::block
                                    : PassPart::stream;
        sections.push_back({one, part, work});
    }
    return sections;
}

// Writes in the thread's ledger what the passes of a rank put on streams, over the micro-batches of the
// layout's pipeline; the world of the layout need not be there. train_gpt.cu has it, which has the model.
void record_passes(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings,
                   const Layout& layout, const MeshPosition& position = {});

// The first micro-batch finds what all of a step use, copies of weights in fp8, so it may take longer.
constexpr int micro_batches_recorded(const Workload& workload) {
    return workload.fp8 ? 2 : 1;
}

// The passes of one tensor rank that has all layers, cut into chunks of `split` layers; empty: one chunk.
inline std::vector<PassSection> pass_times(const ModelConfig& config, const Workload& workload,
                                           const Layout& cut, const Machine& machine, bool overlap,
                                           PipelineSchedule schedule, const std::vector<int>& split = {}) {
    Layout alone = {
        .mesh = {.tp = cut.mesh.tp, .copies = cut.mesh.copies},
        .row_chunks = cut.row_chunks,
        .pipeline = {schedule, 1, micro_batches_recorded(workload), std::max(1, (int)split.size())},
        .split = split};
    Ledger book(workload.element_bytes, workload.T, config.vocab_size);
    record_passes(config, workload, {.overlap = overlap}, alone);
    return named_sections(play(book, machine), config.layers);
}

// ----------------------------------------------------------------------------
// the optimizer

// Seconds for each of the elements that the optimizer steps; matrices: of blocks, which some treat otherwise.
// The host has no launches to wait for.
inline OptimizerTime optimizer_time(const Machine& machine, const Optimizer& optimizer,
                                    const ZeroSettings& settings, size_t element_bytes, bool matrices) {
    constexpr size_t n = (size_t)1 << 30;  // launches are few
    constexpr int rows = 1 << 15;
    Machine at_work = machine;
    if (settings.offload) at_work.memory_bandwidth = machine.host_bandwidth, at_work.launch = 0;
    Ledger book(element_bytes);
    Arena memory;
    memory.of("optimizer");
    auto floats = [&](bool present) { return memory.take<float>(present ? n : 0); };
    OptimizerArrays arrays = {.params = memory.take_elements(n),
                              .master = floats(settings.keep_master),
                              .slots = {},
                              .grads = floats(true),
                              .scale = nullptr};
    OptimizerPart part = {.at = 0, .count = n, .first = 0, .name = 0, .decays = true};
    if (matrices) part.rows = part.cols = rows;
    auto seconds = [&](const Machine& where, auto&& work) {
        book.forget();
        work();
        return launch_times(where, book).all() / n;
    };
    auto squares = [&](const auto* values) {
        sums_of_squares(arrays.grads, arrays.grads, values, {{0, n}}, nullptr);
    };
    OptimizerTime time;
    time.norm = seconds(machine, [&] { squares(arrays.grads); });
    time.clearing = seconds(machine, [&] { zero_async(arrays.grads, n, nullptr); });
    time.prepare = seconds(at_work, [&] {
        if (optimizer.prepare) optimizer.prepare.on_device(arrays, {part}, nullptr);
        if (!optimizer.takes_norms) return;
        arrays.master ? squares(arrays.master) : squares(arrays.params);
        squares(arrays.grads);
    });
    time.step = seconds(at_work, [&] { optimizer.step.on_device(arrays, {part}, nullptr); });
    if (!matrices || !optimizer.transform) return time;
    MatrixPart whole = {rows, rows, 0, rows, 0, n, false};
    time.transform = seconds(machine, [&] {
        convert(arrays.params, arrays.grads, n, nullptr);
        copy_part<PartCopy::into_matrix>(arrays.params, arrays.params, whole, nullptr);
        copy_part<PartCopy::out_of_matrix>(arrays.params, arrays.params, whole, nullptr);
        convert(arrays.grads, (const floatX*)arrays.params, n, nullptr);
    });
    return time;
}

// Seconds that a matrix is transformed in, rows <= cols.
inline double orthogonal_seconds(const Machine& machine, size_t rows, size_t cols, size_t element_bytes) {
    Ledger book(element_bytes);
    Arena memory;
    memory.of("matrices");
    orthogonalise(memory.take_elements(rows * cols), (int)rows, (int)cols,
                  memory.take_elements(orthogonalise_scratch(rows, cols, element_bytes)), nullptr);
    return launch_times(machine, book).all();
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
            seconds[{section.rows, row.cols}] =
                orthogonal_seconds(machine, less, more, (size_t)element_bytes);
            double size = (double)section.rows * (double)row.cols;
            largest = std::max(largest, size);
            scratch =
                std::max(scratch, (double)settings.transform_scratch(less, more, (size_t)element_bytes));
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

// Matrices that an optimizer of whole ones sees in a block.
inline int matrices_of_block(const ModelConfig& config) {
    int count = 0;
    for (const TensorRow& row : tensor_table(config))
        if (row.is_block_matrix()) count += (int)row.all_sections().size();
    return count;
}

// Blocks whose matrices are at their owners at the same time: as few as give every rank one.
inline int blocks_of_round(const ModelConfig& config, int ranks) {
    return std::max(1, ceil_div(ranks, matrices_of_block(config)));
}

// ----------------------------------------------------------------------------
// all of it

// layout.row_chunks: pieces of what tensor ranks send.
inline MicroBatchTime micro_batch_time(const Options& o, const Workload& workload, const Layout& layout,
                                       const Machine& machine, bool overlap = true) {
    // Only layers that differ are recorded: the first, and one period of the window pattern. Every other one
    // equals one of these.
    int period = 1;
    if (!o.window_pattern.empty()) {
        auto [sliding, full] = parse_window_pattern(o.window_pattern);
        period = (int)std::min<int64_t>((int64_t)sliding + full, o.layers);
    }
    ModelConfig few = o;
    few.layers = std::min(o.layers, 1 + period);
    std::vector<int> shown_by(o.layers), shown(few.layers);
    for (int i = 0; i < o.layers; i++) {
        shown_by[i] = i < few.layers ? i : 1 + (i - 1) % period;
        shown[shown_by[i]]++;
    }
    MicroBatchTime result;
    std::vector<LayerTime> layers(few.layers);
    auto all_passes = [&](PipelineSchedule schedule, const std::vector<int>& split = {}) {
        return pass_times(few, workload, layout, machine, overlap, schedule, split);
    };
    const int last = micro_batches_recorded(workload) - 1;
    auto passes = [&](PipelineSchedule schedule, const std::vector<int>& split = {}) {
        std::vector<PassSection> sections = all_passes(schedule, split);
        std::erase_if(sections, [&](const PassSection& one) { return one.section.micro_batch != last; });
        return sections;
    };
    for (const PassSection& one : all_passes(PipelineSchedule::one_f_one_b)) {
        bool forward = one.work == PipelineWork::forward;
        int times = one.part == PassPart::block ? shown[one.section.unit - 1] : 1;
        if (one.part == PassPart::stream && one.time.work > 0)
            fail("plan: work between the units of a pass is no part of it; see named_sections");
        int micro_batch = one.section.micro_batch;
        result.once += ((micro_batch == 0) - (micro_batch == last)) * times * one.time.work;
        if (micro_batch != last) continue;
        if (one.part == PassPart::embedding)
            (forward ? result.embedding_forward : result.embedding_backward) += one.time;
        if (one.part == PassPart::head) (forward ? result.head_forward : result.head_backward) += one.time;
        if (one.part == PassPart::block) {
            LayerTime& layer = layers[one.section.unit - 1];
            (forward ? layer.forward : layer.backward) += one.time;
        }
        result.flops += times * one.flops;
        result.kinds += one.kinds * times;
    }
    for (const PassSection& one : passes(PipelineSchedule::zero_bubble)) {
        if (one.part != PassPart::block) continue;
        LayerTime& layer = layers[one.section.unit - 1];
        if (one.work == PipelineWork::input_gradient) layer.input_gradient += one.time;
        if (one.work == PipelineWork::weight_gradient) layer.weight_gradient += one.time;
    }
    // The first layer of a chunk reads a stream that is whole, and the last one's is made whole for the next:
    // each layer is a chunk here.
    for (const PassSection& one : passes(PipelineSchedule::interleaved, std::vector(few.layers, 1))) {
        if (one.part == PassPart::stream) result.stream += one.time * (1.0 / std::max(1, few.layers - 1));
        if (one.part == PassPart::block && one.work == PipelineWork::forward)
            layers[one.section.unit - 1].first += one.time;
    }
    if (few.layers > 1) layers[0].forward.work += layers[1].forward.work - layers[1].first.work;
    for (int layer : shown_by) result.layers.push_back(layers[layer]);

    ZeroSettings settings = zero_settings(o, workload.element_bytes);
    Optimizer optimizer = make_optimizer(o, 0);
    result.others = optimizer_time(machine, optimizer, settings, workload.element_bytes, false);
    if (settings.transform_scratch)
        result.matrices = optimizer_time(machine, optimizer, settings, workload.element_bytes, true);
    return result;
}

// For the header of a run on one device; empty where too little is known of the device, or of such a step: of
// others than those with the attention kernels of Hopper, and an optimizer on the device that steps each
// element by itself. peak: FLOP/s that MFU is a share of. parameters: all that are stepped.
inline std::string prediction_text(const Machine& machine, double peak, bool takes_wgmma, const Options& o,
                                   const Workload& workload, double parameters) {
    bool known_machine = machine.gemm_flops > 0 && machine.memory_bandwidth > 0 && peak > 0 && takes_wgmma;
    bool known_step = sizeof(floatX) == 2 && o.optimizer != OptimizerKind::muon && o.offload == Offload::none;
    if (!known_machine || !known_step) return "";
    MicroBatchTime micro = micro_batch_time(o, workload, {}, machine);
    StepTime time = micro.kinds * micro_batches_of_rank(o, 0);
    time.streams += micro.once + parameters * (micro.optimizer() + micro.others.clearing);
    double rate = flops_per_token(o, o.sequence_length, false) * tokens_of_step(o, 0) / time.all();
    return text(
        "%.3g ms a step and %.1f%% MFU (products %.0f%%, attention %.0f%%, memory %.0f%%), by rates that "
        "are expected of such cards; nothing of it is measured",
        1e3 * time.all(), 100 * rate / peak, 100 * time.products / time.all(),
        100 * time.attention / time.all(), 100 * time.streams / time.all());
}
