/*
What came of saving a checkpoint.
*/
#pragma once

#include <cstdint>
#include <string>

#include "data/base/error.h"  // Lack

struct SaveReport {
    int64_t step = 0;
    std::string folder;
    bool weights_alone = false;  // no checkpoint to go on from
    uint64_t bytes = 0;          // the sum over all ranks
    double stalled = 0;          // seconds that training waited, on this rank
    double seconds = 0;          // time to copy, write and publish
    std::string error;           // why there is no checkpoint; empty: it is on disk
    Lack lack = Lack::none;      // the error is that there is no room
    std::string remark;          // why older ones are still there; empty: those that were to go are gone
};
