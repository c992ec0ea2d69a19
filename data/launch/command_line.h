/*
What a command line becomes; data/launch/parse_command_line.h reads it.
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

// A command line of `train`, and what it has found.
struct TrainingLine {
    Options options;
    std::optional<StoredRun> origin;      // the checkpoint that the run goes on from
    bool weights_only = false;            // it takes only the weights of `init`
    RunFolder folder = RunFolder::fresh;  // the part that its directory plays
    std::vector<std::string> notes;       // for its header
};

// A command line of `plan`.
struct PlanLine {
    PlanOptions command;
    Options options;  // the training run that is planned, but for what is searched for
    GivenOptions given;
    std::vector<std::string> notes = {};  // assumptions for what was not told
};

// Commands that work on files alone.
using FileCommand =
    std::variant<TokenizeOptions, DataOptions, InspectOptions, ReportOptions, ExportOptions, ImportOptions>;

using CommandLine =
    std::variant<TrainingLine, PlanLine, SelftestOptions, SampleOptions, EvalOptions, FileCommand>;

// Takes a preset or a foreign config; --model names it. What there is to tell is added to `notes`.
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

// The content of the file of a tokenizer of this name, or the name where it has none.
inline std::string content_of(const Tokenizer* tokenizer, const std::string& name) {
    return tokenizer && !tokenizer->file().empty() ? tokenizer->json() : name;
}

// The others work on hosts without a device too.
inline bool computes(Command command, const GivenOptions& given) {
    return command == command_train || command == command_sample || command == command_eval ||
           command == command_selftest || is_given("--measure", given);
}
