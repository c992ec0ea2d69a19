/*
Groups of ranks and their collectives: over NCCL if each rank has its own GPU, otherwise over
comm/nccl_over_mpi.h (on CPUs, and with -DCOMM_MPI if ranks share a GPU).

Every process counts the bytes that it sends, and records every call (comm/recorder.h).
*/
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/mpi_calls.h"  // Patience
#include "comm/recorder.h"   // TraceSpan
#include "data/base/deadlines.h"
#include "data/base/error.h"
#include "data/run/flight_record.h"  // Traffic
#include "kernels/common.cuh"
#include "kernels/streams.cuh"  // copy_async, zero_async

#if defined(__CUDACC__) && !defined(COMM_MPI)
#include <nccl.h>
#else
#include "comm/nccl_over_mpi.h"
#endif

// ----------------------------------------------------------------------------
// errors

inline void nccl_check(ncclResult_t result, const char* call, const char* file, int line,
                       ncclComm_t comm = nullptr) {
    if (result == ncclSuccess) return;
    std::string reason = ncclGetErrorString(result);
    const char* last = ncclGetLastError(comm);
    if (last && *last) reason += std::string(": ") + last;
    fail_call(call, reason.c_str(), file, line);
}

// Throws Error if the call fails. The error names the process, the call, its place and NCCL's reason.
#define ncclCheck(call) nccl_check((call), #call, __FILE__, __LINE__)

// ----------------------------------------------------------------------------
// traffic
//
// Bytes that this process has sent to other ranks, by purpose. The counts are those of ring algorithms, which
// comm/nccl_over_mpi.h always uses and NCCL uses when bandwidth is the limit, so that plans can be compared
// with them to the byte.

inline std::array<std::atomic<uint64_t>, traffic_names.size()> traffic_bytes;

// Returns the bytes that this process has sent since the start or the last reset_traffic(), once its streams
// are done.
inline uint64_t bytes_sent(Traffic kind) {
    return traffic_bytes[(size_t)kind];
}

// Returns the sum over all kinds.
inline uint64_t sent_bytes() {
    uint64_t bytes = 0;
    for (auto& of_kind : traffic_bytes) bytes += of_kind;
    return bytes;
}

inline void reset_traffic() {
    for (auto& bytes : traffic_bytes) bytes = 0;
}

// ----------------------------------------------------------------------------
// types

template <typename T>
constexpr ncclDataType_t nccl_type() {
    if constexpr (std::is_same_v<T, float>)
        return ncclFloat;
    else if constexpr (std::is_same_v<T, double>)
        return ncclDouble;
    else if constexpr (std::is_same_v<T, uint16_t>)
        return ncclBfloat16;  // the bits of a bf16
    else if constexpr (std::is_integral_v<T> && sizeof(T) == 1)
        return std::is_signed_v<T> ? ncclInt8 : ncclUint8;
    else if constexpr (std::is_integral_v<T> && sizeof(T) == 4)
        return std::is_signed_v<T> ? ncclInt32 : ncclUint32;
    else if constexpr (std::is_integral_v<T> && sizeof(T) == 8)
        return std::is_signed_v<T> ? ncclInt64 : ncclUint64;
    else {
#ifndef DEVICE_CPU
        static_assert(std::is_same_v<T, __nv_bfloat16>, "NCCL does not support this type");
#else
        static_assert(sizeof(T) == 0, "NCCL does not support this type");
#endif
        return ncclBfloat16;
    }
}

// ----------------------------------------------------------------------------
// communicators

// Returns a stream for communication, with priority over computation on the GPU. The name is for timelines.
inline cudaStream_t new_communication_stream(const char* name) {
    cudaStream_t stream = new_stream(true);
    recorder.name_stream(stream, name);
    return stream;
}

// Waits until a call on a group is complete. A call on a nonblocking group may return before that
// (ncclInProgress), so that this thread and the watchdog can act if other ranks never arrive.
inline ncclResult_t when_over(ncclResult_t result, ncclComm_t comm) {
    if (result != ncclInProgress) return result;
    WaitsForOthers wait;
    Patience patience;
    for (;;) {
        ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
        if (asked != ncclSuccess) return asked;
        if (result != ncclInProgress) return result;
        patience.wait();
    }
}

// A group of ranks. Copies refer to the same group. A default-constructed one is a group of one, whose calls
// only copy data that must end up elsewhere. All ranks of a group make the same calls in the same order.
// Calls on data put their work on the stream and return; they throw Error if NCCL refuses them. T: float,
// floatX, or an integer.
class Communicator {
public:
    Communicator() = default;

    // Makes the group of all ranks of `world` (any type with rank(), size() and broadcast(void*, size_t
    // bytes, int root)). Waits until all have joined and have communicated on the stream, so that a setup
    // that does not work fails here.
    template <typename World>
    static Communicator of_world(const World& world, cudaStream_t stream, int max_blocks = 32) {
        if (world.size() == 1) return {};
        // One rank in ranks_of_bootstrap creates an id for bootstrapping, so that thousands of ranks do not
        // all connect to a single one.
        std::vector<ncclUniqueId> ids((size_t)ceil_div(world.size(), ranks_of_bootstrap));
        for (size_t i = 0; i < ids.size(); i++) {
            int maker = (int)i * ranks_of_bootstrap;
            if (world.rank() == maker) ncclCheck(ncclGetUniqueId(&ids[i]));
            world.broadcast(&ids[i], sizeof ids[i], maker);
        }
        ncclComm_t made = nullptr;
        ncclConfig_t config = how(max_blocks, false);
#if NCCL_VERSION_CODE >= 22300  // 2.23
        ncclResult_t result =
            ncclCommInitRankScalable(&made, world.size(), world.rank(), (int)ids.size(), ids.data(), &config);
#else
        ncclResult_t result = ncclCommInitRankConfig(&made, world.size(), ids[0], world.rank(), &config);
#endif
        nccl_check(when_over(result, made), "creating the communicator of all ranks", __FILE__, __LINE__);
        Communicator all(made);
        int* number = nullptr;
        cudaCheck(cudaMalloc((void**)&number, sizeof *number));
        zero_async(number, 1, stream);
        all.check_call(ncclAllReduce(number, number, 1, ncclInt32, ncclSum, made, stream), "ncclAllReduce",
                       __LINE__);
        cudaCheck(cudaStreamSynchronize(stream));
        cudaCheck(cudaFree(number));
        all.check();
        return all;
    }

    // Returns a group whose ranks do not exist, for a ledger.
    static Communicator imagined(const GroupOfRanks& members, int me) {
        if (members.ranks == 1) return {};
        Communicator group;
        group.shared_ = std::make_shared<Shared>();
        group.shared_->rank = (me - members.first) / members.stride;
        group.shared_->size = members.ranks, group.shared_->members = members;
        return group;
    }

    // Ranks with the same color form a group, ordered by key. A rank with a negative color gets a group of
    // one. max_blocks: the most thread blocks in each of the group's kernels, which leave the rest of the GPU
    // to other work.
    Communicator split(int color, int key, int max_blocks = 32) const {
        if (size() == 1) return {};
        ncclComm_t part = nullptr;
        ncclConfig_t config = how(max_blocks, true);
        check_call(ncclCommSplit(comm(), color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &part, &config),
                   "ncclCommSplit", __LINE__);
        if (!part) return {};
        Communicator made(part);
        return made.size() == 1 ? Communicator() : made;
    }

    int rank() const {
        return shared_ ? shared_->rank : 0;
    }
    int size() const {
        return shared_ ? shared_->size : 1;
    }
    bool same_group(const Communicator& other) const {
        return shared_ == other.shared_;
    }
    // Records this group's calls under this number from now on.
    void record_as(int group) const {
        if (shared_) shared_->record = group;
    }

    // Replaces data (count) by its sum over the ranks.
    template <typename T>
    void all_reduce(T* data, size_t count, Traffic kind, cudaStream_t stream) const {
        if (!shared_) return;
        if (ledger) return write_down(Operation::all_reduce, kind, data, count, stream);
        TraceSpan call(Operation::all_reduce, shared_->record, kind, count * sizeof(T), stream);
        check_call(ncclAllReduce(data, data, count, nccl_type<T>(), ncclSum, comm(), stream), "ncclAllReduce",
                   __LINE__);
        // in each of the two passes, a rank sends all chunks except one
        size_t kept = chunk(count, rank() + 1) + chunk(count, rank() + 2);
        add(kind, (2 * count - kept) * sizeof(T));
    }

    // data (size * part): replaces part `rank`, at data + rank * part, by its sum over the ranks, and leaves
    // the rest as it was.
    template <typename T>
    void reduce_scatter(T* data, size_t part, Traffic kind, cudaStream_t stream) const {
        reduce_scatter(data, data + (size_t)rank() * part, part, kind, stream);
    }

    // Writes the sum to `own` (part), which lies outside of data, and leaves data (size * part) as it was.
    template <typename T>
    void reduce_scatter(const T* data, T* own, size_t part, Traffic kind, cudaStream_t stream) const {
        if (!shared_) return copy_own(own, data, part, stream);
        if (ledger) return write_down(Operation::reduce_scatter, kind, data, size() * part, stream);
        TraceSpan call(Operation::reduce_scatter, shared_->record, kind, size() * part * sizeof(T), stream);
        check_call(ncclReduceScatter(data, own, part, nccl_type<T>(), ncclSum, comm(), stream),
                   "ncclReduceScatter", __LINE__);
        add(kind, (size_t)(size() - 1) * part * sizeof(T));
    }

    // Copies the part at data + rank * part of every rank to all ranks. data (size * part)
    template <typename T>
    void all_gather(T* data, size_t part, Traffic kind, cudaStream_t stream) const {
        all_gather(data + (size_t)rank() * part, data, part, kind, stream);
    }

    // Gathers the `own` (part) of every rank, which lies outside of data.
    template <typename T>
    void all_gather(const T* own, T* data, size_t part, Traffic kind, cudaStream_t stream) const {
        if (!shared_) return copy_own(data, own, part, stream);
        if (ledger) return write_down(Operation::all_gather, kind, data, size() * part, stream);
        TraceSpan call(Operation::all_gather, shared_->record, kind, size() * part * sizeof(T), stream);
        check_call(ncclAllGather(own, data, part, nccl_type<T>(), comm(), stream), "ncclAllGather", __LINE__);
        add(kind, (size_t)(size() - 1) * part * sizeof(T));
    }

    // Sends part r of data (size * part) to each other rank r, and stores what rank r sends as part r of
    // `received` (size * part). This rank's own part of `received` stays as it was.
    template <typename T>
    void all_to_all(const T* data, T* received, size_t part, Traffic kind, cudaStream_t stream) const {
        if (!shared_) return;
        if (ledger) return write_down(Operation::all_to_all, kind, data, size() * part, stream);
        TraceSpan call(Operation::all_to_all, shared_->record, kind, size() * part * sizeof(T), stream);
        ncclCheck(ncclGroupStart());
        for (int distance = 1; distance < size(); distance++) {  // no two ranks send to the same one
            int to = (rank() + distance) % size(), from = (rank() + size() - distance) % size();
            check_call(ncclSend(data + (size_t)to * part, part, nccl_type<T>(), to, comm(), stream),
                       "ncclSend", __LINE__);
            check_call(ncclRecv(received + (size_t)from * part, part, nccl_type<T>(), from, comm(), stream),
                       "ncclRecv", __LINE__);
        }
        check_call(ncclGroupEnd(), "ncclGroupEnd", __LINE__);
        add(kind, (size_t)(size() - 1) * part * sizeof(T));
    }

    // Copies the data (count) of `root` to all ranks.
    template <typename T>
    void broadcast(T* data, size_t count, int root, Traffic kind, cudaStream_t stream) const {
        if (!shared_) return;
        if (ledger) return write_down(Operation::broadcast, kind, data, count, stream);
        TraceSpan call(Operation::broadcast, shared_->record, kind, count * sizeof(T), stream);
        check_call(ncclBroadcast(data, data, count, nccl_type<T>(), root, comm(), stream), "ncclBroadcast",
                   __LINE__);
        bool last = (rank() + 1) % size() == root;
        if (!last) add(kind, count * sizeof(T));
    }

    // Sends data to rank `to`, which must call receive(). Between ncclGroupStart and ncclGroupEnd, sends and
    // receives may be in any order.
    template <typename T>
    void send(const T* data, size_t count, int to, Traffic kind, cudaStream_t stream) const {
        require_group(to);
        if (ledger) return write_down(Operation::send, kind, data, count, stream, to);
        TraceSpan call(Operation::send, shared_->record, kind, count * sizeof(T), stream);
        check_call(ncclSend(data, count, nccl_type<T>(), to, comm(), stream), "ncclSend", __LINE__);
        add(kind, count * sizeof(T));
    }

    template <typename T>
    void receive(T* data, size_t count, int from, cudaStream_t stream,
                 Traffic kind = Traffic::pipeline) const {
        require_group(from);
        if (ledger) return write_down(Operation::receive, kind, data, count, stream, from);
        TraceSpan call(Operation::receive, shared_->record, kind, count * sizeof(T), stream);
        check_call(ncclRecv(data, count, nccl_type<T>(), from, comm(), stream), "ncclRecv", __LINE__);
    }

    // Throws Error if the group's work on the streams has failed.
    void check() const {
        if (!shared_) return;
        ncclResult_t error = ncclSuccess;
        check_call(ncclCommGetAsyncError(comm(), &error), "ncclCommGetAsyncError", __LINE__);
        if (error != ncclInProgress) check_call(error, "communication between the processes", __LINE__);
    }

    // Waits until this group's calls are on their streams. result: what ncclGroupEnd returned.
    void await_calls(ncclResult_t result) const {
        if (shared_) check_call(result, "ncclGroupEnd", __LINE__);
    }

    // Aborts the group's work on the streams. No more calls can be made on this group.
    void abort() const {
        if (shared_) shared_->end(ncclCommAbort);
    }

private:
    static constexpr int ranks_of_bootstrap = 512;

    // Returns the configuration of a new group. The group of all ranks is nonblocking, so that while it is
    // made or split, this thread waits in when_over(), where the watchdog can see it. Groups for data are
    // blocking, because NCCL starts a thread for each call on a nonblocking group.
    static ncclConfig_t how(int max_blocks, bool blocking) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.maxCTAs = max_blocks;
        config.blocking = blocking;
        return config;
    }

    struct Shared {
        ncclComm_t comm = nullptr;
        int rank = 0, size = 1;
        int record = -1;            // its number among the groups of the record
        GroupOfRanks members = {};  // for imagined()

        void end(ncclResult_t (*how)(ncclComm_t)) {
            if (comm) how(comm);
            comm = nullptr;
        }
        // Aborts if an exception is propagating: other ranks may then never reach the call that finalizing
        // waits for.
        ~Shared() {
            bool in_order =
                comm && !std::uncaught_exceptions() && when_over(ncclCommFinalize(comm), comm) == ncclSuccess;
            end(in_order ? ncclCommDestroy : ncclCommAbort);
        }
    };

    explicit Communicator(ncclComm_t comm) : shared_(std::make_shared<Shared>()) {
        shared_->comm = comm;
        ncclCheck(ncclCommUserRank(comm, &shared_->rank));
        ncclCheck(ncclCommCount(comm, &shared_->size));
    }

    ncclComm_t comm() const {
        if (!shared_->comm) fail("communicator: used after it was aborted");
        return shared_->comm;
    }

    void check_call(ncclResult_t result, const char* call, int line) const {
        nccl_check(when_over(result, shared_->comm), call, __FILE__, line, shared_->comm);
    }

    // other: the rank at the other end of a send or a receive. In a group of more than two, the ledger entry
    // is for the pair of ranks.
    template <typename T>
    void write_down(Operation operation, Traffic kind, const T* data, size_t count, cudaStream_t stream,
                    int other = -1) const {
        const auto& before = ledger->entries;
        GroupOfRanks group = shared_->members;
        bool is_pair = other >= 0 && group.ranks > 2;
        bool joins = before.size() > ledger->together_from && before.back().kind == LedgerEntry::call &&
                     (is_pair || before.back().call_of.group == group);
        if (is_pair) group = group.pair(rank(), other);
        ledger->add({.kind = LedgerEntry::call,
                     .stream = stream,
                     .call_of = {(int)operation, (int)kind, group, array_bytes(data, count),
                                 (int)array_bytes(data, 1), joins}});
    }

    void require_group(int other) const {
        if (!shared_) fail("communicator: a group of one has no other rank, but rank %d is named", other);
    }

    // A group of one only copies.
    template <typename T>
    static void copy_own(T* to, const T* from, size_t count, cudaStream_t stream) {
        if (to == from) return;
        copy_async(to, from, count, stream);
    }

    // Returns the number of elements in a chunk, if `count` elements are cut into one chunk for each rank.
    size_t chunk(size_t count, int index) const {
        auto ranks = (size_t)size(), c = (size_t)index % ranks;
        return count / ranks + (c < count % ranks);
    }

    static void add(Traffic kind, size_t bytes) {
        traffic_bytes[(size_t)kind] += bytes;
    }

    std::shared_ptr<Shared> shared_;
};

// Makes the calls of work() on these groups begin together, so that many small messages take little longer
// than one.
template <typename Work>
void grouped(std::initializer_list<Communicator> groups, Work&& work) {
    if (ledger) {
        ledger->together_from = ledger->entries.size();
        work();
        ledger->together_from = SIZE_MAX;
        return;
    }
    TraceGroup one_entry;
    ncclCheck(ncclGroupStart());
    work();
    ncclResult_t result = ncclGroupEnd();
    if (result != ncclInProgress) ncclCheck(result);
    for (const Communicator& group : groups) group.await_calls(result);
}
