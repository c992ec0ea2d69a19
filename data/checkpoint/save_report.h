/*
The outcome of saving a checkpoint.
*/
#pragma once

#include <cstdint>
#include <string>

#include "data/base/error.h"  // Lack

struct SaveReport {
    int64_t step = 0;
    std::string folder;
    bool weights_alone = false;  // no full checkpoint to resume from
    uint64_t bytes = 0;          // the sum over all ranks
    double stalled = 0;          // seconds that training waited, on this rank
    double seconds = 0;          // time to copy, write and publish
    std::string error;           // why there is no checkpoint; empty: it is on disk
    Lack lack = Lack::none;      // the kind of space that ran out, if that is the error
    std::string remark;          // why old checkpoints were not removed; empty: they were
};
