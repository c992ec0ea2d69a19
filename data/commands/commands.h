/*
The part of the program that needs neither ranks nor a device: its command line, and the commands that work
only on files. It is a separate object, commands.cu, compiled apart from train_gpt.cu, once for all devices.
*/
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/checkpoint/index.h"     // CheckpointTensor
#include "data/launch/command_line.h"  // CommandLine, FileCommand

// A command line before the checkpoints and files that it names are examined.
struct AskedLine {
    std::string answer;  // to a request for help or the version; empty: there is none
    std::string name;    // the command's
    NotedError refusal;  // the error in the command line, if any; all ranks raise it together
    Command command = command_train;
    GivenOptions given;
    std::vector<std::string> job;      // the words after the -- of `launch`
    Options training;                  // the options of `train`, applied to the defaults
    std::vector<std::string> places;   // folders in which `train` may find a checkpoint
    std::vector<std::string> remarks;  // about the given options; `train` prints its own when it starts
    std::optional<double> time_limit;  // seconds that ranks wait for each other, if the command sets it
};
AskedLine read_command_line(int argc, char** argv);

// Answers requests for help, and runs `launch` and `agent`, which start and watch ranks but are not
// ranks themselves. Returns the exit code, or nothing if ranks are to run the command.
std::optional<int> run_without_ranks(const AskedLine& asked);

// processes: the number of processes that run the command together.
CommandLine parse_command_line(const AskedLine& asked, int processes, const FindCheckpoint& find,
                               const LayoutChoices& choose);

// tensors_of(options): returns the tensors of a checkpoint with the weights of a model with these options.
void run_on_files(const FileCommand& command,
                  const std::function<std::vector<CheckpointTensor>(const Options&)>& tensors_of);
