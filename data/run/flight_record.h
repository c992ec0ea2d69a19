/*
The flight record of a rank: the work that it recently issued to its device, and how much of that is done.

The record is in the machine's shared memory, so another process can see what a rank was doing when it no
longer responds: its process may be stopped, or a thread may be stuck in a library. The record contains no
pointers, and a reader must tolerate an entry that is being written.

    header     which rank of which run, the phase of its main thread, its last sign of life
    groups     for each communicator: its ranks, and how many calls were issued, have begun and are done
    entries    a ring of the latest work, each entry with its operation, group, unit, micro-batch, bytes
               and, once the device has done it, its times

In a group whose ranks wait for each other, the rank that has begun the fewest calls is the missing one: its
host may have issued as many as the others, but its device has not reached them. data/run/rank_state.h reads
the record, and comm/recorder.h writes it.
*/
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <memory>
#include <new>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"  // fail_with_errno
#include "data/run/axes.h"

enum class Operation : uint8_t {
    forward,
    backward,
    input_gradient,
    weight_gradient,
    optimizer,
    step,  // the whole step
    wait,  // the compute stream waits for communication
    all_reduce,
    reduce_scatter,
    all_gather,
    broadcast,
    all_to_all,
    send,
    receive,
    data,  // the host waits for a batch
    save   // the host waits for a checkpoint to begin
};
inline constexpr const char* operation_names[] = {
    "forward",        "backward",   "input gradient", "weight gradient",
    "optimizer",      "step",       "wait",           "all-reduce",
    "reduce-scatter", "all-gather", "broadcast",      "all-to-all",
    "send",           "receive",    "data",           "save"};
inline const char* name_of(Operation operation) {
    return operation_names[(size_t)operation];
}
// Returns whether this is a pass of a pipeline stage; other operations are part of a pass or run beside it.
constexpr bool is_pass(Operation operation) {
    return operation <= Operation::weight_gradient;
}
constexpr bool is_communication(Operation operation) {
    return operation >= Operation::all_reduce && operation <= Operation::receive;
}

// The purposes of communication between ranks.
enum class Traffic : uint8_t { gradients, parameters, statistics, weights, activations, pipeline, updates };
inline constexpr std::array<const char*, 7> traffic_names = {
    "gradients", "parameters", "statistics", "weights", "activations", "pipeline", "updates"};

struct FlightEntry {
    static constexpr int16_t none = -1;

    double begin = 0, end = 0;  // seconds on the record's clock; 0: not reached yet, or not timed
    uint64_t bytes = 0;
    uint64_t number = 0;  // among the calls of its group, from 1; 0: not a call
    int32_t step = 0, micro_batch = none;
    int16_t unit = none, chunk = none;
    int16_t group = none;  // index in the table of groups
    Operation operation = Operation::forward;
    uint8_t traffic = 0;  // kind of communication, also for waits
    uint8_t track = 0;    // the stream
    uint8_t timed = 0;    // 1: two events enclose it, or all calls that begin together
};

struct FlightGroup {
    static constexpr int most_named = 16;

    char name[24];              // "shard", "forward 3>5"
    int32_t size, axes;         // axes: the bits of its AxisSet; 0: its ranks are named
    int32_t ranks[most_named];  // the first members, as world ranks
    // Numbers of calls: issued by the host, reached by their stream, and complete. The last two count
    // only calls that are enclosed by events.
    std::atomic<uint64_t> issued, begun, done;
};

struct FlightRecord {
    static constexpr uint64_t mark = 0x64726f6365722067;  // "g record"
    static constexpr int most_groups = 24, most_entries = 4096;

    std::atomic<uint64_t> is_record{0};  // set to `mark` once the whole record can be read
    uint64_t bytes = sizeof(FlightRecord);
    int32_t process = 0, rank = 0, ranks = 1;
    PerAxis sizes = one_along_each;         // ranks along each axis
    int32_t device = -1;                    // index among the machine's devices; -1: CPU
    char host[64] = "", run_dir[256] = "";  // run_dir: the absolute path
    std::atomic<int64_t> sign_of_life{0};   // nanoseconds since 1970 when work was last issued or done
    std::atomic<int32_t> step{0};
    char phase[32] = "";
    // The oldest piece of disk work that a host thread is blocked in, and when it began, in nanoseconds since
    // 1970; also when a thread began to wait for other ranks. 0: none.
    char work[128] = "";
    std::atomic<int64_t> work_since{0}, wait_since{0};
    std::atomic<int32_t> group_count{0};
    FlightGroup groups[most_groups] = {};
    std::atomic<uint64_t> entry_count{0};  // ever made; entry i is at i % most_entries
    FlightEntry entries[most_entries];

    const FlightEntry& entry(uint64_t number) const { return entries[number % most_entries]; }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a record is read by other processes");

// Read and write the names in records. A name that is read may lack its terminating zero.
template <size_t size>
std::string name_in(const char (&from)[size]) {
    return {from, strnlen(from, size)};
}
template <size_t size>
void copy_name(char (&to)[size], const std::string& from) {
    strncpy(to, from.c_str(), size - 1);
    to[size - 1] = 0;
}

// Holds this process's record in shared memory, which other processes can map by name; if the machine has no
// shared memory, in private memory.
class SharedFlightRecord {
public:
    SharedFlightRecord() : name_(name_of_process(getpid())) {
        remove_left_over();
        shm_unlink(name_.c_str());
        int file = shm_open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
        bool sized = file >= 0 && posix_fallocate(file, 0, sizeof(FlightRecord)) == 0;
        void* memory = sized
                           ? mmap(nullptr, sizeof(FlightRecord), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                           : MAP_FAILED;
        if (file >= 0) close(file);
        if (memory == MAP_FAILED) {
            shm_unlink(name_.c_str());
            name_.clear();
            memory = mmap(nullptr, sizeof(FlightRecord), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0);
            if (memory == MAP_FAILED) fail_with_errno("the flight record", "allocate memory for it");
        }
        record_ = new (memory) FlightRecord;
    }
    ~SharedFlightRecord() {
        if (!name_.empty()) shm_unlink(name_.c_str());
        munmap(record_, sizeof(FlightRecord));
    }
    SharedFlightRecord(const SharedFlightRecord&) = delete;
    SharedFlightRecord& operator=(const SharedFlightRecord&) = delete;

    FlightRecord& operator*() const { return *record_; }
    FlightRecord* operator->() const { return record_; }

    static std::string name_of_process(pid_t process) { return text("%s%d", beginning().c_str(), process); }

    // Returns the processes of this user on this machine that have left a record, whether dead or alive.
    static std::vector<int> recorded_processes() {
        std::vector<int> processes;
        std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/dev/shm"), closedir);
        const std::string begin = beginning().substr(1);
        while (dirent* file = folder ? readdir(folder.get()) : nullptr) {
            std::string name = file->d_name;
            int process = name.starts_with(begin) ? atoi(name.c_str() + begin.size()) : 0;
            if (process > 0) processes.push_back(process);
        }
        return processes;
    }

private:
    static std::string beginning() { return text("/train_gpt.%u.", getuid()); }
    // Removes the records of processes that were killed.
    static void remove_left_over() {
        for (int process : recorded_processes())
            if (kill(process, 0) != 0 && errno == ESRCH) shm_unlink(name_of_process(process).c_str());
    }

    std::string name_;  // of the shared memory; empty: it is private
    FlightRecord* record_;
};

// Maps the record of another process of this user on this machine for reading; returns null if there is none.
// A record that another user owns, or could write, is ignored.
inline std::shared_ptr<const FlightRecord> read_flight_record(pid_t process) {
    int file = shm_open(SharedFlightRecord::name_of_process(process).c_str(), O_RDONLY, 0);
    if (file < 0) return nullptr;
    struct stat status;
    bool whole = fstat(file, &status) == 0 && (size_t)status.st_size == sizeof(FlightRecord) &&
                 status.st_uid == getuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
    void* memory = whole ? mmap(nullptr, sizeof(FlightRecord), PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    if (memory == MAP_FAILED) return nullptr;
    auto* record = (const FlightRecord*)memory;
    if (record->is_record != FlightRecord::mark || record->bytes != sizeof(FlightRecord) ||
        record->process != process) {
        munmap(memory, sizeof(FlightRecord));
        return nullptr;
    }
    return {record, [](const FlightRecord* mapped) { munmap((void*)mapped, sizeof(FlightRecord)); }};
}
