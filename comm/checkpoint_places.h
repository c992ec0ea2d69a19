/*
Who writes which elements of a state, and who has them when they are read.

The part of a unit that a rank owns is repeated by its replicas, and tensor ranks and the two ends of a
pipeline have copies: so every replica writes one slice of the part, and of copies the first counts. A part
of 12 elements on 3 replicas, of which the second half is a copy that another tensor rank counts:

                elements     written
    replica 0   0 1 2 3      0 1 2 3
    replica 1   4 5 6 7      4 5
    replica 2   8 9 10 11    none

So every element of the model is written once, and as much by each rank as can be without sending anything.
A piece is read by one of the ranks that would write something of it: on the layout that it was saved with,
by the one that wrote it, and on another by the one that has the least to read so far.

A piece, and what a rank has of a tensor, are runs of boxes (data/checkpoint/box.h). That of a rank lies in a
unit, which shards cut into the parts that they own. Elements 2 to 8 of the box of columns 3 to 5, which the
second of 2 tensor ranks has, in a unit of 2 shards:

    the tensor         the unit there, and the parts of its shards
    . . . a b c        ... a b c d e f | g h i j k l ...
    . . . d e f                the piece
    . . . g h i                c d e f   g h i
    . . . j k l

So it has two PieceRuns: c d e f, at the end of what shard 0 owns, and g h i, at the beginning of shard 1's.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/mesh.h"              // MeshShape
#include "comm/parameters.h"        // ParameterLayout
#include "comm/zero.h"              // ZeroSettings
#include "data/checkpoint/index.h"  // CheckpointPiece

// The tensors of a model as a state with these settings stores them, in the order of each_of_model().
inline std::vector<CheckpointTensor> checkpoint_tensors(const ParameterLayout& layout,
                                                        const ZeroSettings& settings) {
    std::vector<CheckpointTensor> tensors;
    layout.each_of_model([&](const TensorRow& row, const std::string& name) {
        CheckpointTensor tensor = {name, row.shape(), {}};
        for (Slot slot : slots_of(settings, row)) tensor.slots[(size_t)slot] = dtype_of(slot);
        tensors.push_back(std::move(tensor));
    });
    return tensors;
}

// ----------------------------------------------------------------------------
// writing

// A piece, and where the rank has it: `at` counts from the beginning of the part that it owns of the unit.
struct OwnPiece {
    int unit;
    size_t at;
    CheckpointPiece piece;
    uint64_t bytes() const { return piece.count * dtype_size(dtype_of(piece.slot)); }
};

// What the rank at this position writes, slot after slot of each run of a tensor.
inline std::vector<OwnPiece> pieces_to_write(const ParameterLayout& layout, const MeshShape& shape,
                                             const MeshPosition& position, const ZeroSettings& settings) {
    std::vector<OwnPiece> pieces;
    std::map<std::string, uint32_t> numbers;
    layout.each_of_model(
        [&](const TensorRow&, const std::string& name) { numbers.emplace(name, (uint32_t)numbers.size()); });
    auto add = [&](int unit, size_t owned_begin, const TensorPart& part) {
        OwnPiece own = {unit, part.at - owned_begin, {}};
        own.piece.tensor = numbers.at(part.name);
        own.piece.column = part.column, own.piece.columns = part.columns;
        own.piece.begin = part.begin, own.piece.count = part.count;
        for (Slot slot : slots_of(settings, *part.row)) {
            own.piece.slot = slot;
            pieces.push_back(own);
        }
    };
    for (int unit : layout.held()) {
        size_t part_size = layout.unit_size(unit) / shape.shard, begin = position.shard * part_size;
        size_t slice = part_size / shape.replicas(), from = begin + position.replica * slice;
        each_piece(layout.counted_parts(unit, from, from + slice), largest_piece,
                   [&](const TensorPart& piece) { add(unit, begin, piece); });
    }
    return pieces;
}

// ----------------------------------------------------------------------------
// reading

// The ranks that share one part of a unit: all replicas at a place.
struct Owners {
    int tensor, shard, pipeline;
    int rank(int replica, const MeshShape& shape) const {
        return rank_of({.tensor = tensor, .shard = shard, .replica = replica, .pipeline = pipeline}, shape);
    }
};

// Elements that lie one after another in a piece, and in the part of a unit that ranks own.
struct PieceRun {
    size_t from;  // in the piece
    int unit;
    size_t at;  // in the owned part
    size_t count;
};

class TensorPlaces {
public:
    // layout_at(position) gives the layout of a rank; the index has all of its tensors.
    template <typename LayoutAt>
    TensorPlaces(const MeshShape& shape, LayoutAt&& layout_at, const CheckpointIndex& index)
        : shape_(shape), index_(index), held_(index.tensors.size()) {
        for (const CheckpointTensor& tensor : index.tensors) numbers_.emplace(tensor.name, numbers_.size());
        for (int pipeline = 0; pipeline < shape.pp; pipeline++) {
            for (int tensor = 0; tensor < shape.tp; tensor++)
                add(tensor, pipeline, layout_at(MeshPosition{.tensor = tensor, .pipeline = pipeline}));
        }
    }

    int ranks() const { return shape_.ranks(); }

    // The ranks that would write something of a piece.
    std::set<int> writers_of(const CheckpointPiece& piece) const {
        std::set<int> writers;
        for (const Held& held : held_[piece.tensor]) {
            if (!held.counted) continue;
            size_t slice = held.part_size / shape_.replicas();
            int last = -1;
            each_run(held, piece, [&](const Owners& owners, const PieceRun& run) {
                for (size_t r = run.at / slice; r <= (run.at + run.count - 1) / slice; r++) {
                    int rank = owners.rank((int)r, shape_);
                    if (rank != last) writers.insert(rank);  // rows of one matrix mostly go to the same
                    last = rank;
                }
            });
        }
        return writers;
    }

    // Calls visit(owners, run) for all who own something of a piece.
    template <typename Visit>
    void each_owned(const CheckpointPiece& piece, Visit&& visit) const {
        for (const Held& held : held_[piece.tensor]) each_run(held, piece, visit);
    }

private:
    // Held is what the unit at one place has of a tensor, however that is cut into shards.
    struct Held {
        int tensor, pipeline, unit;
        bool counted;
        size_t part_size;  // of the unit
        size_t at;         // in the unit
        BoxRun run;
    };

    void add(int tensor, int pipeline, const ParameterLayout& layout) {
        for (int unit : layout.held()) {
            std::vector<UnitRange> counted = layout.counted(unit);
            for (const TensorPart& part : layout.parts(unit, 0, layout.unit_size(unit))) {
                held_[numbers_.at(part.name)].push_back({tensor, pipeline, unit, is_in_one(counted, part.at),
                                                         layout.unit_size(unit) / shape_.shard, part.at,
                                                         part});
            }
        }
    }

    // Calls visit(owners, run) for what is held of a piece, cut where the next shard begins.
    template <typename Visit>
    void each_run(const Held& held, const CheckpointPiece& piece, Visit&& visit) const {
        uint64_t width = index_.tensors[piece.tensor].width();
        piece.run().each_common(held.run, width, [&](uint64_t from, uint64_t there, uint64_t count) {
            for (size_t at = held.at + there, end = at + count; at < end;) {
                size_t shard = at / held.part_size, inside = at % held.part_size;
                size_t here = std::min(end - at, held.part_size - inside);
                visit(Owners{held.tensor, (int)shard, held.pipeline},
                      PieceRun{from, held.unit, inside, here});
                from += here, at += here;
            }
        });
    }

    const MeshShape shape_;
    const CheckpointIndex& index_;
    std::map<std::string, size_t> numbers_;  // of the tensors
    std::vector<std::vector<Held>> held_;    // of each tensor
};

// Deals the pieces of a checkpoint to those who read them. It deals the same on every rank that gives it the
// same pieces.
class PieceReaders {
public:
    explicit PieceReaders(const TensorPlaces& places) : places_(places), elements_((size_t)places.ranks()) {}

    // The rank that reads the next piece.
    int take(const CheckpointPiece& piece) {
        std::set<int> writers = places_.writers_of(piece);
        int reader = *std::ranges::min_element(writers, {}, [&](int rank) { return elements_[rank]; });
        elements_[reader] += piece.count;
        return reader;
    }

private:
    const TensorPlaces& places_;
    std::vector<uint64_t> elements_;  // for each rank to read, so far
};
