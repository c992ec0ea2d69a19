/*
Describes what a run is about to do, for its header.
*/
#pragma once

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include <string>
#include <vector>

#include "data/base/figures.h"
#include "data/run/meter.h"
#include "data/options/model_config.h"
#include "data/options/help.h"  // options_summary
#include "data/options/options.h"
#include "data/options/schedule.h"
#include "data/run/run_log.h"  // are_comparable
#include "data/base/program_version.h"
#include "data/base/screen.h"
#include "data/tokens/token_loader.h"
#include "data/tokens/validation_set.h"

// Returns the line of log.jsonl that records when, where and how the run was started. communication: the
// libraries that connect the processes, and their settings. origin: the checkpoint that it starts from;
// empty: none. changes: notes on what differs from the run that is resumed.
inline nlohmann::ordered_json start_record(const Options& o, const std::string& host, int processes,
                                           const std::string& device, const std::string& communication,
                                           const std::string& origin,
                                           const std::vector<std::string>& changes) {
    return {{"time", utc_time()},
            {"host", host},
            {"device", device},
            {"version", program_version},
            {"communication", communication},
            {"processes", processes},
            {"layout", {{"dp", o.dp}, {"tp", o.tp}, {"cp", o.cp}, {"pp", o.pp}, {"zero", o.zero}}},
            {"from", origin.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(origin)},
            {"changes", changes}};
}

// Returns a note if a resumed run uses different communication libraries than at its last start (`before`),
// and otherwise an empty string. The same layout gives the same bits only with the same libraries.
inline std::string communication_note(const nlohmann::json& before, const std::string& communication) {
    if (!before.is_object() || !before.contains("communication")) return "";
    const nlohmann::json& was = before["communication"];
    if (!was.is_string() || was == communication) return "";
    return text(
        "communication used %s and now uses %s: sums may be computed in another order, and differ in their "
        "last bits",
        printable(was.get<std::string>()).c_str(), communication.c_str());
}

// Returns a note if the run validates on different tokens than at its last start, and otherwise an empty
// string.
inline std::string validation_note(const nlohmann::json& before, const std::vector<ValidationSet>& sets) {
    if (!before.is_object() || !before.contains("validation") || sets.empty()) return "";
    if (are_comparable(before["validation"], record_of(sets))) return "";
    return "from here on, the validation loss is computed on different tokens";
}

// "2 of 8.39M rows of 64 elements in bf16 (1.07G in all); n-grams of 2,3 tokens look up 8 rows per token",
// with the format if it was chosen; empty without tables.
inline std::string tables_text(const Options& o) {
    auto layers = (double)std::ranges::count(layers_with_table(o), true), rows = (double)rows_of_table(o);
    if (layers == 0) return "";
    std::string format = o.ngram_dtype == RowDtype::automatic ? "" : text(" in %s", name_of(o.ngram_dtype));
    return text("%.0f of %s rows of %d elements%s (%s in all); n-grams of %s tokens look up %d rows per "
                "token",
                layers, human(rows).c_str(), o.ngram_width, format.c_str(),
                human(layers * rows * o.ngram_width).c_str(), o.ngram.c_str(), ngram_head_count(o));
}

// done: steps already completed.
inline void print_run(const Options& o, const TokenLoader& data, const std::vector<ValidationSet>& validation,
                      int64_t done) {
    double count = (double)parameter_count(o);
    int T = o.sequence_length;
    print("model        %s: %s parameters, %d layers of %d channels, %sFLOP per token (%s if attention "
          "is counted as causal)\n",
          o.model.c_str(), human(count).c_str(), o.layers, o.channels,
          human(flops_per_token(o, T, false)).c_str(), human(flops_per_token(o, T, true)).c_str());
    if (std::string tables = tables_text(o); !tables.empty()) print("tables       %s\n", tables.c_str());
    print("data         %s tokens, %s samples of %d\n", human((double)data.total_tokens()).c_str(),
          human((double)data.samples_per_epoch()).c_str(), T);
    for (const std::string& line : data.summary()) print("             %s\n", line.c_str());
    for (const std::string& path : data.too_short())
        print("             %s is shorter than a sample: not used\n", path.c_str());
    std::string sets;
    for (const ValidationSet& set : validation)
        append_item(sets,
                    human((double)set.tokens) + " tokens" + (set.name.empty() ? "" : " of " + set.name));
    if (!sets.empty() && o.val_every > 0)
        print("validation   %s, after every %d steps\n", sets.c_str(), o.val_every);
    if (!o.choices.empty() && o.choices_every > 0)
        print("choices      %s, after every %d steps\n", o.choices.c_str(), o.choices_every);
    // Epochs count only the remaining steps, because the earlier ones may have read other files.
    long long tokens = tokens_until(o, o.steps) - tokens_until(o, done);
    double epochs = (double)tokens / T / data.samples_per_epoch();
    bool is_even = o.global_batch / T / o.micro_batch % o.dp == 0;
    const char* uneven = is_even ? "" : ", some with one micro-batch more";
    std::string from = o.batch_ramp.empty() ? "" : text("%lld to ", tokens_of_step(o, (int)done));
    std::string steps = done == 0        ? text("%d steps", o.steps)
                        : done < o.steps ? text("steps %lld to %d,", (long long)done + 1, o.steps)
                                         : text("all %d steps are done,", o.steps);
    print("run          %s: %s of %s%lld tokens (%d x %d at a time%s), %.2f epochs\n", o.run_dir.c_str(),
          steps.c_str(), from.c_str(), o.global_batch, o.micro_batch, T,
          o.dp > 1 ? text(" on each of %d data ranks%s", o.dp, uneven).c_str() : "", epochs);
}

// notes: further remarks, one line each.
inline void print_header(const Options& o, const std::string& device, const TokenLoader& data,
                         const std::vector<ValidationSet>& validation, int64_t done,
                         const std::vector<std::string>& notes) {
    int width = screen.is_terminal() ? std::min(screen.width(), terminal_width()) : terminal_width();
    print("%s\n", options_summary(o, width).c_str());
    print("device       %s\n", device.c_str());
    print_run(o, data, validation, done);
    for (const std::string& note : notes) {
        bool warning = note.starts_with("warning: ") || note.starts_with("passed over: ");
        if (warning)
            screen.warn(note, "             ");
        else
            print("             %s\n", note.c_str());
    }
}
