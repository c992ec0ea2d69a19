/*
Writes the weights of a Hugging Face model: model.safetensors or, if that would exceed the size of a shard,
model-00001-of-00003.safetensors and so on with model.safetensors.index.json. Offsets follow from the names
and shapes, so tensors can be written in any order, each in pieces from its first element on, and memory holds
one piece. Each tensor is in one shard. No file gets its final name before all are complete.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/base/dtype.h"
#include "data/base/error.h"
#include "data/base/file.h"
#include "data/exchange/safetensors_header.h"

struct NamedShape {
    std::string name;
    std::vector<uint64_t> shape;
};

class SafetensorsWriter {
public:
    static constexpr uint64_t most_shard_bytes = 5'000'000'000;  // the usual limit of Hugging Face

    // Makes the folder; without commit() nothing is left behind. Tensors are assigned to shards in the given
    // order.
    SafetensorsWriter(const std::string& folder, const std::vector<NamedShape>& tensors, Dtype dtype,
                      uint64_t shard_bytes = most_shard_bytes)
        : folder_(folder), made_(folder), dtype_(dtype) {
        for (const NamedShape& tensor : tensors) add(tensor, shard_bytes);
        if (shards_.empty()) shards_.emplace_back();
        for (size_t i = 0; i < shards_.size(); i++) name_shard(i);
        refuse_older();
        check_space(folder + "/model.safetensors", total_bytes());
    }

    SafetensorsWriter(const SafetensorsWriter&) = delete;
    SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

    // Writes elements [first, first + count) of a tensor, which follow those written before.
    void append(const std::string& name, uint64_t first, uint64_t count, const float* values) {
        auto row = places_.find(name);
        if (row == places_.end())
            fail("%s: tensor %s is not in the table; write only its tensors", folder_.c_str(), name.c_str());
        auto& [shard_number, tensor_number, written] = row->second;
        Shard& shard = shards_[shard_number];
        const SafeTensor& tensor = shard.tensors[tensor_number];
        uint64_t size = tensor.size();
        if (first != written || count > size - first)
            fail("%s: tensor %s: elements from %llu on are beyond its end or out of order; write each once",
                 folder_.c_str(), name.c_str(), (unsigned long long)first);
        written += count;
        open_shard(shard);
        uint64_t at = shard.data_begin + tensor.begin + first * dtype_size(dtype_);
        write_values(*shard.file, at, count, values);
        shard.missing -= count;
        if (shard.missing == 0) shard.file->finish();
    }

    void commit() {
        for (Shard& shard : shards_) {
            if (shard.missing > 0) {
                fail("%s/%s: %llu elements were not written; write all of them", folder_.c_str(),
                     shard.name.c_str(), (unsigned long long)shard.missing);
            }
            open_shard(shard);
        }
        std::unique_ptr<NewFile> index = shards_.size() > 1 ? write_index() : nullptr;
        for (Shard& shard : shards_) shard.file->commit();
        if (index) index->commit();
        made_.keep = true;
    }

private:
    struct MadeFolder {
        explicit MadeFolder(const std::string& folder) : path(folder), keep(!make_folder(folder)) {}
        MadeFolder(const MadeFolder&) = delete;
        MadeFolder& operator=(const MadeFolder&) = delete;
        ~MadeFolder() {
            std::error_code not_empty;
            if (!keep) std::filesystem::remove(path, not_empty);
        }

        std::string path;
        bool keep;
    };
    struct Shard {
        std::string name;
        std::vector<SafeTensor> tensors;
        uint64_t bytes = 0;       // size of the tensors
        uint64_t missing = 0;     // elements that are not written yet
        uint64_t data_begin = 0;  // bytes before the tensors
        std::unique_ptr<NewFile> file;
    };
    struct TensorPlace {
        size_t shard, tensor;
        uint64_t written = 0;  // elements
    };

    // Refuses a folder with another model's files, because a reader could pick the wrong ones.
    void refuse_older() const {
        std::error_code error;
        std::filesystem::directory_iterator entry(folder_, error), end;
        for (; !error && entry != end; entry.increment(error)) {
            std::string name = entry->path().filename();
            if (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")) {
                fail("%s/%s: already exists; remove it or name another folder", folder_.c_str(),
                     printable(name).c_str());
            }
        }
        if (error) {
            fail("%s: cannot list it: %s; check the permissions", folder_.c_str(), error.message().c_str());
        }
    }

    void add(const NamedShape& row, uint64_t shard_bytes) {
        SafeTensor tensor = {row.name, dtype_ == Dtype::fp32 ? "F32" : "BF16", row.shape};
        uint64_t bytes = dtype_size(dtype_);
        bool overflow = false;
        for (uint64_t dimension : row.shape) overflow |= __builtin_mul_overflow(bytes, dimension, &bytes);
        if (overflow || bytes > INT64_MAX - total_bytes())
            fail("%s: tensor %s is too large to be stored; check its shape", folder_.c_str(),
                 row.name.c_str());
        if (row.name == safetensors::metadata_key || !places_.emplace(row.name, TensorPlace{}).second)
            fail("%s: tensor %s: its name is already taken; rename it", folder_.c_str(), row.name.c_str());
        bool full = !shards_.empty() && shards_.back().bytes > 0 &&
                    (shards_.back().bytes > shard_bytes || bytes > shard_bytes - shards_.back().bytes);
        if (shards_.empty() || full) shards_.emplace_back();
        tensor.end = bytes;  // its offset is set when the shard is complete
        shards_.back().bytes += bytes;
        shards_.back().missing += bytes / dtype_size(dtype_);
        shards_.back().tensors.push_back(std::move(tensor));
    }

    // Names a shard, and sorts its tensors by name, which is the usual order in a file.
    void name_shard(size_t number) {
        Shard& shard = shards_[number];
        shard.name = shards_.size() == 1
                         ? "model.safetensors"
                         : text("model-%05zu-of-%05zu.safetensors", number + 1, shards_.size());
        std::sort(shard.tensors.begin(), shard.tensors.end(),
                  [](const SafeTensor& a, const SafeTensor& b) { return a.name < b.name; });
        uint64_t end = 0;
        for (size_t i = 0; i < shard.tensors.size(); i++) {
            SafeTensor& tensor = shard.tensors[i];
            tensor.begin = end;
            end = tensor.end += end;
            places_[tensor.name].shard = number;
            places_[tensor.name].tensor = i;
        }
        shard.data_begin = sizeof(uint64_t) + header_text(shard).size();
    }

    uint64_t total_bytes() const {
        uint64_t total = 0;
        for (const Shard& shard : shards_) total += shard.bytes;
        return total;
    }

    // Returns the header, padded with spaces so that the tensors begin at a multiple of 8.
    static std::string header_text(const Shard& shard) {
        std::string source = text("{\"%s\":{\"format\":\"pt\"}", safetensors::metadata_key);
        for (const SafeTensor& tensor : shard.tensors) {
            nlohmann::ordered_json row = {{"dtype", tensor.dtype},
                                          {"shape", tensor.shape},
                                          {"data_offsets", {tensor.begin, tensor.end}}};
            source += "," + nlohmann::json(tensor.name).dump() + ":" + row.dump();
        }
        source += "}";
        source.resize((source.size() + 7) / 8 * 8, ' ');
        return source;
    }

    void open_shard(Shard& shard) {
        if (shard.file) return;
        std::string header = header_text(shard);
        uint64_t length = header.size();
        shard.file = std::make_unique<NewFile>(folder_ + "/" + shard.name);
        shard.file->resize(shard.data_begin + shard.bytes);
        shard.file->write_at(0, &length, sizeof length);
        shard.file->write_at(sizeof length, header.data(), header.size());
    }

    void write_values(NewFile& file, uint64_t at, uint64_t count, const float* values) const {
        constexpr uint64_t most_at_once = 1 << 18;
        uint64_t width = dtype_size(dtype_);
        std::vector<char> piece(std::min(count, most_at_once) * width);
        for (uint64_t done = 0, n; done < count; done += n) {
            n = std::min(count - done, most_at_once);
            from_floats(dtype_, values + done, n, piece.data());
            file.write_at(at + done * width, piece.data(), n * width);
        }
    }

    std::unique_ptr<NewFile> write_index() const {
        nlohmann::json map;
        for (const auto& [name, place] : places_) map[name] = shards_[place.shard].name;
        nlohmann::ordered_json index = {{"metadata", {{"total_size", total_bytes()}}}, {"weight_map", map}};
        std::string source = index.dump(2) + "\n";
        auto file = std::make_unique<NewFile>(folder_ + "/model.safetensors.index.json");
        file->write(source.data(), source.size());
        file->finish();
        return file;
    }

    std::string folder_;
    MadeFolder made_;
    Dtype dtype_;
    std::vector<Shard> shards_;  // after made_: unfinished files are removed before their folder
    std::map<std::string, TensorPlace> places_;  // by name
};
