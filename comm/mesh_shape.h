/*
The mesh: every rank has a place along four axes, and talks to those that differ from it in one of them.

      tensor    shares each layer                 fastest: neighbours in number, so in the same machine
      shard     shares the state that ZeRO cuts
      replica   repeats the shard group
      pipeline  has other layers                  slowest

Shard and replica together are the data ranks, which train on different sequences. 8 ranks with --tp 2
--shard-group 2 --dp 4:

                    shard 0      shard 1
      replica 0   |  0   1  |  |  2   3  |        tensor  {0 1} {2 3} {4 5} {6 7}
      replica 1   |  4   5  |  |  6   7  |        shard   {0 2} {1 3} {4 6} {5 7}     data {0 2 4 6} {1 3 5 7}
                  tensor 0 1                      replica {0 4} {1 5} {2 6} {3 7}

Members of a group are ordered by rank.
*/
#pragma once

#include <cstddef>
#include <vector>

// Ranks along each axis; the world has tp * dp * pp. shard divides dp.
struct MeshShape {
    int tp = 1, pp = 1, dp = 1, shard = 1;
    int copies = 1;     // tensor ranks that share a key/value head
    bool ring = false;  // the last pipeline stage is followed by the first, as the interleaved schedule needs
    bool homes = false;  // all ranks of a stage send each other matrices (comm/matrix_homes.h)
    int replicas() const { return dp / shard; }
    int ranks() const { return tp * dp * pp; }
};

// The largest that its groups send.
struct MeshTraffic {
    size_t unit = 1;          // parameters that are gathered, and gradients that are reduced, at once
    size_t rows = 0;          // activations that tensor ranks bring together, and sum
    size_t sent = 1;          // activations that go from stage to stage
    bool all_to_all = false;  // gradients travel in bf16 (comm/gradient_sums.h)
};

// Thread blocks that a kernel of NCCL may take on a GPU. Those that wait for another rank hold theirs, so all
// that can wait at the same time, and a product, must fit: four links, and three groups. All ranks together
// only add up a few numbers, and more blocks would take memory for each of them.
constexpr int blocks_of_links = 4, blocks_of_groups = 16, blocks_of_world = 1;

struct MeshPosition {
    int tensor = 0, shard = 0, replica = 0, pipeline = 0;
    bool operator==(const MeshPosition&) const = default;
};

inline MeshPosition position_of(int rank, const MeshShape& shape) {
    MeshPosition position;
    position.tensor = rank % shape.tp;
    rank /= shape.tp;
    position.shard = rank % shape.shard;
    rank /= shape.shard;
    position.replica = rank % shape.replicas();
    position.pipeline = rank / shape.replicas();
    return position;
}

inline int rank_of(const MeshPosition& position, const MeshShape& shape) {
    int rank = position.pipeline;
    rank = rank * shape.replicas() + position.replica;
    rank = rank * shape.shard + position.shard;
    return rank * shape.tp + position.tensor;
}

// Axes of the mesh as bits. A group is the ranks that differ in some axes and agree in the others.
enum MeshAxis { tensor_axis = 1, shard_axis = 2, replica_axis = 4, pipeline_axis = 8 };

// The members of the group of `rank` that runs along `axes`, in order.
inline std::vector<int> group_of(int rank, int axes, const MeshShape& shape) {
    MeshPosition mine = position_of(rank, shape);
    std::vector<int> members;
    for (int other = 0; other < shape.ranks(); other++) {
        MeshPosition theirs = position_of(other, shape);
        int differing = (theirs.tensor != mine.tensor ? tensor_axis : 0) |
                        (theirs.shard != mine.shard ? shard_axis : 0) |
                        (theirs.replica != mine.replica ? replica_axis : 0) |
                        (theirs.pipeline != mine.pipeline ? pipeline_axis : 0);
        if ((differing & ~axes) == 0) members.push_back(other);
    }
    return members;
}
