/*
Notes on a run's data before the run starts: which tokenizer made it, and whether the model is validated on
its training data, either on the same files under any name or on copies of them.
*/
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <sys/stat.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/tokens/token_loader.h"
#include "data/tokens/token_record.h"
#include "data/tokens/token_source.h"

// The tokens at the beginning of a file, which identify copies of it.
inline std::vector<int> beginning_of(const TokenFile& file) {
    constexpr int64_t most = 1024;
    std::vector<int> tokens((size_t)std::min(most, file.count()));
    file.copy(0, (int64_t)tokens.size(), INT_MAX, tokens.data());
    return tokens;
}

// Returns a warning for each validation file that is in the training data too. Files with equal beginnings
// may be copies, at least in part.
inline std::vector<std::string> overlap_warnings(const TokenLoader& train, const TokenLoader& val) {
    constexpr size_t least = 64;  // tokens: fewer may be equal by chance
    std::map<std::pair<dev_t, ino_t>, std::string> by_inode;
    std::map<std::vector<int>, std::string> by_beginning;
    auto each_file = [](const TokenLoader& loader, auto&& visit) {
        for (size_t i = 0; i < loader.sources(); i++) {
            for (size_t file = 0; file < loader.source(i).size(); file++) visit(loader.source(i)[file]);
        }
    };
    auto inode = [](const TokenFile& file) {
        struct stat status = {};
        stat(file.path().c_str(), &status);  // zeros if the file has disappeared
        return std::pair(status.st_dev, status.st_ino);
    };
    each_file(train, [&](const TokenFile& file) {
        by_inode.emplace(inode(file), file.path());
        if (std::vector<int> tokens = beginning_of(file); tokens.size() >= least)
            by_beginning.emplace(std::move(tokens), file.path());
    });
    std::vector<std::string> warnings;
    each_file(val, [&](const TokenFile& file) {
        if (auto same = by_inode.find(inode(file)); same != by_inode.end()) {
            warnings.push_back(
                text("warning: %s is also in --train-data, so the validation loss is measured on "
                     "training text",
                     file.path().c_str()));
        } else if (auto copy = by_beginning.find(beginning_of(file)); copy != by_beginning.end()) {
            warnings.push_back(
                text("warning: %s begins like %s of --train-data, so the validation loss may be "
                     "measured on training text",
                     file.path().c_str(), copy->second.c_str()));
        }
    });
    return warnings;
}

// Returns notes on the data of a run before it starts. Refuses data made with another tokenizer. tokenizer:
// null if the run has none.
inline std::vector<std::string> data_notes(const TokenLoader& train,
                                           const std::vector<std::unique_ptr<TokenLoader>>& validation,
                                           const Tokenizer* tokenizer, int document_end) {
    std::vector<std::string> notes = check_token_records(train, tokenizer, document_end);
    auto add = [&](const std::vector<std::string>& more) {
        notes.insert(notes.end(), more.begin(), more.end());
    };
    for (const auto& files : validation) {
        add(check_token_records(*files, tokenizer, document_end));
        add(overlap_warnings(train, *files));
    }
    return notes;
}
