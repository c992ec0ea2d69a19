/*
Device memory that NCCL takes for the groups of a mesh, before they exist.

A group talks over channels, each a thread block of its kernels, and has in each a connection to the next rank
of a ring. A connection has buffers for three protocols: 512 KiB for LL, 4.7 MiB for LL128 and 4 MiB for
Simple (NCCL's default NCCL_BUFFSIZE). Between machines, sender and receiver have such buffers each, for the
network card copies from one to the other; within a machine only the receiver has. A channel also lists all
ranks of its group.

This is an estimate on the safe side: NCCL may take fewer channels than it is allowed. When the mesh is made,
what it has really taken is compared with it (MemoryPlan::check_left).
*/
#pragma once

#include <algorithm>
#include <cstddef>

#include "comm/mesh.h"  // MeshShape, blocks_of_groups, blocks_of_links

constexpr size_t memory_of_connection = ((size_t)512 << 10) + 4915200 + ((size_t)4 << 20);
constexpr size_t memory_of_peer = 640;  // bytes for one channel

// per_machine: ranks.
inline size_t communicator_memory(const MeshShape& shape, int per_machine) {
    size_t bytes = 0;
    // stride: from a rank of the group to the next.
    auto add = [&](int ranks, int stride, int channels) {
        if (ranks == 1) return;
        bool crosses = (ranks - 1) * stride >= per_machine;
        bytes += (size_t)channels * ((crosses ? 2 : 1) * memory_of_connection + ranks * memory_of_peer);
    };
    int stage = shape.tp * shape.dp;
    add(shape.ranks(), 1, blocks_of_world);
    add(shape.tp, 1, blocks_of_groups);
    for (int twice = 0; twice < 2; twice++) add(shape.shard, shape.tp, blocks_of_groups);  // and gathers()
    add(shape.replicas(), shape.tp * shape.shard, blocks_of_groups);
    if (shape.copies < shape.tp) add(shape.copies, 1, blocks_of_groups);
    if (shape.homes && stage > std::max({shape.tp, shape.shard, shape.replicas()}))
        add(stage, 1, blocks_of_groups);
    if (shape.pp > 1) {
        for (int link = 0; link < 4; link++) add(2, stage, blocks_of_links);
        add(2, (shape.pp - 1) * stage, blocks_of_groups);  // ends()
    }
    return bytes;
}
