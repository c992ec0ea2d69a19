/*
`train_gpt launch`: starts a training job, follows it, and restarts it when something fails.

    Supervisor::run      until the job is done, or given up
      take_up_or_begin   find the job that an earlier supervisor left, or begin anew
      start              start the job on the hosts that answer
      follow             show its output until it ends, or has made no progress for too long
      after              what failed, and what is done about it (policy.h)

The supervisor is not a rank and does not use MPI. It observes a job through the launcher's exit code, the
run's log, and agents, one on each host. An agent reports the states of its host's ranks without their help,
and through a pipe, so a disk that hangs does not matter.
*/
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"
#include "data/base/strings.h"
#include "data/base/this_machine.h"
#include "data/checkpoint/folder.h"
#include "data/run/time_limit.h"  // process_begun
#include "data/supervisor/agents.h"
#include "data/supervisor/host_checks.h"
#include "data/supervisor/job.h"
#include "data/supervisor/launch_line.h"
#include "data/supervisor/policy.h"
#include "data/supervisor/progress.h"
#include "data/supervisor/state.h"

// Set once a signal has asked the supervisor to let its job save and exit, and once Ctrl-C has asked again.
static volatile sig_atomic_t stop_asked = 0, end_asked = 0;
inline void ask_supervisor(int signal) {
    if (stop_asked && signal == SIGINT) end_asked = 1;
    stop_asked = 1;
}

// Collects the reasons that a job's output gives for its end.
class JobWords {
public:
    void add(std::string_view output) {
        rest_.append(output);
        tail_.append(output);
        constexpr size_t tail = 4096;
        if (tail_.size() > tail) tail_.erase(0, tail_.size() - tail);
        std::string_view rest = rest_;
        while (rest.find('\n') != rest.npos) take(next_line(rest));
        rest_ = std::string(rest.substr(0, std::min<size_t>(rest.size(), 4096)));
    }
    // Returns the last line in which the program said why it ends, without the program's name; empty if there
    // was none.
    const std::string& reason() const { return reason_; }
    // Returns mpirun's message about the first process that a signal ended; empty if there is none.
    const std::string& launcher_reason() const { return launcher_reason_; }
    std::string last() const { return last_words(tail_); }
    // Returns the rank that these messages name; -1: none.
    int rank() const {
        const std::string& words = reason_.empty() ? launcher_reason_ : reason_;
        size_t at = words.find("rank ");
        bool is_number = at != words.npos && isdigit((unsigned char)words[at + 5]);
        return is_number ? atoi(words.c_str() + at + 5) : -1;
    }

private:
    void take(std::string_view line) {
        constexpr std::string_view name = "train_gpt: ";
        if (size_t at = line.find(name); at != line.npos)
            reason_ = printable_line(line.substr(at + name.size()));
        if (line.find("noticed that process rank ") != line.npos) launcher_reason_ = printable_line(line);
    }
    static std::string printable_line(std::string_view line) { return one_line(line.substr(0, 1000)); }

    std::string rest_, tail_, reason_, launcher_reason_;
};

class Supervisor {
public:
    explicit Supervisor(LaunchLine line)
        : line_(std::move(line)),
          o_(line_.options),
          launcher_(o_.launcher, !line_.hosts.empty()),
          program_(this_program()),
          lock_(lock_of(line_.run_dir)),
          files_(line_.run_dir),
          progress_(line_.run_dir) {
        progress_.update();
        if (line_.hosts.empty()) {
            line_.hosts.push_back({host_name(), line_.ranks});
            is_alone_ = true;
        }
    }

    // Returns the exit code of the program.
    int run() {
        std::signal(SIGPIPE, SIG_IGN);
        for (int signal : {SIGINT, SIGTERM, SIGUSR1}) std::signal(signal, ask_supervisor);
        if (std::signal(SIGHUP, ask_supervisor) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
        take_up_or_begin();
        while (state_.result.empty()) {
            if (!job_ && !start()) break;
            JobEnd end = follow();
            after(end);
        }
        write_state();
        tell(text("%s; %s", state_.result.c_str(), effective_text().c_str()));
        for (double until = seconds_now() + 2; !events_.empty() && seconds_now() < until; usleep(20000))
            look_at_events();
        return state_.code;
    }

private:
    // How a running job is made to end.
    enum class Ending { none, saving, unsaved, hung };

    // Ensures that a run has only one supervisor.
    static FileHandle lock_of(const std::string& run_dir) {
        make_folder(run_dir, "check the path or name another with --run-dir");
        return take_lock(run_dir + "/supervisor.lock",
                         run_dir + ": another supervisor manages this run; stop it, or wait until it ends");
    }

    // ------------------------------------------------------------------------
    // beginning

    void take_up_or_begin() {
        std::optional<SupervisorState> left = read_state(line_.run_dir);
        std::optional<JobRecord> record = JobRecord::read(line_.run_dir);
        // A keeper that has just started may not have recorded its job yet.
        const std::string job_lock = job_lock_path(line_.run_dir);
        for (int i = 0; i < 100 && is_locked(job_lock) && !(left && record && record->number == left->number);
             i++) {
            usleep(100000);
            left = read_state(line_.run_dir), record = JobRecord::read(line_.run_dir);
        }
        bool goes_on = left && left->result.empty() && left->command == line_.job;
        bool runs = is_locked(job_lock);
        if (runs && !goes_on)
            fail("%s: a job with another command line is running%s; use that command line, or stop the job",
                 line_.run_dir.c_str(), record ? text(" (process %d)", record->launcher.id).c_str() : "");
        if (!goes_on) {
            state_ = {};
            state_.began = unix_seconds();
            state_.first_step = std::max<int64_t>(progress_.last_step(), 0);
            state_.command = line_.job;
        } else {
            state_ = *left;
            if (!is_checkpoint_of_run(state_.resume)) state_.resume.clear();
            for (const Host& host : state_.aside) {
                for (Host& here : line_.hosts) {
                    if (here.name == host.name) here.aside = host.aside;
                }
            }
        }
        const std::string on =
            text(" on %s of %s", counted(line_.hosts.size(), "host").c_str(), line_.hosts_from.c_str());
        tell(text("%s%s%s; the job's output is in %s", counted(line_.ranks, "rank").c_str(),
                  is_alone_ ? " on this machine" : on.c_str(),
                  o_.spares > 0 ? text(", %d of them spares", o_.spares).c_str() : "",
                  job_log_path(line_.run_dir).c_str()));
        bool known = goes_on && record && record->number == state_.number;
        bool alive = known && (is_alive(record->keeper) || is_alive(record->launcher));
        if (alive && !is_kept(*record, line_.run_dir)) {
            tell(job_path(line_.run_dir) +
                 ": names processes that are not a job of this run; they are left alone");
        } else if (known && are_on(state_.places, line_.hosts)) {
            job_.emplace(line_.run_dir, *record);
            places_ = state_.places;
            tell(text("takes over start %d, process %d, which %s", state_.number, record->launcher.id,
                      runs ? "is running" : "has ended since"));
            begin_following();
            attempt_.last_step = progress_.last_step();
        } else if (alive) {
            fail("%s: its job is running on hosts that this command does not name; give the --hosts and "
                 "--ranks that it was started with",
                 supervisor_path(line_.run_dir).c_str());
        } else if (goes_on) {
            tell("takes over a run whose job no longer exists");
        }
    }

    bool is_checkpoint_of_run(const std::string& folder) const {
        return std::ranges::any_of(checkpoint_steps(line_.run_dir), [&](int64_t step) {
            return folder == checkpoint_folder(line_.run_dir, step);
        });
    }

    // Starts the job on the hosts that answer. Returns false if that is impossible; state_.result says why.
    bool start() {
        if (checks_hosts_) check_hosts();
        wait_for_log();
        if (stop_asked) {
            end_with(text("stopped as asked, before start %d of the job", state_.number + 1), 0);
            return false;
        }
        std::vector<HostRanks> places = place_ranks(line_.hosts, line_.ranks, line_.unit);
        if (places.empty()) return give_up_without_hosts();
        places_ = std::move(places);
        if (int ranks = ranks_of(places_); ranks < line_.ranks)
            tell(text("continues with %d of %d ranks, on %s; the batch stays the same", ranks, line_.ranks,
                      names_text(places_).c_str()));
        Words command = {program_};
        command.insert(command.end(), line_.job.begin(), line_.job.end());
        if (!state_.resume.empty()) set_option(command, "--resume", state_.resume);
        // --max-time limits this program as a whole, however often it starts the job.
        int passed = (int)(seconds_now() - process_begun);
        if (line_.max_time > 0)
            set_option(command, "--max-time", std::to_string(std::max(line_.max_time - passed, 1)));
        if (!is_single()) command = launcher_.start(places_, scratch_.hosts_file(places_), command);
        state_.number++;
        state_.places = places_;
        write_state();
        tell(text("start %d: %s", state_.number, command_line(command).c_str()));
        job_.emplace(line_.run_dir, state_.number, command);
        begin_following();
        return true;
    }

    // If the launcher itself fails on all hosts before the first start, --launcher is wrong: a user's error.
    bool give_up_without_hosts() {
        attempt_ = {.begun = unix_seconds(), .why = "no host is left for " + counted(line_.unit, "rank")};
        auto aside = std::ranges::find_if(line_.hosts, [](const Host& host) { return !host.aside.empty(); });
        if (aside != line_.hosts.end()) attempt_.why += "; " + aside->name + ": " + aside->aside;
        bool is_input = state_.number == 0 && std::ranges::all_of(line_.hosts, &Host::is_refused);
        open_incident({Restart::give_up, 0, is_input ? "its input has to be changed" : "no host is left"});
        close_incident();
        end_with("given up: " + attempt_.why, is_input ? exit_bad_input : exit_failed_part);
        return false;
    }

    // A single process needs no launcher.
    bool is_single() const {
        return is_alone_ && line_.ranks == 1 && o_.launcher == LaunchOptions().launcher;
    }

    // Replaces the value of an option in a command line, or adds it.
    static void set_option(Words& command, const std::string& name, const std::string& value) {
        bool is_there = false;
        for (size_t i = 0; i < command.size(); i++) {
            if (command[i] == name && i + 1 < command.size())
                command[i + 1] = value, is_there = true;
            else if (command[i].starts_with(name + "="))
                command[i] = name + "=" + value, is_there = true;
        }
        if (!is_there) command.insert(command.end(), {name, value});
    }

    // Ranks that were killed may keep the log locked a moment longer, and new ones would be refused.
    void wait_for_log() {
        for (int i = 0; i < 300 && !stop_asked && is_locked(log_path(line_.run_dir)); i++) usleep(100000);
    }

    void check_hosts() {
        checks_hosts_ = false;
        if (is_alone_ && !o_.selftest) return;
        Words selftest;
        if (o_.selftest) {
            selftest = {program_, "selftest", "--run-dir", line_.run_dir};
            tell("each host tests itself: its devices, links and disk");
        }
        HostChecks checks(launcher_, scratch_, line_.run_dir, o_.check_timeout, stop_asked);
        for (const std::string& note : checks.check(line_.hosts, selftest)) tell(note);
    }

    // ------------------------------------------------------------------------
    // following

    void begin_following() {
        words_ = {};
        attempt_ = {.begun = unix_seconds(), .ranks = ranks_of(places_)};
        agents_.start(launcher_, is_alone_, places_, scratch_,
                      {program_, "agent", "--run-dir", line_.run_dir});
        last_sign_ = seconds_now();
        stepped_ = false;
        ending_ = Ending::none;
        diagnosis_ = {};
    }

    JobEnd follow() {
        while (true) {
            agents_.wait(0.1);
            for (const std::string& note : agents_.read()) tell(note);
            show_output();
            look_at_steps();
            look_at_events();
            pass_stops_on();
            if (int code = job_->code(); code >= 0) {
                show_output();
                look_at_steps();
                attempt_.code = code;
                attempt_.end =
                    ending_ == Ending::hung ? JobEnd::hung : end_of_job(code, !words_.reason().empty());
                // A launcher that cannot start any rank the first time is not set up correctly.
                bool no_rank = state_.number == 1 && agents_.last_sign() == 0 && !stepped_ &&
                               attempt_.last_step <= state_.first_step && !job_->is_lost();
                if (attempt_.end == JobEnd::launcher && no_rank) attempt_.end = JobEnd::bad_input;
                return attempt_.end;
            }
            look_for_a_hang();
            if (files_.behind() && seconds_now() > next_write_) write_state();
        }
    }

    void show_output() {
        std::string_view shown;
        while (true) {
            const std::string output = job_->read_output(&shown);
            if (output.empty()) break;
            words_.add(output);
            print_text(shown);
        }
        fflush(stdout);
    }

    void look_at_steps() {
        bool grown = progress_.update();
        // The log has the last finished step; agents know the step that ranks are in.
        int64_t step = progress_.is_visible() ? progress_.last_step() : agents_.last_step();
        grown = grown || (!progress_.is_visible() && step > attempt_.last_step);
        last_sign_ = std::max(last_sign_, agents_.last_sign());
        if (!grown) return;
        last_sign_ = seconds_now();
        last_step_time_ = unix_seconds();
        stepped_ = true;
        attempt_.last_step = std::max(attempt_.last_step, step);
        if (step > state_.resumed_step && !state_.resume.empty()) state_.resume.clear();
        if (state_.incident) close_incident();
    }

    void pass_stops_on() {
        if (end_asked && ending_ != Ending::unsaved) {
            tell("asked again: the job is ended without saving");
            end_job(Ending::unsaved, is_single() ? SIGKILL : SIGTERM);
        } else if (stop_asked && ending_ == Ending::none) {
            tell("asked to stop: the job saves and ends (Ctrl-C again: without saving)");
            job_->ask_to_stop();
            ending_ = Ending::saving;
        }
    }

    void end_job(Ending ending, int signal) {
        job_->end(signal);
        ending_ = ending, ending_since_ = seconds_now();
    }

    // Returns the seconds without a sign of life after which a job counts as hung.
    double hang_limit() const {
        constexpr double least = 60, starting = 600, steps = 20;
        if (o_.hang_timeout > 0) return stepped_ ? o_.hang_timeout : std::max(o_.hang_timeout, least);
        if (agents_.saves()) return starting + line_.disk_wait;
        if (!stepped_) return starting;
        return std::max(least, steps * progress_.longest_step());
    }

    void look_for_a_hang() {
        double now = seconds_now();
        if (ending_ == Ending::hung || ending_ == Ending::unsaved) {
            if (now - ending_since_ > o_.grace) end_job(ending_, SIGKILL);
        } else if (now - last_sign_ > hang_limit()) {
            diagnosis_ = agents_.diagnosis(hang_limit() / 2);
            tell(text("no progress for %.0f s: %s; the job is ended", now - last_sign_,
                      diagnosis_.sentence.c_str()));
            end_job(Ending::hung, SIGTERM);
        }
    }

    // ------------------------------------------------------------------------
    // after the end

    void after(JobEnd end) {
        agents_.stop();
        attempt_.ended = unix_seconds();
        const bool lost = job_->is_lost();
        attempt_.why = why(end, lost);
        attempt_.exchanged = lost;
        job_.reset();
        state_.trained = progress_.trained_since(state_.first_step);
        bool asked = stop_asked;
        // Until training begins, the request to stop ends the job.
        bool before_a_step = asked && !stepped_ && attempt_.code == shell_signals + SIGUSR1;
        if (end == JobEnd::done || before_a_step) {
            state_.attempts.push_back(attempt_);
            if (state_.incident) close_incident();
            end_with(before_a_step ? "stopped as asked, before a step"
                     : asked       ? "stopped as asked"
                                   : "done",
                     0);
            return;
        }
        tell(text("start %d ended (%s, exit code %d): %s", state_.number, name_of(end), attempt_.code,
                  attempt_.why.c_str()));
        bool worth_it = end != JobEnd::bad_input && end != JobEnd::not_finite && !asked;
        if (worth_it && !is_alone_) {
            std::vector<HostRanks> before = places_;
            check_hosts();
            attempt_.exchanged =
                lost || names_of(place_ranks(line_.hosts, line_.ranks, line_.unit)) != names_of(before);
        }
        state_.aside.clear();
        for (const Host& host : line_.hosts) {
            if (!host.aside.empty()) state_.aside.push_back(host);
        }
        state_.attempts.push_back(attempt_);
        constexpr size_t most_attempts = 1000;
        if (state_.attempts.size() > most_attempts) state_.attempts.erase(state_.attempts.begin());
        Restart next = decide(state_.attempts, {o_.max_restarts, o_.restart_window, o_.backoff}, asked);
        open_incident(next);
        if (next.kind == Restart::finish || next.kind == Restart::give_up) {
            close_incident();
            const int code = end == JobEnd::bad_input    ? exit_bad_input
                             : end == JobEnd::not_finite ? exit_not_finite
                                                         : exit_failed_part;
            end_with((asked ? "ended" : "given up") + std::string(": ") + next.reason + ": " + attempt_.why,
                     code);
            return;
        }
        if (next.kind == Restart::from_before) go_back();
        write_state();
        if (next.wait > 0) tell(text("restarts in %.3g s", next.wait));
        for (double until = seconds_now() + next.wait; seconds_now() < until && !stop_asked;) usleep(50000);
    }

    std::string why(JobEnd end, bool lost) const {
        if (ending_ == Ending::unsaved) return "ended without saving, as asked";
        if (end == JobEnd::hung) return diagnosis_.sentence;
        if (!words_.reason().empty()) return words_.reason();
        if (!words_.launcher_reason().empty()) return words_.launcher_reason();
        if (lost) return "nobody saw how it ended, because its keeper ended too, as in a power failure";
        if (end == JobEnd::killed)
            return text("signal %d killed a process of the job", attempt_.code - shell_signals);
        return text("the launcher ended with exit code %d: %s", attempt_.code, words_.last().c_str());
    }

    // Returns the ranks that are held to be the cause, and their hosts; empty: none.
    std::string who() const {
        std::vector<int> ranks = diagnosis_.ranks;
        if (ranks.empty() && words_.rank() >= 0) ranks = {words_.rank()};
        std::string names;
        for (int rank : ranks) {
            std::string host = host_of_rank(places_, rank);
            append_item(names, text("rank %d", rank) + (host.empty() ? "" : " on " + host));
        }
        for (const Host& host : line_.hosts) {
            bool took_part =
                std::ranges::any_of(places_, [&](const HostRanks& p) { return p.name == host.name; });
            if (took_part && !host.aside.empty()) append_item(names, host.name);
        }
        return names;
    }

    static Words names_of(const std::vector<HostRanks>& places) {
        Words names;
        for (const HostRanks& place : places) names.push_back(place.name);
        return names;
    }

    // Values that are not finite may result from a bit that flipped some time ago: the second newest
    // checkpoint may be from before that.
    void go_back() {
        std::string error;
        note_error(error, [&] {
            std::vector<int64_t> steps = checkpoint_steps(line_.run_dir);
            if (steps.size() < 2) return;
            state_.resumed_step = steps[0];
            state_.resume = checkpoint_folder(line_.run_dir, steps[1]);
            tell("goes back to " + state_.resume);
        });
    }

    int64_t newest_checkpoint_step() const {
        std::string error;
        int64_t step = 0;
        note_error(error, [&] {
            std::vector<int64_t> steps = checkpoint_steps(line_.run_dir);
            if (!steps.empty()) step = steps[0];
        });
        return step;
    }

    void open_incident(const Restart& next) {
        Incident incident = state_.incident.value_or(Incident{});
        bool is_first = !state_.incident;  // false: the job has not trained since the last one
        int64_t step = is_first ? std::max<int64_t>(progress_.last_step(), 0) : incident.step;
        incident.time = utc_time();
        incident.what = is_first ? attempt_.why : incident.what + "; then: " + attempt_.why;
        if (std::string names = who(); is_first || !names.empty()) incident.who = names;
        incident.then = next.kind == Restart::from_newest   ? "started again"
                        : next.kind == Restart::from_before ? "started again from the previous checkpoint"
                                                            : next.reason;
        incident.step = step;
        incident.lost_steps =
            progress_.is_visible() ? std::max<int64_t>(step - newest_checkpoint_step(), 0) : 0;
        if (is_first) incident.since = last_step_time_ > 0 ? last_step_time_ : attempt_.begun;
        constexpr size_t longest = 2000;
        incident.what.resize(std::min(incident.what.size(), longest));
        state_.incident = incident;
        notify("failure", incident);
    }

    // Records the incident once the job trains again, or has ended for good.
    void close_incident() {
        Incident incident = *state_.incident;
        incident.seconds = unix_seconds() - incident.since;
        if (job_ && stepped_)
            incident.lost_steps = std::max<int64_t>(incident.step - progress_.started_after(), 0);
        state_.incident.reset();
        if (std::string note = files_.add(incident); !note.empty()) tell(note);
        state_.trained = progress_.trained_since(state_.first_step);
        write_state();
        tell(text("lost %s, and %.1f s without training; %s", counted(incident.lost_steps, "step").c_str(),
                  incident.seconds, effective_text().c_str()));
    }

    void end_with(const std::string& result, int code) {
        state_.result = result;
        state_.code = code;
        Incident last;
        last.time = utc_time();
        last.what = result;
        last.step = std::max<int64_t>(progress_.last_step(), 0);
        notify("end", last);
    }

    void notify(const char* event, const Incident& incident) {
        if (o_.on_event.empty()) return;
        nlohmann::ordered_json json = incident.json();
        json["event"] = event;
        json["run_dir"] = line_.run_dir;
        std::string error;
        note_error(error, [&] { events_.emplace_back(o_.on_event, "TRAIN_GPT_INCIDENT", json_line(json)); });
        if (!error.empty()) tell("--on-event: " + error);
    }

    // Reports which commands of --on-event have failed, to the user and in the open incident, if any.
    void look_at_events() {
        std::erase_if(events_, [&](DetachedCommand& command) {
            if (command.code() <= 0) return command.code() == 0;
            std::string failed = text("--on-event ended with exit code %d: %s", command.code(),
                                      last_words(command.errors()).c_str());
            tell(failed);
            if (state_.incident) state_.incident->what += "; " + failed;
            return true;
        });
    }

    // ------------------------------------------------------------------------
    // messages

    std::string effective_text() const {
        double now = unix_seconds(), whole = now - state_.began;
        if (!progress_.is_visible())
            return "the run's log cannot be seen from here, so its training time is unknown";
        return text("%.1f%% of %s in training", 100 * state_.effective(now), rough_duration(whole).c_str());
    }

    static void tell(const std::string& words) {
        print("launch       %s\n", words.c_str());
        fflush(stdout);
    }

    static std::string command_line(const Words& words) {
        std::string line;
        for (const std::string& word : words) {
            bool plain = !word.empty() && word.find_first_of(" \t'\"\\*?[]$&|;<>(){}~#`!") == word.npos;
            append_item(line, plain ? word : "'" + word + "'", " ");
        }
        return line;
    }

    void write_state() {
        next_write_ = seconds_now() + 1;
        if (std::string note = files_.write(state_); !note.empty()) tell(note);
    }

    LaunchLine line_;
    const LaunchOptions& o_;
    const Launcher launcher_;
    const std::string program_;
    FileHandle lock_;
    SupervisorFiles files_;
    Progress progress_;
    Scratch scratch_;
    SupervisorState state_;
    bool is_alone_ = false, checks_hosts_ = true;

    std::optional<Job> job_;
    std::vector<HostRanks> places_;
    Agents agents_;
    JobWords words_;
    std::vector<DetachedCommand> events_;  // commands of --on-event that are running
    Attempt attempt_;
    HangDiagnosis diagnosis_;
    double last_sign_ = 0;       // seconds_now()
    double last_step_time_ = 0;  // unix_seconds()
    double ending_since_ = 0;    // seconds_now()
    double next_write_ = 0;
    bool stepped_ = false;  // since this start
    Ending ending_ = Ending::none;
};

inline int launch(const GivenOptions& given, const std::vector<std::string>& job) {
    return Supervisor(parse_launch(given, job)).run();
}
