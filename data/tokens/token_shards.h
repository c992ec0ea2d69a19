/*
Tokens on disk: the .bin shards of llm.c. A header of 256 little-endian int32 is followed by the tokens:

    [0] magic      [1] version    [2] token count    tokens
    20240520       1              1 .. 2^31-1        uint16   vocabularies up to 65,536 tokens
    20240801       7              1 .. 2^31-1        uint32   larger ones (Llama 3)

The rest of the header is zero. Shards are memory-mapped, so they may be larger than memory, and the whole
header is checked before a token is read. Whether a token is in the vocabulary is checked when it is used.
*/
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <glob.h>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/strings.h"

static_assert(std::endian::native == std::endian::little,
              "the files read and written here are little-endian");

constexpr size_t shard_header_bytes = 1024;
constexpr int64_t max_shard_tokens = INT32_MAX;
constexpr std::string_view token_record_beginning =
    "{\"train_gpt_tokens\":";  // start of a record of how shards were made

struct ShardFormat {
    int32_t magic, version;
    int width;  // bytes of a token
};
constexpr ShardFormat shard_formats[] = {{20240520, 1, 2}, {20240801, 7, 4}};

// Returns null if no format has this magic number.
inline const ShardFormat* find_shard_format(int32_t magic) {
    for (const ShardFormat& format : shard_formats) {
        if (format.magic == magic) return &format;
    }
    return nullptr;
}

// The narrowest format that holds every token of a vocabulary.
inline const ShardFormat& shard_format_for(int vocab) {
    return shard_formats[vocab <= 65536 ? 0 : 1];
}

// ----------------------------------------------------------------------------
// reading

// Copies tokens start .. start+n-1 of a file to `out`; throws Error unless each is below vocab.
template <typename Stored>
void copy_tokens(const Stored* tokens, int64_t start, int64_t n, int vocab, int* out,
                 const std::string& path) {
    tokens += start;
    uint32_t largest = 0;  // a negative token becomes a very large one
    for (int64_t i = 0; i < n; i++) {
        largest = std::max(largest, (uint32_t)tokens[i]);
        out[i] = (int)tokens[i];
    }
    if (largest < (uint32_t)vocab) return;
    auto is_bad = [=](Stored token) { return (uint32_t)token >= (uint32_t)vocab; };
    int64_t bad = std::find_if(tokens, tokens + n, is_bad) - tokens;
    fail("%s: token %lld is %lld, outside the vocabulary of %d; the file was made with another tokenizer: "
         "give the model a matching vocabulary, or tokenize the text again",
         path.c_str(), (long long)(start + bad), (long long)tokens[bad], vocab);
}

// The location of tokens in a file: contiguous, up to its end.
struct TokenArray {
    uint64_t first_byte = 0;
    int64_t count = 0;
    int width = 0;           // bytes of a token
    bool is_signed = false;  // int32, whose negative values are not valid tokens

    uint64_t file_bytes() const { return first_byte + (uint64_t)count * (uint64_t)width; }

    // Copies tokens start .. start+n-1 of the file mapped at `file`; each must be below vocab.
    void copy(const char* file, int64_t start, int64_t n, int vocab, int* out,
              const std::string& path) const {
        const char* tokens = file + first_byte;
        read_mapped(path, [&] {
            if (width == 2)
                copy_tokens((const uint16_t*)tokens, start, n, vocab, out, path);
            else if (is_signed)
                copy_tokens((const int32_t*)tokens, start, n, vocab, out, path);
            else
                copy_tokens((const uint32_t*)tokens, start, n, vocab, out, path);
        });
    }
};

class TokenShard {
public:
    explicit TokenShard(std::string path) : path_(std::move(path)), file_(path_) { check(); }

    const std::string& path() const { return path_; }
    const TokenArray& tokens() const { return tokens_; }
    int64_t count() const { return tokens_.count; }
    int width() const { return tokens_.width; }

    // Copies tokens start .. start+n-1, which must be in the shard; each must be below vocab.
    void copy(int64_t start, int64_t n, int vocab, int* out) const {
        tokens_.copy(file_.data(), start, n, vocab, out, path_);
    }

private:
    void check() {
        const char* path = path_.c_str();
        if (file_.size() == 0) fail("%s: is empty; copy or tokenize it again", path);
        if (file_.size() < shard_header_bytes) {
            fail("%s: has %zu bytes, too few for the header of a token shard (1024); copy or tokenize it "
                 "again",
                 path, file_.size());
        }
        int32_t header[3];
        memcpy(header, file_.data(), sizeof header);
        auto [magic, version, count] = header;
        if (find_shard_format((int32_t)__builtin_bswap32((uint32_t)magic)))
            fail("%s: was written by a big-endian machine; write it on a little-endian one", path);
        const ShardFormat* format = find_shard_format(magic);
        if (!format) {
            fail("%s: is not a token shard (it begins with %d, not 20240520 or 20240801); make one with "
                 "'train_gpt tokenize' or llm.c's scripts",
                 path, magic);
        }
        if (version != format->version) {
            fail("%s: has version %d, but only version %d of magic %d is supported; tokenize it again", path,
                 version, format->version, magic);
        }
        if (count <= 0) fail("%s: has %d tokens according to its header; tokenize it again", path, count);
        tokens_ = {shard_header_bytes, count, format->width};
        size_t expected = tokens_.file_bytes();
        if (file_.size() != expected) {
            fail("%s: is %s: %zu bytes, but the %d tokens in its header need %zu; copy or tokenize it again",
                 path, file_.size() < expected ? "truncated" : "too long", file_.size(), count, expected);
        }
    }

    std::string path_;
    MappedFile file_;
    TokenArray tokens_;
};

// Returns the files, sorted, that a comma-separated list of paths and patterns ("data/*.bin,more.bin") names.
inline std::vector<std::string> files_named(const std::string& list) {
    std::vector<std::string> files;
    for (const std::string& pattern : comma_separated(list)) {
        if (pattern.empty()) continue;
        if (access(pattern.c_str(), F_OK) == 0) {  // includes names that look like patterns
            files.push_back(pattern);
            continue;
        }
        glob_t matches = {};
        int result = glob(pattern.c_str(), GLOB_TILDE, nullptr, &matches);
        if (result == 0) files.insert(files.end(), matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
        globfree(&matches);
        if (result != 0)
            fail("%s: no such file%s; check the path, or make shards with 'train_gpt tokenize'",
                 pattern.c_str(), list == pattern ? "" : " (commas separate the files in a list)");
    }
    std::sort(files.begin(), files.end());
    files.erase(std::unique(files.begin(), files.end()), files.end());
    return files;
}

// ----------------------------------------------------------------------------
// writing

// Writes one shard. close() gives the file its final name; unless it is called, no file remains.
class ShardWriter {
public:
    ShardWriter(std::string path, int vocab)
        : file_(std::move(path)), vocab_(vocab), format_(shard_format_for(vocab)) {
        char zeros[shard_header_bytes] = {};
        file_.write(zeros, sizeof zeros);
    }

    void write(const int* tokens, size_t n) {
        if ((int64_t)n > max_shard_tokens - count_) {
            fail("%s: more than %lld tokens do not fit in one shard; begin another", path().c_str(),
                 (long long)max_shard_tokens);
        }
        for (size_t i = 0; i < n; i++) {
            if (tokens[i] >= 0 && tokens[i] < vocab_) continue;
            fail("%s: cannot store token %d, outside the vocabulary of %d; check the tokenizer",
                 path().c_str(), tokens[i], vocab_);
        }
        if (format_.width == 2)
            write_as<uint16_t>(tokens, n);
        else
            write_as<uint32_t>(tokens, n);
        count_ += (int64_t)n;
    }

    // Writes the header and flushes everything to disk, still under the temporary name.
    void finish() {
        if (file_.finished()) return;
        if (count_ == 0) fail("%s: has no tokens to store; tokenize some text", path().c_str());
        int32_t header[3] = {format_.magic, format_.version, (int32_t)count_};
        file_.write_at(0, header, sizeof header);
        file_.finish();
    }

    void close() {
        finish();
        file_.commit();
    }

    const std::string& path() const { return file_.path(); }
    int64_t count() const { return count_; }

private:
    template <typename Stored>
    void write_as(const int* tokens, size_t n) {
        Stored piece[16384];
        for (size_t done = 0; done < n;) {
            size_t size = std::min(n - done, std::size(piece));
            std::copy_n(tokens + done, size, piece);
            file_.write(piece, size * sizeof(Stored));
            done += size;
        }
    }

    NewFile file_;
    int vocab_;
    const ShardFormat& format_;
    int64_t count_ = 0;
};
