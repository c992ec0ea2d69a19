/*
Finds the ranks that keep a run from making progress, from the recorded states of all its ranks
(data/run/rank_state.h).

A rank that is dead, stopped or stuck on a disk is to blame for the ranks that wait for it. If there is none,
the groups decide. A rank inside a call waits for every member of its group that has not begun that call:

    group {0 1 2 3}, reduce-scatter 7        begun   done
        rank 0                                 7      6     waits for 2
        rank 1                                 7      6     waits for 2
        rank 2                                 6      6     has not entered
        rank 3                                 7      6     waits for 2

Rank 2 may itself wait in another group, and is then excused: the waits are followed to a rank that waits for
no other. If its device is in the middle of a pass, or its host issues no work, that rank is the culprit. If
it is in a call that all members have begun but that does not complete, a link or a device is at fault, and
the suspects are the ranks that belong to the most groups in this state.

A device that computes waits for no rank, even with calls pending on its other streams: a pipeline's receives,
for example, are posted long before they are needed. And while any rank makes progress, only a dead one is
accused, because a slow run is not a hung one.
*/
#pragma once

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"    // text
#include "data/base/strings.h"  // joined
#include "data/run/rank_state.h"

enum class Fault { nobody, dead, stopped, disk, absent, link };
NLOHMANN_JSON_SERIALIZE_ENUM(Fault, {{Fault::nobody, "nobody"},
                                     {Fault::dead, "dead"},
                                     {Fault::stopped, "stopped"},
                                     {Fault::disk, "disk"},
                                     {Fault::absent, "absent"},
                                     {Fault::link, "link"}})

struct HangDiagnosis {
    Fault kind = Fault::nobody;
    std::vector<int> ranks;  // the accused
    std::string sentence;    // for people; if no rank is accused, says why
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HangDiagnosis, kind, ranks, sentence)

// ----------------------------------------------------------------------------
// groups

// Returns the members of a group, in order: the ranks it names, or those that differ from `rank` only along
// its axes.
inline std::vector<int> members_of(const RankState& rank, const GroupState& group) {
    if (group.axes == 0 || (int)group.ranks.size() == group.size) return group.ranks;
    return group_of(rank.rank, AxisSet(group.axes), rank.sizes);
}

// Drops the direction: the two ends of a link name it differently, as "forward in" and "forward out".
inline std::string common_name(const std::string& name) {
    return name.substr(0, name.find(' '));
}

inline std::string words_for(const RankState& rank, const GroupState& group) {
    if (group.name == "shard" || group.name == "gathers")
        return rank.sizes[Axis::replica] * rank.sizes[Axis::context] == 1 ? "data group" : "shard group";
    if (group.name == "replica") return rank.sizes[Axis::shard] == 1 ? "data group" : "replica group";
    if (group.name.find(' ') != group.name.npos) return common_name(group.name) + " link";
    return group.name + " group";
}

inline std::string text_of_ranks(const std::vector<int>& ranks) {
    constexpr size_t most = 16;
    std::string result;
    for (size_t i = 0; i < std::min(ranks.size(), most); i++) append_item(result, std::to_string(ranks[i]));
    if (ranks.size() > most) result += text(", ... %zu ranks", ranks.size());
    return "{" + result + "}";
}

// ----------------------------------------------------------------------------
// words

// "rank 37 (node5, GPU 3)"
inline std::string name_of(const RankState& rank) {
    std::string device = rank.device < 0 ? "" : text(", GPU %d", rank.device);
    return text("rank %d (%s%s)", rank.rank, rank.host.c_str(), device.c_str());
}

// "reduce-scatter of gradients of unit 12"
inline std::string call_text(const RankWork& call) {
    std::string result = call.operation.empty() ? "next call" : call.operation;
    if (!call.traffic.empty()) result += " of " + call.traffic;
    if (call.unit >= 0) result += text(" of unit %d", call.unit);
    return result;
}

inline std::string whereabouts(const RankState& rank) {
    if (!rank.pass.operation.empty() && rank.begun) {
        std::string of_batch =
            rank.pass.micro_batch < 0 ? "" : text(" of micro-batch %d", rank.pass.micro_batch);
        return "it is in the " + rank.pass.operation + (of_batch.empty() ? "" : " pass" + of_batch);
    }
    std::string blocked = rank.state == "D" ? ", blocked on a disk" : "";
    std::string work = rank.work.empty() ? "" : ", " + rank.work;
    return "its device is idle, and its host is in the phase `" + rank.phase + "`" + work + blocked;
}

// ----------------------------------------------------------------------------
// the diagnosis

class HangDiagnoser {
public:
    HangDiagnoser(const std::vector<RankState>& states, double limit, bool all_known, bool stands_still)
        : limit_(limit), all_known_(all_known), stands_still_(stands_still) {
        for (const RankState& state : states) states_.emplace(state.rank, &state);
        if (!states.empty())
            for (int rank = 0; rank < states[0].ranks; rank++)
                if (!states_.contains(rank)) missing_.push_back(rank);
    }

    HangDiagnosis diagnosis() {
        if (states_.empty()) return nobody("no rank has a flight record here");
        if (HangDiagnosis dead =
                among([](const RankState& rank) { return !rank.alive; }, Fault::dead,
                      [](const RankState& rank) {
                          return text("is dead (process %d); its last sign of life is from step %d",
                                      rank.process, rank.step);
                      });
            !dead.ranks.empty())
            return dead.ranks.size() < states_.size() ? dead : nobody("no rank is alive");
        HangDiagnosis moving = somebody_gets_on();
        if (!stands_still_ && !moving.sentence.empty()) return moving;
        HangDiagnosis found = among(
            [](const RankState& rank) { return rank.state == "T" || rank.state == "t"; }, Fault::stopped,
            [](const RankState& rank) {
                return text("is stopped (process %d), in the phase `%s` of step %d", rank.process,
                            rank.phase.c_str(), rank.step);
            });
        if (!found.ranks.empty()) return found;
        found =
            among([&](const RankState& rank) { return !rank.work.empty() && rank.work_seconds >= limit_; },
                  Fault::disk,
                  [](const RankState& rank) {
                      return text("is blocked on a disk: it has been %s for %.4g s", rank.work.c_str(),
                                  rank.work_seconds);
                  });
        if (!found.ranks.empty()) return found;
        if (!moving.sentence.empty()) return moving;
        if (all_known_ && !missing_.empty())
            return {Fault::dead, missing_, "there is no sign of life from ranks " + text_of_ranks(missing_)};
        bool detailed = std::ranges::all_of(states_, [](auto& each) { return each.second->detailed; });
        return detailed ? diagnosis_of_groups() : diagnosis_of_passes();
    }

private:
    // A rank that waits inside a call of a group.
    struct Wait {
        const RankState* who;
        const GroupState* group;
        std::vector<int> members;
    };

    // Returns a diagnosis without a sentence if no rank makes progress.
    HangDiagnosis somebody_gets_on() const {
        for (auto& [rank, state] : states_) {
            if (state->quiet_seconds < limit_) return nobody(name_of(*state) + " is making progress");
            if (!state->work.empty() && state->work_seconds < limit_ && state->state != "T")
                return nobody(name_of(*state) + " is still " + state->work);
        }
        return {};
    }

    static HangDiagnosis nobody(std::string why) { return {Fault::nobody, {}, std::move(why)}; }

    // Accuses every rank for which is(rank) holds; says(rank) words the accusation.
    template <typename Is, typename Says>
    HangDiagnosis among(Is&& is, Fault kind, Says&& says) {
        HangDiagnosis diagnosis = {kind, {}, ""};
        for (auto& [rank, state] : states_) {
            if (!is(*state)) continue;
            if (diagnosis.ranks.size() < 4)
                append_item(diagnosis.sentence, name_of(*state) + " " + says(*state), "; ");
            diagnosis.ranks.push_back(rank);
        }
        if (diagnosis.ranks.size() > 4)
            diagnosis.sentence += text("; and %zu more", diagnosis.ranks.size() - 4);
        return diagnosis;
    }

    // Returns whether the rank's device is computing.
    static bool is_busy(const RankState& rank) {
        return !rank.pass.operation.empty() && rank.begun && rank.wait.operation.empty();
    }

    const GroupState* same_group(const RankState& rank, const std::string& name,
                                 const std::vector<int>& members) const {
        for (const GroupState& group : rank.groups)
            if (common_name(group.name) == name && members_of(rank, group) == members) return &group;
        return nullptr;
    }

    HangDiagnosis diagnosis_of_groups() {
        std::map<int, std::vector<Wait>> waits_for;  // rank that has not entered a call -> waits for it
        std::map<int, std::vector<Wait>> all_came;   // rank -> its calls that all members have begun
        std::set<int> excused;                       // ranks that wait for others
        bool unknown = false;                        // a rank waits for one whose state is not known
        for (auto& [rank, state] : states_) {
            for (const GroupState& group : state->groups) {
                if (is_busy(*state) || group.begun <= group.done) continue;
                const uint64_t call = group.done + 1;
                const Wait wait = {state, &group, members_of(*state, group)};
                bool all = true;
                for (int member : wait.members) {
                    auto other = states_.find(member);
                    if (other == states_.end()) {
                        unknown = true, all = false;
                        continue;
                    }
                    const GroupState* theirs =
                        same_group(*other->second, common_name(group.name), wait.members);
                    if (!theirs || theirs->begun >= call) continue;
                    waits_for[member].push_back(wait);
                    excused.insert(rank);
                    all = false;
                }
                if (all) all_came[rank].push_back(wait);
            }
        }
        HangDiagnosis absent = {Fault::absent, {}, ""};
        for (auto& [rank, waits] : waits_for) {
            const RankState& state = *states_.at(rank);
            if (excused.contains(rank) || all_came.contains(rank)) continue;
            if (!is_busy(state) && state.wait_seconds >= limit_ && unknown) continue;
            if (absent.ranks.size() < 4) append_item(absent.sentence, has_not_come(state, waits), "; ");
            absent.ranks.push_back(rank);
        }
        if (!absent.ranks.empty()) return absent;
        if (!all_came.empty()) return link_diagnosis(all_came);
        if (unknown) return nobody("the ranks on this machine wait for ranks on another");
        HangDiagnosis busy = among([](const RankState& rank) { return is_busy(rank); }, Fault::absent,
                                   [](const RankState& rank) { return "is stuck; " + whereabouts(rank); });
        if (!busy.ranks.empty() && busy.ranks.size() < states_.size()) return busy;
        return nobody(excused.empty() ? "no rank is in a call or computing" : "ranks wait for each other");
    }

    static std::string has_not_come(const RankState& rank, std::vector<Wait>& waits) {
        // A collective is easier to understand than a message, so it is preferred.
        auto is_message = [](const Wait& wait) { return wait.group->next.operation == "receive"; };
        const Wait& first = *std::ranges::min_element(waits, {}, is_message);
        std::string where = words_for(*first.who, *first.group) + " " + text_of_ranks(first.members);
        std::string what =
            is_message(first)
                ? text("has not sent what rank %d receives on the %s", first.who->rank, where.c_str())
                : "has not entered the " + call_text(first.group->next) + " in " + where;
        return name_of(rank) + " " + what + "; " + whereabouts(rank);
    }

    // Each of these groups is stuck in a call that all its members have begun. Usually one rank is in all
    // such groups, so the ranks that are in the most of them are accused.
    HangDiagnosis link_diagnosis(const std::map<int, std::vector<Wait>>& all_came) {
        std::map<int, std::set<std::vector<int>>> groups_of;  // the groups that a member is in
        std::set<std::vector<int>> groups;
        const Wait* first = nullptr;
        for (auto& [rank, waits] : all_came) {
            for (const Wait& wait : waits) {
                if (!first) first = &wait;
                groups.insert(wait.members);
                for (int member : wait.members) groups_of[member].insert(wait.members);
            }
        }
        size_t most = 0;
        for (auto& [rank, of] : groups_of) most = std::max(most, of.size());
        HangDiagnosis diagnosis = {Fault::link, {}, ""};
        for (auto& [rank, of] : groups_of)
            if (of.size() == most) diagnosis.ranks.push_back(rank);
        for (auto& [rank, waits] : all_came)
            for (const Wait& wait : waits)
                if (std::ranges::includes(sorted(wait.members), diagnosis.ranks)) first = &wait;
        diagnosis.sentence =
            text("all ranks have entered the %s in %s %s, but it does not complete: look at the "
                 "links and devices of ",
                 call_text(first->group->next).c_str(), words_for(*first->who, *first->group).c_str(),
                 text_of_ranks(first->members).c_str());
        std::vector<std::string> names;
        for (int rank : diagnosis.ranks) {
            auto state = states_.find(rank);
            names.push_back(state == states_.end() ? text("rank %d", rank) : name_of(*state->second));
        }
        diagnosis.sentence += joined(names, ", ", 4);
        return diagnosis;
    }
    static std::vector<int> sorted(std::vector<int> ranks) {
        std::ranges::sort(ranks);
        return ranks;
    }

    // A step without details does not record which calls have begun. In such a step, a rank in the middle of
    // a pass lags behind if other ranks are waiting to begin a pass or have completed all of theirs.
    HangDiagnosis diagnosis_of_passes() {
        HangDiagnosis behind = among(
            [](const RankState& rank) {
                return !rank.pass.operation.empty() && rank.begun && rank.pass.operation != "optimizer";
            },
            Fault::absent, [](const RankState& rank) { return "is stuck; " + whereabouts(rank); });
        if (!behind.ranks.empty() && behind.ranks.size() < states_.size()) return behind;
        return nobody("the step was recorded without details, and all ranks are at the same point");
    }

    const double limit_;
    const bool all_known_, stands_still_;
    std::map<int, const RankState*> states_;
    std::vector<int> missing_;
};

// Finds the ranks that hold up the others, if nothing has happened for `limit` seconds.
// all_known: a rank without a state here has none anywhere, because its machine is gone or it has not
// started; otherwise it may be on a machine whose records are not visible.
// stands_still: some rank has waited in vain for so long that a stopped or blocked rank is to blame, even if
// others began to wait later and so seem to make progress.
inline HangDiagnosis diagnose_hang(const std::vector<RankState>& states, double limit, bool all_known = true,
                                   bool stands_still = false) {
    return HangDiagnoser(states, limit, all_known, stands_still).diagnosis();
}
