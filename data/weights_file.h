/*
The weights file: a table of named tensors, and one JSON object that says what they belong to. All numbers are
little-endian.

    at  bytes
     0      8  magic: 89 54 47 50 54 0d 0a 1a ("\x89TGPT\r\n\x1a"; converting line ends breaks it)
     8      4  version of this format: 1
    12      4  zero
    16      8  H, bytes of the header; a multiple of 64
    24      8  XXH3-64 of the header
    32      8  D, bytes of the data; a multiple of 64
    40      8  XXH3-64 of the data
    48     16  zero
    64      H  header: {"tensors": [{"name", "dtype": "fp32" | "bf16", "shape": [...], "offset", "bytes"},
               ...], ...}, then spaces; what else the object holds is the writer's affair
  64+H      D  data: each tensor row-major, at its offset from here; then zeros up to the next multiple of 64,
               where the next one of the table begins
64+H+D         end of the file

The writer gives the file its name only when it is complete and on disk. The reader checks all of the above,
both hashes included, before it hands out a byte.
*/
#pragma once

#include <nlohmann/json.hpp>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <sys/statvfs.h>
#include <unistd.h>
#include <vector>

#include "data/error.h"
#include "data/file.h"
#include "data/json.h"

enum class Dtype { fp32, bf16 };

inline const char* dtype_name(Dtype dtype) {
    return dtype == Dtype::fp32 ? "fp32" : "bf16";
}
inline uint64_t dtype_size(Dtype dtype) {
    return dtype == Dtype::fp32 ? 4 : 2;
}

struct StoredTensor {
    std::string name;
    std::vector<int64_t> shape;
    Dtype dtype = Dtype::fp32;
    uint64_t offset = 0;  // in the data
    uint64_t bytes = 0;
};

namespace weights_format {

constexpr unsigned char magic[8] = {0x89, 'T', 'G', 'P', 'T', '\r', '\n', 0x1a};
constexpr uint32_t version = 1;
constexpr uint64_t alignment = 64;
constexpr uint64_t longest_header = 16 << 20;
constexpr size_t read_piece = 1 << 20;

struct Preamble {
    unsigned char magic[8];
    uint32_t version;
    uint32_t zero;
    uint64_t header_bytes, header_hash;
    uint64_t data_bytes, data_hash;
    unsigned char zeros[16];
};
static_assert(sizeof(Preamble) == alignment && std::endian::native == std::endian::little);

inline uint64_t aligned(uint64_t bytes) {
    return (bytes + alignment - 1) / alignment * alignment;
}

// Bytes of a tensor; false if there are none, or more than a file can hold.
inline bool tensor_bytes(const StoredTensor& tensor, uint64_t* bytes) {
    constexpr uint64_t most = (uint64_t)1 << 62;
    *bytes = dtype_size(tensor.dtype);
    for (int64_t dimension : tensor.shape) {
        if (dimension < 1 || __builtin_mul_overflow(*bytes, (uint64_t)dimension, bytes) || *bytes > most)
            return false;
    }
    return true;
}

// XXH3-64 of what is fed to it piece by piece.
class Hash {
public:
    Hash() : state_(XXH3_createState(), XXH3_freeState) { XXH3_64bits_reset(state_.get()); }
    void add(const void* data, size_t bytes) { XXH3_64bits_update(state_.get(), data, bytes); }
    uint64_t value() const { return XXH3_64bits_digest(state_.get()); }

private:
    std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

// Which bytes have been written.
class Ranges {
public:
    // Bytes [begin, end). False if one of them is there already.
    bool add(uint64_t begin, uint64_t end) {
        if (begin == end) return true;
        auto next = end_of_.lower_bound(begin);
        if (next != end_of_.end() && next->first < end) return false;
        auto before = next == end_of_.begin() ? end_of_.end() : std::prev(next);
        if (before != end_of_.end() && before->second > begin) return false;
        if (next != end_of_.end() && next->first == end) {
            end = next->second;
            end_of_.erase(next);
        }
        if (before != end_of_.end() && before->second == begin)
            before->second = end;
        else
            end_of_[begin] = end;
        return true;
    }

    // Whether all of [begin, end) is there.
    bool has(uint64_t begin, uint64_t end) const {
        auto next = end_of_.upper_bound(begin);
        return next != end_of_.begin() && std::prev(next)->second >= end;
    }

private:
    std::map<uint64_t, uint64_t> end_of_;  // each that has a gap before and behind it, by its begin
};

}  // namespace weights_format

// ----------------------------------------------------------------------------
// writing

// Refuses a file that is larger than what is free in its folder: better before hours of work than after.
inline void check_space(const std::string& path, uint64_t needed) {
    std::string folder = std::filesystem::absolute(path).parent_path().string();
    struct statvfs status;
    if (statvfs(folder.c_str(), &status) != 0) return;  // writing will tell
    uint64_t free_bytes = (uint64_t)status.f_bavail * status.f_frsize;
    if (free_bytes >= needed) return;
    constexpr double MB = 1e6;
    fail("%s: needs %.1f MB, and %.1f MB are free; free some space there or name another place", path.c_str(),
         (double)needed / MB, (double)free_bytes / MB);
}

class WeightsWriter {
public:
    // `header` is a JSON object without "tensors"; of each tensor, name, shape and dtype count.
    WeightsWriter(const std::string& path, nlohmann::ordered_json header, std::vector<StoredTensor> tensors)
        : tensors_(std::move(tensors)), preamble_(), file_(path) {
        using namespace weights_format;
        auto table = nlohmann::ordered_json::array();
        for (StoredTensor& tensor : tensors_) {
            if (!tensor_bytes(tensor, &tensor.bytes)) {
                fail("%s: tensor %s has no size that can be stored; check its shape", path.c_str(),
                     tensor.name.c_str());
            }
            tensor.offset = preamble_.data_bytes;
            preamble_.data_bytes += aligned(tensor.bytes);
            by_name_[tensor.name] = (size_t)(&tensor - tensors_.data());
            table.push_back({{"name", tensor.name},
                             {"dtype", dtype_name(tensor.dtype)},
                             {"shape", tensor.shape},
                             {"offset", tensor.offset},
                             {"bytes", tensor.bytes}});
        }
        header["tensors"] = std::move(table);
        std::string source = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
        source.resize(aligned(source.size()), ' ');

        memcpy(preamble_.magic, magic, sizeof magic);
        preamble_.version = version;
        preamble_.header_bytes = source.size();
        preamble_.header_hash = XXH3_64bits(source.data(), source.size());
        check_space(file_.path(), sizeof preamble_ + preamble_.header_bytes + preamble_.data_bytes);
        file_.resize(data_begin() + preamble_.data_bytes);
        file_.write_at(sizeof preamble_, source.data(), source.size());
    }

    // Bytes [from, from + bytes) of a tensor. The pieces can come in any order, each byte once.
    void write_at(const std::string& name, uint64_t from, const void* data, size_t bytes) {
        auto row = by_name_.find(name);
        if (row == by_name_.end() || from > tensors_[row->second].bytes ||
            bytes > tensors_[row->second].bytes - from) {
            fail("%s: tensor %s is not in the table, or written beyond its end; write what the table says",
                 file_.path().c_str(), name.c_str());
        }
        const StoredTensor& tensor = tensors_[row->second];
        uint64_t at = tensor.offset + from;
        if (!written_.add(at, at + bytes)) {
            fail("%s: tensor %s: bytes from %llu on written twice; write each once", file_.path().c_str(),
                 name.c_str(), (unsigned long long)from);
        }
        file_.write_at(data_begin() + at, data, bytes);
        if (at != hashed_) return;
        hash_.add(data, bytes);
        hashed_ += bytes;
        if (from + bytes < tensor.bytes) return;
        const char zeros[weights_format::alignment] = {};
        hash_.add(zeros, weights_format::aligned(hashed_) - hashed_);
        hashed_ = weights_format::aligned(hashed_);
    }

    // Until this has returned, the file is not there; without it, nothing is left behind.
    void commit() {
        for (const StoredTensor& tensor : tensors_) {
            if (!written_.has(tensor.offset, tensor.offset + tensor.bytes)) {
                fail("%s: tensor %s was not written, or not all of it; write all of the table",
                     file_.path().c_str(), tensor.name.c_str());
            }
        }
        // what came out of turn is hashed now
        std::vector<char> piece(weights_format::read_piece);
        while (hashed_ < preamble_.data_bytes) {
            size_t bytes = std::min<uint64_t>(piece.size(), preamble_.data_bytes - hashed_);
            file_.read_back(data_begin() + hashed_, piece.data(), bytes);
            hash_.add(piece.data(), bytes);
            hashed_ += bytes;
        }
        preamble_.data_hash = hash_.value();
        file_.write_at(0, &preamble_, sizeof preamble_);
        file_.commit();
    }

private:
    uint64_t data_begin() const { return sizeof preamble_ + preamble_.header_bytes; }

    std::vector<StoredTensor> tensors_;
    std::map<std::string, size_t> by_name_;  // index of each tensor
    weights_format::Preamble preamble_;
    NewFile file_;
    weights_format::Ranges written_;  // of the data
    weights_format::Hash hash_;
    uint64_t hashed_ = 0;  // bytes of the data, from its beginning
};

// ----------------------------------------------------------------------------
// reading

class WeightsReader {
public:
    explicit WeightsReader(const std::string& path) : path_(path), file_(open_regular(path, &status_)) {
        read_preamble();
        read_header();
        check_tensors();
        check_data();
    }

    const nlohmann::json& header() const { return header_; }
    const std::vector<StoredTensor>& tensors() const { return tensors_; }
    const std::string& path() const { return path_; }

    const StoredTensor& tensor(const std::string& name) const {
        auto row = by_name_.find(name);
        if (row != by_name_.end()) return tensors_[row->second];
        fail("%s: tensor %s is missing; the file is of another model", path_.c_str(), name.c_str());
    }

    // Copies bytes [from, from + bytes) of a tensor.
    void read(const StoredTensor& tensor, uint64_t from, void* to, size_t bytes) const {
        if (from > tensor.bytes || bytes > tensor.bytes - from) {
            fail("%s: tensor %s has %llu bytes, more were asked for; the file is of another model",
                 path_.c_str(), printable(tensor.name).c_str(), (unsigned long long)tensor.bytes);
        }
        read_bytes(data_begin() + tensor.offset + from, to, bytes);
    }

private:
    uint64_t data_begin() const { return sizeof preamble_ + preamble_.header_bytes; }

    [[noreturn]] void refuse(const char* reason) const { fail("%s: %s", path_.c_str(), reason); }

    void read_bytes(uint64_t offset, void* to, size_t bytes) const {
        if (!read_at(file_, path_, offset, to, bytes))
            refuse("became shorter while it was read; read it again when nothing writes it");
    }

    void read_preamble() {
        using namespace weights_format;
        uint64_t size = (uint64_t)status_.st_size;
        if (size < sizeof preamble_)
            refuse("too short for a weights file; copy it again, or name another file");
        read_bytes(0, &preamble_, sizeof preamble_);
        if (memcmp(preamble_.magic, magic, sizeof magic) != 0) {
            refuse("not a weights file (wrong magic); name one that train_gpt wrote");
        }
        if (preamble_.version != version) {
            fail("%s: weights format %u, and this program reads format %u; use the program that wrote the "
                 "file",
                 path_.c_str(), preamble_.version, version);
        }
        uint64_t rest = size - sizeof preamble_;
        bool zeros = preamble_.zero == 0;
        for (unsigned char byte : preamble_.zeros) zeros = zeros && byte == 0;
        if (!zeros || preamble_.header_bytes > longest_header || preamble_.header_bytes % alignment ||
            preamble_.data_bytes % alignment) {
            refuse("damaged in its first 64 bytes; copy it again from where it was written");
        }
        if (preamble_.header_bytes > rest || preamble_.data_bytes != rest - preamble_.header_bytes) {
            bool shorter =
                preamble_.header_bytes > rest || preamble_.data_bytes > rest - preamble_.header_bytes;
            fail("%s: %llu bytes, %s than its header says; copy it again from where it was written",
                 path_.c_str(), (unsigned long long)size, shorter ? "fewer" : "more");
        }
    }

    void read_header() {
        std::string source(preamble_.header_bytes, '\0');
        read_bytes(sizeof preamble_, source.data(), source.size());
        if (XXH3_64bits(source.data(), source.size()) != preamble_.header_hash) {
            refuse("header does not match its checksum; copy it again from where it was written");
        }
        header_ = parse_json(source, path_);
        if (!header_.is_object() || !header_.contains("tensors") || !header_["tensors"].is_array()) {
            refuse("header has no table of tensors; the program that wrote it is at fault");
        }
    }

    StoredTensor parse_tensor(const nlohmann::json& row, size_t index) const {
        std::string where = text("%s: tensor %zu of the table", path_.c_str(), index);
        auto field = [&](const char* key, bool right_type) -> const nlohmann::json& {
            if (!right_type)
                fail("%s: %s is missing or of the wrong type; the file is damaged", where.c_str(), key);
            return row[key];
        };
        if (!row.is_object()) fail("%s: not a JSON object; the file is damaged", where.c_str());
        StoredTensor tensor;
        tensor.name = field("name", row.contains("name") && row["name"].is_string()).get<std::string>();
        where = text("%s: tensor %s", path_.c_str(), printable(tensor.name).c_str());
        auto dtype = field("dtype", row.contains("dtype") && row["dtype"].is_string()).get<std::string>();
        if (dtype != "fp32" && dtype != "bf16") {
            fail("%s: dtype %s; only fp32 and bf16 are known", where.c_str(), printable(dtype).c_str());
        }
        tensor.dtype = dtype == "fp32" ? Dtype::fp32 : Dtype::bf16;
        for (const auto& dimension : field("shape", row.contains("shape") && row["shape"].is_array())) {
            tensor.shape.push_back(json_integer(dimension, 1, INT64_MAX, where + " shape"));
        }
        tensor.offset =
            (uint64_t)json_integer(field("offset", row.contains("offset")), 0, INT64_MAX, where + " offset");
        tensor.bytes =
            (uint64_t)json_integer(field("bytes", row.contains("bytes")), 1, INT64_MAX, where + " bytes");
        uint64_t bytes;
        if (!weights_format::tensor_bytes(tensor, &bytes) || bytes != tensor.bytes) {
            fail("%s: %llu bytes do not agree with its shape; the file is damaged", where.c_str(),
                 (unsigned long long)tensor.bytes);
        }
        return tensor;
    }

    // Each tensor begins where the one before it ends, so there are no overlaps and no holes.
    void check_tensors() {
        uint64_t end = 0;
        for (const auto& row : header_["tensors"]) {
            StoredTensor tensor = parse_tensor(row, tensors_.size());
            bool fits = tensor.offset == end && tensor.bytes <= preamble_.data_bytes - end;
            if (!fits || !by_name_.emplace(tensor.name, tensors_.size()).second) {
                fail("%s: tensor %s overlaps another, leaves a hole, ends beyond the data or is there twice; "
                     "the file is damaged",
                     path_.c_str(), printable(tensor.name).c_str());
            }
            end += weights_format::aligned(tensor.bytes);
            tensors_.push_back(std::move(tensor));
        }
        if (end != preamble_.data_bytes) refuse("data beyond the last tensor; the file is damaged");
        header_.erase("tensors");
    }

    void check_data() {
        weights_format::Hash hash;
        std::vector<char> piece(weights_format::read_piece);
        for (uint64_t done = 0; done < preamble_.data_bytes; done += piece.size()) {
            size_t bytes = std::min<uint64_t>(piece.size(), preamble_.data_bytes - done);
            read_bytes(data_begin() + done, piece.data(), bytes);
            hash.add(piece.data(), bytes);
        }
        if (hash.value() != preamble_.data_hash) {
            refuse("weights do not match their checksum; copy it again from where it was written");
        }
    }

    std::string path_;
    struct stat status_;
    FileHandle file_;
    weights_format::Preamble preamble_;
    nlohmann::json header_;
    std::vector<StoredTensor> tensors_;
    std::map<std::string, size_t> by_name_;  // index of each tensor
};
