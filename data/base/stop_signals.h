/*
How a run is asked to stop early. It ends after the current step, with a checkpoint, no matter how often it is
asked: a scheduler sends its signal both to the launcher and to the processes that the launcher forwards it
to. Only a second Ctrl-C ends the program at once.
*/
#pragma once

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string>
#include <unistd.h>

#include "data/base/error.h"

inline volatile sig_atomic_t stop_requested = 0;  // the first signal received; 0: none
// The step after which the run ends if it is asked to stop now, for the message that reports this; -1: not a
// training run.
inline volatile sig_atomic_t step_to_stop_after = -1;
// The descriptor that the message goes to, and the characters that clear its line on a terminal.
inline volatile sig_atomic_t stop_line_to = STDOUT_FILENO;
inline const char* volatile before_stop_line = "";

// Set while a run waits for an action of the user: then Ctrl-C, SIGTERM or SIGUSR1 only ends the wait.
inline volatile sig_atomic_t waits_for_user = false;

// A line built in a signal handler, which may neither allocate memory nor call printf.
class SignalLine {
public:
    SignalLine& operator<<(const char* words) {
        while (*words) add(*words++);
        return *this;
    }
    SignalLine& operator<<(int number) {
        if (number >= 10) *this << number / 10;
        add((char)('0' + number % 10));
        return *this;
    }
    void write_to(int descriptor) const {
        [[maybe_unused]] ssize_t written = write(descriptor, text_, length_);
    }

private:
    void add(char letter) {
        if (length_ < sizeof text_) text_[length_++] = letter;
    }

    char text_[160];
    size_t length_ = 0;
};

inline const char* stop_signal_name(int signal) {
    return signal == SIGTERM ? "SIGTERM" : signal == SIGUSR1 ? "SIGUSR1" : "SIGHUP";
}

// Prints what will happen. Only the first rank's standard output is shown.
inline void announce_stop(int signal) {
    if (step_to_stop_after < 0 || signal == SIGPIPE) return;  // SIGPIPE: no reader is left
    SignalLine line;
    line << before_stop_line;
    if (signal != SIGINT) line << stop_signal_name(signal) << ": ";
    line << "stopping after step " << (int)step_to_stop_after << ", then saving";
    if (signal == SIGINT) line << " (Ctrl-C again: quit now without saving)";
    line << "\n";
    line.write_to(stop_line_to);
}

inline void request_stop(int signal) {
    static volatile sig_atomic_t interrupted = false, announced = false;
    if (waits_for_user && signal != SIGPIPE && signal != SIGHUP) {
        waits_for_user = false;
        return;
    }
    int reason = errno;  // errno of the interrupted call
    if (signal == SIGINT && interrupted) {
        std::signal(SIGINT, SIG_DFL);
        raise(SIGINT);  // delivered when this handler returns
        return;
    }
    if (signal == SIGINT || !announced) announce_stop(signal);
    announced = true;
    if (signal == SIGINT) interrupted = true;
    if (!stop_requested) stop_requested = signal;
    errno = reason;
}

inline void stop_on_signals(int descriptor = STDOUT_FILENO, const char* before_line = "") {
    stop_line_to = descriptor;
    before_stop_line = before_line;
    for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGPIPE}) std::signal(signal, request_stop);
    if (std::signal(SIGHUP, request_stop) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);  // started by nohup
}

// For work that has nothing to save: the first Ctrl-C asks the work to end, and a second one ends the
// program.
inline void stop_on_interrupt() {
    stop_requested = 0;
    std::signal(SIGINT, [](int signal) {
        stop_requested = signal;
        std::signal(signal, SIG_DFL);
    });
}

// Returns advice for users of a launcher on how to stop the run; empty if there is none.
inline std::string launcher_advice() {
    if (!getenv("OMPI_COMM_WORLD_SIZE") || getenv("OMPI_MCA_odls_base_sigkill_timeout")) return "";
    return "SIGUSR1 to mpirun ends the run with a checkpoint; on SIGTERM or Ctrl-C mpirun kills its\n"
           "             ranks after 2 s; --mca odls_base_sigkill_timeout 600 gives them time to save";
}

// Fails if the user interrupted work that has no result unless it finishes.
inline void check_interrupted(const char* what) {
    if (stop_requested) fail("%s: interrupted and nothing was written; start it again", what);
}
