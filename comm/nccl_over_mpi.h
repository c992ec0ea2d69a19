/*
The subset of the NCCL API that train_gpt uses, over MPI, for ranks that cannot use NCCL: ranks on CPUs, and
several ranks that share one GPU. As with NCCL, a call puts its work on a stream and returns.

Bottom up:

    comm/nccl_api.h          the types
    comm/mpi_calls.h         MPI, called by many threads
    comm/messages.h          bytes counted, links made slower; sequences of messages, several in flight
    comm/rings.h             the ring algorithms: which messages are sent
    comm/host_collectives.h  groups of ranks, sums of buffers, collectives that run in their turn on a stream
    this file                the same for the memory of a GPU; the calls
*/
#pragma once

#include "comm/messages.h"  // host_link_speed, host_bytes_sent
#include "comm/nccl_api.h"  // ncclResult_t

#ifdef WITHOUT_MPI

// A stand-in for NCCL in a program built without NCCL and MPI: the calls exist, so that the source is the
// same, but all fail. Such a program is one process, whose groups of one never make these calls.

#define NCCL_CALL_REFUSED(name)                                                                              \
    template <typename... Arguments>                                                                         \
    ncclResult_t name(Arguments...) {                                                                        \
        return ncclInvalidUsage;                                                                             \
    }

NCCL_CALL_REFUSED(ncclGetUniqueId)
NCCL_CALL_REFUSED(ncclCommInitRankConfig)
NCCL_CALL_REFUSED(ncclCommSplit)
NCCL_CALL_REFUSED(ncclCommCount)
NCCL_CALL_REFUSED(ncclCommUserRank)
NCCL_CALL_REFUSED(ncclCommGetAsyncError)
NCCL_CALL_REFUSED(ncclCommFinalize)
NCCL_CALL_REFUSED(ncclGroupStart)
NCCL_CALL_REFUSED(ncclGroupEnd)
NCCL_CALL_REFUSED(ncclAllReduce)
NCCL_CALL_REFUSED(ncclReduceScatter)
NCCL_CALL_REFUSED(ncclAllGather)
NCCL_CALL_REFUSED(ncclBroadcast)
NCCL_CALL_REFUSED(ncclSend)
NCCL_CALL_REFUSED(ncclRecv)

// not templates, because these two are passed as function pointers
inline ncclResult_t ncclCommAbort(ncclComm_t) {
    return ncclInvalidUsage;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t) {
    return ncclInvalidUsage;
}

inline const char* ncclGetLastError(ncclComm_t) {
    return "this program was built without MPI";
}

#else

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/host_collectives.h"  // HostOperation, run_operations
#include "kernels/common.cuh"       // cudaCheck

#ifdef __CUDACC__
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

// Collectives over MPI on the memory of a GPU: their input is copied to pinned host memory, a thread for each
// stream works on it there, and the results are copied back.
//
// The stream waits for a number in pinned memory that the thread writes. A host function would not do: CUDA
// may run the host functions of all streams one after another, so one that waits for another rank could hold
// back a collective, on another stream, that the other rank waits for.

// Finds cuStreamWaitValue32 through the runtime, so that the program links and starts without a driver.
inline PFN_cuStreamWaitValue32_v11070 find_wait_value() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaCheck(
        cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function, 11070, cudaEnableDefault, &found));
#else
    cudaCheck(cudaGetDriverEntryPoint("cuStreamWaitValue32", &function, cudaEnableDefault, &found));
#endif
    if (!function) fail("CUDA: the driver has no cuStreamWaitValue32; update it");
    return (PFN_cuStreamWaitValue32_v11070)function;
}

// The pinned memory and the thread that serve one CUDA stream. Lives as long as the process, because the
// stream and the thread may use it until the end.
class StagedStream {
public:
    explicit StagedStream(cudaStream_t stream) : stream_(stream) {
        cudaCheck(cudaGetDevice(&device_));
        cudaCheck(cudaHostAlloc((void**)&done_, sizeof *done_, cudaHostAllocMapped));
        *done_ = 0;
        std::thread([this] { work(); }).detach();
    }

    // Copies the input to the host, queues the operations for the thread, makes the stream wait for it, and
    // copies the results back.
    void enqueue(std::vector<HostOperation> operations) {
        std::lock_guard lock(order_);
        size_t bytes = 0;
        for (const HostOperation& o : operations)
            bytes += aligned(o.bytes_read()) + aligned(o.bytes_written());
        reserve(bytes);

        struct Result {
            char *device, *staged;
            size_t bytes;
        };
        std::vector<Result> results;
        char* next = memory_;
        for (HostOperation& o : operations) {
            size_t in = o.bytes_read(), out = o.bytes_written();
            char *staged_from = next, *staged_to = staged_from + aligned(in);
            next = staged_to + aligned(out);
            if (in) cudaCheck(cudaMemcpyAsync(staged_from, o.from, in, cudaMemcpyDeviceToHost, stream_));
            if (out) results.push_back({o.to, staged_to, out});
            o.from = staged_from;
            o.to = staged_to;
        }

        cudaEvent_t here;
        cudaCheck(cudaEventCreateWithFlags(&here, cudaEventDisableTiming | cudaEventBlockingSync));
        cudaCheck(cudaEventRecord(here, stream_));
        issued_++;
        {
            std::lock_guard hand_over(mutex_);
            tasks_.push_back({here, issued_, std::move(operations)});
        }
        wake_.notify_one();
        static const auto wait_value = find_wait_value();
        if (wait_value(stream_, (CUdeviceptr)done_, issued_, CU_STREAM_WAIT_VALUE_GEQ) != CUDA_SUCCESS)
            fail("CUDA: cuStreamWaitValue32 failed");

        for (const Result& r : results)
            cudaCheck(cudaMemcpyAsync(r.device, r.staged, r.bytes, cudaMemcpyHostToDevice, stream_));
    }

private:
    struct Task {
        cudaEvent_t here;  // recorded when the input is in pinned memory
        uint32_t number;
        std::vector<HostOperation> operations;
    };

    static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

    // All tasks use the same memory, one after another. Outgrown memory is not freed, because work on the
    // stream may still use it; all of it together is never larger than the current memory.
    void reserve(size_t bytes) {
        if (bytes <= bytes_) return;
        bytes_ = std::max(bytes, 2 * bytes_);
        cudaCheck(cudaMallocHost((void**)&memory_, bytes_));
    }

    void work() {
        cudaSetDevice(device_);
        for (;;) {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [this] { return !tasks_.empty(); });
            Task task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            cudaError_t arrived = cudaEventSynchronize(task.here);
            cudaEventDestroy(task.here);
            if (arrived != cudaSuccess) {
                for (HostOperation& operation : task.operations)
                    operation.comm->fail(ncclUnhandledCudaError, cudaGetErrorString(arrived));
            }
            run_operations(task.operations);
            std::atomic_ref<uint32_t>(*done_).store(task.number, std::memory_order_release);
        }
    }

    cudaStream_t stream_;
    int device_ = 0;
    char* memory_ = nullptr;
    size_t bytes_ = 0;
    uint32_t *done_ = nullptr, issued_ = 0;  // last task done, last task issued; the stream waits for *done_
    std::mutex order_, mutex_;
    std::condition_variable wake_;
    std::deque<Task> tasks_;
};

inline void host_enqueue(cudaStream_t stream, std::vector<HostOperation> operations) {
    static std::mutex mutex;
    static auto& streams = *new std::map<cudaStream_t, StagedStream*>;
    StagedStream* staged;
    {
        std::lock_guard lock(mutex);
        StagedStream*& entry = streams[stream];
        if (!entry) entry = new StagedStream(stream);
        staged = entry;
    }
    staged->enqueue(std::move(operations));
}

#else
// Device memory is host memory.
inline void host_enqueue(cudaStream_t stream, std::vector<HostOperation> operations) {
    auto run = [](void* data) {
        std::unique_ptr<std::vector<HostOperation>> owned((std::vector<HostOperation>*)data);
        run_operations(*owned);
    };
    cudaCheck(cudaLaunchHostFunc(stream, run, new std::vector<HostOperation>(std::move(operations))));
}
#endif

// ----------------------------------------------------------------------------
// groups of calls

struct HostCalls {
    int depth = 0;
    std::vector<std::pair<cudaStream_t, std::vector<HostOperation>>> streams;
};
inline thread_local HostCalls host_calls;

inline ncclResult_t ncclGroupStart() {
    host_calls.depth++;
    return ncclSuccess;
}

// The calls since ncclGroupStart begin together on each stream, so a rank may send and receive in any order.
// Streams do not wait for each other. As with NCCL, calls on a nonblocking group may reach their streams only
// after this returns.
inline ncclResult_t ncclGroupEnd() {
    if (host_calls.depth == 0)
        return host_nccl_failure(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--host_calls.depth > 0) return ncclSuccess;
    ncclResult_t result = ncclSuccess;
    for (auto& [stream, operations] : std::exchange(host_calls.streams, {})) {
        for (const HostOperation& operation : operations) {
            if (!operation.comm->blocking) result = host_finish(*operation.comm, [] { return true; });
        }
        host_enqueue(stream, std::move(operations));
    }
    return result;
}

// The tag of a call, below tag_of_splits. It follows from the call's number on the communicator, and is even
// for collectives, odd for messages between two ranks. Calls with equal tags are too far apart to be
// confused.
inline int next_tag(ncclComm& comm, HostCall call, int peer) {
    constexpr uint64_t numbers = tag_of_splits / 2;
    if (call == HostCall::send) return (int)(comm.sent[(size_t)peer]++ % numbers) * 2 + 1;
    if (call == HostCall::receive) return (int)(comm.received[(size_t)peer]++ % numbers) * 2 + 1;
    return (int)(comm.collectives++ % numbers) * 2;
}

inline ncclResult_t host_call(HostCall call, const void* from, void* to, size_t count, ncclDataType_t type,
                              int peer, ncclComm_t comm, cudaStream_t stream) {
    if (peer < 0 || peer >= comm->size) return host_nccl_failure(ncclInvalidArgument, "no such rank");
    if (comm->size == 1 && (call == HostCall::send || call == HostCall::receive))
        return host_nccl_failure(ncclInvalidUsage, "a group of one has no other rank to send to");
    if (ncclResult_t refused = host_refusal(*comm)) return refused;
    HostOperation operation = {comm->self,       call, (const char*)from,          (char*)to, count,
                               host_types[type], peer, next_tag(*comm, call, peer)};
    ncclGroupStart();
    auto& streams = host_calls.streams;
    auto same = [&](auto& entry) { return entry.first == stream; };
    auto entry = std::find_if(streams.begin(), streams.end(), same);
    if (entry == streams.end()) entry = streams.insert(entry, {stream, {}});
    entry->second.push_back(std::move(operation));
    return ncclGroupEnd();
}

// ----------------------------------------------------------------------------
// the calls. As in NCCL, they can work in place: with the result where the input is or, for ncclAllGather and
// ncclReduceScatter, with the rank's own part in its place in the larger buffer.

inline ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t,
                                  ncclComm_t comm, cudaStream_t stream) {
    return host_call(HostCall::all_reduce, from, to, count, type, 0, comm, stream);
}

inline ncclResult_t ncclReduceScatter(const void* from, void* to, size_t part, ncclDataType_t type,
                                      ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
    return host_call(HostCall::reduce_scatter, from, to, part, type, 0, comm, stream);
}

inline ncclResult_t ncclAllGather(const void* from, void* to, size_t part, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream) {
    return host_call(HostCall::all_gather, from, to, part, type, 0, comm, stream);
}

inline ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    return host_call(HostCall::broadcast, from, to, count, type, root, comm, stream);
}

inline ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return host_call(HostCall::send, from, nullptr, count, type, peer, comm, stream);
}

inline ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return host_call(HostCall::receive, nullptr, to, count, type, peer, comm, stream);
}

#endif
