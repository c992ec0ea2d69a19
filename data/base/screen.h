/*
The screen: what is printed on it, and a line that stays below.

A program that draws a line over and over and prints others meanwhile does so from several threads. They take
turns here: whoever prints holds a Screen::Turn, for which the line that stays is taken away, and behind which
it is drawn again. It is drawn with the cursor at its beginning and never wraps. So one sequence, "go to the
beginning, clear all behind", takes it away even when the terminal has become narrower and has broken it in
two, and what others print (a launcher, the ^C of the keyboard) is not appended to it.

Where the output is no terminal, there is no such line, no colour, and turns do nothing but flush. mpirun
shows its processes a terminal whatever its own output is; so what counts there is where mpirun's goes. Other
launchers cannot be asked.
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

// The terminal that a process of this user writes to, by its path; empty if its output goes elsewhere.
inline std::string terminal_of_process(pid_t process) {
    struct stat status;
    if (stat(text("/proc/%d", (int)process).c_str(), &status) != 0 || status.st_uid != getuid()) return "";
    char name[64];
    ssize_t length = readlink(text("/proc/%d/fd/1", (int)process).c_str(), name, sizeof name);
    std::string path(name, (size_t)std::max<ssize_t>(length, 0));
    bool virtual_console = path.size() > 8 && path.starts_with("/dev/tty") && isdigit(path[8]);
    return path.starts_with("/dev/pts/") || virtual_console ? path : "";
}

// The terminal of the mpirun that started this process on its own machine; empty if there is none, or if it
// changes the lines on their way there.
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

// Tells whether a terminal shows what this process prints. mpirun gives its processes terminals of their own,
// and what counts is where its own output goes.
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

    // Looks at where the output goes. launched: this process was started by mpirun or another launcher.
    // quiet: nothing that is printed is shown, but warnings, which go to standard error.
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

    // The last words of a quiet run are shown.
    void end_quiet() {
        if (kept_output_ < 0) return;
        fflush(stdout);
        dup2(kept_output_, STDOUT_FILENO);
        close(kept_output_);
        kept_output_ = -1;
    }

    bool is_terminal() const { return terminal_ >= 0; }
    bool has_colour() const { return colour_; }

    // For lines that a signal handler writes: where, and what comes before them, which takes away the line
    // that stays, or goes behind the ^C of the keyboard.
    int descriptor_of_signals() const { return kept_output_ >= 0 ? STDERR_FILENO : STDOUT_FILENO; }
    const char* before_signal_line() const { return before_signal_line_; }

    // Columns, which may change at any time; 80 where they are not known.
    int width() const {
        winsize size = {};
        bool known = terminal_ >= 0 && ioctl(terminal_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
        return known ? size.ws_col : 80;
    }

    // Nobody else prints while it lives, and the line that stays is away. Turns may be nested.
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

    // A warning, on a line of its own. What was said in the warning before is not said again.
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

    // Keeps this line below all others. It is asked for at each drawing, and gives as much as fits into so
    // many columns.
    void keep_below(Line line) {
        std::lock_guard lock(mutex_);
        if (is_terminal()) line_ = std::move(line);
        refresh();
    }
    // Draws it as it is now.
    void refresh() {
        std::lock_guard lock(mutex_);
        if (turns_ == 0) draw();
    }
    // It is gone.
    void remove_line() {
        std::lock_guard lock(mutex_);
        clear();
        fflush(output_);
        line_ = nullptr;
    }

    // The process ends at once, with a message on standard error. The thread that has its turn may be stuck.
    void give_up() {
        given_up_ = true;
        if (!lock_within(0.1, mutex_)) return;
        clear();
        fflush(output_);
        mutex_.unlock();
    }

private:
    // Standard output goes nowhere until end_quiet().
    void silence() {
        fflush(stdout);
        int nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
        kept_output_ = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
        if (nowhere < 0 || kept_output_ < 0 || dup2(nowhere, STDOUT_FILENO) < 0)
            fail_with_errno("/dev/null", "write it");
        close(nowhere);
    }

    // `process` has the terminal as its own, while it is in the foreground.
    void show_on(int terminal, pid_t process) {
        terminal_ = terminal;
        process_ = process;
        const char* no_color = getenv("NO_COLOR");
        colour_ = !no_color || !*no_color;
        before_signal_line_ = away;
    }

    // A job in the background does not draw into what the user does in the foreground.
    bool in_foreground() const {
        pid_t foreground = tcgetpgrp(terminal_);
        return foreground < 0 || foreground == getpgid(process_);
    }

    void clear() {
        if (drawn_) fputs(away, output_);
        drawn_ = false;
    }

    // In one piece, so that no other process writes in between; without wrapping meanwhile.
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

    int terminal_ = -1;  // a descriptor; -1: there is none
    pid_t process_ = 0;
    bool colour_ = false;
    std::string last_warning_;
    const char* before_signal_line_ = "";
    int own_descriptor_ = -1;
    int kept_output_ = -1;  // the real standard output during a quiet run
};

inline Screen screen;  // the one of this process
