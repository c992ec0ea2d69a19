/*
Loads the state of a run (comm/stateful.h) from a checkpoint of any layout. Each piece of the files is read
and verified once, by one rank, which sends the values to the ranks that need them. Ranks read in rounds: each
reads a batch, then all exchange values while the next batch is read.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/memory.h"    // HostArray
#include "comm/stateful.h"  // Stateful
#include "comm/world.h"     // World
#include "data/base/background.h"
#include "data/base/error.h"
#include "data/base/strings.h"      // printable
#include "data/checkpoint/files.h"  // CheckpointReader

class CheckpointLoader {
public:
    CheckpointLoader(Contributors parts, const World& world, const CheckpointReader& reader)
        : parts_(std::move(parts)), world_(world), reader_(reader) {}

    // Waits, because copies of loaded values to the state may still be in progress.
    ~CheckpointLoader() {
        std::string ignored;
        for (Stateful* part : parts_) note_error(ignored, [&] { part->settle(); });
    }

    CheckpointLoader(const CheckpointLoader&) = delete;
    CheckpointLoader& operator=(const CheckpointLoader&) = delete;

    // For all ranks. Returns the contributors' remarks, joined by "; ".
    std::string load(bool weights_only) {
        for (Stateful* part : parts_) part->find_state(world_, reader_, weights_only);
        world_.on_all_ranks([&] {
            for (Stateful* part : parts_) batches_.push_back(part->begin_load(reader_, weights_only));
            check_tensors();
        });
        for (const auto& of_part : batches_) {
            for (const PieceBatch& batch : of_part) room_ = std::max(room_, batch.bytes);
        }
        buffers_.emplace(2 * room_);
        for (size_t i = 0; i < parts_.size(); i++) load_part(*parts_[i], batches_[i]);
        std::string told;
        for (Stateful* part : parts_) {
            std::string of_part = part->end_load();
            told += (told.empty() || of_part.empty() ? "" : "; ") + of_part;
        }
        return told;
    }

    // Bytes that this rank has read from files, and bytes that it has sent to other ranks.
    uint64_t bytes_read() const { return bytes_read_; }
    uint64_t bytes_sent() const { return bytes_sent_; }

private:
    // Refuses a checkpoint with a tensor that no contributor has.
    void check_tensors() const {
        for (const CheckpointTensor& tensor : reader_.index().tensors) {
            auto is_of = [&](const Stateful* part) { return part->has(tensor.name); };
            if (std::ranges::any_of(parts_, is_of)) continue;
            fail("%s: contains tensor %s, which this model does not have; choose the options that it was "
                 "trained with",
                 reader_.folder().c_str(), printable(tensor.name).c_str());
        }
    }

    void load_part(Stateful& part, const std::vector<PieceBatch>& batches) {
        read_ahead(batches, 0);
        size_t rounds = (size_t)world_.largest((int)batches.size());
        for (size_t round = 0; round < rounds; round++) {
            Messages messages;
            world_.on_all_ranks([&] {
                if (round >= batches.size()) return;
                ahead_.finish();
                read_ahead(batches, round + 1);
                messages = part.take(batches[round], buffer(round));
                bytes_read_ += batches[round].bytes;
            });
            std::vector<std::string_view> to_each((size_t)world_.size());
            for (auto& [rank, message] : messages) {
                to_each[(size_t)rank] = message;
                bytes_sent_ += message.size();
            }
            std::vector<std::string> received = world_.exchange(to_each);
            for (const std::string& message : received) part.receive(message);
            part.settle();
        }
    }

    char* buffer(size_t number) { return buffers_->data + number % 2 * room_; }

    void read_ahead(const std::vector<PieceBatch>& batches, size_t number) {
        if (number >= batches.size()) return;
        ahead_.start([this, &batch = batches[number], to = buffer(number)]() mutable {
            for (const CheckpointPiece* piece : batch.pieces) {
                reader_.read(*piece, to);
                to += reader_.index().bytes_of(*piece);
            }
        });
    }

    const Contributors parts_;
    const World& world_;
    const CheckpointReader& reader_;
    std::vector<std::vector<PieceBatch>> batches_;  // per contributor, those this rank reads
    uint64_t room_ = 0;                             // bytes of the largest batch
    std::optional<HostArray<char>> buffers_;        // two: for the batch being delivered, and the next
    uint64_t bytes_read_ = 0, bytes_sent_ = 0;
    Background ahead_;  // reads the next batch
};

// For all ranks: sets the state to that of a checkpoint, bit for bit if both have the same format.
// weights_only: the optimizer state stays as it is. If the checkpoint belongs to another model or is damaged,
// all ranks throw the same CommonError, and the state cannot be used until another checkpoint is loaded,
// after world.recover(). Returns a text for the header of the run that lists what was converted; empty if
// nothing was.
inline std::string load_checkpoint(Contributors parts, const World& world, const CheckpointReader& reader,
                                   bool weights_only) {
    return CheckpointLoader(std::move(parts), world, reader).load(weights_only);
}
