/*
What a step of a run is expected to take before it has made one: what the plan command says of the run's own
layout (comm/planner.h), on the machine of --machine or the cards that are here.
*/
#pragma once

#include <string>

#include "comm/machine_file.h"  // find_machine
#include "comm/planner.h"       // Planner
#include "comm/world.h"         // World

// The cut of a run whose layout is complete.
inline PlannedCut cut_of(const Options& o) {
    return {o.tp,        o.pp,   o.dp,          o.micro_batch, o.pp_schedule,
            o.pp_chunks, o.zero, o.shard_group, o.recompute,   o.tp_overlap};
}

// The machine that the run names, or the cards that are here, as many in a node as there are ranks. Its flops
// are 0 where neither is known.
inline Machine expected_machine(const Options& o, const World& world) {
    if (!o.machine.empty()) return find_machine(o.machine);
    Machine machine = {};
    if (const Card* card = has_own_memory ? find_card(device_properties().name) : nullptr) {
        machine = machine_of(*card);
        machine.node = world.local_size();
    }
    return machine;
}

// The planner knows such runs.
inline bool is_expected(const Options& o) {
    bool knows_fp8 = o.matmul_dtype != MatmulDtype::fp8 || o.tp * o.pp == 1;
    return o.optimizer == OptimizerKind::adamw && o.offload == Offload::none && knows_fp8 &&
           o.batch_ramp.empty() && o.throttle_link == 0;
}

// For all ranks: seconds of a step, on the first rank; 0 where too little is known. recompute: what the run
// does.
inline double expected_step(const Options& o, Recompute recompute, const World& world) {
    double seconds = 0;
    world.on_all_ranks([&] {
        if (!world.is_root()) return;
        Machine machine = expected_machine(o, world);
        if (machine.flops == 0 || !is_expected(o)) return;
        if ((size_t)machine.number_bytes != sizeof(floatX))
            fail("--machine %s: of programs with numbers of %d bytes, and this one has %zu; give another",
                 printable(o.machine).c_str(), machine.number_bytes, sizeof(floatX));
        PlanTask task = {.options = o, .machine = machine, .devices = world.size()};
        PlannedCut cut = cut_of(o);
        cut.recompute = recompute;
        seconds = Planner(task).simulated(cut, {}).seconds;
    });
    return seconds;
}
