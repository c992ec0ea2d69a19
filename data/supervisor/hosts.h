/*
The hosts of a job: those that exist, those that take part, and those that were put aside.

Ranks fill the hosts in the order of the hosts file, so that ranks that communicate a lot are close together.
Hosts that are left over are spares. A host that fails its check is put aside, and the next one in the file
takes its place; one that answers again later is a host like any other. If too few are left, the job gets
fewer ranks, in steps of a whole data rank: the batch does not change, because data ranks may have different
numbers of micro-batches (comm/division.h).
*/
#pragma once

#include <algorithm>
#include <charconv>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/strings.h"

struct Host {
    std::string name;
    int slots = 1;                // ranks that it can run
    std::string aside = {};       // why it is put aside; empty: it is not
    bool has_own_folder = false;  // it does not share the run's directory
    bool is_refused = false;      // the launcher itself failed, with its own exit code
};

// The ranks of a job on one host, from `first` on.
struct HostRanks {
    std::string name;
    int first = 0, ranks = 0;
};

inline bool is_host_name(const std::string& name) {
    constexpr size_t longest = 253;
    bool valid = std::ranges::all_of(
        name, [](unsigned char c) { return isalnum(c) || c == '.' || c == '-' || c == '_' || c == ':'; });
    return valid && !name.empty() && name.size() <= longest && name[0] != '-';
}

// Parses a line of a hosts file, without its comment: `node1 slots=8`.
inline Host parse_host(std::string_view line, const std::string& where) {
    constexpr int most_slots = 4096;
    std::istringstream words{std::string(line)};
    Host host{"", 0};
    words >> host.name;
    if (!is_host_name(host.name))
        fail("%s: %s is not a host name; write lines like `node1 slots=8`", where.c_str(),
             printable(host.name).c_str());
    for (std::string word; words >> word;) {
        constexpr std::string_view slots = "slots=";
        if (word.starts_with("max_slots=") || word.starts_with("max-slots=")) continue;
        if (!word.starts_with(slots))
            fail("%s: unknown setting %s; write lines like `node1 slots=8`", where.c_str(),
                 printable(word).c_str());
        auto [end, error] =
            std::from_chars(word.data() + slots.size(), word.data() + word.size(), host.slots);
        if (error != std::errc() || end != word.data() + word.size() || host.slots < 1 ||
            host.slots > most_slots)
            fail("%s: %s: a host has 1 to %d slots; give the number of ranks that it can run", where.c_str(),
                 printable(word).c_str(), most_slots);
    }
    if (host.slots == 0)
        fail("%s: %s has no slots; give the number of ranks that it can run, as in `%s slots=8`",
             where.c_str(), host.name.c_str(), host.name.c_str());
    return host;
}

inline std::vector<Host> read_hosts(const std::string& path) {
    constexpr uint64_t most_bytes = 16 << 20;
    const std::string content = read_whole(path, most_bytes, "too large for a hostfile");
    std::vector<Host> hosts;
    std::set<std::string> names;
    std::string_view rest = content;
    for (int number = 1; !rest.empty(); number++) {
        std::string_view line = next_line(rest);
        line = line.substr(0, line.find('#'));
        if (is_blank(line)) continue;
        const std::string where = text("%s: line %d", path.c_str(), number);
        hosts.push_back(parse_host(line, where));
        if (!names.insert(hosts.back().name).second)
            fail("%s: %s appears twice; give it one line, with all of its slots", where.c_str(),
                 hosts.back().name.c_str());
    }
    if (hosts.empty()) fail("%s: has no hosts; write one per line, as in `node1 slots=8`", path.c_str());
    return hosts;
}

inline long long slots_of(const std::vector<Host>& hosts) {
    long long slots = 0;
    for (const Host& host : hosts) slots += host.slots;
    return slots;
}

// Places `ranks` ranks, or one per slot if there are fewer slots, on the hosts that are not put aside. Their
// number is rounded down to a multiple of `unit`. Returns nothing if there is no room for one unit.
inline std::vector<HostRanks> place_ranks(const std::vector<Host>& hosts, int ranks, int unit) {
    long long slots = 0;
    for (const Host& host : hosts) slots += host.aside.empty() ? host.slots : 0;
    int left = (int)(std::min<long long>(ranks, slots) / unit * unit);
    std::vector<HostRanks> places;
    int first = 0;
    for (const Host& host : hosts) {
        if (left == 0) break;
        if (!host.aside.empty()) continue;
        int taken = std::min(left, host.slots);
        places.push_back({host.name, first, taken});
        first += taken, left -= taken;
    }
    return places;
}

// Returns whether these places, which were read from a file, are possible on these hosts.
inline bool are_on(const std::vector<HostRanks>& places, const std::vector<Host>& hosts) {
    int first = 0;
    for (const HostRanks& place : places) {
        auto host = std::ranges::find(hosts, place.name, &Host::name);
        if (host == hosts.end() || place.ranks < 1 || place.ranks > host->slots || place.first != first)
            return false;
        first += place.ranks;
    }
    return true;
}

inline int ranks_of(const std::vector<HostRanks>& places) {
    return places.empty() ? 0 : places.back().first + places.back().ranks;
}

// Returns the host of a rank; empty if there is none.
inline std::string host_of_rank(const std::vector<HostRanks>& places, int rank) {
    for (const HostRanks& place : places) {
        if (rank >= place.first && rank < place.first + place.ranks) return place.name;
    }
    return "";
}

// "node1 .. node8 (8 hosts)", "node1, node2"
inline std::string names_text(const std::vector<HostRanks>& places) {
    constexpr size_t most = 4;
    if (places.size() > most)
        return text("%s .. %s (%zu hosts)", places.front().name.c_str(), places.back().name.c_str(),
                    places.size());
    std::string names;
    for (const HostRanks& place : places) append_item(names, place.name);
    return names;
}

// Returns the text of a hostfile in mpirun's format.
inline std::string hosts_file_text(const std::vector<HostRanks>& places) {
    std::string lines;
    for (const HostRanks& place : places) lines += text("%s slots=%d\n", place.name.c_str(), place.ranks);
    return lines;
}
