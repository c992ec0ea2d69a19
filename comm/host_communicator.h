/*
Communicators over MPI, with the names of NCCL: groups of ranks that are made, split and given up.

The work that a call puts on a stream shares the ownership of its communicator, so a communicator can be
destroyed while its work is not done, as with NCCL. What fails on a stream has no caller to return to: the
first failure is kept, and later calls are refused with it.
*/
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/message_flow.h"  // MessageFlow
#include "comm/mpi_calls.h"     // mpiCheck, mpi_wait
#include "comm/nccl_types.h"    // ncclResult_t, ncclComm_t

struct ncclComm {
    std::shared_ptr<ncclComm> self;  // until it is destroyed
    MPI_Comm mpi = MPI_COMM_NULL;    // a group of one may have none
    int rank = 0, size = 1;

    // Every rank numbers its calls alike, and a call's messages carry its number. Those between two ranks are
    // numbered for each other rank.
    uint64_t collectives = 0;
    std::vector<uint64_t> sent, received;  // (size)

    std::atomic<ncclResult_t> error = ncclSuccess;
    std::string reason;  // of the error; not changed any more once there is one

    // The first failure is the one that is kept.
    void fail(ncclResult_t result, const std::string& why) {
        std::lock_guard lock(mutex_);
        if (error != ncclSuccess) return;
        reason = why;
        error = result;
    }

    // Keeps the memory of messages that MPI may still touch.
    void keep(std::unique_ptr<MessageFlow> abandoned) {
        std::lock_guard lock(mutex_);
        abandoned_.push_back(std::move(abandoned));
    }

    ~ncclComm() {
        std::lock_guard lock(mpi_mutex);
        int over = 0;
        MPI_Finalized(&over);
        if (mpi != MPI_COMM_NULL && !over) MPI_Comm_free(&mpi);
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<MessageFlow>> abandoned_;
};

// ----------------------------------------------------------------------------
// failures

// Why the last call of this thread that failed did so.
inline thread_local std::string host_nccl_reason;

inline ncclResult_t host_nccl_failure(ncclResult_t result, std::string reason) {
    host_nccl_reason = std::move(reason);
    return result;
}

inline const char* ncclGetLastError(ncclComm_t comm) {
    if (comm && comm->error != ncclSuccess) return comm->reason.c_str();
    return host_nccl_reason.c_str();
}

inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    *error = comm->error;
    return ncclSuccess;
}

// ----------------------------------------------------------------------------
// making groups

inline ncclComm_t host_communicator(MPI_Comm mpi, int rank, int size) {
    auto comm = std::make_shared<ncclComm>();
    comm->self = comm;
    comm->mpi = mpi;
    comm->rank = rank;
    comm->size = size;
    comm->sent.resize((size_t)size);
    comm->received.resize((size_t)size);
    return comm.get();
}

// Ranks of `parent` with one color form a group, ordered by key; with a negative color a rank gets null. MPI
// waits for the others while it splits, and holds the mutex. So all come together first, outside it, where
// the streams of all ranks can go on.
inline ncclComm_t host_split(MPI_Comm parent, int color, int key) {
    MPI_Request all_here;
    mpiCheck(MPI_Ibarrier(parent, &all_here));
    mpi_wait(&all_here, 1);
    MPI_Comm mpi = MPI_COMM_NULL;
    mpiCheck(MPI_Comm_split(parent, color < 0 ? MPI_UNDEFINED : color, key, &mpi));
    if (mpi == MPI_COMM_NULL) return nullptr;
    int rank, size;
    mpiCheck(MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN));
    mpiCheck(MPI_Comm_rank(mpi, &rank));
    mpiCheck(MPI_Comm_size(mpi, &size));
    return host_communicator(mpi, rank, size);
}

// Nobody needs it: the ranks are those that MPI knows.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    *id = {};
    return ncclSuccess;
}

// The group of all ranks that mpirun started, or of one.
inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId, int rank) {
    *comm = nullptr;
    if (size < 1 || rank < 0 || rank >= size) return host_nccl_failure(ncclInvalidArgument, "no such rank");
    if (size == 1) {
        *comm = host_communicator(MPI_COMM_NULL, 0, 1);
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
        *comm = host_split(MPI_COMM_WORLD, 0, rank);
        return ncclSuccess;
    } catch (const Error& error) {
        return host_nccl_failure(ncclSystemError, error.what());
    }
}

// Ranks with one color form a group, ordered by key; with NCCL_SPLIT_NOCOLOR a rank is in none, and gets
// null.
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t*) {
    *part = nullptr;
    if (comm->error != ncclSuccess) return comm->error;
    try {
        if (comm->mpi != MPI_COMM_NULL)
            *part = host_split(comm->mpi, color, key);
        else if (color >= 0)
            *part = host_communicator(MPI_COMM_NULL, 0, 1);
        return ncclSuccess;
    } catch (const Error& error) {
        return host_nccl_failure(ncclSystemError, error.what());
    }
}

// ----------------------------------------------------------------------------
// using and leaving them

inline ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
    *count = comm->size;
    return ncclSuccess;
}

inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

// Work that is on streams is still done.
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    auto last = std::move(comm->self);
    return ncclSuccess;
}

// Work that is on streams ends at once, undone.
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->fail(ncclRemoteError, "the communicator was aborted");
    return ncclCommDestroy(comm);
}
