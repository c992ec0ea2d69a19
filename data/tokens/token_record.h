/*
A record of how token shards were made: PREFIX.json, beside PREFIX_train_000000.bin, PREFIX_val_000000.bin
etc.

    {"train_gpt_tokens":1, "tokenizer":"bytes", "fingerprint":"2d06800538d394c2", "vocab_size":257,
     "document_end":256, "documents":12, "bytes":1008, "train_tokens":1000, "val_tokens":20}

Tokenizers with the same fingerprint give the same tokens for any text. The fingerprint covers the version of
Unicode that patterns use, which defines what a letter is. Shards of other programs have no record, and are
accepted as they are; a fingerprint without a version of Unicode is accepted as well.
*/
#pragma once

#include <nlohmann/json.hpp>
#include <xxhash.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/tokens/token_loader.h"
#include "data/tokenizer/tokenizer.h"
#include "data/base/strings.h"

struct TokenRecord {
    std::string tokenizer;    // the name as the user gave it
    std::string fingerprint;  // the tokenizer's
    int vocab_size = 0;
    int document_end = -1;
    uint64_t documents = 0, bytes = 0;  // size of the text
    uint64_t train_tokens = 0, val_tokens = 0;
};

inline std::string tokenizer_fingerprint(const Tokenizer& tokenizer,
                                         const std::string& unicode = pattern_unicode()) {
    std::string content = tokenizer.file().empty() ? "bytes" : tokenizer.encoding_json() + unicode;
    return text("%016llx", (unsigned long long)XXH3_64bits(content.data(), content.size()));
}

inline bool was_made_with(const TokenRecord& record, const Tokenizer& tokenizer) {
    return record.fingerprint == tokenizer_fingerprint(tokenizer) ||
           record.fingerprint == tokenizer_fingerprint(tokenizer, "");
}

inline std::string record_path(const std::string& prefix) {
    return prefix + ".json";
}

// The record's path for a shard PREFIX_train_000000.bin or PREFIX_val_000000.bin; empty for any other name.
inline std::string record_of_shard(const std::string& path) {
    std::string_view name = path;
    if (!name.ends_with(".bin")) return "";
    name.remove_suffix(4);
    size_t digits = name.find_last_not_of("0123456789");
    if (digits == name.npos || digits + 1 == name.size()) return "";
    name = name.substr(0, digits + 1);
    for (std::string_view series : {"_train_", "_val_"}) {
        if (!name.ends_with(series)) continue;
        name.remove_suffix(series.size());
        return record_path(std::string(name));
    }
    return "";
}

// Returns nothing if the file does not exist, or is not such a record.
inline std::optional<TokenRecord> read_token_record(const std::string& path) {
    if (path.empty() || access(path.c_str(), F_OK) != 0) return std::nullopt;
    constexpr uint64_t most = 1 << 20;
    struct stat status;
    FileHandle file = open_regular(path, &status);
    if ((uint64_t)status.st_size > most) return std::nullopt;
    std::string content = read_whole(path, most, "");
    if (!content.starts_with(token_record_beginning)) return std::nullopt;
    nlohmann::json json = parse_json(content, path);
    auto number = [&](const char* field, int64_t low, int64_t high) {
        return json_integer(json.value(field, nlohmann::json()), low, high, path + ": " + field);
    };
    if (int64_t version = number("train_gpt_tokens", 0, INT_MAX); version != 1) {
        fail("%s: has version %lld, but only 1 is supported; use the program that wrote it, or remove it",
             path.c_str(), (long long)version);
    }
    auto words = [&](const char* field) {
        nlohmann::json value = json.value(field, nlohmann::json());
        if (!value.is_string()) fail("%s: %s: is not a string; tokenize the text again", path.c_str(), field);
        return value.get<std::string>();
    };
    return TokenRecord{.tokenizer = words("tokenizer"),
                       .fingerprint = words("fingerprint"),
                       .vocab_size = (int)number("vocab_size", 1, INT_MAX),
                       .document_end = (int)number("document_end", -1, INT_MAX),
                       .documents = (uint64_t)number("documents", 0, INT64_MAX),
                       .bytes = (uint64_t)number("bytes", 0, INT64_MAX),
                       .train_tokens = (uint64_t)number("train_tokens", 0, INT64_MAX),
                       .val_tokens = (uint64_t)number("val_tokens", 0, INT64_MAX)};
}

inline std::string token_record_text(const TokenRecord& record) {
    nlohmann::ordered_json json = {{"train_gpt_tokens", 1},
                                   {"tokenizer", record.tokenizer},
                                   {"fingerprint", record.fingerprint},
                                   {"vocab_size", record.vocab_size},
                                   {"document_end", record.document_end},
                                   {"documents", record.documents},
                                   {"bytes", record.bytes},
                                   {"train_tokens", record.train_tokens},
                                   {"val_tokens", record.val_tokens}};
    return json_line(json);
}

// Refuses a shard whose tokenizer was not `tokenizer` (null: none is used, so nothing is refused). Returns a
// note if its documents do not end with document_end (-1: not used), otherwise an empty string.
inline std::string check_token_record(const std::string& shard, const TokenRecord& record,
                                      const Tokenizer* tokenizer, int document_end) {
    std::string made_with = printable(record.tokenizer);
    if (tokenizer && !was_made_with(record, *tokenizer)) {
        std::string other = tokenizer->file().empty() ? "bytes" : printable(tokenizer->file());
        fail("%s: was made with the tokenizer %s, but this run uses %s, or that tokenizer used a Unicode "
             "version other than %s; give --tokenizer %s, tokenize the text again, or, if the tokenizers are "
             "the same, remove %s",
             shard.c_str(), made_with.c_str(), other.c_str(), pattern_unicode().c_str(), made_with.c_str(),
             record_of_shard(shard).c_str());
    }
    if (document_end < 0 || document_end == record.document_end) return "";
    return text(
        "%s: its documents end with token %d of the tokenizer %s, not with %d, so they cannot be told "
        "apart",
        shard.c_str(), record.document_end, made_with.c_str(), document_end);
}

// Checks the records of all files that a loader reads. For a source without a record, adds a note if
// document_end does not occur at its beginning.
inline std::vector<std::string> check_token_records(const TokenLoader& loader, const Tokenizer* tokenizer,
                                                    int document_end) {
    constexpr int64_t looked_at = 4 << 20;  // tokens searched in a source
    std::vector<std::string> notes;
    std::map<std::string, bool> checked;  // by path of the record; true: it exists
    auto has_record = [&](const std::string& shard) {
        std::string path = record_of_shard(shard);
        auto [entry, is_new] = checked.emplace(path, false);
        if (!is_new) return entry->second;
        std::optional<TokenRecord> record = read_token_record(path);
        if (!record) return false;
        std::string note = check_token_record(shard, *record, tokenizer, document_end);
        if (!note.empty()) notes.push_back(note);
        return entry->second = true;
    };
    for (size_t i = 0; i < loader.sources(); i++) {
        const TokenSource& source = loader.source(i);
        bool recorded = false;
        for (size_t file = 0; file < source.size(); file++)
            recorded = has_record(source[file].path()) || recorded;
        if (recorded || document_end < 0) continue;
        std::vector<int> tokens((size_t)std::min(looked_at, source[0].count()));
        source[0].copy(0, (int64_t)tokens.size(), INT_MAX, tokens.data());
        if (std::find(tokens.begin(), tokens.end(), document_end) != tokens.end()) continue;
        notes.push_back(text("%s: token %d, which ends documents, is not among its first %zu tokens",
                             source[0].path().c_str(), document_end, tokens.size()));
    }
    return notes;
}
