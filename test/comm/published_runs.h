/*
Step times that others published (test/golden/published_runs.json), and what the planner predicts for them.
Each row is a command line of `train_gpt plan`. What the programs of a publication did otherwise than this one
is told by three words:

    scores_in_memory        attention writes its scores and reads them again: kernels of 2021 and 2022; a row
                            that keeps all activations makes them twice ("selective" recomputation)
    rows_on_all_ranks       every tensor rank has all rows between its matrices: no sequence parallelism
    best_of_micro_batches   micro-batch and chunks of the pipeline are not told, but the best were taken

A row that cannot be predicted to 11% has `within`, how well it is. With 16 stages and 32 micro-batches, the
plot of one has 111 TFLOP/s. With 128 micro-batches the same layout has 162, of which the formula of the
bubble leaves 123 at 32; its neighbours with 8 and 32 stages are as that formula says.

All of them sent gradients behind the last micro-batch. A number that was read off a plot has `read_within`,
the part by which the reading may be wrong.
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
    std::vector<std::string> left_out;  // rows of it that cannot be planned, and why
};

struct PublishedRuns {
    std::vector<Publication> publications;
    std::vector<PublishedRun> runs;
};

inline PublishedRuns published_runs(const std::string& path = "test/golden/published_runs.json") {
    PublishedRuns all;
    nlohmann::json file = parse_json(read_whole(path, 1 << 20, "larger than this file; restore it"), path);
    for (auto& publication : file) {
        all.publications.push_back({publication["name"], publication["machine"],
                                    publication["scores_in_memory"],
                                    publication.value("left_out", std::vector<std::string>())});
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

// Bytes that move for each score of a head in the forward pass of attention with scores in memory: it is
// written by the first product, read and written by softmax and by dropout, which keeps a mask, and read by
// the second product. The backward pass moves 1.3 times as many.
constexpr double bytes_of_score = 16.3;  // fitted: 13 are counted
constexpr double backward_bytes = 1.3;

// Thread blocks that hold multiprocessors for each link between stages: fitted.
constexpr int blocks_of_their_links = 4;

// The machine as it seems to a program with these ways: what they take in a layer is told as the time of
// attention, which each layer has once in every pass over it.
inline Machine machine_of_program(Machine machine, const Options& o, const Publication& publication,
                                  const PublishedRun& run, double score_bytes) {
    if (o.pp > 1) machine = machine_without(machine, 2 * (blocks_of_their_links - blocks_of_links));
    if (!publication.scores_in_memory) return machine;
    // Products are made of all scores; passes count the half that is not masked.
    double scores = (double)o.micro_batch * o.heads / o.tp * o.sequence_length * o.sequence_length,
           product = 2 * o.head_size / machine.gemm_flops, move = score_bytes / machine.memory_bandwidth;
    double forward = scores * (2 * product + move),
           backward =
               scores * (4 * product + backward_bytes * move) + (o.recompute == Recompute::none) * forward;
    Workload w = training_workload(o, Recompute::none, (size_t)machine.element_bytes);
    ModelConfig two = o;  // layers: no pass over the first is the head's
    two.layers = 2;
    Ledger book(machine.ledger_card(), w.T, o.vocab_size);
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
                seconds -= time.streams;  // which those programs do not run
        }
        rate *= attention / seconds;
    };
    take(PipelineWork::forward, forward, machine.attention_forward);
    take(PipelineWork::backward, backward, machine.attention_backward);
    return machine;
}

// Seconds of a step of the run.
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
        // Gradients are summed behind all micro-batches.
        double gradients = 4.0 * ((double)of_program.parameters(cut).unit_size(0) +
                                  ceil_div(run.line.options.layers, cut.pp) *
                                      (double)of_program.parameters(cut).unit_size(1));
        best = std::min(best,
                        step.seconds + sum_seconds(machine, {.stride = cut.tp, .ranks = cut.dp}, gradients));
    }
    return best;
}

// The logarithm of a prediction by what was published, as far as the reading of a plot does not explain it.
inline double log_error(const PublishedRun& run, double predicted) {
    double error = std::log(predicted / run.seconds), reading = std::log1p(run.read_within);
    return std::copysign(std::max(0.0, std::abs(error) - reading), error);
}
