// The screen of a run: the status line, fitted to the terminal's width, and the terminal of a process.
#include <fcntl.h>
#include <sys/wait.h>

#include <memory>

#include "data/base/terminal.h"
#include "data/run/status_line.h"
#include "test/support/file_testing.h"

// A pseudo-terminal: processes write to `slave`, and written() returns what has arrived.
class PseudoTerminal {
public:
    PseudoTerminal() : master_(posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK)) {
        REQUIRE(master_ >= 0);
        REQUIRE(grantpt(master_) == 0);
        REQUIRE(unlockpt(master_) == 0);
        path = ptsname(master_);
        slave = open(path.c_str(), O_RDWR | O_NOCTTY);
        REQUIRE(slave >= 0);
    }
    ~PseudoTerminal() {
        close(slave);
        close(master_);
    }

    void resize(int columns) {
        winsize size = {};
        size.ws_row = 24, size.ws_col = (unsigned short)columns;
        REQUIRE(ioctl(master_, TIOCSWINSZ, &size) == 0);
    }

    // Returns the output since the last call.
    std::string written() {
        char buffer[4096];
        std::string all;
        for (ssize_t got; (got = read(master_, buffer, sizeof buffer)) > 0;) all.append(buffer, (size_t)got);
        return all;
    }

    std::string path;
    int slave;

private:
    int master_;
};

// Redirects standard output, or another descriptor, to the terminal while it lives, with a terminal's
// environment.
class OnTerminal {
public:
    explicit OnTerminal(const PseudoTerminal& terminal, const char* kind = "xterm",
                        int descriptor = STDOUT_FILENO)
        : descriptor_(descriptor) {
        fflush(stdout);
        output_ = dup(descriptor_);
        dup2(terminal.slave, descriptor_);
        setenv("TERM", kind, 1);
        unsetenv("NO_COLOR");
    }
    ~OnTerminal() {
        fflush(stdout);
        dup2(output_, descriptor_);
        close(output_);
    }

private:
    const int descriptor_;
    int output_;
};

static RunStatus some_status() {
    RunStatus status;
    status.step = 812, status.steps = 5000;
    status.work = "micro-batch", status.done = 3, status.of = 8;
    status.share = 0.5;
    status.seconds_left = 700;
    status.slowest = "slowest rank 5 (forward 1.3x)";
    status.next_checkpoint = "in 188 steps";
    return status;
}

TEST_CASE("the status fits into any number of columns, the most important of it longest") {
    RunStatus status = some_status();
    CHECK(status_text(status, 120) ==
          "step 812/5000  micro-batch 3/8  [========>        ]  12 min left  slowest rank 5 (forward 1.3x)  "
          "checkpoint in 188 steps");
    CHECK(status_text(status, 79) ==
          "step 812/5000  micro-batch 3/8  12 min left  slowest rank 5 (forward 1.3x)");
    status.slowest.clear();
    CHECK(status_text(status, 79) ==
          "step 812/5000  micro-batch 3/8  [===>   ]  12 min left  checkpoint in 188 steps");
    CHECK(status_text(status, 49) == "step 812/5000  micro-batch 3/8  12 min left");
    CHECK(status_text(status, 30) == "step 812/5000  12 min left");
    CHECK(status_text(status, 13) == "step 812/5000");
    CHECK(status_text(status, 6) == "step 8");
    CHECK(status_text(status, 0) == "");
    CHECK(status_text(status, -1) == "");
    for (RunStatus other : {status, some_status(), RunStatus()}) {
        for (int columns = 0; columns < 300; columns++)
            CHECK((int)status_text(other, columns).size() <= columns);
    }
}

TEST_CASE("the status without what is not known, and in colour") {
    RunStatus status;
    status.step = 1, status.steps = 6, status.work = "saving";
    CHECK(status_text(status, 24) == "step 1/6  saving");
    CHECK(status_text(status, 30) == "step 1/6  saving  [>         ]");
    std::string coloured = status_text(some_status(), 79, true);
    CHECK(coloured ==
          "\033[2mstep 812/5000  micro-batch 3/8  12 min left  \033[22;33mslowest rank 5 (forward "
          "1.3x)\033[39;2m\033[0m");
    CHECK(status_text(some_status(), 79).find('\033') == std::string::npos);
}

TEST_CASE("times and shares as one reads them in passing") {
    CHECK(rough_duration(0) == "0 s");
    CHECK(rough_duration(89.4) == "89 s");
    CHECK(rough_duration(89.6) == "1 min");
    CHECK(rough_duration(700) == "12 min");
    CHECK(rough_duration(2 * 3600 + 300) == "2 h 05 min");
    CHECK(rough_duration(75 * 3600) == "3 d 3 h");
    CHECK(progress_bar(0, 8) == "[>     ]");
    CHECK(progress_bar(0.5, 8) == "[===>  ]");
    CHECK(progress_bar(1, 8) == "[======]");
    CHECK(progress_bar(7, 8) == "[======]");
}

TEST_CASE("a run draws its status below what is printed, and leaves nothing behind") {
    PseudoTerminal terminal;
    terminal.resize(60);
    std::string first, after_line, at_end;
    {
        OnTerminal on(terminal);
        Screen screen;
        screen.open(false, false);
        REQUIRE(screen.is_terminal());
        PassProgress pass = {2.5f, 8};
        StatusLine status(screen, 5000, [&] { return pass; });
        screen.warn("before");
        CHECK(terminal.written() == "\033[33mbefore\033[0m\r\n");
        status.begin_step(812);
        screen.refresh();
        first = terminal.written();
        {
            Screen::Turn turn(screen);
            printf("a line\n");
            Screen::Turn nested(screen);
            printf("another\n");
        }
        after_line = terminal.written();
        status.end();
        at_end = terminal.written();
    }
    std::string drawn = "\r\033[?7l\033[2mstep 812/5000  micro-batch 3/8  [";
    CHECK(first.starts_with(drawn));
    CHECK(after_line.find("\r\033[Ja line\r\nanother\r\n" + drawn) != std::string::npos);
    CHECK(at_end.ends_with("\r\033[J"));
    CHECK(at_end.find("step", at_end.rfind("\033[?7h")) == std::string::npos);
}

TEST_CASE(
    "progress of long work is drawn on standard error, if that is a screen, and leaves nothing behind") {
    PseudoTerminal terminal;
    auto written = [&](const char* kind) {
        OnTerminal on(terminal, kind, STDERR_FILENO);
        ProgressLine progress("data", 100, "files");
        progress.add(25, 0.9);
        CHECK(terminal.written().empty());
        progress.add(25, 1.1);
        progress.add(25, 1.2);  // too soon to be drawn
        progress.clear();
        return terminal.written();
    };
    std::string drawn = written("xterm");
    CHECK(drawn.starts_with("\r\033[?7ldata:  50% of 100 files, 45 files/s, 1 s left\033[J\r\033[?7h"));
    CHECK(drawn.ends_with("\r\033[?7h\r\033[J"));
    CHECK(drawn.find("75%") == drawn.npos);
    CHECK(written("dumb").empty());
}

TEST_CASE("the status follows the width, the pass and the clock") {
    PseudoTerminal terminal;
    OnTerminal on(terminal);
    Screen screen;
    screen.open(false, false);
    CHECK(screen.width() == 80);  // a new terminal has no size
    for (int columns : {50, 120, 80}) {
        terminal.resize(columns);
        CHECK(screen.width() == columns);
    }
    PassProgress pass = {0, 4};
    StatusLine status(screen, 2, [&] { return pass; });
    status.begin_step(2);
    CHECK(status.drawn(36, false) == "step 2/2  micro-batch 1/4  [===>   ]");
    pass = {3, 4};
    CHECK(status.drawn(36, false) == "step 2/2  micro-batch 4/4  [======>]");
    pass = {4, 4};
    CHECK(status.drawn(36, false) == "step 2/2  micro-batch 4/4  [=======]");
    status.begin_work("validation", 2, true);
    pass = {1, 7};
    CHECK(status.drawn(24, false) == "step 2/2  validation 2/7");
    status.begin_work("saving", 2, false);
    CHECK(status.drawn(24, false) == "step 2/2  saving");
    status.set_slowest("slowest rank 5");
    status.set_next_checkpoint("after this step");
    status.set_seconds_left(0.2);
    CHECK(status.drawn(70, false) ==
          "step 2/2  saving  0 s left  slowest rank 5  checkpoint after this step");
}

TEST_CASE("no status and no colour where nobody would see them") {
    PseudoTerminal terminal;
    auto shown = [&](Screen& screen) {
        StatusLine status(screen, 10, [] { return PassProgress(); });
        status.begin_step(1);
        screen.warn("warned");
        status.end();
        fflush(stdout);
        return terminal.written();
    };
    {
        OnTerminal on(terminal, "dumb");
        Screen screen;
        screen.open(false, false);
        CHECK(shown(screen) == "warned\r\n");
        CHECK(screen.before_signal_line() == std::string("\n"));
    }
    {
        OnTerminal on(terminal);
        setenv("NO_COLOR", "1", 1);
        Screen screen;
        screen.open(false, false);
        std::string all = shown(screen);
        CHECK(all.find("\033[33m") == std::string::npos);
        CHECK(all.find("\033[2m") == std::string::npos);
        CHECK(all.find("step 1/10") != std::string::npos);
    }
    {
        OnTerminal on(terminal);
        Screen screen;
        screen.open(true, false);  // claims a launcher, but this process's parent is not one
        CHECK(shown(screen) == "warned\r\n");
    }
    {
        OnTerminal on(terminal);
        dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
        Screen screen;
        screen.open(false, false);
        CHECK(!screen.is_terminal());
    }
}

TEST_CASE("a quiet run shows its warnings on standard error, and its last words") {
    PseudoTerminal terminal;
    TemporaryFolder folder;
    int error = dup(STDERR_FILENO), file = open((folder / "errors").c_str(), O_CREAT | O_WRONLY, 0600);
    {
        OnTerminal on(terminal);
        dup2(file, STDERR_FILENO);
        Screen screen;
        screen.open(false, true);
        CHECK(!screen.is_terminal());
        CHECK(screen.descriptor_of_signals() == STDERR_FILENO);
        printf("a header\n");
        screen.warn("too warm", "     ");
        screen.end_quiet();
        printf("done\n");
        fflush(stdout);
    }
    dup2(error, STDERR_FILENO);
    close(error), close(file);
    CHECK(terminal.written() == "done\r\n");
    CHECK(contents(folder / "errors") == "train_gpt: too warm\n");
}

TEST_CASE("the terminal of another process") {
    PseudoTerminal terminal;
    auto child_writing_to = [](int descriptor) {
        pid_t child = fork();
        if (child == 0) {
            dup2(descriptor, STDOUT_FILENO);
            for (;;) pause();
        }
        return child;
    };
    int nowhere = open("/dev/null", O_WRONLY);
    pid_t on_terminal = child_writing_to(terminal.slave), elsewhere = child_writing_to(nowhere);
    for (int tries = 0; tries < 60'000 && terminal_of_process(on_terminal) != terminal.path; tries++)
        usleep(1000);
    CHECK(terminal_of_process(on_terminal) == terminal.path);
    for (int tries = 0; tries < 60'000 && terminal_of_process(elsewhere) != ""; tries++) usleep(1000);
    CHECK(terminal_of_process(elsewhere) == "");
    for (pid_t child : {on_terminal, elsewhere}) {
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
        CHECK(terminal_of_process(child) == "");
    }
    CHECK(launcher_terminal() == "");  // tests are started by a shell
    close(nowhere);
}
