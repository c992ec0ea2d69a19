// The part of the program that data/commands/commands.h declares.
#include <optional>
#include <string>
#include <variant>

#include "data/base/print.h"  // print_text
#include "data/base/screen.h"
#include "data/commands/commands.h"
#include "data/commands/data_report.h"       // the data command
#include "data/commands/export_import.h"     // the export and import commands
#include "data/commands/inspect.h"           // the inspect command
#include "data/launch/parse_command_line.h"  // read_arguments, parse_options, answer_to
#include "data/report/report.h"              // the report command
#include "data/run/agent.h"                  // run_agent
#include "data/supervisor/launch.h"          // the launch command
#include "data/text/tokenize.h"              // the tokenize command

std::optional<int> run_without_ranks(int argc, char** argv) {
    if (std::string answer = answer_to(argc - 1, argv + 1); !answer.empty()) {
        print_text(answer);
        return 0;
    }
    if (argv[1] == std::string("launch")) return launch(argc - 1, argv + 1);
    if (argv[1] != std::string("agent")) return {};
    run_agent(agent_options({argv + 2, argv + argc}));
    return 0;
}

AskedLine read_command_line(int argc, char** argv) {
    AskedLine asked;
    asked.command = parse_command(argv[1]);
    asked.given = read_arguments(asked.command, argc - 1, argv + 1);
    if (asked.command == command_train) {
        asked.training = asked_options(asked.given);
        asked.places = origin_places(asked.training);
    } else {
        asked.remarks = repeated_options(asked.given);
    }
    return asked;
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
