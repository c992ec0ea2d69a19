/*
Reports an error of the program in one line and ends the program. A card would have computed something else,
or crashed later and elsewhere.
*/
#pragma once

#include <string>

namespace nocard {

// The exit code of a program that a check has ended.
constexpr int exit_of_fault = 86;

// Formats as printf() does.
__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...);

// Prints "nocard: CALL: REASON" and ends the process, with abort() if NOCARD_ABORT is set, for a debugger.
[[noreturn]] void fault(const std::string& call, const std::string& reason);

// Returns a number from the environment, or `otherwise` if the variable is unset or empty.
long setting(const char* name, long otherwise);

// Returns the seed of this process: NOCARD_SEED (1), varied by rank.
unsigned long seed_of_process();

// Returns this process's number on its machine, which mpirun sets, or 0 without mpirun.
int local_rank();

}  // namespace nocard
