/*
Errors of code that reads and writes files; kernels/error.h defines how all errors are thrown.
*/
#pragma once

#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "kernels/error.h"  // Error, fail, text, note_error

// The resource that ran out: disk space, which anyone may free at any time; the user's quota, which the user
// can free by deleting files; or the size limit of a file.
enum class Lack { none, disk, quota, file_size };

struct DiskFull : Error {
    explicit DiskFull(const std::string& message, Lack lack = Lack::disk) : Error(message), lack(lack) {}
    Lack lack;
};

// Returns the message to print for an exception.
inline std::string message_of(const std::exception& error) {
    if (dynamic_cast<const std::bad_alloc*>(&error))
        return "out of memory; free some or choose smaller sizes";
    auto* system = dynamic_cast<const std::system_error*>(&error);
    if (system && system->code() == std::errc::resource_unavailable_try_again)
        return "the system cannot create another thread; raise the limit of processes (ulimit -u) or of the "
               "address space (ulimit -v)";
    return error.what();
}

// Returns the exit code of the program for an exception.
inline int exit_code_of(const std::exception& error) {
    auto* known = dynamic_cast<const Error*>(&error);
    return known ? known->exit_code : exit_bad_input;
}
