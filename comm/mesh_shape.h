/*
The mesh: every rank has a position along each axis (data/run/axes.h), and is in groups with the ranks that
differ from it only in some of the axes.

Shards and replicas together are the data ranks, which train on different sequences. The context ranks of a
data rank have different tokens of the same sequences. ZeRO cuts state over both shard and context ranks. For
example, 8 ranks with --tp 2 --shard-group 2 --dp 4:

                    shard 0      shard 1
      replica 0   |  0   1  |  |  2   3  |        tensor  {0 1} {2 3} {4 5} {6 7}
      replica 1   |  4   5  |  |  6   7  |        shard   {0 2} {1 3} {4 6} {5 7}     data {0 2 4 6} {1 3 5 7}
                  tensor 0 1                      replica {0 4} {1 5} {2 6} {3 7}

Members of a group are ordered by rank. The table below defines the groups: the mesh uses it to make, connect
and record them, and the memory plan to count them.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "data/run/axes.h"
#include "kernels/ledger.h"  // GroupOfRanks

using MeshPosition = PerAxis;

inline constexpr AxisSet data_axes = {Axis::shard, Axis::replica};
inline constexpr AxisSet shard_axes = {Axis::context, Axis::shard};      // ranks that ZeRO cuts state over
inline constexpr AxisSet replica_axes = Axis::replica;                   // ranks that hold the same shard
inline constexpr AxisSet stage_axes = all_axes.without(Axis::pipeline);  // ranks of one pipeline stage

// Numbers of ranks, as the options give them; the world has tp * cp * dp * pp. shard divides dp.
struct MeshShape {
    int tp = 1, cp = 1, pp = 1, dp = 1, shard = 1;
    int copies = 1;     // tensor ranks that share a key/value head
    bool ring = false;  // the last pipeline stage is followed by the first, as the interleaved schedule needs
    bool stage_group = false;  // all ranks of a stage send each other matrices, or rows of tables
    bool tables = false;       // and, at the same time, ask each other for rows

    int replicas() const { return along(replica_axes); }
    int shards() const { return along(shard_axes); }  // parts into which ZeRO cuts a unit
    // The number of ranks along each axis, and along several.
    operator PerAxis() const { return {{tp, cp, shard, dp / shard, pp}}; }
    int along(AxisSet axes) const { return size_along(axes, *this); }
    int ranks() const { return along(all_axes); }
};

inline MeshPosition first_of_stage(int stage) {
    return MeshPosition().with(Axis::pipeline, stage);
}

// The largest messages that the groups of a mesh send, in elements.
struct MeshTraffic {
    size_t unit = 1;          // parameters that are gathered, and gradients that are reduced, at once
    size_t rows = 0;          // activations that tensor ranks gather, and sum
    size_t keys = 0;          // keys and values that context ranks gather, and their gradients
    size_t sent = 1;          // activations that a stage sends to the next
    bool all_to_all = false;  // gradients are sent in bf16 (comm/gradient_sums.h)
};

// Thread blocks that an NCCL kernel may use on a GPU. A kernel that waits for another rank holds its blocks,
// so all kernels that can wait at the same time (of four links, and of the groups tensor, context, shard and
// gathers) must fit beside a matrix product. The world group only sums a few numbers, and more blocks would
// take memory for each of its ranks.
//
// A stage posts its receives as soon as there is room, so the links' blocks hold multiprocessors for whole
// passes. One block would do if passes always hid the messages; but stages wait for messages that go around
// from the last stage to the first.
constexpr int blocks_of_links = 2, blocks_of_groups = 16, blocks_of_world = 1;

// Bytes per second that one block moves: an estimate.
constexpr double block_bandwidth = 20e9;

// ----------------------------------------------------------------------------
// groups

enum class MeshGroup { world, tensor, context, shard, gathers, replica, stage, asks, copies, embedding };

// The kinds of calls that a group makes, as bits.
namespace Calls {
constexpr unsigned none = 0;
constexpr unsigned sums = 1, scatters = 2, gathers = 4;  // on whole units; sums also on single numbers
constexpr unsigned exchanges = 8;                        // all-to-all of gradients in bf16
constexpr unsigned moves_rows = 16;  // all-gather of activations, reduce-scatter of their sums
constexpr unsigned messages = 32;    // each rank sends to each other rank
constexpr unsigned moves_keys = 64;  // all-gather of keys and values, reduce-scatter of their gradients
}  // namespace Calls

struct GroupRow {
    const char* name;
    AxisSet axes;  // its ranks lie along these
    unsigned calls = Calls::none;
    unsigned calls_in_bf16 = Calls::none;  // and these, if gradients are sent in bf16
    int blocks = blocks_of_groups;
    bool alone = false;  // it has its own communicator, even if another group has the same ranks
    // Returns the size of a group, whose ranks are neighbors along the axes. Null: all ranks along them.
    int (*factor)(const MeshShape&) = nullptr;
    bool ends = false;  // the group is only the first and the last rank along the axes
};

inline constexpr auto mesh_groups = std::to_array<GroupRow>({
    // For a few numbers.
    {.name = "world", .axes = all_axes, .blocks = blocks_of_world, .alone = true},
    {.name = "tensor", .axes = Axis::tensor, .calls = Calls::sums | Calls::moves_rows},
    // A communicator of its own: keys and values must not wait for gradients or parameters.
    {.name = "context", .axes = Axis::context, .calls = Calls::moves_keys | Calls::messages, .alone = true},
    {.name = "shard",
     .axes = shard_axes,
     .calls = Calls::sums | Calls::scatters,
     .calls_in_bf16 = Calls::exchanges},
    // The shard group once more: NCCL runs the calls of one communicator one after another, and parameters
    // are gathered while gradients are reduced.
    {.name = "gathers", .axes = shard_axes, .calls = Calls::sums | Calls::gathers, .alone = true},
    {.name = "replica",
     .axes = replica_axes,
     .calls = Calls::sums,
     .calls_in_bf16 = Calls::gathers | Calls::exchanges},
    // All ranks that hold parts of the same layers, which send each other matrices and rows of tables. In the
    // order of rank_of() on the first stage.
    {.name = "stage",
     .axes = stage_axes,
     .calls = Calls::messages,
     .factor = [](const MeshShape& shape) { return shape.stage_group ? shape.along(stage_axes) : 1; }},
    // The stage group once more: while rows are sent, ranks ask each other for the rows of the next step.
    {.name = "asks",
     .axes = stage_axes,
     .calls = Calls::messages,
     .blocks = blocks_of_world,
     .alone = true,
     .factor = [](const MeshShape& shape) { return shape.tables ? shape.along(stage_axes) : 1; }},
    // Tensor ranks with copies of the same heads. A group of one if each has its own, or all have the same.
    {.name = "copies",
     .axes = Axis::tensor,
     .calls = Calls::sums,
     .factor = [](const MeshShape& shape) { return shape.copies < shape.tp ? shape.copies : 1; }},
    // The first and the last stage, which share the tied embedding.
    {.name = "ends", .axes = Axis::pipeline, .calls = Calls::sums, .ends = true},
});

inline int ranks_of(const GroupRow& row, const MeshShape& shape) {
    int all = shape.along(row.axes);
    return row.ends ? std::min(all, 2) : row.factor ? row.factor(shape) : all;
}

// The members of the group of `rank`, in order.
inline std::vector<int> members_of(const GroupRow& row, int rank, const MeshShape& shape) {
    std::vector<int> line = group_of(rank, row.axes, shape), members;
    int ranks = ranks_of(row, shape), all = (int)line.size();
    int index = index_along(row.axes, position_of(rank, shape), shape);
    if (row.ends && index != 0 && index != all - 1) return {rank};
    if (row.ends) return all == 1 ? line : std::vector{line.front(), line.back()};
    auto first = line.begin() + (index - index % ranks);
    return {first, first + ranks};
}

// Describes a group without listing its members, for a ledger. The axes of a group are consecutive, so its
// members are evenly spaced.
inline GroupOfRanks line_of(size_t group, const MeshPosition& position, const MeshShape& shape) {
    const GroupRow& row = mesh_groups[group];
    int ranks = ranks_of(row, shape), all = shape.along(row.axes);
    int index = index_along(row.axes, position, shape), first = row.ends ? 0 : index - index % ranks;
    if (ranks == 1 || (row.ends && index != 0 && index != all - 1)) return {};
    auto rank_at = [&](int index) { return rank_of(moved_along(row.axes, index, position, shape), shape); };
    int second = row.ends ? all - 1 : first + 1;
    int pairs = row.ends ? shape.along(stage_axes) : 0;
    return {(int)group, rank_at(first), rank_at(second) - rank_at(first), ranks, pairs};
}

// The axes along which the group contains all ranks. Empty: its members must be listed.
inline AxisSet axes_of(const GroupRow& row, const MeshShape& shape) {
    return ranks_of(row, shape) == shape.along(row.axes) ? row.axes : AxisSet();
}

// The last rank of a group minus its first.
inline int span_of(const GroupRow& row, const MeshShape& shape) {
    int last = (row.ends ? shape.along(row.axes) : ranks_of(row, shape)) - 1;
    return rank_of(moved_along(row.axes, last, {}, shape), shape);
}

// The number of the first group that has the same ranks: the two share one communicator. Only axes with more
// than one rank distinguish groups.
inline size_t served_by(size_t group, const MeshShape& shape) {
    auto axes_of_all = [&](const GroupRow& row) {
        AxisSet axes = row.axes;
        for (Axis axis : every_axis)
            if (shape.along(axis) == 1) axes = axes.without(axis);
        bool all = !row.alone && ranks_of(row, shape) == shape.along(axes);
        return all ? axes : AxisSet();
    };
    AxisSet axes = axes_of_all(mesh_groups[group]);
    for (size_t first = 0; first < group && axes.bits() != 0; first++)
        if (axes_of_all(mesh_groups[first]) == axes) return first;
    return group;
}
