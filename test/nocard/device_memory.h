/*
The memory of a card, which is host memory that starts as NaNs, and pinned memory. A shadow records which
bytes have been written. All code that accesses such memory checks here first.
*/
#pragma once

#include <cstddef>
#include <string>

#include "test/nocard/kernels.h"
#include "test/nocard/schedule.h"

namespace nocard {

enum class Memory {
    device,
    pinned,
    pageable,  // host memory that was allocated elsewhere
};

Memory memory_of(const void* address);

// Ends the process unless all of these bytes are within one live allocation of the card. what: "the source",
// for the message.
void require_device(const std::string& call, const char* what, const void* address, size_t bytes);

// Also accepts pinned memory, which a card reads and writes like its own.
void require_reachable(const std::string& call, const char* what, const void* address, size_t bytes);

// Ends the process if the bytes begin or end in memory of the card, cross the bounds of pinned memory, or are
// not mapped.
void require_host(const std::string& call, const char* what, const void* address, size_t bytes);

// For the card's thread: records bytes that it writes, and ends the process if it reads unwritten bytes.
void note_written(const void* address, size_t bytes);
void require_written(const std::string& call, const char* what, const void* address, size_t bytes);

// Gives each byte of the destination the written flag of its source byte.
void copy_written(const void* to, const void* from, size_t bytes);

// Returns the number of the live allocation that contains this address, or 0. Numbers are never reused.
uint64_t allocation_number(const void* address);

// Accounts for memory of the card that libraries allocate for themselves.
void take_library_memory(size_t bytes);
void return_library_memory(size_t bytes);

// Counts the allocations that are still live, for the report.
struct Leaks {
    size_t device = 0, device_bytes = 0, pinned = 0;
};
Leaks leaks();

}  // namespace nocard
