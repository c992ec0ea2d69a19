/*
The work of kernels for the units of the card that NOCARD names, printed to the file NOCARD_COUNTS when a run
ends: the microseconds that each unit needs at least, for all launches of a kernel together. The most of a row
is its bound.
*/
#pragma once

#include <string>

#include "test/nocard/kernels.h"

namespace nocard {

bool counts_units();  // NOCARD_COUNTS is set
void report_counts(const std::string& kernel, const GridCounts& counts);

}  // namespace nocard
