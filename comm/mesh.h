/*
The communicators of the mesh (comm/mesh_shape.h): one for each group that this rank is in.

Groups are made by splits of the world in one order that follows from the shape alone, so ranks cannot
disagree, and each split is one exchange: no barriers.
*/
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "comm/memory.h"      // size_text
#include "comm/mesh_shape.h"  // MeshShape, MeshPosition
#include "comm/world.h"
#include "data/base/deadlines.h"
#include "data/base/error.h"

// The most numbers that a connection is tried with: NCCL chooses its ways by size, messages over MPI do not.
#ifdef RANKS_USE_NCCL
constexpr size_t most_to_connect = SIZE_MAX;
#else
constexpr size_t most_to_connect = 4096;
#endif

// The links of a pipeline stage. Each link goes one way between two neighbours, which have it for
// themselves: NCCL runs the calls of one communicator one after another, and what goes one way must not wait
// for the other. Where there is no neighbour, there is a group of one.
struct MeshLinks {
    static constexpr int sender = 0, receiver = 1;  // the ranks of every link
    Communicator forward_in, forward_out;           // activations: from the stage before, to the stage behind
    Communicator backward_in, backward_out;         // gradients: from the stage behind, to the stage before
};

// The communicators of this rank. Must end before the World it is made from.
class Mesh {
public:
    // A world of one.
    Mesh() = default;

    // For all ranks. shape.ranks() must be the size of the world.
    Mesh(const World& world, const MeshShape& shape, cudaStream_t stream, const MeshTraffic& traffic = {})
        : shape(shape) {
        if (shape.ranks() != world.size() || shape.shard < 1 || shape.dp % shape.shard) {
            fail("mesh: tp %d * pp %d * dp %d in shard groups of %d does not fit %d processes; see "
                 "complete_layout",
                 shape.tp, shape.pp, shape.dp, shape.shard, world.size());
        }
        position = position_of(world.rank(), shape);
        if (world.size() == 1) return;
        auto start = std::chrono::steady_clock::now();
        Phase phase("mesh");
        WaitsForOthers wait;  // the libraries wait where nobody can look
        size_t free_before = free_memory();
        world_ = Communicator::of_world(world, stream, blocks_of_world);
        groups_ = {{0, world_}};
        tensor_ = group(tensor_axis);
        shard_ = group(shard_axis);
        if (shape.shard > 1) gathers_ = make_group(shard_axis);
        replica_ = group(replica_axis);
        if (shape.homes) stage_ = group(tensor_axis | shard_axis | replica_axis);
        if (shape.copies > 1 && shape.copies < shape.tp) {
            int color = (world.rank() - position.tensor) + position.tensor / shape.copies;
            copies_ = add_group(world_.split(color, position.tensor, blocks_of_groups));
        }
        if (shape.pp > 1) {
            make_links(stream, traffic.sent);
            make_ends();
        }
        connect(stream, traffic);
        size_t free_behind = free_memory();
        memory = free_before - std::min(free_before, free_behind);
        groups_built = (int)groups_.size();
        build_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }

    MeshShape shape;
    MeshPosition position;

    // Groups along the same axes are one communicator, gathers() aside; a group of one talks to nobody. That
    // of all ranks is for a few numbers.
    const Communicator& world() const { return world_; }
    const Communicator& tensor() const { return tensor_; }
    const Communicator& shard() const { return shard_; }
    // The shard group once more: NCCL runs the calls of one communicator one after another, and parameters
    // are gathered while gradients are reduced.
    const Communicator& gathers() const { return gathers_; }
    const Communicator& replica() const { return replica_; }  // those that hold the same shard
    // Tensor ranks that have copies of the same heads; a group of one if each has its own or all the same.
    const Communicator& copies() const { return copies_; }
    // All ranks that have parts of the same layers, where matrices travel; shard by shard, as rank_of() has
    // them on the first stage.
    const Communicator& stage() const { return stage_; }
    const MeshLinks& links() const { return links_; }
    // The first stage and the last, which share what lies at both ends of a model. A group of one between
    // them.
    const Communicator& ends() const { return ends_; }

    // Among the data ranks.
    int data_rank() const { return position.replica * shape.shard + position.shard; }

    int groups_built = 0;      // communicators of this rank
    double build_seconds = 0;  // time that this rank took to make the groups
    size_t memory = 0;         // bytes of a device's own memory that they took

    // Throws Error if the library has reported one for any group.
    void check() const {
        for (const Group& group : groups_) group.communicator.check();
    }

    // Ends what the groups have under way on streams, undone, so that streams come to their end. The groups
    // are of no use afterwards.
    void abort() const {
        for (const Group& group : groups_) group.communicator.abort();
    }

    // Names the groups of this rank for its record, which begins afterwards.
    void record_groups() const {
        auto add = [&](const char* name, const Communicator& group, std::vector<int> ranks, int axes) {
            if (group.size() == 1) return;
            int size = group.size();
            group.record_as(recorder.add_group({name, std::move(ranks), size, axes}));
        };
        const int me = rank_of(position, shape), stage = tensor_axis | shard_axis | replica_axis;
        const int all = stage | pipeline_axis;
        auto along = [&](int axes) { return group_of(me, axes, shape); };
        // A communicator that serves as several groups goes by the first of these names.
        const struct {
            const char* name;
            const Communicator& group;
            int axes;
        } rows[] = {{"gathers", gathers_, shard_axis},
                    {"stage", stage_, stage},
                    {"world", world_, all},
                    {"replica", replica_, replica_axis},
                    {"shard", shard_, shard_axis},
                    {"tensor", tensor_, tensor_axis}};
        for (auto& [name, group, axes] : rows) add(name, group, along(axes), axes);
        int first_copy = me - position.tensor % shape.copies;
        std::vector<int> copies;
        for (int i = 0; i < copies_.size(); i++) copies.push_back(first_copy + i);
        add("copies", copies_, copies, 0);
        auto at_stage = [&](int number) {
            MeshPosition there = position;
            there.pipeline = (number + shape.pp) % shape.pp;
            return rank_of(there, shape);
        };
        add("ends", ends_, {at_stage(0), at_stage(-1)}, 0);
        int before = at_stage(position.pipeline - 1), behind = at_stage(position.pipeline + 1);
        add("forward in", links_.forward_in, {before, me}, 0);
        add("forward out", links_.forward_out, {me, behind}, 0);
        add("backward in", links_.backward_in, {behind, me}, 0);
        add("backward out", links_.backward_out, {me, before}, 0);
    }

    // Lines for the header of the run: what the ranks are, and who talks to whom.
    std::string picture() const {
        std::string result =
            text("%d rank%s = %d replica%s x %d shard%s (tensor %d, pipeline %d)", shape.ranks(),
                 plural(shape.ranks()), shape.replicas(), plural(shape.replicas()), shape.shard,
                 plural(shape.shard), shape.tp, shape.pp);
        if (groups_built) {
            result += text("; %d group%s built in %.0f ms", groups_built, plural(groups_built),
                           build_seconds * 1e3);
            if (memory > 0) result += text(", which take %s", size_text(memory).c_str());
        }
        struct {
            const char* name;
            int axis;
        } rows[] = {{"tensor", tensor_axis},
                    {"shard", shard_axis},
                    {"replica", replica_axis},
                    {"pipeline", pipeline_axis}};
        for (auto [name, axis] : rows) {
            if (size_along(axis) > 1) result += text("\n  %-10s %s", name, groups_text(axis).c_str());
        }
        return result;
    }

private:
    struct Group {
        int axes;
        Communicator communicator;
    };

    static const char* plural(int count) { return count == 1 ? "" : "s"; }

    int size_along(int axis) const {
        return axis == tensor_axis    ? shape.tp
               : axis == shard_axis   ? shape.shard
               : axis == replica_axis ? shape.replicas()
                                      : shape.pp;
    }

    // Only axes with more than one rank tell groups apart.
    int real(int axes) const {
        for (int axis : {tensor_axis, shard_axis, replica_axis, pipeline_axis}) {
            if (size_along(axis) == 1) axes &= ~axis;
        }
        return axes;
    }

    // The communicator along these axes: none for a group of one, one that is there already, or a new one.
    Communicator group(int axes) {
        axes = real(axes);
        if (axes == 0) return {};
        for (const Group& group : groups_) {
            if (group.axes == axes) return group.communicator;
        }
        return make_group(axes);
    }

    // A new communicator along these axes.
    Communicator make_group(int axes) {
        // The lowest member's rank names the group.
        int rank = rank_of(position, shape), color = rank_of(origin(axes), shape);
        groups_.push_back({axes, world_.split(color, rank, blocks_of_groups)});
        return groups_.back().communicator;
    }

    // Links that begin at even stages are made first, then those at odd ones, then the one that closes the
    // ring: so a rank has one neighbour at a time. Something is sent over each, for NCCL connects two ranks
    // when they first talk, and its calls wait for that: in a pipeline, for a rank that may be at another
    // call.
    void make_links(cudaStream_t stream, size_t sent) {
        int stages = shape.pp, stage = position.pipeline, before = (stage + stages - 1) % stages;
        sent = std::min(sent, most_to_connect);
        floatX* stand_in = nullptr;
        cudaCheck(cudaMalloc((void**)&stand_in, sent * sizeof *stand_in));
        cudaCheck(cudaMemsetAsync(stand_in, 0, sent * sizeof *stand_in, stream));
        for (int turn = 0; turn < (shape.ring ? 3 : 2); turn++) {
            auto has_turn = [&](int begin) { return turn == (begin == stages - 1 ? 2 : begin % 2); };
            bool begins = has_turn(stage), ends = has_turn(before);
            MeshPosition begin = position;
            begin.pipeline = begins ? stage : before;
            int color = begins || ends ? rank_of(begin, shape) : -1;
            auto link = [&](Communicator& in, Communicator& out, bool sends) {
                Communicator made = add_group(
                    world_.split(color, sends ? MeshLinks::sender : MeshLinks::receiver, blocks_of_links));
                if (color < 0) return;
                (sends ? out : in) = made;
                if (sends)
                    made.send(stand_in, sent, MeshLinks::receiver, Traffic::pipeline, stream);
                else
                    made.receive(stand_in, sent, MeshLinks::sender, stream);
            };
            link(links_.forward_in, links_.forward_out, begins);
            link(links_.backward_in, links_.backward_out, !begins);
        }
        cudaCheck(cudaStreamSynchronize(stream));
        cudaCheck(cudaFree(stand_in));
    }

    void make_ends() {
        int stage = position.pipeline;
        bool at_end = stage == 0 || stage == shape.pp - 1;
        int color = at_end ? rank_of(origin(pipeline_axis), shape) : -1;
        ends_ = add_group(world_.split(color, stage, blocks_of_groups));
    }

    // NCCL connects the ranks of a group when they first talk in some way, which it chooses by call and size,
    // and takes memory for that: both are better over before a step, where kernels of one rank wait for those
    // of another. So each group makes the calls that it will make, on one number and on as many as there will
    // be; and who sends to whom on his own, sends something.
    void connect(cudaStream_t stream, const MeshTraffic& traffic) const {
        const struct {
            const Communicator& group;
            bool reduces, scatters, gathers, exchanges;
        } calls[] = {{tensor_, true, false, false, false},
                     {shard_, true, true, false, traffic.all_to_all},
                     {gathers_, true, false, true, false},
                     {replica_, true, false, traffic.all_to_all, traffic.all_to_all},
                     {copies_, true, false, false, false},
                     {ends_, true, false, false, false}};
        constexpr auto kind = Traffic::statistics;
        size_t largest = std::min(traffic.unit, most_to_connect);
        size_t rows =
            ceil_div(std::min(traffic.rows, most_to_connect), (size_t)shape.tp);    // rows of each rank
        size_t most = std::max({largest, (size_t)stage_.size(), rows * shape.tp});  // in whole parts
        for (auto& [group, reduces, scatters, gathers, exchanges] : calls)
            most = std::max(most, ceil_div(largest, (size_t)group.size()) * group.size());
        float* numbers = nullptr;
        cudaCheck(cudaMalloc((void**)&numbers, most * sizeof *numbers));
        cudaCheck(cudaMemsetAsync(numbers, 0, most * sizeof *numbers, stream));
        auto* halves = (uint16_t*)numbers;  // two arrays of bf16 take the memory of one of floats
        for (auto& [group, reduces, scatters, gathers, exchanges] : calls) {
            size_t part = ceil_div(largest, (size_t)group.size());
            if (reduces) group.all_reduce(numbers, 1, kind, stream);
            if (reduces && largest > 1) group.all_reduce(numbers, largest, kind, stream);
            if (scatters) group.reduce_scatter(numbers, part, kind, stream);
            if (gathers) group.all_gather(numbers, part, kind, stream);
            if (exchanges) group.all_to_all(halves, halves + most, part, kind, stream);
        }
        if (rows > 0) {
            tensor_.all_gather((floatX*)numbers, rows, kind, stream);
            tensor_.reduce_scatter((floatX*)numbers, rows, kind, stream);
        }
        grouped({stage_}, [&] {
            for (int other = 0; other < stage_.size(); other++) {
                if (other == stage_.rank()) continue;
                stage_.send(numbers + stage_.rank(), 1, other, kind, stream);
                stage_.receive(numbers + other, 1, other, stream);
            }
        });
        cudaCheck(cudaStreamSynchronize(stream));
        cudaCheck(cudaFree(numbers));
    }

    // Free memory of a device that has its own; 0 on a CPU.
    static size_t free_memory() {
        size_t available = 0, total;
        if (has_own_memory) cudaCheck(cudaMemGetInfo(&available, &total));
        return available;
    }

    // One that no axes find.
    Communicator add_group(const Communicator& made) {
        if (made.size() > 1) groups_.push_back({0, made});
        return made;
    }

    // This rank's position at the beginning of the axes.
    MeshPosition origin(int axes) const {
        MeshPosition first = position;
        if (axes & tensor_axis) first.tensor = 0;
        if (axes & shard_axis) first.shard = 0;
        if (axes & replica_axis) first.replica = 0;
        if (axes & pipeline_axis) first.pipeline = 0;
        return first;
    }

    // "{0 1} {2 3}", as much as fits in a line.
    std::string groups_text(int axis) const {
        constexpr size_t width = 90;
        std::string result;
        for (int rank = 0; rank < shape.ranks() && result.size() <= width; rank++) {
            std::vector<int> members = group_of(rank, axis, shape);
            if (members[0] != rank) continue;
            result += result.empty() ? "{" : " {";
            for (int member : members) result += text("%s%d", member == rank ? "" : " ", member);
            result += '}';
        }
        if (result.size() > width) result = result.substr(0, result.rfind(' ', width)) + " ...";
        return result;
    }

    std::vector<Group> groups_;  // communicators with their axes, in the order they were made
    Communicator world_, tensor_, shard_, gathers_, replica_, copies_, stage_, ends_;
    MeshLinks links_;
};

inline const Mesh& one_process() {
    static const Mesh mesh;
    return mesh;
}
