/*
Processes as a supervisor needs them: one that can be distinguished from another with the same number, so that
it can be found again; a child whose output is read through a pipe; a command that must end in time; one that
may outlive the supervisor.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <poll.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"
#include "data/base/file.h"
#include "data/base/this_machine.h"
#include "data/supervisor/launcher.h"

// A process and its start time, in ticks since the machine booted; `boot`, the kernel's boot ID, identifies
// that boot.
struct Process {
    pid_t id = 0;
    unsigned long long start = 0;
    std::string boot = {};

    nlohmann::ordered_json json() const { return {{"id", id}, {"start", start}, {"boot", boot}}; }
    static Process from(const nlohmann::json& json) {
        return {whole_in(json, "id"), whole_in<unsigned long long>(json, "start"), json.at("boot")};
    }
};

// Returns a process of this machine; its start is 0 if it does not exist, or is a zombie.
inline Process find_process(pid_t id) {
    ProcessStatus status = process_status(process_folder(id));
    return {id, status.is_alive() ? status.start : 0, boot_id()};
}

inline bool is_alive(const Process& process) {
    Process now = find_process(process.id);
    return process.start != 0 && now.start == process.start && now.boot == process.boot;
}

// Replaces this process, a newly forked child, with the command.
[[noreturn]] inline void become(const Words& command) {
    std::vector<char*> words;
    for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    execvp(words[0], words.data());
    fprintf(stderr, "train_gpt: %s: cannot start it: %s; check the name and the PATH\n", words[0],
            strerror(errno));
    _exit(127);
}

// Restores the signal handling that a new program expects; a supervisor has changed some of it.
inline void usual_signals() {
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE, SIGCHLD}) std::signal(signal, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
}

// Forks. If the machine is short of memory or processes, this waits some seconds for it to recover.
inline pid_t fork_patiently() {
    constexpr double patience = 10;
    for (double limit = seconds_now() + patience;; usleep(200000)) {
        pid_t id = fork();
        if (id >= 0 || seconds_now() > limit) return id;
    }
}

// A child in its own process group, whose standard output, optionally with its errors, is read here. Its
// standard input is open and empty for as long as this object lives. If the child is still running when the
// object is destroyed, its whole group is killed.
class PipedChild {
public:
    explicit PipedChild(const Words& command, bool with_errors = false) {
        int in[2], out[2];
        if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0)
            fail_with_errno(command[0], "make a pipe for it");
        input_ = FileHandle(in[1]), output_ = FileHandle(out[0]);
        FileHandle child_input(in[0]), child_output(out[1]);
        id_ = fork_patiently();
        if (id_ < 0) fail_with_errno(command[0], "start it");
        if (id_ == 0) {
            setpgid(0, 0);
            usual_signals();
            dup2(child_input.get(), STDIN_FILENO);
            dup2(child_output.get(), STDOUT_FILENO);
            int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
            dup2(with_errors ? STDOUT_FILENO : nowhere, STDERR_FILENO);
            become(command);
        }
        setpgid(id_, id_);
        fcntl(output_.get(), F_SETFL, O_NONBLOCK);
    }
    PipedChild(PipedChild&& other) noexcept
        : id_(std::exchange(other.id_, 0)),
          code_(other.code_),
          input_(std::move(other.input_)),
          output_(std::move(other.output_)) {}
    PipedChild& operator=(PipedChild&&) = delete;
    ~PipedChild() { end(); }

    int output() const { return output_.get(); }

    // Returns its output since the last call, at most as much as a pipe holds.
    std::string read() {
        std::string result;
        char buffer[1 << 16];
        ssize_t got = output_ ? ::read(output_.get(), buffer, sizeof buffer) : 0;
        if (got > 0) result.assign(buffer, (size_t)got);
        if (got == 0) output_.close();
        return result;
    }
    // Returns whether it has closed its output, as it does when it ends.
    bool is_silent() const { return !output_; }

    // Returns its exit code, as a shell reports it; -1: it is running.
    int code() {
        int status = 0;
        if (id_ > 0 && waitpid(id_, &status, WNOHANG) == id_) {
            id_ = 0;
            code_ = shell_code(status);
        }
        return code_;
    }

    void end() {
        input_.close();
        if (code() >= 0 || id_ <= 0) return;
        kill(-id_, SIGKILL);
        waitpid(id_, nullptr, 0);
        id_ = 0;
    }

private:
    pid_t id_ = 0;
    int code_ = -1;
    FileHandle input_, output_;
};

struct CommandResult {
    int code = -1;       // -1: it did not end in time
    std::string output;  // including errors
};

// Runs commands side by side, at most `at_once` at a time, each for at most `seconds`, and ends them once
// `stopped` is set.
inline std::vector<CommandResult> run_commands(const std::vector<Words>& commands, double seconds,
                                               const volatile sig_atomic_t& stopped) {
    constexpr size_t at_once = 128;
    std::vector<CommandResult> results(commands.size());
    for (size_t begin = 0; begin < commands.size(); begin += at_once) {
        size_t end = std::min(begin + at_once, commands.size());
        std::vector<PipedChild> children;
        for (size_t i = begin; i < end; i++) children.emplace_back(commands[i], true);
        for (double limit = seconds_now() + seconds; seconds_now() < limit && !stopped; usleep(20000)) {
            bool running = false;
            for (size_t i = begin; i < end; i++) {
                PipedChild& child = children[i - begin];
                results[i].output += child.read();
                results[i].code = child.code();
                running = running || results[i].code < 0;
            }
            if (!running) break;
        }
        // This process may itself have been stopped until after the limit, so it looks once more.
        for (size_t i = begin; i < end; i++) {
            results[i].code = children[i - begin].code();
            results[i].output += children[i - begin].read();
        }
    }
    return results;
}

// A command for /bin/sh that may outlive this object, and this process. It is passed `input` both on its
// standard input and in an environment variable. Its standard error is an unnamed file in memory, to which it
// can write even after this process has ended.
class DetachedCommand {
public:
    DetachedCommand(const std::string& command, const char* variable, const std::string& input)
        : errors_(memfd_create("errors", MFD_CLOEXEC)) {
        int in[2];
        if (!errors_ || pipe2(in, O_CLOEXEC) != 0) fail_with_errno(command, "make a pipe for it");
        fcntl(errors_.get(), F_SETFL, O_APPEND);  // a shell may reopen it, as /dev/stderr
        FileHandle from(in[0]), to(in[1]);
        fcntl(to.get(), F_SETFL, O_NONBLOCK);
        [[maybe_unused]] ssize_t sent = write(to.get(), input.data(), input.size());  // a pipe holds 64 KiB
        id_ = fork_patiently();
        if (id_ < 0) fail_with_errno(command, "start it");
        if (id_ == 0) {
            setsid();
            usual_signals();
            dup2(from.get(), STDIN_FILENO);
            dup2(errors_.get(), STDERR_FILENO);
            setenv(variable, input.c_str(), 1);
            become({"/bin/sh", "-c", command});
        }
    }

    // Returns its exit code, as a shell reports it; -1: it is running.
    int code() {
        int status = 0;
        if (code_ < 0 && waitpid(id_, &status, WNOHANG) == id_) code_ = shell_code(status);
        return code_;
    }

    // Returns the end of what it has written to its standard error.
    std::string errors() const {
        constexpr off_t most = 4096;
        struct stat file;
        off_t size = fstat(errors_.get(), &file) == 0 ? file.st_size : 0,
              begin = std::max<off_t>(size - most, 0);
        std::string text((size_t)(size - begin), '\0');
        ssize_t got = pread(errors_.get(), text.data(), text.size(), begin);
        text.resize((size_t)std::max<ssize_t>(got, 0));
        return text;
    }

private:
    pid_t id_ = 0;
    int code_ = -1;
    FileHandle errors_;
};
