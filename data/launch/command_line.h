/*
The result of reading a command line (data/launch/parse_command_line.h).
*/
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "data/base/error.h"
#include "data/exchange/hf_config.h"
#include "data/launch/resume.h"
#include "data/options/help.h"
#include "data/options/presets.h"
#include "data/options/values.h"
#include "data/run/run_log.h"
#include "data/tokenizer/tokenizer.h"

// A command line of `train`, and the checkpoint that the run starts from.
struct TrainingLine {
    Options options;
    std::optional<StoredRun> origin;      // that checkpoint; empty: none
    bool weights_only = false;            // --init: takes only the weights of `origin`
    RunFolder folder = RunFolder::fresh;  // how the run directory is used
    std::vector<std::string> notes;       // for the header of the run
};

// A command line of `plan`.
struct PlanLine {
    PlanOptions command;
    Options options;  // the planned training run, except for options that are searched
    GivenOptions given;
    std::vector<std::string> notes = {};  // assumptions about options that were not given
};

// Commands that work only on files.
using FileCommand =
    std::variant<TokenizeOptions, DataOptions, InspectOptions, ReportOptions, ExportOptions, ImportOptions>;

using CommandLine =
    std::variant<TrainingLine, PlanLine, SelftestOptions, SampleOptions, EvalOptions, FileCommand>;

// Applies the preset or foreign config that --model names. Remarks are added to `notes`.
inline void apply_model(Options& options, std::vector<std::string>& notes) {
    if (const Preset* preset = find_preset(options.model)) {
        static_cast<ModelConfig&>(options) = preset->config;
        options.tokenizer = name_of(preset->tokenizer);
        options.document_end = preset->document_end;
    } else if (std::string path = hf_config_path(options.model); !path.empty()) {
        static_cast<ModelConfig&>(options) = read_hf_config(path, notes);
    } else {
        std::vector<std::string> names;
        for (const Preset& row : preset_table()) names.push_back(row.name);
        fail("--model %s: neither a preset nor a config.json%s; `train_gpt train --help` lists the presets",
             printable(options.model).c_str(), nearest_name(options.model, names).c_str());
    }
}

// Returns the content of the tokenizer's file, or the name if it has no file.
inline std::string content_of(const Tokenizer* tokenizer, const std::string& name) {
    return tokenizer && !tokenizer->file().empty() ? tokenizer->json() : name;
}

// Returns whether a command computes on a device; the others also work on hosts without one.
inline bool computes(Command command, const GivenOptions& given) {
    return command == command_train || command == command_sample || command == command_eval ||
           command == command_selftest || is_given("--measure", given);
}
