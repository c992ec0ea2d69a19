/*
From the command line to Options: the defaults, then the preset or config.json named by --model, then what was
given explicitly, then complete(), which fills in what follows from the rest and refuses what does not fit
together.
*/
#pragma once

#include <cxxopts.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/error.h"
#include "data/hf_config.h"
#include "data/layout_options.h"
#include "data/option_help.h"
#include "data/option_table.h"
#include "data/option_values.h"
#include "data/presets.h"
#include "data/tokenizer.h"

// ----------------------------------------------------------------------------
// what fits together

// The folder in runs/ for a model: a preset's name, or that of the folder which holds its config.json.
inline std::string model_label(const std::string& model) {
    if (find_preset(model)) return model;
    std::filesystem::path path = std::filesystem::absolute(hf_config_path(model)).lexically_normal();
    return (path.filename() == "config.json" ? path.parent_path().filename() : path.stem()).string();
}

// The model, and the tokens that it is made for.
inline void complete_model(Options& options) {
    complete(static_cast<ModelConfig&>(options));
    if (options.document_end >= options.vocab_size) {
        fail("--document-end %d: not a token of a vocabulary of %d; give -1 or a smaller number",
             options.document_end, options.vocab_size);
    }
}

inline void complete_sequence_length(Options& options) {
    if (options.sequence_length == 0) options.sequence_length = options.context;
    if (options.sequence_length > options.context) {
        fail("--sequence-length %d: longer than the model's context of %d; lower it", options.sequence_length,
             options.context);
    }
}

inline void check_micro_batch(const Options& options) {
    if ((long long)options.micro_batch * options.sequence_length > INT32_MAX) {
        fail("--micro-batch %d: with sequences of %d tokens more than 2^31 tokens at once; lower it",
             options.micro_batch, options.sequence_length);
    }
}

inline void complete_training(Options& options, int processes) {
    if (options.train_data.empty()) {
        fail("--train-data: missing; name token files, such as those that `train_gpt tokenize` writes");
    }
    if (options.tokenizer.empty()) options.tokenizer = "none";
    complete_sequence_length(options);
    check_micro_batch(options);
    complete_layout(options, processes);
    if (options.warmup_steps < 0) options.warmup_steps = std::min(options.steps / 20, 2000);
    if (options.warmup_steps > options.steps) {
        fail("--warmup-steps %d: more than the run's %d steps; lower it or raise --steps",
             options.warmup_steps, options.steps);
    }
    if (options.reset_positions && options.document_end < 0) {
        fail("--reset-positions on: documents are not told apart; give --document-end too, or leave it out");
    }
    if (options.tokenizer == "none" && !options.prompt.empty()) {
        fail("--prompt: cannot be turned into tokens without a tokenizer; add --tokenizer bytes or leave it "
             "out");
    }
    if (options.run_dir.empty()) options.run_dir = "runs/" + model_label(options.model);
}

inline void complete_sampling(const Options& options) {
    if (options.run.empty()) fail("sample: nothing to sample from; name a run directory or a weights file");
    int prompts = !options.prompt.empty() + !options.prompt_file.empty() + options.interactive;
    if (prompts > 1) {
        fail("sample: a prompt comes from --prompt, --prompt-file or --interactive on; give one of "
             "them");
    }
    if (options.interactive && options.samples > 1)
        fail("--samples %d: --interactive on answers once; leave one of them out", options.samples);
    for (const std::string& stop : options.stop) {
        if (stop.empty()) fail("--stop: an empty text ends every sample at once; give some text");
    }
}

inline void complete_evaluation(const Options& options) {
    if (options.run.empty()) fail("eval: nothing to evaluate; name a run directory or a weights file");
    if (options.data.empty() && options.choices.empty())
        fail("eval: nothing to measure on; give --data or --choices");
}

inline void complete_tokenizing(Options& options) {
    if (options.inputs.empty()) fail("tokenize: nothing to read; name files or folders of text");
    if (options.output.empty()) {
        fail("--output: missing; give the beginning of the names of the files to write, such as "
             "tokens/mytext");
    }
    if (options.train_tokenizer > 0 && !options.tokenizer.empty())
        fail("--tokenizer %s: --train-tokenizer makes one; leave one of them out",
             printable(options.tokenizer).c_str());
    if (options.tokenizer.empty()) options.tokenizer = "bytes";
    if (options.tokenizer == "none")
        fail("--tokenizer none: text becomes tokens by a tokenizer; give bytes or a file");
}

inline void complete(Options& options, Command command, int processes) {
    for (const OptionRow& row : option_table()) {
        if (row.commands & command) check_limits(row, options);
    }
    switch (command) {
    case command_train:
        complete_model(options);
        complete_training(options, processes);
        break;
    case command_sample:
        complete_sampling(options);
        break;
    case command_eval:
        complete_evaluation(options);
        break;
    case command_tokenize:
        complete_tokenizing(options);
        break;
    case command_data:
        if (options.inputs.empty()) fail("data: nothing to look into; name token files");
        break;
    }
}

// ----------------------------------------------------------------------------
// the command line

// Takes a preset or a foreign config; --model names it.
inline void apply_model(Options& options) {
    if (const Preset* preset = find_preset(options.model)) {
        static_cast<ModelConfig&>(options) = preset->config;
        options.tokenizer = preset->tokenizer;
        options.document_end = preset->document_end;
    } else if (std::string path = hf_config_path(options.model); !path.empty()) {
        static_cast<ModelConfig&>(options) = read_hf_config(path);
    } else {
        std::vector<std::string> names;
        for (const Preset& row : preset_table()) names.push_back(row.name);
        fail("--model %s: neither a preset nor a config.json%s; `train_gpt train --help` lists the presets",
             printable(options.model).c_str(), nearest_name(options.model, names).c_str());
    }
}

// A tokenizer that is asked for brings its vocabulary and the token that ends a document along, unless these
// are given themselves.
class TokenizerChoice {
public:
    // The one asked for, or that of the model.
    TokenizerChoice(Options& options, const std::string& asked_for) {
        auto tokenizer = Tokenizer::load_if_any(asked_for.empty() ? options.tokenizer : asked_for);
        if (!tokenizer) return;
        needed_ = tokenizer->vocab_size();
        if (asked_for.empty()) return;
        options.vocab_size = needed_;
        options.document_end = tokenizer->end_of_text();
    }

    void check(const Options& options) const {
        if (options.vocab_size < needed_) {
            fail("--vocab-size %d: too small for --tokenizer %s; give at least %d", options.vocab_size,
                 printable(options.tokenizer).c_str(), needed_);
        }
    }

private:
    int needed_ = 0;  // tokens
};

// An on|off option may stand alone, for on. Gives each of them its value.
inline std::vector<std::string> with_switch_values(int argc, const char* const* argv) {
    std::vector<std::string> arguments(argv, argv + argc);
    for (int i = 1; i < argc; i++) {
        const OptionRow* row = find_option(arguments[i]);
        if (!row || !is_switch(*row)) continue;
        bool has_value = i + 1 < argc && (arguments[i + 1] == "on" || arguments[i + 1] == "off");
        if (!has_value) arguments[i] += "=on";
    }
    return arguments;
}

inline void refuse_unknown(const std::string& argument, Command command) {
    std::string name = argument.substr(0, argument.find('='));
    if (const OptionRow* row = find_option(name); row && !(row->commands & command)) {
        fail("%s: not an option of train_gpt %s; see train_gpt %s --help", name.c_str(),
             command_name(command), command_name(command));
    }
    std::vector<std::string> names;
    for (const OptionRow& row : option_table()) {
        if (row.commands & command && !row.positional) names.push_back(option_name(row));
    }
    fail("%s: no such option%s; see train_gpt %s --help", printable(name).c_str(),
         nearest_name(name, names).c_str(), command_name(command));
}

// argv[0] is the command's own name; `processes` are to train together. Prints the help and exits where that
// is asked for.
inline Options parse_options(Command command, int argc, const char* const* argv, int processes = 1) {
    cxxopts::Options parser("train_gpt");
    parser.allow_unrecognised_options();
    parser.add_options()("h,help", "");
    const OptionRow* positional = nullptr;
    for (const OptionRow& row : option_table()) {
        if (!(row.commands & command)) continue;
        if (row.positional) {
            positional = &row;
        } else {
            parser.add_options()(option_name(row).substr(2), "", cxxopts::value<std::string>());
        }
    }

    std::vector<std::string> arguments = with_switch_values(argc, argv);
    std::vector<const char*> pointers;
    for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
    std::vector<cxxopts::KeyValue> given;
    std::vector<std::string> others;
    try {
        cxxopts::ParseResult result = parser.parse((int)pointers.size(), pointers.data());
        if (result.count("help")) {
            fputs(help_text(command, terminal_width()).c_str(), stdout);
            exit(0);
        }
        given = result.arguments();
        others = result.unmatched();
    } catch (const cxxopts::exceptions::missing_argument&) {
        fail("%s: value missing; see train_gpt %s --help", arguments.back().c_str(), command_name(command));
    } catch (const cxxopts::exceptions::exception& error) {
        fail("command line: %s; see train_gpt %s --help", printable(error.what()).c_str(),
             command_name(command));
    }

    Options options;
    std::string tokenizer;
    for (const auto& pair : given) {
        if (pair.value().starts_with("--") && find_option(pair.value().substr(0, pair.value().find('=')))) {
            fail("--%s: value missing before %s; see train_gpt %s --help", pair.key().c_str(),
                 pair.value().c_str(), command_name(command));
        }
        if (pair.key() == "model") options.model = pair.value();
        if (pair.key() == "tokenizer") tokenizer = pair.value();
    }
    for (const std::string& argument : others) {
        if (argument.size() > 1 && argument[0] == '-') refuse_unknown(argument, command);
        if (!positional || !add_value(*positional, options, argument)) {
            fail("%s: unexpected; options are written --name value and switches on or off, see train_gpt %s "
                 "--help",
                 printable(argument).c_str(), command_name(command));
        }
    }
    std::optional<TokenizerChoice> choice;
    if (command == command_train) {
        apply_model(options);
        choice.emplace(options, tokenizer);
    }
    for (const auto& pair : given) set_value(*find_option("--" + pair.key()), options, pair.value());
    if (choice) choice->check(options);
    complete(options, command, processes);
    return options;
}

// The options of the training run that a file holds weights of.
inline Options stored_options(const nlohmann::json& json, const std::string& file) {
    Options options = options_from_json(json, file);
    try {
        complete_model(options);
    } catch (const Error& error) {
        fail("%s: %s", file.c_str(), error.what());
    }
    return options;
}

// The command a first argument names.
inline Command parse_command(const std::string& name) {
    std::vector<std::string> names;
    for (const CommandHelp& row : command_table()) {
        if (name == row.name) return row.command;
        names.push_back(row.name);
    }
    fail("%s: no such command%s; train_gpt --help lists them", printable(name).c_str(),
         nearest_name(name, names).c_str());
}
