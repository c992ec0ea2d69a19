/*
A job that outlives its supervisor. Between the two is a keeper, a small process in its own session that
starts the launcher, waits for it and records its exit code:

    supervisor ---- keeper ---- mpirun ---- ranks
                      |            |
                 RUN/job.json  RUN/job.log

So if a supervisor is killed, or its terminal is closed, the job continues to train. The next supervisor finds
it through RUN/job.json, which names the processes and says how the launcher ended. The keeper inherits a lock
on RUN/job.lock and holds it for as long as it lives, so no second job can begin meanwhile. The launcher leads
its own process group, to which signals are sent.

Anyone who can write to the run's directory can write job.json. It is therefore believed only if the keeper
that it names has the lock open, and is the parent of the launcher: no other process is ever signaled.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/base/this_machine.h"
#include "data/supervisor/processes.h"

inline std::string job_path(const std::string& run_dir) {
    return run_dir + "/job.json";
}
inline std::string job_lock_path(const std::string& run_dir) {
    return run_dir + "/job.lock";
}
inline std::string job_log_path(const std::string& run_dir) {
    return run_dir + "/job.log";
}

// The content of job.json.
struct JobRecord {
    int number = 0;  // numbers the starts of the job, from 1
    Process keeper, launcher;
    uint64_t log_begin = 0;  // offset in job.log at which its output begins
    int code = -1;           // the launcher's exit code, as a shell reports it; -1: it is running

    nlohmann::ordered_json json() const {
        return {{"number", number},
                {"keeper", keeper.json()},
                {"launcher", launcher.json()},
                {"log_begin", log_begin},
                {"code", code}};
    }
    static std::optional<JobRecord> read(const std::string& run_dir) {
        constexpr uint64_t most_bytes = 1 << 16;
        std::string error;
        std::optional<JobRecord> record;
        note_error(error, [&] {
            if (access(job_path(run_dir).c_str(), F_OK) != 0) return;
            nlohmann::json json = parse_json(
                read_whole(job_path(run_dir), most_bytes, "too large for a job record"), job_path(run_dir));
            try {
                record = {whole_in(json, "number"), Process::from(json.at("keeper")),
                          Process::from(json.at("launcher")), whole_in<uint64_t>(json, "log_begin"),
                          whole_in(json, "code")};
            } catch (const nlohmann::json::exception&) {
            }
        });
        return record;
    }
};

// Returns whether a process has RUN/job.lock open, which only a keeper of this run does.
inline bool is_keeper(const Process& process, const std::string& run_dir) {
    struct stat lock, file;
    bool is_file = lstat(job_lock_path(run_dir).c_str(), &lock) == 0 && S_ISREG(lock.st_mode);
    if (!is_file || lock.st_nlink != 1 || process.id <= 1 || !is_alive(process)) return false;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(process_folder(process.id) + "/fd", error)) {
        bool same = stat(entry.path().c_str(), &file) == 0 && file.st_dev == lock.st_dev &&
                    file.st_ino == lock.st_ino;
        if (same) return true;
    }
    return false;
}

// Returns whether the processes that job.json names, as far as they still exist, are a keeper and its
// launcher.
inline bool is_kept(const JobRecord& record, const std::string& run_dir) {
    ProcessStatus launcher = process_status(process_folder(record.launcher.id));
    bool is_child = launcher.parent == record.keeper.id && launcher.group == record.launcher.id;
    return is_keeper(record.keeper, run_dir) && (is_child || !is_alive(record.launcher));
}

// The keeper process; keep() never returns. `ready`: a pipe through which the supervisor receives the record,
// because the disk may be full.
class Keeper {
public:
    [[noreturn]] static void keep(const std::string& run_dir, JobRecord record, const Words& command,
                                  int ready, int lock, int log) {
        const pid_t supervisor = getppid();
        setsid();
        int nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);
        dup2(nowhere, STDIN_FILENO);
        dup2(log, STDOUT_FILENO);
        dup2(log, STDERR_FILENO);
        close_others(ready, lock);
        for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE}) std::signal(signal, SIG_IGN);
        std::signal(SIGCHLD, SIG_DFL);
        // SIGTERM is blocked in mpirun, which would kill its ranks 2 s after receiving it. Schedulers send
        // the signal to the ranks too, which save and exit.
        const bool holds_back = is_mpirun(command[0]);
        sigset_t terminate;
        sigemptyset(&terminate);
        sigaddset(&terminate, SIGTERM);
        pid_t child = fork_patiently();
        if (child < 0)
            fprintf(stderr, "train_gpt: %s: cannot start it: %s\n", command[0].c_str(), strerror(errno));
        if (child == 0) {
            setpgid(0, 0);
            usual_signals();
            if (holds_back) sigprocmask(SIG_BLOCK, &terminate, nullptr);
            become(command);
        }
        setpgid(child, child);
        record.keeper = find_process(getpid());
        record.launcher = find_process(child);
        std::string text = record.json().dump();
        [[maybe_unused]] ssize_t sent = write(ready, text.data(), text.size());
        close(ready);

        bool written = try_to_write(run_dir, record), asked = false;
        int status = 0;
        for (; child > 0 && waitpid(child, &status, WNOHANG) == 0; usleep(50000)) {
            if (++waited_ % 20 != 0) continue;
            if (!written) written = try_to_write(run_dir, record);
            if (holds_back && !asked && is_pending(child, SIGTERM)) asked = kill(child, SIGUSR1) == 0;
        }
        record.code = child < 0 ? exit_failed_part : shell_code(status);
        constexpr int most_tries = 600;  // one per second
        // A supervisor that still exists learns the code from this process.
        for (int i = 0; i < most_tries && !try_to_write(run_dir, record) && getppid() != supervisor; i++)
            sleep(1);
        _exit(record.code);
    }

private:
    // Closes all other open files, which belong to the supervisor: its lock, and pipes whose other ends must
    // notice when the supervisor closes them.
    static void close_others(int one, int other) {
        unsigned low = (unsigned)std::min(one, other), high = (unsigned)std::max(one, other);
        close_all(STDERR_FILENO + 1, low - 1);
        if (low + 1 < high) close_all(low + 1, high - 1);
        close_all(high + 1, ~0U);
    }
    static void close_all(unsigned first, unsigned last) {
        if (first > last || close_range(first, last, 0) == 0) return;
        // Before Linux 5.9, and in containers that refuse the call; the supervisor has far fewer files open.
        constexpr unsigned most = 4096;
        for (unsigned file = first; file <= last && file < most; file++) close((int)file);
    }

    static bool try_to_write(const std::string& run_dir, const JobRecord& record) {
        std::string error, content = record.json().dump() + "\n";
        note_error(error, [&] { write_whole(job_path(run_dir), content); });
        return error.empty();
    }

    inline static int waited_ = 0;
};

// A job that was started here, or by an earlier supervisor.
class Job {
public:
    // Starts the command. Fails if another job of this run exists.
    Job(const std::string& run_dir, int number, const Words& command) : run_dir_(run_dir) {
        FileHandle lock = lock_of(run_dir);
        FileHandle log = open_to_write(job_log_path(run_dir), O_WRONLY | O_CREAT | O_APPEND);
        if (!log) fail_with_errno(job_log_path(run_dir), "create it");
        record_.number = number;
        record_.log_begin = (uint64_t)lseek(log.get(), 0, SEEK_END);
        read_to_ = shown_to_ = record_.log_begin;
        int ready[2];
        if (pipe2(ready, O_CLOEXEC) != 0) fail_with_errno(run_dir, "make a pipe for the job");
        FileHandle from(ready[0]), to(ready[1]);
        keeper_ = fork_patiently();
        if (keeper_ < 0) fail_with_errno(command[0], "start it");
        if (keeper_ == 0) Keeper::keep(run_dir, record_, command, to.get(), lock.get(), log.get());
        to.close();
        std::string text;
        char buffer[4096];
        for (ssize_t got; (got = ::read(from.get(), buffer, sizeof buffer)) != 0;) {
            if (got < 0 && errno != EINTR) break;
            if (got > 0) text.append(buffer, (size_t)got);
        }
        nlohmann::json json = try_json(text);
        if (json.is_object()) {
            record_.keeper = Process::from(json.at("keeper"));
            record_.launcher = Process::from(json.at("launcher"));
        }
    }

    // Takes over a job that is running, or has ended while no supervisor watched. Its output so far is read
    // for errors but not shown, even if no supervisor has shown it.
    Job(const std::string& run_dir, const JobRecord& record)
        : run_dir_(run_dir), record_(record), is_ours_(is_kept(record, run_dir)), read_to_(record.log_begin) {
        struct stat log;
        shown_to_ = stat(job_log_path(run_dir).c_str(), &log) == 0 ? (uint64_t)log.st_size : 0;
    }

    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    const JobRecord& record() const { return record_; }

    // Returns the exit code of the launcher; -1 if the job is running; `not_known` if the code can no longer
    // be determined.
    static constexpr int not_known = 255;
    int code() {
        int status = 0;
        if (keeper_ > 0 && waitpid(keeper_, &status, WNOHANG) == keeper_) {
            keeper_ = 0;
            if (WIFEXITED(status)) record_.code = WEXITSTATUS(status);
        }
        if (record_.code >= 0 || keeper_ > 0) return record_.code;
        if (is_alive(record_.keeper) || is_alive(record_.launcher)) return -1;
        if (std::optional<JobRecord> now = JobRecord::read(run_dir_); now && now->number == record_.number)
            record_.code = now->code;
        if (record_.code < 0) record_.code = not_known, is_lost_ = true;
        return record_.code;
    }
    // Returns whether its keeper ended before it could record the exit code.
    bool is_lost() const { return is_lost_; }

    // mpirun and srun forward the signal to all ranks, which save and exit.
    void ask_to_stop() const { signal_launcher(SIGUSR1, false); }
    void end(int signal) const { signal_launcher(signal, true); }

    // Returns the job's output since the last call; `shown` receives the part that has not been shown yet.
    std::string read_output(std::string_view* shown) {
        *shown = {};
        std::string error;
        note_error(error, [&] {
            struct stat status;
            if (!log_) log_ = open_regular(job_log_path(run_dir_), &status);
        });
        if (!log_) return "";
        constexpr size_t at_once = 1 << 20;
        buffer_.resize(at_once);
        ssize_t got = pread(log_.get(), buffer_.data(), at_once, (off_t)read_to_);
        if (got <= 0) return "";
        buffer_.resize(whole_characters({buffer_.data(), (size_t)got}));
        uint64_t begin = read_to_;
        read_to_ += buffer_.size();
        if (read_to_ > shown_to_)
            *shown = std::string_view(buffer_).substr(shown_to_ > begin ? shown_to_ - begin : 0);
        return buffer_;
    }

    // Takes the lock that a keeper holds. Fails if another keeper holds it.
    static FileHandle lock_of(const std::string& run_dir) {
        return take_lock(job_lock_path(run_dir), run_dir + ": a job that is not in job.json is running "
                                                           "there; wait until it ends, or stop it");
    }

private:
    void signal_launcher(int signal, bool to_group) const {
        if (!is_ours_ || record_.launcher.id <= 1 || !is_alive(record_.launcher)) return;
        const bool is_held_back =
            signal == SIGTERM && is_mpirun(process_file(process_folder(record_.launcher.id), "comm"));
        kill(to_group ? -record_.launcher.id : record_.launcher.id, is_held_back ? SIGINT : signal);
    }

    const std::string run_dir_;
    JobRecord record_;
    bool is_ours_ = true;  // its processes were found to be a keeper and its launcher
    bool is_lost_ = false;
    pid_t keeper_ = 0;  // a child of this process; 0: not a child, or reaped
    FileHandle log_;
    uint64_t read_to_ = 0, shown_to_ = 0;
    std::string buffer_;
};
