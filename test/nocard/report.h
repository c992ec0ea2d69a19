/*
A summary of a run, printed at its end if NOCARD_REPORT is set: launches, kernels, copies, products,
collectives, allocations, how many of those on the card were made in the second half of the launches, and what
was not freed.
*/
#pragma once

#include <string>

namespace nocard {

void report_launch(const std::string& kernel);
void report_work(const char* kind);  // "copies"
void report_allocation(bool device);

}  // namespace nocard
