/*
A command line of `launch`: its own options, then -- and the job. Detectable mistakes are refused before
anything starts.
*/
#pragma once

#include <string>
#include <unistd.h>
#include <vector>

#include "data/base/error.h"
#include "data/base/screen.h"
#include "data/launch/parse_command_line.h"
#include "data/run/run_log.h"
#include "data/supervisor/allocation.h"
#include "data/supervisor/hosts.h"
#include "data/supervisor/launcher.h"

struct LaunchLine {
    LaunchOptions options;
    Words job;                // the words after the --, with --resume auto, --save-every auto unless chosen
    std::string run_dir;      // the job's
    std::vector<Host> hosts;  // empty: this machine
    std::string hosts_from;   // the file or variable that names them
    int max_time = 0;         // seconds since launch began; 0: no limit
    int disk_wait = 0;        // seconds for which the job tries again to save
    int ranks = 1;
    int unit = 1;  // the number of ranks is a multiple of it
};

// Returns the number that the ranks of a job must be a multiple of, as far as its command line determines it.
inline int unit_of_ranks(const Options& job, int ranks) {
    if (job.dp > 0) return ranks;
    long long unit = job.ranks_of_data() * std::max(job.shard_group, 1);
    return (int)std::min<long long>(unit, INT32_MAX);
}

inline void place_job(LaunchLine& line, const Options& job) {
    LaunchOptions& o = line.options;
    line.ranks = o.ranks;
    Allocation known = o.hosts.empty() ? find_allocation() : Allocation{read_hosts(o.hosts), o.hosts};
    line.hosts = known.hosts, line.hosts_from = known.source;
    if (line.hosts.empty()) {
        if (o.spares > 0) fail("--spares %d: there is only this machine; name hosts with --hosts", o.spares);
        line.ranks = std::max(o.ranks, 1);
    } else {
        int count = (int)line.hosts.size();
        if (o.spares >= count)
            fail("--spares %d: %s has %d hosts, and at least one must train; name more hosts or fewer spares",
                 o.spares, line.hosts_from.c_str(), count);
        std::vector<Host> first(line.hosts.begin(), line.hosts.end() - o.spares);
        long long slots = slots_of(first);
        if (o.ranks == 0) line.ranks = (int)std::min<long long>(slots, 1 << 20);
        if (line.ranks > slots && o.spares > 0)
            fail("--ranks %d: %s has only %lld slots without its last %d hosts, the spares; name more "
                 "hosts, or give fewer ranks or spares",
                 line.ranks, line.hosts_from.c_str(), slots, o.spares);
        if (line.ranks > slots)
            fail("--ranks %d: %s has only %lld slots; name more hosts, or give fewer ranks", line.ranks,
                 line.hosts_from.c_str(), slots);
    }
    line.unit = unit_of_ranks(job, line.ranks);
    if (line.ranks % line.unit != 0) {
        std::string group = job.shard_group > 0 ? text(" --shard-group %d", job.shard_group) : "";
        std::string context = job.cp > 1 ? text(" --cp %d", job.cp) : "";
        fail("--ranks %d: --tp %d%s --pp %d%s need a multiple of %d; change --ranks", line.ranks,
             std::max(job.tp, 1), context.c_str(), std::max(job.pp, 1), group.c_str(), line.unit);
    }
}

inline void check_job(const Options& job) {
    if (job.run_dir.empty())
        fail("--run-dir: missing after the --; name the run's directory, where launch also keeps its own "
             "files");
    if (job.overwrite)
        fail("--overwrite: would delete the job's progress at each restart; remove %s by hand, or name "
             "another --run-dir",
             printable(job.run_dir).c_str());
    if (!job.resume.empty() && !resumes_newest(job))
        fail("--resume %s: a job always resumes from its own newest checkpoint; leave the option out, and "
             "use --init to start from another run",
             printable(job.resume).c_str());
}

// Returns whether the user has chosen when the run is saved, now or when it was begun.
inline bool saves_as_chosen(const GivenOptions& given, const std::string& run_dir) {
    Options begun;
    std::string not_there;
    note_error(not_there, [&] { begun = options_from_json(run_options_json(run_dir), "options.json"); });
    const OptionRow& row = *find_option("--save-every", command_train);
    return is_given(row, given) || is_given("--keep-every", given) || begun.keep_every > 0 ||
           (begun.save_every.unit != Interval::best &&  // the choice that launch itself makes
            value_text(row, begun) != value_text(row.standard(command_train)));
}

// of_launch: the options of launch itself; job_words: the words after the --.
inline LaunchLine parse_launch(const GivenOptions& of_launch, const std::vector<std::string>& job_words) {
    LaunchLine line;
    set_values(of_launch, line.options);
    if (job_words.empty())
        fail("launch: no job; write it after a --, as in `launch --ranks 4 -- train --run-dir runs/a ...`");
    line.job = job_words;
    if (parse_command(line.job[0]) != command_train)
        fail("launch: %s does not train, so a restart could not resume it; give a train command after --",
             line.job[0].c_str());
    GivenOptions given = read_arguments(command_train, line.job);
    Options job = asked_options(given);
    check_job(job);
    if (job.resume.empty()) line.job.insert(line.job.end(), {"--resume", name_of(ResumeFrom::newest)});
    // A failure may happen at any time, and loses what was trained since the last checkpoint.
    if (!saves_as_chosen(given, job.run_dir)) line.job.insert(line.job.end(), {"--save-every", "auto"});
    line.run_dir = job.run_dir;
    line.max_time = job.max_time;
    line.disk_wait = job.disk_wait;
    place_job(line, job);
    return line;
}

// Returns the path of this program, with which it can be started from any folder.
inline std::string this_program() {
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length <= 0) fail_with_errno("/proc/self/exe", "read it");
    return std::string(path, (size_t)length);
}
