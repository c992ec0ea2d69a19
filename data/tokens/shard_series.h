/*
Token shards with numbered names: PREFIX_000000.bin, PREFIX_000001.bin and so on. Each has shard_tokens
tokens, except that the last may have fewer. They get these names only once all of them are complete.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

#include "data/base/error.h"
#include "data/tokens/token_shards.h"

class ShardSeries {
public:
    ShardSeries(std::string prefix, int vocab, int64_t shard_tokens)
        : prefix_(std::move(prefix)), vocab_(vocab), shard_tokens_(shard_tokens) {}

    void write(const int* tokens, size_t n) {
        while (n > 0) {
            if (shards_.empty() || shards_.back().count() == shard_tokens_) begin_shard();
            size_t fits = std::min(n, (size_t)(shard_tokens_ - shards_.back().count()));
            shards_.back().write(tokens, fits);
            tokens += fits, n -= fits, total_ += fits;
        }
    }

    void finish() {
        for (ShardWriter& shard : shards_) shard.finish();
    }

    // Renames all shards to their final names, and removes surplus shards of an older, longer series.
    void commit(const std::vector<std::string>& older) {
        std::set<std::string> names;
        for (ShardWriter& shard : shards_) {
            shard.close();
            names.insert(shard.path());
        }
        for (const std::string& path : older) {
            if (path.starts_with(prefix_ + "_") && !names.count(path)) unlink(path.c_str());
        }
    }

    std::string summary() const {
        std::string files = shards_.size() == 1
                                ? shards_[0].path()
                                : text("the %zu files %s_*.bin", shards_.size(), prefix_.c_str());
        return text("%llu in %s", (unsigned long long)total_, files.c_str());
    }

    uint64_t total() const { return total_; }

private:
    // The first shard stays open, and so locked, until the end: a second run cannot write the same series.
    void begin_shard() {
        if (shards_.size() > 1) shards_.back().finish();
        shards_.emplace_back(text("%s_%06zu.bin", prefix_.c_str(), shards_.size()), vocab_);
    }

    std::string prefix_;
    int vocab_;
    int64_t shard_tokens_;
    std::deque<ShardWriter> shards_;
    uint64_t total_ = 0;
};

// Files left by an earlier run with this output: OUTPUT_{train,val}_DIGITS.bin, or .bin.partial if it was
// interrupted.
inline std::vector<std::string> existing_outputs(const std::string& output) {
    size_t slash = output.rfind('/');
    std::string folder = slash == std::string::npos ? "" : output.substr(0, slash + 1);
    std::vector<std::string> found;
    try {
        for (const auto& entry : std::filesystem::directory_iterator(folder.empty() ? "." : folder)) {
            std::string path = folder + entry.path().filename().string();
            for (std::string prefix : {output + "_train_", output + "_val_"}) {
                if (!path.starts_with(prefix)) continue;
                size_t end = std::min(path.find_first_not_of("0123456789", prefix.size()), path.size());
                std::string ending = path.substr(end);
                if (end > prefix.size() && (ending == ".bin" || ending == ".bin.partial"))
                    found.push_back(path);
            }
        }
    } catch (const std::filesystem::filesystem_error& error) {
        fail("%s: cannot list the output folder: %s; create it first, or name another --output",
             folder.c_str(), error.code().message().c_str());
    }
    std::sort(found.begin(), found.end());
    return found;
}
