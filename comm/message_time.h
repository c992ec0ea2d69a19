/*
How long messages between ranks take, by the rates and latencies of a machine. Nodes are filled in the order
of ranks, so a group whose ranks are `stride` apart has several in a node if the stride is less than a node.

A ring (comm/rings.h) goes through a node once, in by the network of one of its ranks and out by another's:
ring after ring, each through other ranks, so a group gets as much of the network as its ranks in one node
have. Its steps come one after another, which is what latencies cost. Sums over all may go up and down a tree
instead: as many bytes, and two steps for each level between nodes (Sanders, Speck and Traff, "Two-Tree
Algorithms for Full Bandwidth Broadcast, Reduction and Scan", 2009).
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "comm/machine.h"     // Machine
#include "data/base/dtype.h"  // Dtype

// Ranks that talk together, each `stride` behind the one before.
struct RankGroup {
    int ranks = 1, stride = 1;

    // Groups side by side fill the places of nodes one behind another, and where these do not divide, some
    // groups begin within a node and end within another: the fewest ranks that any of them has in a node, and
    // the most nodes that any is in.
    int in_node(const Machine& machine) const {
        int places = places_of(machine), fewest = std::min(places, ranks);
        for (int begin = 0; begin < places; begin += std::gcd(ranks, places)) {
            int first = std::min(places - begin, ranks), last = (ranks - first) % places;
            fewest = std::min({fewest, first, last > 0 ? last : places});
        }
        return fewest;
    }
    int nodes(const Machine& machine) const {
        int places = places_of(machine), aligned = std::gcd(ranks, places);
        return 1 + ceil_div(ranks - aligned, places);
    }
    bool crosses_nodes(const Machine& machine) const { return ranks > 1 && nodes(machine) > 1; }

private:
    int places_of(const Machine& machine) const { return std::max(machine.node / stride, 1); }
};

// Bytes per second in one direction that each rank of the group has.
inline double group_rate(const Machine& machine, const RankGroup& group) {
    if (!group.crosses_nodes(machine)) return machine.links;
    return std::min(machine.links, group.in_node(machine) * machine.network);
}

// An all-gather or a reduce-scatter of `bytes`, the parts of all ranks together.
inline double gather_seconds(const Machine& machine, const RankGroup& group, double bytes) {
    if (group.ranks == 1) return 0;
    int steps = group.ranks - 1, to_nodes = group.crosses_nodes(machine) ? group.nodes(machine) : 0;
    to_nodes = std::min(to_nodes, steps);
    double latency = to_nodes * machine.network_latency + (steps - to_nodes) * machine.link_latency;
    return latency + bytes * (group.ranks - 1) / group.ranks / group_rate(machine, group);
}

// An all-reduce of `bytes` on each rank.
inline double sum_seconds(const Machine& machine, const RankGroup& group, double bytes) {
    if (group.ranks == 1) return 0;
    double ring = 2 * gather_seconds(machine, group, bytes);
    double levels = std::ceil(std::log2(group.nodes(machine)));
    double tree =
        2 * (levels * machine.network_latency + (group.in_node(machine) - 1) * machine.link_latency +
             bytes / group_rate(machine, group));
    return std::min(ring, tree);
}

// Each rank sends a part of `bytes` straight to each other one, those to other nodes all by its own network.
inline double exchange_seconds(const Machine& machine, const RankGroup& group, double bytes) {
    if (group.ranks == 1) return 0;
    int near = (group.crosses_nodes(machine) ? group.in_node(machine) : group.ranks) - 1,
        far = group.ranks - 1 - near;
    double part = bytes / group.ranks;
    return near * machine.link_latency + (far > 0 ? machine.network_latency : 0) +
           std::max(near * part / machine.links, far * part / machine.network);
}

// How long it takes to bring gradients together that travel in a type: a reduce-scatter and an all-reduce of
// so many, of which those in bf16 go as comm/gradient_sums.h sends them.
struct GradientMessages {
    const Machine& machine;
    Dtype dtype;

    double bytes(double gradients) const { return (double)dtype_size(dtype) * gradients; }
    double scatter_seconds(const RankGroup& group, double gradients) const {
        if (dtype == Dtype::fp32) return gather_seconds(machine, group, bytes(gradients));
        return exchange_seconds(machine, group, bytes(gradients)) + rounding(group, gradients);
    }
    double sum_seconds(const RankGroup& group, double gradients) const {
        if (dtype == Dtype::fp32) return ::sum_seconds(machine, group, bytes(gradients));
        return exchange_seconds(machine, group, bytes(gradients)) + 2 * rounding(group, gradients) +
               gather_seconds(machine, group, bytes(gradients));
    }

private:
    // Every gradient is read in fp32 and written in bf16, and read so again where it is added.
    double rounding(const RankGroup& group, double gradients) const {
        return group.ranks == 1 ? 0 : 8 * gradients / machine.streams;
    }
};

// A message from one rank to another.
inline double message_seconds(const Machine& machine, bool same_node, double bytes) {
    return same_node ? machine.link_latency + bytes / machine.links
                     : machine.network_latency + bytes / machine.network;
}
