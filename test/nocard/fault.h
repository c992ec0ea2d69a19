/*
What is wrong with a program is said in one line, and ends it: a card would have computed something else, or
crashed later and elsewhere.
*/
#pragma once

#include <string>

namespace nocard {

// The exit code of a program that a check has ended.
constexpr int exit_of_fault = 86;

// printf's text.
__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...);

// Prints "nocard: CALL: REASON" and ends the process, by abort() where NOCARD_ABORT is set, for a debugger.
[[noreturn]] void fault(const std::string& call, const std::string& reason);

// A setting in the environment.
long setting(const char* name, long otherwise);

// The seed of this process: NOCARD_SEED (1), another for each rank.
unsigned long seed_of_process();

// This process's number on its machine, as mpirun tells it; 0 without.
int local_rank();

}  // namespace nocard
