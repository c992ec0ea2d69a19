/*
Checks that options fit together, and fills in those that are left out: complete_options() for each command.
*/
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <string>
#include <string_view>

#include "data/base/error.h"
#include "data/options/cut_rules.h"
#include "data/options/named_lists.h"
#include "data/options/table.h"
#include "data/options/values.h"
#include "data/options/presets.h"

// The default run directory: runs/ followed by the name of the preset, or of the folder with the model's
// config.json. A resumed run keeps the folder's name of its start.
inline std::string default_run_dir(const std::string& model) {
    std::filesystem::path path = (std::filesystem::current_path() / model).lexically_normal();
    if (!path.has_filename() || path.filename() == "config.json") path = path.parent_path();
    if (path.extension() == ".json") path = path.stem();
    return "runs/" + one_line(find_preset(model) ? model : path.filename().string());
}

// Completes the model, and checks its tokens.
inline void complete_model(Options& options) {
    complete(static_cast<ModelConfig&>(options));
    if (options.document_end >= options.vocab_size) {
        fail("--document-end %d: not a token of a vocabulary of %d; give -1 or a smaller number",
             options.document_end, options.vocab_size);
    }
}

// O: the options of training or of a plan.
template <typename O>
void complete_sequence_length(O& options) {
    if (options.sequence_length == 0) options.sequence_length = options.context;
    if (options.sequence_length > options.context) {
        fail("--sequence-length %d: longer than the model's context of %d; lower it", options.sequence_length,
             options.context);
    }
}

inline void check_micro_batch(const Options& options) {
    if ((long long)options.micro_batch * options.sequence_length > INT32_MAX) {
        fail("--micro-batch %d: more than 2^31 tokens at once with sequences of %d tokens; lower it",
             options.micro_batch, options.sequence_length);
    }
}

// Refuses invalid lists of validation data, and options for a validation or for questions that never run.
inline void check_validation(const Options& options) {
    std::vector<NamedList> sets = named_lists("--val-data", options.val_data);
    if (options.keep_best > 0 && (sets.empty() || options.val_every == 0))
        fail("--keep-best %d: the best are chosen by validation, but there is none; give --val-data and "
             "--val-every, or leave it out",
             options.keep_best);
    if (options.choices_every == 0 && !options.choices.empty())
        fail("--choices %s: never evaluated with --choices-every 0; leave one of them out",
             printable(options.choices).c_str());
    std::vector<std::string> names;
    for (const NamedList& set : sets)
        if (!set.name.empty()) names.push_back(set.name);
    if (options.keep_best == 0 || options.best_set.empty()) return;
    const std::string best = printable(options.best_set);
    if (names.empty()) fail("--best-set %s: the set of --val-data has no name; leave this out", best.c_str());
    if (std::ranges::count(names, options.best_set) == 0)
        fail("--best-set %s: no set of --val-data has that name%s; name one of them", best.c_str(),
             nearest_name(options.best_set, names).c_str());
}

inline void check_checkpoint_options(const Options& options) {
    Interval save = options.save_every;
    int steps = save.unit == Interval::steps ? save.count : 0;
    if (options.keep_every > 0 && (steps == 0 || options.keep_every % steps)) {
        std::string other = steps ? text(" or give a multiple of %d", steps) : "";
        fail("--keep-every %d: is not a multiple of --save-every %s; give "
             "--save-every a divisor of it%s",
             options.keep_every, interval_text(save).c_str(), other.c_str());
    }
}

// Refuses options of another optimizer, or for a tensor that the model does not have.
inline void check_optimizer_options(const Options& options) {
    if (options.log_trust_ratios > 0 && options.optimizer != OptimizerKind::lamb) {
        fail("--log-trust-ratios %d: --optimizer %s has no trust ratios; give lamb, or leave it out",
             options.log_trust_ratios, name_of(options.optimizer));
    }
    if (options.tie_embeddings && (options.head_lr != 1 || options.head_decay != 1)) {
        fail("--head-%s: the output matrix is the embedding; give --embedding-%s, or --tie-embeddings off",
             options.head_lr != 1 ? "lr" : "decay", options.head_lr != 1 ? "lr" : "decay");
    }
}

inline void check_trace(const Options& options) {
    constexpr int most_steps = 100;
    if (options.trace_steps.empty()) return;
    const char* given = options.trace_steps.c_str();
    StepRange range = parse_step_range("--trace-steps", options.trace_steps);
    if (!options.timings)
        fail("--trace-steps %s: nothing is recorded with --timings off; leave out one of them", given);
    if (range.last > options.steps) {
        fail("--trace-steps %s: the run has %d steps; give earlier ones, or raise --steps", given,
             options.steps);
    }
    if (range.last - range.first >= most_steps) {
        fail("--trace-steps %s: %d steps are more than a timeline can show; give at most %d", given,
             range.last - range.first + 1, most_steps);
    }
}

// Rows are stale only if the host prefetches them before the updates of earlier steps.
inline void check_staleness(const Options& options) {
    if (options.ngram_staleness == 0 || options.ngram.empty()) return;
    const char* remedy = options.ngram_place == TablePlace::device ? "--ngram-place host"
                         : options.ngram_prefetch == 0             ? "--ngram-prefetch 1"
                                                                   : nullptr;
    if (remedy)
        fail("--ngram-staleness %d: a step's rows are read only after all updates; give %s too, or 0",
             options.ngram_staleness, remedy);
}

// Checks compare ranks, so they need several that hold, or could compute, the same values.
inline void check_comparisons(const Options& options) {
    if (options.check_replay > 0 && options.dp == 1) {
        fail("--check-replay %d: data ranks compare their results, but there is only one; leave it out",
             options.check_replay);
    }
    bool weights = options.zero == 3 ? options.shard_group < options.dp : options.dp * options.cp > 1;
    bool tied = options.pp > 1 && options.tie_embeddings;
    if (options.check_replicas > 0 && !weights && !tied && options.tp == 1) {
        std::string remedy =
            options.dp == 1 ? "leave it out" : "give a smaller --shard-group, or --check-replay";
        fail("--check-replicas %d: each value is held by only one rank; %s", options.check_replicas,
             remedy.c_str());
    }
}

// Work that communicates with other ranks, or with the host, cannot be captured in one graph.
inline void check_graphs(const Options& options, int processes) {
    if (options.cuda_graphs != CudaGraphs::on) return;
    if (processes > 1) {
        fail("--cuda-graphs on: works only with one process, but there are %d; give auto or off", processes);
    }
    if (options.offload != Offload::none) {
        fail("--cuda-graphs on: passes that send gradients to the host cannot be captured; give auto or off, "
             "or leave out --offload %s",
             name_of(options.offload));
    }
}

// Converts --epochs to --steps; the batch size must be known. A partial last step is rounded up, unless it is
// below a millionth of a step: that is a rounding error of --epochs.
inline void complete_steps(Options& options, const LayoutChoices& choose) {
    if (options.epochs == 0) return;
    long long rising = options.batch_ramp.empty() ? 0 : parse_batch_ramp(options.batch_ramp).steps;
    double rest = options.epochs * choose.tokens_of_epoch(options) - (double)tokens_until(options, rising);
    double steps = (double)rising + std::ceil(std::max(rest, 0.) / (double)options.global_batch - 1e-6);
    if (steps > INT32_MAX)
        fail("--epochs %g: more than 2^31 steps of %lld tokens; lower it, or raise --global-batch",
             options.epochs, options.global_batch);
    options.steps = std::max((int)steps, 1);
    options.epochs = 0;
}

inline void complete_training(Options& options, int processes, const LayoutChoices& choose) {
    if (options.train_data.empty()) {
        fail("--train-data: missing; name token files, such as those that `train_gpt tokenize` writes");
    }
    if (options.tokenizer.empty()) options.tokenizer = name_of(TokenizerKind::none);
    complete_sequence_length(options);
    check_micro_batch(options);
    complete_layout(options, processes, choose);
    complete_steps(options, choose);
    check_graphs(options, processes);
    check_optimizer_options(options);
    check_trace(options);
    check_comparisons(options);
    check_staleness(options);
    if (!options.batch_ramp.empty() && parse_batch_ramp(options.batch_ramp).steps >= options.steps) {
        fail("--batch-ramp %s: does not end within the run's %d steps; give fewer steps, or a longer run",
             options.batch_ramp.c_str(), options.steps);
    }
    if (options.val_batches > 0)
        options.val_tokens = tokens_of_batches(options.val_batches, (double)options.global_batch);
    options.val_batches = 0;
    if (options.warmup_steps < 0) options.warmup_steps = std::min(options.steps / 20, 2000);
    if (options.warmup_steps > options.steps) {
        fail("--warmup-steps %d: more than the run's %d steps; lower it or raise --steps",
             options.warmup_steps, options.steps);
    }
    check_validation(options);
    if (options.reset_positions && options.document_end < 0) {
        fail("--reset-positions on: document boundaries are unknown; give --document-end, or leave it out");
    }
    if (kind_of<TokenizerKind>(options.tokenizer) == TokenizerKind::none && !options.prompt.empty()) {
        fail("--prompt: cannot be turned into tokens without a tokenizer; add --tokenizer bytes or leave it "
             "out");
    }
    check_checkpoint_options(options);
    if (options.matmul_tuning.empty()) fail("--matmul-tuning: empty; give on, off or a file");
    if (options.run_dir.empty()) options.run_dir = default_run_dir(options.model);
    // A run that is resumed elsewhere looks there too.
    if (!options.fallback_dir.empty())
        options.fallback_dir = std::filesystem::absolute(options.fallback_dir).lexically_normal();
}

// processes: the number that train together.
inline void complete_options(Options& options, int processes, const LayoutChoices& choose = {}) {
    check_limits(options);
    complete_model(options);
    complete_training(options, processes, choose);
}

// Returns whether the value of an option follows from the others, which are complete: it is not `usual`, but
// complete_options() puts it in the place of `usual`.
inline bool is_derived(const OptionRow& row, const OptionValue& usual, const Options& options) {
    Options without = options;
    row.set(without, usual);
    try {
        complete_options(without, (int)options.ranks());
    } catch (const Error&) {
        return false;  // the other options are not valid without it
    }
    std::string value = value_text(row, options);
    return value != value_text(usual) && value == value_text(row, without);
}

// Refuses an option that was given although it has no effect without another. Called only for given options:
// a run that resumes with another schedule keeps a value that it does not use anymore.
inline void check_effect(const OptionRow& row, const Options& options) {
    static const struct {
        const char* fields;  // the name of a field, or the beginning of several
        const char* needed;
        bool (*works)(const Options& options);
    } dependences[] = {{"ngram_", "--ngram", [](const Options& o) { return !o.ngram.empty(); }},
                       {"choices_every", "--choices",
                        [](const Options& o) { return !o.choices.empty() || o.choices_every == 0; }},
                       {"decay_fraction", "--schedule wsd",
                        [](const Options& o) { return o.schedule == LearningRateSchedule::wsd; }},
                       {"muon_momentum", "--optimizer muon",
                        [](const Options& o) { return o.optimizer == OptimizerKind::muon; }},
                       {"best_set", "--keep-best", [](const Options& o) { return o.keep_best > 0; }}};
    for (auto& [fields, needed, works] : dependences) {
        if (!std::string_view(row.field).starts_with(fields) || works(options)) continue;
        std::string value = value_text(row, options);
        if (value != value_text(row.standard(command_train)))
            fail("%s %s: only has an effect with %s; give it too, or leave this out",
                 option_name(row).c_str(), printable(value).c_str(), needed);
    }
}

// ----------------------------------------------------------------------------
// the other commands

inline void check_run(const std::string& run, const char* missing) {
    if (run.empty()) fail("%s; name a run directory, or the folder of one of its checkpoints", missing);
}

inline void check_output(const std::string& output, const char* what) {
    if (output.empty()) fail("--output: missing; give %s", what);
}

inline void complete_options(TokenizeOptions& options) {
    if (options.inputs.empty()) fail("tokenize: nothing to read; name files or folders of text");
    check_output(options.output, "a prefix for the names of the files to write, such as tokens/mytext");
    if (options.train_tokenizer > 0 && !options.tokenizer.empty())
        fail("--tokenizer %s: --train-tokenizer trains its own; leave one of them out",
             printable(options.tokenizer).c_str());
    if (options.train_tokenizer > 0 && std::ranges::count(options.inputs, "-") > 0)
        fail("--train-tokenizer %d: reads text twice, but standard input can be read only once; save it to a "
             "file, or give --tokenizer",
             options.train_tokenizer);
    if (options.tokenizer.empty()) options.tokenizer = name_of(TokenizerKind::bytes);
    if (kind_of<TokenizerKind>(options.tokenizer) == TokenizerKind::none)
        fail("--tokenizer none: tokenizing needs a tokenizer; give bytes or a file");
}

// The default batch of a plan, in tokens: about that of the GPT-3 model of the same size (Brown et al.,
// "Language models are few-shot learners", 2020, table 2.1), but a power of two of sequences, so that many
// numbers of ranks divide it.
inline long long usual_global_batch(const ModelConfig& config, int sequence_length) {
    double parameters = (double)parameter_count(config);
    long long tokens = 512 << 10;
    for (double size : {1e9, 5e9, 20e9}) tokens *= parameters > size ? 2 : 1;
    return (long long)std::bit_floor((uint64_t)std::max(tokens / sequence_length, 1LL)) * sequence_length;
}

inline void complete_options(PlanOptions& options) {
    complete(static_cast<ModelConfig&>(options));
    if (options.gpus == 0) fail("--gpus: missing, or 0; give the number of devices you have");
    complete_sequence_length(options);
    if (options.global_batch == 0)
        options.global_batch = usual_global_batch(options, options.sequence_length);
    if (options.global_batch % options.sequence_length) {
        long long below = options.global_batch / options.sequence_length * options.sequence_length,
                  above = below + options.sequence_length;
        fail("--global-batch %lld: not a multiple of the sequence length of %d tokens; give %s%lld",
             options.global_batch, options.sequence_length, below ? text("%lld or ", below).c_str() : "",
             above);
    }
    if (options.tokens / options.global_batch >= INT32_MAX) {
        fail("--tokens %lld: more than 2^31 steps of %lld; raise --global-batch", options.tokens,
             options.global_batch);
    }
}

inline void complete_options(const AgentOptions& options) {
    if (options.run_dir.empty()) fail("agent: --run-dir: missing; name the directory of the run to watch");
}

// The options of selftest do not depend on each other.
inline void complete_options(const SelftestOptions&) {}

inline void complete_options(const DataOptions& options) {
    if (options.inputs.empty()) fail("data: nothing to inspect; name token files");
}

inline void check_inference_cut(const InferenceCut& cut) {
    if (cut.zero == 1 || cut.zero == 2)
        fail("--zero %d: shards only training state, and nothing is trained here; give 3, or leave it out",
             cut.zero);
}

inline void complete_options(const SampleOptions& options) {
    check_run(options.run, "sample: nothing to sample from");
    check_inference_cut(options);
    int prompts = !options.prompt.empty() + !options.prompt_file.empty() + options.interactive;
    if (prompts > 1) {
        fail("sample: prompts come from --prompt, --prompt-file or --interactive on; give only one of these");
    }
    if (options.interactive && options.samples > 1)
        fail("--samples %d: --interactive on generates one sample; leave one of them out", options.samples);
    for (const std::string& stop : options.stop) {
        if (stop.empty()) fail("--stop: an empty string would end every sample at once; give some text");
    }
}

inline void complete_options(const EvalOptions& options) {
    check_run(options.runs.empty() ? "" : options.runs[0], "eval: nothing to evaluate");
    check_inference_cut(options);
    if (options.data.empty() && options.choices.empty())
        fail("eval: nothing to evaluate on; give --data or --choices");
    named_lists("--data", options.data);  // refuses invalid lists
}

inline void complete_options(const InspectOptions& options) {
    check_run(options.run, "inspect: nothing to inspect");
}

inline void complete_options(const ReportOptions& options) {
    if (options.runs.empty()) fail("report: nothing to report on; name run directories");
}

inline void complete_options(const ExportOptions& options) {
    check_run(options.run, "export: nothing to export");
    check_output(options.output, "the folder to make, or with --format llmc the file");
}

inline void complete_options(const ImportOptions& options) {
    if (options.source.empty())
        fail("import: nothing to import; name the folder of a Hugging Face model, or a .bin of llm.c");
    check_output(options.output, "the run directory to make, such as runs/mine");
}

// ----------------------------------------------------------------------------
// values from a file

// Returns the options of the training run that a file describes.
inline Options stored_options(const nlohmann::json& json, const std::string& file) {
    Options options = options_from_json(json, file);
    try {
        complete_model(options);
        complete_sequence_length(options);
    } catch (const Error& error) {
        fail("%s: %s", file.c_str(), error.what());
    }
    return options;
}
