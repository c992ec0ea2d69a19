/*
Errors of those who read and write files; how all errors are thrown is in kernels/error.h.
*/
#pragma once

#include <exception>
#include <new>
#include <string>

#include "kernels/error.h"  // Error, fail, text, note_error

// There is no room on a disk.
struct DiskFull : Error {
    using Error::Error;
};

// Returns what to say of an exception.
inline std::string message_of(const std::exception& error) {
    bool memory = dynamic_cast<const std::bad_alloc*>(&error);
    return memory ? "out of memory; free some or choose smaller sizes" : error.what();
}
