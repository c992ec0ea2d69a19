/*
A watchdog is a thread that keeps ranks from waiting forever for each other: it looks at what the threads of
its process are doing (data/base/deadlines.h), and when one of them has spent longer than the time limit on
the same thing, finds out which rank it is waiting for. The stuck thread cannot do that itself: it may be
inside a launch or a library call.

    the rank that is stuck          asks the first rank
    the first rank                  calls the roll: asks all ranks what they are doing
    all ranks                       answer with their flight records, even if their other threads are stuck; a
                                    stopped process, or a machine that hangs, does not answer
    the first rank                  blames, in this order, ranks that do not answer, ranks whose disk does not
                                    respond, ranks that have not reached the call that the others wait in, or
                                    ranks whose device accepts no more work, and ends the job; or lets the
                                    others wait, if a rank that they wait for is making progress

The line that ends the job names the rank that the flight records of all ranks point to (data/run/culprit.h),
because those show what the devices are doing. If the records do not point to a rank, as before the first
step, the line names the one that the roll call points to.

A rank that gets no response to its question blames the first rank. So a job that hangs ends at most about ten
seconds after the time limit, and its last line names the rank to look at.

Before MPI connects the ranks, they cannot ask each other: the line then names the stopped processes of this
machine.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <list>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "comm/recorder.h"  // the record of what this rank has given its device
#include "comm/world.h"     // RankWatch
#include "data/base/deadlines.h"
#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"  // json_line
#include "data/base/periodic.h"
#include "data/base/screen.h"
#include "data/base/this_machine.h"  // process_status
#include "data/run/culprit.h"
#include "data/run/rank_state.h"

// ----------------------------------------------------------------------------
// the report of a stalled run
//
// Before a watchdog ends the job, it saves the flight records of the ranks as files of the run,
//
//     RUN/stall-20261125-054200/rank-3.json
//
// The disk of the run may be what is stuck, so the watchdog waits only briefly for those files.

// Writes the states to files in this folder. Returns whether that was done within two seconds.
inline bool write_states(const std::string& folder, const std::vector<RankState>& states) {
    constexpr std::chrono::seconds patience{2};
    std::promise<bool> written;
    std::future<bool> result = written.get_future();
    std::thread([folder, states, written = std::move(written)]() mutable {
        std::string error;
        note_error(error, [&] {
            make_folder(folder);
            check_folder_of_run(folder);
            for (const RankState& state : states)
                write_over(folder + text("/rank-%d.json", state.rank), json_line(nlohmann::json(state)));
        });
        written.set_value(error.empty());
    }).detach();
    return result.wait_for(patience) == std::future_status::ready && result.get();
}

// Returns a sentence that names the rank holding up a run in which a wait has taken longer than `limit`
// seconds: the rank that the records point to, or else `said`, the watchdogs' own finding. all_known: these
// are the records of all ranks
inline std::string named_by_records(const std::vector<RankState>& states, double limit, bool all_known,
                                    const std::string& said) {
    // Only the rank that noticed first has waited for `limit` seconds, the others a little less.
    const HangDiagnosis diagnosis = diagnose_hang(states, limit / 2, all_known, true);
    return diagnosis.kind == Fault::nobody ? said : diagnosis.sentence;
}

// Saves the records in the run's folder. Returns a line that says where; empty if nothing was saved.
inline std::string keep_records(const std::string& run_dir, const std::vector<RankState>& states) {
    if (run_dir.empty() || states.empty()) return "";
    char when[32] = "";
    time_t now = time(nullptr);
    tm local;
    strftime(when, sizeof when, "%Y%m%d-%H%M%S", localtime_r(&now, &local));
    std::string folder = run_dir + "/stall-" + when;
    return write_states(folder, states) ? text("the records of the ranks are in %s\n", folder.c_str()) : "";
}

// ----------------------------------------------------------------------------
// a single process
//
// The watchdog of a single process, which has no other ranks to ask, and none that wait for it. Its device
// may take any amount of time, but a disk that does not respond ends the run, with a line that names the
// file.

constexpr std::chrono::milliseconds between_looks{100};

// If the process itself was stopped (Ctrl-Z, a scheduler), all its waits look too long when it resumes, so
// time is counted from that moment.
class OwnPauses {
public:
    // Two looks are close in time, unless the process was stopped in between.
    void look() {
        double now = seconds_now();
        if (now - looked_ > longest_between_looks) went_on_ = now;
        looked_ = now;
    }
    double seconds_since() const { return seconds_now() - went_on_; }

private:
    static constexpr double longest_between_looks = 2;
    double looked_ = seconds_now(), went_on_ = -1e9;  // long ago
};

// "writing a.bin has taken 12 s", and what to do.
inline std::string alone_line(const BusyState& work) {
    return text("%s has taken %.4g s: check whether the disk responds, or raise --communication-timeout (0: "
                "wait forever)",
                work.what.c_str(), work.seconds());
}

class LoneWatchdog : public RankWatch {
    void look() {
        pauses_.look();
        recorder.poll();
        recorder.look_at_threads();
        double limit = time_limit;
        if (limit <= 0 || pauses_.seconds_since() < limit) return;
        for (const BusyState& each : BusyScope::all()) {
            if (each.activity != Activity::works || each.seconds() < limit) continue;
            print_error(alone_line(each));
            _exit(exit_failed_part);  // the stuck thread does not return
        }
    }

    OwnPauses pauses_;
    Periodic looks_{between_looks, [this] { look(); }};
};

// ----------------------------------------------------------------------------
// the roll

// A rank's answer to the roll call.
struct RollAnswer {
    bool answered = false;
    std::string phase;  // its first thread's
    struct Doing {
        Activity activity;
        std::string phase, what;
        double seconds;
    };
    std::vector<Doing> doing;
    // Its own record, if recording has started, and those of ranks on its machine that cannot answer.
    std::vector<RankState> records = {};

    const Doing* longest_in(const std::string& in_phase) const {
        return longest([&](const Doing& each) { return each.phase == in_phase; });
    }
    const Doing* longest_wait(const std::string& in_phase) const {
        return longest(
            [&](const Doing& each) { return each.activity == Activity::waits && each.phase == in_phase; });
    }
    const Doing* longest(Activity activity) const {
        return longest([&](const Doing& each) { return each.activity == activity; });
    }

private:
    template <typename Counts>
    const Doing* longest(Counts&& counts) const {
        const Doing* found = nullptr;
        for (const Doing& each : doing) {
            if (counts(each) && (!found || each.seconds > found->seconds)) found = &each;
        }
        return found;
    }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RollAnswer::Doing, activity, phase, what, seconds)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RollAnswer, answered, phase, doing, records)

// Returns the records of the run's ranks on this machine; none before recording starts.
inline std::vector<RankState> records_here() {
    const std::string run_dir = recorder.run_dir();
    return run_dir.empty() ? std::vector<RankState>() : read_rank_states(run_dir);
}

inline RollAnswer answer_to_roll() {
    RollAnswer answer = {true, Phase::of_process(), {}};
    for (const BusyState& each : BusyScope::all())
        answer.doing.push_back({each.activity, each.phase, each.what, each.seconds()});
    answer.records = records_here();
    std::erase_if(answer.records, [](const RankState& rank) {
        return rank.process != getpid() && rank.alive && rank.state != "T";
    });
    return answer;
}

// Returns the records in the answers: each rank's own if it answered, otherwise another rank's record of it.
inline std::vector<RankState> records_of(const std::vector<RollAnswer>& roll) {
    std::map<size_t, RankState> by_rank;
    for (size_t rank = 0; rank < roll.size(); rank++) {
        for (const RankState& record : roll[rank].records) {
            auto of = (size_t)record.rank;
            if (of == rank || (of < roll.size() && !roll[of].answered)) by_rank[of] = record;
        }
    }
    std::vector<RankState> records;
    for (auto& [rank, record] : by_rank) records.push_back(std::move(record));
    return records;
}

// Names the ranks that block `asker` in `phase`, and says why. Empty if all are making progress, or if the
// asker has moved on. limit: seconds that a wait, or a piece of work, may take
inline std::string blame(const std::vector<RollAnswer>& roll, int asker, const std::string& phase,
                         double limit, const NameOfRank& name_of) {
    constexpr size_t most_names = 4;
    std::vector<std::string> silent, stuck, absent, full;
    bool someone_works = false, someone_came_late = false;
    const RollAnswer::Doing* asked = roll[(size_t)asker].longest_in(phase);
    if (!asked || asked->seconds < limit) return "";
    for (int rank = 0; rank < (int)roll.size(); rank++) {
        const RollAnswer& state = roll[(size_t)rank];
        const RollAnswer::Doing *wait = state.longest_wait(phase), *work = state.longest(Activity::works),
                                *gives = state.longest(Activity::launches);
        if (!state.answered)
            silent.push_back(name_of(rank) + " does not answer");
        else if (work && work->seconds >= limit)
            stuck.push_back(
                text("%s has been %s for %.4g s", name_of(rank).c_str(), work->what.c_str(), work->seconds));
        else if (work)
            someone_works = true;
        else if (wait)
            someone_came_late |= wait->seconds < limit;
        else if (gives && gives->seconds >= limit)
            full.push_back(text("%s is %s, which has accepted none for %.4g s", name_of(rank).c_str(),
                                gives->what.c_str(), gives->seconds));
        else if (gives)
            someone_works = true;
        else
            absent.push_back(
                text("%s is missing (it is in the phase `%s`)", name_of(rank).c_str(), state.phase.c_str()));
    }
    std::vector<std::string>& guilty = !silent.empty()   ? silent
                                       : !stuck.empty()  ? stuck
                                       : !absent.empty() ? absent
                                                         : full;
    if (guilty.empty() && (someone_works || someone_came_late)) return "";
    if (guilty.empty()) return "all ranks wait for each other";
    if ((&guilty == &absent || &guilty == &full) && someone_works) return "";
    return joined(guilty, ", ", most_names);
}

// The line that ends the job.
inline std::string blame_line(const std::string& reason, const std::string& waiting, double seconds,
                              const std::string& phase) {
    return text("communication: %s; %s has waited for %.4g s in the phase `%s`: check whether something is "
                "stuck, or raise --communication-timeout (0: wait forever)",
                reason.c_str(), waiting.c_str(), seconds, phase.c_str());
}
// The line if the rank that asked is not waiting, but is itself stuck.
inline std::string stuck_line(const std::string& reason, const std::string& phase) {
    return text("communication: %s, in the phase `%s`: check whether it is stuck, or raise "
                "--communication-timeout (0: wait forever)",
                reason.c_str(), phase.c_str());
}

// ----------------------------------------------------------------------------
// processes that messages cannot reach

// Returns the rank that a launcher assigned to a process, from the environment of that process, in which each
// variable follows a 0 byte.
inline std::string rank_told_in(const std::string& environment) {
    for (const LauncherVariables& row : launcher_table) {
        const std::string name = '\0' + std::string(row.rank) + '=';
        if (size_t at = environment.find(name); at != environment.npos)
            return environment.c_str() + at + name.size();
    }
    return "";
}

// Names the stopped processes of this machine that the same launcher started, such as "rank 1 (process
// 4711)".
inline std::vector<std::string> stopped_neighbours() {
    std::vector<std::string> stopped;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
        std::string process = entry.path().filename();
        if (process.find_first_not_of("0123456789") != process.npos) continue;
        ProcessStatus status = process_status(entry.path());
        if (status.parent != getppid() || !status.is_stopped()) continue;
        const std::string rank = rank_told_in('\0' + process_file(entry.path(), "environ"));
        stopped.push_back((rank.empty() ? "a process of this job" : "rank " + rank) + " (process " + process +
                          ")");
    }
    return stopped;
}

// ----------------------------------------------------------------------------
// the thread

#ifndef WITHOUT_MPI

class Watchdog : public RankWatch {
public:
    explicit Watchdog(const std::string& host) : host_(host) {}

    void connect(MPI_Comm mpi) override {
        std::lock_guard lock(mutex_);
        mpiCheck(MPI_Comm_rank(mpi, &rank_));
        mpiCheck(MPI_Comm_size(mpi, &size_));
        mpi_ = mpi;
    }

    void name_ranks(NameOfRank name_of) override {
        std::lock_guard lock(mutex_);
        name_of_ = std::move(name_of);
    }

private:
    static constexpr double answer_time = 4;    // seconds that a rank may take to answer
    static constexpr double longest_delay = 4;  // seconds until a rank that was told to wait asks again
    static constexpr int tag = 0;
    enum Kind : char { question = '?', roll_call = 'r', answer = 'a', wait_on = 'w' };

    struct Roll {
        int asker;
        std::string phase;
        double since;  // seconds_now()
        std::vector<RollAnswer> answers;
    };

    void look() {
        std::lock_guard lock(mutex_);
        pauses_.look();
        recorder.poll();
        recorder.look_at_threads();
        if (size_ > 1) take_messages();
        if (roll_) look_at_roll();
        look_at_waits();
    }

    void look_at_waits() {
        double limit = time_limit;
        if (limit <= 0 || seconds_now() < ask_again_) return;
        for (const BusyState& each : BusyScope::all()) {
            if (each.seconds() < limit || pauses_.seconds_since() < limit) continue;
            if (size_ == 1) {
                if (each.activity == Activity::waits) blame_stopped(each);
                if (each.activity == Activity::works) end_job(alone_line(each));
                continue;
            }
            if (rank_ == 0) {
                call_roll(0, each.phase);
                return;
            }
            if (!asked_) {
                send(question, each.phase, 0);
                asked_ = seconds_now();
            } else if (seconds_now() - *asked_ > 2 * answer_time) {
                records_ = records_here();
                end_job(blame_line(
                    named_by_records(records_, time_limit, false, name_of_(0) + " does not answer"),
                    name_of_(rank_), each.seconds(), each.phase));
            }
            return;
        }
        asked_.reset();
    }

    // Called if MPI has not connected the ranks yet.
    void blame_stopped(const BusyState& wait) {
        std::string names;
        for (const std::string& process : stopped_neighbours()) append_item(names, process + " is stopped");
        if (names.empty()) names = "a process is missing, and none is stopped";
        end_job(blame_line(names + " on " + host_, "another process", wait.seconds(), wait.phase));
    }

    void call_roll(int asker, const std::string& phase) {
        if (roll_) return;
        roll_ = {asker, phase, seconds_now(), std::vector<RollAnswer>((size_t)size_)};
        roll_->answers[0] = answer_to_roll();
        for (int rank = 1; rank < size_; rank++) send(roll_call, "", rank);
    }

    void look_at_roll() {
        bool all = std::ranges::all_of(roll_->answers, &RollAnswer::answered);
        if (!all && seconds_now() - roll_->since < answer_time) return;
        std::string reason = blame(roll_->answers, roll_->asker, roll_->phase, time_limit, name_of_);
        if (!reason.empty()) {
            records_ = records_of(roll_->answers);
            bool all_record = std::ranges::all_of(roll_->answers, [](const RollAnswer& each) {
                return !each.answered || !each.records.empty();
            });
            reason = named_by_records(records_, time_limit, all_record, reason);
            const RollAnswer::Doing& asked = *roll_->answers[(size_t)roll_->asker].longest_in(roll_->phase);
            end_job(asked.activity == Activity::waits
                        ? blame_line(reason, name_of_(roll_->asker), asked.seconds, roll_->phase)
                        : stuck_line(reason, roll_->phase));
        }
        if (roll_->asker == 0)
            delay_question();
        else
            send(wait_on, "", roll_->asker);
        roll_.reset();
    }

    void delay_question() {
        asked_.reset();
        ask_again_ = seconds_now() + std::min(time_limit / 4, longest_delay);
    }

    void take_messages() {
        for (;;) {
            MPI_Message message;
            MPI_Status status;
            int found = 0, bytes = 0;
            std::string text;
            with_mpi([&] {
                std::erase_if(sent_, [](Sent& sent) {
                    int done = 0;
                    return MPI_Test(&sent.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done;
                });
                if (MPI_Improbe(MPI_ANY_SOURCE, tag, mpi_, &found, &message, &status) != MPI_SUCCESS ||
                    !found)
                    return;
                MPI_Get_count(&status, MPI_BYTE, &bytes);
                text.resize((size_t)bytes);
                MPI_Mrecv(text.data(), bytes, MPI_BYTE, &message, &status);
            });
            if (!found || text.empty()) return;
            take((Kind)text[0], text.substr(1), status.MPI_SOURCE);
        }
    }

    void take(Kind kind, const std::string& text, int from) {
        switch (kind) {
        case question:
            return call_roll(from, text);
        case roll_call:
            if (asked_) asked_ = seconds_now();  // the first rank is working on the question
            return send(answer, json_line(nlohmann::json(answer_to_roll())), from);
        case answer:
            if (roll_) roll_->answers[(size_t)from] = nlohmann::json::parse(text).get<RollAnswer>();
            return;
        case wait_on:
            return delay_question();
        }
    }

    void send(Kind kind, const std::string& text, int to) {
        Sent& sent = sent_.emplace_back();
        sent.text = (char)kind + text;
        with_mpi([&] {
            MPI_Isend(sent.text.data(), (int)sent.text.size(), MPI_BYTE, to, tag, mpi_, &sent.request);
        });
    }

    // Calls MPI. If another thread is stuck in MPI, no rank can be asked, and the job ends.
    template <typename Calls>
    void with_mpi(Calls&& calls) {
        double begin = seconds_now();
        for (Patience patience; !mpi_mutex.try_lock(); patience.wait()) {
            double waited = seconds_now() - begin, limit = time_limit;
            if (limit > 0 && waited > std::max(limit, answer_time))
                end_job(
                    blame_line("an MPI call does not return", name_of_(rank_), waited, Phase::of_process()));
        }
        std::lock_guard lock(mpi_mutex, std::adopt_lock);
        calls();
    }

    // Ends the job without the help of this process's other threads, which may be stuck.
    [[noreturn]] void end_job(const std::string& line) {
        screen.give_up();
        const std::string kept = visible(keep_records(recorder.run_dir(), records_));
        fprintf(stderr, "%strain_gpt: %s\n", kept.c_str(), one_line(line).c_str());
        if (lock_within(1, mpi_mutex) && size_ > 1) MPI_Abort(MPI_COMM_WORLD, exit_failed_part);
        _exit(exit_failed_part);
    }

    struct Sent {
        std::string text;
        MPI_Request request = MPI_REQUEST_NULL;
    };

    const std::string host_;
    std::mutex mutex_;
    MPI_Comm mpi_ = MPI_COMM_NULL;
    int rank_ = 0, size_ = 1;
    NameOfRank name_of_ = [this](int rank) { return text("rank %d of %d", rank, size_); };
    std::list<Sent> sent_;
    OwnPauses pauses_;
    std::optional<Roll> roll_;        // on the first rank, while it calls the roll
    std::vector<RankState> records_;  // the evidence against the rank that is blamed
    std::optional<double> asked_;     // when this rank asked its question, if that is unanswered
    double ask_again_ = 0;
    // The thread is joined before MPI ends. Other ranks get no answer after that, but by then none of them
    // waits for one.
    Periodic looks_{between_looks, [this] { look(); }};
};

#endif

inline std::unique_ptr<RankWatch> watch_ranks([[maybe_unused]] const std::string& host,
                                              [[maybe_unused]] bool alone) {
#ifndef WITHOUT_MPI
    if (!alone) return std::make_unique<Watchdog>(host);
#endif
    return std::make_unique<LoneWatchdog>();
}
