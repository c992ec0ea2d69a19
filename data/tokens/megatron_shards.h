/*
Tokens on disk as Megatron-LM writes them: PREFIX.bin contains only tokens, sequence after sequence, and
PREFIX.idx says where they begin and end (little-endian):

    at 0   "MMIDIDX\0\0"                      at 34            int32 length[S]     in tokens
       9   uint64 version, 1                  then             int64 pointer[S]    in bytes of PREFIX.bin
      17   uint8 type of a token, see below   then             int64 document[D]   its first sequence
      18   uint64 S, sequences                then, in multimodal data sets only: int8 mode[S]
      26   uint64 D, documents + 1

The header is 34 bytes long, so no array is aligned, and numbers are copied out instead of accessed in place.
Both files are memory-mapped. The whole index is checked before a token is read, and must match the size of
PREFIX.bin; whether a token is in the vocabulary is checked when it is used.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/tokens/token_shards.h"

// The path of the tokens that belong to an index: it differs in the last four characters.
inline std::string tokens_beside(const std::string& index_path) {
    if (!index_path.ends_with(".idx"))
        fail("%s: is not the name of an index; name the .idx file of a Megatron dataset", index_path.c_str());
    return index_path.substr(0, index_path.size() - 4) + ".bin";
}

// The path of the index that belongs to a .bin; empty if there is none.
inline std::string index_beside(const std::string& path) {
    if (!path.ends_with(".bin")) return "";
    std::string index = path.substr(0, path.size() - 4) + ".idx";
    return access(index.c_str(), F_OK) == 0 ? index : "";
}

class MegatronData {
public:
    // index_path: PREFIX.idx; PREFIX.bin must be in the same folder.
    explicit MegatronData(const std::string& index_path)
        : MegatronData(index_path, tokens_beside(index_path)) {}

    MegatronData(std::string index_path, std::string tokens_path)
        : index_path_(std::move(index_path)),
          path_(std::move(tokens_path)),
          index_(index_path_),
          file_(path_) {
        check_header();
        check_sequences();
        check_documents();
    }

    const std::string& path() const { return path_; }
    const std::string& index_path() const { return index_path_; }
    TokenArray tokens() const { return {0, count_, width_, width_ == 4}; }  // describes PREFIX.bin
    int64_t count() const { return count_; }                                // tokens
    int width() const { return width_; }                                    // bytes of a token
    int64_t sequences() const { return sequences_; }
    int64_t documents() const { return documents_; }

    struct Span {
        int64_t start, count;  // tokens
    };
    // A document may be empty.
    Span document(int64_t number) const {
        int64_t start = first_token(number);
        return {start, first_token(number + 1) - start};
    }

    // Copies tokens start .. start+n-1, which must be in the file; each must be below vocab.
    void copy(int64_t start, int64_t n, int vocab, int* out) const {
        tokens().copy(file_.data(), start, n, vocab, out, path_);
    }

private:
    static constexpr std::string_view magic{"MMIDIDX\0\0", 9}, older_magic{"TNTIDX\0\0", 8};
    static constexpr size_t header_bytes = 34;
    static constexpr uint8_t code_int32 = 4, code_uint16 = 8;

    template <typename T>
    T number_at(uint64_t offset) const {
        T value;
        memcpy(&value, index_.data() + offset, sizeof value);
        return value;
    }

    int64_t length(int64_t i) const { return number_at<int32_t>(header_bytes + 4 * (uint64_t)i); }
    int64_t pointer(int64_t i) const { return number_at<int64_t>(pointers_ + 8 * (uint64_t)i); }
    int64_t first_sequence(int64_t document) const {
        return number_at<int64_t>(starts_ + 8 * (uint64_t)document);
    }
    int64_t first_token(int64_t document) const {
        int64_t sequence = first_sequence(document);
        return sequence == sequences_ ? count_ : pointer(sequence) / width_;
    }

    void check_header() {
        const char* path = index_path_.c_str();
        std::string_view bytes(index_.data(), index_.size());
        if (bytes.empty()) fail("%s: is empty; copy it again", path);
        if (bytes.starts_with(older_magic)) {
            fail("%s: is in the older format TNTIDX; rewrite it with a newer Megatron-LM (MMIDIDX)", path);
        }
        if (!bytes.starts_with(magic.substr(0, std::min(bytes.size(), magic.size()))))
            fail("%s: is not a Megatron-LM index (it does not begin with MMIDIDX); name its .idx file", path);
        if (bytes.size() < header_bytes) {
            fail("%s: is truncated: %zu bytes, too few for its header (34); copy it again", path,
                 bytes.size());
        }
        if (uint64_t version = number_at<uint64_t>(9); version != 1) {
            fail("%s: has version %llu, but only version 1 is supported; rewrite it", path,
                 (unsigned long long)version);
        }
        check_type(number_at<uint8_t>(17));

        // Compares by division, because products of hostile counts would overflow.
        uint64_t sequences = number_at<uint64_t>(18), documents = number_at<uint64_t>(26);
        uint64_t rest = bytes.size() - header_bytes;
        if (sequences > rest / 12 || documents > rest / 8 || 12 * sequences + 8 * documents > rest) {
            fail("%s: is truncated: %zu bytes, too few for the %llu sequences and %llu document boundaries "
                 "in its header; copy it again",
                 path, bytes.size(), (unsigned long long)sequences, (unsigned long long)documents);
        }
        rest -= 12 * sequences + 8 * documents;
        if (rest == sequences && sequences > 0)
            fail("%s: belongs to a multimodal dataset (text and images); name a text-only one", path);
        if (rest > 0) {
            fail("%s: is too long: %llu bytes follow the %llu sequences and %llu document boundaries in its "
                 "header; copy it again",
                 path, (unsigned long long)rest, (unsigned long long)sequences,
                 (unsigned long long)documents);
        }
        if (sequences == 0) fail("%s: has no sequences; tokenize some text", path);
        if (documents < 2) fail("%s: has no documents; tokenize some text", path);
        sequences_ = (int64_t)sequences;
        documents_ = (int64_t)documents - 1;
        pointers_ = header_bytes + 4 * sequences;
        starts_ = pointers_ + 8 * sequences;
    }

    void check_type(uint8_t code) {
        constexpr const char* names[] = {nullptr, "uint8",   "int8",    "int16", "int32",
                                         "int64", "float64", "float32", "uint16"};
        const char* path = index_path_.c_str();
        if (code == 0 || code >= std::size(names))
            fail("%s: has tokens of unknown type %d; the file may be damaged: copy it again", path, code);
        if (code != code_int32 && code != code_uint16) {
            fail(
                "%s: has tokens of type %s, but only uint16 and int32 are supported; tokenize the text again",
                path, names[code]);
        }
        width_ = code == code_uint16 ? 2 : 4;
    }

    // Sequences must be contiguous and fill the file of tokens.
    void check_sequences() {
        uint64_t bytes = 0;  // stays below 2^63 + 2^33, because each pointer must equal it
        for (int64_t i = 0; i < sequences_; i++) {
            if (length(i) < 0) {
                fail("%s: sequence %lld has %lld tokens; the file is damaged: copy it again",
                     index_path_.c_str(), (long long)i, (long long)length(i));
            }
            if (pointer(i) < 0 || (uint64_t)pointer(i) != bytes) {
                fail("%s: sequence %lld begins at byte %lld, but should begin at %llu; the file is "
                     "damaged: copy it again",
                     index_path_.c_str(), (long long)i, (long long)pointer(i), (unsigned long long)bytes);
            }
            bytes += (uint64_t)length(i) * (uint64_t)width_;
        }
        if (bytes == 0) fail("%s: has no tokens; tokenize some text", index_path_.c_str());
        if (file_.size() != bytes) {
            fail("%s: is %s: %zu bytes, but %s lists %llu tokens of %d bytes; copy both again", path_.c_str(),
                 file_.size() < bytes ? "truncated" : "too long", file_.size(), index_path_.c_str(),
                 (unsigned long long)bytes / (unsigned)width_, width_);
        }
        count_ = (int64_t)(bytes / (uint64_t)width_);
    }

    void check_documents() const {
        int64_t before = 0;
        for (int64_t i = 0; i <= documents_; i++) {
            int64_t first = first_sequence(i);
            bool end = i == 0 || i == documents_;
            if (end ? first == (i == 0 ? 0 : sequences_) : first >= before && first <= sequences_) {
                before = first;
                continue;
            }
            fail("%s: document boundary %lld is %lld, but the previous one is %lld, and there are %lld "
                 "sequences; the file is damaged: copy it again",
                 index_path_.c_str(), (long long)i, (long long)first, (long long)before,
                 (long long)sequences_);
        }
    }

    std::string index_path_, path_;
    MappedFile index_, file_;
    int64_t sequences_ = 0, documents_ = 0, count_ = 0;
    uint64_t pointers_ = 0, starts_ = 0;  // offsets of these arrays in the index
    int width_ = 0;
};
