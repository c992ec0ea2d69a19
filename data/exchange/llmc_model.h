/*
Models of llm.c: model_*.bin. A header of 256 numbers of 32 bits, then the tensors one after another, all in
fp32 or all in bf16, little-endian.

    header  0 magic 20240326   1 version: 3 fp32, 5 bf16   2 context   3 vocabulary   4 layers   5 heads
            6 channels   7 rows of wte: the vocabulary and padding   8... zero
    tensors wte wpe | ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw fcb fcprojw fcprojb | lnfw lnfb
            each of those in the middle is stored for all layers before the next begins

Our tensors of a GPT-2 have the same shapes and the same order of elements, except for the padding.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <sys/stat.h>
#include <vector>

#include "data/checkpoint/files.h"
#include "data/base/dtype.h"
#include "data/base/error.h"
#include "data/base/file.h"
#include "data/exchange/same_model.h"
#include "data/options/model_config.h"
#include "data/options/values.h"

// The place of one of our tensors in the sequence of all parameters.
struct LlmcTensor {
    std::string name;
    uint64_t offset;  // index of its first parameter
    uint64_t size;    // parameters, including padding
    uint64_t used;    // parameters without padding
};

namespace llmc {

using Header = std::array<int32_t, 256>;
constexpr int32_t model_magic = 20240326, fp32_version = 3, bf16_version = 5;
constexpr uint64_t most_at_once = 1 << 20;  // parameters in memory

inline void check_zeros(const Header& header, size_t begin, size_t end, const std::string& path) {
    for (size_t i = begin; i < end; i++) {
        if (header[i] != 0) {
            fail("%s: number %zu of the header is %d; it must be zero, so the file is damaged or from a "
                 "newer llm.c",
                 path.c_str(), i, header[i]);
        }
    }
}

// Returns the tensors in the order of the file.
inline std::vector<LlmcTensor> tensors(const ModelConfig& c, uint64_t padded_vocab) {
    uint64_t C = (uint64_t)c.channels, V = (uint64_t)c.vocab_size, T = (uint64_t)c.context, end = 0;
    std::vector<LlmcTensor> table;
    auto add = [&](const std::string& name, uint64_t size, uint64_t used) {
        table.push_back({name, end, size, used});
        end += size;
    };
    struct PerLayer {
        const char* name;
        uint64_t size;
    };
    add("wte", padded_vocab * C, V * C);
    add("wpe", T * C, T * C);
    for (const PerLayer& row : {PerLayer{"norm1.weight", C},
                                {"norm1.bias", C},
                                {"qkv.weight", 3 * C * C},
                                {"qkv.bias", 3 * C},
                                {"attproj.weight", C * C},
                                {"attproj.bias", C},
                                {"norm2.weight", C},
                                {"norm2.bias", C},
                                {"fc.weight", 4 * C * C},
                                {"fc.bias", 4 * C},
                                {"fcproj.weight", 4 * C * C},
                                {"fcproj.bias", C}}) {
        for (int l = 0; l < c.layers; l++) add(text("layers.%d.%s", l, row.name), row.size, row.size);
    }
    add("normf.weight", C, C);
    add("normf.bias", C, C);
    return table;
}

inline uint64_t parameters(const std::vector<LlmcTensor>& table) {
    return table.back().offset + table.back().size;
}

// Returns the index of each tensor of `table` in `ours`, which must be the tensors of the same model.
inline std::vector<int> numbers(const std::vector<LlmcTensor>& table,
                                const std::vector<CheckpointTensor>& ours, const std::string& path) {
    std::map<std::string, int> by_name;
    for (size_t i = 0; i < ours.size(); i++) by_name[ours[i].name] = (int)i;
    std::vector<int> result;
    for (const LlmcTensor& tensor : table) {
        auto row = by_name.find(tensor.name);
        if (row == by_name.end() || ours[(size_t)row->second].size() != tensor.used) {
            fail("%s: tensor %s is missing or has the wrong size; the checkpoint belongs to another model",
                 path.c_str(), tensor.name.c_str());
        }
        result.push_back(row->second);
    }
    if (ours.size() != table.size())
        fail("%s: more tensors than llm.c has; the checkpoint belongs to another model", path.c_str());
    return result;
}

// Refuses features that llm.c does not have, and names the options that set them.
inline void check_exportable(const ModelConfig& c) {
    ModelConfig theirs = {.layers = c.layers,
                          .channels = c.channels,
                          .heads = c.heads,
                          .vocab_size = c.vocab_size,
                          .context = c.context};
    check_same_model(c, theirs, "llm.c", "export it with --format hf, or train a model of that shape");
}

}  // namespace llmc

// A model file, checked; the parameters are read on demand.
class LlmcModel {
public:
    explicit LlmcModel(const std::string& path) : path_(path), file_(open_regular(path, &status_)) {
        refuse_lfs_pointer(file_, path);
        llmc::Header header;
        if ((uint64_t)status_.st_size < sizeof header)
            fail("%s: too short for a model of llm.c; copy it again, or name another file", path.c_str());
        read_bytes(0, header.data(), sizeof header);
        if (header[0] != llmc::model_magic)
            fail("%s: not a model of llm.c (wrong magic); name a file model_*.bin", path.c_str());
        if (header[1] != llmc::fp32_version && header[1] != llmc::bf16_version) {
            fail("%s: version %d of llm.c's format, but only 3 (fp32) and 5 (bf16) are known; write it with "
                 "a recent llm.c",
                 path.c_str(), header[1]);
        }
        dtype_ = header[1] == llmc::fp32_version ? Dtype::fp32 : Dtype::bf16;
        read_config(header);
        tensors_ = llmc::tensors(config_, (uint64_t)header[7]);
        uint64_t bytes = sizeof header + llmc::parameters(tensors_) * dtype_size(dtype_);
        if ((uint64_t)status_.st_size != bytes) {
            fail("%s: %lld bytes, and its header says %llu; copy it again from where it was written",
                 path.c_str(), (long long)status_.st_size, (unsigned long long)bytes);
        }
    }

    const std::string& path() const { return path_; }
    const ModelConfig& config() const { return config_; }
    Dtype dtype() const { return dtype_; }
    const std::vector<LlmcTensor>& tensors() const { return tensors_; }  // in the order of the file

    void read_floats(uint64_t first_parameter, uint64_t count, float* to) {
        bytes_.resize(count * dtype_size(dtype_));
        read_bytes(sizeof(llmc::Header) + first_parameter * dtype_size(dtype_), bytes_.data(), bytes_.size());
        to_floats(dtype_, bytes_.data(), count, to);
    }

private:
    void read_config(const llmc::Header& header) {
        constexpr const char* meanings[] = {"context", "vocabulary", "layers", "heads", "channels"};
        for (size_t i = 2; i < 7; i++) {
            if (header[i] < 1)
                fail("%s: %s = %d; the file is damaged", path_.c_str(), meanings[i - 2], header[i]);
        }
        if (header[7] < header[3]) {
            fail("%s: vocabulary of %d padded to %d; the file is damaged", path_.c_str(), header[3],
                 header[7]);
        }
        llmc::check_zeros(header, 8, header.size(), path_);
        ModelConfig model = {.layers = header[4],
                             .channels = header[6],
                             .heads = header[5],
                             .vocab_size = header[3],
                             .context = header[2]};
        try {
            config_ = checked_model(model);
        } catch (const Error& error) {
            fail("%s: %s", path_.c_str(), error.what());
        }
    }

    void read_bytes(uint64_t offset, void* to, uint64_t bytes) const {
        if (!read_at(file_, path_, offset, to, bytes))
            fail("%s: was truncated while being read; try again when nothing is writing it", path_.c_str());
    }

    std::string path_;
    struct stat status_;
    FileHandle file_;
    ModelConfig config_;
    Dtype dtype_ = Dtype::fp32;
    std::vector<LlmcTensor> tensors_;
    std::vector<char> bytes_;
};

// Exports the weights of a checkpoint, each from its most precise copy.
inline void export_llmc(CheckpointReader& reader, const ModelConfig& model, const std::string& path,
                        Dtype dtype) {
    constexpr uint64_t padding = 128;  // llm.c pads wte to a multiple of this number of rows
    llmc::check_exportable(model);
    uint64_t padded_vocab = ((uint64_t)model.vocab_size + padding - 1) / padding * padding;
    std::vector<LlmcTensor> table = llmc::tensors(model, padded_vocab);
    std::vector<int> numbers = llmc::numbers(table, reader.index().tensors, reader.folder());

    llmc::Header header = {llmc::model_magic, dtype == Dtype::fp32 ? llmc::fp32_version : llmc::bf16_version,
                           model.context,     model.vocab_size,
                           model.layers,      model.heads,
                           model.channels,    (int32_t)padded_vocab};
    uint64_t bytes = sizeof header + llmc::parameters(table) * dtype_size(dtype);
    if (access(path.c_str(), F_OK) == 0)
        fail("%s: already exists; remove it or name another file", path.c_str());
    check_space(path, bytes);
    NewFile file(path);
    file.resize(bytes);  // the padding is zero
    file.write_at(0, header.data(), sizeof header);
    std::vector<float> values;
    std::vector<char> stored;
    for (size_t i = 0; i < table.size(); i++) {
        bool has_master = reader.index().tensors[(size_t)numbers[i]].dtype(Slot::master).has_value();
        Slot slot = has_master ? Slot::master : Slot::weight;
        for (uint64_t first = 0; first < table[i].used; first += values.size()) {
            values.resize(std::min(llmc::most_at_once, table[i].used - first));
            reader.read_floats(numbers[i], slot, first, values.size(), values.data());
            stored.resize(values.size() * dtype_size(dtype));
            from_floats(dtype, values.data(), values.size(), stored.data());
            file.write_at(sizeof header + (table[i].offset + first) * dtype_size(dtype), stored.data(),
                          stored.size());
        }
    }
    file.commit();
}
