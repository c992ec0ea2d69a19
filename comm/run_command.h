/*
How every rank runs a command: from main() to the work of the command, on all ranks or on none.
*/
#pragma once

#include <cstdio>
#include <string>
#include <utility>
#include <variant>

#include "comm/agreement.h"            // check_same_program, check_same_options
#include "comm/plan_choice.h"          // layout_choices
#include "comm/run_checkpoints.h"      // find_on_root
#include "comm/run_device.h"           // choose_device
#include "comm/watchdog.h"             // watch_ranks
#include "comm/world.h"                // World
#include "data/commands/commands.h"    // the command line, and commands without a device
#include "data/tokens/token_loader.h"  // TokenLoader
#include "data/launch/config_file.h"   // config_text

extern const char source_hash[];  // the Makefile makes it, of all that the program is built from

// The options of a command line, by which ranks are compared.
struct ComparedOptions {
    const World& world;

    void operator()(const TrainingLine& line) const { check_same_options(world, line.options, true); }
    void operator()(const PlanLine& line) const { check_same_options(world, line.command, true); }
    void operator()(const FileCommand&) const {}  // which one rank runs
    template <typename O>
    void operator()(const O& options) const {
        check_same_options(world, options, true);
    }
};

// For all ranks: the tokens of a pass over the data of --epochs, which the first one counts for all. It does
// so where it completes the options, which say what the files are and how they are cut into samples.
inline double tokens_of_epoch(const AskedLine& asked, const World& world, const FindCheckpoint& find,
                              LayoutChoices choose) {
    return std::stod(text_from_root(world, [&] {
        double tokens = 0;
        choose.tokens_of_epoch = [&](const Options& o) {
            TokenLoader data(o.train_data, o.vocab_size, o.sequence_length, SampleOrder::sequential);
            return tokens = (double)data.samples_per_epoch() * o.sequence_length;
        };
        parse_command_line(asked, world.size(), find, choose);
        return number_text(tokens);
    }));
}

// Runs the command on every rank: work(command line, world). An error that stops it is thrown.
template <typename Work>
void run_command(const AskedLine& asked, const World& world, Work&& work) {
    check_same_program(world, source_hash, asked.name.c_str());
    world.on_all_ranks([&] {
        asked.refusal.raise();
        if (asked.command == command_train) check_all_started();
        bool alone = !computes(asked.command, asked.given);
        if (alone && world.size() > 1)
            fail("%s: works in one process and there are %d; start it without mpirun", asked.name.c_str(),
                 world.size());
        if (!world.is_root()) return;
        for (const std::string& remark : asked.remarks) screen.warn(remark);
    });
    check_same_options(world, asked.training, false);
    FindCheckpoint find = find_on_root(world, asked.places);
    LayoutChoices choose = layout_choices(world, asked.given);
    if (asked.training.epochs > 0) {
        double tokens = tokens_of_epoch(asked, world, find, choose);
        choose.tokens_of_epoch = [=](const Options&) { return tokens; };
    }
    CommandLine line;
    world.on_all_ranks([&] { line = parse_command_line(asked, world.size(), find, choose); });
    std::visit(ComparedOptions{world}, line);
    if (asked.training.print_config) {
        if (world.is_root()) print_text(config_text(std::get<TrainingLine>(line).options));
        return check_standard_output();
    }
    if (computes(asked.command, asked.given)) choose_device(world);
#ifndef __CUDACC__
    if (world.size() > 1) host_device.threads = threads_per_rank(world);
#endif
    // One rank speaks for all.
    if (!world.is_root() && !freopen("/dev/null", "w", stdout)) fail_with_errno("/dev/null", "write it");
    work(line, world);
    if (stop_requested != SIGPIPE) check_standard_output();
}

// The program. Returns its exit code. Ranks that agree on an error all exit with its code, and the first one
// prints it.
template <typename Work>
int run_program(int argc, char** argv, Work&& work) try {
    open_standard_streams();
    const AskedLine asked = read_command_line(argc, argv);
    if (std::optional<int> code = run_without_ranks(asked)) return *code;
    double usual = launched_processes() > 1 ? Options().communication_timeout : 0;
    time_limit = asked.time_limit.value_or(usual);
    set_device_variables();
    World world(&argc, &argv, watch_ranks);
    try {
        or_abort(world, [&] { run_command(asked, world, work); });
        return 0;
    } catch (const CommonError& error) {
        if (world.is_root()) print_error(error.what());
        return error.exit_code;
    }
} catch (const std::exception& error) {
    print_error(message_of(error));
    return exit_code_of(error);
}
