/*
What came of saving a checkpoint.
*/
#pragma once

#include <cstdint>
#include <string>

struct SaveReport {
    int64_t step = 0;
    std::string folder;
    bool weights_alone = false;  // no checkpoint to go on from
    uint64_t bytes = 0;          // the sum over all ranks
    double stalled = 0;          // seconds that training waited, on this rank
    double seconds = 0;          // time to copy, write and publish
    std::string error;           // why there is no checkpoint; empty: it is on disk
    bool disk_full = false;      // the error is that the disk is full
    std::string remark;          // why older ones are still there; empty: those that were to go are gone
};
