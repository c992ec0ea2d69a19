/*
Which algorithm each matrix product of a run takes.

Products are timed before the first step, so that each takes the fastest algorithm. The algorithm decides
the order of sums, so all ranks take the same, and a run that goes on takes what it began with: the choice
is kept in a file, and only kinds of products that it does not have are timed.

The first rank that makes a kind of product chooses for all; of the data ranks, who all make the same ones,
the first alone does. Ranks with another card or library than rank 0's keep what their library proposes.
*/
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "comm/build_checks.h"        // algorithm_file
#include "comm/world.h"               // World
#include "data/base/error.h"          // fail
#include "data/options/options.h"     // Options
#include "data/run/algorithm_file.h"  // AlgorithmChoices
#include "kernels/matmul.cuh"
#ifndef DEVICE_CPU
#include "kernels/product_tuning.cuh"
#endif

#ifdef DEVICE_CPU

// oneDNN offers no choice.
template <typename... Any>
std::vector<std::string> tune_products(const Any&...) {
    return {};
}

#else

// Choices as they go from rank to rank.
inline nlohmann::json choices_to_json(const AlgorithmChoices& choices) {
    nlohmann::json json = nlohmann::json::object();
    for (auto& [kind, bytes] : choices) json[kind] = hex_of(bytes);
    return json;
}

inline AlgorithmChoices choices_from_json(const nlohmann::json& json) {
    AlgorithmChoices choices;
    for (auto& [kind, digits] : json.items()) choices[kind] = bytes_of_hex(digits);
    return choices;
}

// The choices of all ranks, brought together.
struct GatheredChoices {
    AlgorithmChoices choices;
    int others = 0;   // ranks of another setup
    int changed = 0;  // kinds that take another algorithm than before
    double seconds = 0, seconds_once = 0;

    // For all ranks.
    GatheredChoices(const World& world, const std::vector<TunedProduct>& mine, const std::string& setup,
                    const std::string& setup_of_root) {
        nlohmann::json message = {{"setup", setup}, {"tuned", nlohmann::json::array()}};
        for (const TunedProduct& product : mine) {
            message["tuned"].push_back({product.kind, hex_of(product.algorithm), product.changed,
                                        product.seconds, product.seconds_once});
        }
        for (const std::string& text : world.all_gather(message.dump())) {
            nlohmann::json theirs = nlohmann::json::parse(text);
            if (theirs["setup"] != setup_of_root) {
                others++;
                continue;
            }
            for (const nlohmann::json& product : theirs["tuned"]) {
                if (!choices.emplace(product[0], bytes_of_hex(product[1])).second) continue;
                changed += product[2].get<bool>();
                seconds += product[3].get<double>();
                seconds_once += product[4].get<double>();
            }
        }
    }
};

// For all ranks: chooses algorithms for the products that step() makes, which leaves nothing of use behind.
// They are looked for in `file`, or where nothing is there in `origin`, and kept in `file`. times: this rank
// does, what is not known. Returns what there is to tell, one line each.
template <typename Step>
std::vector<std::string> choose_products(const World& world, const std::string& file,
                                         const std::string& origin, bool times, cudaStream_t stream,
                                         Step&& step) {
    using Clock = std::chrono::steady_clock;
    auto start = Clock::now();
    AlgorithmTable table;
    world.on_all_ranks([&] {
        if (!world.is_root()) return;
        table = read_algorithms(file);
        if (table.empty() && !origin.empty()) table = read_algorithms(origin);
    });
    const std::string setup = cublas_setup();
    nlohmann::json known = {{"setup", setup}, {"algorithms", choices_to_json(table[setup])}};
    known = nlohmann::json::parse(world.broadcast_text(known.dump()));
    bool has_setup = known["setup"] == setup;
    AlgorithmChoices choices;
    if (has_setup) choices = choices_from_json(known["algorithms"]);
    choose_algorithms(choices);
    NotedProducts noted = note_products(step);
    std::vector<TunedProduct> mine;
    if (has_setup && times) mine = time_products(noted, stream);
    GatheredChoices all(world, mine, setup, known["setup"]);

    if (has_setup) {
        for (auto& [kind, bytes] : all.choices) choices[kind] = bytes;
        choose_algorithms(choices);
    }
    world.on_all_ranks([&] { take_workspaces(stream); });
    table[setup] = choices;
    world.on_all_ranks([&] {
        if (world.is_root() && !table[setup].empty()) write_algorithms(file, table);
    });
    std::vector<std::string> notes;
    if (!all.choices.empty()) {
        notes.push_back(text("%zu kinds timed in %.1f s: %d are faster than what would be taken untimed, "
                             "%.1f%% less time for one of each",
                             all.choices.size(), std::chrono::duration<double>(Clock::now() - start).count(),
                             all.changed, 100 * (1 - all.seconds / all.seconds_once)));
    }
    if (all.others > 0)
        notes.push_back(
            text("%d ranks have another card or library than the first; theirs are not timed", all.others));
    return notes;
}

// For all ranks: the same as the options say, for a run that goes on from one in `origin` (empty: from none).
template <typename Step>
std::vector<std::string> tune_products(const World& world, const Options& o, const std::string& origin,
                                       bool times, cudaStream_t stream, Step&& step) {
    MatmulTuning tuning = kind_of<MatmulTuning>(o.matmul_tuning);
    if (!has_products_in_bf16 || tuning == MatmulTuning::off) return {};
    std::string other = tuning == MatmulTuning::on && !origin.empty() ? algorithm_path(origin) : "";
    return choose_products(world, algorithm_file(o), other, times, stream, std::forward<Step>(step));
}

#endif
