/*
How a run is asked to stop early.
*/
#pragma once

#include <csignal>

#include "data/error.h"

static volatile sig_atomic_t stop_requested = 0;

// Ctrl-C, SIGTERM, SIGUSR1, or a terminal or pipe that closes ends the run after the step; a second Ctrl-C
// ends the program at once. SIGUSR1 is the one that mpirun passes on without killing the ranks a second
// later.
inline void request_stop(int signal) {
    stop_requested = signal;
    if (signal != SIGPIPE) std::signal(signal, SIG_DFL);  // what is still printed brings that one again
}

inline void stop_on_signals() {
    for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGPIPE}) std::signal(signal, request_stop);
    if (std::signal(SIGHUP, request_stop) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);  // started by nohup
}

// For work that leaves nothing if it does not come to its end.
inline void check_interrupted(const char* what) {
    if (stop_requested) fail("%s: interrupted; nothing was written, start it again", what);
}
