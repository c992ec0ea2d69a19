/*
What is asked of the planner (comm/plan_search.h), and what it answers with: a way to cut a run over devices,
and the parts of a step's time.
*/
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/cards.h"           // Machine
#include "comm/memory.h"             // MemoryClass
#include "comm/mesh_shape.h"         // AxisSet, PerAxis
#include "comm/pipeline_schedule.h"  // PipelineSchedule
#include "comm/zero_arrays.h"        // Overlap
#include "data/options/options.h"    // Options, Exposed
#include "kernels/ledger.h"          // GroupCall

// A group of ranks whose numbers are `stride` apart.
struct RankGroup {
    int ranks = 1, stride = 1;

    // Groups side by side fill the places of nodes one behind another, and where these do not divide, some
    // groups begin within a node and end within another: the fewest ranks that any of them has in a node, and
    // the most nodes that any is in.
    int in_node(const Machine& machine) const {
        int places = places_of(machine), fewest = std::min(places, ranks);
        for (int begin = 0; begin < places; begin += std::gcd(ranks, places)) {
            int first = std::min(places - begin, ranks), last = (ranks - first) % places;
            fewest = std::min({fewest, first, last > 0 ? last : places});
        }
        return fewest;
    }
    int nodes(const Machine& machine) const {
        int places = places_of(machine), aligned = std::gcd(ranks, places);
        return 1 + ceil_div(ranks - aligned, places);
    }
    bool crosses_nodes(const Machine& machine) const { return ranks > 1 && nodes(machine) > 1; }

private:
    int places_of(const Machine& machine) const { return std::max(machine.node / stride, 1); }
};

// Those that differ along these axes, which follow each other.
inline RankGroup group_along(AxisSet axes, const PerAxis& sizes) {
    RankGroup group = {size_along(axes, sizes), 1};
    for (Axis axis : every_axis) {
        if (axes.has(axis)) break;
        group.stride *= sizes[axis];
    }
    return group;
}

// Those options with the cut of a run of one rank, which each way to cut it begins with.
inline Cut on_one_rank(Cut cut) {
    cut.tp = cut.pp = cut.dp = cut.micro_batch = cut.pp_chunks = cut.shard_group = cut.tp_overlap = 1;
    cut.pp_schedule = PipelineSchedule::one_f_one_b, cut.zero = 0, cut.recompute = Recompute::none;
    return cut;
}

struct PlanTask {
    Options options;  // complete but for the layout
    Machine machine;
    int devices;
    // The layout's options that hold; the others are searched for.
    bool keeps_tp = false, keeps_pp = false, keeps_schedule = false, keeps_chunks = false, keeps_zero = false,
         keeps_shard = false, keeps_micro_batch = false, keeps_recompute = false;
    Exposed exposed = Exposed::none;

    Overlap overlap() const {
        Overlap overlap = options.overlap;
        if (exposed == Exposed::tensor) overlap.tensor = false;
        if (exposed == Exposed::pipeline) overlap.pipeline = false;
        if (exposed == Exposed::data) overlap.data = false;
        return overlap;
    }
};

// The time of a step in parts, in seconds: those of work are of the stage that has most to do.
struct StepBreakdown {
    double products = 0, attention = 0, other_kernels = 0;  // seconds in the micro-batches
    double optimizer = 0;
    double bubble = 0;                          // the stages wait for each other
    double tensor = 0, pipeline = 0, data = 0;  // without these messages the step would be so much shorter
    double together = 0;                        // and without all of them, by so much more
};

// A message that the ranks of a group send each other again and again.
struct PlannedMessage {
    GroupCall call;
    double seconds;  // each time
};

struct PlannedStep {
    Cut cut;
    double seconds = 0;
    std::vector<MemoryClass> memory = {};  // for the stage that takes most
};
