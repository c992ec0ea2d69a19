/*
Seconds of the pieces of a micro-batch, for each layer and for the ends of the model. The search for the
fastest layout derives its bounds from them. No layer is described here: the program's own passes are recorded
in a ledger (kernels/ledger.h), which is then played (comm/plan_player.h).
*/
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "comm/layout.h"             // Layout
#include "comm/plan_player.h"        // StepPlayer
#include "comm/pipeline_schedule.h"  // PipelineSchedule
#include "comm/settings.h"           // make_optimizer
#include "data/options/options.h"
#include "kernels/cards.h"  // Machine

// Records in the thread's ledger what a rank enqueues on streams: one step for each of these numbers of
// micro-batches, which are at most the layout's. Steps begin and end at entries of the kind `step`; entries
// after the last of these belong to no step. The other ranks of the layout need not exist. Defined in
// train_gpt.cu, which has the model.
void record_steps(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings,
                  const Optimizer& optimizer, const Layout& layout, const MeshPosition& position,
                  const std::vector<int>& micro_batches);

// ----------------------------------------------------------------------------
// a micro-batch, on one tensor rank

// Seconds of the passes over one or more layers, including the time that tensor ranks wait for each other.
struct LayerTime {
    double forward = 0, backward = 0;
    LayerTime& operator+=(const LayerTime& other) {
        forward += other.forward, backward += other.backward;
        return *this;
    }
};

struct MicroBatchTime {
    std::vector<LayerTime> layers;
    LayerTime embedding, head;
    StepTime kinds;    // the launches of all passes
    double flops = 0;  // likewise, recomputation included

    // A lower bound for layers [begin, end) in sequence. The first layer of a chunk has a whole stream, as
    // the model's first layer does; that one has a sliding window if any layer has one.
    LayerTime chunk(int begin, int end) const {
        LayerTime sum;
        for (int i = begin; i < end; i++) {
            sum.forward += i == begin ? std::min(layers[i].forward, layers[0].forward) : layers[i].forward;
            sum.backward += layers[i].backward;
        }
        return sum;
    }
};

// Records only layers that differ: the first, a period of the window pattern without n-gram tables, and a
// period with them if there are any. Every other layer equals one of these. layout.row_chunks: the number of
// pieces in which tensor ranks send.
inline MicroBatchTime micro_batch_time(const Options& o, const Workload& workload, const Layout& layout,
                                       const Machine& machine, bool overlap = true) {
    int period = 1;
    if (!o.window_pattern.empty()) {
        auto [sliding, full] = parse_window_pattern(o.window_pattern);
        period = (int)std::min<int64_t>((int64_t)sliding + full, o.layers);
    }
    ModelConfig few = o;
    const std::vector<bool> tables = layers_with_table(o);
    few.layers = o.ngram.empty() ? std::min(o.layers, 1 + period) : 1 + 2 * period;
    const int L = few.layers;
    few.ngram_layers = tables[0] ? "0" : "";
    for (int i = 1 + period; i < L; i++)
        few.ngram_layers += (few.ngram_layers.empty() ? "" : ",") + std::to_string(i);
    std::vector<int> shown_by(o.layers), shown(L);
    for (int i = 0; i < o.layers; i++) {
        shown_by[i] = i == 0 ? 0 : 1 + (i - 1) % period + (tables[i] ? period : 0);
        shown[shown_by[i]]++;
    }
    // The first micro-batch does not read the gradients of matrices, because it is the first to write them.
    // But with fp8, it makes the copies of weights that the others reuse.
    const int micro_batch = workload.fp8 ? 1 : 0;
    Ledger book(machine.ledger_card(), workload.sequence(), o.vocab_size);
    record_steps(few, workload, {.overlap = overlap}, make_optimizer(Options(), 0),
                 {.mesh = {.tp = layout.mesh.tp,
                           .cp = layout.mesh.cp,
                           .copies = layout.mesh.copies,
                           .stage_group = layout.mesh.stage_group,
                           .tables = layout.mesh.tables},
                  .row_chunks = layout.row_chunks,
                  .pipeline = {PipelineSchedule::one_f_one_b, 1, micro_batch + 1}},
                 {}, {micro_batch + 1});
    StepPlayer player(machine, {0}, true);
    player.add(book);
    std::vector<double> seconds;
    player.play({}, &seconds);

    // The last norm lies in the unit of the last block, so this unit is entered for both. Embeddings may be
    // tied, so their unit may be the classifier's too. In a backward pass, everything before the last block
    // is the head's.
    MicroBatchTime result;
    std::vector<LayerTime> layers(L);
    std::vector<int> times(book.sections.size());  // how often the model has what a section covers
    LayerTime* part = nullptr;
    for (int i = 0, task = -1, last_entered = 0; i < (int)book.sections.size(); i++) {
        auto [its_task, work, its_micro_batch, unit] = book.sections[i];
        if (work < 0 || its_micro_batch != micro_batch) continue;
        bool forward = work == (int)PipelineWork::forward;
        if (its_task != task)
            task = its_task, last_entered = 0, part = forward ? &result.embedding : &result.head;
        last_entered += unit == L;
        bool of_head = unit > L || (unit == L && last_entered == (forward ? 2 : 1)) ||
                       (unit == 0 && !forward && last_entered < 2);
        if (unit >= 0) part = of_head ? &result.head : unit == 0 ? &result.embedding : &layers[unit - 1];
        (forward ? part->forward : part->backward) += seconds[i];
        bool of_block = part != &result.head && part != &result.embedding;
        times[i] = of_block ? shown[part - layers.data()] : 1;
    }
    for (int layer : shown_by) result.layers.push_back(layers[layer]);
    book.each([&](const LedgerEntry& entry) {
        if (entry.kind != LedgerEntry::launch || times[entry.section] == 0) return;
        result.kinds += launch_time(machine, entry) * times[entry.section];
        result.flops += entry.cost.flops() * times[entry.section];
    });
    return result;
}
