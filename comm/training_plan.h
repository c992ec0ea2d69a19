/*
What a training run is to be, when nothing speaks against it any more.

Everything that can be refused is refused here, on all ranks alike, before the run directory is made, an
earlier run in it is cleared away, and the device's memory is taken: a build that cannot do what is asked,
token files of another vocabulary, a model that does not fit, a folder that is in use.
*/
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/plan_choice.h"               // expected_step
#include "comm/memory_plan.h"               // TrainingMemory, fit_training
#include "comm/save_clock.h"                // SaveClock
#include "comm/run_checkpoints.h"           // RunCheckpoints
#include "comm/run_device.h"                // check_build, check_tuning
#include "comm/batches.h"                   // open_token_files
#include "comm/world.h"                     // World
#include "data/commands/multiple_choice.h"  // ChoiceExample
#include "data/launch/command_line.h"       // TrainingLine
#include "data/options/named_lists.h"       // named_lists
#include "data/run/run_log.h"               // RunLog
#include "data/run/run_report.h"            // start_record
#include "data/run/step_log.h"              // StepLog
#include "data/tokenizer/tokenizer.h"       // Tokenizer
#include "data/tokens/data_notes.h"         // data_notes
#include "data/tokens/token_loader.h"       // TokenLoader
#include "data/tokens/validation_set.h"     // ValidationSet

struct TrainingPlan {
    std::unique_ptr<TokenLoader> train_data;
    std::vector<std::unique_ptr<TokenLoader>> val_data;
    std::vector<ValidationSet> validation;   // one for each of val_data
    std::vector<ChoiceExample> questions;    // those of --choices
    std::unique_ptr<Tokenizer> tokenizer;    // or null
    std::vector<std::string> notes;          // for the header
    std::unique_ptr<TrainingMemory> memory;  // includes the workload and the layout
    double expected_seconds = 0;             // time of a step; 0: not known
    std::unique_ptr<RunLog> log;             // null but on the first rank
};

// For all ranks: refuses what can be refused before the run directory is made and memory is taken.
inline TrainingPlan check_training(const TrainingLine& line, const World& world) {
    const Options& o = line.options;
    TrainingPlan plan;
    plan.notes = line.notes;
    int T = o.sequence_length;
    world.on_all_ranks([&] { check_build(o); });
    if (std::string warning = attention_warning(o); !warning.empty()) plan.notes.push_back(warning);
    // Tokens of another vocabulary are noticed before an earlier run is cleared away.
    plan.train_data = open_token_files(world, o.train_data, o.vocab_size, T, SampleOrder::shuffled, o.seed);
    std::vector<NamedList> sets = named_lists("--val-data", o.val_data);
    for (const NamedList& set : sets)
        plan.val_data.push_back(open_token_files(world, set.list, o.vocab_size, T, SampleOrder::sequential));
    world.on_all_ranks([&] {
        plan.tokenizer = Tokenizer::load_if_any(o.tokenizer);
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

// For all ranks: opens the log of a run that starts, or resumes after `step`, with a record of how it was
// started and what differs from its last start; and writes the tokenizer beside it.
inline void begin_log(const TrainingLine& line, const World& world, const TrainingPlan& plan,
                      const RunCheckpoints& checkpoints, StepLog& progress, int step) {
    const Options& o = line.options;
    world.on_all_ranks([&] {
        if (!plan.log) return;
        if (line.folder != RunFolder::replaced)
            check_space(checkpoints_folder(o.run_dir), checkpoints.bytes());
        std::vector<std::string> changes = line.notes;
        std::string communication = communication_libraries();
        nlohmann::json before = step > 0 ? plan.log->last_start() : nlohmann::json();
        std::vector<std::string> found = plan.log->begin(options_to_json(o), step);
        found.push_back(world.size() > 1 ? communication_note(before, communication) : "");
        found.push_back(validation_note(before, plan.validation));
        found.push_back(checkpoints.space_note(o.steps - step));
        for (const std::string& note : found) {
            if (note.empty()) continue;
            screen.warn(note, "             ");
            changes.push_back(note);
        }
        std::string origin = line.origin ? line.origin->checkpoint : "";
        nlohmann::ordered_json how =
            start_record(o, world.host(), world.size(), device_text(o), communication, origin, changes);
        how.update(plan.memory->plan.record());
        if (!plan.validation.empty()) how["validation"] = record_of(plan.validation);
        progress.start(step, how);
        if (plan.tokenizer && !plan.tokenizer->file().empty())
            plan.tokenizer->write(tokenizer_path(o.run_dir));
        else if (line.folder != RunFolder::continued)
            unlink(tokenizer_path(o.run_dir).c_str());
    });
}
