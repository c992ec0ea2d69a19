/*
Reads safetensors: one file, or the folder of a Hugging Face model, whose tensors may be spread over several
files ("shards") with an index. The headers are checked before anything else is read, and only the requested
elements of the tensors are read. The total_size of an index is ignored, because tools that convert a model
leave it unchanged; the shards state their own sizes.
*/
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <sys/stat.h>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/dtype.h"
#include "data/base/json.h"
#include "data/exchange/safetensors_header.h"
#include "data/base/strings.h"

class SafetensorsReader {
public:
    explicit SafetensorsReader(const std::string& path) : path_(path), file_(open_regular(path, &status_)) {
        refuse_lfs_pointer(file_, path);
        uint64_t size = (uint64_t)status_.st_size, length;
        if (size < sizeof length) {
            fail("%s: too short for a safetensors file; copy or download it again", path.c_str());
        }
        read_bytes(0, &length, sizeof length);
        if (length > safetensors::longest_header) {
            fail("%s: a header of %llu bytes, but at most %llu are allowed; not a safetensors file, or a "
                 "damaged one",
                 path.c_str(), (unsigned long long)length, (unsigned long long)safetensors::longest_header);
        }
        if (length > size - sizeof length) {
            fail("%s: a header of %llu bytes does not fit into the file; it is cut short, or of another kind",
                 path.c_str(), (unsigned long long)length);
        }
        std::string source(length, '\0');
        read_bytes(sizeof length, source.data(), source.size());
        data_begin_ = sizeof length + length;
        header_ = parse_safetensors_header(source, size - data_begin_, path);
    }

    const std::string& path() const { return path_; }
    const std::vector<SafeTensor>& tensors() const { return header_.tensors; }  // in the order of their bytes
    const SafeTensor* find(const std::string& name) const { return header_.find(name); }  // null: not there

    // Reads elements [first, first + count) of a tensor of floating-point numbers.
    void read_floats(const SafeTensor& tensor, uint64_t first, uint64_t count, float* to) {
        FloatFormat format = format_of(tensor);
        uint64_t size = tensor.size(), width = float_bytes(format);
        if (first > size || count > size - first) {
            fail("%s: tensor %s has %llu elements, but more were requested; it is from another model",
                 path_.c_str(), printable(tensor.name).c_str(), (unsigned long long)size);
        }
        if (!file_) reopen();
        std::vector<char> piece(std::min(count, most_at_once) * width);
        for (uint64_t done = 0; done < count;) {
            uint64_t n = std::min(count - done, most_at_once);
            read_bytes(data_begin_ + tensor.begin + (first + done) * width, piece.data(), n * width);
            widen(format, piece.data(), n, to + done);
            done += n;
        }
    }

    // Closes the file until the next read.
    void close() { file_.close(); }

private:
    static constexpr uint64_t most_at_once = 1 << 18;  // elements

    FloatFormat format_of(const SafeTensor& tensor) const {
        if (tensor.dtype == "F32") return FloatFormat::f32;
        if (tensor.dtype == "BF16") return FloatFormat::bf16;
        if (tensor.dtype == "F16") return FloatFormat::f16;
        if (tensor.dtype == "F64") return FloatFormat::f64;
        fail("%s: tensor %s has dtype %s; weights can be read as F64, F32, F16 and BF16, so convert it "
             "first",
             path_.c_str(), printable(tensor.name).c_str(), tensor.dtype.c_str());
    }

    void read_bytes(uint64_t offset, void* to, uint64_t bytes) const {
        if (!read_at(file_, path_, offset, to, bytes)) {
            fail("%s: was truncated while being read; try again when nothing is writing it", path_.c_str());
        }
    }

    void reopen() {
        struct stat now;
        file_ = open_regular(path_, &now);
        bool same = now.st_dev == status_.st_dev && now.st_ino == status_.st_ino &&
                    now.st_size == status_.st_size && now.st_mtim.tv_sec == status_.st_mtim.tv_sec &&
                    now.st_mtim.tv_nsec == status_.st_mtim.tv_nsec;
        if (!same) fail("%s: changed while being read; try again when nothing is writing it", path_.c_str());
    }

    std::string path_;
    struct stat status_;
    FileHandle file_;
    uint64_t data_begin_ = 0;
    SafetensorsHeader header_;
};

// model.safetensors, or model.safetensors.index.json and the shards that it names. Only one file is open at a
// time.
class SafetensorsFolder {
public:
    explicit SafetensorsFolder(const std::string& folder) : folder_(folder) {
        namespace fs = std::filesystem;
        std::error_code error;
        std::string single = folder + "/model.safetensors", index = single + ".index.json";
        if (fs::exists(single, error)) {
            add_shard(single);
        } else if (fs::exists(index, error)) {
            read_index(index);
        } else {
            fail("%s: has neither model.safetensors nor model.safetensors.index.json; name the folder of a "
                 "model in safetensors format",
                 folder.c_str());
        }
    }

    const std::string& folder() const { return folder_; }

    // Returns null if there is none of this name.
    const SafeTensor* find(const std::string& name) const {
        auto row = by_name_.find(name);
        return row == by_name_.end() ? nullptr : shards_[row->second].find(name);
    }

    // Returns the names of all tensors, sorted.
    std::vector<std::string> names() const {
        std::vector<std::string> result;
        for (const auto& [name, shard] : by_name_) result.push_back(name);
        return result;
    }

    // Reads elements [first, first + count) of a tensor of floating-point numbers.
    void read_floats(const std::string& name, uint64_t first, uint64_t count, float* to) {
        auto row = by_name_.find(name);
        if (row == by_name_.end()) {
            fail("%s: tensor %s is missing; the model is of another kind", folder_.c_str(),
                 printable(name).c_str());
        }
        if (open_ != row->second) shards_[std::exchange(open_, row->second)].close();
        SafetensorsReader& shard = shards_[row->second];
        shard.read_floats(*shard.find(name), first, count, to);
    }

private:
    static constexpr uint64_t longest_index = 32 << 20;

    void add_shard(const std::string& path) {
        if (!shards_.empty()) shards_.back().close();
        shards_.emplace_back(path);
        open_ = shards_.size() - 1;
        for (const SafeTensor& tensor : shards_.back().tensors()) {
            if (!by_name_.emplace(tensor.name, open_).second) {
                fail("%s: tensor %s is in another file of the model too; download the model again",
                     path.c_str(), printable(tensor.name).c_str());
            }
        }
    }

    void read_index(const std::string& path) {
        nlohmann::json index = parse_json(read_whole(path, longest_index, "not the index of a model"), path);
        if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
            fail("%s: has no weight_map object; not the index of a model", path.c_str());
        std::map<std::string, size_t> shard_of;  // by the name of the file
        for (const auto& [tensor, file] : index["weight_map"].items()) {
            std::string name = file_name(path, tensor, file);
            if (!shard_of.emplace(name, shards_.size()).second) continue;
            add_shard(folder_ + "/" + name);
        }
        for (const auto& [tensor, file] : index["weight_map"].items()) {
            auto row = by_name_.find(tensor);
            if (row == by_name_.end() || row->second != shard_of.at(file.get<std::string>())) {
                fail("%s: tensor %s is not in %s; download the model again", path.c_str(),
                     printable(tensor).c_str(), printable(file.get<std::string>()).c_str());
            }
        }
        for (const auto& [tensor, shard] : by_name_) {
            if (!index["weight_map"].contains(tensor)) {
                fail("%s: tensor %s of %s is not in the weight_map; download the model again", path.c_str(),
                     printable(tensor).c_str(), shards_[shard].path().c_str());
            }
        }
    }

    // Requires a plain name, because a model must not refer to files outside its folder.
    static std::string file_name(const std::string& path, const std::string& tensor,
                                 const nlohmann::json& file) {
        std::string name = file.is_string() ? file.get<std::string>() : "";
        if (!name.ends_with(".safetensors") || name.find_first_of(std::string("/\0", 2)) != name.npos) {
            fail("%s: weight_map: %s is in %s; give the name of a .safetensors file in the same folder",
                 path.c_str(), printable(tensor).c_str(), json_text(file).c_str());
        }
        return name;
    }

    std::string folder_;
    std::vector<SafetensorsReader> shards_;
    std::map<std::string, size_t> by_name_;  // the shard of each tensor
    size_t open_ = 0;                        // the shard whose file is open
};
