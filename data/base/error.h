/*
Errors of those who read and write files; how all errors are thrown is in kernels/error.h.
*/
#pragma once

#include <exception>
#include <new>
#include <string>

#include "kernels/error.h"  // Error, fail, text, note_error

// There is no room: on a disk, where somebody may make some at any time; in the quota of a user, who can
// delete files; or in a file, whose size is limited.
enum class Lack { none, disk, quota, file_size };

struct DiskFull : Error {
    explicit DiskFull(const std::string& message, Lack lack = Lack::disk) : Error(message), lack(lack) {}
    Lack lack;
};

// Returns what to say of an exception.
inline std::string message_of(const std::exception& error) {
    bool memory = dynamic_cast<const std::bad_alloc*>(&error);
    return memory ? "out of memory; free some or choose smaller sizes" : error.what();
}

// Returns what the program exits with because of it.
inline int exit_code_of(const std::exception& error) {
    auto* known = dynamic_cast<const Error*>(&error);
    return known ? known->exit_code : exit_bad_input;
}
