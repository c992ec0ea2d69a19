/*
Turns a command line into Options: the defaults, then the preset or config.json named by --model, or the
options of a checkpoint (data/launch/resume.h), then what was given explicitly, then complete_options()
(data/options/rules.h), which derives the remaining values and refuses combinations that do not fit.
*/
#pragma once

#include <cxxopts.hpp>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/program_version.h"
#include "data/checkpoint/folder.h"
#include "data/launch/find_checkpoint.h"
#include "data/launch/command_line.h"
#include "data/launch/config_file.h"
#include "data/options/help.h"
#include "data/options/rules.h"
#include "data/options/table.h"
#include "data/options/values.h"
#include "data/launch/resume.h"
#include "data/run/run_log.h"
#include "data/tokenizer/tokenizer.h"

// ----------------------------------------------------------------------------
// the command line

// A given tokenizer sets the vocabulary size and the token that ends a document, unless these options are
// given too.
class TokenizerChoice {
public:
    // Loads the given tokenizer, or else that of the model.
    TokenizerChoice(Options& options, const std::string& asked_for) {
        auto tokenizer = Tokenizer::load_if_any(asked_for.empty() ? options.tokenizer : asked_for);
        if (!asked_for.empty()) options.document_end = tokenizer ? tokenizer->end_of_text() : -1;
        if (!tokenizer) return;
        needed_ = tokenizer->vocab_size();
        if (!asked_for.empty()) options.vocab_size = needed_;
    }

    void check(const Options& options) const {
        if (options.vocab_size < needed_) {
            fail("--vocab-size %d: too small for --tokenizer %s; give at least %d", options.vocab_size,
                 printable(options.tokenizer).c_str(), needed_);
        }
    }

private:
    int needed_ = 0;  // tokens that the vocabulary must hold
};

// Joins an on|off option and a value that follows it with "=", as cxxopts requires for optional values. The
// option without a value means on.
inline std::vector<std::string> with_switch_values(const std::vector<std::string>& words) {
    std::vector<std::string> arguments;
    for (const std::string& word : words) {
        const OptionRow* before = arguments.empty() ? nullptr : find_option(arguments.back());
        bool is_value = before && is_switch(*before) && (word == name_of(true) || word == name_of(false));
        if (is_value)
            arguments.back() += "=" + word;
        else
            arguments.push_back(word);
    }
    return arguments;
}

// Parses a command line, which begins with the command's name.
inline GivenOptions read_arguments(Command command, const std::vector<std::string>& words) {
    cxxopts::Options parser("train_gpt");
    parser.allow_unrecognised_options();
    const OptionRow* positional = nullptr;
    for (const OptionRow& row : option_table()) {
        if (!row.belongs_to(command)) continue;
        if (row.positional) {
            positional = &row;
        } else {
            auto value = cxxopts::value<std::string>();
            if (is_switch(row)) value->implicit_value(name_of(true));
            parser.add_options()(option_name(row).substr(2), "", value);
        }
    }

    std::vector<std::string> arguments = with_switch_values(words);
    std::vector<const char*> pointers;
    for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
    GivenOptions given;
    std::vector<std::string> others;
    try {
        cxxopts::ParseResult result = parser.parse((int)pointers.size(), pointers.data());
        for (const auto& pair : result.arguments())
            given.push_back({find_option("--" + pair.key(), command), pair.value()});
        others = result.unmatched();
    } catch (const cxxopts::exceptions::missing_argument&) {
        fail("%s: value missing; see train_gpt %s --help", arguments.back().c_str(), command_name(command));
    } catch (const cxxopts::exceptions::exception& error) {
        fail("command line: %s; see train_gpt %s --help", printable(error.what()).c_str(),
             command_name(command));
    }

    for (const GivenOption& option : given) {
        const std::string& value = option.value;
        if (value.starts_with("--") && find_option(value.substr(0, value.find('=')))) {
            fail("%s: value missing before %s; see train_gpt %s --help", option_name(*option.row).c_str(),
                 value.c_str(), command_name(command));
        }
    }
    for (const std::string& argument : others) {
        if (argument.size() > 1 && argument[0] == '-') refuse_unknown(argument, command);
        bool takes =
            positional && (holds<std::vector<std::string>>(*positional) || !is_given(*positional, given));
        if (!takes) {
            fail("%s: unexpected argument; write options as --name value and switches as --name on|off, see "
                 "train_gpt %s --help",
                 printable(argument).c_str(), command_name(command));
        }
        given.push_back({positional, argument});
    }
    return with_config(with_joined_lists(given));
}

// Returns notes on options that are given several times, for example by a script that appends its arguments
// to a fixed list of options: the last one counts. Refuses a list of training files that is given twice.
inline std::vector<std::string> repeated_options(const GivenOptions& given) {
    std::vector<std::string> lines;
    for (size_t i = 0; i < given.size(); i++) {
        const OptionRow& row = *given[i].row;
        bool is_list = holds<std::vector<std::string>>(row);
        auto again = std::find_if(given.begin() + (int64_t)i + 1, given.end(),
                                  [&](const GivenOption& later) { return later.row == &row; });
        if (is_list || again == given.end()) continue;
        const std::string &first = given[i].value, &second = again->value;
        if (row.field == std::string("train_data"))
            fail("%s: given twice; name all files in one list, as in %s,%s", option_name(row).c_str(),
                 printable(first).c_str(), printable(second).c_str());
        lines.push_back(text("%s %s: given again as %s, which is used", option_name(row).c_str(),
                             printable(first).c_str(), printable(second).c_str()));
    }
    return lines;
}

// ----------------------------------------------------------------------------
// the start of a training run

inline void check_origin(const Options& asked) {
    if (resumes_newest(asked) && asked.overwrite)
        fail("--overwrite: would delete what --resume auto resumes from; leave one of them out");
    if (!asked.resume.empty() && !asked.init.empty() && !resumes_newest(asked)) {
        fail("--init %s: the weights already come from --resume %s; leave one of them out",
             printable(asked.init).c_str(), printable(asked.resume).c_str());
    }
    if (!asked.resume.empty() && !asked.init.empty() && asked.run_dir.empty())
        fail("--run-dir: missing; with --resume auto and --init, name the directory of the run");
}

inline std::optional<StoredRun> named_checkpoint(const char* option, const std::string& place,
                                                 const FindCheckpoint& find) {
    std::optional<StoredRun> found = find(place);
    if (!found) fail_without_checkpoint(place, option + std::string(" "));
    return found;
}

// Returns the folder in which --resume looks; empty: none.
inline std::string resumed_place(const Options& asked) {
    if (!resumes_newest(asked)) return asked.resume;
    return asked.run_dir.empty() ? default_run_dir(asked.model) : asked.run_dir;
}

// Returns where --resume auto looks besides the run directory: in the run's folders in the --fallback-dir
// that its record names and in the given one, which may hold its last checkpoint.
inline std::vector<std::string> fallback_places(const Options& asked) {
    if (!resumes_newest(asked)) return {};
    std::string run_dir = resumed_place(asked);
    std::vector<std::string> places = {options_path(run_dir)};
    if (!asked.fallback_dir.empty()) places.push_back(shared_run_dir(asked.fallback_dir, run_dir));
    return places;
}

// Returns the newest usable checkpoint of a run, from its directory or from a --fallback-dir.
inline std::optional<StoredRun> newest_of_run(const Options& asked, const FindCheckpoint& find) {
    std::string run_dir = resumed_place(asked), error;
    std::optional<StoredRun> newest;
    note_error(error, [&] { newest = find(run_dir); });
    for (const std::string& fallback : fallback_places(asked)) {
        std::optional<StoredRun> last;
        note_error(error, [&] {
            if (fallback != options_path(run_dir)) check_own_folder(fallback);
            last = find(fallback);
        });
        if (!last || (newest && newest->step >= last->step)) continue;
        last->run_dir = run_dir;
        if (access(tokenizer_path(run_dir).c_str(), F_OK) == 0) last->tokenizer = tokenizer_path(run_dir);
        if (newest) {
            last->older = std::move(newest->older);
            last->older.insert(last->older.begin(), newest->checkpoint);
        }
        newest = std::move(last);
    }
    if (!newest && !error.empty()) fail("%s", error.c_str());
    if (newest && !error.empty()) newest->notes.push_back("passed over: " + error);
    return newest;
}

// Finds the run's origin. With --resume auto, --init applies only to the first start of the run.
inline void find_origin(TrainingLine& line, const Options& asked, const FindCheckpoint& find) {
    if (resumes_newest(asked)) {
        std::string run_dir = resumed_place(asked);
        line.origin = newest_of_run(asked, find);
        line.folder = RunFolder::continued;
        if (!line.origin) line.notes.push_back("no checkpoint in " + run_dir + " yet: a new run begins");
    } else if (!asked.resume.empty()) {
        line.origin = named_checkpoint("--resume", asked.resume, find);
    }
    if (!line.origin && !asked.init.empty()) {
        line.origin = named_checkpoint("--init", asked.init, find);
        line.weights_only = true;
    }
    if (!line.origin) return;
    for (const std::string& note : line.origin->notes) line.notes.push_back(note);
}

// Sets how the run directory is used, now that it is known; refuses to overwrite the run's origin.
inline void check_run_folder(TrainingLine& line) {
    const Options& o = line.options;
    bool of_origin = line.origin && is_same_folder(line.origin->run_dir, o.run_dir);
    if (of_origin && o.overwrite) {
        fail("--overwrite: would delete what %s %s reads; leave it out, or name another --run-dir",
             line.weights_only ? "--init" : "--resume", printable(line.origin->checkpoint).c_str());
    }
    if (o.overwrite) line.folder = RunFolder::replaced;
    if (of_origin && !line.weights_only) line.folder = RunFolder::continued;
}

inline bool is_same_tokenizer(const std::string& a, const std::string& b) {
    auto content = [](const std::string& name) {
        return content_of(Tokenizer::load_if_any(name).get(), name);
    };
    return a == b || content(a) == content(b);
}

// A resumed run keeps its own copy of its tokenizer; --tokenizer may name another file with the same content.
inline void take_own_tokenizer(TrainingLine& line, const StoredOptions& stored) {
    std::string& asked = line.options.tokenizer;
    if (line.weights_only || kind_of<TokenizerKind>(stored.tokenizer()) == TokenizerKind::none) return;
    if (!is_same_tokenizer(asked, stored.tokenizer())) {
        fail("--tokenizer %s: the run has another, %s; leave the option out, or begin a run with --init",
             printable(asked).c_str(), printable(stored.tokenizer()).c_str());
    }
    asked = stored.tokenizer();
}

inline void complete_origin(TrainingLine& line, const StoredOptions& stored, const GivenOptions& given,
                            int processes) {
    Options& options = line.options;
    const StoredRun& origin = *line.origin;
    stored.check_files(given);
    stored.take_original_context(options, given);
    stored.check_fixed(options);
    take_own_tokenizer(line, stored);
    std::string cut = stored.fit_cut(options, given, processes);
    if (!cut.empty()) line.notes.push_back(cut);
    stored.take_layout(options, given, processes);
    auto tokenizer = Tokenizer::load_if_any(options.tokenizer);
    if (tokenizer) check_tokenizer(*tokenizer, options.tokenizer, options, origin.checkpoint);
    if (is_given("--tokenizer", given) && !is_given("--document-end", given))
        options.document_end = tokenizer ? tokenizer->end_of_text() : -1;
    if (line.weights_only) return;
    if (options.run_dir.empty()) options.run_dir = origin.run_dir;
}

inline void check_steps_left(const TrainingLine& line, const GivenOptions& given) {
    const Options& options = line.options;
    const StoredRun& origin = *line.origin;
    if (line.weights_only || options.steps >= origin.step) return;
    std::string steps = text("--steps %d", options.steps);
    const char* unit = "steps";
    for (const GivenOption& option : given)
        if (option_name(*option.row) == "--epochs")
            steps = text("--epochs %s (%d steps)", option.value.c_str(), options.steps), unit = "epochs";
    fail("%s: the checkpoint %s is already at step %lld; give more %s, or resume from an earlier checkpoint",
         steps.c_str(), origin.checkpoint.c_str(), (long long)origin.step, unit);
}

// Returns the defaults, overridden by the given values.
inline Options asked_options(const GivenOptions& given) {
    Options asked;
    set_values(given, asked);
    for (auto [name, other] : said_otherwise) {
        const OptionRow& row = *find_option(other);
        std::string value = value_text(row, asked);
        if (is_given(name, given) && value != value_text(row.standard(command_train)))
            fail("%s %s: conflicts with %s; leave one of them out", other, value.c_str(), name);
    }
    check_origin(asked);
    return asked;
}

// Returns the places where parse_training() may look for a checkpoint. asked: the result of asked_options(),
// because the places depend on the command line only.
inline std::vector<std::string> origin_places(const Options& asked) {
    std::vector<std::string> places = {resumed_place(asked), asked.init};
    std::ranges::copy(fallback_places(asked), std::back_inserter(places));
    std::erase(places, "");
    return places;
}

// processes: the number of processes that train together.
inline TrainingLine parse_training(const GivenOptions& given, int processes = 1,
                                   const FindCheckpoint& find = find_checkpoint,
                                   const LayoutChoices& choose = {}) {
    TrainingLine line;
    Options& options = line.options;
    Options asked = asked_options(given);
    find_origin(line, asked, find);
    if (line.origin) {
        StoredOptions stored(*line.origin, line.weights_only);
        stored.take_over(options);
        set_values(given, options);
        complete_origin(line, stored, given, processes);
        NotedError refusal;
        note_error(refusal, [&] { complete_options(options, processes, choose); });
        if (!refusal.empty() && !line.weights_only && processes != stored.processes())
            fail("processes: the checkpoint %s was made by %lld processes, and its options do not fit %d; "
                 "start %lld, or: %s",
                 line.origin->checkpoint.c_str(), stored.processes(), processes, stored.processes(),
                 refusal.message.c_str());
        refusal.raise();
        check_steps_left(line, given);
        for (std::string& change : stored.changes(options, given)) line.notes.push_back(std::move(change));
    } else {
        options.model = asked.model;
        apply_model(options, line.notes);
        TokenizerChoice choice(options, asked.tokenizer);
        set_values(given, options);
        choice.check(options);
        complete_options(options, processes, choose);
    }
    for (const GivenOption& option : given) check_effect(*option.row, options);
    for (std::string& repeated : repeated_options(given)) line.notes.push_back(std::move(repeated));
    check_run_folder(line);
    return line;
}

// ----------------------------------------------------------------------------
// plans

inline PlanLine parse_plan(const GivenOptions& given) {
    PlanLine line = {{}, {}, given};
    PlanOptions& command = line.command;
    set_values(given, command);
    if (!command.measure.empty()) {
        if (given.size() > (is_given("--matmul-dtype", given) ? 2 : 1))
            fail("--measure: makes no plan; leave out other options than --matmul-dtype");
        if (command.matmul_dtype == MatmulDtype::fp8)
            fail("--matmul-dtype fp8: --measure times no products in fp8, because plans derive their rate "
                 "from those in bf16; leave it out");
        line.options.matmul_dtype = command.matmul_dtype;
        return line;
    }
    line.options.model = command.model;
    apply_model(line.options, line.notes);
    static_cast<ModelConfig&>(command) = line.options;
    set_values(given, command);
    for (int* cut : {&command.tp, &command.pp}) *cut = std::max(*cut, 1);  // auto becomes 1
    bool has_batch = command.global_batch > 0;
    complete_options(command);
    if (!has_batch)
        line.notes.push_back(text("--global-batch %lld, about the batch of a GPT-3 of this size, is "
                                  "assumed; give yours",
                                  command.global_batch));
    for (const OptionRow& row : option_table()) {
        if (row.belongs_to(command_train) && row.belongs_to(command_plan))
            row.set(line.options, row.get(command));
    }
    for (const GivenOption& option : given) check_effect(*option.row, line.options);
    if (command.tokens > 0)
        line.options.steps = (int)((command.tokens + command.global_batch - 1) / command.global_batch);
    return line;
}

// ----------------------------------------------------------------------------
// any command

template <typename O>
O parse_options_of(const GivenOptions& given) {
    O options;
    set_values(given, options);
    complete_options(options);
    return options;
}

inline CommandLine parse_options(Command command, const GivenOptions& given, int processes = 1,
                                 const FindCheckpoint& find = find_checkpoint,
                                 const LayoutChoices& choose = {}) {
    switch (command) {
    case command_tokenize:
        return FileCommand(parse_options_of<TokenizeOptions>(given));
    case command_data:
        return FileCommand(parse_options_of<DataOptions>(given));
    case command_train:
        return parse_training(given, processes, find, choose);
    case command_plan:
        return parse_plan(given);
    case command_launch:
    case command_agent:
        break;  // no ranks run them
    case command_selftest:
        return parse_options_of<SelftestOptions>(given);
    case command_sample: {
        auto options = parse_options_of<SampleOptions>(given);
        options.seed_is_given = is_given("--seed", given);
        return options;
    }
    case command_eval:
        return parse_options_of<EvalOptions>(given);
    case command_inspect:
        return FileCommand(parse_options_of<InspectOptions>(given));
    case command_report:
        return FileCommand(parse_options_of<ReportOptions>(given));
    case command_export:
        return FileCommand(parse_options_of<ExportOptions>(given));
    case command_import:
        return FileCommand(parse_options_of<ImportOptions>(given));
    }
    __builtin_unreachable();
}

// Returns the command that a first argument names.
inline Command parse_command(const std::string& name) {
    std::vector<std::string> names;
    for (const CommandHelp& row : command_table()) {
        if (name == row.name) return row.command;
        names.push_back(row.name);
    }
    fail("%s: no such command%s; train_gpt --help lists them", printable(name).c_str(),
         nearest_name(name, names).c_str());
}

// Returns the answer to a command line that only asks for help or the version; empty: it asks for neither.
// words: the command and what follows it. -h may also be the value of an option.
inline std::string answer_to(const std::vector<std::string>& words) {
    const int width = terminal_width(80);
    auto is_help = [](const std::string& word) { return word == "--help" || word == "-h"; };
    auto help_of = [&](const std::string& name, size_t next) {
        Command command = parse_command(name);
        bool one_section = next < words.size() && words[next][0] != '-';
        return one_section ? help_section(command, words[next], width) : help_text(command, width);
    };
    if (words.empty()) return general_help(width);
    if (words[0] == "help" || is_help(words[0]))
        return words.size() == 1 || is_help(words[1]) ? general_help(width) : help_of(words[1], 2);
    if (words[0] == "--version") return std::string(program_version) + "\n";
    for (size_t i = 1; i < words.size(); i++) {
        const OptionRow* before = find_option(words[i - 1]);
        bool is_value = words[i] == "-h" && before && !is_switch(*before);
        if (is_help(words[i]) && !is_value) return help_of(words[0], i + 1);
    }
    return "";
}
