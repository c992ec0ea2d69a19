/*
Estimates how long the entries of a ledger (kernels/ledger.h) take, from the rates that are expected of a
machine (kernels/cards.h), before anything is measured. In this order: messages between ranks, products,
attention, kernels that read and write, launches and calls.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>

#include "comm/mesh_shape.h"         // block_bandwidth
#include "data/base/error.h"         // fail
#include "data/run/flight_record.h"  // Operation
#include "kernels/cards.h"           // Machine
#include "kernels/ledger.h"          // Ledger

// ----------------------------------------------------------------------------
// messages
//
// How long messages between ranks take, given the rates and latencies of a machine. Nodes are filled in the
// order of ranks, so a group whose ranks are `stride` apart has several ranks in a node if the stride is
// smaller than a node.
//
// A ring (comm/rings.h) passes through a node once: it enters over the network connection of one rank and
// leaves over that of another. Several rings use different ranks, so a group gets the network bandwidth of
// all its ranks in one node. The steps of a ring come one after another, and each costs a latency.
// All-reduces may go up and down a tree instead, which sends the same bytes, but in only two steps for each
// level between nodes (Sanders, Speck and Traff, "Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction
// and Scan", 2009).

// How the ranks of a group are distributed over nodes, which are filled in the order of ranks. For a pair of
// ranks of two stages: if any of the pairs side by side crosses nodes, the others wait for it, so all are
// assumed to cross. If groups do not fill nodes evenly, some of them begin in the middle of a node; in_node
// is then the fewest ranks that any group has in a node, and nodes the most nodes that any group spans.
struct InNodes {
    int in_node, nodes;
};

inline InNodes in_nodes(const Machine& machine, const GroupOfRanks& group) {
    if (int pairs = group.side_by_side; pairs > 0) {
        int from = group.first - group.first % pairs;
        bool crosses = false;
        for (int rank = from; rank < from + std::min(pairs, machine.node); rank++)
            crosses |= rank / machine.node != (rank + group.stride) / machine.node;
        return crosses ? InNodes{1, 2} : InNodes{2, 1};
    }
    int ranks = group.ranks, places = std::max(machine.node / group.stride, 1),
        aligned = std::gcd(ranks, places), fewest = std::min(places, ranks);
    for (int begin = 0; begin < places; begin += aligned) {
        int first = std::min(places - begin, ranks), last = (ranks - first) % places;
        fewest = std::min({fewest, first, last > 0 ? last : places});
    }
    return {fewest, 1 + ceil_div(ranks - aligned, places)};
}

// Bytes per second, in one direction, for each rank of the group.
inline double group_rate(const Machine& machine, const GroupOfRanks& group) {
    auto [in_node, nodes] = in_nodes(machine, group);
    return nodes == 1 ? machine.node_bandwidth : std::min(machine.node_bandwidth, in_node * machine.network);
}

// Seconds of an all-gather or a reduce-scatter of `bytes`, the parts of all ranks together.
inline double gather_seconds(const Machine& machine, const GroupOfRanks& group, double bytes) {
    if (group.ranks == 1) return 0;
    int steps = group.ranks - 1, nodes = in_nodes(machine, group).nodes,
        to_nodes = nodes == 1 ? 0 : std::min(nodes, steps);
    double latency = to_nodes * machine.network_latency + (steps - to_nodes) * machine.link_latency;
    return latency + bytes * (group.ranks - 1) / group.ranks / group_rate(machine, group);
}

// Seconds of an all-reduce of `bytes` on each rank.
inline double sum_seconds(const Machine& machine, const GroupOfRanks& group, double bytes) {
    if (group.ranks == 1) return 0;
    double ring = 2 * gather_seconds(machine, group, bytes);
    auto [in_node, nodes] = in_nodes(machine, group);
    double tree = 2 * (std::ceil(std::log2(nodes)) * machine.network_latency +
                       (in_node - 1) * machine.link_latency + bytes / group_rate(machine, group));
    return std::min(ring, tree);
}

// Seconds of an all-to-all: each rank sends a part of `bytes` directly to each other rank, and the parts for
// other nodes over its own network connection.
inline double exchange_seconds(const Machine& machine, const GroupOfRanks& group, double bytes) {
    if (group.ranks == 1) return 0;
    auto [in_node, nodes] = in_nodes(machine, group);
    int near = (nodes == 1 ? group.ranks : in_node) - 1, far = group.ranks - 1 - near;
    double part = bytes / group.ranks;
    return near * machine.link_latency + (far > 0 ? machine.network_latency : 0) +
           std::max(near * part / machine.node_bandwidth, far * part / machine.network);
}

// Seconds of a message from one rank to another. On cards, the thread blocks that move it limit the rate.
inline double message_seconds(const Machine& machine, const GroupOfRanks& pair, double bytes) {
    bool same_node = in_nodes(machine, pair).nodes == 1;
    double rate = same_node ? machine.node_bandwidth : machine.network;
    if (pair.blocks > 0 && machine.capability > 0) rate = std::min(rate, pair.blocks * block_bandwidth);
    return (same_node ? machine.link_latency : machine.network_latency) + bytes / rate;
}

// ----------------------------------------------------------------------------
// kernels
//
// A product is as fast as the machine's large ones, less what its tiles waste: at the edges, in the last wave
// if it is incomplete, and at the start of each sum. A kernel that reads and writes reaches a share of the
// memory bandwidth. Attention reaches the rate of its inner loop, less what it loses to the unused halves of
// tiles at the diagonal, and to the ends of each row of tiles.

// ----------------------------------------------------------------------------
// products

// FLOP/s of a product. On a host, only short sums are slower. On a card, the rate is that of the best of the
// tiles that libraries have for Hopper. With few tiles, a sum may be split over multiprocessors, as long as
// its parts fit in the workspace.
inline double expected_product_rate(const Machine& machine, const ProductShape& p) {
    constexpr double workspace = 256 << 20;
    constexpr struct {
        double rows, columns, share;
    } tiles[] = {{128, 256, 1}, {256, 128, 1},    {192, 128, 0.96}, {128, 192, 0.96},
                 {256, 192, 1}, {128, 160, 0.96}, {128, 128, 0.93}};
    constexpr double split_share = 0.95;
    if (machine.element_bytes == sizeof(float))
        return machine.gemm_flops * p.sums / (p.sums + machine.gemm_half_k);
    double best = 0;
    for (auto [rows, columns, share] : tiles) {
        double down = std::ceil(p.rows / rows), across = std::ceil(p.columns / columns),
               count = down * across;
        double used = p.rows * p.columns / (down * rows * across * columns);
        double most = count >= 3 * machine.multiprocessors
                          ? 1
                          : std::clamp(workspace / (4 * p.rows * p.columns), 1.0, 16.0);
        for (int parts = 1; parts <= (int)most; parts++) {
            double waves = count * parts / machine.multiprocessors, sums = p.sums / parts;
            best = std::max(best, share * used * waves / std::ceil(waves) * sums /
                                      (sums + machine.gemm_half_k) * (parts > 1 ? split_share : 1));
        }
    }
    // fp8 has twice the peak rate, less the cost of feeding the tensor cores and of summing in more bits.
    double numbers = !p.fp8 ? 1 : p.fast_sums ? 1.62 : 1.45;
    return machine.gemm_flops * numbers * best;
}

// ----------------------------------------------------------------------------
// attention

// FLOP/s of attention. Whole rows of tiles reach a share of the inner loop's rate, which is lower for small
// heads: they have fewer products for each exponential. How much the order of tiles costs is simulated with
// the kernels' own functions, by test/kernels/test_attention_order.cu. Small heads get the shares that give
// 300 TFLOP/s forward and 280 backward at T = 1,024 on an H200, where the order of tiles leaves 0.94 and
// 0.895 of the rate of such loops.
inline double expected_attention_rate(const Machine& machine, const AttentionWork& work) {
    constexpr double tile = 128, of_diagonal = 0.5, of_ends = 1;
    double loop = work.forward ? machine.attention_forward : machine.attention_backward;
    if (work.head_size <= 64) loop *= work.forward ? 0.65 : 0.855;
    double scheduled = work.forward ? 0.98 : work.mean_keys > 768 ? 0.97 : 0.9;
    double tiles = work.mean_keys / tile;
    return loop * scheduled * tiles / (tiles + of_diagonal + of_ends);
}

// ----------------------------------------------------------------------------
// kernels that read and write

// The share of the memory bandwidth that a launcher's kernels reach. The tools in test/tools show from the
// machine code that the kernels move whole vectors (check_sass.py), and how many issue slots their loops use
// (sass_loops.json). A multiprocessor executes 128 thread instructions per clock, in which memory delivers
// about 20 bytes to it.
inline double expected_stream_share(std::string_view launcher) {
    constexpr struct {
        std::string_view launcher;
        double share;
    } shares[] = {
        {"attention_backward", 0.8},       // its statistics, of short rows; and sums for a bias
        {"classifier", 0.82},              // two passes over a row, the second in the L2 cache
        {"embedding_forward", 0.6},        // rows from all over a table
        {"embedding_backward", 0.6},       // likewise
        {"matmul_backward_weight", 0.75},  // gradients of biases, which are short
        {"matmul_backward_bias", 0.75},    // likewise
        {"fp8_quantize", 0.88},            // about 14 instructions for an element's 4 bytes
        {"norm_backward", 0.82},           // in one pass, but it waits for the sums of a row
        {"", 0.95},                        // fills
    };
    for (auto [name, share] : shares)
        if (name == launcher) return share;
    return 0.88;
}

// ----------------------------------------------------------------------------
// launches

// The machine that is left for other work while communication holds multiprocessors (at most half of them).
inline Machine machine_without(Machine machine, int multiprocessors) {
    double rest = machine.multiprocessors - std::min(multiprocessors, machine.multiprocessors / 2);
    for (double* rate : {&machine.gemm_flops, &machine.attention_forward, &machine.attention_backward})
        *rate *= rest / machine.multiprocessors;
    machine.multiprocessors = (int)rest;
    return machine;
}

struct StepTime {
    double products = 0, attention = 0, streams = 0;  // seconds
    double all() const { return products + attention + streams; }
    StepTime& operator+=(const StepTime& other) {
        products += other.products, attention += other.attention, streams += other.streams;
        return *this;
    }
    StepTime operator*(double times) const { return {products * times, attention * times, streams * times}; }
};

inline StepTime launch_time(const Machine& machine, const LedgerEntry& entry) {
    const LaunchCost& cost = entry.cost;
    if (entry.seconds > 0) return {.streams = entry.seconds};
    if (cost.place == LaunchCost::host)
        return {.streams = (cost.read + cost.written) / machine.host_bandwidth};
    if (cost.place == LaunchCost::host_link) return {.streams = cost.read / machine.host_link};
    if (cost.place == LaunchCost::disk) return {.streams = (cost.read + cost.written) / machine.disk};
    std::string_view launcher = entry.launcher ? entry.launcher : "";
    double memory = (cost.read + cost.written) / machine.memory_bandwidth,
           launches = cost.launches * machine.launch;
    const Machine rest = machine_without(machine, entry.spared);
    if (cost.product.sums > 0) {
        double fused = !cost.product.gelu ? 1 : launcher == "matmul_gelu_forward" ? 0.88 : 0.85;
        double seconds = cost.flops() / (fused * expected_product_rate(rest, cost.product));
        return {.products = std::max(seconds, memory / 0.95) + launches};
    }
    if (cost.attention.flops > 0)
        return {.attention = cost.flops() / expected_attention_rate(rest, cost.attention) + launches};
    return {.streams = memory / expected_stream_share(launcher) + launches};
}

// Bytes that each rank of the group sends to others.
inline double bytes_of_rank(const GroupCall& call) {
    double of_others = call.bytes * (call.group.ranks - 1.0) / call.group.ranks;
    switch ((Operation)call.operation) {
    case Operation::all_reduce:
        return 2 * of_others;
    case Operation::send:
    case Operation::broadcast:
        return call.bytes;
    case Operation::receive:
        return 0;
    default:
        return of_others;
    }
}

// Seconds of a call, without its latency if it begins together with the call before.
inline double call_seconds(const Machine& machine, const GroupCall& call) {
    const GroupOfRanks& group = call.group;
    if (call.joins) {
        GroupCall alone = call, nothing = call;
        alone.joins = nothing.joins = false, nothing.bytes = 0;
        return call_seconds(machine, alone) - call_seconds(machine, nothing);
    }
    switch ((Operation)call.operation) {
    case Operation::all_gather:
    case Operation::reduce_scatter:
        return gather_seconds(machine, group, call.bytes);
    case Operation::all_reduce:
        return sum_seconds(machine, group, call.bytes);
    case Operation::all_to_all:
        return exchange_seconds(machine, group, call.bytes);
    case Operation::send:
    case Operation::receive:
        return message_seconds(machine, group, call.bytes);
    default:
        fail("plan: a call of kind %d has no formula for its time; see call_seconds", call.operation);
    }
}

// Seconds of all launches and calls of a ledger, one after another.
inline double seconds_of(const Machine& machine, const Ledger& book) {
    double seconds = 0;
    book.each([&](const LedgerEntry& entry) {
        if (entry.kind == LedgerEntry::launch) seconds += launch_time(machine, entry).all();
        if (entry.kind == LedgerEntry::call) seconds += call_seconds(machine, entry.call_of);
    });
    return seconds;
}
