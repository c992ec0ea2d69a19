// The part of the program that data/commands/commands.h declares.
#include <optional>
#include <string>
#include <variant>

#include "data/base/print.h"  // print_text
#include "data/commands/commands.h"
#include "data/commands/data_report.h"       // the data command
#include "data/commands/export_import.h"     // the export and import commands
#include "data/commands/inspect.h"           // the inspect command
#include "data/launch/parse_command_line.h"  // read_arguments, parse_options, answer_to
#include "data/report/report.h"              // the report command
#include "data/run/agent.h"                  // run_agent
#include "data/supervisor/launch.h"          // the launch command
#include "data/text/tokenize.h"              // the tokenize command

AskedLine read_command_line(int argc, char** argv) {
    std::vector<std::string> words(argv + 1, argv + argc);
    AskedLine asked;
    asked.answer = answer_to(words);
    if (!asked.answer.empty()) return asked;
    asked.name = words[0];
    note_error(asked.refusal, [&] {
        asked.command = parse_command(asked.name);
        auto end = asked.command == command_launch ? std::ranges::find(words, "--") : words.end();
        if (end != words.end()) asked.job.assign(end + 1, words.end());
        asked.given = read_arguments(asked.command, {words.begin(), end});
        if (asked.command == command_train) {
            asked.training = asked_options(asked.given);
            asked.time_limit = asked.training.communication_timeout;
            asked.places = origin_places(asked.training);
        } else {
            asked.remarks = repeated_options(asked.given);
        }
        if (asked.command == command_selftest)
            asked.time_limit = parse_options_of<SelftestOptions>(asked.given).communication_timeout;
    });
    return asked;
}

std::optional<int> run_without_ranks(const AskedLine& asked) {
    if (!asked.answer.empty()) {
        print_text(asked.answer);
        return 0;
    }
    if (asked.command != command_launch && asked.command != command_agent) return {};
    asked.refusal.raise();
    for (const std::string& remark : asked.remarks) print_error(remark);
    if (asked.command == command_launch) return launch(asked.given, asked.job);
    run_agent(parse_options_of<AgentOptions>(asked.given));
    return 0;
}

CommandLine parse_command_line(const AskedLine& asked, int processes, const FindCheckpoint& find,
                               const LayoutChoices& choose) {
    return parse_options(asked.command, asked.given, processes, find, choose);
}

namespace {
struct FileWork {
    const ImportedRun::TensorsOf& tensors_of;

    void operator()(const TokenizeOptions& o) const { tokenize(o); }
    void operator()(const DataOptions& o) const { report_data(o); }
    void operator()(const InspectOptions& o) const { inspect_checkpoint(o); }
    void operator()(const ReportOptions& o) const { report_runs(o); }
    void operator()(const ExportOptions& o) const { export_model(o); }
    void operator()(const ImportOptions& o) const { import_model(o, tensors_of); }
};
}  // namespace

void run_on_files(const FileCommand& command, const ImportedRun::TensorsOf& tensors_of) {
    std::visit(FileWork{tensors_of}, command);
}
