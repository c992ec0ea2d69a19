/*
The nodes that a scheduler has assigned to the job in which this program runs: Slurm names them in environment
variables (sbatch(1), "output environment variables"), PBS and its relatives in a file with a line for each
task.
*/
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/strings.h"
#include "data/supervisor/hosts.h"

// Adds the names in one entry of a Slurm node list: rack[1-2]n[08-10,12] has eight.
inline void add_names(const std::string& entry, std::vector<std::string>& names) {
    constexpr size_t most = 1 << 16;
    const size_t open = entry.find('['), close = entry.find(']', open);
    if (close == entry.npos) {
        if (!is_host_name(entry) || names.size() == most)
            fail("SLURM_JOB_NODELIST: %s is not a host; list hosts with --hosts", printable(entry).c_str());
        names.push_back(entry);
        return;
    }
    for (const std::string& range : comma_separated(entry.substr(open + 1, close - open - 1))) {
        const std::string first = range.substr(0, range.find('-'));
        const long last = atol(range.c_str() + range.find('-') + 1);  // after the -, or else all of it
        for (long i = atol(first.c_str()); i <= last; i++) {
            std::string number = std::to_string(i);
            number.insert(0, first.size() - std::min(first.size(), number.size()), '0');
            add_names(entry.substr(0, open) + number + entry.substr(close + 1), names);
        }
    }
}

// Reads "node[1-3],gpu1" and "8(x2),4,2": hosts with 8, 8, 4 and 2 tasks. Hosts that `tasks` omits have one.
inline std::vector<Host> slurm_hosts(const std::string& list, const std::string& tasks) {
    std::vector<std::string> names;
    std::string entry;
    for (const std::string& part : comma_separated(list)) {  // also splits at commas inside brackets
        append_item(entry, part, ",");
        if (std::ranges::count(entry, '[') > std::ranges::count(entry, ']')) continue;
        add_names(entry, names);
        entry.clear();
    }
    if (!entry.empty()) add_names(entry, names);
    std::vector<Host> hosts;
    for (const std::string& name : names) hosts.push_back({name});
    auto host = hosts.begin();
    for (const std::string& part : comma_separated(tasks)) {
        int slots = 1, times = 1;
        sscanf(part.c_str(), "%d(x%d)", &slots, &times);
        for (; times > 0 && host != hosts.end(); times--) (host++)->slots = std::max(slots, 1);
    }
    return hosts;
}

// Reads a file in which each line names the host of one task.
inline std::vector<Host> pbs_hosts(const std::string& path) {
    std::vector<Host> hosts;
    const std::string content = read_text(path);
    for (std::string_view rest = content; !rest.empty();) {
        const std::string line(next_line(rest));
        if (is_blank(line)) continue;
        const std::string name = parse_host(line + " slots=1", path).name;
        auto known = std::ranges::find(hosts, name, &Host::name);
        if (known == hosts.end())
            hosts.push_back({name});
        else
            known->slots++;
    }
    return hosts;
}

// The hosts of the job, and the variable that names them. Outside of a job there are none.
struct Allocation {
    std::vector<Host> hosts;
    std::string source;
};
inline Allocation find_allocation() {
    auto variable = [](const char* name) { return std::string(getenv(name) ? getenv(name) : ""); };
    if (std::string list = variable("SLURM_JOB_NODELIST"); !list.empty())
        return {slurm_hosts(list, variable("SLURM_TASKS_PER_NODE")), "SLURM_JOB_NODELIST"};
    if (std::string path = variable("PBS_NODEFILE"); !path.empty()) return {pbs_hosts(path), "PBS_NODEFILE"};
    return {};
}
