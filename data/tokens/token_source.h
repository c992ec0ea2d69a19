/*
Where tokens come from: files of several formats behind one interface. A name that ends in .idx is the index
of a Megatron data set (data/tokens/megatron_shards.h), any other a token shard (data/tokens/token_shards.h).
*/
#pragma once

#include <cstdint>
#include <string>
#include <unistd.h>
#include <utility>
#include <variant>
#include <vector>

#include "data/base/error.h"
#include "data/tokens/megatron_shards.h"
#include "data/tokens/token_shards.h"

class TokenFile {
public:
    explicit TokenFile(std::string path) : path_(std::move(path)), file_(open(path_)) {
        std::visit([&](const auto& file) { count_ = file.count(), width_ = file.width(); }, file_);
    }

    const std::string& path() const { return path_; }  // as it was named: the index of a Megatron data set
    int64_t count() const { return count_; }           // tokens
    int width() const { return width_; }               // bytes of a token

    // Tokens start .. start+n-1, which must lie in the file; throws Error unless each is below vocab.
    void copy(int64_t start, int64_t n, int vocab, int* out) const {
        std::visit([&](const auto& file) { file.copy(start, n, vocab, out); }, file_);
    }

private:
    using AnyFile = std::variant<TokenShard, MegatronData>;

    static AnyFile open(const std::string& path) {
        if (path.ends_with(".idx")) return MegatronData(path);
        try {
            return TokenShard(path);
        } catch (const Error&) {
            std::string index = index_beside(path);
            if (index.empty()) throw;
            fail("%s: is no token shard, but the tokens of a Megatron data set; name its index %s instead",
                 path.c_str(), index.c_str());
        }
    }

    std::string path_;
    AnyFile file_;
    int64_t count_ = 0;
    int width_ = 0;
};

// The files that a list names, in the order of their names.
class TokenSource {
public:
    // `list` as in files_named().
    TokenSource(std::string list, int vocab) : list_(std::move(list)), vocab_(vocab) {
        for (const std::string& name : files_named(list_)) {
            const TokenFile& file = files_.emplace_back(name);
            total_ += file.count();
            if (file.width() != width()) {
                fail("%s: has %d-byte tokens and %s has %d-byte ones, so their tokenizers differ; name files "
                     "of one kind",
                     file.path().c_str(), file.width(), files_[0].path().c_str(), width());
            }
        }
        if (files_.empty())
            fail("'%s': names no token files; give paths or patterns such as data/*.bin", list_.c_str());
    }

    const std::string& list() const { return list_; }
    size_t size() const { return files_.size(); }
    const TokenFile& operator[](size_t file) const { return files_[file]; }
    int64_t total_tokens() const { return total_; }
    int width() const { return files_[0].width(); }

    // As TokenFile's, with the vocabulary given.
    void copy(size_t file, int64_t start, int64_t n, int* out) const {
        files_[file].copy(start, n, vocab_, out);
    }

private:
    std::string list_;
    std::vector<TokenFile> files_;
    int vocab_;
    int64_t total_ = 0;
};
