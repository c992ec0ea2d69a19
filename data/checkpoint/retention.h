/*
A run keeps some of its older checkpoints when a new one is on disk: the newest (--keep), those of every N-th
step (--keep-every), and those with the lowest validation losses (--keep-best).
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "data/base/json.h"
#include "data/checkpoint/folder.h"

// The checkpoints with the lowest validation losses, the lowest first. A run has them in its checkpoints.
struct BestCheckpoints {
    std::string set = {}, content = {};  // the losses are those of this set, and of tokens with this hash
    std::vector<std::pair<int64_t, double>> losses = {};  // step and loss

    // Losses of other tokens cannot be compared: those so far are forgotten. Says whether there were any.
    bool begin(const std::string& of_set, const std::string& of_content) {
        bool forgets = !losses.empty() && (set != of_set || content != of_content);
        if (forgets) losses.clear();
        set = of_set, content = of_content;
        return forgets;
    }

    // Takes a loss that was measured after a step, and lets go of all but the lowest `keep`, of equals the
    // earliest. Says whether this one is among them.
    bool add(int64_t step, double loss, int keep) {
        std::erase_if(losses, [&](const auto& other) { return other.first >= step; });  // the run went back
        if (std::isfinite(loss)) losses.emplace_back(step, loss);
        std::ranges::stable_sort(losses, {}, &std::pair<int64_t, double>::second);
        losses.resize(std::min(losses.size(), (size_t)keep));
        return has(step);
    }

    bool has(int64_t step) const {
        return std::ranges::find(losses, step, &std::pair<int64_t, double>::first) != losses.end();
    }

    // "step 120: 3.2100, step 100: 3.3100 of web".
    std::string words() const {
        std::string list;
        for (auto [step, loss] : losses) append_item(list, text("step %lld: %.4f", (long long)step, loss));
        return list + (set.empty() ? "" : " of " + set);
    }
};

constexpr const char* best_key = "best";  // in the header of a checkpoint

inline nlohmann::ordered_json to_json(const BestCheckpoints& best) {
    return {{"set", best.set}, {"content", best.content}, {"losses", best.losses}};
}

// Reads those of a header; empty where it has none. what: for messages.
inline BestCheckpoints best_checkpoints(const nlohmann::json& header, const std::string& what) {
    BestCheckpoints best;
    if (!header.contains(best_key)) return best;
    const nlohmann::json& value = header[best_key];
    try {
        value.at("set").get_to(best.set);
        value.at("content").get_to(best.content);
        value.at("losses").get_to(best.losses);
    } catch (const nlohmann::json::exception&) {
        fail("%s: %s is not as it is written; the file is damaged", what.c_str(), best_key);
    }
    return best;
}

struct Retention {
    int newest = 0;     // 0: all
    int64_t every = 0;  // 0: none

    // Whatever else goes.
    bool stays(int64_t step) const { return every > 0 && step % every == 0; }
};

// Removes all but the newest, the best among them not counted, and those that stay.
inline void remove_old_checkpoints(const std::string& run_dir, const Retention& retention,
                                   const BestCheckpoints& best) {
    if (retention.newest == 0) return;
    int newer = 0;
    for (int64_t step : checkpoint_steps(run_dir)) {
        if (best.has(step) || newer++ < retention.newest || retention.stays(step)) continue;
        remove_checkpoint(run_dir, step);
    }
}
