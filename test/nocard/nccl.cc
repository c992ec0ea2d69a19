/*
NCCL: groups of ranks, and calls that put their work on streams.

In the group of all ranks, a rank's number is its number in MPI. A nonblocking group is created and split
while the program polls its state; calls on it may be reported as in progress, too.
*/
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nccl.h>
#include <random>
#include <thread>
#include <vector>

#include "test/nocard/collectives.h"
#include "test/nocard/device_memory.h"
#include "test/nocard/fault.h"
#include "test/nocard/record.h"
#include "test/nocard/report.h"
#include "test/nocard/streams.h"

// The program's handle of a group.
struct ncclComm {
    nocard::GroupPtr group = std::make_shared<nocard::Group>();
    std::function<bool()> task;  // a task in progress: continues when called; returns true when done
    int answers_in_progress = 0;
};

namespace nocard {
namespace {

// All handles, including dead ones. Recursive, because a group's task looks at others.
struct Handles {
    std::recursive_mutex mutex;
    std::map<ncclComm_t, bool> live;
};

Handles& handles() {
    static Handles& handles = *new Handles;
    return handles;
}

thread_local std::string last_failure;

ncclResult_t failed(ncclResult_t result, const std::string& why) {
    last_failure = why;
    fprintf(stderr, "nocard: NCCL: %s\n", why.c_str());
    return result;
}

ncclComm& require(const char* call, ncclComm_t comm) {
    require_outside_of_host_function(call);
    std::lock_guard lock(handles().mutex);
    auto place = handles().live.find(comm);
    if (place == handles().live.end() || !place->second)
        fault(call, text("%p is no communicator, or one that was ended", (void*)comm));
    return *comm;
}

ncclComm_t make_handle() {
    std::lock_guard lock(handles().mutex);
    ncclComm_t made = new ncclComm;
    handles().live[made] = true;
    return made;
}

// The channels of a group have buffers on the card, of about the size that NCCL uses within a machine.
void take_memory(Group& group, const ncclConfig_t* config) {
    constexpr size_t of_channel = size_t(9) << 20;
    constexpr int usual_channels = 16;
    bool limited = config && config->maxCTAs > 0 && config->maxCTAs < usual_channels;
    int channels = limited ? config->maxCTAs : usual_channels;
    group.memory = group.size() > 1 ? (size_t)channels * of_channel : 0;
    take_library_memory(group.memory);
}

void join(Group& group, std::vector<int> members) {
    group.members = std::move(members);
    group.sent.assign(group.members.size(), 0);
    group.received.assign(group.members.size(), 0);
    auto self = std::find(group.members.begin(), group.members.end(), world_rank());
    group.rank = (int)(self - group.members.begin());
}

bool is_blocking(const ncclConfig_t* config) {
    return !config || config->blocking != 0;
}

// Advances the task in progress, to its end if the call waits.
ncclResult_t answer(ncclComm& comm, bool waits) {
    while (comm.task) {
        {
            std::lock_guard lock(handles().mutex);
            if (comm.task && comm.task()) comm.task = nullptr;
        }
        if (!waits) return ncclInProgress;
        if (comm.task) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return ncclSuccess;
}

// Exchanges a number with all members of a group. phase: unique to the purpose.
class Exchange {
public:
    Exchange(GroupPtr group, uint64_t number, int32_t phase, uint64_t mine)
        : group_(std::move(group)), number_(number), phase_(phase) {
        numbers_.assign((size_t)group_->size(), 0);
        has_.assign((size_t)group_->size(), false);
        numbers_[(size_t)group_->rank] = mine;
        has_[(size_t)group_->rank] = true;
        Label label = {group_->number, number, phase, 0, 0, 0, 0, mine};
        for (int other = 0; other < group_->size(); other++)
            if (other != group_->rank)
                sendings_.push_back(send_message(group_->members[(size_t)other], label, nullptr, 0));
    }

    bool is_over() {
        for (int other = 0; other < group_->size(); other++) {
            if (has_[(size_t)other]) continue;
            auto message = take_message(group_->members[(size_t)other], group_->number, number_, phase_);
            if (!message) continue;
            numbers_[(size_t)other] = message->label.count;
            has_[(size_t)other] = true;
        }
        std::erase_if(sendings_, [](auto& sending) { return is_sent(*sending); });
        return sendings_.empty() && std::all_of(has_.begin(), has_.end(), [](bool has) { return has; });
    }

    const std::vector<uint64_t>& numbers() const { return numbers_; }

private:
    GroupPtr group_;
    uint64_t number_;
    int32_t phase_;
    std::vector<uint64_t> numbers_;
    std::vector<bool> has_;
    std::vector<std::shared_ptr<Sending>> sendings_;
};

constexpr int32_t phase_of_making = 200, phase_of_splits = 201;

ncclResult_t make_group(ncclComm_t* comm, int ranks, int rank, const ncclUniqueId& id,
                        const ncclConfig_t* config) {
    *comm = nullptr;
    if (rank < 0 || rank >= ranks) return failed(ncclInvalidArgument, text("rank %d of %d", rank, ranks));
    if (!has_messages() && ranks > 1)
        return failed(ncclInvalidUsage, "several ranks, and MPI has not been started");
    if (ranks != world_size() || rank != world_rank())
        return failed(ncclInvalidUsage,
                      text("rank %d of %d is rank %d of %d in MPI", rank, ranks, world_rank(), world_size()));
    ncclComm_t made = make_handle();
    Group& group = *made->group;
    memcpy(&group.number, id.internal, sizeof group.number);
    group.blocking = is_blocking(config);
    std::vector<int> members;
    for (int i = 0; i < ranks; i++) members.push_back(i);
    join(group, members);
    take_memory(group, config);
    auto exchange = std::make_shared<Exchange>(made->group, 0, phase_of_making, 0);
    made->task = [exchange] { return exchange->is_over(); };
    *comm = made;
    return answer(*made, group.blocking);
}

// color in the upper half and key in the lower, both of 31 bits.
uint64_t packed(int color, int key) {
    return (uint64_t)(uint32_t)color << 32 | (uint32_t)key;
}

void finish_split(const Group& parent, Group& child, int color, const std::vector<uint64_t>& all,
                  uint64_t split) {
    std::vector<std::pair<int, int>> chosen;  // key, rank
    for (int rank = 0; rank < parent.size(); rank++) {
        uint64_t theirs = all[(size_t)rank];
        if ((int)(uint32_t)(theirs >> 32) == color) chosen.push_back({(int)(uint32_t)theirs, rank});
    }
    std::sort(chosen.begin(), chosen.end());
    std::vector<int> members;
    for (auto [key, rank] : chosen) members.push_back(parent.members[(size_t)rank]);
    child.number = ((parent.number ^ split) * 0x9e3779b97f4a7c15 ^ (uint64_t)color) * 0xbf58476d1ce4e5b9 + 1;
    join(child, members);
}

// ----------------------------------------------------------------------------
// calls on data

struct Pending {
    ncclComm_t comm;
    cudaStream_t stream;
    CollectiveCall call;
};
thread_local int depth = 0;
thread_local std::vector<Pending> pending;

// Combines the calls on each group into one piece of work, which all streams that they name wait for.
ncclResult_t start_pending() {
    std::vector<Pending> calls = std::exchange(pending, {});
    ncclResult_t result = ncclSuccess;
    while (!calls.empty()) {
        ncclComm_t comm = calls[0].comm;
        std::vector<CollectiveCall> of_group;
        std::vector<cudaStream_t> streams;
        for (const Pending& p : calls) {
            if (p.comm != comm) continue;
            of_group.push_back(p.call);
            if (std::find(streams.begin(), streams.end(), p.stream) == streams.end())
                streams.push_back(p.stream);
        }
        std::erase_if(calls, [&](const Pending& p) { return p.comm == comm; });
        if (enqueue_together(streams, collective_operation(comm->group, of_group)) != cudaSuccess)
            result = ncclUnhandledCudaError;
        if (comm->group->blocking || result != ncclSuccess) continue;
        comm->answers_in_progress = (int)draw(3);
        if (comm->answers_in_progress) result = ncclInProgress;
    }
    return result;
}

ncclResult_t add_call(CollectiveKind kind, const void* from, void* to, size_t count, ncclDataType_t type,
                      ncclRedOp_t reduction, int root, ncclComm_t handle, cudaStream_t stream) {
    ncclComm& comm = require(name_of(kind), handle);
    Group& group = *comm.group;
    if (comm.task) fault(name_of(kind), "the group is still being made or split");
    if (root < 0 || root >= group.size())
        return failed(ncclInvalidArgument, text("%s: rank %d of %d", name_of(kind), root, group.size()));
    bool between_two = kind == CollectiveKind::send || kind == CollectiveKind::receive;
    if (between_two && root == group.rank && !depth)
        fault(name_of(kind), "to or from the same rank, outside of a group of calls, waits for ever");
    if (reduction != ncclSum && reduction != ncclMax && reduction != ncclMin)
        fault(name_of(kind), text("operation %d is not known here", (int)reduction));
    CollectiveCall call = {kind, from, to, count, type, reduction, root};
    check_memory(group, call);
    report_work("collectives");
    record(stream, text("%s %zu %d", name_of(kind), count * bytes_of(type), group.size()));
    pending.push_back({handle, stream, call});
    return depth ? ncclSuccess : start_pending();
}

ncclResult_t end(const char* call, ncclComm_t handle, bool aborts) {
    ncclComm& comm = require(call, handle);
    while (!aborts && comm.group->outstanding > 0)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    comm.group->aborted = aborts;
    comm.task = nullptr;
    return_library_memory(comm.group->memory);
    std::lock_guard lock(handles().mutex);
    handles().live[handle] = false;
    return ncclSuccess;
}

}  // namespace
}  // namespace nocard

using namespace nocard;

extern "C" {

// ----------------------------------------------------------------------------
// groups

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::random_device random;
    for (char& byte : id->internal) byte = (char)random();
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    return make_group(comm, ranks, rank, id, config);
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
    return make_group(comm, ranks, rank, id, nullptr);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int ids, ncclUniqueId* id,
                                      ncclConfig_t* config) {
    if (ids < 1) return failed(ncclInvalidArgument, "no id");
    return make_group(comm, ranks, rank, id[0], config);
}

// The new handle exists at once, but can be used only once the split is done.
ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
    ncclComm& parent = require("ncclCommSplit", handle);
    *made = nullptr;
    if (parent.task) fault("ncclCommSplit", "the group is still being made or split");
    if (depth) fault("ncclCommSplit", "in a group of calls, which is not known here");
    bool takes_part = color != NCCL_SPLIT_NOCOLOR;
    if (takes_part && color < 0) return failed(ncclInvalidArgument, text("ncclCommSplit: color %d", color));
    ncclComm_t child = takes_part ? make_handle() : nullptr;
    uint64_t split = ++parent.group->splits;
    if (child) child->group->blocking = is_blocking(config);
    auto exchange = std::make_shared<Exchange>(parent.group, split, phase_of_splits, packed(color, key));
    GroupPtr group = parent.group;
    GroupPtr of_child = child ? child->group : nullptr;
    ncclConfig_t how = config ? *config : ncclConfig_t(NCCL_CONFIG_INITIALIZER);
    parent.task = [=] {
        if (!exchange->is_over()) return false;
        if (!of_child) return true;
        finish_split(*group, *of_child, color, exchange->numbers(), split);
        take_memory(*of_child, &how);
        return true;
    };
    *made = child;
    return answer(parent, group->blocking);
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
    *count = require("ncclCommCount", comm).group->size();
    return *count ? ncclSuccess : failed(ncclInvalidUsage, "ncclCommCount: the split is not over");
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
    *rank = require("ncclCommUserRank", comm).group->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* result) {
    ncclComm& comm = require("ncclCommGetAsyncError", handle);
    if (comm.answers_in_progress > 0)
        *result = ncclInProgress, comm.answers_in_progress--;
    else
        *result = answer(comm, false);
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    ncclComm& comm = require("ncclCommFinalize", handle);
    GroupPtr group = comm.group;
    comm.task = [group] { return group->outstanding == 0; };
    return answer(comm, group->blocking);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    return end("ncclCommDestroy", comm, false);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    return end("ncclCommAbort", comm, true);
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
        return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
        return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
        return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
        return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    case ncclInProgress:
        return "NCCL operation in progress";
    default:
        return "unknown result code";
    }
}

const char* ncclGetLastError(ncclComm_t) {
    return last_failure.c_str();
}

// ----------------------------------------------------------------------------
// calls on data

ncclResult_t ncclGroupStart() {
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (depth == 0) return failed(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    return --depth ? ncclSuccess : start_pending();
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    return add_call(CollectiveKind::all_reduce, from, to, count, type, reduction, 0, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t part, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    return add_call(CollectiveKind::reduce_scatter, from, to, part, type, reduction, 0, comm, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t part, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return add_call(CollectiveKind::all_gather, from, to, part, type, ncclSum, 0, comm, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return add_call(CollectiveKind::broadcast, from, to, count, type, ncclSum, root, comm, stream);
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return add_call(CollectiveKind::send, from, nullptr, count, type, ncclSum, peer, comm, stream);
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return add_call(CollectiveKind::receive, nullptr, to, count, type, ncclSum, peer, comm, stream);
}
}
