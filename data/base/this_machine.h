/*
This machine and its processes, as Linux reports them: the machine's name, its last boot, and files of
processes in /proc. Values that cannot be read are empty or zero.
*/
#pragma once

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <sys/wait.h>
#include <unistd.h>

inline std::string host_name() {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    return name;
}

// Identifies the last boot of the machine.
inline std::string boot_id() {
    std::string id;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
    return id;
}

inline std::string process_folder(pid_t process) {
    return "/proc/" + std::to_string(process);
}

// The content of a file about a process or a thread, such as its name, or its arguments, each followed by a 0
// byte.
inline std::string process_file(const std::string& folder, const char* file) {
    std::stringstream content;
    content << std::ifstream(folder + "/" + file).rdbuf();
    return content.str();
}

// Returns whether a signal that the process blocks is pending for it.
inline bool is_pending(pid_t process, int signal) {
    const std::string status = process_file(process_folder(process), "status");
    const size_t at = status.find("ShdPnd:");
    return at != status.npos && strtoull(status.c_str() + at + 7, nullptr, 16) >> (signal - 1) & 1;
}

// Returns whether a program is Open MPI's launcher. program: its path, or its name as in /proc
inline bool is_mpirun(std::string_view program) {
    program.remove_prefix(program.rfind('/') + 1);
    if (program.ends_with('\n')) program.remove_suffix(1);
    return program == "mpirun" || program == "mpiexec" || program == "orterun" || program == "prterun";
}

// Returns whether the program runs in a container, where root has only some rights on the machine: checks for
// what Docker, Podman, systemd-nspawn and Kubernetes leave there.
inline bool in_container() {
    const char* kind = getenv("container");
    return (kind && *kind) || getenv("KUBERNETES_SERVICE_HOST") || access("/.dockerenv", F_OK) == 0 ||
           access("/run/.containerenv", F_OK) == 0;
}

struct ProcessStatus {
    char state = 0;  // R, S, D (waits for a disk), T (stopped), Z (zombie), X; 0: no such process
    pid_t parent = 0, group = 0;
    unsigned long long start = 0;  // in ticks since boot

    bool is_alive() const { return state != 0 && state != 'Z' && state != 'X'; }
    bool is_stopped() const { return state == 'T' || state == 't'; }
};

// folder: that of a process, or of one of its threads.
inline ProcessStatus process_status(const std::string& folder) {
    std::string line = process_file(folder, "stat");
    ProcessStatus status;
    size_t name_end = line.rfind(')');  // the name may hold anything
    if (name_end == line.npos) return status;
    const char* format = ") %c %d %d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu";
    if (sscanf(line.c_str() + name_end, format, &status.state, &status.parent, &status.group,
               &status.start) != 4)
        return {};
    return status;
}

// The exit code of a child as a shell reports it: this number plus the signal that killed it, if one did.
constexpr int shell_signals = 128;
inline int shell_code(int wait_status) {
    return WIFSIGNALED(wait_status) ? shell_signals + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}
