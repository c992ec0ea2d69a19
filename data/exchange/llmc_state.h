/*
Training state of llm.c: one file state_STEP_RANK.bin per rank, beside model_STEP.bin. A header of 256 numbers
of 32 bits, then AdamW's first moments, second moments and, if they are kept, the fp32 master weights, each a
sequence of fp32; then, in a run that shuffles, its position in the data, which no other program can use.

    header  0 magic 20240527   1 version 1   2 ranks   3 rank   4 master weights (0 or 1)   5 shuffles (0, 1)
            10 step   20 to 23 state of random numbers   30 to 33 place in the data   others zero

A rank has a value for every parameter, in the order of the model file, or, if ZeRO 1 sharded the optimizer,
for its shard: rank r of P has elements [r * size / P, (r + 1) * size / P) of every tensor of every layer, not
of the sequence as a whole, at 1/P of the tensor's offset in the model. The header does not say which; the
file size does.
*/
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <sys/stat.h>
#include <system_error>
#include <vector>

#include "data/checkpoint/index.h"
#include "data/base/error.h"
#include "data/base/file.h"
#include "data/exchange/llmc_model.h"

namespace llmc {

constexpr int32_t state_magic = 20240527, state_version = 1;
constexpr uint64_t mersenne_twister_bytes = 2520;

inline std::string state_name(long long step, int rank) {
    return text("state_%08lld_%05d.bin", step, rank);
}

// Returns the step in a name such as model_00001000.bin; -1 for any other name.
inline int64_t step_of_model(const std::string& path) {
    std::string name = std::filesystem::path(path).filename();
    long long step = -1;
    bool named = sscanf(name.c_str(), "model_%lld.bin", &step) == 1 && text("model_%08lld.bin", step) == name;
    return named ? step : -1;
}

// Returns the state files of a step in a folder, by rank.
inline std::map<int, std::string> state_files(const std::string& folder, int64_t step) {
    std::map<int, std::string> files;
    std::error_code error;
    std::filesystem::directory_iterator entry(folder, error), end;
    for (; !error && entry != end; entry.increment(error)) {
        std::string name = entry->path().filename();
        long long its_step;
        int rank;
        if (sscanf(name.c_str(), "state_%lld_%d.bin", &its_step, &rank) == 2 && its_step == step &&
            rank >= 0 && state_name(step, rank) == name)
            files[rank] = folder + "/" + name;
    }
    if (error) fail("%s: cannot list it: %s; check the permissions", folder.c_str(), error.message().c_str());
    return files;
}

}  // namespace llmc

// The state of all ranks, checked; the values are read on demand.
class LlmcState {
public:
    // `files`: by rank, at least one; `tensors`: those of the model beside them.
    LlmcState(const std::map<int, std::string>& files, int64_t step, std::vector<LlmcTensor> tensors)
        : step_(step), tensors_(std::move(tensors)) {
        for (const auto& [rank, path] : files) {
            if (rank != (int)paths_.size()) break;
            paths_.push_back(path);
            check_header(rank);
        }
        // rank 0 may be the one that is missing
        int missing = (int)paths_.size(), other = files.begin()->first;
        if (missing == 0 || missing < header_[2]) {
            std::string folder = std::filesystem::path(files.begin()->second).parent_path();
            fail("%s: missing, although %s is present; copy the state files of all ranks",
                 (std::filesystem::path(folder) / llmc::state_name(step, missing)).c_str(),
                 llmc::state_name(step, other).c_str());
        }
        if (files.size() > (size_t)header_[2]) {
            fail("%s: there are files of %zu ranks, but it says that %d wrote the state; remove those of "
                 "another run",
                 paths_[0].c_str(), files.size(), header_[2]);
        }
        parts_ = parts_of(paths_[0]);
        for (const std::string& path : paths_) {
            if (parts_of(path) != parts_)
                fail("%s: differs in size from %s; copy both again", path.c_str(), paths_[0].c_str());
        }
    }

    int ranks() const { return header_[2]; }
    bool has_master() const { return header_[4] == 1; }

    // Calls take(tensor, first, values) for all elements of a slot, in parts: `tensor` is an index in the
    // model's table, and `values` begin at element `first` of that tensor.
    template <typename Take>
    void each_part(Slot slot, Take&& take) const {
        std::vector<float> values;
        for (int rank = 0; rank < parts_; rank++) {
            struct stat status;
            FileHandle file = open_regular(paths_[(size_t)rank], &status);
            for (size_t i = 0; i < tensors_.size(); i++) {
                const LlmcTensor& tensor = tensors_[i];
                uint64_t share = tensor.size / (uint64_t)parts_, begin = share * (uint64_t)rank;
                uint64_t end = std::min(begin + share, tensor.used);
                uint64_t array = sizeof(llmc::Header) + place(slot) * share_bytes();
                uint64_t at = array + tensor.offset / (uint64_t)parts_ * sizeof(float);
                for (uint64_t first = begin; first < end; first += values.size()) {
                    values.resize(std::min(llmc::most_at_once, end - first));
                    read_bytes(file, paths_[(size_t)rank], at + (first - begin) * sizeof(float),
                               values.data(), values.size() * sizeof(float));
                    take(i, first, values);
                }
            }
        }
    }

private:
    static void read_bytes(const FileHandle& file, const std::string& path, uint64_t offset, void* to,
                           uint64_t bytes) {
        if (!read_at(file, path, offset, to, bytes))
            fail("%s: too short, or was truncated while being read; copy it again", path.c_str());
    }

    // Returns the index of the slot among the sequences.
    static uint64_t place(Slot slot) { return slot == Slot::m ? 0 : slot == Slot::v ? 1 : 2; }

    uint64_t share_bytes() const { return llmc::parameters(tensors_) / (uint64_t)parts_ * sizeof(float); }

    void check_header(int rank) {
        const std::string& path = paths_.back();
        struct stat status;
        FileHandle file = open_regular(path, &status);
        llmc::Header header;
        read_bytes(file, path, 0, header.data(), sizeof header);
        if (header[0] != llmc::state_magic)
            fail("%s: not a training state of llm.c (wrong magic); copy it again", path.c_str());
        if (header[1] != llmc::state_version) {
            fail("%s: version %d of llm.c's state, but only 1 is known; use the llm.c that wrote it",
                 path.c_str(), header[1]);
        }
        if (header[3] != rank || header[2] <= rank) {
            fail("%s: holds the state of rank %d of %d, but its name says rank %d; copy the files again",
                 path.c_str(), header[3], header[2], rank);
        }
        if (header[10] != step_) {
            fail("%s: holds the state of step %d, but its name says step %lld; copy the files again",
                 path.c_str(), header[10], (long long)step_);
        }
        if ((header[4] | header[5] | 1) != 1) {
            fail("%s: master weights %d, shuffles %d; both must be 0 or 1, so the file is damaged",
                 path.c_str(), header[4], header[5]);
        }
        for (auto [begin, end] : {std::pair(6, 10), {11, 20}, {24, 30}, {34, 256}})
            llmc::check_zeros(header, (size_t)begin, (size_t)end, path);
        if (rank == 0) header_ = header;
        if (header[2] != header_[2] || header[4] != header_[4] || header[5] != header_[5]) {
            fail("%s: ranks, master weights or shuffling are not those of %s; they are from different runs",
                 path.c_str(), paths_[0].c_str());
        }
    }

    // Returns the number of shards that the size of the file implies.
    int parts_of(const std::string& path) const {
        uint64_t parameters = llmc::parameters(tensors_), ranks = (uint64_t)header_[2];
        if (has_size(path, parameters)) return 1;
        if (parameters % ranks != 0 || !has_size(path, parameters / ranks)) {
            fail("%s: its size does not fit a state of %llu parameters on %llu ranks; copy it again "
                 "from where it was written",
                 path.c_str(), (unsigned long long)parameters, (unsigned long long)ranks);
        }
        for (const LlmcTensor& tensor : tensors_) {
            if (tensor.size % ranks != 0) {
                fail("%s: sharded over %llu ranks, which do not divide tensor %s; the file is damaged",
                     path.c_str(), (unsigned long long)ranks, tensor.name.c_str());
            }
        }
        return (int)ranks;
    }

    // Returns whether the size of the file is that of `values` values in each sequence.
    bool has_size(const std::string& path, uint64_t values) const {
        struct stat status;
        FileHandle file = open_regular(path, &status);
        uint64_t size = (uint64_t)status.st_size;
        uint64_t end = sizeof(llmc::Header) + values * sizeof(float) * (has_master() ? 3 : 2);
        if (header_[5] == 0) return end == size;
        // Two lists follow: the order of the files, and the order of the samples in a file. Each is a count
        // and its items.
        for (int list = 0; list < 2; list++) {
            uint64_t count;
            if (end > size || size - end < sizeof count) return false;
            read_bytes(file, path, end, &count, sizeof count);
            end += sizeof count;
            if (count > (size - end) / sizeof(int32_t)) return false;
            end += count * sizeof(int32_t);
        }
        return size - end == llmc::mersenne_twister_bytes;
    }

    int64_t step_;
    std::vector<LlmcTensor> tensors_;
    std::vector<std::string> paths_;  // by rank
    llmc::Header header_ = {};        // the header of rank 0
    int parts_ = 1;
};
