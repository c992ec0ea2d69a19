/*
What a run has done, printed when it ends where NOCARD_REPORT is set: launches, kernels, copies, products,
collectives, allocations, how many of these came in the second half of all launches, and what was not freed.
*/
#pragma once

#include <string>

namespace nocard {

void report_launch(const std::string& kernel);
void report_work(const char* kind);  // "copies"
void report_allocation(bool device);

}  // namespace nocard
