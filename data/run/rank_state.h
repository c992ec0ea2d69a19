/*
The state of a rank, which any process on its machine can read from its flight record
(data/run/flight_record.h) without the rank's help: the rank may be stopped, dead, or stuck in a library or
system call.

The processes of a run on this machine are those whose records name its folder. A rank that exits normally
removes its record; the record of a killed process remains until another run begins.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "data/base/figures.h"  // unix_nanoseconds
#include "data/base/json.h"
#include "data/base/this_machine.h"
#include "data/run/flight_record.h"

// A pass, or a communication call; an empty operation: none.
struct RankWork {
    std::string operation, traffic, group;  // "reduce-scatter", "gradients", "shard"
    int unit = -1, micro_batch = -1, step = 0;
    uint64_t number = 0;  // among the calls of its group, from 1

    bool operator==(const RankWork&) const = default;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankWork, operation, traffic, group, unit, micro_batch, step, number)

// A group of ranks as one of them sees it. A call is first issued by the host. It has begun once the device
// has reached it, where it may wait for the other ranks, and is done when it completes.
struct GroupState {
    std::string name;
    int size = 1, axes = 0;
    std::vector<int> ranks;  // at least the first ones
    uint64_t issued = 0, begun = 0, done = 0;
    RankWork next;  // the oldest call that was issued and is not done; its number is done + 1

    bool operator==(const GroupState&) const = default;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GroupState, name, size, axes, ranks, issued, begun, done, next)

inline void to_json(nlohmann::json& json, const PerAxis& numbers) {
    json = numbers.of;
}
inline void from_json(const nlohmann::json& json, PerAxis& numbers) {
    json.get_to(numbers.of);
}

struct RankState {
    int rank = 0, ranks = 1;
    PerAxis sizes = one_along_each;  // ranks along each axis
    std::string host;
    int device = -1, process = 0;  // device -1: CPU
    bool alive = false;            // the process exists and is not a zombie
    std::string state;  // letter of the process as in /proc/PID/stat; D if any of its threads is in D
    int step = 0;
    std::string phase;         // the phase of its main thread
    double quiet_seconds = 0;  // since work was last issued or done
    std::string work;          // disk work of a thread, such as "writing a.bin"; empty: none
    double work_seconds = 0;   // how long this has taken
    double wait_seconds = 0;   // how long a host thread has waited for other ranks; 0: none waits
    std::vector<GroupState> groups;
    RankWork last;       // pass or call that the host issued last
    RankWork pass;       // the pass that the device is in or reaches next; empty operation: all are done
    bool begun = false;  // the device is in that pass
    RankWork wait;       // the communication that the compute stream waits for; empty operation: it computes
    bool detailed = false;  // events enclose the latest calls, so `wait` and the begun calls are known

    bool operator==(const RankState&) const = default;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankState, rank, ranks, sizes, host, device, process, alive, state, step,
                                   phase, quiet_seconds, work, work_seconds, wait_seconds, groups, last, pass,
                                   begun, wait, detailed)

// Returns whether such a rank can exist: records and lines may hold any numbers, and those that describe the
// layout become divisors and loop bounds.
inline bool is_possible(const RankState& state) {
    constexpr int most_ranks = 1 << 20;
    auto is_time = [](double seconds) { return seconds >= 0 && seconds < 0x1p31; };
    auto is_rank = [&](int rank) { return rank >= 0 && rank < state.ranks; };
    auto is_group = [&](const GroupState& group) {
        return group.size >= 1 && group.size <= state.ranks && group.axes >= 0 &&
               group.axes <= all_axes.bits() && group.ranks.size() <= FlightGroup::most_named &&
               std::ranges::all_of(group.ranks, is_rank);
    };
    double product = 1;
    for (int size : state.sizes.of) product *= size;
    return state.ranks <= most_ranks && is_rank(state.rank) && product == state.ranks &&
           std::ranges::min(state.sizes.of) >= 1 && is_time(state.quiet_seconds) &&
           is_time(state.work_seconds) && is_time(state.wait_seconds) &&
           state.groups.size() <= FlightRecord::most_groups && std::ranges::all_of(state.groups, is_group);
}

// Returns the ranks in an agent's line (data/run/agent.h); empty if it is not one or has another version.
inline std::vector<RankState> states_in_line(std::string_view line) {
    nlohmann::json json = try_json(line);
    std::vector<RankState> states;
    try {
        if (json.is_object() && json.contains("ranks") && fits_integers(json["ranks"]))
            states = json["ranks"];
    } catch (const nlohmann::json::exception&) {
        return {};
    }
    std::erase_if(states, [](const RankState& state) { return !is_possible(state); });
    return states;
}

// ----------------------------------------------------------------------------
// a process

// Returns the state letter in /proc/PID/stat, or D if any thread is in state D, because each thread waits for
// disks by itself; empty if there is no such process.
inline std::string state_of(int process) {
    const std::string folder = process_folder(process);
    auto letter = [](const ProcessStatus& status) { return std::string(status.state != 0, status.state); };
    const ProcessStatus status = process_status(folder);
    if (!status.is_alive() || status.state == 'T') return letter(status);
    std::error_code ignored;
    for (const auto& thread : std::filesystem::directory_iterator(folder + "/task", ignored))
        if (process_status(thread.path()).state == 'D') return "D";
    return letter(status);
}

// ----------------------------------------------------------------------------
// the record of a process

inline RankWork work_of(const FlightRecord& record, const FlightEntry& entry) {
    RankWork work;
    work.operation = name_of(entry.operation);
    if (is_communication(entry.operation) || entry.operation == Operation::wait)
        work.traffic = traffic_names[std::min<size_t>(entry.traffic, traffic_names.size() - 1)];
    if (entry.group >= 0 && entry.group < FlightRecord::most_groups)
        work.group = name_in(record.groups[entry.group].name);
    work.unit = entry.unit, work.micro_batch = entry.micro_batch, work.step = entry.step;
    work.number = entry.number;
    return work;
}

inline RankState state_of(const FlightRecord& record) {
    const int64_t now = unix_nanoseconds();
    auto seconds_since = [&](int64_t since) {
        return since == 0 ? 0 : std::max(0.0, ((double)now - (double)since) / 1e9);
    };
    RankState rank;
    rank.rank = record.rank, rank.ranks = record.ranks;
    rank.sizes = record.sizes;
    rank.host = name_in(record.host), rank.device = record.device, rank.process = record.process;
    rank.state = state_of(record.process);
    rank.alive = !rank.state.empty() && rank.state != "Z" && rank.state != "X";
    rank.step = record.step, rank.phase = name_in(record.phase);
    rank.quiet_seconds = seconds_since(record.sign_of_life);
    rank.work_seconds = seconds_since(record.work_since);
    if (record.work_since != 0) rank.work = name_in(record.work);
    rank.wait_seconds = seconds_since(record.wait_since);

    int count = std::clamp<int>(record.group_count, 0, FlightRecord::most_groups);
    for (int i = 0; i < count; i++) {
        const FlightGroup& group = record.groups[i];
        GroupState& seen = rank.groups.emplace_back();
        seen.name = name_in(group.name), seen.size = group.size, seen.axes = group.axes;
        seen.ranks.assign(group.ranks, group.ranks + std::clamp(group.size, 0, FlightGroup::most_named));
        seen.done = group.done, seen.begun = group.begun, seen.issued = group.issued;
    }

    // Walks the ring from the newest entry to the oldest, so the last match is the oldest of its kind.
    uint64_t newest = record.entry_count;
    uint64_t oldest = newest - std::min<uint64_t>(newest, FlightRecord::most_entries);
    bool call_found = false;
    for (uint64_t number = newest; number-- > oldest;) {
        const FlightEntry entry = record.entry(number);
        if ((size_t)entry.operation >= std::size(operation_names)) continue;  // it is being written
        const bool over = entry.end != 0,
                   pass = is_pass(entry.operation) || entry.operation == Operation::optimizer;
        const bool call = is_communication(entry.operation) && entry.group >= 0 && entry.group < count;
        if (rank.last.operation.empty() && (pass || call)) rank.last = work_of(record, entry);
        if (call && entry.number == rank.groups[(size_t)entry.group].done + 1)
            rank.groups[(size_t)entry.group].next = work_of(record, entry);
        if (call && !call_found) call_found = true, rank.detailed = entry.timed != 0;
        if (pass && !over) rank.pass = work_of(record, entry), rank.begun = entry.begin != 0;
        const bool waits = entry.operation == Operation::wait || (call && entry.track == 0);
        if (waits && entry.begin != 0 && !over) rank.wait = work_of(record, entry);
    }
    return rank;
}

// ----------------------------------------------------------------------------
// all ranks of a run

// Returns a folder's path in the form in which records contain it.
inline std::string path_of_run(const std::string& run_dir) {
    std::error_code ignored;
    std::string path = std::filesystem::weakly_canonical(run_dir, ignored);
    if (path.empty()) path = run_dir;
    while (path.size() > 1 && path.ends_with('/')) path.pop_back();
    return path.substr(0, sizeof FlightRecord::run_dir - 1);
}

// Returns the ranks of this run on this machine, in order. If two processes were the same rank, the one that
// is alive counts or, if that does not decide it, the one with the later sign of life.
inline std::vector<RankState> read_rank_states(const std::string& run_dir) {
    const std::string path = path_of_run(run_dir);
    std::map<int, RankState> ranks;
    for (int process : SharedFlightRecord::recorded_processes()) {
        std::shared_ptr<const FlightRecord> record = read_flight_record(process);
        if (!record || path != name_in(record->run_dir)) continue;
        RankState state = state_of(*record);
        if (!is_possible(state)) continue;
        auto [known, added] = ranks.try_emplace(state.rank, state);
        bool later = state.quiet_seconds < known->second.quiet_seconds;
        if (!added && (state.alive != known->second.alive ? state.alive : later)) known->second = state;
    }
    std::vector<RankState> all;
    for (auto& [rank, state] : ranks) all.push_back(std::move(state));
    return all;
}
