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
unit, which shards cut into parts, and their replicas into slices. Elements 2 to 8 of the box of columns 3 to
5, which the second of 2 tensor ranks has, in a unit of 2 slices:

    the tensor         the unit there, and its slices
    . . . a b c        ... a b c d e f | g h i j k l ...
    . . . d e f                the piece
    . . . g h i                c d e f   g h i
    . . . j k l

So it has two PieceRuns: c d e f, at the end of the first slice, and g h i, at the beginning of the second.
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

// The numbers of a model's tensors in checkpoint_tensors().
using TensorNumbers = std::unordered_map<std::string, uint32_t>;

inline TensorNumbers tensor_numbers(const ParameterLayout& layout) {
    TensorNumbers numbers;
    layout.each_of_model(
        [&](const TensorRow&, const std::string& name) { numbers.emplace(name, (uint32_t)numbers.size()); });
    return numbers;
}

// The pieces that the rank at this position writes, slot after slot of each run of a tensor.
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
        size_t part_size = layout.unit_size(unit) / shape.shard, begin = position[Axis::shard] * part_size;
        auto [from, to] =
            replica_slice(part_size, shape.replicas(), index_along(replica_axes, position, shape));
        each_piece(layout.parts(unit, begin + from, begin + to), largest_piece,
                   [&](const TensorPart& piece) { add(unit, begin, piece); });
    }
    return pieces;
}

// Host memory that saving in the background takes on each rank.
inline size_t staging_bytes(const ParameterLayout& layout, const MeshShape& shape,
                            const ZeroSettings& settings, size_t element_bytes = sizeof(floatX)) {
    size_t bytes = 0;
    for (Slot slot : slots_of(settings)) {
        for (int unit : layout.held()) {
            size_t slice = largest_slice(layout.unit_size(unit) / shape.shard, shape.replicas());
            size_t width = slot == Slot::weight ? element_bytes : sizeof(float);
            bytes += capacity_of_slot(settings, slot, layout, unit, slice) * width;
        }
    }
    return bytes;
}

// ----------------------------------------------------------------------------
// reading

// Elements that lie one after another in a piece, and in the part of a unit that ranks own.
struct PieceRun {
    size_t from;  // in the piece
    int unit;
    size_t at;  // in the owned part
    size_t count;
};

class TensorPlaces {
public:
    // layout_at(position) gives the layout of a rank; the index has all of its tensors, and may have others.
    template <typename LayoutAt>
    TensorPlaces(const MeshShape& shape, LayoutAt&& layout_at, const CheckpointIndex& index)
        : shape_(shape), index_(index), held_(index.tensors.size()) {
        for (const CheckpointTensor& tensor : index.tensors)
            numbers_.emplace(tensor.name, (uint32_t)numbers_.size());
        for (int pipeline = 0; pipeline < shape.pp; pipeline++) {
            for (int tensor = 0; tensor < shape.tp; tensor++)
                add(tensor, pipeline, layout_at(first_of_stage(pipeline).with(Axis::tensor, tensor)));
        }
    }

    const MeshShape& shape() const { return shape_; }

    // The stage that has those who write a tensor; others may have copies. -1: it is not of the model.
    int stage_of(uint32_t tensor) const {
        const std::vector<Held>& held = held_[tensor];
        return held.empty() ? -1 : std::ranges::find_if(held, &Held::counted)->pipeline;
    }

    // Calls visit(rank) for the ranks that would write something of a piece, some more than once. Of a box
    // that is narrower than what they have, ranks with slices smaller than a row may be among them that have
    // nothing of it.
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

    // Calls visit(rank, run) for all that have something of a piece in their slices, copies too.
    template <typename Visit>
    void each_slice(const CheckpointPiece& piece, Visit&& visit) const {
        for (const Held& held : held_[piece.tensor]) each_run(held, piece, visit);
    }

private:
    // Held is what the unit at one place has of a tensor, however that is cut into shards.
    struct Held {
        int tensor, pipeline, unit;
        bool counted;
        size_t part;  // elements of the unit that each shard has
        size_t at;    // in the unit
        BoxRun run;
    };

    // The slices of a unit are numbered shard by shard.
    size_t slice_at(const Held& held, size_t at) const {
        int replicas = shape_.replicas();
        return at / held.part * (size_t)replicas + (size_t)replica_at(held.part, replicas, at % held.part);
    }
    int rank_of_slice(const Held& held, size_t number) const {
        int replicas = shape_.replicas();
        MeshPosition at = first_of_stage(held.pipeline).with(Axis::tensor, held.tensor);
        at[Axis::shard] = (int)number / replicas;
        return rank_of(moved_along(replica_axes, (int)number % replicas, at, shape_), shape_);
    }

    void add(int tensor, int pipeline, const ParameterLayout& layout) {
        for (int unit : layout.held()) {
            for (const TensorPart& part : layout.parts(unit, 0, layout.unit_size(unit))) {
                held_[numbers_.at(part.name)].push_back({tensor, pipeline, unit, part.counts,
                                                         layout.unit_size(unit) / shape_.shard, part.at,
                                                         part});
            }
        }
    }

    // Calls visit(rank, run) for what is held of a piece, cut where the next slice begins.
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
    std::vector<std::vector<Held>> held_;  // one entry for each tensor
};

// Deals the pieces of a checkpoint to those who read them: each to the rank that has the fewest elements so
// far, the first of them, among those that would write something of it. Those are all of one stage, so the
// ranks of a stage need only deal that stage's pieces, and each of them deals the same.
class PieceReaders {
public:
    explicit PieceReaders(const TensorPlaces& places)
        : places_(places), elements_((size_t)places.shape().ranks()) {}

    // The rank that reads the next piece.
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
    std::vector<uint64_t> elements_;  // for each rank to read, so far
};

// The parts of a checkpoint's pieces that this rank reads, in batches no larger than one piece may be.
// wanted(slot) tells whether a slot is read at all.
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
