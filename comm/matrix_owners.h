/*
Whole matrices for an optimizer that needs them, assembled from parts that many ranks hold.

Each matrix of a block (queries, keys and values separately) has one owner among all ranks of its stage. The
owner gathers the matrix's update from the tensor ranks and shards of its own replica, transforms it
(Optimizer::transform), and sends the parts to the ranks of all replicas. The owner sees the same matrix
however it is cut, and transforms it for all replicas, so the result does not depend on the cut, and replicas
stay bit-identical, even on different machines. Owners follow from the layout only.

    shard 0    Q Q K K V       sends    Q's owner is shard 0       Q' Q' K' K' V'
    shard 1    V F F F F       -->      F's owner is shard 1  ...  V' F' F' F' F'

Units are processed in rounds. A round has as few units as give every rank a matrix, so that all ranks work
and little memory is needed. Within a round, the most expensive remaining matrix is assigned to the rank with
the least load so far. Parts are sent as floatX.
*/
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "comm/memory.h"            // Arena
#include "comm/collectives.h"       // Communicator
#include "comm/mesh_shape.h"        // MeshShape
#include "comm/parameters.h"        // ParameterLayout
#include "kernels/matrix_part.cuh"  // MatrixPart, copy_part, convert
#include "kernels/optimizer.h"      // Optimizer, TransformScratch

// ----------------------------------------------------------------------------
// which rank holds what

// One rank of each replica holds this part of a matrix.
struct HeldPart {
    int holder;   // its number among the ranks of a replica that share the matrix
    bool counts;  // set for exactly one of several copies
    size_t at;    // offset in the holder's shard of the unit
    MatrixPart part;
    size_t arrives = 0;  // offset among the parts of the matrix, at its owner
};

// A matrix of a block, and its parts sorted by holder. Blocks that are alike share a BlockMatrix.
struct BlockMatrix {
    size_t rows, cols;
    std::vector<HeldPart> parts = {};

    bool is_tall() const { return rows > cols; }
    size_t size() const { return rows * cols; }
    // FLOPs of the Newton-Schulz steps, up to a factor.
    double cost() const { return (double)size() * (double)std::min(rows, cols); }
    size_t arriving() const { return parts.back().arrives + parts.back().part.count; }
    auto parts_of(int holder) const { return std::ranges::equal_range(parts, holder, {}, &HeldPart::holder); }
};

struct OwnedMatrix {
    int unit;
    std::shared_ptr<const BlockMatrix> whole;
    int owner = 0;       // its number among the ranks of the stage, replica by replica
    size_t arrives = 0;  // offset of its parts in the owner's arrays_.arrived

    const BlockMatrix* operator->() const { return whole.get(); }
};

// Units whose matrices are transformed at the same time.
struct MatrixRound {
    std::vector<int> units;
    std::vector<OwnedMatrix> matrices;
};

// Ranks of a replica that share a matrix are numbered along these axes, shard by shard.
constexpr AxisSet sharing_axes = shard_axes | Axis::tensor;

// Returns the matrices of one unit. layouts: one for each tensor rank
inline std::vector<std::shared_ptr<const BlockMatrix>>
matrices_of(const std::vector<ParameterLayout>& layouts, int unit, const MeshShape& shape) {
    std::map<int, BlockMatrix> by_section;
    size_t part_size = layouts[0].unit_size(unit) / shape.shards();
    for (const ParameterLayout& there : layouts) {
        for (const SectionPart& held :
             there.section_parts(unit, there.parts(unit, 0, there.unit_size(unit)))) {
            if (!held.of_block_matrix()) continue;
            BlockMatrix& matrix =
                by_section.try_emplace(held.section, BlockMatrix{held.rows, held.row->cols}).first->second;
            for (size_t done = 0; done < held.count;) {
                size_t at = held.at + done, shard = at / part_size, inside = at % part_size;
                size_t count = std::min(held.count - done, part_size - inside);
                MatrixPart part = {
                    matrix.rows, matrix.cols,     held.column, held.columns, held.begin - held.start + done,
                    count,       matrix.is_tall()};
                auto holder = moved_along(shard_axes, (int)shard,
                                          MeshPosition().with(Axis::tensor, there.place.tensor), shape);
                matrix.parts.push_back({index_along(sharing_axes, holder, shape), held.counts, inside, part});
                done += count;
            }
        }
    }
    std::vector<std::shared_ptr<const BlockMatrix>> matrices;
    for (auto& [section, matrix] : by_section) {
        std::ranges::stable_sort(matrix.parts, {}, &HeldPart::holder);
        size_t arrives = 0;
        for (HeldPart& held : matrix.parts) held.arrives = std::exchange(arrives, arrives + held.part.count);
        matrices.push_back(std::make_shared<BlockMatrix>(std::move(matrix)));
    }
    return matrices;
}

// Assigns each matrix of a round an owner, and its parts an offset in the owner's memory.
inline void choose_owners(MatrixRound& round, int ranks) {
    using Load = std::pair<double, int>;  // (load, rank): the least load first, then the lowest rank
    std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
    ranks = std::min(ranks, (int)round.matrices.size());  // the others get none
    for (int rank = 0; rank < ranks; rank++) loads.push({0, rank});
    std::vector<size_t> room(ranks);
    std::vector<OwnedMatrix*> by_cost;
    for (OwnedMatrix& matrix : round.matrices) by_cost.push_back(&matrix);
    std::ranges::stable_sort(by_cost, std::greater(), [](const OwnedMatrix* m) { return (*m)->cost(); });
    for (OwnedMatrix* matrix : by_cost) {
        auto [load, rank] = loads.top();
        loads.pop();
        loads.push({load + (*matrix)->cost(), rank});
        matrix->owner = rank;
        matrix->arrives = std::exchange(room[rank], room[rank] + (*matrix)->arriving());
    }
}

// The rounds of a stage, the same on all its ranks. Empty if the optimizer transforms no matrices.
inline std::vector<MatrixRound> matrix_rounds(const ParameterLayout& layout, const MeshShape& shape,
                                              TransformScratch scratch) {
    if (!scratch) return {};
    int ranks = shape.along(stage_axes);
    std::vector<MatrixRound> rounds;
    std::vector<ParameterLayout> layouts;
    for (int tensor = 0; tensor < shape.tp; tensor++) layouts.push_back(layout.of_tensor_rank(tensor));
    std::vector<std::shared_ptr<const BlockMatrix>> matrices;
    for (int before = -1; int unit : layout.held()) {
        if (before < 0 || !layout.are_alike(unit, before)) matrices = matrices_of(layouts, unit, shape);
        before = unit;
        bool joins = !rounds.empty() && (int)rounds.back().matrices.size() < ranks;
        if (!joins) rounds.emplace_back();
        rounds.back().units.push_back(unit);
        for (const auto& matrix : matrices) rounds.back().matrices.push_back({unit, matrix});
    }
    for (MatrixRound& round : rounds) choose_owners(round, ranks);
    return rounds;
}

// ----------------------------------------------------------------------------
// memory

// Each array is sized for the rank of the stage that needs the most of it.
struct MatrixArrays {
    floatX *own, *arrived, *matrix, *scratch;

    MatrixArrays(Arena& memory, const ParameterLayout& layout, const MeshShape& shape,
                 TransformScratch scratch_of)
        : MatrixArrays(memory, matrix_rounds(layout, shape, scratch_of), shape, scratch_of) {}
    MatrixArrays(Arena& memory, const std::vector<MatrixRound>& rounds, const MeshShape& shape,
                 TransformScratch scratch_of) {
        size_t most_own = 0, most_arrived = 0, largest = 0, most_scratch = 0;
        for (const MatrixRound& round : rounds) {
            std::vector<size_t> of_holder(shape.along(sharing_axes));
            std::map<const BlockMatrix*, size_t> blocks;
            for (const OwnedMatrix& matrix : round.matrices) {
                auto [less, more] = std::minmax(matrix->rows, matrix->cols);
                largest = std::max(largest, matrix->size());
                most_scratch = std::max(most_scratch, scratch_of(less, more, memory.element_bytes()));
                most_arrived = std::max(most_arrived, matrix.arrives + matrix->arriving());
                blocks[matrix.whole.get()]++;
            }
            for (auto [matrix, count] : blocks)
                for (const HeldPart& held : matrix->parts) of_holder[held.holder] += count * held.part.count;
            most_own = std::max(most_own, std::ranges::max(of_holder));
        }
        memory.of("whole matrices");
        own = memory.take_elements(most_own);
        arrived = memory.take_elements(most_arrived);
        matrix = memory.take_elements(largest);
        scratch = memory.take_elements(most_scratch);
    }
};

// ----------------------------------------------------------------------------
// to the owner and back

class MatrixOwners {
public:
    // The memory must outlive this. stage: the group of all ranks of the stage.
    MatrixOwners(Arena& memory, const ParameterLayout& layout, const MeshShape& shape,
                 const MeshPosition& position, const Communicator& stage, TransformScratch scratch_of,
                 cudaStream_t stream)
        : shape_(shape),
          stage_(stage),
          replica_(index_along(replica_axes, position, shape)),
          me_(index_along(sharing_axes, position, shape)),
          me_in_stage_(replica_ * shape.along(sharing_axes) + me_),
          rounds_(matrix_rounds(layout, shape, scratch_of)),
          arrays_(memory, rounds_, shape, scratch_of),
          stream_(stream) {
        if (!rounds_.empty() && stage.size() != shape.along(stage_axes))
            fail("mesh: has no group for the ranks of a stage, which send each other matrices; see "
                 "MeshShape::stage_group");
    }

    const std::vector<MatrixRound>& rounds() const { return rounds_; }

    // For all ranks of a stage: replaces updates by transformed ones. grads_of(unit): this rank's shard of
    // the unit's updates. Updates stay unchanged if the scale (1) is NaN.
    template <typename GradsOf, typename Transform>
    void transform_at_owners(const MatrixRound& round, GradsOf&& grads_of, const float* scale,
                             Transform&& transform) {
        each_own(round, [&](const OwnedMatrix& matrix, const HeldPart& held, floatX* own) {
            convert(own, grads_of(matrix.unit) + held.at, held.part.count, stream_);
        });
        travel(round, true);
        for (const OwnedMatrix& matrix : round.matrices) {
            if (matrix.owner != me_in_stage_) continue;
            auto [less, more] = std::minmax(matrix->rows, matrix->cols);
            for (const HeldPart& held : matrix->parts) {
                if (held.counts)
                    copy_part<PartCopy::into_matrix>(arrays_.matrix, arrived(matrix, held), held.part,
                                                     stream_);
            }
            transform(arrays_.matrix, (int)less, (int)more, arrays_.scratch, stream_);
            for (const HeldPart& held : matrix->parts)
                copy_part<PartCopy::out_of_matrix>(arrays_.matrix, arrived(matrix, held), held.part, stream_);
        }
        travel(round, false);
        each_own(round, [&](const OwnedMatrix& matrix, const HeldPart& held, floatX* own) {
            convert(grads_of(matrix.unit) + held.at, (const floatX*)own, held.part.count, stream_, scale);
        });
    }

private:
    // Calls visit(matrix, part, its place in arrays_.own) for each part that this rank holds in a round.
    template <typename Visit>
    void each_own(const MatrixRound& round, Visit&& visit) const {
        floatX* own = arrays_.own;
        for (const OwnedMatrix& matrix : round.matrices) {
            for (const HeldPart& held : matrix->parts_of(me_)) {
                visit(matrix, held, own);
                own += held.part.count;
            }
        }
    }

    floatX* arrived(const OwnedMatrix& matrix, const HeldPart& held) const {
        return arrays_.arrived + matrix.arrives + held.arrives;
    }
    int replica_of(const OwnedMatrix& matrix) const { return matrix.owner / shape_.along(sharing_axes); }

    // to_owner: sends the parts of each matrix to its owner, only from the owner's replica, and only one of
    // several copies. Otherwise, sends the parts back to every rank of every replica that holds them.
    void travel(const MatrixRound& round, bool to_owner) {
        auto goes = [&](const OwnedMatrix& matrix, const HeldPart& held, int replica) {
            return !to_owner || (held.counts && replica == replica_of(matrix));
        };
        each_own(round, [&](const OwnedMatrix& matrix, const HeldPart& held, floatX* own) {
            if (matrix.owner != me_in_stage_ || !goes(matrix, held, replica_)) return;
            floatX* there = arrived(matrix, held);
            copy_async(to_owner ? there : own, to_owner ? own : there, held.part.count, stream_);
        });
        if (stage_.size() == 1) return;
        grouped({stage_}, [&] {
            each_own(round, [&](const OwnedMatrix& matrix, const HeldPart& held, floatX* own) {
                if (matrix.owner == me_in_stage_ || !goes(matrix, held, replica_)) return;
                pass(to_owner, own, held.part.count, replica_of(matrix),
                     matrix.owner % shape_.along(sharing_axes));
            });
            for (const OwnedMatrix& matrix : round.matrices) {
                if (matrix.owner != me_in_stage_) continue;
                for (const HeldPart& held : matrix->parts) {
                    for (int replica = 0; replica < shape_.replicas(); replica++) {
                        bool own = held.holder == me_ && replica == replica_;
                        if (!own && goes(matrix, held, replica))
                            pass(!to_owner, arrived(matrix, held), held.part.count, replica, held.holder);
                    }
                }
            }
        });
    }

    // Sends to a rank of this stage, or receives from it.
    void pass(bool send, floatX* data, size_t count, int replica, int other) {
        MeshPosition first = moved_along(replica_axes, replica, {}, shape_);  // stage 0: rank == group rank
        int rank = rank_of(moved_along(sharing_axes, other, first, shape_), shape_);
        if (send)
            stage_.send((const floatX*)data, count, rank, Traffic::updates, stream_);
        else
            stage_.receive(data, count, rank, stream_, Traffic::updates);
    }

    const MeshShape shape_;
    const Communicator stage_;
    const int replica_, me_;  // me_: this rank's number among the sharers of its replica,
    const int me_in_stage_;   // and its number among all ranks of the stage
    const std::vector<MatrixRound> rounds_;
    const MatrixArrays arrays_;
    cudaStream_t stream_;
};
