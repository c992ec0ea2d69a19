/*
The memory of a card, which is memory of the host that begins as NaNs, and pinned memory. A shadow notes which
bytes somebody has written. Whoever reads or writes either asks here first.
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

// Or also within pinned memory, which a card reads and writes as its own.
void require_reachable(const std::string& call, const char* what, const void* address, size_t bytes);

// Ends the process if any of the bytes is memory of the card, or if they begin in pinned memory and go
// beyond.
void require_host(const std::string& call, const char* what, const void* address, size_t bytes);

// For the card's thread: notes bytes that it writes, and ends the process if it reads what nobody wrote.
void note_written(const void* address, size_t bytes);
void require_written(const std::string& call, const char* what, const void* address, size_t bytes);

// The destination's bytes are then as much written as those of the source, of the same number.
void copy_written(const void* to, const void* from, size_t bytes);

// Returns the number of the live allocation that has this address, which no other ever has; 0: there is none.
uint64_t allocation_number(const void* address);

// Memory of the card that libraries take for themselves.
void take_library_memory(size_t bytes);
void return_library_memory(size_t bytes);

// Counts the allocations that are left, for the report.
struct Leaks {
    size_t device = 0, device_bytes = 0, pinned = 0;
};
Leaks leaks();

}  // namespace nocard
