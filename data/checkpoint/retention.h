/*
Removes older checkpoints once a new one is on disk, except the newest ones (--keep), those of every N-th step
(--keep-every), and those with the lowest validation losses (--keep-best).
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

// The checkpoints with the lowest validation losses, lowest first. A run stores this list in its checkpoints.
struct BestCheckpoints {
    std::string set = {}, content = {};  // the validation set of the losses, and the hash of its tokens
    std::vector<std::pair<int64_t, double>> losses = {};  // step and loss

    // Sets the validation set. Losses on other tokens are not comparable, so they are dropped. Returns
    // whether any were dropped.
    bool begin(const std::string& of_set, const std::string& of_content) {
        bool forgets = !losses.empty() && (set != of_set || content != of_content);
        if (forgets) losses.clear();
        set = of_set, content = of_content;
        return forgets;
    }

    // Adds the loss after a step, and keeps only the lowest `keep` losses, preferring the earliest of equal
    // ones. Returns whether this one is among them.
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

    // Returns a list such as "step 120: 3.2100, step 100: 3.3100 of web".
    std::string words() const {
        std::string list;
        for (auto [step, loss] : losses) append_item(list, text("step %lld: %.4f", (long long)step, loss));
        return list + (set.empty() ? "" : " of " + set);
    }
};

constexpr const char* best_key = "best";  // its key in the header of a checkpoint

inline nlohmann::ordered_json to_json(const BestCheckpoints& best) {
    return {{"set", best.set}, {"content", best.content}, {"losses", best.losses}};
}

// Returns the list in a header, or an empty one. what: names the source in messages.
inline BestCheckpoints best_checkpoints(const nlohmann::json& header, const std::string& what) {
    BestCheckpoints best;
    if (!header.contains(best_key)) return best;
    const nlohmann::json& value = header[best_key];
    try {
        value.at("set").get_to(best.set);
        value.at("content").get_to(best.content);
        value.at("losses").get_to(best.losses);
    } catch (const nlohmann::json::exception&) {
        fail("%s: %s is malformed; the file is damaged", what.c_str(), best_key);
    }
    return best;
}

struct Retention {
    int newest = 0;     // 0: all
    int64_t every = 0;  // 0: none

    // Returns whether a step is kept regardless of the other rules.
    bool stays(int64_t step) const { return every > 0 && step % every == 0; }
};

// Removes all checkpoints except the best, the newest of the others, and those that --keep-every keeps.
inline void remove_old_checkpoints(const std::string& run_dir, const Retention& retention,
                                   const BestCheckpoints& best) {
    if (retention.newest == 0) return;
    int newer = 0;
    for (int64_t step : checkpoint_steps(run_dir)) {
        if (best.has(step) || newer++ < retention.newest || retention.stays(step)) continue;
        remove_checkpoint(run_dir, step);
    }
}
