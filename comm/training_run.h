/*
A training run except for its steps: its components, the work between two steps (validation, questions,
samples, checks of devices, checkpoints), and when it ends. train_gpt.cu has the steps and the loop.
*/
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include "comm/batches.h"                   // DeviceBatches
#include "comm/fault_checks.h"              // FaultChecks: devices that compute wrongly
#include "comm/inference.h"                 // ModelPasses, Generator, BatchLosses
#include "comm/memory_plan.h"               // TrainingMemory
#include "comm/recorder.h"                  // recorder, HostSpan
#include "comm/run_checkpoints.h"           // RunCheckpoints: saves and resumes a run
#include "comm/run_device.h"                // GemmRate, tune_products
#include "comm/settings.h"                  // resets_positions
#include "comm/spikes.h"                    // SpikeGuard: skipped steps
#include "comm/step_statistics.h"           // StatisticsOnDevice, StepResult
#include "comm/timings.h"                   // Timings: when each rank did what
#include "comm/whole_tensors.h"             // initialize, raise_not_finite, trust_ratios
#include "comm/zero_checkpoint.h"           // ZeroCheckpoint: saves and loads ZeroState
#include "data/base/stop_signals.h"         // stop_requested
#include "data/commands/multiple_choice.h"  // ChoiceExample
#include "data/launch/command_line.h"       // TrainingLine
#include "data/run/run_log.h"               // RunLog
#include "data/run/run_report.h"            // start_record
#include "data/run/status_line.h"           // the last line of the screen
#include "data/run/step_log.h"              // StepLog: shows and keeps a record of each step
#include "data/run/time_limit.h"            // TimeLimit: runs that end by the clock
#include "data/tokenizer/tokenizer.h"       // Tokenizer
#include "data/tokens/token_loader.h"       // TokenLoader
#include "data/tokens/validation_set.h"     // ValidationSet

// A run that has been checked and may begin (comm/training_plan.h).
struct TrainingPlan {
    std::unique_ptr<TokenLoader> train_data;
    std::vector<std::unique_ptr<TokenLoader>> val_data;
    std::vector<ValidationSet> validation;   // one for each of val_data
    std::vector<ChoiceExample> questions;    // those of --choices
    std::unique_ptr<Tokenizer> tokenizer;    // or null
    std::vector<std::string> notes;          // for the header
    std::unique_ptr<TrainingMemory> memory;  // includes the workload and the layout
    double expected_seconds = 0;             // time of a step; 0: unknown
    std::unique_ptr<RunLog> log;             // null except on the first rank
};

// The model of a run, with the operations that the run needs in addition to steps.
struct ModelInTraining : ModelPasses {
    ZeroState& state;
    const Stage& stage;

    ModelInTraining(const ModelOnRanks& model, ZeroState& state, const Stage& stage)
        : ModelPasses(model), state(state), stage(stage) {}
    // Returns the mean loss over the first `samples` samples, which are divided among the data ranks.
    virtual float mean_loss(DeviceBatches& batches, uint64_t samples, const NotedError& error) = 0;
    // Computes the gradients of a step's micro-batches from sample `first` on. Only the work matters; the
    // gradients are not used.
    virtual void try_gradients(DeviceBatches& batches, uint64_t first, int micro_batches) = 0;
    // Computes the gradients of one micro-batch on each data rank, outside of any step.
    virtual void gradients_beside(DeviceBatches& batches, uint64_t first) = 0;
    virtual void weights_changed() = 0;
    // The tables, as a contributor to checkpoints; null if there are none.
    virtual Stateful* tables() = 0;
    // Returns all contributors to its checkpoints. weights: the contributor for the ZeroState
    Contributors contributors(Stateful& weights) {
        return tables() ? Contributors{&weights, tables()} : Contributors{&weights};
    }
    // Initializes the tables from a seed. folded: see NgramHash
    virtual void begin_tables(uint64_t seed, std::vector<uint64_t> folded) = 0;
};

// Work between two steps.
struct Interlude {
    const char* name;  // on the status line
    int every;         // steps; 0: never
    std::function<void()> work;
    bool counted = false;  // the status line counts its micro-batches
    double tokens = 0;     // its time is first estimated as that of a step with this many tokens
    TimeTaken time = {};
};

// Each member is built from those before it.
struct TrainingRun {
    const TrainingLine& line;
    const Options& o;
    const World& world;
    const TrainingPlan& plan;
    ModelInTraining& model;
    GemmRate gemm{model.stream};
    Meter meter{o, o.sequence_length, peak_rate(o), gemm.rate, world.size()};
    NotedError error;  // this rank's; raised when all ranks can learn of it
    StatusLine status{screen, o.steps, [] { return recorder.progress(); }};
    StepLog progress{o, meter, plan.log.get()};
    TimeLimit limit{o.max_time};
    ZeroCheckpoint saved_state{model.state, [&](const MeshPosition& position) {
                                   return parameter_layout(o, plan.memory->layout, position, true);
                               }};
    RunCheckpoints checkpoints{
        model.contributors(saved_state), model.state.settings().staging, o, world,
        // Syncs the log, so that it contains every step up to the checkpoint even if the power fails.
        [&] { plan.log ? progress.warn(plan.log->sync()) : void(); },
        [&](const SaveReport& report) {
            if (report.error.empty()) limit.save.add(report.stalled + report.seconds);
            if (!report.error.empty()) at.best = checkpoints.best();
            progress.checkpoint(report);
        }};
    RunPosition at = {};  // how far the run has progressed
    SpikeGuard spikes{o, world, checkpoints, progress, plan.log.get()};
    FaultChecks checks{o, model.state, world, checkpoints};
    std::unique_ptr<Timings> timings;
    std::unique_ptr<DeviceBatches> batches;
    std::vector<std::unique_ptr<DeviceBatches>> val_batches;  // one for each validation set
    std::array<Interlude, 3> interludes = {
        {{"validation", plan.val_data.empty() ? 0 : o.val_every, [&] { validate(); }, true,
          validation_tokens()},
         {"choices", plan.questions.empty() ? 0 : o.choices_every, [&] { answer_questions(); }},
         {"sample", o.sample_every, [&] { show_sample(); }}}};
    bool stopping = false, saving = false;  // all ranks agreed on these in the last step
    double started = 0;                     // when the current step began
    uint64_t sent_before = 0;               // bytes sent by then
    bool is_last = false;                   // the current step is the last; only the first rank knows

    TrainingRun(const TrainingLine& line, const World& world, const TrainingPlan& plan,
                ModelInTraining& model)
        : line(line), o(line.options), world(world), plan(plan), model(model) {}

    // ---- before the first step (for all ranks, as is everything below)

    void begin() {
        progress.expect(plan.expected_seconds);
        take_weights();
        begin_log();
        batches = make_batches(*plan.train_data);
        for (const auto& files : plan.val_data) val_batches.push_back(make_batches(*files));
        tune();
        timings = std::make_unique<Timings>(o, world, model.mesh, model.stage, model.stream, progress);
        step_to_stop_after = world.size() > 1 ? at.step + 1 : at.step;
        stop_on_signals(screen.descriptor_of_signals(), screen.before_signal_line());
        gemm.restart_clock();
    }

    // Resumes the run, or sets its initial weights: another run's, or random ones.
    void take_weights() {
        if (line.origin && !line.weights_only)
            at = checkpoints.resume(*line.origin);
        else if (line.origin)
            checkpoints.take_weights(*line.origin);
        else
            begin_weights();
    }

    void begin_weights() {
        initialize(model.state, o.seed);
        if (model.tables())
            model.begin_tables((uint64_t)o.seed, folded_tokens(plan.tokenizer.get(), o.vocab_size));
    }

    // Opens the log of a run that starts or resumes, with a record of its options, its machine and the
    // changes since the last start; and writes the tokenizer beside it.
    void begin_log() {
        world.on_all_ranks([&] {
            if (!plan.log) return;
            if (line.folder != RunFolder::replaced)
                check_space(checkpoints_folder(o.run_dir), checkpoints.bytes());
            std::vector<std::string> changes = line.notes;
            std::string communication = communication_libraries();
            nlohmann::json before = at.step > 0 ? plan.log->last_start() : nlohmann::json();
            std::vector<std::string> found = plan.log->begin(options_to_json(o), at.step);
            found.push_back(world.size() > 1 ? communication_note(before, communication) : "");
            found.push_back(validation_note(before, plan.validation));
            found.push_back(checkpoints.space_note(o.steps - at.step));
            found.push_back(tables_note());
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
            progress.start(at.step, how);
            if (plan.tokenizer && !plan.tokenizer->file().empty())
                plan.tokenizer->write(tokenizer_path(o.run_dir));
            else if (line.folder != RunFolder::continued)
                unlink(tokenizer_path(o.run_dir).c_str());
        });
    }

    // Warns if tables may outgrow their disk. The disk needs room for all rows that the remaining steps can
    // touch: in the files of this host's ranks and, if these files are in the run directory, also in two
    // checkpoints, because a new one is written before the old one is removed.
    std::string tables_note() const {
        const ZeroSettings& settings = model.state.settings();
        TableSizes sizes(o, o.micro_batch, o.own_tokens(), model.stage, settings.rows_dtype());
        if (sizes.tables() == 0 || o.ngram_place != TablePlace::disk) return "";
        const uint64_t reached =
            std::min<uint64_t>(sizes.own_rows(), sizes.asked() * (size_t)(o.steps - at.step));
        const std::string folder = settings.table_dir;
        const bool beside = o.ngram_dir.empty();  // the checkpoints are on the same disk
        // Undo logs may be as large as the files.
        double files = 2 * sizes.file_bytes(reached) * world.local_size(),
               saved = beside ? 2 * (double)(sizes.checkpoint_bytes(reached) * sizes.owners) : 0,
               room = (double)free_space(folder + "/");
        if (files + saved <= room) return "";
        return text(
            "tables on disk may take %sB by step %d%s, but only %sB are free in %s; free some space or "
            "choose another --ngram-dir",
            human(files).c_str(), o.steps, beside ? (", and checkpoints " + human(saved) + "B").c_str() : "",
            human(room).c_str(), folder.c_str());
    }

    std::unique_ptr<DeviceBatches> make_batches(const TokenLoader& loader) {
        BatchShape shape = {.B = o.micro_batch,
                            .T = o.sequence_length,
                            .document_end = o.document_end,
                            .reset_positions = resets_positions(o),
                            .contexts = o.cp,
                            .context = model.mesh.position[Axis::context]};
        uint64_t stride = (uint64_t)o.micro_batch * o.dp;  // the data ranks take turns
        auto source = make_batch_source(world, o.data_reader == DataReader::node, loader, shape, stride);
        return std::make_unique<DeviceBatches>(std::move(source), model.stream, model.mesh, error,
                                               model.slots);
    }

    // Times the matrix products of some micro-batches, and chooses the fastest algorithm for each. A rank's
    // first micro-batch, its last one and the others have different kinds of products. The number of
    // micro-batches is that of the last step, up to a limit, because a batch size that grows may reach all
    // kinds only at the end.
    void tune() {
        auto first_micro_batches = [&] {
            int some = std::min(micro_batches_of_step(o, o.steps - 1), o.dp * std::max(o.pp, 3));
            model.try_gradients(*batches, at.samples, some);
            model.state.synchronize();
        };
        for (const std::string& note :
             tune_products(world, o, line.origin ? line.origin->run_dir : "", model.mesh.data_rank() == 0,
                           model.stream, first_micro_batches))
            print("products     %s\n", note.c_str());
    }

    // ---- due work

    double validation_tokens() const {
        auto tokens = plan.validation | std::views::transform(&ValidationSet::tokens);
        return std::accumulate(tokens.begin(), tokens.end(), 0.0);
    }

    // Returns whether the step that begins now must be the last under --max-time, because one more would
    // leave no time to save. Only the first rank decides, and informs the others.
    bool time_is_over() const {
        if (!world.is_root() || stop_requested) return false;
        // assumed speed of saving, in bytes/s, until a checkpoint has been saved
        const double assumed_rate = 5e8 * ceil_div(world.size(), world.most_on_a_host());
        int step = at.step + 1,
            saves = 1 + checkpoints.under_way() + (checkpoints.due(step) || o.keep_best > 0);
        long long tokens = tokens_of_step(o, at.step) + (step < o.steps ? tokens_of_step(o, step) : 0);
        double token = limit.token.seconds();
        double seconds = token * (double)tokens;
        seconds += saves * limit.save.seconds((double)checkpoints.bytes() / assumed_rate);
        for (const Interlude& one : interludes) {
            if (falls_on(one, step)) seconds += one.time.seconds(token * one.tokens);
        }
        return limit.is_over(seconds);
    }

    bool asked_to_stop() const { return stopping || (world.size() == 1 && stop_requested); }

    bool falls_on(const Interlude& one, int step) const {
        return one.every > 0 && (step == o.steps || step % one.every == 0);
    }
    // A run that is asked to stop may be killed soon, so it saves its state before anything else.
    bool due(const Interlude& one) const { return !asked_to_stop() && falls_on(one, at.step); }
    bool measurement_due() const { return world.is_root() && gemm.measurement_due(); }

    bool next_is_a_step() const {
        return at.step < o.steps && !asked_to_stop() && !measurement_due() &&
               std::ranges::none_of(interludes, [&](const Interlude& one) { return due(one); });
    }

    // ---- between steps

    // Does the work that is due before the next step. Returns false if there is no next step.
    bool goes_on() {
        for (Interlude& one : interludes) {
            if (!due(one)) continue;
            NotedLaunchErrors noted(error);
            status.begin_work(one.name, at.step, one.counted);
            double start = seconds_now();
            one.work();
            one.time.add(seconds_now() - start);
        }
        check();
        if (at.step == o.steps || asked_to_stop() || (world.size() == 1 && !error.empty())) return false;
        step_to_stop_after = at.step + 1;
        if (saving) {
            HostSpan wait(Operation::save);
            checkpoints.save(at);
        }
        if (measurement_due()) {
            model.state.synchronize();
            meter.add_measurement(gemm.measure_again());
        }
        return true;
    }

    // Ends the run if a device computes wrongly.
    void check() {
        bool saves = saving || at.step == o.steps || asked_to_stop();
        checks.run(at.step, saves, [&](int data_rank) {
            NotedLaunchErrors noted(error);
            model.gradients_beside(*batches, at.samples + (uint64_t)o.micro_batch * data_rank);
        });
    }

    void validate() {
        for (size_t i = 0; i < val_batches.size(); i++) {
            const ValidationSet& set = plan.validation[i];
            float loss = model.mean_loss(*val_batches[i], set.samples, error);
            progress.validation(at.step, set.name, plain_nan(loss));
            if (o.keep_best > 0 && (o.best_set.empty() ? i == 0 : set.name == o.best_set))
                keep_best(set, loss);
        }
    }

    // An untrained model does not count among the best.
    void keep_best(const ValidationSet& set, float loss) {
        if (at.best.begin(set.name, set.content))
            progress.note("--keep-best  losses so far were measured on other tokens: the checkpoints "
                          "that were best by them are no longer kept");
        if (at.step == 0) return;
        if (BestCheckpoints(at.best).add(at.step, loss, o.keep_best)) {
            checkpoints.finish();  // if that save fails, its step is no longer among the best
            at.best.begin(set.name, set.content);
            saving = saving || !checkpoints.is_on_disk(at.step);
        }
        at.best.add(at.step, loss, o.keep_best);
    }

    void answer_questions() {
        BatchLosses losses(model, world);
        ChoiceScore score = evaluate_choices(plan.questions, o, losses, false);
        progress.evaluation(at.step, score_text(score, o.choices), with_time(score_record(score, o.choices)));
    }

    void show_sample() {
        auto generator = [&](const std::vector<std::vector<int>>& prompts) {
            return Generator(model, prompts);
        };
        note_error(error, [&] {
            progress.sample(at.step, sample_text(o, plan.tokenizer.get(), at.step, generator));
        });
    }

    // ---- around a step

    void begin_step() {
        status.set_next_checkpoint(checkpoints.next(at.step + 1));
        status.begin_step(at.step + 1);
        started = seconds_now();
        sent_before = sent_bytes();
        batches->take_imbalance();  // passes between steps do not count
        is_last = time_is_over();
        if (is_last) progress.note(text("--max-time: stopping after step %d, then saving", at.step + 1));
        timings->begin_step(at.step + 1);
    }

    // Adds this rank's error, stop request and save state to the step's statistics. So all ranks agree in
    // every step on whether one of them was asked to stop, and whether all of them have their part of the
    // checkpoint on disk. Whatever happens after the statistics are sent counts in the next step.
    void tell_ranks(StatisticsOnDevice& stats) {
        if (!error.empty()) stats.poison(model.stream);
        if (stop_requested || is_last) fill(&stats.data->stop, 1, 1, model.stream);
        if (checkpoints.is_ready()) fill(&stats.data->saved, 1, 1, model.stream);
        if (checkpoints.due(at.step + 1)) fill(&stats.data->save, 1, 1, model.stream);
        if (world.size() > 1) step_to_stop_after = std::min(at.step + 2, o.steps);
    }

    void end_step(const StepResult& result, float learning_rate) {
        if (!result.finite) {
            raise_error(world, error);
            progress.not_finite(at.step + 1, result.loss, result.gradient_norm);
            raise_not_finite(world, model.state, at.step + 1, result.loss, result.gradient_norm);
        }
        at.samples += samples_of_step(o, at.step++);
        NotedLaunchErrors noted(error);
        model.weights_changed();
        stopping = result.stop, saving = result.save;
        // The update is still running. If a step follows, its time includes the wait for the update;
        // otherwise this step's does.
        if (!next_is_a_step()) model.state.synchronize();
        uint64_t trained_on = at.samples - at.spikes.samples_passed_over();
        progress.step(at.step, trained_on * o.sequence_length, result.loss, result.gradient_norm,
                      learning_rate, seconds_now() - started, sent_bytes() - sent_before, !result.stepped,
                      result.late_rows, batches->take_imbalance());
        spikes.add_step(at, result.loss, result.gradient_norm, !result.stepped);
        status.set_seconds_left(progress.seconds_left(at.step));
        if (o.log_trust_ratios > 0 && at.step % o.log_trust_ratios == 0 && world.is_root())
            progress.trust_ratios(at.step, trust_ratios(model.state));
        limit.token.add((seconds_now() - started) / (double)tokens_of_step(o, at.step - 1));
        timings->collect(at.step, seconds_now() - started);
        status.set_slowest(timings->slowest_text());
        if (result.saved) checkpoints.finish();
        if (spikes.has_enough(at)) go_back();
    }

    // Called after too many spikes. The run is then at an earlier step, so a save that was due is dropped.
    void go_back() {
        model.state.synchronize();
        spikes.go_back(at);
        model.weights_changed();
        saving = false;
    }

    // ---- after the last step

    // Runs all steps. If an error ends them, first saves what was trained up to then.
    template <typename Steps>
    void rescue_from_errors(Steps&& steps) {
        auto to_the_end = [&] {
            steps();
            raise_error(world, error);
            model.state.synchronize();
            timings->finish();
        };
        or_abort(world, [&] { checkpoints.rescue_from_errors(at, to_the_end); });
    }

    void finish() {
        status.begin_work("saving", at.step, false);
        std::string saved = checkpoints.finish_at(at);
        status.end();
        if (asked_to_stop()) progress.stopped(at.step);
        screen.end_quiet();
        print("%s after step %d; the checkpoint is %s\n", asked_to_stop() ? "stopped as asked" : "done",
              at.step, saved.c_str());
        if (stop_requested == SIGPIPE)
            fprintf(
                stderr,
                "train_gpt: nobody reads the output any more: stopped after step %d; the checkpoint is %s\n",
                at.step, saved.c_str());
    }
};
