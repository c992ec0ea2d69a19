/*
A training run that continues from a checkpoint (--resume), or begins with the weights of one (--init): which
options it takes over, according to the policy that the option table states for each, and the remarks about
options that are given another value.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/options/rules.h"
#include "data/options/schedule.h"
#include "data/options/table.h"
#include "data/options/values.h"
#include "data/tokenizer/tokenizer.h"

// A checkpoint, and what it records about the run that made it.
struct StoredRun {
    std::string checkpoint;          // its folder
    std::string run_dir;             // the run that it belongs to; empty: none
    std::string tokenizer;           // copy of its tokenizer in that run; empty: there is none
    int64_t step = 0;                // completed steps
    bool is_published = false;       // its model was imported from a Hugging Face folder
    nlohmann::json options;          // the form of options_to_json() or model_options_to_json()
    std::vector<std::string> notes;  // for the header: newer checkpoints that were passed over, and why
    std::vector<std::string> gone;   // its options that name files which are missing here
    std::vector<std::string> older;  // folders of the run's older checkpoints, the newest first
    std::string index;               // the bytes of its index, on the rank that has read them
};

// Looks for a checkpoint: the newest usable one of a run directory, or the one in a folder. Returns nothing
// if there is none, and fails if there are some and none is usable.
using FindCheckpoint = std::function<std::optional<StoredRun>(const std::string& place)>;

// An option with the text of its value on the command line.
struct GivenOption {
    const OptionRow* row;
    std::string value;
};
using GivenOptions = std::vector<GivenOption>;

// Returns whether an option accepts lists of named files. It may be given several times, and the lists are
// joined (data/options/named_lists.h).
inline bool takes_named_lists(const OptionRow& row) {
    return row.field == std::string("val_data") || row.field == std::string("data");
}

inline GivenOptions with_joined_lists(const GivenOptions& given) {
    GivenOptions joined;
    for (const GivenOption& option : given) {
        auto before = std::ranges::find(joined, option.row, &GivenOption::row);
        if (before != joined.end() && takes_named_lists(*option.row))
            before->value += ";" + option.value;
        else
            joined.push_back(option);
    }
    return joined;
}

template <typename O>
void set_values(const GivenOptions& given, O& options) {
    for (const GivenOption& option : given) set_value(*option.row, options, option.value);
}

inline bool is_given(const OptionRow& row, const GivenOptions& given) {
    return std::any_of(given.begin(), given.end(), [&](const GivenOption& g) { return g.row == &row; });
}

// Several commands may have options by this name.
inline bool is_given(const std::string& name, const GivenOptions& given) {
    return std::any_of(given.begin(), given.end(),
                       [&](const GivenOption& g) { return option_name(*g.row) == name; });
}

// Pairs of options that express the same setting.
constexpr std::pair<const char*, const char*> said_otherwise[] = {{"--val-tokens", "--val-batches"},
                                                                  {"--steps", "--epochs"}};

// Returns whether an option is given, either itself or as its counterpart.
inline bool is_said(const OptionRow& row, const GivenOptions& given) {
    return is_given(row, given) || std::ranges::any_of(said_otherwise, [&](const auto& words) {
               std::string name = option_name(row);
               return (name == words.first && is_given(words.second, given)) ||
                      (name == words.second && is_given(words.first, given));
           });
}

// Returns whether the value of an option depends on the number of ranks.
inline bool follows_ranks(const OptionRow& row) {
    return &row == find_option("--dp") || &row == find_option("--shard-group");
}

// Checks that the tokens of the tokenizer are in the vocabulary of an existing model.
inline void check_tokenizer(const Tokenizer& tokenizer, const std::string& name, const Options& model,
                            const std::string& checkpoint) {
    if (tokenizer.vocab_size() <= model.vocab_size) return;
    fail("--tokenizer %s: has %d tokens, but the model of %s has only %d; name its own tokenizer",
         printable(name).c_str(), tokenizer.vocab_size(), checkpoint.c_str(), model.vocab_size);
}

// The options of a checkpoint, for a run that continues from it or, with weights_only, takes its weights.
class StoredOptions {
public:
    StoredOptions(const StoredRun& run, bool weights_only)
        : run_(run),
          weights_only_(weights_only),
          stored_(stored_options(run.options, run.checkpoint)),
          record_(in_todays_form(run.options, run.checkpoint)) {
        // The run's copy is the tokenizer that it was trained with; the file that was named may have moved.
        if (kind_of<TokenizerKind>(stored_.tokenizer) == TokenizerKind::file && !run.tokenizer.empty())
            stored_.tokenizer = run.tokenizer;
    }

    // Copies the stored options; must be called before the given ones are set.
    void take_over(Options& options) const {
        for (const OptionRow& row : option_table()) {
            bool taken = !weights_only_ && row.resume != Resume::layout && row.resume != Resume::not_stored;
            if (is_stored(row) && (taken || describes_model(row))) copy(row, options);
        }
    }

    // If RoPE is scaled for the first time, it is scaled from the context that the weights were trained with.
    void take_original_context(Options& options, const GivenOptions& given) const {
        bool begins = stored_.rope_scaling == 1 && options.rope_scaling != 1;
        if (weights_only_ && begins && !is_given("--rope-original-context", given))
            options.rope_original_context = stored_.context;
    }

    const std::string& tokenizer() const { return stored_.tokenizer; }
    long long processes() const { return stored_.ranks(); }

    // Refuses a run that was moved away from its files, and names all options that must be given anew.
    void check_files(const GivenOptions& given) const {
        std::string missing;
        for (const std::string& name : run_.gone) {
            if (!is_given(name, given))
                missing += " " + name + " '" + shown(*find_option(name, command_train), stored_) + "'";
        }
        if (!missing.empty() && !weights_only_)
            fail("%s: was made with files that are missing here; give these options with their new paths:%s",
                 run_.checkpoint.c_str(), missing.c_str());
    }

    // Refuses changes of options on which the checkpoint depends: those that determine the shapes of its
    // tensors and, unless only its weights are used, those without which its state has no meaning.
    void check_fixed(const Options& options,
                     const char* remedy = "leave the option out, or begin a run from scratch") const {
        for (const OptionRow& row : option_table()) {
            bool fixed = row.resume == Resume::shape || (row.resume == Resume::fixed && !weights_only_);
            if (!fixed || adapts_to_context(row) || !is_stored(row) || comes_to_stored(row, options))
                continue;
            if (weights_only_ && &row == find_option("--context"))
                remedy = "each position has a learned vector; leave the option out, or begin a run with "
                         "--position rope";
            fail("%s %s: the checkpoint %s was made with %s; %s", option_name(row).c_str(),
                 shown(row, options).c_str(), run_.checkpoint.c_str(), shown(row, stored_).c_str(), remedy);
        }
    }

    // Lowers --tp, --cp and --pp of the checkpoint if they do not fit the processes, and returns a note about
    // it.
    std::string fit_cut(Options& options, const GivenOptions& given, int processes) const {
        const Cut kept = options;
        Cut least = kept;  // values that the user gave are kept
        if (!is_given("--tp", given)) least.tp = 1;
        if (!is_given("--cp", given)) least.cp = 1;
        if (!is_given("--pp", given)) least.pp = 1;
        bool is_planned = kept.tp == 0 || kept.pp == 0;
        if (weights_only_ || is_planned || fits(kept, processes)) return "";
        Cut now = lowered_layout(options, kept, least, processes);
        options.tp = now.tp, options.cp = now.cp, options.pp = now.pp;
        if (now == kept) return "";  // nothing fits, which is refused later
        std::string own, others;
        for (auto [name, value] : {std::pair{"--tp", kept.tp},
                                   {"--cp", kept.cp > 1 || is_given("--cp", given) ? kept.cp : 0},
                                   {"--pp", kept.pp},
                                   {"--dp", kept.dp}})
            if (value > 0) (is_given(name, given) ? others : own) += text(" %s %d", name, value);
        if (!others.empty()) own += " with" + others;
        std::string context = kept.cp > 1 ? text(" --cp %d", now.cp) : "";
        return text("the checkpoint's%s need %lld processes: now --tp %d%s --pp %d", own.c_str(),
                    kept.ranks(), now.tp, context.c_str(), now.pp);
    }

    // If no given option changes the layout, the options that were derived from it are kept as well.
    void take_layout(Options& options, const GivenOptions& given, int processes) const {
        bool same_model = options.tp == stored_.tp && options.cp == stored_.cp && options.pp == stored_.pp &&
                          options.pp_schedule == stored_.pp_schedule &&
                          options.micro_batch == stored_.micro_batch;
        bool same_ranks = processes == this->processes() && options.zero == stored_.zero;
        if (!same_model || weights_only_) return;
        for (const OptionRow& row : option_table()) {
            bool stays = row.resume == Resume::layout && (same_ranks || !follows_ranks(row));
            if (stays && is_stored(row) && !is_given(row, given)) copy(row, options);
        }
    }

    // Returns the differences from the checkpoint, for the header of the run, one line each: given options,
    // the text that it trains on, its layout, and their consequences. The options must be complete.
    std::vector<std::string> changes(const Options& options, const GivenOptions& given) const {
        std::vector<std::string> lines;
        for (const OptionRow& row : option_table()) {
            bool noted = row.resume == Resume::overridable_noted && !weights_only_ && is_said(row, given);
            bool cut = row.resume == Resume::layout && !weights_only_;
            if (!is_stored(row) || !(noted || cut || adapts_to_context(row) || row.resume == Resume::tokens))
                continue;
            bool meant_nothing =
                row.field == std::string_view("rope_original_context") && stored_.rope_scaling == 1;
            if (meant_nothing || value_text(row, options) == value_text(row, stored_)) continue;
            lines.push_back(option_name(row) + " " + shown(row, options) + ": the checkpoint had " +
                            shown(row, stored_));
        }
        bool same_waves =
            options.rope_theta == stored_.rope_theta && options.rope_scaling == stored_.rope_scaling;
        if (options.context > stored_.context && same_waves)
            lines.push_back(text("the context is longer and RoPE is unchanged; --rope-scaling %g or a larger "
                                 "--rope-theta is usual",
                                 (double)stored_.rope_scaling * options.context / stored_.context));
        if (weights_only_) return lines;
        bool was_batches = is_stored(*find_option("--val-tokens")) && !run_.options.contains("val_tokens");
        if (was_batches && !options.val_data.empty() && options.val_tokens == stored_.val_tokens)
            lines.push_back(
                text("--val-tokens %lld: from the --val-batches of this run so far, so that it still "
                     "validates on the same tokens",
                     options.val_tokens));
        if (std::string jump = learning_rate_jump(options); !jump.empty()) lines.push_back(jump);
        return lines;
    }

private:
    // Returns whether the checkpoint has the option; an older program, or the import of a model, may not have
    // stored it.
    bool is_stored(const OptionRow& row) const {
        return row.belongs_to(command_train) && record_.contains(row.field);
    }

    // A model with RoPE may start with another context (--init), and with wavelengths that suit that context.
    bool adapts_to_context(const OptionRow& row) const {
        std::string_view field = row.field;
        bool is_adapted = field == "context" || (field.starts_with("rope_") && field != "rope_dims");
        return is_adapted && weights_only_ && stored_.position == PositionKind::rope;
    }

    void copy(const OptionRow& row, Options& options) const { row.set(options, row.get(stored_)); }

    // Returns whether a row's value, once completed, equals the stored one: 0 may stand for a value that is
    // derived from other options.
    bool comes_to_stored(const OptionRow& row, const Options& options) const {
        Options changed = stored_;
        row.set(changed, row.get(options));
        try {
            complete(static_cast<ModelConfig&>(changed));
            complete_sequence_length(changed);
        } catch (const Error&) {
            return false;
        }
        return value_text(row, changed) == value_text(row, stored_);
    }

    // Returns a note about a jump of the learning rate; empty if the first step has about the rate that it
    // would have had without the options of this start.
    std::string learning_rate_jump(const Options& options) const {
        auto rate = [](const Options& o, int64_t step) {
            return o.learning_rate * schedule(o, (int)std::min<int64_t>(step, o.steps - 1));
        };
        float before = rate(stored_, run_.step), now = rate(options, run_.step);
        if (run_.step == 0 || std::abs(now - before) <= 0.1f * std::max(now, before)) return "";
        float last = rate(stored_, run_.step - 1);
        return text("the learning rate jumps from %.3g to %.3g; --schedule constant --learning-rate %.3g "
                    "--warmup-steps 0 keeps the last step's",
                    last, now, last);
    }

    static std::string shown(const OptionRow& row, const Options& options) {
        std::string value = value_text(row, options);
        return value.empty() ? "''" : printable(value);
    }

    const StoredRun& run_;
    const bool weights_only_;
    Options stored_;
    nlohmann::json record_;  // run.options in the form that this program writes
};
