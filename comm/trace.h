/*
Writes the entries of all ranks over some steps as one timeline, on one clock (--trace-steps).

A rank's entries are in seconds on its device's clock. The host measures how far that clock is ahead of its
own, and the first rank measures how far each host's clock is ahead of its own; both measurements have an
error. For each rank, the file contains the sum of the two errors: if an effect seems to precede its cause by
less than that, this means nothing.

The ranks send their entries in turn, so that the first rank has those of only one rank in memory at a time.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/recorder.h"
#include "comm/world.h"
#include "data/base/figures.h"  // seconds_now
#include "data/base/json.h"
#include "data/run/trace_file.h"

// ----------------------------------------------------------------------------
// clocks
//
// The clocks of the machines of a job, compared over the control plane.
//
// Processes on one machine share a clock. The first rank asks one process of each other machine for its time,
// several times, and uses the answer that came back fastest (Cristian, "Probabilistic clock synchronization",
// 1989): the time in that answer is taken to be the time at the middle of the wait, with an error of at most
// half the wait.

struct ClockOffset {
    double ahead = 0;  // seconds by which a rank's seconds_now() is ahead of the first rank's
    double error = 0;  // seconds by which that may be wrong
};

// For all ranks: returns the offsets of all ranks on the first one, and an empty list on the others.
inline std::vector<ClockOffset> clock_offsets(const World& world) {
    constexpr int rounds = 16;
    std::map<std::string, int> first_of_host;
    for (int rank = 0; rank < world.size(); rank++) first_of_host.try_emplace(world.host(rank), rank);
    if (!world.is_root()) {
        bool answers = first_of_host[world.host()] == world.rank() && world.host() != world.host(0);
        for (int round = 0; answers && round < rounds; round++) {
            world.receive_from(0);
            double now = seconds_now();
            world.send_to(0, {(const char*)&now, sizeof now});
        }
        return {};
    }
    std::map<std::string, ClockOffset> of_host;
    for (auto& [host, rank] : first_of_host) {
        if (host == world.host(0)) continue;
        ClockOffset best = {0, 1e9};
        for (int round = 0; round < rounds; round++) {
            double before = seconds_now(), theirs;
            world.send_to(rank, "?");
            std::string answer = world.receive_from(rank);
            double after = seconds_now();
            memcpy(&theirs, answer.data(), sizeof theirs);
            double error = (after - before) / 2;
            if (error < best.error) best = {theirs - (before + after) / 2, error};
        }
        of_host[host] = best;
    }
    std::vector<ClockOffset> offsets;
    for (int rank = 0; rank < world.size(); rank++) offsets.push_back(of_host[world.host(rank)]);
    return offsets;
}

// Device memory in use on a rank; time: as returned by recorder.host_time().
struct MemorySample {
    double time;
    uint64_t bytes;
};

// Packs what a rank sends: a line of JSON, and its entries as raw bytes.
inline std::string packed_trace(const std::vector<FlightEntry>& entries,
                                const std::vector<MemorySample>& memory) {
    auto [ahead, error] = recorder.clock_offset();
    nlohmann::ordered_json head = {{"origin", seconds_now() - recorder.host_time() - ahead},
                                   {"error", error},
                                   {"tracks", recorder.track_names()},
                                   {"groups", nlohmann::ordered_json::array()},
                                   {"memory", nlohmann::ordered_json::array()}};
    for (const RecordedGroup& group : recorder.groups())
        head["groups"].push_back({{"name", group.name}, {"ranks", group.ranks}});
    for (const MemorySample& sample : memory) head["memory"].push_back({sample.time, sample.bytes});
    std::string text = json_line(head);
    if (!entries.empty()) text.append((const char*)entries.data(), entries.size() * sizeof(FlightEntry));
    return text;
}

// "forward 3", "reduce-scatter gradients"
inline std::string entry_name(const FlightEntry& entry) {
    std::string name = name_of(entry.operation);
    if (entry.operation == Operation::step) return text("step %d", entry.step);
    if (is_pass(entry.operation)) {
        name += text(" %d", entry.micro_batch);
        return entry.chunk > 0 ? name + text(" (chunk %d)", entry.chunk) : name;
    }
    if (is_communication(entry.operation) || entry.operation == Operation::wait)
        name += std::string(" ") + traffic_names[entry.traffic];
    return name;
}

inline const char* entry_kind(const FlightEntry& entry) {
    return is_pass(entry.operation)            ? "pass"
           : is_communication(entry.operation) ? "communication"
                                               : name_of(entry.operation);
}

// Adds a rank to the file. clock: the offset of the rank's clock from the file's. Returns the error of the
// rank's times in seconds.
inline double add_rank(TraceFile& file, int rank, const std::string& name, const ClockOffset& clock,
                       double origin, const std::string& packed) {
    size_t end_of_line = packed.find('\n');
    auto head = nlohmann::json::parse(packed.substr(0, end_of_line));
    const std::string begin_of_entries = packed.substr(end_of_line + 1);
    std::vector<FlightEntry> entries(begin_of_entries.size() / sizeof(FlightEntry));
    if (!entries.empty()) memcpy((void*)entries.data(), begin_of_entries.data(), begin_of_entries.size());
    const double shift = head["origin"].get<double>() - clock.ahead - origin;
    file.name_rank(rank, name);
    int track = 0;
    for (auto& track_name : head["tracks"]) file.name_track(rank, track++, track_name);
    std::ranges::sort(entries, {}, &FlightEntry::begin);
    std::map<std::string, uint64_t> sent;
    for (const FlightEntry& entry : entries) {
        double begin = entry.begin + shift, end = entry.end + shift;
        nlohmann::ordered_json details;
        if (entry.unit >= 0) details["unit"] = entry.unit;
        if (entry.micro_batch >= 0) details["micro_batch"] = entry.micro_batch;
        if (entry.bytes) details["bytes"] = entry.bytes;
        if (entry.group >= 0) {
            details["group"] = head["groups"][(size_t)entry.group]["name"];
            details["call"] = entry.number;
        }
        file.add_span(rank, entry.track, entry_name(entry), entry_kind(entry), begin, end, details);
        if (!is_communication(entry.operation)) continue;
        // Both ranks of a link number its messages alike, so the number identifies a message.
        if (entry.traffic == (uint8_t)Traffic::pipeline && entry.group >= 0) {
            auto& group = head["groups"][(size_t)entry.group];
            const std::string direction = group["name"].get<std::string>().substr(0, 1);
            std::string message = text("%s %d>%d %llu", direction.c_str(), group["ranks"][0].get<int>(),
                                       group["ranks"][1].get<int>(), (unsigned long long)entry.number);
            if (entry.operation == Operation::send)
                file.begin_arrow(rank, entry.track, message, begin);
            else
                file.end_arrow(rank, entry.track, message, end);
        }
        if (entry.operation == Operation::receive) continue;
        sent[traffic_names[entry.traffic]] += entry.bytes;
        file.add_counter(rank, "bytes of calls", end, sent);
    }
    for (auto& sample : head["memory"])
        file.add_counter(rank, "memory", sample[0].get<double>() + shift, {{"bytes", sample[1]}});
    return head["error"].get<double>() + clock.error;
}

// For all ranks, once their compute streams are idle: writes the kept entries of all ranks to a file on the
// first rank. Returns, on that rank, why the file could not be written; empty if it was.
inline std::string write_trace(const World& world, const std::string& path,
                               const std::vector<FlightEntry>& entries,
                               const std::vector<MemorySample>& memory) {
    std::vector<ClockOffset> clocks = clock_offsets(world);
    std::string mine = packed_trace(entries, memory);
    if (!world.is_root()) {
        world.receive_from(0);
        world.send_to(0, mine);
        return "";
    }
    std::string error;
    std::unique_ptr<TraceFile> file;
    double origin = nlohmann::json::parse(mine.substr(0, mine.find('\n')))["origin"];
    nlohmann::ordered_json errors = nlohmann::ordered_json::array();
    note_error(error, [&] { file = std::make_unique<TraceFile>(path); });
    for (int rank = 0; rank < world.size(); rank++) {
        if (rank > 0) {
            world.send_to(rank, "go on");
            mine = world.receive_from(rank);
        }
        if (!error.empty()) continue;
        note_error(error, [&] {
            double wrong = add_rank(*file, rank, world.name_of(rank), clocks[(size_t)rank], origin, mine);
            errors.push_back(1e6 * wrong);
        });
    }
    if (error.empty()) note_error(error, [&] { file->commit({{"clock_error_us", errors}}); });
    return error;
}
