/*
The communicators of the mesh (comm/mesh_shape.h): one for each group that this rank is in.

Groups are made by splitting the world in an order that follows from the shape only, so ranks cannot disagree,
and each split is one exchange, without barriers.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/collectives.h"
#include "comm/memory.h"      // size_text
#include "comm/mesh_shape.h"  // MeshShape, MeshPosition
#include "comm/world.h"
#include "data/base/deadlines.h"
#include "data/base/error.h"
#include "data/base/figures.h"  // counted, seconds_now
#include "kernels/common.cuh"

// The most elements sent to set up a connection. NCCL selects algorithms by size; over MPI, the size does not
// matter.
#ifdef RANKS_USE_NCCL
constexpr size_t most_to_connect = SIZE_MAX;
#else
constexpr size_t most_to_connect = 4096;
#endif

// The links of a pipeline stage. Each has its own communicator, for one direction between two neighbors: NCCL
// runs the calls of one communicator one after another, and messages in one direction must not wait for those
// in the other. A link without a neighbor is a group of one.
struct MeshLinks {
    static constexpr int sender = 0, receiver = 1;  // the ranks of every link
    Communicator forward_in, forward_out;           // activations: from the previous stage, to the next stage
    Communicator backward_in, backward_out;         // gradients: from the next stage, to the previous stage
};

// This rank's communicators. A Mesh must be destroyed before the World that it is made from.
class Mesh {
public:
    // A world of one.
    Mesh() = default;

    // For all ranks. shape.ranks() must be the size of the world.
    Mesh(const World& world, const MeshShape& shape, cudaStream_t stream, const MeshTraffic& traffic = {})
        : shape(shape) {
        if (shape.ranks() != world.size() || shape.shard < 1 || shape.dp % shape.shard) {
            fail("mesh: tp %d * cp %d * pp %d * dp %d in shard groups of %d does not fit %d processes; see "
                 "complete_layout",
                 shape.tp, shape.cp, shape.pp, shape.dp, shape.shard, world.size());
        }
        position = position_of(world.rank(), shape);
        if (world.size() == 1) return;
        double start = seconds_now();
        Phase phase("mesh");
        WaitsForOthers wait;  // for the watchdog: the libraries wait inside their calls
        size_t free_before = free_memory();
        for (size_t group = 0; group < mesh_groups.size(); group++) {
            const GroupRow& row = mesh_groups[group];
            size_t by = served_by(group, shape);
            if (ranks_of(row, shape) == 1) continue;
            groups_[group] = by < group ? groups_[by]
                             : group == (size_t)MeshGroup::world
                                 ? made(Communicator::of_world(world, stream, row.blocks))
                                 : made(split(row));
        }
        if (shape.pp > 1) make_links(stream, traffic.sent);
        connect(stream, traffic);
        size_t free_behind = free_memory();
        memory = free_before - std::min(free_before, free_behind);
        groups_built = (int)made_.size();
        build_seconds = seconds_now() - start;
    }

    // A position in an imaginary world, for a ledger.
    Mesh(const MeshShape& shape, const MeshPosition& position) : shape(shape), position(position) {
        int me = rank_of(position, shape);
        for (size_t group = 0; group < mesh_groups.size(); group++)
            groups_[group] = Communicator::imagined(line_of(group, position, shape), me);
        if (shape.pp == 1) return;
        int stage = position[Axis::pipeline], before = at_stage(stage - 1), behind = at_stage(stage + 1);
        constexpr int forward = mesh_groups.size(), backward = forward + 1;
        auto link = [&](int number, int from, int to) {
            return Communicator::imagined(
                {number, from, to - from, 2, shape.along(stage_axes), blocks_of_links}, me);
        };
        if (stage > 0 || shape.ring)
            links_.forward_in = link(forward, before, me), links_.backward_out = link(backward, me, before);
        if (stage < shape.pp - 1 || shape.ring)
            links_.forward_out = link(forward, me, behind), links_.backward_in = link(backward, behind, me);
    }

    MeshShape shape;
    MeshPosition position;

    // A group of one makes no calls.
    const Communicator& group(MeshGroup group) const { return groups_[(size_t)group]; }
    const Communicator& world() const { return group(MeshGroup::world); }
    const Communicator& tensor() const { return group(MeshGroup::tensor); }
    const Communicator& context() const { return group(MeshGroup::context); }
    const Communicator& shard() const { return group(MeshGroup::shard); }
    const Communicator& gathers() const { return group(MeshGroup::gathers); }
    const Communicator& replica() const { return group(MeshGroup::replica); }
    const Communicator& stage() const { return group(MeshGroup::stage); }
    const Communicator& asks() const { return group(MeshGroup::asks); }
    const Communicator& copies() const { return group(MeshGroup::copies); }
    const Communicator& embedding_group() const { return group(MeshGroup::embedding); }
    const MeshLinks& links() const { return links_; }

    // The number of data ranks, and this rank's number among them.
    int data_ranks() const { return shape.along(data_axes); }
    int data_rank() const { return index_along(data_axes, position, shape); }
    // This rank's number in its shard group.
    int shard_rank() const { return index_along(shard_axes, position, shape); }

    int groups_built = 0;      // communicators of this rank
    double build_seconds = 0;  // time that this rank took to make the groups
    size_t memory = 0;         // bytes of device memory that the groups use; 0 on a CPU

    // Throws Error if the library has reported an error for any group.
    void check() const {
        for (const Communicator& group : made_) group.check();
    }

    // Aborts what the groups have in progress, so that streams can drain. The groups are unusable afterwards.
    void abort() const {
        for (const Communicator& group : made_) group.abort();
    }

    // Names the groups of this rank for its flight record, which begins afterwards.
    void record_groups() const {
        auto add = [&](const char* name, const Communicator& group, std::vector<int> ranks,
                       AxisSet axes = {}) {
            if (group.size() == 1) return;
            group.record_as(recorder.add_group({name, std::move(ranks), group.size(), axes}));
        };
        const int me = rank_of(position, shape);
        for (size_t group = 0; group < mesh_groups.size(); group++) {
            const GroupRow& row = mesh_groups[group];
            if (served_by(group, shape) == group)
                add(row.name, groups_[group], members_of(row, me, shape), axes_of(row, shape));
        }
        int stage = position[Axis::pipeline], before = at_stage(stage - 1), behind = at_stage(stage + 1);
        add("forward in", links_.forward_in, {before, me});
        add("forward out", links_.forward_out, {me, behind});
        add("backward in", links_.backward_in, {behind, me});
        add("backward out", links_.backward_out, {me, before});
    }

    // Lines for the header of the run: the numbers of ranks along the axes, and the groups that they form.
    std::string picture() const {
        std::string result =
            text("%s = %s x %s (tensor %d%s, pipeline %d)", counted(shape.ranks(), "rank").c_str(),
                 counted(shape.replicas(), "replica").c_str(), counted(shape.shard, "shard").c_str(),
                 shape.tp, shape.cp > 1 ? text(", context %d", shape.cp).c_str() : "", shape.pp);
        if (groups_built) {
            result +=
                text("; %s built in %.0f ms", counted(groups_built, "group").c_str(), build_seconds * 1e3);
            if (memory > 0) result += text(", which take %s", size_text(memory).c_str());
        }
        for (Axis axis : every_axis)
            if (shape.along(axis) > 1)
                result += text("\n  %-10s %s", axis_names[(size_t)axis], groups_text(axis).c_str());
        return result;
    }

private:
    // The rank of stage `number` (modulo the number of stages) whose position is otherwise this rank's.
    int at_stage(int number) const {
        return rank_of(position.with(Axis::pipeline, (number + shape.pp) % shape.pp), shape);
    }

    // Returns this rank's group of the row. Ranks that are not in such a group also have to take part in the
    // split.
    Communicator split(const GroupRow& row) const {
        int rank = rank_of(position, shape);
        std::vector<int> members = members_of(row, rank, shape);
        return world().split(members.size() == 1 ? -1 : members[0], rank, row.blocks);
    }

    const Communicator& made(const Communicator& group) {
        if (group.size() > 1) made_.push_back(group);
        return group;
    }

    // Makes the links that begin at even stages first, then those at odd ones, then the one that closes the
    // ring, so that a rank deals with one neighbor at a time. Something is sent over each link, because NCCL
    // connects two ranks at their first message, and that call waits for the other rank, which in a running
    // pipeline may be in another call.
    void make_links(cudaStream_t stream, size_t sent) {
        int stages = shape.pp, stage = position[Axis::pipeline], before = (stage + stages - 1) % stages;
        sent = std::min(sent, most_to_connect);
        floatX* stand_in = nullptr;
        cudaCheck(cudaMalloc((void**)&stand_in, sent * sizeof *stand_in));
        zero_async(stand_in, sent, stream);
        for (int turn = 0; turn < (shape.ring ? 3 : 2); turn++) {
            auto has_turn = [&](int begin) { return turn == (begin == stages - 1 ? 2 : begin % 2); };
            bool begins = has_turn(stage), ends = has_turn(before);
            int begin = rank_of(position.with(Axis::pipeline, begins ? stage : before), shape);
            int color = begins || ends ? begin : -1;
            auto link = [&](Communicator& in, Communicator& out, bool sends) {
                int key = sends ? MeshLinks::sender : MeshLinks::receiver;
                Communicator link = made(world().split(color, key, blocks_of_links));
                if (color < 0) return;
                (sends ? out : in) = link;
                if (sends)
                    link.send(stand_in, sent, MeshLinks::receiver, Traffic::pipeline, stream);
                else
                    link.receive(stand_in, sent, MeshLinks::sender, stream);
            };
            link(links_.forward_in, links_.forward_out, begins);
            link(links_.backward_in, links_.backward_out, !begins);
        }
        cudaCheck(cudaStreamSynchronize(stream));
        cudaCheck(cudaFree(stand_in));
    }

    // NCCL connects the ranks of a group, and allocates memory for it, on the first use of an algorithm,
    // which it chooses by call and size. That should happen before the first step, where kernels of one rank
    // wait for those of another. So each group makes every call in the sizes that it will use (sums also with
    // a single number), and in groups with point-to-point messages, every rank sends to all others.
    void connect(cudaStream_t stream, const MeshTraffic& traffic) const {
        constexpr auto kind = Traffic::statistics;
        size_t largest = std::min(traffic.unit, most_to_connect);
        size_t rows =
            ceil_div(std::min(traffic.rows, most_to_connect), (size_t)shape.tp);  // rows of each rank
        size_t most = rows * shape.tp;                                            // in whole parts
        size_t keys = ceil_div(std::min(traffic.keys, most_to_connect), (size_t)shape.cp);
        most = std::max(most, keys * shape.cp);
        for (const Communicator& group : groups_)
            most = std::max(most, ceil_div(largest, (size_t)group.size()) * group.size());
        float* numbers = nullptr;
        cudaCheck(cudaMalloc((void**)&numbers, most * sizeof *numbers));
        zero_async(numbers, most, stream);
        auto* halves = (uint16_t*)numbers;  // two bf16 arrays fit into one of floats
        for (size_t i = 0; i < mesh_groups.size(); i++) {
            const Communicator& group = groups_[i];
            unsigned calls =
                mesh_groups[i].calls | (traffic.all_to_all ? mesh_groups[i].calls_in_bf16 : Calls::none);
            size_t part = ceil_div(largest, (size_t)group.size());
            if (calls & Calls::sums) group.all_reduce(numbers, 1, kind, stream);
            if (calls & Calls::sums && largest > 1) group.all_reduce(numbers, largest, kind, stream);
            if (calls & Calls::scatters) group.reduce_scatter(numbers, part, kind, stream);
            if (calls & Calls::gathers) group.all_gather(numbers, part, kind, stream);
            if (calls & Calls::exchanges) group.all_to_all(halves, halves + most, part, kind, stream);
            if (calls & Calls::moves_rows && rows > 0) {
                group.all_gather((floatX*)numbers, rows, kind, stream);
                group.reduce_scatter((floatX*)numbers, rows, kind, stream);
            }
            if (calls & Calls::moves_keys && keys > 0) {
                group.all_gather((floatX*)numbers, keys, kind, stream);
                group.reduce_scatter(numbers, keys, kind, stream);
            }
            if (calls & Calls::messages) send_to_each(group, numbers, kind, stream);
        }
        cudaCheck(cudaStreamSynchronize(stream));
        cudaCheck(cudaFree(numbers));
    }

    // Sends a number to each other rank of the group.
    static void send_to_each(const Communicator& group, float* numbers, Traffic kind, cudaStream_t stream) {
        grouped({group}, [&] {
            for (int other = 0; other < group.size(); other++) {
                if (other == group.rank()) continue;
                group.send(numbers + group.rank(), 1, other, kind, stream);
                group.receive(numbers + other, 1, other, stream);
            }
        });
    }

    // Free memory of a device that has its own; 0 on a CPU.
    static size_t free_memory() {
        size_t available = 0, total;
        if (has_own_memory) cudaCheck(cudaMemGetInfo(&available, &total));
        return available;
    }

    // "{0 1} {2 3}", as much as fits in a line.
    std::string groups_text(Axis axis) const {
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

    std::array<Communicator, mesh_groups.size()> groups_;
    std::vector<Communicator> made_;  // each once, in the order in which they were made; the links last
    MeshLinks links_;
};

inline const Mesh& one_process() {
    static const Mesh mesh;
    return mesh;
}

// ----------------------------------------------------------------------------
// waiting
//
// Waiting for work in which other ranks take part. A plain cudaStreamSynchronize would hang when a link
// breaks, because NCCL reports errors only when asked. So the wait polls the stream, and asks the groups for
// errors in between. The watchdog limits how long it may take (comm/watchdog.h).

// Waits until look() is no longer cudaErrorNotReady. If a group of the mesh reports an error, aborts the
// groups, so that streams can drain, and throws Error; the run cannot continue then.
template <typename Look>
void wait_watching(const Mesh& mesh, Look&& look) {
    constexpr double between_checks = 0.02;
    double checked = seconds_now();
    WaitsForOthers wait;
    try {
        for (Patience patience(std::chrono::microseconds(200));; patience.wait()) {
            cudaError_t work = look();
            if (work == cudaSuccess) return;
            if (work != cudaErrorNotReady) cudaCheck(work);
            if (double now = seconds_now(); now - checked > between_checks) {
                mesh.check();
                checked = now;
            }
        }
    } catch (const Error&) {
        mesh.abort();
        throw;
    }
}

// Waits until all work in the stream is done.
inline void wait_for(cudaStream_t stream, const Mesh& mesh) {
    if (ledger || mesh.shape.ranks() == 1) return synchronize(stream);
    wait_watching(mesh, [&] { return cudaStreamQuery(stream); });
}

// Waits until the stream has reached the event. Returns at once if the event was never recorded.
inline void wait_for(const Event& event, const Mesh& mesh) {
    if (ledger || mesh.shape.ranks() == 1) return event.wait();
    wait_watching(mesh, [&] { return event.query(); });
}

// Copies results of the stream's work to the host, and waits for them. Waits for the work first, because
// CUDA's own copy to unpinned memory would wait for it without asking the groups for errors.
template <typename T>
void copy_to_host(T* to, const T* from, size_t count, cudaStream_t stream, const Mesh& mesh) {
    wait_for(stream, mesh);
    copy_async(to, from, count, stream);
    synchronize(stream);
}
