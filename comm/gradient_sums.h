/*
Sums of gradients over data ranks: in fp32, as they are stored, by the group's own collectives; or, for slow
networks, with addends that are sent as bf16, at half the size.

In a ring that sums bf16, every rank rounds the partial sum. Here each rank sends its addends of a part
directly to the rank that sums that part. That rank adds in fp32: its own addend first, then the others in
rank order (as in Jin et al., "MegaScale-MoE: Large-Scale Communication-Efficient Training of
Mixture-of-Experts Models in Production", 2025):

    reduce-scatter    each addend of another rank is rounded once, with a relative error of at most 2^-8
    all-reduce        the sum is rounded too, so that all ranks have the same bits

A rank sends the same number of elements as in a ring: (n-1)/n of the buffer, or twice that for an all-reduce.
But if a machine has several ranks of a group, a ring's data leave the machine once, but these messages leave
it once for each rank. Such ranks should form a shard group, so that only the sums of their parts leave the
machine (hybrid sharding).
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "comm/collectives.h"        // Communicator
#include "comm/memory.h"             // Arena
#include "comm/mesh_shape.h"         // MeshShape
#include "comm/parameters.h"         // ParameterLayout, part_alignment
#include "comm/zero_arrays.h"        // ZeroSettings
#include "kernels/bf16_addends.cuh"  // round_addends, add_addends, widen_sum

// Returns how many of `count` elements each of `ranks` ranks sums. The last ranks may have fewer, or none.
inline size_t summed_part(size_t count, int ranks) {
    return ceil_div(ceil_div(count, (size_t)ranks), part_alignment) * part_alignment;
}

// Staging buffers for one unit's gradients as they are sent and received; null if these are sent in fp32, or
// not at all.
struct GradientSumArrays {
    uint16_t *sent = nullptr, *received = nullptr;

    GradientSumArrays(Arena& memory, const ParameterLayout& layout, const MeshShape& mesh,
                      const ZeroSettings& settings) {
        if (!settings.training || settings.reduce_dtype == Dtype::fp32 ||
            mesh.shards() * mesh.replicas() == 1)
            return;
        size_t room = 0;
        for (int unit : layout.held()) {
            size_t size = layout.unit_size(unit), part = size / (size_t)mesh.shards();
            int replicas = mesh.replicas();
            room = std::max({room, size, summed_part(part, replicas) * (size_t)replicas});
        }
        memory.of("gradients on their way");
        sent = memory.take<uint16_t>(room);
        received = memory.take<uint16_t>(room);
    }
};

// A rank's sums. Those with addends in bf16 share staging buffers, so they must all be on one stream.
class GradientSums {
public:
    // The memory must outlive this.
    explicit GradientSums(const GradientSumArrays& arrays) : arrays_(arrays) {}

    // data (ranks, part): replaces part `rank` by its sum over the ranks, and leaves the rest as it was.
    void reduce_scatter(const Communicator& group, float* data, size_t part, cudaStream_t stream) const {
        int ranks = group.size();
        if (!arrays_.sent || ranks == 1) return group.reduce_scatter(data, part, kind, stream);
        round_addends(arrays_.sent, data, part * (size_t)ranks, stream);
        group.all_to_all(arrays_.sent, arrays_.received, part, kind, stream);
        add_addends(data + (size_t)group.rank() * part, {arrays_.received, part, ranks, group.rank()}, part,
                    stream);
    }

    // Replaces data (count) by its sum over the ranks, the same bits on all of them.
    void all_reduce(const Communicator& group, float* data, size_t count, cudaStream_t stream) const {
        int ranks = group.size();
        if (!arrays_.sent || ranks == 1) return group.all_reduce(data, count, kind, stream);
        size_t part = summed_part(count, ranks), begin = std::min((size_t)group.rank() * part, count),
               own = std::min(part, count - begin);
        round_addends(arrays_.sent, data, count, stream);
        group.all_to_all(arrays_.sent, arrays_.received, part, kind, stream);
        add_addends(data + begin, {arrays_.received, part, ranks, group.rank()}, own, stream);
        round_addends(arrays_.sent + begin, data + begin, own, stream);
        group.all_gather(arrays_.sent, part, kind, stream);
        widen_sum(data, arrays_.sent, count, stream);
    }

private:
    static constexpr auto kind = Traffic::gradients;

    const GradientSumArrays arrays_;
};
