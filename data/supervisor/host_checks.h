/*
Whether hosts can be used: each is to run a small command, started as ranks are. The command looks for a file
that the supervisor has just made in the run's directory, so its answer also tells whether the host shares
that directory.
*/
#pragma once

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/supervisor/hosts.h"
#include "data/supervisor/launcher.h"
#include "data/supervisor/processes.h"

// A folder of this machine for files that launchers read while they start, gone at the end.
class Scratch {
public:
    Scratch() {
        std::string name = (std::filesystem::temp_directory_path() / "train_gpt_launch.XXXXXX").string();
        if (!mkdtemp(name.data())) fail_with_errno(name, "make a folder for files of hosts there");
        path_ = name;
    }
    ~Scratch() {
        std::error_code error;
        std::filesystem::remove_all(path_, error);
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // The name of a file with these hosts. That of one host, which is written often, is the same each time
    // for as many ranks.
    std::string hosts_file(const std::vector<HostRanks>& places) {
        std::string name = path_ + "/" +
                           (places.size() == 1 ? text("%s_%d", places[0].name.c_str(), places[0].ranks)
                                               : text("hosts_%d", ++count_));
        FileHandle file = open_file(name, O_WRONLY | O_CREAT | O_TRUNC);
        if (!file) fail_with_errno(name, "create it");
        std::string lines = hosts_file_text(places);
        write_at(file, name, 0, lines.data(), lines.size());
        return name;
    }

private:
    std::string path_;
    int count_ = 0;
};

class HostChecks {
public:
    HostChecks(const Launcher& launcher, Scratch& scratch, const std::string& run_dir, double seconds)
        : launcher_(launcher), scratch_(scratch), seconds_(seconds) {
        std::error_code error;
        probe_ = std::filesystem::absolute(run_dir, error).string() + text("/.probe.%d", getpid());
        probed_ = (bool)open_file(probe_, O_WRONLY | O_CREAT | O_TRUNC);
    }
    ~HostChecks() { unlink(probe_.c_str()); }
    HostChecks(const HostChecks&) = delete;
    HostChecks& operator=(const HostChecks&) = delete;

    // Puts hosts aside that do not answer, and takes back those that do again. Returns what there is to tell.
    std::vector<std::string> check(std::vector<Host>& hosts) {
        std::vector<Words> commands;
        for (const Host& host : hosts) {
            std::vector<HostRanks> place = {{host.name, 0, 1}};
            Words look = {"/bin/sh", "-c", "ls \"$0\" >/dev/null 2>&1 && echo shares it || echo has its own",
                          probe_};
            commands.push_back(launcher_.start(place, scratch_.hosts_file(place), look));
        }
        std::vector<CommandResult> results = run_commands(commands, seconds_);
        std::vector<std::string> notes;
        std::string apart;
        for (size_t i = 0; i < hosts.size(); i++) {
            std::string problem = problem_of(results[i]);
            if (!problem.empty() && hosts[i].aside.empty())
                notes.push_back(hosts[i].name + " is put aside: " + problem);
            if (problem.empty() && !hosts[i].aside.empty()) notes.push_back(hosts[i].name + " answers again");
            hosts[i].aside = problem;
            if (problem.empty() && results[i].output.find("has its own") != std::string::npos)
                apart += (apart.empty() ? "" : ", ") + hosts[i].name;
        }
        if (probed_ && !apart.empty())
            notes.push_back(
                "the run's directory is not shared with " + apart +
                ": ranks are watched, culprits named and the job started again as ever, but a "
                "checkpoint needs the files of all hosts in one folder: what ranks there save is not "
                "in it, so a restart on these hosts begins from the last whole one, or anew");
        return notes;
    }

private:
    std::string problem_of(const CommandResult& result) const {
        if (result.code < 0) return text("it did not run a command in %.0f s (--check-timeout)", seconds_);
        bool answers = result.output.find("shares it") != std::string::npos ||
                       result.output.find("has its own") != std::string::npos;
        return answers ? "" : text("the launcher cannot start a command there (exit code %d)", result.code);
    }

    const Launcher& launcher_;
    Scratch& scratch_;
    const double seconds_;
    std::string probe_;
    bool probed_;
};
