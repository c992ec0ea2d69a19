/*
Counts the work of kernels by unit of the card that NOCARD names. At the end of a run, the file NOCARD_COUNTS
receives a row for each kernel: the least time, in microseconds, that each unit needs for all its launches
together. The largest number of a row is the kernel's bound.
*/
#pragma once

#include <string>

#include "test/nocard/kernels.h"

namespace nocard {

bool counts_units();  // NOCARD_COUNTS is set
void report_counts(const std::string& kernel, const GridCounts& counts);

}  // namespace nocard
