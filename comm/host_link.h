/*
The link over which a process sends: what goes over it is counted, and it can be made as slow as a real one.
Ranks on one machine talk through memory, which is too fast to show what communication costs; a slow link
shows whether a run hides it behind its computation.
*/
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "comm/patience.h"  // Clock

// One full-duplex link, shared by all threads of the process: messages leave one after another.
class HostLink {
public:
    // 0: as fast as they go.
    void set_speed(double gigabytes_per_second) {
        std::lock_guard lock(mutex_);
        bytes_per_nanosecond_ = gigabytes_per_second;
        free_at_ = {};
    }

    // When the last byte of a message that is ready now has left; it is sent then, as a whole.
    Clock::time_point book(size_t bytes) {
        std::lock_guard lock(mutex_);
        if (bytes_per_nanosecond_ <= 0) return {};
        auto duration = std::chrono::duration<double, std::nano>((double)bytes / bytes_per_nanosecond_);
        free_at_ = std::max(free_at_, Clock::now()) + std::chrono::ceil<Clock::duration>(duration);
        return free_at_;
    }

    std::atomic<uint64_t> bytes_sent = 0;

private:
    std::mutex mutex_;
    double bytes_per_nanosecond_ = 0;
    Clock::time_point free_at_;
};
inline HostLink host_link;

// What this process sends is held to this speed. 0: off.
inline void host_link_speed(double gigabytes_per_second) {
    host_link.set_speed(gigabytes_per_second);
}

// What collectives of this process gave to MPI to send.
inline uint64_t host_bytes_sent() {
    return host_link.bytes_sent;
}
