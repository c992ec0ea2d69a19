/*
Finds out which hosts are usable. Each runs a small command, started like a rank. The command looks for a file
that the supervisor has just made in the run's directory, so its answer also shows whether the host shares
that directory. With --selftest on, each host then runs train_gpt selftest with one rank per slot, all hosts
at the same time, and a host whose selftest names a suspect is put aside as well.
*/
#pragma once

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/supervisor/hosts.h"
#include "data/supervisor/launcher.h"
#include "data/supervisor/processes.h"

// A folder on this machine for files that launchers read while they start; it is removed at the end.
class Scratch {
public:
    Scratch() {
        std::string name = temporary_folder() + "/train_gpt_launch.XXXXXX";
        if (!mkdtemp(name.data())) fail_with_errno(name, "create a temporary folder for hostfiles");
        path_ = name;
    }
    ~Scratch() {
        std::error_code error;
        std::filesystem::remove_all(path_, error);
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // Writes these hosts to a file, and returns its name. A single host is written often, so its file is
    // reused: the name depends only on the host and its number of ranks.
    std::string hosts_file(const std::vector<HostRanks>& places) {
        std::string name = path_ + "/" +
                           (places.size() == 1 ? text("%s_%d", places[0].name.c_str(), places[0].ranks)
                                               : text("hosts_%d", ++count_));
        write_over(name, hosts_file_text(places));
        return name;
    }

private:
    std::string path_;
    int count_ = 0;
};

class HostChecks {
public:
    // stopped: ends a check when it is set
    HostChecks(const Launcher& launcher, Scratch& scratch, const std::string& run_dir, double seconds,
               const volatile sig_atomic_t& stopped)
        : launcher_(launcher), scratch_(scratch), seconds_(seconds), stopped_(stopped) {
        std::error_code error;
        probe_ = std::filesystem::absolute(run_dir, error).string() + "/.probe.XXXXXX";
        probed_ = (bool)FileHandle(mkostemp(probe_.data(), O_CLOEXEC));
    }
    ~HostChecks() { unlink(probe_.c_str()); }
    HostChecks(const HostChecks&) = delete;
    HostChecks& operator=(const HostChecks&) = delete;

    // Puts aside hosts that do not answer, or that a selftest finds unfit, and takes back those that are fit
    // again. selftest: its command; empty: none. Returns notes for the user about changes since the last
    // check. A check that was stopped changes nothing.
    std::vector<std::string> check(std::vector<Host>& hosts, const Words& selftest) {
        const std::vector<Host> before = hosts;
        std::vector<CommandResult> answers = answers_of(hosts);
        std::string apart;
        for (size_t i = 0; i < hosts.size(); i++) {
            hosts[i].aside = problem_of(answers[i]);
            hosts[i].is_refused = !hosts[i].aside.empty() && is_refusal(answers[i]);
            hosts[i].has_own_folder = probed_ && hosts[i].aside.empty() && says(answers[i], has_its_own);
            if (hosts[i].has_own_folder && !before[i].has_own_folder) append_item(apart, hosts[i].name);
        }
        std::vector<std::string> notes;
        if (!apart.empty())
            notes.push_back(
                "the run's directory is not shared with " + apart +
                ": hangs are detected and the job is restarted as usual, but a checkpoint needs the "
                "files of all ranks in one folder, and those that ranks there save are missing from "
                "it; a restart resumes from the last complete checkpoint, or from the beginning");
        if (!selftest.empty()) test(hosts, selftest);
        if (stopped_) {
            hosts = before;
            return {};
        }
        for (size_t i = 0; i < hosts.size(); i++) {
            if (!hosts[i].aside.empty() && before[i].aside.empty())
                notes.push_back(hosts[i].name + " is put aside: " + hosts[i].aside);
            if (hosts[i].aside.empty() && !before[i].aside.empty())
                notes.push_back(hosts[i].name + " can be used again");
        }
        return notes;
    }

private:
    static constexpr std::string_view shares_it = "shares it", has_its_own = "has its own";

    static bool says(const CommandResult& result, std::string_view words) {
        return result.output.find(words) != std::string::npos;
    }
    static bool is_answer(const CommandResult& result) {
        return says(result, shares_it) || says(result, has_its_own);
    }

    // Returns whether the launcher itself failed, for example because of an unknown option. ssh, and
    // therefore mpirun, exit with 255 if they cannot reach a host.
    static bool is_refusal(const CommandResult& result) {
        constexpr int unreachable = 255, first_signal = 129;
        return result.code > 0 && result.code != unreachable && result.code < first_signal;
    }

    // A launcher may fail temporarily, for example because an ssh server gets too many connections at once,
    // so hosts on which it fails are tried a second time.
    std::vector<CommandResult> answers_of(const std::vector<Host>& hosts) {
        const std::string look =
            text("ls \"$0\" >/dev/null 2>&1 && echo %s || echo %s", shares_it.data(), has_its_own.data());
        std::vector<CommandResult> answers(hosts.size());
        for (int attempt = 0; attempt < 2; attempt++) {
            std::vector<size_t> asked;
            std::vector<Words> commands;
            for (size_t i = 0; i < hosts.size(); i++) {
                bool failed = answers[i].code >= 0 && !is_answer(answers[i]);
                if (attempt > 0 && !failed) continue;
                std::vector<HostRanks> place = {{hosts[i].name, 0, 1}};
                asked.push_back(i);
                commands.push_back(
                    launcher_.start(place, scratch_.hosts_file(place), {"/bin/sh", "-c", look, probe_}));
            }
            std::vector<CommandResult> results = run_commands(commands, seconds_, stopped_);
            for (size_t k = 0; k < asked.size(); k++) answers[asked[k]] = std::move(results[k]);
        }
        return answers;
    }

    // Runs the selftest on all hosts that answered, at the same time.
    void test(std::vector<Host>& hosts, const Words& selftest) {
        std::vector<Host*> tested;
        std::vector<Words> commands;
        for (Host& host : hosts) {
            if (!host.aside.empty()) continue;
            std::vector<HostRanks> place = {{host.name, 0, host.slots}};
            tested.push_back(&host);
            commands.push_back(launcher_.start(place, scratch_.hosts_file(place), selftest));
        }
        constexpr double most_seconds = 600;
        std::vector<CommandResult> results = run_commands(commands, most_seconds, stopped_);
        for (size_t i = 0; i < tested.size(); i++) tested[i]->aside = suspect_of(results[i], most_seconds);
    }

    // Returns the first suspect that a selftest names, or why it has no result; empty: all is well.
    static std::string suspect_of(const CommandResult& result, double seconds) {
        constexpr std::string_view named = "train_gpt: suspect: ";
        if (result.code == 0) return "";
        if (result.code < 0) return text("its selftest did not finish within %.0f s", seconds);
        size_t begin = result.output.find(named);
        if (begin == std::string::npos)
            return text("its selftest ended with exit code %d: %s", result.code,
                        last_words(result.output).c_str());
        begin += named.size();
        return "selftest: " + result.output.substr(begin, result.output.find('\n', begin) - begin);
    }

    std::string problem_of(const CommandResult& result) const {
        if (result.code < 0) return text("it did not run a command in %.0f s (--check-timeout)", seconds_);
        if (is_answer(result)) return "";
        return text("the launcher cannot start a command there (exit code %d): %s", result.code,
                    last_words(result.output).c_str());
    }

    const Launcher& launcher_;
    Scratch& scratch_;
    const double seconds_;
    const volatile sig_atomic_t& stopped_;
    std::string probe_;
    bool probed_;
};
