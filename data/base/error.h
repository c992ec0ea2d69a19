/*
How bad input is reported: fail() throws, main() prints the one line and exits with code 1. What was half done
is undone on the way by destructors.
*/
#pragma once

#include <cstdarg>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// There is no room on a disk.
struct DiskFull : Error {
    using Error::Error;
};

inline std::string text_of(const char* format, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    std::string result((size_t)vsnprintf(nullptr, 0, format, again), '\0');
    va_end(again);
    vsnprintf(result.data(), result.size() + 1, format, arguments);
    return result;
}

// printf into a std::string.
__attribute__((format(printf, 1, 2))) inline std::string text(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string result = text_of(format, arguments);
    va_end(arguments);
    return result;
}

// The message names the thing (file, option), then the reason, then the remedy: "FILE: reason; do this".
// (A function, because a macro of this name breaks the standard headers that declare ios::fail().)
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string message = text_of(format, arguments);
    va_end(arguments);
    throw Error(message);
}

// What to say of an exception.
inline std::string message_of(const std::exception& error) {
    bool memory = dynamic_cast<const std::bad_alloc*>(&error);
    return memory ? "memory: the system gives no more; free some or choose smaller sizes" : error.what();
}

// Runs what cannot throw where it is, on one of several ranks, say, which cannot leave a step alone. What
// goes wrong is kept for the moment when it can be reported; the first counts.
template <typename Work>
void note_error(std::string& error, Work&& work) {
    try {
        work();
    } catch (const Error& thrown) {
        if (error.empty()) error = thrown.what();
    }
}
