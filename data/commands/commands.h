/*
The part of the program that needs neither ranks nor a device: its command line, and the commands that work on
files alone. It is an object of its own, commands.cu, compiled beside train_gpt.cu and once for all devices.
*/
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/checkpoint/index.h"     // CheckpointTensor
#include "data/launch/command_line.h"  // CommandLine, FileCommand

// A command line before checkpoints and files that it names are looked at.
struct AskedLine {
    std::string answer;  // to a question for help or the version, which asks for nothing else
    std::string name;    // the command's
    NotedError refusal;  // the rest is refused so, by all ranks of a command together
    Command command = command_train;
    GivenOptions given;
    std::vector<std::string> job;      // behind the -- of `launch`
    Options training;                  // the options of `train`, over the defaults
    std::vector<std::string> places;   // folders in which `train` may find a checkpoint
    std::vector<std::string> remarks;  // on what was given, but for `train`, whose header has them
    std::optional<double> time_limit;  // seconds that ranks wait for each other, where a command says so
};
AskedLine read_command_line(int argc, char** argv);

// Answers questions, and runs `launch` and `agent`, which start ranks and watch them but are none. Returns
// the exit code, or nothing where ranks are to run the command.
std::optional<int> run_without_ranks(const AskedLine& asked);

// `processes` are to run it together.
CommandLine parse_command_line(const AskedLine& asked, int processes, const FindCheckpoint& find,
                               const LayoutChoices& choose);

// tensors_of: the tensors of a checkpoint of the weights of such a model.
void run_on_files(const FileCommand& command,
                  const std::function<std::vector<CheckpointTensor>(const Options&)>& tensors_of);
