/*
The subset of the CUDA runtime API that train_gpt uses, for machines without a GPU.

"Device" memory is host memory. A stream is a worker thread that runs its tasks in order; nothing else orders
two streams, so code that forgets an event misbehaves here as it would on a card (and ThreadSanitizer sees
it). Like non-blocking CUDA streams, streams made here do not synchronise with the default stream.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif

// ----------------------------------------------------------------------------
// errors

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719,
};

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
    case cudaErrorNotReady:
        return "device not ready";
    default:
        return "unspecified launch failure";
    }
}

// Kernels on the host report their own errors; there is no sticky state to read back.
inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

// ----------------------------------------------------------------------------
// the device behind this API

// A simulated GPU replaces the functions before main. The program sets `threads` before it makes a stream.
struct HostDevice {
    void* (*allocate)(size_t bytes) = [](size_t bytes) -> void* {
        void* pointer;
        return posix_memalign(&pointer, 256, bytes) == 0 ? pointer : nullptr;
    };
    void (*release)(void* pointer) = free;
    int major = 0, minor = 0;  // compute capability
    int threads = 0;           // OpenMP threads of each stream; 0: as OpenMP chooses
};
inline constinit HostDevice host_device;

// ----------------------------------------------------------------------------
// streams

// Lets the calling thread run soon whenever it has something to do, by asking Linux for short turns: it
// takes no more of a core than before, but in smaller pieces. Kernels before 6.12 do not mind, nor do we.
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

class HostStream {
public:
    explicit HostStream(bool goes_first = false)
        : worker_([this, goes_first] {
              if (goes_first) take_short_turns();
              run();
          }) {}

    // Waits for all work, so that a caller can free the memory which that work uses.
    ~HostStream() {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        worker_.join();
    }

    void enqueue(std::function<void()> task) {
        {
            std::lock_guard lock(mutex_);
            tasks_.push_back(std::move(task));
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

private:
    // A task stays at the front of the queue while it runs, so an empty queue means that all work is done.
    void run() {
#ifdef _OPENMP
        // OpenMP keeps this number for each thread, and a thread does not inherit it from the one that made
        // it.
        if (host_device.threads > 0) omp_set_num_threads(host_device.threads);
#endif
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
            if (tasks_.empty()) return;
            auto task = std::move(tasks_.front());
            lock.unlock();
            task();
            task = nullptr;
            lock.lock();
            tasks_.pop_front();
            if (tasks_.empty()) idle_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    std::deque<std::function<void()>> tasks_;
    bool stopping_ = false;
    std::thread worker_;  // last: it starts running when everything above exists
};

using cudaStream_t = HostStream*;

constexpr unsigned cudaStreamNonBlocking = 1;

// The default stream is never destroyed: its destructor would run in exit() and wait there for a task that
// may never end, such as one that waits for another process which has failed. exit() just leaves such tasks
// behind, in whatever stream.
inline HostStream& host_stream(cudaStream_t stream) {
    static HostStream& default_stream = *new HostStream;
    return stream ? *stream : default_stream;
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

// Unlike CUDA's, waits for the work that is left, and so for ever if that never ends: a process that gives up
// on such work calls exit() or _exit() and leaves the stream alone.
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    host_stream(stream).synchronize();
    return cudaSuccess;
}

inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return host_stream(stream).idle() ? cudaSuccess : cudaErrorNotReady;
}

inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data) {
    host_stream(stream).enqueue([=] { function(data); });
    return cudaSuccess;
}

// ----------------------------------------------------------------------------
// events

// What one cudaEventRecord marked. Waiters hold the mark they saw, so an event can be recorded again
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
};

using cudaEvent_t = HostEvent*;

constexpr unsigned cudaEventDefault = 0;
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
    auto mark = std::make_shared<HostMark>();
    event->mark = mark;
    host_stream(stream).enqueue([mark] { mark->reach(); });
    return cudaSuccess;
}

inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    if (auto mark = event->mark) host_stream(stream).enqueue([mark] { mark->wait(); });
    return cudaSuccess;
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (auto mark = event->mark) mark->wait();
    return cudaSuccess;
}

inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (!event->mark) return cudaSuccess;
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

// ----------------------------------------------------------------------------
// memory

// Bytes this process could still take: what the kernel calls available, or what is left of a control group's
// limit.
inline size_t host_available_memory() {
    auto first_number = [](const char* path, const char* key) -> size_t {
        FILE* file = fopen(path, "r");
        if (!file) return SIZE_MAX;
        char line[256];
        unsigned long long value = 0;
        bool found = false;
        while (!found && fgets(line, sizeof line, file)) {
            if (strncmp(line, key, strlen(key)) == 0) found = sscanf(line + strlen(key), "%llu", &value) == 1;
        }
        fclose(file);
        return found ? (size_t)value : SIZE_MAX;
    };
    size_t available = first_number("/proc/meminfo", "MemAvailable:");
    if (available != SIZE_MAX) available *= 1024;
    size_t limit = first_number("/sys/fs/cgroup/memory.max", "");
    size_t used = first_number("/sys/fs/cgroup/memory.current", "");
    if (limit != SIZE_MAX && used != SIZE_MAX) available = std::min(available, limit - std::min(limit, used));
    return available;
}

// Linux hands out memory it does not have and kills the process later, so the check is ours.
inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (bytes > host_available_memory()) return cudaErrorMemoryAllocation;
    *pointer = host_device.allocate(bytes);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

inline cudaError_t cudaFree(void* pointer) {
    if (pointer) host_device.release(pointer);
    return cudaSuccess;
}

inline cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
    return cudaMalloc(pointer, bytes);
}
inline cudaError_t cudaFreeHost(void* pointer) {
    return cudaFree(pointer);
}

inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *free_bytes = host_available_memory();
    *total_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGE_SIZE);
    return cudaSuccess;
}

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault,
};

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
    if (bytes) host_stream(stream).enqueue([=] { memcpy(to, from, bytes); });
    return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return cudaStreamSynchronize(nullptr);
}

inline cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    host_stream(stream).enqueue([=] {
        constexpr size_t piece = size_t(1) << 20;
#pragma omp parallel for if (bytes > piece)
        for (size_t at = 0; at < bytes; at += piece) {
            memset((char*)pointer + at, value, std::min(piece, bytes - at));
        }
    });
    return cudaSuccess;
}

inline cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
    cudaMemsetAsync(pointer, value, bytes, nullptr);
    return cudaStreamSynchronize(nullptr);
}

// ----------------------------------------------------------------------------
// devices

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
    int multiProcessorCount;
    int major, minor;
};

inline cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    std::string name = "CPU";
    if (FILE* file = fopen("/proc/cpuinfo", "r")) {
        char line[256];
        while (fgets(line, sizeof line, file)) {
            const char* colon = strchr(line, ':');
            if (strncmp(line, "model name", 10) == 0 && colon) {
                name = colon + 2;
                name.erase(name.find_last_not_of(" \n") + 1);
                break;
            }
        }
        fclose(file);
    }
    snprintf(properties->name, sizeof properties->name, "%s", name.c_str());
    size_t free_bytes;
    cudaMemGetInfo(&free_bytes, &properties->totalGlobalMem);
    properties->major = host_device.major;
    properties->minor = host_device.minor;
    properties->multiProcessorCount = (int)std::thread::hardware_concurrency();
    return cudaSuccess;
}
