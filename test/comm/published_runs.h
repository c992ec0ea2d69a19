/*
Published step times of other programs (test/golden/published_runs.json), and the planner's predictions for
them. Each row is a command line of `train_gpt plan`. Three keywords describe how the programs of a
publication differ from this one:

    scores_in_memory        attention writes its scores and reads them back: kernels of 2021 and 2022; a row
                            that keeps all activations computes them twice ("selective" recomputation)
    rows_on_all_ranks       every tensor rank has all rows between its matrices: no sequence parallelism
    best_of_micro_batches   micro-batch size and pipeline chunks are not published; the best were used

A row that is not predicted to within 11% has `within`, the accuracy that is reached. One such row, with 16
stages and 32 micro-batches, reaches 111 TFLOP/s in the plot. The same layout reaches 162 with 128
micro-batches, so the bubble formula predicts 123 with 32; the neighboring rows with 8 and 32 stages agree
with that formula.

All of these programs sent gradients after the last micro-batch. A number that was read from a plot has
`read_within`, the largest relative error expected of the reading.
*/
#pragma once

#include <cmath>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "comm/plan_report.h"
#include "test/support/program.h"
#include "data/launch/parse_command_line.h"

struct PublishedRun {
    std::string name;
    int publication;
    double seconds, read_within, within;
    bool rows_on_all_ranks, best_of_micro_batches;
    PlanLine line;
};

struct Publication {
    std::string name, machine;
    bool scores_in_memory;
};

struct PublishedRuns {
    std::vector<Publication> publications;
    std::vector<PublishedRun> runs;
};

inline PublishedRuns published_runs(const std::string& path = "test/golden/published_runs.json") {
    PublishedRuns all;
    nlohmann::json file = parse_json(read_whole(path, 1 << 20, "larger than this file; restore it"), path);
    for (auto& publication : file) {
        all.publications.push_back(
            {publication["name"], publication["machine"], publication["scores_in_memory"]});
        for (auto& row : publication["rows"]) {
            std::istringstream line("plan " + publication["options"].get<std::string>() + " " +
                                    row["options"].get<std::string>());
            std::vector<std::string> words{std::istream_iterator<std::string>(line), {}};
            all.runs.push_back(
                {row["name"], (int)all.publications.size() - 1, row["seconds"], row.value("read_within", 0.0),
                 row.value("within", 0.11), row.value("rows_on_all_ranks", false),
                 row.value("best_of_micro_batches", false), parse_plan(read_arguments(command_plan, words))});
        }
    }
    return all;
}

// Bytes moved for each score of a head in the forward pass of attention with scores in memory: the first
// product writes it, softmax and dropout read and write it (dropout keeps a mask), and the second product
// reads it. The backward pass moves 1.3 times that.
constexpr double bytes_of_score = 16.3;  // fitted; counting gives 13
constexpr double backward_bytes = 1.3;

// Thread blocks that occupy multiprocessors for each link between stages: fitted.
constexpr int blocks_of_their_links = 4;

// Returns the machine as such a program would see it: a layer's extra time is expressed as slower attention,
// which each layer runs once in every pass.
inline Machine machine_of_program(Machine machine, const Options& o, const Publication& publication,
                                  const PublishedRun& run, double score_bytes) {
    if (o.pp > 1) machine = machine_without(machine, 2 * (blocks_of_their_links - blocks_of_links));
    if (!publication.scores_in_memory) return machine;
    // These programs' products compute all scores; the ledger counts only the half that is not masked.
    double scores = (double)o.micro_batch * o.heads / o.tp * o.sequence_length * o.sequence_length,
           product = 2 * o.head_size / machine.gemm_flops, move = score_bytes / machine.memory_bandwidth;
    double forward = scores * (2 * product + move),
           backward =
               scores * (4 * product + backward_bytes * move) + (o.recompute == Recompute::none) * forward;
    Workload w = training_workload(o, Recompute::none, (size_t)machine.element_bytes);
    ModelConfig two = o;  // layers, so that the first one's passes do not include the head
    two.layers = 2;
    Ledger book(machine.ledger_card(), w.sequence(), o.vocab_size);
    record_steps(two, w, {}, make_optimizer(Options(), 0),
                 {.mesh = {.tp = o.tp, .copies = mesh_shape(o).copies}}, {}, {1});
    auto take = [&](PipelineWork pass, double seconds, double& rate) {
        double attention = 0;
        for (const LedgerEntry& entry : book.entries) {
            const Ledger::Section& section = book.sections[entry.section];
            if (section.unit != 1 || section.work != (int)pass || entry.kind != LedgerEntry::launch) continue;
            StepTime time = launch_time(machine, entry);
            std::string_view launcher = entry.launcher ? entry.launcher : "";
            bool of_rows = launcher == "residual_norm_forward" || launcher == "norm_backward";
            if (of_rows && run.rows_on_all_ranks) seconds += (o.tp - 1) * time.streams;
            attention += time.attention;
            if (launcher.starts_with("attention_"))
                seconds -= time.streams;  // those programs do not run these
        }
        rate *= attention / seconds;
    };
    take(PipelineWork::forward, forward, machine.attention_forward);
    take(PipelineWork::backward, backward, machine.attention_backward);
    return machine;
}

// Predicts the seconds of a step of the run.
inline double predicted_seconds(const PublishedRun& run, const Publication& publication,
                                const Machine& machine, double score_bytes = bytes_of_score) {
    const PlanTask task = plan_task(run.line, machine);
    Planner planner(task);
    Cut given = given_cut(planner, run.line);
    std::vector<Cut> cuts = {given};
    if (run.best_of_micro_batches) {
        cuts.clear();
        for (int micro_batch : {1, 2, 4, 8}) {
            for (int chunks = 1; chunks == 1 || (given.pp > 1 && chunks <= 8); chunks++) {
                Cut cut = given;
                cut.micro_batch = micro_batch, cut.pp_chunks = chunks;
                cut.pp_schedule = chunks > 1 ? PipelineSchedule::interleaved : PipelineSchedule::one_f_one_b;
                bool even = run.line.options.layers % (cut.pp * chunks) == 0;
                if (even && planner.is_possible(cut)) cuts.push_back(cut);
            }
        }
    }
    double best = HUGE_VAL;
    for (const Cut& cut : cuts) {
        PlanTask slower = task;
        slower.options = planner.options_of(cut);
        slower.machine = machine_of_program(machine, slower.options, publication, run, score_bytes);
        Planner of_program(slower);
        SimulatedStep step = of_program.simulated(cut, {true, true, false});
        // Gradients are summed after all micro-batches.
        double gradients = 4.0 * ((double)of_program.parameters(cut).unit_size(0) +
                                  ceil_div(run.line.options.layers, cut.pp) *
                                      (double)of_program.parameters(cut).unit_size(1));
        best =
            std::min(best, step.seconds +
                               sum_seconds(machine, {.stride = cut.tp, .ranks = cut.dp * cut.cp}, gradients));
    }
    return best;
}

// The logarithm of prediction over published value, less the error that reading a plot may explain.
inline double log_error(const PublishedRun& run, double predicted) {
    double error = std::log(predicted / run.seconds), reading = std::log1p(run.read_within);
    return std::copysign(std::max(0.0, std::abs(error) - reading), error);
}
