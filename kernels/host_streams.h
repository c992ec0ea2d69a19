/*
Streams and events for host_cuda.h; errors and the device, which the rest of that file uses too; and captures:
a stream that is being captured keeps its work for a graph (host_graphs.h) instead of running it, and so does
each stream that waits for one in the same capture.

Work that throws counts as a failed kernel: until cudaGetLastError() is called, no stream runs any more work,
so nothing is computed from incomplete results, and waiting for a stream or an event returns
cudaErrorLaunchFailure.
*/
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/host_memory.h"

// ----------------------------------------------------------------------------
// errors

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidPitchValue = 12,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorIllegalState = 401,
    cudaErrorNotReady = 600,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorCapturedEvent = 907,
};

// The first error of work since the last cudaGetLastError().
class HostFailure {
public:
    void note(const char* reason) {
        std::lock_guard lock(mutex_);
        if (!happened_) snprintf(reason_, sizeof reason_, "%s", reason);
        happened_ = true;
    }
    cudaError_t state() const { return happened_ ? cudaErrorLaunchFailure : cudaSuccess; }
    cudaError_t take() { return happened_.exchange(false) ? cudaErrorLaunchFailure : cudaSuccess; }
    const char* reason() const { return reason_; }

private:
    std::mutex mutex_;
    std::atomic<bool> happened_ = false;
    char reason_[256] = "unspecified launch failure";
};
inline HostFailure host_failure;

inline const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidConfiguration:
        return "invalid configuration argument";
    case cudaErrorInvalidPitchValue:
        return "invalid pitch argument";
    case cudaErrorNotReady:
        return "device not ready";
    case cudaErrorLaunchOutOfResources:
        return "too many resources requested for launch";
    case cudaErrorNoKernelImageForDevice:
        return "no kernel image is available for execution on the device";
    case cudaErrorIllegalState:
        return "the operation cannot be performed in the present state";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
        return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
        return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
        return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent:
        return "operation not permitted on an event last recorded in a capturing stream";
    default:
        return host_failure.reason();
    }
}

// Also lets streams run work again: unlike on a GPU, nothing else is lost when work fails.
inline cudaError_t cudaGetLastError() {
    return host_failure.take();
}

// ----------------------------------------------------------------------------
// the device behind this API

// A simulated GPU replaces the functions before main(). The program sets `threads` before it makes a stream.
struct HostDevice {
    void* (*allocate)(size_t bytes) = allocate_host_memory;
    void (*release)(void* pointer) = free;
    int major = 0, minor = 0;  // compute capability
    size_t shared_bytes = 0;   // limit per block
    int threads = 0;           // OpenMP threads of each stream; 0: as OpenMP chooses
};
inline constinit HostDevice host_device;

// ----------------------------------------------------------------------------
// streams

// Asks Linux for short time slices, so that the calling thread runs soon after it wakes: it gets the same
// share of a core as before, in smaller pieces. Kernels before 6.12 ignore this, and errors do not matter.
inline void take_short_turns() {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t turn, deadline, period;  // nanoseconds
    } attributes = {};  // sched_attr of sched_setattr(2), which has no wrapper in older glibc
    constexpr long this_thread = 0, no_flags = 0;
    if (syscall(SYS_sched_getattr, this_thread, &attributes, sizeof attributes, no_flags) != 0) return;
    attributes.turn = 100'000;
    syscall(SYS_sched_setattr, this_thread, &attributes, no_flags);
}

class HostStream;

// Work of one or more streams, in the order in which the host enqueued it. That order also respects every
// event among them, so one stream can run it all.
struct HostCapture {
    HostStream* origin;
    std::vector<HostStream*> streams;
    std::vector<std::function<void()>> tasks;
    // For each stream except the origin, the length of `tasks` after its last work; erased when a stream
    // waits for that work.
    std::map<HostStream*, size_t> unjoined;
    bool invalid = false;  // a call was made that cannot be captured
    bool ended = false;
};

// The number of captures that this thread has begun and not ended. While there are any, it may not allocate,
// free, or copy synchronously.
inline thread_local int host_captures = 0;

// The number of unfinished tasks in all streams.
inline std::atomic<size_t> host_tasks = 0;

class HostStream {
public:
    explicit HostStream(bool goes_first = false)
        : worker_([this, goes_first] {
              if (goes_first) take_short_turns();
              run();
          }) {}

    // Waits for all work, so that the caller can free the memory that the work uses.
    ~HostStream() {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        worker_.join();
    }

    // The maximum number of tasks in a queue: as on a GPU, enqueueing one more blocks until there is room.
    static constexpr size_t most_tasks = 1024;

    // Tasks that order streams (event records and waits) still run after work has failed, so that nothing
    // waits forever.
    enum Kind { work, order };

    void enqueue(std::function<void()> task, Kind kind = work) {
        if (capture_) {
            capture_->tasks.push_back(std::move(task));
            if (capture_->origin != this) capture_->unjoined[this] = capture_->tasks.size();
            return;
        }
        {
            std::unique_lock lock(mutex_);
            room_.wait(lock, [this] { return tasks_.size() < most_tasks; });
            host_tasks++;
            tasks_.emplace_back(std::move(task), kind);
        }
        wake_.notify_one();
    }

    void synchronize() {
        std::unique_lock lock(mutex_);
        idle_.wait(lock, [this] { return tasks_.empty(); });
    }

    bool idle() {
        std::lock_guard lock(mutex_);
        return tasks_.empty();
    }

    // Null if work runs instead of being captured. Called only by the thread that enqueues.
    const std::shared_ptr<HostCapture>& capture() const { return capture_; }
    void join(const std::shared_ptr<HostCapture>& capture) {
        capture_ = capture;
        capture->streams.push_back(this);
    }
    void leave_capture() { capture_ = nullptr; }

private:
    // A task stays at the front of the queue while it runs, so an empty queue means that all work is done.
    void run() {
#ifdef _OPENMP
        // The number of OpenMP threads is a per-thread setting, which a new thread does not inherit.
        if (host_device.threads > 0) omp_set_num_threads(host_device.threads);
#endif
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
            if (tasks_.empty()) return;
            auto [task, kind] = std::move(tasks_.front());
            lock.unlock();
            if (kind == order || host_failure.state() == cudaSuccess) run(task);
            task = nullptr;
            lock.lock();
            tasks_.pop_front();
            room_.notify_one();
            if (tasks_.empty()) idle_.notify_all();
            if (--host_tasks == 0) host_tasks.notify_all();
        }
    }

    static void run(const std::function<void()>& task) {
        try {
            task();
        } catch (const std::exception& error) {
            host_failure.note(error.what());
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, room_, idle_;
    std::deque<std::pair<std::function<void()>, Kind>> tasks_;
    bool stopping_ = false;
    std::shared_ptr<HostCapture> capture_;
    std::thread worker_;  // last: it starts running when everything above exists
};

using cudaStream_t = HostStream*;

constexpr unsigned cudaStreamNonBlocking = 1;

// The default stream is never destroyed: its destructor would run in exit() and wait for a task that may
// never end, such as one that waits for another process which has failed. exit() abandons such tasks, in any
// stream.
inline HostStream& host_stream(cudaStream_t stream) {
    static HostStream& default_stream = *new HostStream;
    return stream ? *stream : default_stream;
}

// Refuses a call that would wait for work which is only being captured, and invalidates the capture.
inline cudaError_t refuse_while_capturing(HostStream& stream) {
    stream.capture()->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = new HostStream;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -1;
    return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
    *stream = new HostStream(priority < 0);
    return cudaSuccess;
}

// Unlike CUDA's, waits for the remaining work, forever if that never ends: a process that gives up on such
// work calls exit() or _exit() without destroying the stream.
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (host_stream(stream).capture()) return refuse_while_capturing(host_stream(stream));
    host_stream(stream).synchronize();
    return host_failure.state();
}

// Waits for the work of all streams.
inline cudaError_t cudaDeviceSynchronize() {
    for (size_t left; (left = host_tasks) > 0;) host_tasks.wait(left);
    return host_failure.state();
}

inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (host_stream(stream).capture()) return refuse_while_capturing(host_stream(stream));
    if (cudaError_t failed = host_failure.state()) return failed;
    return host_stream(stream).idle() ? cudaSuccess : cudaErrorNotReady;
}

inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data) {
    host_stream(stream).enqueue([=] { function(data); });
    return cudaSuccess;
}

// ----------------------------------------------------------------------------
// events

// The mark of one cudaEventRecord(). Waiters hold the mark that they saw, so the event can be recorded again
// meanwhile.
struct HostMark {
    std::mutex mutex;
    std::condition_variable reached_changed;
    bool reached = false;
    std::chrono::steady_clock::time_point time;

    void reach() {
        std::lock_guard lock(mutex);
        reached = true;
        time = std::chrono::steady_clock::now();
        reached_changed.notify_all();
    }

    void wait() {
        std::unique_lock lock(mutex);
        reached_changed.wait(lock, [this] { return reached; });
    }
};

struct HostEvent {
    std::shared_ptr<HostMark> mark;  // empty: never recorded, which counts as complete
    // if recorded in a capture: the stream, and the number of tasks captured before
    std::shared_ptr<HostCapture> capture;
    HostStream* stream = nullptr;
    size_t position = 0;
};

using cudaEvent_t = HostEvent*;

constexpr unsigned cudaEventDefault = 0;
constexpr unsigned cudaEventBlockingSync = 1;
constexpr unsigned cudaEventDisableTiming = 2;

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new HostEvent;
    return cudaSuccess;
}

inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    HostStream& recorded = host_stream(stream);
    event->mark = nullptr;
    event->capture = recorded.capture();
    if (event->capture) {
        event->stream = &recorded;
        event->position = event->capture->tasks.size();
        return cudaSuccess;
    }
    auto mark = std::make_shared<HostMark>();
    event->mark = mark;
    recorded.enqueue([mark] { mark->reach(); }, HostStream::order);
    return cudaSuccess;
}

// A capture's tasks are in order anyway, so a wait only records which streams belong to it.
inline cudaError_t wait_in_capture(HostStream& stream, const HostEvent& event) {
    HostCapture& capture = *event.capture;
    if (capture.ended) return cudaErrorCapturedEvent;
    if (!stream.capture()) stream.join(event.capture);
    if (stream.capture() != event.capture) {
        capture.invalid = stream.capture()->invalid = true;
        return cudaErrorStreamCaptureIsolation;
    }
    auto work = capture.unjoined.find(event.stream);
    if (event.stream != &stream && work != capture.unjoined.end() && work->second <= event.position)
        capture.unjoined.erase(work);
    if (capture.origin != &stream) capture.unjoined[&stream] = capture.tasks.size();
    return cudaSuccess;
}

inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    HostStream& waiting = host_stream(stream);
    if (event->capture) return wait_in_capture(waiting, *event);
    if (event->mark && waiting.capture()) {
        waiting.capture()->invalid = true;
        return cudaErrorStreamCaptureIsolation;
    }
    if (auto mark = event->mark) waiting.enqueue([mark] { mark->wait(); }, HostStream::order);
    return cudaSuccess;
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->capture) return cudaErrorCapturedEvent;
    if (auto mark = event->mark) mark->wait();
    return host_failure.state();
}

inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->capture) return cudaErrorCapturedEvent;
    if (!event->mark) return cudaSuccess;
    if (cudaError_t failed = host_failure.state()) return failed;
    std::lock_guard lock(event->mark->mutex);
    return event->mark->reached ? cudaSuccess : cudaErrorNotReady;
}

inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (!start->mark || !end->mark) return cudaErrorInvalidValue;
    start->mark->wait();
    end->mark->wait();
    *milliseconds = std::chrono::duration<float, std::milli>(end->mark->time - start->mark->time).count();
    return cudaSuccess;
}
