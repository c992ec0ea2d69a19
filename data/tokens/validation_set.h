/*
The tokens that validation loss is measured on: the first samples of the files, up to --val-tokens. They
depend on neither the batch nor the layout. The log has their number and a hash of some of them, so that a
resumed run, and a report on several runs, can check whether losses are comparable.
*/
#pragma once

#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/base/strings.h"
#include "data/tokens/token_loader.h"

struct ValidationSet {
    uint64_t samples = 0, tokens = 0;
    std::string name = {};     // empty if it is the only set
    std::string content = {};  // hash_of_samples()
};

// files: with samples of T tokens. wanted: number of tokens; 0: all.
inline ValidationSet validation_set(const TokenLoader& files, int T, long long wanted) {
    uint64_t all = files.samples_per_epoch(), asked = (uint64_t)wanted / (uint64_t)T;
    uint64_t samples = wanted == 0 ? all : std::clamp<uint64_t>(asked, 1, all);
    return {.samples = samples, .tokens = samples * (uint64_t)T};
}

// Returns a hash of up to 64 of the set's samples, evenly spaced. files: in sequential order. Throws Error if
// tokens cannot be read.
inline std::string hash_of_samples(const ValidationSet& set, const TokenLoader& files) {
    constexpr uint64_t most_read = 64;
    uint64_t read = std::min(set.samples, most_read), T = set.tokens / set.samples;
    std::vector<int> tokens((size_t)(2 * T * read));
    for (uint64_t i = 0; i < read; i++) {
        int* inputs = &tokens[(size_t)(2 * T * i)];
        files.load(set.samples / read * i, inputs, inputs + T);
    }
    return text("%016llx", (unsigned long long)XXH3_64bits(tokens.data(), tokens.size() * sizeof(int)));
}

// For the line of the log that records the start of a run; sets with names are listed by name.
inline nlohmann::ordered_json record_of(const std::vector<ValidationSet>& sets) {
    nlohmann::ordered_json by_name;
    for (const ValidationSet& set : sets) {
        nlohmann::ordered_json record = {{"tokens", set.tokens}, {"content", set.content}};
        if (set.name.empty()) return record;
        by_name[set.name] = record;
    }
    return by_name;
}
