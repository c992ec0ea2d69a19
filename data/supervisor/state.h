/*
The state from which a new supervisor continues the job of one that was killed: RUN/supervisor.json, replaced
as a whole at each change. RUN/incidents.jsonl gets a line for each failure, once the job trains again or is
given up: what happened, to which rank, the number of lost steps, and the seconds without training.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/base/log_file.h"
#include "data/run/run_log.h"
#include "data/supervisor/hosts.h"
#include "data/supervisor/launcher.h"
#include "data/supervisor/policy.h"

// A failure, until the job trains again. Times are seconds since 1970, as everywhere in a supervisor, because
// another process may continue its work after a reboot.
struct Incident {
    std::string time;       // utc_time()
    std::string what, who;  // one line; a rank and its host, or empty
    std::string then;       // the supervisor's action
    int64_t step = 0;       // the last finished step before it
    int64_t lost_steps = 0;
    double since = 0;    // when that step ended
    double seconds = 0;  // without training; set once the failure is closed

    nlohmann::ordered_json json() const {
        return {{"time", time},   {"what", what},      {"who", who},
                {"then", then},   {"step", step},      {"lost_steps", lost_steps},
                {"since", since}, {"seconds", seconds}};
    }
    static Incident from(const nlohmann::json& json) {
        return {json.at("time"),
                json.at("what"),
                json.at("who"),
                json.at("then"),
                whole_in<int64_t>(json, "step"),
                whole_in<int64_t>(json, "lost_steps"),
                json.at("since"),
                json.at("seconds")};
    }
};

struct SupervisorState {
    double began = 0;           // the time of the job's first start
    int64_t first_step = 0;     // the last step before that
    Words command;              // the job's
    int number = 0;             // number of the attempt that is running, or ran last; 0: none
    std::string resume;         // the checkpoint that the next start resumes from; empty: the newest
    int64_t resumed_step = -1;  // step of the newest checkpoint when `resume` was set
    std::string result;         // how the job ended; empty: it has not
    int code = 0;               // the supervisor's exit code at its end
    std::vector<Attempt> attempts;
    std::optional<Incident> incident;  // the open one, if any
    std::vector<HostRanks> places;     // the hosts of the start that is running, or ran last
    std::vector<Host> aside;           // hosts that were put aside
    double trained = 0;                // seconds in steps that were kept

    // Returns the fraction of the time since the beginning that was spent in kept steps.
    double effective(double now) const { return now > began ? std::min(1.0, trained / (now - began)) : 0; }

    nlohmann::ordered_json json(double now) const {
        nlohmann::ordered_json tries = nlohmann::ordered_json::array();
        for (const Attempt& a : attempts) {
            tries.push_back({{"end", name_of(a.end)},
                             {"code", a.code},
                             {"last_step", a.last_step},
                             {"begun", a.begun},
                             {"ended", a.ended},
                             {"ranks", a.ranks},
                             {"exchanged", a.exchanged},
                             {"why", a.why}});
        }
        nlohmann::ordered_json on = nlohmann::ordered_json::array(), off = nlohmann::ordered_json::array();
        for (const HostRanks& p : places)
            on.push_back({{"name", p.name}, {"first", p.first}, {"ranks", p.ranks}});
        for (const Host& h : aside) off.push_back({{"name", h.name}, {"slots", h.slots}, {"why", h.aside}});
        nlohmann::ordered_json whole = {{"time", utc_time()},
                                        {"began", began},
                                        {"first_step", first_step},
                                        {"command", command},
                                        {"number", number},
                                        {"resume", resume},
                                        {"resumed_step", resumed_step},
                                        {"result", result},
                                        {"code", code},
                                        {"trained_seconds", trained},
                                        {"effective_training_time", effective(now)},
                                        {"hosts", on},
                                        {"aside", off},
                                        {"attempts", tries}};
        whole["incident"] = incident ? incident->json() : nlohmann::ordered_json();
        return whole;
    }

    static SupervisorState from(const nlohmann::json& json) {
        SupervisorState s;
        s.began = json.at("began");
        s.first_step = whole_in<int64_t>(json, "first_step");
        s.command = json.at("command").get<Words>();
        s.number = whole_in(json, "number");
        s.resume = json.at("resume");
        s.resumed_step = whole_in<int64_t>(json, "resumed_step");
        s.result = json.at("result");
        s.code = whole_in(json, "code");
        s.trained = json.at("trained_seconds");
        for (const nlohmann::json& a : json.at("attempts")) {
            s.attempts.push_back({kind_of<JobEnd>(a.at("end").get<std::string>()), whole_in(a, "code"),
                                  whole_in<int64_t>(a, "last_step"), a.at("begun"), a.at("ended"),
                                  whole_in(a, "ranks"), a.at("exchanged"), a.at("why")});
        }
        for (const nlohmann::json& p : json.at("hosts"))
            s.places.push_back({p.at("name"), whole_in(p, "first"), whole_in(p, "ranks")});
        for (const nlohmann::json& h : json.at("aside"))
            s.aside.push_back({h.at("name"), whole_in(h, "slots"), h.at("why")});
        if (!json.at("incident").is_null()) s.incident = Incident::from(json.at("incident"));
        return s;
    }
};

// Returns the state that an earlier supervisor left, if there was one.
inline std::optional<SupervisorState> read_state(const std::string& run_dir) {
    if (access(supervisor_path(run_dir).c_str(), F_OK) != 0) return {};
    nlohmann::json json = supervisor_json(run_dir);
    try {
        return SupervisorState::from(json);
    } catch (const std::exception&) {
        fail("%s: is not a supervisor's state; move it away to start over", supervisor_path(run_dir).c_str());
    }
}

// The files that a supervisor keeps in the run's directory. A disk that is full, or temporarily gone, is no
// reason to abandon a job: what could not be written is written later.
class SupervisorFiles {
public:
    explicit SupervisorFiles(std::string run_dir)
        : run_dir_(std::move(run_dir)), incidents_(incidents_path(run_dir_)) {}

    // Returns a note for the user, or an empty string.
    std::string write(const SupervisorState& state) {
        std::string error, content = state.json(unix_seconds()).dump(1, ' ', false, replace) + "\n";
        note_error(error, [&] { write_whole(supervisor_path(run_dir_), content); });
        const std::string note = incidents_.waiting() > 0 ? incidents_.sync() : "";
        bool was_behind = std::exchange(behind_, !error.empty());
        if (behind_ == was_behind) return note;
        return behind_ ? error + " (the supervisor continues without it)"
                       : supervisor_path(run_dir_) + ": can be written again";
    }
    bool behind() const { return behind_ || incidents_.waiting() > 0; }

    std::string add(const Incident& incident) { return incidents_.add(incident.json()); }

private:
    static constexpr auto replace = nlohmann::json::error_handler_t::replace;
    const std::string run_dir_;
    LogFile incidents_;  // its lines have a step, as LogFile requires
    bool behind_ = false;
};
