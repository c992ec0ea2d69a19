/*
A checkpoint written by one process, from tensors given as floats; used by import.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "data/checkpoint/files.h"
#include "data/checkpoint/folder.h"
#include "data/base/dtype.h"

class CheckpointBuilder {
public:
    // `about` is the header of the index without tensors and files (data/checkpoint/index.h).
    CheckpointBuilder(const std::string& run_dir, int64_t step, nlohmann::ordered_json about,
                      std::vector<CheckpointTensor> tensors)
        : folder_(run_dir, checkpoint_folder(run_dir, step)),
          index_(new_index(std::move(about), std::move(tensors))),
          file_(folder_.folder(), 0, index_.save_id) {
        uint64_t bytes = 0;
        for (const CheckpointTensor& tensor : index_.tensors) {
            for (const auto& dtype : tensor.slots) bytes += dtype ? tensor.size() * dtype_size(*dtype) : 0;
        }
        check_space(index_path(folder_.folder()), bytes);
    }

    // Adds elements [first, first + count) of a tensor. Elements are added in any order, each exactly once.
    void append(int tensor, Slot slot, uint64_t first, uint64_t count, const float* values) {
        note_not_finite(tensor, first, count, values);
        bool goes_on =
            (uint32_t)tensor == piece_.tensor && slot == piece_.slot && first == piece_.begin + piece_.count;
        if (!goes_on) {
            write_piece();
            piece_.tensor = (uint32_t)tensor;
            piece_.slot = slot;
            piece_.begin = first;
        }
        Dtype dtype = index_.tensors.at((size_t)tensor).dtype(slot).value();
        while (count > 0) {
            uint64_t n = std::min(count, largest_piece - piece_.count);
            store(dtype, values, n);
            piece_.count += n;
            values += n;
            count -= n;
            if (piece_.count == largest_piece) write_piece();
        }
    }

    // Returns a line for the user if any number is not finite; otherwise an empty string.
    std::string not_finite() const {
        if (not_finite_ == 0) return "";
        return text(
            "not finite: %llu of the numbers, the first in tensor %s; all outputs of the model will be NaN, "
            "so get an intact copy",
            (unsigned long long)not_finite_, first_not_finite_.c_str());
    }

    // Publishes the checkpoint, which does not exist until this returns. Without commit(), nothing remains on
    // disk.
    void commit() {
        complete();
        publish();
    }

    // The two halves of commit(): one brings everything to disk, the other gives it its final name.
    void complete() {
        write_piece();
        index_.file_bytes = {file_.finish()};
        folder_.complete(index_);
    }
    void publish() { folder_.publish(); }

private:
    static CheckpointIndex new_index(nlohmann::ordered_json about, std::vector<CheckpointTensor> tensors) {
        CheckpointIndex index;
        index.save_id = new_save_id();
        index.about = std::move(about);
        index.tensors = std::move(tensors);
        return index;
    }

    void note_not_finite(int tensor, uint64_t first, uint64_t count, const float* values) {
        for (uint64_t i = 0; i < count; i++) {
            if (std::isfinite(values[i]) || not_finite_++ > 0) continue;
            first_not_finite_ = text("%s: element %llu is %g", index_.tensors.at((size_t)tensor).name.c_str(),
                                     (unsigned long long)(first + i), (double)values[i]);
        }
    }

    void store(Dtype dtype, const float* values, uint64_t count) {
        size_t end = bytes_.size();
        bytes_.resize(end + count * dtype_size(dtype));
        from_floats(dtype, values, count, bytes_.data() + end);
    }

    // Writes the gathered elements, and prepares for those that follow.
    void write_piece() {
        if (piece_.count > 0) {
            piece_.columns = index_.tensors[piece_.tensor].width();
            file_.append(piece_, bytes_.data(), bytes_.size());
            index_.pieces.push_back(piece_);
        }
        piece_.begin += piece_.count;
        piece_.count = 0;
        bytes_.clear();
    }

    NewCheckpoint folder_;
    CheckpointIndex index_;
    CheckpointDataFile file_;
    CheckpointPiece piece_ = {};  // the piece being gathered
    std::vector<char> bytes_;     // its content
    uint64_t not_finite_ = 0;     // number of values that are not finite
    std::string first_not_finite_;
};
