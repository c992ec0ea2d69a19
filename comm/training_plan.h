/*
Checks a training run before it starts.

Everything that can be refused is refused here, on all ranks alike, before the run directory is created, an
earlier run in it is removed, and device memory is allocated: options that this build does not support, token
files of another vocabulary, a model that does not fit, a folder that is in use.
*/
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "comm/batches.h"              // open_token_files
#include "comm/memory_plan.h"          // TrainingMemory, fit_training
#include "comm/plan_choice.h"          // expected_step, prediction_text
#include "comm/run_device.h"           // check_build, choose_automatic_dtype, peak_rate
#include "comm/save_clock.h"           // SaveClock
#include "comm/training_run.h"         // TrainingPlan
#include "comm/world.h"                // World
#include "data/options/named_lists.h"  // named_lists
#include "data/run/run_report.h"       // print_header
#include "data/tokens/data_notes.h"    // data_notes
#include "kernels/cards.h"             // this_machine

// For all ranks: refuses what can be refused before the run directory is created and memory is allocated.
inline TrainingPlan check_training(const TrainingLine& line, const World& world) {
    const Options& o = line.options;
    TrainingPlan plan;
    plan.notes = line.notes;
    int T = o.sequence_length;
    world.on_all_ranks([&] {
        check_build(o);
        // A run that resumes here may have begun on a GPU.
        bool stored = line.origin && line.origin->options.value("cuda_graphs", "") == name_of(CudaGraphs::on);
        if (o.cuda_graphs == CudaGraphs::on && !has_own_memory && !stored)
            fail("--cuda-graphs on: this program has no kernels for GPUs; give auto or off, or build with "
                 "DEVICE=cuda");
    });
    if (std::string note = choose_automatic_dtype(o, world); !note.empty()) plan.notes.push_back(note);
    if (std::string warning = attention_warning(o); !warning.empty()) plan.notes.push_back(warning);
    // Tokens of another vocabulary are refused before an earlier run is removed.
    plan.train_data = open_token_files(world, o.train_data, o.vocab_size, T, SampleOrder::shuffled, o.seed);
    std::vector<NamedList> sets = named_lists("--val-data", o.val_data);
    for (const NamedList& set : sets)
        plan.val_data.push_back(open_token_files(world, set.list, o.vocab_size, T, SampleOrder::sequential));
    world.on_all_ranks([&] {
        plan.tokenizer = Tokenizer::load_if_any(o.tokenizer);
        if (plan.tokenizer && line.origin && line.origin->is_published) plan.tokenizer->begin_prompts();
        for (size_t i = 0; i < sets.size(); i++) {
            ValidationSet set = validation_set(*plan.val_data[i], T, o.val_tokens);
            set.name = sets[i].name;
            if (world.is_root()) set.content = hash_of_samples(set, *plan.val_data[i]);
            plan.validation.push_back(set);
        }
        if (!world.is_root()) return;
        for (const std::string& note :
             data_notes(*plan.train_data, plan.val_data, plan.tokenizer.get(), o.document_end))
            plan.notes.push_back(note);
    });
    for (ValidationSet& set : plan.validation) set.content = world.broadcast_text(set.content);
    if (!o.choices.empty() && o.choices_every > 0)
        plan.questions = read_questions(o.choices, o, plan.tokenizer.get(), world);
    check_same_content(world, "--tokenizer", content_of(plan.tokenizer.get(), o.tokenizer));
    if (std::string saves = SaveClock(o, world.size()).summary(); !saves.empty())
        plan.notes.push_back("--save-every auto: " + saves);
    plan.memory = std::make_unique<TrainingMemory>(fit_training(o, world, plan.notes));
    plan.expected_seconds = expected_step(o, plan.memory->workload.recompute, world);
    world.on_all_ranks([&] {
        if (!world.is_root()) return;
        check_tuning(o);
        plan.log = std::make_unique<RunLog>(o.run_dir, line.folder);
    });
    if (world.on_several_hosts()) check_shared_folder(world, o.run_dir, world.local_rank() == 0);
    return plan;
}

// For all ranks: checks a run, and prints its header.
inline TrainingPlan open_training(const TrainingLine& line, const World& world) {
    if (world.is_root()) screen.open(launched_processes() > 0, line.options.quiet);
    TrainingPlan plan = check_training(line, world);
    int64_t done = line.origin && !line.weights_only ? line.origin->step : 0;
    print_header(line.options, device_text(line.options), *plan.train_data, plan.validation, done,
                 plan.notes);
    plan.memory->plan.print_lines(world.size());
    if (const Options& o = line.options; world.size() == 1) {
        std::string prediction =
            prediction_text(this_machine(), peak_rate(o), takes_wgmma_attention(o), o, plan.memory->workload);
        if (!prediction.empty()) print("prediction   %s\n", prediction.c_str());
    }
    fflush(stdout);  // the work that follows may take a long time, or wait for other ranks
    return plan;
}
