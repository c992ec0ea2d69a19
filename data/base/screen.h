/*
The screen: lines printed on it, and a status line that stays below them.

Several threads redraw a status line and print other lines at the same time. They take turns: a thread that
prints holds a Screen::Turn, which clears the status line and redraws it at the end. The line is drawn with
the cursor left at its beginning, and never wraps. So one sequence, "return to the beginning, clear everything
after", erases it even when the terminal has become narrower and has broken it in two, and output of other
processes (a launcher, the ^C of the keyboard) is not appended to it.

If the output is not a terminal, there is no status line and no color, and turns only flush. mpirun gives its
processes a terminal even if its own output goes elsewhere, so under mpirun it is mpirun's output that counts.
Other launchers cannot be checked.
*/
#pragma once

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <sstream>
#include <string>

#include "data/base/deadlines.h"  // lock_within
#include "data/base/error.h"
#include "data/base/file.h"  // fail_with_errno
#include "data/base/print.h"
#include "data/base/this_machine.h"  // process_file

// ----------------------------------------------------------------------------
// terminals of other processes

// The path of the terminal that a process of this user writes to; empty if its output goes elsewhere.
inline std::string terminal_of_process(pid_t process) {
    struct stat status;
    if (stat(text("/proc/%d", (int)process).c_str(), &status) != 0 || status.st_uid != getuid()) return "";
    char name[64];
    ssize_t length = readlink(text("/proc/%d/fd/1", (int)process).c_str(), name, sizeof name);
    std::string path(name, (size_t)std::max<ssize_t>(length, 0));
    bool virtual_console = path.size() > 8 && path.starts_with("/dev/tty") && isdigit(path[8]);
    return path.starts_with("/dev/pts/") || virtual_console ? path : "";
}

// The terminal of the mpirun that started this process on the same machine; empty if there is none, or if
// mpirun changes the lines that it passes on.
inline std::string launcher_terminal() {
    pid_t parent = getppid();
    if (!is_mpirun(process_file(process_folder(parent), "comm"))) return "";
    std::istringstream arguments(process_file(process_folder(parent), "cmdline"));
    for (std::string argument; std::getline(arguments, argument, '\0');) {
        bool changes_lines =
            argument.find("output") != std::string::npos || argument.find("xml") != std::string::npos;
        if (argument.starts_with("-") && changes_lines) return "";
    }
    return terminal_of_process(parent);
}

// Returns whether a terminal shows what this process prints. mpirun gives each of its processes a terminal,
// so under mpirun it is mpirun's output that counts.
inline bool is_shown_on_terminal() {
    if (!isatty(STDOUT_FILENO)) return false;
    pid_t parent = getppid();
    return !is_mpirun(process_file(process_folder(parent), "comm")) || !terminal_of_process(parent).empty();
}

// ----------------------------------------------------------------------------

class Screen {
public:
    using Line = std::function<std::string(int width)>;

    explicit Screen(FILE* output = stdout) : output_(output) {}
    ~Screen() {
        if (own_descriptor_ >= 0) close(own_descriptor_);
        if (kept_output_ >= 0) close(kept_output_);
    }

    // Finds out where the output goes. launched: this process was started by mpirun or another launcher.
    // quiet: nothing printed is shown except warnings, which go to standard error.
    void open(bool launched, bool quiet) {
        if (quiet) return silence();
        bool is_terminal = isatty(fileno(output_));
        before_signal_line_ = is_terminal && !launched ? "\n" : "";
        const char* kind = getenv("TERM");
        if (!is_terminal || !kind || !*kind || std::string(kind) == "dumb") return;
        if (!launched) {
            show_on(fileno(output_), getpid());
        } else if (std::string path = launcher_terminal(); !path.empty()) {
            own_descriptor_ = ::open(path.c_str(), O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
            if (own_descriptor_ >= 0) show_on(own_descriptor_, getppid());
        }
    }

    // Restores standard output, so that the last lines of a quiet run are shown.
    void end_quiet() {
        if (kept_output_ < 0) return;
        fflush(stdout);
        dup2(kept_output_, STDOUT_FILENO);
        close(kept_output_);
        kept_output_ = -1;
    }

    bool is_terminal() const { return terminal_ >= 0; }
    bool has_colour() const { return colour_; }

    // For lines that a signal handler writes: the descriptor, and a prefix that clears the status line, or
    // moves past the ^C of the keyboard.
    int descriptor_of_signals() const { return kept_output_ >= 0 ? STDERR_FILENO : STDOUT_FILENO; }
    const char* before_signal_line() const { return before_signal_line_; }

    // The width in columns, which may change at any time; 80 if unknown.
    int width() const {
        winsize size = {};
        bool known = terminal_ >= 0 && ioctl(terminal_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
        return known ? size.ws_col : 80;
    }

    // While it lives, no other thread prints, and the status line is cleared. Turns may be nested.
    class Turn {
    public:
        explicit Turn(Screen& screen) : screen_(screen), lock_(screen.mutex_) {
            if (screen_.turns_++ == 0) screen_.clear();
        }
        ~Turn() {
            fflush(screen_.output_);
            if (--screen_.turns_ == 0) screen_.draw();
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;

    private:
        Screen& screen_;
        std::lock_guard<std::recursive_mutex> lock_;
    };

    // Prints a warning on its own line, unless it repeats the previous warning.
    void warn(const std::string& words, const char* indent = "") {
        Turn turn(*this);
        if (std::exchange(last_warning_, words) == words) return;
        if (kept_output_ >= 0)
            print_error(words);
        else
            printf("%s%s\n", indent, yellow(visible(words)).c_str());
    }

    std::string yellow(const std::string& words) const {
        return colour_ ? "\033[33m" + words + "\033[0m" : words;
    }

    // Keeps a status line below all others. line(width) is called for each drawing, and returns at most
    // `width` columns.
    void keep_below(Line line) {
        std::lock_guard lock(mutex_);
        if (is_terminal()) line_ = std::move(line);
        refresh();
    }
    // Redraws the status line with its current text.
    void refresh() {
        std::lock_guard lock(mutex_);
        if (turns_ == 0) draw();
    }
    // Removes the status line.
    void remove_line() {
        std::lock_guard lock(mutex_);
        clear();
        fflush(output_);
        line_ = nullptr;
    }

    // Clears the status line before the process ends at once, with a message on standard error. The thread
    // that holds a turn may be stuck, so the wait for it is short.
    void give_up() {
        given_up_ = true;
        if (!lock_within(0.1, mutex_)) return;
        clear();
        fflush(output_);
        mutex_.unlock();
    }

private:
    // Discards standard output until end_quiet().
    void silence() {
        fflush(stdout);
        int nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
        kept_output_ = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
        if (nowhere < 0 || kept_output_ < 0 || dup2(nowhere, STDOUT_FILENO) < 0)
            fail_with_errno("/dev/null", "write it");
        close(nowhere);
    }

    // Draws on the terminal of `process`, but only while that is in the foreground.
    void show_on(int terminal, pid_t process) {
        terminal_ = terminal;
        process_ = process;
        const char* no_color = getenv("NO_COLOR");
        colour_ = !no_color || !*no_color;
        before_signal_line_ = away;
    }

    // A background job does not draw over the user's foreground work.
    bool in_foreground() const {
        pid_t foreground = tcgetpgrp(terminal_);
        return foreground < 0 || foreground == getpgid(process_);
    }

    void clear() {
        if (drawn_) fputs(away, output_);
        drawn_ = false;
    }

    // Writes the line in one call, so that no other process writes in between, and turns wrapping off
    // meanwhile.
    void draw() {
        if (!line_ || given_up_ || !in_foreground()) return;
        std::string line = line_(width());
        if (line.empty()) return clear(), (void)fflush(output_);
        fputs(("\r\033[?7l" + line + "\033[J\r\033[?7h").c_str(), output_);
        fflush(output_);
        drawn_ = true;
    }

    static constexpr const char* away = "\r\033[J";

    FILE* const output_;
    std::recursive_mutex mutex_;
    int turns_ = 0;
    Line line_;
    bool drawn_ = false;
    std::atomic<bool> given_up_ = false;

    int terminal_ = -1;  // a descriptor; -1: none
    pid_t process_ = 0;
    bool colour_ = false;
    std::string last_warning_;
    const char* before_signal_line_ = "";
    int own_descriptor_ = -1;
    int kept_output_ = -1;  // the real standard output during a quiet run
};

inline Screen screen;  // the screen of this process
