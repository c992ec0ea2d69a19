/*
Where a run begins, as one rank sees it for all. Ranks that look for a checkpoint each by themselves may see
different ones, for a file system shows the files of other machines late; and thousands of them that look at
every file at once are a load on it.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/world.h"
#include "data/error.h"
#include "data/find_checkpoint.h"  // find_checkpoint, StoredRun

// What came of looking, from rank to rank.
inline nlohmann::json found_to_json(const std::optional<StoredRun>& found) {
    if (!found) return nullptr;
    return {{"checkpoint", found->checkpoint}, {"run_dir", found->run_dir},
            {"tokenizer", found->tokenizer},   {"step", found->step},
            {"options", found->options},       {"notes", found->notes}};
}

inline std::optional<StoredRun> stored_run_from_json(const nlohmann::json& json) {
    if (json.is_null()) return std::nullopt;
    return StoredRun{.checkpoint = json.at("checkpoint"),
                     .run_dir = json.at("run_dir"),
                     .tokenizer = json.at("tokenizer"),
                     .step = json.at("step"),
                     .options = json.at("options"),
                     .notes = json.at("notes")};
}

// For all ranks: the first one looks at these places, the same on all. What it returns knows what came of
// that, and speaks to nobody.
inline FindCheckpoint find_on_root(const World& world, const std::vector<std::string>& places,
                                   const FindCheckpoint& find = find_checkpoint) {
    std::string message;
    if (world.is_root()) {
        nlohmann::json answers = nlohmann::json::array();
        for (const std::string& place : places) {
            try {
                answers.push_back(found_to_json(find(place)));
            } catch (const std::exception& error) {
                answers.push_back({{"error", message_of(error)}});
            }
        }
        // Paths may be no UTF-8, which JSON's text would not take.
        nlohmann::json::to_cbor(answers, message);
    }
    nlohmann::json answers = nlohmann::json::from_cbor(world.gather(message)[0]);
    std::map<std::string, nlohmann::json> by_place;
    for (size_t i = 0; i < answers.size(); i++) by_place.emplace(places[i], answers[i]);
    return [by_place](const std::string& place) {
        const nlohmann::json& answer = by_place.at(place);
        if (answer.contains("error")) fail("%s", answer["error"].get<std::string>().c_str());
        return stored_run_from_json(answer);
    };
}
