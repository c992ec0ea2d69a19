/*
Errors of code that reads and writes files; kernels/error.h defines how all errors are thrown.
*/
#pragma once

#include <exception>
#include <new>
#include <string>

#include "kernels/error.h"  // Error, fail, text, note_error

// The resource that ran out: disk space, which anyone may free at any time; the user's quota, for which the
// user can delete files; or the size limit of a file.
enum class Lack { none, disk, quota, file_size };

struct DiskFull : Error {
    explicit DiskFull(const std::string& message, Lack lack = Lack::disk) : Error(message), lack(lack) {}
    Lack lack;
};

// Returns the message to print for an exception.
inline std::string message_of(const std::exception& error) {
    bool memory = dynamic_cast<const std::bad_alloc*>(&error);
    return memory ? "out of memory; free some or choose smaller sizes" : error.what();
}

// Returns the exit code of the program for an exception.
inline int exit_code_of(const std::exception& error) {
    auto* known = dynamic_cast<const Error*>(&error);
    return known ? known->exit_code : exit_bad_input;
}
