/*
How errors are reported, from the lowest layer up: fail() throws; main() prints the message as one line and
exits with the error's code. Destructors undo unfinished work on the way.
*/
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>

// Exit codes, for scripts that restart the program: a restart is worthwhile only after the last of these.
constexpr int exit_bad_input = 1;     // the user's input: options, files, a machine that is too small
constexpr int exit_not_finite = 70;   // a loss or a gradient is not finite, or spikes return after going back
constexpr int exit_failed_part = 75;  // another process, a link, a device or a disk (sysexits.h: EX_TEMPFAIL)

struct Error : std::runtime_error {
    explicit Error(const std::string& message, int exit_code = exit_bad_input)
        : std::runtime_error(message), exit_code(exit_code) {}
    int exit_code;
};

// The failure of a part (a process, a link, a device or a disk) that may work again later.
struct FailedPart : Error {
    explicit FailedPart(const std::string& message) : Error(message, exit_failed_part) {}
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

// Throws FailedPart: a process, a link, a device or a disk has failed.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail_part(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string message = text_of(format, arguments);
    va_end(arguments);
    throw FailedPart(message);
}

// An error that is kept until it can be reported.
struct NotedError {
    int exit_code = exit_bad_input;
    std::string message;  // empty: there is no error

    bool empty() const { return message.empty(); }
    void raise() const {
        if (!empty()) throw Error(message, exit_code);
    }
};

// Runs work where nothing may be thrown, such as in a step that ranks can only leave together. Notes the
// error unless one was noted before.
template <typename Work>
void note_error(NotedError& noted, Work&& work) {
    try {
        work();
    } catch (const Error& thrown) {
        if (noted.empty()) noted = {thrown.exit_code, thrown.what()};
    }
}

// Notes only the message, for errors after which the program continues.
template <typename Work>
void note_error(std::string& message, Work&& work) {
    NotedError noted = {exit_bad_input, message};
    note_error(noted, work);
    message = noted.message;
}

// While one of these exists, launchers of its thread note their errors instead of throwing them, so that a
// rank whose launch has failed still takes part in everything that the other ranks do, until they can learn
// of the failure.
class NotedLaunchErrors {
public:
    explicit NotedLaunchErrors(NotedError& error) : outer_(std::exchange(place_, &error)) {}
    ~NotedLaunchErrors() { place_ = outer_; }
    NotedLaunchErrors(const NotedLaunchErrors&) = delete;
    NotedLaunchErrors& operator=(const NotedLaunchErrors&) = delete;

    // Runs a launcher's work, which may throw.
    template <typename Work>
    static void run(Work&& work) {
        if (place_)
            note_error(*place_, work);
        else
            work();
    }

private:
    inline static thread_local NotedError* place_ = nullptr;
    NotedError* const outer_;
};
