/*
Timing helpers that all benchmarks share.
*/
#pragma once

#include <algorithm>
#include <vector>

#include "test/support/simulated.h"

inline double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}
