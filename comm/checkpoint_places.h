/*
Which ranks write which elements of a state, and which ranks need them when they are read.

A rank's replicas own the same part of a unit, so each writes one slice of it. Tensor ranks and the two ends
of a pipeline also have copies of some tensors, and only the first copy is written. A part of 12 elements on 3
replicas, whose second half is a copy of what another tensor rank writes:

                elements     written
    replica 0   0 1 2 3      0 1 2 3
    replica 1   4 5 6 7      4 5
    replica 2   8 9 10 11    none

So every element of the model is written once, and the ranks share the writing as evenly as is possible
without sending anything. A piece is read by one of the ranks that would write part of it: on the layout that
it was saved with, by the one that wrote it, and on another layout by the one with the least to read so far.

A piece is a run of a box (data/checkpoint/box.h), and so is what a rank has of a tensor. The rank's run lies
in a unit, which is cut into parts for the shards, and each part into slices for the replicas. For example, a
piece with elements 2 to 8 of the box of columns 3 to 5 (held by the second of 2 tensor ranks), in a unit of 2
slices:

    the tensor         the unit there, and its slices
    . . . a b c        ... a b c d e f | g h i j k l ...
    . . . d e f                the piece
    . . . g h i                c d e f   g h i
    . . . j k l

The piece has two PieceRuns: c d e f, at the end of the first slice, and g h i, at the start of the second.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/mesh_shape.h"        // MeshShape
#include "comm/parameters.h"        // ParameterLayout
#include "comm/stateful.h"          // PieceBatch
#include "comm/zero_arrays.h"       // ZeroSettings
#include "data/checkpoint/index.h"  // CheckpointPiece

// Returns the tensors of a model as a state with these settings stores them, in the order of each_of_model().
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

// A piece, and its place on the rank: `at` is its offset in the part of the unit that the rank owns.
struct OwnPiece {
    int unit;
    size_t at;
    CheckpointPiece piece;
    uint64_t bytes() const { return piece.count * dtype_size(dtype_of(piece.slot)); }
};

// The index of each tensor of a model in checkpoint_tensors(), by name.
using TensorNumbers = std::unordered_map<std::string, uint32_t>;

inline TensorNumbers tensor_numbers(const ParameterLayout& layout) {
    TensorNumbers numbers;
    layout.each_of_model(
        [&](const TensorRow&, const std::string& name) { numbers.emplace(name, (uint32_t)numbers.size()); });
    return numbers;
}

// Returns the pieces that the rank at this position writes: for each run of a tensor, one for each slot.
inline std::vector<OwnPiece> pieces_to_write(const ParameterLayout& layout, const TensorNumbers& numbers,
                                             const MeshShape& shape, const MeshPosition& position,
                                             const ZeroSettings& settings) {
    std::vector<OwnPiece> pieces;
    auto add = [&](int unit, size_t owned_begin, const TensorPart& part) {
        if (!part.counts) return;
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
        size_t part_size = layout.unit_size(unit) / shape.shards(),
               begin = index_along(shard_axes, position, shape) * part_size;
        auto [from, to] =
            replica_slice(part_size, shape.replicas(), index_along(replica_axes, position, shape));
        each_piece(layout.parts(unit, begin + from, begin + to), largest_piece,
                   [&](const TensorPart& piece) { add(unit, begin, piece); });
    }
    return pieces;
}

// Returns the most bytes of host memory that saving in the background uses on a rank.
inline size_t staging_bytes(const ParameterLayout& layout, const MeshShape& shape,
                            const ZeroSettings& settings, size_t element_bytes = sizeof(floatX)) {
    size_t bytes = 0;
    for (Slot slot : slots_of(settings)) {
        for (int unit : layout.held()) {
            size_t slice = largest_slice(layout.unit_size(unit) / shape.shards(), shape.replicas());
            size_t width = slot == Slot::weight ? element_bytes : sizeof(float);
            bytes += capacity_of_slot(settings, slot, layout, unit, slice) * width;
        }
    }
    return bytes;
}

// ----------------------------------------------------------------------------
// reading

// Elements that are contiguous both in a piece and in the part of a unit that a rank owns.
struct PieceRun {
    size_t from;  // in the piece
    int unit;
    size_t at;  // in the owned part
    size_t count;
};

class TensorPlaces {
public:
    // layout_at(position) returns the layout of a rank. The index must list all tensors of the model, and may
    // list others.
    template <typename LayoutAt>
    TensorPlaces(const MeshShape& shape, LayoutAt&& layout_at, const CheckpointIndex& index)
        : shape_(shape), index_(index), held_(index.tensors.size()) {
        for (const CheckpointTensor& tensor : index.tensors)
            numbers_.emplace(tensor.name, (uint32_t)numbers_.size());
        for (int shard = 0; shard < shape.shards(); shard++) {
            MeshPosition at = moved_along(shard_axes, shard, {}, shape);
            for (int replica = 0; replica < shape.replicas(); replica++)
                after_first_.push_back(rank_of(moved_along(replica_axes, replica, at, shape), shape));
        }
        for (int pipeline = 0; pipeline < shape.pp; pipeline++) {
            for (int tensor = 0; tensor < shape.tp; tensor++)
                add(tensor, pipeline, layout_at(first_of_stage(pipeline).with(Axis::tensor, tensor)));
        }
    }

    const MeshShape& shape() const { return shape_; }

    // Returns the stage whose ranks write a tensor; another stage may have a copy. -1: the model has no such
    // tensor.
    int stage_of(uint32_t tensor) const {
        const std::vector<Held>& held = held_[tensor];
        return held.empty() ? -1 : std::ranges::find_if(held, &Held::counted)->pipeline;
    }

    // Calls visit(rank) for the ranks that would write part of a piece, for some more than once. If the
    // piece's box is narrower than that of a rank and slices are smaller than a row, it may also visit ranks
    // that hold no part of the piece.
    template <typename Visit>
    void each_writer(const CheckpointPiece& piece, Visit&& visit) const {
        for (const Held& held : held_[piece.tensor]) {
            BoxRun::Extent extent = held.counted ? piece.run().extent_in(held.run) : BoxRun::Extent();
            if (extent.empty()) continue;
            size_t last = slice_at(held, held.at + extent.end - 1);
            for (size_t slice = slice_at(held, held.at + extent.begin); slice <= last; slice++)
                visit(rank_of_slice(held, slice));
        }
    }

    // Calls visit(rank, run) for every run of a piece that a rank has in its slice, copies included.
    template <typename Visit>
    void each_slice(const CheckpointPiece& piece, Visit&& visit) const {
        for (const Held& held : held_[piece.tensor]) each_run(held, piece, visit);
    }

private:
    // The part of a tensor that a unit has on one tensor rank of one stage, before the unit is cut into
    // shards.
    struct Held {
        int first_rank, pipeline, unit;  // the rank has the first slice of the unit
        bool counted;
        size_t part;  // elements of the unit in each shard
        size_t at;    // in the unit
        BoxRun run;
    };

    // The slices of a unit are numbered shard by shard.
    size_t slice_at(const Held& held, size_t at) const {
        int replicas = shape_.replicas();
        return at / held.part * (size_t)replicas + (size_t)replica_at(held.part, replicas, at % held.part);
    }
    int rank_of_slice(const Held& held, size_t number) const {
        return held.first_rank + after_first_[number];
    }

    void add(int tensor, int pipeline, const ParameterLayout& layout) {
        int first_rank = rank_of(first_of_stage(pipeline).with(Axis::tensor, tensor), shape_);
        for (int unit : layout.held()) {
            for (const TensorPart& part : layout.parts(unit, 0, layout.unit_size(unit))) {
                held_[numbers_.at(part.name)].push_back({first_rank, pipeline, unit, part.counts,
                                                         layout.unit_size(unit) / shape_.shards(), part.at,
                                                         part});
            }
        }
    }

    // Calls visit(rank, run) for the runs of a piece that lie in `held`, cut at slice boundaries.
    template <typename Visit>
    void each_run(const Held& held, const CheckpointPiece& piece, Visit&& visit) const {
        uint64_t width = index_.tensors[piece.tensor].width();
        piece.run().each_common(held.run, width, [&](uint64_t from, uint64_t there, uint64_t count) {
            for (size_t at = held.at + there, end = at + count; at < end;) {
                size_t slice = slice_at(held, at), inside = at % held.part;
                int replica = (int)(slice % (size_t)shape_.replicas());
                size_t rest = replica_slice(held.part, shape_.replicas(), replica).end - inside;
                size_t here = std::min(end - at, rest);
                visit(rank_of_slice(held, slice), PieceRun{from, held.unit, inside, here});
                from += here, at += here;
            }
        });
    }

    const MeshShape shape_;
    const CheckpointIndex& index_;
    TensorNumbers numbers_;
    std::vector<int> after_first_;         // by slice: its rank minus that of the first slice
    std::vector<std::vector<Held>> held_;  // one entry for each tensor
};

// Assigns the pieces of a checkpoint to the ranks that read them. Among the ranks that would write part of a
// piece, the one with the fewest elements so far reads it (ties go to the lowest rank). All of these ranks
// belong to one stage, so a rank needs to assign only its stage's pieces, and all ranks of the stage get the
// same result.
class PieceReaders {
public:
    explicit PieceReaders(const TensorPlaces& places)
        : places_(places), elements_((size_t)places.shape().ranks()) {}

    // Returns the rank that reads the next piece.
    int take(const CheckpointPiece& piece) {
        int reader = -1;
        places_.each_writer(piece, [&](int rank) {
            if (reader < 0 || std::pair(elements_[rank], rank) < std::pair(elements_[reader], reader))
                reader = rank;
        });
        elements_[reader] += piece.count;
        return reader;
    }

private:
    const TensorPlaces& places_;
    std::vector<uint64_t> elements_;  // assigned to each rank so far
};

// Returns the pieces of a checkpoint that `rank` reads, in batches no larger than the largest piece allowed.
// wanted(slot) returns whether a slot is read at all.
template <typename Wanted>
std::vector<PieceBatch> pieces_to_read(const TensorPlaces& places, const CheckpointIndex& index, int rank,
                                       Wanted&& wanted) {
    std::vector<PieceBatch> batches;
    PieceReaders readers(places);
    int stage = position_of(rank, places.shape())[Axis::pipeline];
    for (const CheckpointPiece& piece : index.pieces) {
        if (!wanted(piece.slot) || places.stage_of(piece.tensor) != stage) continue;
        if (readers.take(piece) != rank) continue;
        bool fits = !batches.empty() && batches.back().elements + piece.count <= largest_piece;
        if (!fits) batches.emplace_back();
        batches.back().pieces.push_back(&piece);
        batches.back().elements += piece.count;
        batches.back().bytes += index.bytes_of(piece);
    }
    return batches;
}
