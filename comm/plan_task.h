/*
The input and the output of the planner (comm/plan_search.h): a task, a way to cut a run over devices, and the
parts of a step's time.
*/
#pragma once

#include <vector>

#include "kernels/cards.h"           // Machine
#include "comm/memory.h"             // MemoryClass
#include "comm/pipeline_schedule.h"  // PipelineSchedule
#include "comm/zero_arrays.h"        // Overlap
#include "data/options/options.h"    // Options, Exposed

// Returns the cut with the layout of a single rank, from which every candidate is derived.
inline Cut on_one_rank(Cut cut) {
    cut.tp = cut.pp = cut.dp = cut.micro_batch = cut.pp_chunks = cut.shard_group = cut.tp_overlap = 1;
    cut.pp_schedule = PipelineSchedule::one_f_one_b, cut.zero = 0, cut.recompute = Recompute::none;
    return cut;
}

struct PlanTask {
    Options options;  // complete except for the layout
    Machine machine;
    int devices;
    // The options of the layout that are fixed; the planner chooses the others.
    bool keeps_tp = false, keeps_cp = false, keeps_pp = false, keeps_schedule = false, keeps_chunks = false,
         keeps_zero = false, keeps_shard = false, keeps_micro_batch = false, keeps_recompute = false;
    Exposed exposed = Exposed::none;

    Overlap overlap() const {
        Overlap overlap = options.overlap;
        if (exposed == Exposed::tensor) overlap.tensor = false;
        if (exposed == Exposed::pipeline) overlap.pipeline = false;
        if (exposed == Exposed::data) overlap.data = false;
        return overlap;
    }
};

// The parts of a step's time, in seconds. The parts that are work are those of the stage with the most work.
struct StepBreakdown {
    double products = 0, attention = 0, other_kernels = 0;  // seconds in the micro-batches
    double optimizer = 0;
    double bubble = 0;                          // stages wait for each other
    double tensor = 0, pipeline = 0, data = 0;  // how much shorter the step would be without these messages
    double together = 0;                        // further reduction without any of the three
};

struct PlannedStep {
    Cut cut;
    double seconds = 0;
    std::vector<MemoryClass> memory = {};  // for the stage that needs most
};
