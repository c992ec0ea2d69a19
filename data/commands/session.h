/*
Commands that a person types instead of a prompt: /temperature 0.7 means --temperature 0.7 from then on.
*/
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/print.h"
#include "data/base/strings.h"
#include "data/base/terminal.h"
#include "data/options/help.h"
#include "data/options/options.h"
#include "data/options/table.h"
#include "data/options/values.h"

// Returns whether an option can be changed between two prompts. These are the seed, and all numbers that
// affect how tokens are chosen.
inline bool has_command(const OptionRow& row) {
    std::string_view field = row.field, group = row.group;
    return row.belongs_to(command_sample) && is_number(row) &&
           (field == "seed" || (group == "Sampling" && field != "samples"));
}

inline std::string commands_help(int width) {
    std::string result;
    for (const OptionRow& row : option_table()) {
        if (has_command(row)) result += option_help(row, command_sample, width, "/");
    }
    return result +
           wrapped("A command without N shows the value. /seed N also starts over: the same prompts then "
                   "get the same answers. //... is a prompt that begins with one slash.",
                   0, 0, width) +
           "\n" + wrapped(find_option("--interactive")->help, 0, 0, width);
}

// Executes a command and returns its reply. `number`, which numbers the next answer, restarts at 0 with a
// new seed.
inline std::string obey_command(std::string line, SampleOptions& options, int& number) {
    line.erase(line.find_last_not_of(" \t") + 1);
    size_t end = std::min(line.find(' '), line.size()), begin = line.find_first_not_of(' ', end);
    std::string name = line.substr(0, end);
    if (name == "/help") return commands_help(terminal_width(80));
    std::vector<std::string> names = {"/help"};
    for (const OptionRow& row : option_table()) {
        if (!has_command(row)) continue;
        names.push_back("/" + option_name(row).substr(2));
        if (name != names.back()) continue;
        if (begin != line.npos) {
            set_value(row, options, line.substr(begin));
            if (row.field == std::string_view("seed")) number = 0;
        }
        return name.substr(1) + " " + value_text(row, options) + "\n";
    }
    fail("%s: no such command%s; /help lists them", printable(name).c_str(),
         nearest_name(name, names).c_str());
}

// For all ranks: executes a line if it is a command; only the rank with `speaks` prints the reply. Returns
// false for a prompt; if that begins with //, removes one slash.
inline bool obey(std::string& line, SampleOptions& options, int& number, bool speaks) {
    bool is_command = line.starts_with('/') && !line.starts_with("//");
    if (!is_command && line.starts_with('/')) line.erase(0, 1);
    if (!is_command) return false;
    std::string said, error;
    note_error(error, [&] { said = obey_command(line, options, number); });
    if (speaks && error.empty()) fputs(said.c_str(), stderr);
    if (speaks && !error.empty()) print_error(error);
    return true;
}
