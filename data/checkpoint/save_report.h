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
    uint64_t bytes = 0;          // of all ranks
    double stalled = 0;          // seconds that training waited, on this rank
    double seconds = 0;          // of work: to copy, write and publish
    std::string error;           // why there is no checkpoint; empty: it is on disk
    bool disk_full = false;      // that is the error
    std::string remark;          // why older ones are still there; empty: those that were to go are gone
};
