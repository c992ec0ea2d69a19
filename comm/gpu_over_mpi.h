/*
Collectives over MPI on the memory of a GPU: what they read is copied to pinned host memory, a thread for each
stream works on it there, and the results are copied back.

The stream waits for a number in pinned memory that the thread writes. A host function would not do: CUDA may
run those of all streams one after another, and one that waits for another rank would then hold back the
collective of another stream that this rank waits for.
*/
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/host_collectives.h"  // HostOperation, run_operations
#include "kernels/common.cuh"       // cudaCheck

// The driver's cuStreamWaitValue32, which the runtime finds: so the program needs no driver to link or start.
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

// The pinned memory and the thread behind one CUDA stream. Lives as long as the process: the stream and the
// thread use it until then.
class StagedStream {
public:
    explicit StagedStream(cudaStream_t stream) : stream_(stream) {
        cudaCheck(cudaGetDevice(&device_));
        cudaCheck(cudaHostAlloc((void**)&done_, sizeof *done_, cudaHostAllocMapped));
        *done_ = 0;
        std::thread([this] { work(); }).detach();
    }

    // Copies in, hands over to the thread, makes the stream wait for it, and copies out.
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
        cudaEvent_t here;  // its input is in pinned memory
        uint32_t number;
        std::vector<HostOperation> operations;
    };

    static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

    // One task after another uses the same memory. Memory that is outgrown is still in use by work on the
    // stream: it is kept. There is never more of it than of the last.
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
    uint32_t *done_ = nullptr, issued_ = 0;  // numbers of the last tasks; done_ is what the stream looks at
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
