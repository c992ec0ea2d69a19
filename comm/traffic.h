/*
How much this process has sent to other ranks, by the purpose it is sent for. The counts are those of ring
algorithms, which is what comm/nccl_over_mpi.h uses and what a bandwidth-bound NCCL comes to; so plans can be
compared with them to the byte.
*/
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "data/run/flight_record.h"  // Traffic

inline std::array<std::atomic<uint64_t>, traffic_names.size()> traffic_bytes;

// Returns the bytes that this process has sent (when its streams are done) since the start or reset_traffic.
inline uint64_t bytes_sent(Traffic kind) {
    return traffic_bytes[(size_t)kind];
}

// Returns the sum over all kinds.
inline uint64_t sent_bytes() {
    uint64_t bytes = 0;
    for (auto& of_kind : traffic_bytes) bytes += of_kind;
    return bytes;
}

inline void reset_traffic() {
    for (auto& bytes : traffic_bytes) bytes = 0;
}
