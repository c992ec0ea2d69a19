/*
The text of --help and of the log header, generated from the table of options.

The help of a command has a section for each group of its options; `train --help data` shows only one. If the
meaning of an option depends on the command, its row lists the meanings in braces, as in "Empty: {train: that
of the model}{data: none}.", and the help of a command shows only its own part.
*/
#pragma once

#include <algorithm>
#include <cctype>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "data/base/strings.h"   // nearest_name
#include "data/base/terminal.h"  // wrapped
#include "data/options/rules.h"  // complete_options
#include "data/options/table.h"
#include "data/options/values.h"
#include "data/options/presets.h"

struct CommandHelp {
    Command command;
    const char* name;
    const char* purpose;
    std::vector<const char*> examples;
};

inline const std::vector<CommandHelp>& command_table() {
    static const std::vector<CommandHelp> table = {
        {command_tokenize,
         "tokenize",
         "Turns text (files and folders, .jsonl and .gz) into token files.",
         {"tokenize /usr/include --output tokens/headers",
          "tokenize wiki.jsonl.gz books --output tokens/mine --train-tokenizer 32000 --val-fraction 0.001",
          "tokenize code --output tokens/code --tokenizer Qwen3-0.6B/tokenizer.json"}},
        {command_data,
         "data",
         "Describes token files: documents, their lengths, the beginning as text, and any damage.",
         {"data tokens/mine_*.bin --tokenizer tokens/mine_tokenizer.json", "data megatron/web.idx"}},
        {command_train,
         "train",
         "Trains a model on token files, from the beginning or from a checkpoint.",
         {"train --train-data 'tokens/headers_train_*.bin' --val-data 'tokens/headers_val_*.bin'",
          "train --tokenizer tokens/mine_tokenizer.json --train-data "
          "'0.7:tokens/web_train_*.bin,0.3:code.idx'",
          "train --model gpt2-124M --train-data 'fineweb_train_*.bin' --micro-batch 8 --global-batch 512k",
          "train --model llama3.2-1B --layers 4 --train-data 'llama_*.bin' --recompute block --run-dir "
          "runs/cut",
          "train --run-dir runs/mine --train-data 'mine_train_*.bin' --steps 100000 --resume auto",
          "train --resume runs/mine/checkpoints/step_00005000 --run-dir runs/branch --learning-rate 1e-4",
          "train --init runs/qwen3 --train-data 'mine_train_*.bin' --run-dir runs/tuned --steps 500"}},
        {command_plan,
         "plan",
         "Finds the fastest layout for a model on many devices, and estimates time and cost by "
         "simulation.",
         {"plan --model gpt3-175B --machine h100 --gpus 12288 --global-batch 12M --tokens 300B",
          "plan --model llama3-8B --machine cluster.json --gpus 64 --global-batch 4M --tokens 1T --price "
          "2",
          "plan --model llama3-70B --machine h100 --gpus 256 --global-batch 4M --tp 8 --format json",
          "plan --model llama3-8B --machine h200 --gpus 8 --global-batch 1M --explain --tp 2 --zero 1"}},
        {command_launch,
         "launch",
         "Starts a training job on many hosts, monitors it, diagnoses hangs and restarts it.",
         {"launch --ranks 4 -- train --train-data 'tokens/headers_train_*.bin' --run-dir runs/a",
          "launch --hosts hosts --ranks 64 --spares 1 -- train --model llama3-8B --run-dir runs/a ...",
          "launch --hosts hosts --launcher srun --on-event 'mail -s training me' -- train --run-dir runs/a "
          "...",
          "launch --hosts hosts --launcher 'mpirun --mca btl_tcp_if_include eth0' -- train --run-dir runs/a "
          "..."}},
        {command_agent,
         "agent",
         "Periodically prints what the ranks of a run on this host do; launch starts an agent per host.",
         {"agent --run-dir runs/a --hang-timeout 60"}},
        {command_selftest,
         "selftest",
         "Tests the devices, links and disks of the ranks that it runs on, and names those that are slow or "
         "faulty.",
         {"selftest", "selftest --run-dir /shared/runs --seconds 100",
          "selftest --format json --measure cluster.json"}},
        {command_sample,
         "sample",
         "Generates text with a trained model.",
         {"sample runs/tiny --prompt '#include <' --tokens 400",
          "sample runs/tiny --samples 8 --temperature 0.8 --top-p 0.95 --stop 'THE END'",
          "sample runs/large --prompt-file prompts.jsonl --tp 4 --pp 2", "sample runs/tiny --interactive"}},
        {command_eval,
         "eval",
         "Evaluates a trained model: loss, perplexity and bits per byte, and multiple-choice questions.",
         {"eval runs/tiny --data 'tokens/headers_val_*.bin'", "eval runs/tiny --choices hellaswag_val.bin",
          "eval runs/a runs/b --choices questions.jsonl --format json --output scores.json"}},
        {command_inspect,
         "inspect",
         "Describes a checkpoint: step, options, tensors, files, and any damage.",
         {"inspect runs/tiny", "inspect runs/tiny/checkpoints/step_00001000 --verify"}},
        {command_report,
         "report",
         "Shows what runs did: curves, ranks, checkpoints and samples as one HTML page, as CSV or in "
         "TensorBoard.",
         {"report runs/tiny", "report runs/a runs/b --output compared.html",
          "report runs/tiny --format tensorboard"}},
        {command_export,
         "export",
         "Writes a trained model in another program's format: Hugging Face transformers, llm.c.",
         {"export runs/tiny --output tiny-hf", "export runs/tiny --output tiny-hf --dtype bf16",
          "export runs/gpt2-124M --format llmc --output gpt2_124M.bin --dtype fp32"}},
        {command_import,
         "import",
         "Makes a run directory from a model trained elsewhere, to sample, evaluate, and train further with "
         "--init.",
         {"import Qwen3-0.6B --output runs/qwen3", "import gpt2_124M_bf16.bin --output runs/gpt2"}},
    };
    return table;
}

inline const char* command_name(Command command) {
    for (const CommandHelp& row : command_table()) {
        if (row.command == command) return row.name;
    }
    return "";
}

// ----------------------------------------------------------------------------
// --help

// The groups of a command's options, in the order of the table.
inline std::vector<std::string> option_groups(Command command) {
    std::vector<std::string> groups;
    for (const OptionRow& row : option_table()) {
        bool seen = std::find(groups.begin(), groups.end(), row.group) != groups.end();
        if (row.belongs_to(command) && !seen) groups.push_back(row.group);
    }
    return groups;
}

// RUN, INPUTS...
inline std::string positional_name(const OptionRow& row) {
    std::string name = row.field;
    for (char& c : name) c = (char)toupper(c);
    return name + (holds<std::vector<std::string>>(row) ? "..." : "");
}

// The column where the text of an option's help begins: beside the name, or beneath it on a narrow terminal.
inline int help_indent(int width) {
    return width < 72 ? 8 : 30;
}

// Returns whether `names`, such as "sample eval", includes this command; nothing if any word is not the name
// of a command.
inline std::optional<bool> name_command(const std::string& names, Command command) {
    bool named = false;
    std::istringstream words(names);
    for (std::string word; words >> word;) {
        auto row = std::ranges::find(command_table(), word, &CommandHelp::name);
        if (row == command_table().end()) return {};
        named |= row->command == command;
    }
    return named;
}

// The help of an option for one command: parts in braces for other commands are left out.
inline std::string words_for(Command command, std::string help) {
    for (size_t begin = 0; (begin = help.find('{', begin)) != std::string::npos;) {
        size_t colon = help.find(": ", begin), end = help.find('}', begin);
        if (colon == std::string::npos || end == std::string::npos || colon > end) break;
        std::optional<bool> named = name_command(help.substr(begin + 1, colon - begin - 1), command);
        if (!named) {
            begin++;  // braces that do not list commands
            continue;
        }
        std::string words = *named ? help.substr(colon + 2, end - colon - 2) : "";
        bool apart = words.empty() && begin > 0 && help[begin - 1] == ' ';
        size_t blank = apart && help.compare(end + 1, 1, " ") == 0;  // avoids a double space
        help.replace(begin, end + 1 - begin + blank, words);
        begin += words.size();
    }
    return help;
}

// dashes: the prefix of the name.
inline std::string option_help(const OptionRow& row, Command command, int width, const char* dashes = "--") {
    int indent = help_indent(width);
    std::string value = is_switch(row)         ? " [on|off]"
                        : is_number(row)       ? " N"
                        : holds<Interval>(row) ? " N|TIME|auto"
                        : holds<Choice>(row)   ? " NAME"
                                               : " TEXT";
    std::string limits = is_switch(row) ? "" : limits_text(row);
    // The defaults of options that describe the model depend on --model, so only that of --model is shown.
    bool has_default =
        (!describes_model(row) || &row == find_option("--model")) && !is_searched(row, command);
    std::string standard = has_default ? value_text(row.standard(command)) : "";
    if (!standard.empty()) standard = "default " + standard;
    std::string notes = limits;
    for (const std::string& note : {suffixes_text(row), standard}) {
        if (!note.empty()) append_item(notes, note, "; ");
    }
    std::string help = words_for(command, row.help) + (notes.empty() ? "" : " [" + notes + "]");
    std::string line =
        "  " + (row.positional ? positional_name(row) : dashes + option_name(row).substr(2) + value);
    line +=
        (int)line.size() < indent ? std::string(indent - line.size(), ' ') : "\n" + std::string(indent, ' ');
    return line + wrapped(help, indent, indent, width);
}

inline std::string preset_help(int width) {
    std::string names;
    for (const Preset& row : preset_table()) append_item(names, row.name, " ");
    return "Presets for --model\n  " + wrapped(names, 2, 2, width);
}

// A command line, broken only before options outside quotes, so that it can be copied into a shell as it is.
inline std::string example_help(const std::string& example, int width) {
    std::string result, line = "  train_gpt";
    std::istringstream words(example);
    std::string part, word;
    auto add_part = [&] {
        if ((int)(line.size() + 1 + part.size() + 2) > width) {  // room for " \\"
            result += line + " \\\n";
            line = "     ";
        }
        line += " " + part;
    };
    while (words >> word) {
        bool quoted = std::ranges::count(part, '\'') % 2 != 0;
        if (word.starts_with("--") && !part.empty() && !quoted) add_part(), part.clear();
        append_item(part, word, " ");
    }
    add_part();
    return result + line + "\n";
}

// Returns the help for a group's options; empty if the command has only positional ones in the group.
inline std::string group_help(Command command, const std::string& group, int width) {
    std::string rows;
    for (const OptionRow& row : option_table()) {
        if (row.belongs_to(command) && row.group == group && !row.positional)
            rows += option_help(row, command, width);
    }
    if (rows.empty()) return "";
    return group + (group == "Model" ? " (defaults: those of --model)" : "") +
           (group == "Layout" && command == command_plan ? " (searched, unless given)" : "") + "\n" + rows;
}

// The names of the sections of a command's help, for --help SECTION.
inline std::vector<std::string> help_sections(Command command) {
    std::vector<std::string> sections;
    for (std::string& group : option_groups(command)) {
        if (group_help(command, group, 80).empty()) continue;
        group[0] = (char)tolower(group[0]);
        sections.push_back(group);
    }
    if (command == command_train || command == command_plan) sections.push_back("presets");
    return sections;
}

inline std::string help_section(Command command, const std::string& asked, int width) {
    std::vector<std::string> sections = help_sections(command);
    if (std::ranges::find(sections, asked) == sections.end()) {
        fail("--help %s: train_gpt %s has no such section%s; give %s", printable(asked).c_str(),
             command_name(command), nearest_name(asked, sections).c_str(), alternatives(sections).c_str());
    }
    if (asked == "presets") return preset_help(width);
    std::string group = asked;
    group[0] = (char)toupper(group[0]);
    return group_help(command, group, width);
}

// The part of the help of `launch` on jobs: how they can end, and what launch does then.
inline std::string launch_help(int width) {
    std::string result = wrapped(
        "The arguments after -- are the job, as given to train_gpt, and must include --run-dir. --resume "
        "auto is added. The job runs in its own session and writes to RUN/job.log, which launch also prints. "
        "Ctrl-C, SIGTERM or SIGUSR1 makes it save and exit; a second Ctrl-C ends it without saving. If the "
        "supervisor is killed, the job keeps training: the same command line reattaches to it.",
        0, 0, width);
    const std::pair<const char*, const char*> rows[] = {
        {"exit code 0", "done, or stopped as asked"},
        {"1", "user error: not retried"},
        {"70", "retried once, from the checkpoint before the newest"},
        {"75, a signal, a lost daemon", "the hosts are checked, then the job is restarted"},
        {"no progress", "the cause is named, then the job is ended and restarted"},
        {"a host that fails its check", "a spare replaces it; without one, fewer data ranks continue"},
        {"the same failure twice",
         "at one step, or two restarts without progress: launch ends and prints the reason"}};
    result += "\nHow a job can end, and what is done\n";
    constexpr int indent = 30;
    for (auto [what, done] : rows) {
        std::string line = "  " + std::string(what);
        line.resize(indent, ' ');
        result += line + wrapped(done, indent, indent, width);
    }
    return result + "\n" +
           wrapped("RUN/incidents.jsonl records when each incident happened, its cause and rank, and the "
                   "steps and time lost; RUN/supervisor.json has the share of time spent training.",
                   0, 0, width);
}

inline std::string help_text(Command command, int width) {
    std::string usage, arguments, result;
    for (const OptionRow& row : option_table()) {
        if (!row.belongs_to(command) || !row.positional) continue;
        usage += " " + positional_name(row);
        arguments += "\n" + option_help(row, command, width);
    }
    for (const CommandHelp& row : command_table()) {
        if (row.command != command) continue;
        result += std::string("train_gpt ") + row.name + usage + " [--option value ...]\n" +
                  wrapped(row.purpose, 0, 0, width);
        result += arguments;
        if (command == command_launch) result += "\n" + launch_help(width);
        result += "\nExamples\n";
        for (const char* example : row.examples) result += example_help(example, width);
    }
    std::vector<std::string> sections = help_sections(command);
    if (sections.size() > 3) {
        result += "\n" + wrapped(std::string("train_gpt ") + command_name(command) + " --help " +
                                     sections[0] + " shows one section: " + alternatives(sections) + ".",
                                 0, 0, width);
    }
    for (const std::string& section : sections) result += "\n" + help_section(command, section, width);
    return result;
}

inline std::string general_help(int width) {
    std::string result = "train_gpt COMMAND [--option value ...]\n\n";
    for (const CommandHelp& row : command_table()) {
        std::string line = "  " + std::string(row.name);
        line.resize(14, ' ');
        result += line + wrapped(row.purpose, 14, 14, width);
    }
    return result + "\n" +
           wrapped("train_gpt help COMMAND, or train_gpt COMMAND --help, explains a command and its options; "
                   "train_gpt COMMAND --help SECTION, one section; train_gpt --version prints the version.",
                   0, 0, width) +
           "\n" +
           wrapped("Exit codes: 0 done, or stopped as asked; 1 user error; 70 numbers in a run are not "
                   "finite; 75 a process, link, device or disk failed, and a restart may help.",
                   0, 0, width);
}

// ----------------------------------------------------------------------------
// log header

// Returns whether an option of a run would have the same value if it were left out: its default, that of the
// preset, or one that follows from other options.
inline bool is_left_out(const OptionRow& row, const Options& options) {
    Options usual;
    if (const Preset* preset = find_preset(options.model)) {
        static_cast<ModelConfig&>(usual) = preset->config;
        usual.tokenizer = name_of(preset->tokenizer);
        usual.document_end = preset->document_end;
    }
    bool is_usual = value_text(row, usual) == value_text(row, options);
    return is_usual || is_derived(row, row.get(usual), options);
}

// The options of a run that differ from their defaults, one paragraph for each group.
inline std::string options_summary(const Options& options, int width) {
    constexpr int indent = 13;
    std::string result;
    for (const std::string& group : option_groups(command_train)) {
        std::string words;
        for (const OptionRow& row : option_table()) {
            if (!row.belongs_to(command_train) || row.group != group || is_left_out(row, options)) continue;
            std::string value = value_text(row, options);
            if (!words.empty()) words += ' ';
            words.append(option_name(row).substr(2)).append("=").append(value.empty() ? "''" : value);
        }
        if (words.empty()) continue;
        std::string line = group;
        line.resize(indent, ' ');
        result += line + wrapped(words, indent, indent, width);
    }
    return result + "other options have their defaults; all are in " + printable(options.run_dir) +
           "/options.json\n";
}
