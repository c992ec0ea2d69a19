/*
What a watchdog says of a run that stands still, before it ends the job: who is to blame, as the flight
records of the ranks on this machine tell it (data/run/culprit.h). What the records say is kept as files of
the run,

    RUN/stall-20261125-054200/rank-3.json

The disk of the run may be what does not answer, so nobody waits for those files for long.
*/
#pragma once

#include <chrono>
#include <ctime>
#include <exception>
#include <future>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"  // json_line
#include "data/run/culprit.h"
#include "data/run/rank_state.h"

// Writes the states as files of this folder. Returns whether they are there within some seconds.
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

// Lines for the screen about the run in this folder, in which a wait has taken longer than `limit` seconds;
// empty: there are no records.
inline std::string stall_text(const std::string& run_dir, double limit) {
    if (run_dir.empty()) return "";
    // Whoever noticed it first has waited for so long, and others a little less.
    const std::vector<RankState> states = read_rank_states(run_dir);
    if (states.empty()) return "";
    const Verdict verdict = find_culprit(states, limit / 2, false, true);
    const int elsewhere = states[0].ranks - (int)states.size();
    std::string lines =
        text("culprit      %s\n", verdict.kind == Fault::nobody ? ("not known: " + verdict.sentence).c_str()
                                                                : verdict.sentence.c_str());
    if (elsewhere > 0)
        lines += text("             (%d of %d ranks are on other machines)\n", elsewhere, states[0].ranks);
    char when[32] = "";
    time_t now = time(nullptr);
    tm local;
    strftime(when, sizeof when, "%Y%m%d-%H%M%S", localtime_r(&now, &local));
    std::string folder = run_dir + "/stall-" + when;
    if (write_states(folder, states)) lines += text("             their records are in %s\n", folder.c_str());
    return lines;
}
