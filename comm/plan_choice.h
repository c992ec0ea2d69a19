/*
The interface of the planner (comm/plan_search.h): predicts how long a step of a run takes, and chooses the
layout with the shortest step, on the machine of --machine or the cards that are here. Outside of the planner,
only the plan command includes its other files.
*/
#pragma once

#include <algorithm>
#include <string>

#include "comm/machine.h"           // find_machine
#include "comm/plan_search.h"       // Planner
#include "comm/plan_times.h"        // record_steps
#include "comm/settings.h"          // make_optimizer, zero_settings
#include "comm/world.h"             // World
#include "data/launch/resume.h"     // GivenOptions, is_given
#include "data/options/schedule.h"  // tokens_of_step
#include "data/run/meter.h"         // flops_per_token

// Returns the machine that the run names, or else one with this device's card, and nodes as large as the
// largest number of ranks on a host. Its flops are 0 if neither is known.
inline Machine expected_machine(const Options& o, const World& world) {
    if (!o.machine.empty()) return find_machine(o.machine);
    Machine machine = {};
    if (const Card* card = card_here()) {
        machine = machine_of(*card);
        machine.node = world.most_on_a_host();
    }
    return machine;
}

// Returns whether the planner can model the run: its steps are all alike, and no link is slowed down.
inline bool is_expected(const Options& o) {
    return o.batch_ramp.empty() && o.throttle_link == 0;
}

// Fails if a program for this machine does not support the options' number formats or matrix products.
inline void check_plan(const Options& o, const Machine& machine) {
    check_precision(o, (size_t)machine.element_bytes);
    bool fp8 = o.matmul_dtype == MatmulDtype::fp8;
    if (fp8 && !multiplies_fp8(machine.capability))
        fail("--matmul-dtype fp8: the machine does not multiply in fp8; give --matmul-dtype auto, or plan "
             "for an Ada or Hopper card or later");
    if (std::string reason = fp8_refusal_on_any_layout(o); fp8 && !reason.empty())
        fail("--matmul-dtype fp8: %s, or give --matmul-dtype auto", reason.c_str());
    if (o.fp8_fast_gradients && !fp8)
        fail("--fp8-fast-gradients on: needs --matmul-dtype fp8; give --fp8-fast-gradients off");
    bool bf16 = machine.element_bytes < (int)sizeof(float) || machine.bf16_products;
    MatmulDtype of_machine = bf16 ? MatmulDtype::bf16 : MatmulDtype::fp32;
    if (!fp8 && o.matmul_dtype != MatmulDtype::automatic && o.matmul_dtype != of_machine)
        fail("--matmul-dtype %s: plans assume %s products for this machine; give --matmul-dtype %s",
             name_of(o.matmul_dtype), name_of(of_machine), name_of(of_machine));
}

// The task of planning a run whose layout is not complete. Options of the layout are kept if they are given
// or are not at their defaults, as those of a checkpoint may be; for --tp and --pp, the caller decides.
inline PlanTask plan_task(const Options& o, const GivenOptions& given, const Machine& machine, int devices) {
    const Options usual;
    auto holds = [&](const char* name, bool differs) { return differs || is_given(name, given); };
    return {.options = o,
            .machine = machine,
            .devices = devices,
            .keeps_cp = holds("--cp", o.cp != usual.cp),
            .keeps_schedule = holds("--pp-schedule", o.pp_schedule != usual.pp_schedule),
            .keeps_chunks = o.pp_chunks > 0,
            .keeps_zero = holds("--zero", o.zero > 0),
            .keeps_shard = o.shard_group > 0,
            .keeps_micro_batch = holds("--micro-batch", o.micro_batch != usual.micro_batch),
            .keeps_recompute = o.recompute != Recompute::automatic};
}

// For --tp auto: chooses the fastest layout that uses all processes.
inline void choose_cut(Options& o, const GivenOptions& given, const Machine& machine, int processes) {
    if (machine.flops == 0)
        fail("--tp auto: --machine is missing, and this device is not a known card; measure it "
             "with train_gpt plan --measure, or give --tp and --pp");
    if (!is_expected(o))
        fail("--tp auto: plans do not model --batch-ramp or --throttle-link; leave them out, or give --tp "
             "and --pp");
    check_plan(o, machine);
    if (o.global_batch == 0) fail("--tp auto: --global-batch is missing; give the tokens of a step");
    if (o.global_batch % o.sequence_length)
        fail("--global-batch %lld: not a multiple of --sequence-length %d; give a multiple", o.global_batch,
             o.sequence_length);
    PlanTask task = plan_task(o, given, machine, processes);
    task.keeps_tp = o.tp > 0, task.keeps_pp = o.pp > 0;
    for (int* cut : {&task.options.tp, &task.options.pp}) *cut = std::max(*cut, 1);
    constexpr int enough = 100;  // layouts to consider; several, because some leave processes idle
    std::vector<PlannedStep> best = Planner(task).best(enough);
    auto whole = [&](const PlannedStep& step) {
        return step.cut.ranks() == processes && (o.dp == 0 || step.cut.dp == o.dp);
    };
    auto found = std::ranges::find_if(best, whole);
    if (found == best.end())
        fail("--tp auto: no layout of all %d processes fits the model, the batch and the memory of %s; give "
             "--tp and --pp, or start a different number of processes",
             processes, size_text((size_t)machine.memory).c_str());
    static_cast<Cut&>(o) = found->cut;
}

// Returns the shard group with the shortest step among those that fit, for a layout that is otherwise
// complete. Larger groups save memory, but their rings wait longer. Returns all data ranks if the planner
// cannot model the run or nothing fits.
inline int chosen_shard_group(const Options& o, const Machine& machine) {
    if (o.dp == 1 || machine.flops == 0 || !is_expected(o)) return o.dp;
    if ((size_t)machine.element_bytes != sizeof(floatX)) return o.dp;
    PlanTask task = plan_task(o, {}, machine, (int)o.ranks());
    task.keeps_tp = task.keeps_cp = task.keeps_pp = task.keeps_schedule = task.keeps_chunks = true;
    task.keeps_zero = task.keeps_micro_batch = true, task.keeps_shard = false;
    constexpr int enough = 100;  // layouts to consider; they differ in the number of data ranks
    for (const PlannedStep& step : Planner(task).best(enough))
        if (step.cut.dp == o.dp) return step.cut.shard_group;
    return o.dp;
}

// The choices that complete a run's layout, the same on all ranks. given: on the command line.
inline LayoutChoices layout_choices(const World& world, const GivenOptions& given) {
    return {[&](Options& o, int processes) { choose_cut(o, given, expected_machine(o, world), processes); },
            [&world](const Options& o) { return chosen_shard_group(o, expected_machine(o, world)); }};
}

// For all ranks: on the first rank, returns the expected seconds of a step, or 0 if too little is known, such
// as if the machine was measured with other products.
// recompute: what the run recomputes.
inline double expected_step(const Options& o, Recompute recompute, const World& world) {
    double seconds = 0;
    world.on_all_ranks([&] {
        if (!world.is_root()) return;
        Machine machine = expected_machine(o, world);
        if (machine.flops == 0 || !is_expected(o)) return;
        if (machine.measured && machine.bf16_products != rounds_products_to_bf16()) return;
        if ((size_t)machine.element_bytes != sizeof(floatX))
            fail("--machine %s: for %d-byte numbers, but this program has %zu-byte ones; name another one",
                 printable(o.machine).c_str(), machine.element_bytes, sizeof(floatX));
        PlanTask task = {.options = o, .machine = machine, .devices = world.size()};
        Cut cut = o;
        cut.recompute = recompute;
        Planner planner(task);
        if (planner.can_simulate(cut)) seconds = planner.simulated(cut, {}).seconds;
    });
    return seconds;
}

// Returns the prediction for a run on one device; empty if too little is known about the device or such a
// step: only bf16 steps with Hopper's attention kernels and an elementwise optimizer on the device are
// modeled. peak: the FLOP/s that MFU is relative to.
inline std::string prediction_text(const Machine& machine, double peak, bool takes_wgmma, const Options& o,
                                   const Workload& workload) {
    bool known_machine = machine.gemm_flops > 0 && machine.memory_bandwidth > 0 && peak > 0 && takes_wgmma;
    bool known_step = sizeof(floatX) == 2 && o.optimizer != OptimizerKind::muon && o.offload == Offload::none;
    if (!known_machine || !known_step) return "";
    int micro_batches = micro_batches_of_rank(o, 0), steps = 0;
    Ledger book(machine.ledger_card(), workload.sequence(), o.vocab_size);
    record_steps(o, workload, zero_settings(o), make_optimizer(o, 0),
                 {.pipeline = {PipelineSchedule::one_f_one_b, 1, micro_batches}}, {}, {micro_batches});
    StepTime time;
    book.each([&](const LedgerEntry& entry) {
        steps += entry.kind == LedgerEntry::step;
        if (steps == 1 && entry.kind == LedgerEntry::launch) time += launch_time(machine, entry);
    });
    double rate = flops_per_token(o, o.sequence_length, false) * tokens_of_step(o, 0) / time.all();
    return text(
        "%.3g ms a step and %.1f%% MFU (products %.0f%%, attention %.0f%%, memory %.0f%%), from the rates "
        "expected of such cards; none of it is measured",
        1e3 * time.all(), 100 * rate / peak, 100 * time.products / time.all(),
        100 * time.attention / time.all(), 100 * time.streams / time.all());
}
