/*
The subset of the NCCL API that train_gpt uses, over MPI, for ranks that have no NCCL between them: ranks on CPUs, and
several ranks that share one GPU.

A call puts its work on a stream and returns, as with NCCL. Buffers go around the ring of ranks in pieces, several of
them under way: one is reduced while the next is transferred. A sum is formed in the order of the ring, by one rank for
each element, and copied to the others; so all ranks end with the same bits, and every run gives the same. The bytes
sent are exactly those of the ring formulas.

The buffers are those of the device where "device" memory is host memory. In a CUDA build they are staged: copied to
pinned memory, worked on by a thread for each stream, copied back. The stream waits for a number in pinned memory that
the thread writes. A host function would not do: CUDA may run those of all streams one after another, and one that
waits for another rank would then hold back the collective of another stream that this rank waits for.

Built WITHOUT_MPI there are groups of one rank only.
*/
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#ifdef DEVICE_CPU
#include "kernels/host_cuda.h"
#else
#include <cuda_runtime.h>
#endif

#ifdef __CUDACC__
#include <condition_variable>
#include <cudaTypedefs.h>
#include <deque>
#include <map>
#include <thread>
#endif

#include "comm/mpi_calls.h"

// ----------------------------------------------------------------------------
// types, with NCCL's names and values

enum ncclResult_t {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
};

enum ncclDataType_t {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat = 7,
    ncclDouble = 8,
    ncclBfloat16 = 9,
};

enum ncclRedOp_t { ncclSum = 0, ncclMax = 2 };

constexpr int NCCL_SPLIT_NOCOLOR = -1;

struct ncclUniqueId {
    char internal[128];
};

struct ncclConfig_t;  // none of its fields means anything here: give nullptr

inline const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "a call of CUDA failed";
    case ncclSystemError:
        return "a call of MPI or of the system failed";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclInvalidUsage:
        return "invalid usage";
    case ncclRemoteError:
        return "another process failed or left";
    case ncclInProgress:
        return "the operation is in progress";
    default:
        return "internal error";
    }
}

inline ncclResult_t ncclGetVersion(int* version) {
    *version = 21803;  // the first version that has all of this
    return ncclSuccess;
}

// ----------------------------------------------------------------------------
// communicators

// Memory for the messages of reductions, lent to one at a time and kept.
class HostScratch {
public:
    std::unique_ptr<char[]> take(size_t bytes) {
        std::lock_guard lock(mutex_);
        if (free_.empty()) return std::unique_ptr<char[]>(new char[bytes]);
        auto memory = std::move(free_.back());
        free_.pop_back();
        return memory;
    }

    void give(std::unique_ptr<char[]> memory) {
        std::lock_guard lock(mutex_);
        free_.push_back(std::move(memory));
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<char[]>> free_;
};

// Work on streams shares its ownership, so a communicator can be destroyed while it is used.
struct ncclComm {
    int rank = 0, size = 1;
    std::atomic<ncclResult_t> error = ncclSuccess;
    HostScratch scratch;
    std::shared_ptr<ncclComm> self;
    // Every rank numbers its calls alike, and a call's messages carry its number.
    uint64_t collectives = 0;
    std::vector<uint64_t> sent, received;  // (size)

    // The first failure is the one that is kept.
    void fail(ncclResult_t result, const std::string& why) {
        std::lock_guard lock(reason_mutex);
        if (error != ncclSuccess) return;
        reason = why;
        error = result;
    }
    std::mutex reason_mutex;
    std::string reason;  // not changed any more once there is an error

#ifndef WITHOUT_MPI
    MPI_Comm mpi = MPI_COMM_NULL;
    int most_tags = 32767;

    ~ncclComm() {
        std::lock_guard lock(mpi_mutex);
        int over = 0;
        MPI_Finalized(&over);
        if (mpi != MPI_COMM_NULL && !over) MPI_Comm_free(&mpi);
    }
#endif
};
using ncclComm_t = ncclComm*;

// Why a call failed, or the last that failed before.
inline std::string& host_nccl_reason() {
    thread_local std::string reason;
    return reason;
}
inline const char* ncclGetLastError(ncclComm_t comm) {
    if (comm && comm->error != ncclSuccess) return comm->reason.c_str();
    return host_nccl_reason().c_str();
}

inline ncclResult_t host_nccl_failure(ncclResult_t result, std::string reason) {
    host_nccl_reason() = std::move(reason);
    return result;
}

// Sends of this process are held to this speed, as if it had one full-duplex link. 0: off.
inline void host_link_speed([[maybe_unused]] double gigabytes_per_second) {
#ifndef WITHOUT_MPI
    host_link.set_speed(gigabytes_per_second);
#endif
}

// What collectives of this process gave to MPI to send.
inline uint64_t host_bytes_sent() {
#ifndef WITHOUT_MPI
    return host_link.bytes_sent;
#else
    return 0;
#endif
}

// ----------------------------------------------------------------------------
// reductions

struct HostBfloat16 {
    uint16_t bits;

    float value() const { return std::bit_cast<float>((uint32_t)bits << 16); }
    static HostBfloat16 rounded(float value) {  // to nearest even
        uint32_t word = std::bit_cast<uint32_t>(value);
        uint32_t bits = (word + 0x7fff + (word >> 16 & 1)) >> 16;
        return {(uint16_t)(value != value ? word >> 16 | 0x40 : bits)};
    }
    HostBfloat16 operator+(HostBfloat16 other) const { return rounded(value() + other.value()); }
    bool operator>(HostBfloat16 other) const { return value() > other.value(); }
    bool operator!=(HostBfloat16 other) const { return value() != other.value(); }
};

template <typename T>
void host_sum(char* out, const char* a, const char* b, size_t count) {
    auto* to = (T*)out;
    auto *first = (const T*)a, *second = (const T*)b;
    for (size_t i = 0; i < count; i++) to[i] = T(first[i] + second[i]);
}

// A number wins over NaN, as in NCCL.
template <typename T>
void host_max(char* out, const char* a, const char* b, size_t count) {
    auto* to = (T*)out;
    auto *first = (const T*)a, *second = (const T*)b;
    for (size_t i = 0; i < count; i++)
        to[i] = first[i] > second[i] || second[i] != second[i] ? first[i] : second[i];
}

using HostCombine = void (*)(char* out, const char* a, const char* b, size_t count);

struct HostType {
    size_t bytes = 0;  // 0: not a type
    HostCombine sum = nullptr, max = nullptr;
};

template <typename T>
constexpr HostType host_type() {
    return {sizeof(T), host_sum<T>, host_max<T>};
}

inline HostType host_type_of(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
        return host_type<int8_t>();
    case ncclUint8:
        return host_type<uint8_t>();
    case ncclInt32:
        return host_type<int32_t>();
    case ncclUint32:
        return host_type<uint32_t>();
    case ncclInt64:
        return host_type<int64_t>();
    case ncclUint64:
        return host_type<uint64_t>();
    case ncclFloat:
        return host_type<float>();
    case ncclDouble:
        return host_type<double>();
    case ncclBfloat16:
        return host_type<HostBfloat16>();
    }
    return {};
}

// ----------------------------------------------------------------------------
// operations

enum class HostCall { all_reduce, reduce_scatter, all_gather, broadcast, send, receive };

struct HostOperation {
    std::shared_ptr<ncclComm> comm;
    HostCall call;
    const char* from;
    char* to;
    size_t count;  // elements of the whole buffer; of reduce_scatter and all_gather: of one rank's part
    size_t element_bytes;
    HostCombine combine = nullptr;
    int peer = -1;  // or root
    int tag = 0;

    size_t bytes() const { return count * element_bytes; }
    size_t all_bytes() const { return bytes() * (size_t)comm->size; }
    bool reads() const {
        return call != HostCall::receive && (call != HostCall::broadcast || peer == comm->rank);
    }
    size_t bytes_read() const {
        return !reads() ? 0 : call == HostCall::reduce_scatter ? all_bytes() : bytes();
    }
    size_t bytes_written() const {
        return call == HostCall::send ? 0 : call == HostCall::all_gather ? all_bytes() : bytes();
    }

    // What needs no other rank: the own part to where it belongs.
    void copy_own() const {
        size_t own = call == HostCall::all_gather ? (size_t)comm->rank * bytes() : 0;
        bool moves = call == HostCall::all_gather || (call == HostCall::broadcast && peer == comm->rank) ||
                     (comm->size == 1 && call <= HostCall::reduce_scatter);
        if (moves && to + own != from && bytes()) memcpy(to + own, from, bytes());
    }
};

#ifdef WITHOUT_MPI

inline void run_operations(std::vector<HostOperation>& operations) {
    for (HostOperation& operation : operations) operation.copy_own();
}

#else

inline std::unique_ptr<MessageFlow> make_flow(const HostOperation& operation, char* scratch) {
    const HostOperation& o = operation;
    int rank = o.comm->rank, size = o.comm->size;
    auto chain = [&](char* data, int from, int to) {
        return std::make_unique<ChainFlow>(o.comm->mpi, o.tag, data, o.bytes(), from, to);
    };
    auto ring = [&](RingPass pass, size_t count) {
        RingFlow::Buffers buffers = {o.from, o.to, scratch, count, o.element_bytes, o.combine};
        return std::make_unique<RingFlow>(o.comm->mpi, o.tag, rank, size, pass, buffers);
    };
    int next = (rank + 1) % size;
    switch (o.call) {
    case HostCall::all_reduce:
        return ring(RingPass::both, o.count);
    case HostCall::reduce_scatter:
        return ring(RingPass::reduce_scatter, o.count * (size_t)size);
    case HostCall::all_gather:
        return ring(RingPass::all_gather, o.count * (size_t)size);
    case HostCall::broadcast:
        return chain(o.to, rank == o.peer ? -1 : (rank + size - 1) % size, next == o.peer ? -1 : next);
    case HostCall::send:
        return chain(const_cast<char*>(o.from), -1, o.peer);
    case HostCall::receive:
        return chain(o.to, o.peer, -1);
    }
    return nullptr;
}

// Runs on the thread of a stream: all operations at once, whatever the order in which the other ranks come to theirs.
// An error is kept in the communicator, and what is still to be done on that is left undone.
inline void run_operations(std::vector<HostOperation>& operations) {
    struct Running {
        ncclComm* comm;
        std::unique_ptr<char[]> scratch;
        std::unique_ptr<MessageFlow> flow;
    };
    std::vector<Running> running;
    auto guarded = [](ncclComm& comm, auto&& step) {
        try {
            return step();
        } catch (const std::exception& error) {
            comm.fail(ncclRemoteError, error.what());
            return false;
        }
    };
    for (HostOperation& operation : operations) {
        ncclComm& comm = *operation.comm;
        if (comm.error != ncclSuccess) continue;
        operation.copy_own();
        if (comm.mpi == MPI_COMM_NULL) continue;
        guarded(comm, [&] {
            std::unique_ptr<char[]> scratch;
            if (operation.combine) scratch = comm.scratch.take(RingFlow::scratch_bytes);
            auto flow = make_flow(operation, scratch.get());
            running.push_back({&comm, std::move(scratch), std::move(flow)});
            return true;
        });
    }
    Patience patience;
    while (!running.empty()) {
        bool any = false;
        auto next_send = Clock::time_point::max();
        for (size_t i = 0; i < running.size();) {
            Running& run = running[i];
            any = guarded(*run.comm, [&] { return run.flow->advance(); }) || any;
            bool failed = run.comm->error != ncclSuccess;
            if (!failed && !run.flow->done()) {
                next_send = std::min(next_send, run.flow->next_send());
                i++;
                continue;
            }
            if (failed) run.flow->abandon();
            if (run.scratch) run.comm->scratch.give(std::move(run.scratch));
            running.erase(running.begin() + (ptrdiff_t)i);
        }
        if (any)
            patience.reset();
        else if (!running.empty())
            patience.wait(next_send);
    }
}

#endif

#ifdef __CUDACC__
// ----------------------------------------------------------------------------
// staging

// The pinned memory and the thread behind one CUDA stream. Lives as long as the process.
class StagedStream {
public:
    explicit StagedStream(cudaStream_t stream) : stream_(stream) {}

    // Copies in, hands over to the thread, makes the stream wait for it, and copies out.
    ncclResult_t enqueue(std::vector<HostOperation> operations) {
        std::lock_guard lock(order_);
        ncclResult_t ready = start();
        if (ready != ncclSuccess) return ready;
        size_t bytes = 0;
        for (HostOperation& operation : operations) bytes += 2 * room(operation);
        if (!reserve(bytes)) return failure("cudaMallocHost of %zu bytes for staging failed", bytes);
        std::vector<Copy> copies_out;
        char* next = memory_;
        bool good = true;
        for (HostOperation& o : operations) {
            size_t in = o.bytes_read(), out = o.bytes_written();
            bool overlap = in && out && o.from < o.to + out && o.to < o.from + in;
            char* first = next;
            const char* device_first = overlap ? std::min<const char*>(o.from, o.to) : o.from;
            char* staged_from = overlap ? first + (o.from - device_first) : first;
            char* staged_to = overlap ? first + (o.to - device_first) : first + aligned(in);
            next += 2 * room(o);
            if (in) good = good && copy(staged_from, o.from, in, cudaMemcpyDeviceToHost);
            if (out) copies_out.push_back({o.to, staged_to, out});
            o.from = staged_from;
            o.to = staged_to;
        }
        cudaEvent_t here;
        good =
            good &&
            cudaEventCreateWithFlags(&here, cudaEventDisableTiming | cudaEventBlockingSync) == cudaSuccess &&
            cudaEventRecord(here, stream_) == cudaSuccess;
        if (!good) return failure("copying to the staging memory failed (%zu bytes)", bytes);
        issued_++;
        {
            std::lock_guard hand_over(mutex_);
            tasks_.push_back({here, issued_, std::move(operations)});
        }
        wake_.notify_one();
        good = wait_value_((CUstream)stream_, (CUdeviceptr)done_, issued_, CU_STREAM_WAIT_VALUE_GEQ) ==
               CUDA_SUCCESS;
        for (const Copy& out : copies_out)
            good = good && copy(out.to, out.from, out.bytes, cudaMemcpyHostToDevice);
        return good ? ncclSuccess : failure("waiting for the staging thread failed (%zu bytes)", bytes);
    }

private:
    struct Task {
        cudaEvent_t here;
        uint32_t number;
        std::vector<HostOperation> operations;
    };
    struct Copy {
        char* to;
        const char* from;
        size_t bytes;
    };

    static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }
    static size_t room(const HostOperation& o) {
        return aligned(std::max(o.bytes_read(), o.bytes_written()));
    }

    static ncclResult_t failure(const char* format, size_t bytes) {
        char words[200];
        snprintf(words, sizeof words, format, bytes);
        cudaError_t error = cudaGetLastError();
        return host_nccl_failure(ncclUnhandledCudaError,
                                 std::string(words) + ": " + cudaGetErrorString(error));
    }

    bool copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
        return cudaMemcpyAsync(to, from, bytes, kind, stream_) == cudaSuccess;
    }

    ncclResult_t start() {
        if (done_) return ncclSuccess;
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function, 11070, cudaEnableDefault, &found);
#else
        cudaGetDriverEntryPoint("cuStreamWaitValue32", &function, cudaEnableDefault, &found);
#endif
        if (!function)
            return host_nccl_failure(ncclSystemError, "the driver has no cuStreamWaitValue32; update it");
        wait_value_ = (PFN_cuStreamWaitValue32_v11070)function;
        if (cudaGetDevice(&device_) != cudaSuccess ||
            cudaHostAlloc((void**)&done_, sizeof *done_, cudaHostAllocMapped) != cudaSuccess)
            return failure("cudaHostAlloc of %zu bytes failed", sizeof *done_);
        *done_ = 0;
        std::thread([this] { run(); }).detach();
        return ncclSuccess;
    }

    // Memory that is outgrown is still in use by work on the stream: it is kept. There is never more of it than of the
    // last.
    bool reserve(size_t bytes) {
        if (bytes <= bytes_) return true;
        size_t larger = std::max(bytes, 2 * bytes_);
        if (cudaMallocHost((void**)&memory_, larger) != cudaSuccess) return false;
        bytes_ = larger;
        return true;
    }

    void run() {
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
    PFN_cuStreamWaitValue32_v11070 wait_value_ = nullptr;
    uint32_t *done_ = nullptr, issued_ = 0;  // numbers of tasks
    char* memory_ = nullptr;
    size_t bytes_ = 0;
    std::mutex order_, mutex_;
    std::condition_variable wake_;
    std::deque<Task> tasks_;
};

inline ncclResult_t host_enqueue(cudaStream_t stream, std::vector<HostOperation> operations) {
    static std::mutex mutex;
    static auto& streams =
        *new std::map<cudaStream_t, StagedStream*>;  // threads use them until the process ends
    StagedStream* staged;
    {
        std::lock_guard lock(mutex);
        StagedStream*& entry = streams[stream];
        if (!entry) entry = new StagedStream(stream);
        staged = entry;
    }
    return staged->enqueue(std::move(operations));
}

#else

inline ncclResult_t host_enqueue(cudaStream_t stream, std::vector<HostOperation> operations) {
    auto run = [](void* data) {
        std::unique_ptr<std::vector<HostOperation>> owned((std::vector<HostOperation>*)data);
        run_operations(*owned);
    };
    cudaError_t error =
        cudaLaunchHostFunc(stream, run, new std::vector<HostOperation>(std::move(operations)));
    return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

#endif

// ----------------------------------------------------------------------------
// groups

struct HostCalls {
    int depth = 0;
    std::vector<std::pair<cudaStream_t, std::vector<HostOperation>>> streams;
};
inline thread_local HostCalls host_calls;

inline ncclResult_t ncclGroupStart() {
    host_calls.depth++;
    return ncclSuccess;
}

// The calls since ncclGroupStart begin together on each stream, so a rank may send and receive in any order. Streams do
// not wait for each other.
inline ncclResult_t ncclGroupEnd() {
    if (host_calls.depth == 0)
        return host_nccl_failure(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--host_calls.depth > 0) return ncclSuccess;
    auto streams = std::move(host_calls.streams);
    host_calls.streams.clear();
    ncclResult_t result = ncclSuccess;
    for (auto& [stream, operations] : streams) {
        ncclResult_t enqueued = host_enqueue(stream, std::move(operations));
        if (result == ncclSuccess) result = enqueued;
    }
    return result;
}

inline ncclResult_t host_call(HostOperation operation, ncclComm_t comm, cudaStream_t stream) {
    if (operation.bytes() &&
        ((operation.reads() && !operation.from) || (operation.bytes_written() && !operation.to)))
        return host_nccl_failure(ncclInvalidArgument, "a buffer is a null pointer");
    if (comm->error != ncclSuccess) return comm->error;
#ifndef WITHOUT_MPI
    // Collectives have even tags, and messages between two ranks odd ones.
    bool pair = operation.call == HostCall::send || operation.call == HostCall::receive;
    auto peer = (size_t)operation.peer;
    uint64_t number = operation.call == HostCall::send      ? comm->sent[peer]++
                      : operation.call == HostCall::receive ? comm->received[peer]++
                                                            : comm->collectives++;
    operation.tag = (int)(number % (uint64_t)(comm->most_tags / 2)) * 2 + pair;
#endif
    ncclGroupStart();
    auto& streams = host_calls.streams;
    auto same = [&](auto& entry) { return entry.first == stream; };
    auto entry = std::find_if(streams.begin(), streams.end(), same);
    if (entry == streams.end()) entry = streams.insert(entry, {stream, {}});
    entry->second.push_back(std::move(operation));
    return ncclGroupEnd();
}

// ----------------------------------------------------------------------------
// calls on data. As in NCCL, the result may stand where the input is: at the same place, or, of ncclAllGather and
// ncclReduceScatter, where the own part is in the larger buffer.

inline ncclResult_t host_reduction(HostCall call, const void* from, void* to, size_t count,
                                   ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                   cudaStream_t stream) {
    HostType traits = host_type_of(type);
    if (!comm || !traits.bytes || (op != ncclSum && op != ncclMax))
        return host_nccl_failure(ncclInvalidArgument, "no such communicator, type or operation");
    HostCombine combine = op == ncclSum ? traits.sum : traits.max;
    return host_call({comm->self, call, (const char*)from, (char*)to, count, traits.bytes, combine}, comm,
                     stream);
}

inline ncclResult_t host_transfer(HostCall call, const void* from, void* to, size_t count,
                                  ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    HostType traits = host_type_of(type);
    if (!comm || !traits.bytes || peer < 0 || peer >= comm->size)
        return host_nccl_failure(ncclInvalidArgument, "no such communicator, type or rank");
    bool pair = call == HostCall::send || call == HostCall::receive;
    if (pair && comm->size == 1)
        return host_nccl_failure(ncclInvalidUsage, "a group of one has no one to send to");
    return host_call({comm->self, call, (const char*)from, (char*)to, count, traits.bytes, nullptr, peer},
                     comm, stream);
}

inline ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return host_reduction(HostCall::all_reduce, from, to, count, type, op, comm, stream);
}

inline ncclResult_t ncclReduceScatter(const void* from, void* to, size_t part, ncclDataType_t type,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return host_reduction(HostCall::reduce_scatter, from, to, part, type, op, comm, stream);
}

inline ncclResult_t ncclAllGather(const void* from, void* to, size_t part, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream) {
    return host_transfer(HostCall::all_gather, from, to, part, type, 0, comm, stream);
}

inline ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    return host_transfer(HostCall::broadcast, from, to, count, type, root, comm, stream);
}

inline ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return host_transfer(HostCall::send, from, nullptr, count, type, peer, comm, stream);
}

inline ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return host_transfer(HostCall::receive, nullptr, to, count, type, peer, comm, stream);
}

// ----------------------------------------------------------------------------
// calls on communicators

inline ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
    *count = comm->size;
    return ncclSuccess;
}

inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    *error = comm->error;
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

inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::random_device random;
    for (char& byte : id->internal) byte = (char)random();
    return ncclSuccess;
}

inline std::shared_ptr<ncclComm> host_communicator(int rank, int size) {
    auto comm = std::make_shared<ncclComm>();
    comm->self = comm;
    comm->rank = rank;
    comm->size = size;
    comm->sent.resize((size_t)size);
    comm->received.resize((size_t)size);
    return comm;
}

#ifndef WITHOUT_MPI

// A communicator over the group that `make` gives. Making one waits for the others inside MPI, so all come together
// first, where the streams of all ranks can go on.
template <typename Make>
ncclResult_t host_make_communicator(MPI_Comm parent, ncclComm_t* made, Make&& make) {
    *made = nullptr;
    try {
        MPI_Request all_here;
        mpiCheck(MPI_Ibarrier(parent, &all_here));
        mpi_wait(&all_here, 1);
        MPI_Comm mpi = MPI_COMM_NULL;
        mpiCheck(make(&mpi));
        if (mpi == MPI_COMM_NULL) return ncclSuccess;
        int rank, size, *most_tags, known;
        mpiCheck(MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN));
        mpiCheck(MPI_Comm_rank(mpi, &rank));
        mpiCheck(MPI_Comm_size(mpi, &size));
        mpiCheck(MPI_Comm_get_attr(mpi, MPI_TAG_UB, &most_tags, &known));
        auto comm = host_communicator(rank, size);
        comm->mpi = mpi;
        if (known) comm->most_tags = *most_tags;
        *made = comm.get();
        return ncclSuccess;
    } catch (const Error& error) {
        return host_nccl_failure(ncclSystemError, error.what());
    }
}

// Whether all ranks of the world hold the same id.
inline bool host_same_id(const ncclUniqueId& id) {
    uint64_t hash = 14695981039346656037u;
    for (char byte : id.internal) hash = (hash ^ (unsigned char)byte) * 1099511628211u;
    uint64_t mine[2] = {hash, ~hash}, least[2];
    MPI_Request request;
    mpiCheck(MPI_Iallreduce(mine, least, 2, MPI_UINT64_T, MPI_MIN, MPI_COMM_WORLD, &request));
    mpi_wait(&request, 1);
    return least[0] == ~least[1];
}

#endif

// The group of all ranks that mpirun started, or of one.
inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, [[maybe_unused]] ncclUniqueId id, int rank) {
    *comm = nullptr;
    if (size < 1 || rank < 0 || rank >= size) return host_nccl_failure(ncclInvalidArgument, "no such rank");
    if (size == 1) {
        *comm = host_communicator(0, 1).get();
        return ncclSuccess;
    }
#ifdef WITHOUT_MPI
    return host_nccl_failure(ncclInvalidUsage, "this program was built without MPI");
#else
    try {
        int joined = 0, threads = 0, world_size = 0, world_rank = 0;
        mpiCheck(MPI_Initialized(&joined));
        if (!joined) return host_nccl_failure(ncclInvalidUsage, "MPI is not initialized");
        mpiCheck(MPI_Query_thread(&threads));
        mpiCheck(MPI_Comm_size(MPI_COMM_WORLD, &world_size));
        mpiCheck(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank));
        if (threads < MPI_THREAD_SERIALIZED)
            return host_nccl_failure(ncclInvalidUsage, "MPI was initialized for one thread only");
        if (size != world_size || rank != world_rank)
            return host_nccl_failure(ncclInvalidUsage, "the ranks are not those of MPI_COMM_WORLD");
        if (!host_same_id(id)) return host_nccl_failure(ncclInvalidArgument, "the ranks hold different ids");
    } catch (const Error& error) {
        return host_nccl_failure(ncclSystemError, error.what());
    }
    auto make = [](MPI_Comm* mpi) { return MPI_Comm_dup(MPI_COMM_WORLD, mpi); };
    return host_make_communicator(MPI_COMM_WORLD, comm, make);
#endif
}

// Ranks with one color form a group, ordered by key; with NCCL_SPLIT_NOCOLOR a rank is in none, and gets null.
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, [[maybe_unused]] int key, ncclComm_t* part,
                                  ncclConfig_t*) {
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
        return host_nccl_failure(ncclInvalidArgument, "a color is negative");
    if (comm->error != ncclSuccess) return comm->error;
    if (comm->size == 1) {
        *part = color < 0 ? nullptr : host_communicator(0, 1).get();
        return ncclSuccess;
    }
#ifdef WITHOUT_MPI
    return host_nccl_failure(ncclInternalError, "a group of several without MPI");
#else
    auto make = [&](MPI_Comm* mpi) {
        return MPI_Comm_split(comm->mpi, color < 0 ? MPI_UNDEFINED : color, key, mpi);
    };
    return host_make_communicator(comm->mpi, part, make);
#endif
}
