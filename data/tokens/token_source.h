/*
The files that samples are read from: several formats behind one interface. A name that ends in .idx is the
index of a Megatron data set (data/tokens/megatron_shards.h), any other a token shard
(data/tokens/token_shards.h).

A file is checked once, and reopened when it is first read. So thousands of processes can reuse the checks of
one of them (comm/batches.h), and no process opens a file unless it needs one of its samples.
*/
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/tokens/megatron_shards.h"
#include "data/tokens/token_shards.h"

// ----------------------------------------------------------------------------
// checking

struct CheckedFile {
    std::string path;         // the user's name for it: for a Megatron data set, the index
    std::string tokens_path;  // the file with the tokens
    TokenArray tokens;
};

inline CheckedFile check_token_file(const std::string& path) {
    if (path.ends_with(".idx")) {
        MegatronData data(path);
        return {path, data.path(), data.tokens()};
    }
    try {
        return {path, path, TokenShard(path).tokens()};
    } catch (const Error&) {
        std::string index = index_beside(path);
        if (index.empty()) throw;
        fail("%s: is not a token shard but the token file of a Megatron dataset; name its index %s instead",
             path.c_str(), index.c_str());
    }
}

// The files that a list names, sorted by name.
struct CheckedList {
    std::string list;
    std::vector<CheckedFile> files;
};

// `list`: see files_named().
inline CheckedList check_token_files(const std::string& list) {
    CheckedList checked = {list, {}};
    for (const std::string& name : files_named(list)) {
        checked.files.push_back(check_token_file(name));
        const CheckedFile &first = checked.files.front(), &file = checked.files.back();
        if (file.tokens.width != first.tokens.width) {
            fail("%s: has %d-byte tokens but %s has %d-byte ones, so their tokenizers differ; name files "
                 "of one kind",
                 file.path.c_str(), file.tokens.width, first.path.c_str(), first.tokens.width);
        }
    }
    if (checked.files.empty())
        fail("'%s': names no token files; give paths or patterns such as data/*.bin", list.c_str());
    return checked;
}

// ----------------------------------------------------------------------------
// reading

class TokenFile {
public:
    explicit TokenFile(CheckedFile checked) : checked_(std::move(checked)) {}

    const std::string& path() const { return checked_.path; }  // the name that the user gave
    int64_t count() const { return checked_.tokens.count; }    // tokens
    int width() const { return checked_.tokens.width; }        // bytes of a token

    // Copies tokens start .. start+n-1, which must be in the file; throws Error unless each is below vocab,
    // or if the file has changed since it was checked.
    void copy(int64_t start, int64_t n, int vocab, int* out) const {
        checked_.tokens.copy(data(), start, n, vocab, out, checked_.tokens_path);
    }

private:
    // Several threads may be the first to read. If opening fails, the next read tries again.
    const char* data() const {
        if (const char* data = data_.load(std::memory_order_acquire)) return data;
        std::lock_guard lock(opening_);
        if (!file_) {
            file_ = opened();
            data_.store(file_->data(), std::memory_order_release);
        }
        return file_->data();
    }

    // The file was whole when it was checked, so the problem may be temporary.
    MappedFile opened() const {
        const std::string& path = checked_.tokens_path;
        NotedError error;
        std::optional<MappedFile> file;
        note_error(error, [&] { file.emplace(path); });
        if (!file) throw FailedPart(error.message);
        if (file->size() != checked_.tokens.file_bytes()) {
            fail_part("%s: has %zu bytes, but had %llu when it was checked; start again when nothing is "
                      "writing to it",
                      path.c_str(), file->size(), (unsigned long long)checked_.tokens.file_bytes());
        }
        return std::move(*file);
    }

    const CheckedFile checked_;
    mutable std::mutex opening_;
    mutable std::optional<MappedFile> file_;
    mutable std::atomic<const char*> data_ = nullptr;  // the file's content; null until it is open
};

class TokenSource {
public:
    TokenSource(const CheckedList& checked, int vocab) : list_(checked.list), vocab_(vocab) {
        for (const CheckedFile& file : checked.files) total_ += files_.emplace_back(file).count();
    }
    // `list`: see files_named().
    TokenSource(const std::string& list, int vocab) : TokenSource(check_token_files(list), vocab) {}
    TokenSource(TokenSource&&) = default;  // also disables copying

    const std::string& list() const { return list_; }
    size_t size() const { return files_.size(); }
    const TokenFile& operator[](size_t file) const { return files_[file]; }
    int64_t total_tokens() const { return total_; }
    int width() const { return files_[0].width(); }

    // Copies tokens as TokenFile does, with the vocabulary of this source.
    void copy(size_t file, int64_t start, int64_t n, int* out) const {
        files_[file].copy(start, n, vocab_, out);
    }

private:
    std::string list_;
    std::deque<TokenFile> files_;  // a deque, because TokenFile cannot be moved
    int vocab_;
    int64_t total_ = 0;
};
