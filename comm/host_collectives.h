/*
Collectives over MPI in host memory: communicators under NCCL's names, which are groups of ranks that are
made, split and destroyed; sums of buffers; and operations that run when their stream reaches them.

The work that a call puts on a stream shares ownership of its communicator, so a communicator can be destroyed
before its work is done, as with NCCL. A failure on a stream has no caller to return to: the first one is
kept, and later calls return it.
*/
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "comm/messages.h"   // MessageFlow
#include "comm/mpi_calls.h"  // mpiCheck, mpi_wait
#include "comm/nccl_api.h"   // ncclResult_t
#include "comm/rings.h"      // RingFlow, ChainFlow
#include "data/base/dtype.h"

// The MPI communicator that all groups of one world share.
struct HostMessages {
    MPI_Comm mpi = MPI_COMM_NULL;
    int next_group = 0;  // the lowest number that no group of this rank has used

    ~HostMessages() {
        std::lock_guard lock(mpi_mutex);
        int over = 0;
        MPI_Finalized(&over);
        if (mpi != MPI_COMM_NULL && !over) MPI_Comm_free(&mpi);
    }
};

// Tags of a group. Its calls use those below tag_of_splits.
constexpr int tags_of_group = 1 << 15, tag_of_splits = tags_of_group - 2;

struct ncclComm {
    std::shared_ptr<ncclComm> self;          // set until it is destroyed
    std::shared_ptr<HostMessages> messages;  // a group of one may have none
    MessageGroup group;
    int rank = 0, size = 1;

    // All ranks give a collective the same number, which its messages carry. Sends and receives are numbered
    // separately for each peer.
    uint64_t collectives = 0;
    std::vector<uint64_t> sent, received;  // (size)

    bool blocking = true;
    // The remaining work of a call on a nonblocking group: does what can be done at once, and returns whether
    // the call is complete. Throws Error. Empty: no call is unfinished.
    std::function<bool()> unfinished;

    std::atomic<ncclResult_t> error = ncclSuccess;
    std::string reason;  // the text of the first error

    // Only the first failure is kept.
    void fail(ncclResult_t result, const std::string& why) {
        std::lock_guard lock(mutex_);
        if (error != ncclSuccess) return;
        reason = why;
        error = result;
    }

    // Keeps the memory of messages that MPI may still access.
    void keep(std::unique_ptr<MessageFlow> abandoned) {
        std::lock_guard lock(mutex_);
        abandoned_.push_back(std::move(abandoned));
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<MessageFlow>> abandoned_;
};

// ----------------------------------------------------------------------------
// failures

// Why the last failed call of this thread failed.
inline thread_local std::string host_nccl_reason;

inline ncclResult_t host_nccl_failure(ncclResult_t result, std::string reason) {
    host_nccl_reason = std::move(reason);
    return result;
}

inline const char* ncclGetLastError(ncclComm_t comm) {
    if (comm && comm->error != ncclSuccess) return comm->reason.c_str();
    return host_nccl_reason.c_str();
}

// Also continues a call that is not complete.
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    try {
        if (comm->unfinished && comm->unfinished()) comm->unfinished = nullptr;
    } catch (const Error& thrown) {
        comm->unfinished = nullptr;
        comm->fail(ncclSystemError, thrown.what());
    }
    *error = comm->unfinished ? ncclInProgress : comm->error.load();
    return ncclSuccess;
}

// Returns why calls on the group are refused, or ncclSuccess if they are not.
inline ncclResult_t host_refusal(const ncclComm& comm) {
    if (comm.unfinished) return host_nccl_failure(ncclInvalidArgument, "the group's last call is unfinished");
    return comm.error;
}

// Completes a call that may have to wait: calls rest() until it returns true or, on a nonblocking group,
// leaves that to ncclCommGetAsyncError().
inline ncclResult_t host_finish(ncclComm& comm, std::function<bool()> rest) {
    if (!comm.blocking) {
        comm.unfinished = std::move(rest);
        return ncclInProgress;
    }
    MpiWait wait;
    while (!rest()) wait.again();
    return ncclSuccess;
}

// ----------------------------------------------------------------------------
// making groups

inline ncclComm_t host_communicator(std::vector<int> members, int rank, bool blocking) {
    auto comm = std::make_shared<ncclComm>();
    comm->self = comm;
    comm->rank = rank;
    comm->size = (int)members.size();
    comm->sent.resize(members.size());
    comm->received.resize(members.size());
    comm->group.members = std::move(members);
    comm->blocking = blocking;
    return comm.get();
}

// Lets a group send messages over the MPI communicator that all groups of its world share, with the tags that
// its number reserves.
inline void give_messages(ncclComm& comm, const std::shared_ptr<HostMessages>& messages, int number) {
    // Tags wrap around, because MPI may have too few for all groups ever made; the groups that had the same
    // tags are gone by then.
    int* largest_tag = nullptr;
    int there = 0;
    mpiCheck(MPI_Comm_get_attr(messages->mpi, MPI_TAG_UB, &largest_tag, &there));
    int groups = there ? *largest_tag / tags_of_group : 1;
    comm.messages = messages;
    comm.group.mpi = messages->mpi;
    comm.group.first_tag = number % groups * tags_of_group;
}

inline bool is_over(std::vector<MPI_Request>& requests) {
    int done = 0;
    mpiCheck(MPI_Testall((int)requests.size(), requests.data(), &done, MPI_STATUSES_IGNORE));
    return done;
}

// Ranks of `parent` with the same color form a group, ordered by key; a rank with a negative color gets null.
// The first rank receives every rank's wish and sends the list to all. MPI's own split would wait inside MPI,
// and keep the other threads of this rank out of MPI.
class HostSplit {
public:
    HostSplit(const ncclComm& parent, int color, int key, bool blocking)
        : parent_(parent), blocking_(blocking), wishes_((size_t)parent.size) {
        mine_ = {color, key, parent.rank, parent.messages->next_group};
        wishes_[0] = mine_;
        if (parent.rank > 0) {
            send(&mine_, sizeof mine_, 0);
            receive(wishes_.data(), all_bytes(), 0);
        }
        for (int from = 1; parent.rank == 0 && from < parent.size; from++)
            receive(&wishes_[(size_t)from], sizeof mine_, from);
    }

    // Does what can be done at once. Returns true when all is done and made() is set.
    bool advance() {
        if (!is_over(requests_)) return false;
        if (parent_.rank == 0 && !answered_) {
            answered_ = true;
            for (int to = 1; to < parent_.size; to++) send(wishes_.data(), all_bytes(), to);
            return advance();
        }
        make();
        return true;
    }

    ncclComm_t made() const { return made_; }

private:
    struct Wish {
        int color, key, rank, number;
    };

    int all_bytes() const { return (int)(wishes_.size() * sizeof mine_); }
    int tag() const { return parent_.group.first_tag + tag_of_splits; }
    void send(const void* data, int bytes, int to) {
        requests_.emplace_back();
        mpiCheck(MPI_Isend(data, bytes, MPI_BYTE, parent_.group.members[(size_t)to], tag(), parent_.group.mpi,
                           &requests_.back()));
    }
    void receive(void* data, int bytes, int from) {
        requests_.emplace_back();
        mpiCheck(MPI_Irecv(data, bytes, MPI_BYTE, parent_.group.members[(size_t)from], tag(),
                           parent_.group.mpi, &requests_.back()));
    }

    void make() {
        int number = 0;  // a number that none of these ranks has used
        for (const Wish& wish : wishes_) number = std::max(number, wish.number);
        parent_.messages->next_group = number + 1;
        if (mine_.color < 0) return;
        std::erase_if(wishes_, [&](const Wish& wish) { return wish.color != mine_.color; });
        std::ranges::stable_sort(wishes_, {}, &Wish::key);
        std::vector<int> members;
        for (const Wish& wish : wishes_) members.push_back(parent_.group.members[(size_t)wish.rank]);
        auto place = std::ranges::find(wishes_, parent_.rank, &Wish::rank) - wishes_.begin();
        made_ = host_communicator(std::move(members), (int)place, blocking_);
        give_messages(*made_, parent_.messages, number);
    }

    const ncclComm& parent_;
    const bool blocking_;
    std::vector<Wish> wishes_;
    Wish mine_;
    std::vector<MPI_Request> requests_;
    bool answered_ = false;
    ncclComm_t made_ = nullptr;
};

// The id is not used: MPI already knows the ranks.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    *id = {};
    return ncclSuccess;
}

// Makes the group of all ranks that mpirun started, or a group of one.
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId, int rank,
                                           ncclConfig_t* config) {
    bool blocking = !config || config->blocking;
    *comm = nullptr;
    if (size < 1 || rank < 0 || rank >= size) return host_nccl_failure(ncclInvalidArgument, "no such rank");
    if (size == 1) {
        *comm = host_communicator({0}, 0, blocking);
        return ncclSuccess;
    }
    try {
        int joined = 0, world_size = 1, world_rank = 0;
        mpiCheck(MPI_Initialized(&joined));
        if (joined) {
            mpiCheck(MPI_Comm_size(MPI_COMM_WORLD, &world_size));
            mpiCheck(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank));
        }
        if (size != world_size || rank != world_rank)
            return host_nccl_failure(ncclInvalidUsage, "the ranks are not those that mpirun started");
        auto messages = std::make_shared<HostMessages>();
        std::vector<MPI_Request> made(1);
        mpiCheck(MPI_Comm_idup(MPI_COMM_WORLD, &messages->mpi, made.data()));
        std::vector<int> members((size_t)size);
        std::iota(members.begin(), members.end(), 0);
        *comm = host_communicator(std::move(members), rank, blocking);
        return host_finish(**comm, [&all = **comm, messages, made]() mutable {
            if (!is_over(made)) return false;
            mpiCheck(MPI_Comm_set_errhandler(messages->mpi, MPI_ERRORS_RETURN));
            give_messages(all, messages, messages->next_group++);
            return true;
        });
    } catch (const Error& error) {
        *comm = nullptr;
        return host_nccl_failure(ncclSystemError, error.what());
    }
}

// Ranks with the same color form a group, ordered by key; a rank with NCCL_SPLIT_NOCOLOR is in none, and gets
// null. The call is pending on the group that is split, not on the new one.
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part,
                                  ncclConfig_t* config) {
    *part = nullptr;
    if (ncclResult_t refused = host_refusal(*comm)) return refused;
    bool blocking = config ? config->blocking : comm->blocking;
    try {
        if (comm->messages) {
            auto split = std::make_shared<HostSplit>(*comm, color, key, blocking);
            return host_finish(*comm, [split, part] {
                if (!split->advance()) return false;
                *part = split->made();
                return true;
            });
        }
        if (color >= 0) *part = host_communicator({0}, 0, blocking);
        return ncclSuccess;
    } catch (const Error& error) {
        return host_nccl_failure(ncclSystemError, error.what());
    }
}

// ----------------------------------------------------------------------------
// using and destroying groups

inline ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
    *count = comm->size;
    return ncclSuccess;
}

inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

// After this, no more calls are made on the group.
inline ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (ncclResult_t refused = host_refusal(*comm)) return refused;
    return host_finish(*comm, [] { return true; });
}

// Work already on streams is still done.
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    auto last = std::move(comm->self);
    return ncclSuccess;
}

// Work already on streams is abandoned.
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->fail(ncclRemoteError, "the communicator was aborted");
    return ncclCommDestroy(comm);
}

// ----------------------------------------------------------------------------
// sums of two buffers, of any type in ncclDataType_t
//
// A sum of two bf16 numbers is rounded to bf16 at once, as in NCCL, so the result depends on the order of the
// additions.

struct HostBfloat16 {
    uint16_t bits;

    explicit HostBfloat16(float value) : bits(float_to_bf16(value)) {}
    operator float() const { return bf16_to_float(bits); }
};

// out = a + b. (count)
template <typename T>
void host_add(char* out, const char* a, const char* b, size_t count) {
    auto* to = (T*)out;
    auto *first = (const T*)a, *second = (const T*)b;
    for (size_t i = 0; i < count; i++) to[i] = T(first[i] + second[i]);
}

struct HostType {
    size_t bytes = 0;
    void (*add)(char* out, const char* a, const char* b, size_t count) = nullptr;
};

template <typename T>
constexpr HostType host_type = {sizeof(T), host_add<T>};

// Indexed by ncclDataType_t; 6 is fp16, which is not supported.
inline constexpr HostType host_types[] = {
    host_type<int8_t>,  host_type<uint8_t>,     host_type<int32_t>, host_type<uint32_t>,
    host_type<int64_t>, host_type<uint64_t>,    HostType(),         host_type<float>,
    host_type<double>,  host_type<HostBfloat16>};

// ----------------------------------------------------------------------------
// collectives that wait on a stream, and how they run when the stream reaches them
//
// Operations that were called as a group run concurrently, a little of each in turn, so the order in which
// the other ranks reach theirs does not matter.

enum class HostCall { all_reduce, reduce_scatter, all_gather, broadcast, send, receive };

struct HostOperation {
    std::shared_ptr<ncclComm> comm;
    HostCall call;
    const char* from;
    char* to;
    size_t count;  // elements of the whole buffer; for reduce_scatter and all_gather: of one rank's part
    HostType type;
    int peer = -1;  // or root
    int tag = 0;

    size_t bytes() const { return count * type.bytes; }
    size_t all_bytes() const { return bytes() * (size_t)comm->size; }
    bool is_root() const { return call == HostCall::broadcast && peer == comm->rank; }
    size_t bytes_read() const {
        if (call == HostCall::receive || (call == HostCall::broadcast && !is_root())) return 0;
        return call == HostCall::reduce_scatter ? all_bytes() : bytes();
    }
    size_t bytes_written() const {
        if (call == HostCall::send) return 0;
        return call == HostCall::all_gather ? all_bytes() : bytes();
    }
};

// Copies this rank's own part to its place, which needs no other rank.
inline void copy_own_part(const HostOperation& o) {
    bool sums = o.call == HostCall::all_reduce || o.call == HostCall::reduce_scatter;
    bool moves = o.call == HostCall::all_gather || o.is_root() || (sums && o.comm->size == 1);
    char* own = o.to + (o.call == HostCall::all_gather ? (size_t)o.comm->rank * o.bytes() : 0);
    if (moves && own != o.from && o.bytes()) memcpy(own, o.from, o.bytes());
}

// Makes the flow of messages to and from other ranks. An operation is done when its flow is done.
inline std::unique_ptr<MessageFlow> make_flow(const HostOperation& o) {
    int rank = o.comm->rank, size = o.comm->size;
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    auto ring = [&](RingPass pass, size_t count) {
        RingBuffers buffers = {o.from, o.to, count, o.type.bytes, o.type.add};
        return std::make_unique<RingFlow>(o.comm->group, o.tag, rank, size, pass, buffers);
    };
    auto chain = [&](char* data, int from, int to) {
        return std::make_unique<ChainFlow>(o.comm->group, o.tag, data, o.bytes(), from, to);
    };
    switch (o.call) {
    case HostCall::all_reduce:
        return ring(RingPass::all_reduce, o.count);
    case HostCall::reduce_scatter:
        return ring(RingPass::reduce_scatter, o.count * (size_t)size);
    case HostCall::all_gather:
        return ring(RingPass::all_gather, o.count * (size_t)size);
    case HostCall::broadcast:
        return chain(o.to, o.is_root() ? -1 : before, next == o.peer ? -1 : next);
    case HostCall::send:
        return chain(const_cast<char*>(o.from), -1, o.peer);
    case HostCall::receive:
        return chain(o.to, o.peer, -1);
    }
    return nullptr;
}

// Runs all operations concurrently, and waits until they are done. An error is kept in its communicator,
// whose remaining operations are abandoned.
inline void run_operations(const std::vector<HostOperation>& operations) {
    struct Running {
        ncclComm* comm;
        std::unique_ptr<MessageFlow> flow;  // null when it is done
    };
    std::vector<Running> running;
    auto attempt = [](ncclComm& comm, auto&& step) {
        try {
            step();
        } catch (const std::exception& error) {
            comm.fail(ncclRemoteError, error.what());
        }
    };
    for (const HostOperation& operation : operations) {
        ncclComm& comm = *operation.comm;
        if (comm.error != ncclSuccess) continue;
        copy_own_part(operation);
        if (comm.size > 1) attempt(comm, [&] { running.push_back({&comm, make_flow(operation)}); });
    }
    Patience patience;
    while (!running.empty()) {
        bool any = false;
        auto next_send = Clock::time_point::max();
        for (Running& run : running) {
            attempt(*run.comm, [&] { any = run.flow->advance() || any; });
            if (run.comm->error != ncclSuccess) {
                run.flow->abandon();
                run.comm->keep(std::move(run.flow));
            } else if (run.flow->done()) {
                run.flow.reset();
            } else {
                next_send = std::min(next_send, run.flow->next_send());
            }
        }
        std::erase_if(running, [](const Running& run) { return !run.flow; });
        if (any)
            patience.reset();
        else if (!running.empty())
            patience.wait(next_send);
    }
}
