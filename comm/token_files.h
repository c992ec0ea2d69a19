/*
The token files of a run, which one process checks for all: 10,000 shards that each of 10,000 ranks opened
would be 100 million requests to a file system. The first rank opens every file, walks the indexes, and tells
the others how many tokens there are and where. They open a file when they first read from it, so a rank whose
batches another one reads (comm/node_reader.h) opens none.
*/
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreement.h"            // check_same_tokens
#include "comm/world.h"                // World
#include "data/tokens/token_loader.h"  // TokenLoader, check_sources

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TokenArray, first_byte, count, width, is_signed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckedFile, path, tokens_path, tokens)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckedList, list, files)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckedSource, tokens, weight)

// For all ranks: a TokenLoader with these arguments. What it refuses, and a token of the first sample that is
// not in the vocabulary, all ranks throw.
inline std::unique_ptr<TokenLoader> open_token_files(const World& world, const std::string& list, int vocab,
                                                     int T, SampleOrder order, uint64_t seed = 0) {
    std::unique_ptr<TokenLoader> loader;
    std::vector<CheckedSource> sources;
    auto open = [&] { loader = std::make_unique<TokenLoader>(sources, vocab, T, order, seed); };
    std::string message = text_from_root(world, [&] {
        sources = check_sources(list);
        open();
        loader->check_first_sample();
        // Paths may be no UTF-8, which JSON's text would not take.
        std::string message;
        nlohmann::json::to_cbor(nlohmann::json(sources), message);
        return message;
    });
    if (!loader) {
        sources = nlohmann::json::from_cbor(message);
        open();
    }
    if (world.on_several_hosts()) {
        std::vector<CheckedFile> files;
        for (const CheckedSource& source : sources)
            files.insert(files.end(), source.tokens.files.begin(), source.tokens.files.end());
        check_same_tokens(world, files, world.local_rank() == 0);
    }
    return loader;
}
