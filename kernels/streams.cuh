/*
Streams; the copies and fills that run on them beside kernels; and events, for which streams and the host
wait. The model makes CUDA calls for these only in this file.
*/
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <climits>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "kernels/common.cuh"

// ----------------------------------------------------------------------------
// streams

// Returns a new stream. first: it has priority over others that compete for the GPU.
inline cudaStream_t new_stream(bool first = false) {
    if (ledger) return ledger->imagine<cudaStream_t>();
    int least, greatest;
    cudaStream_t stream;
    cudaCheck(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaCheck(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, first ? greatest : least));
    return stream;
}

// Waits for all work in the stream.
inline void synchronize(cudaStream_t stream) {
    if (!ledger) cudaCheck(cudaStreamSynchronize(stream));
}

// For destructors: waits, and ignores errors.
inline void drain(cudaStream_t stream) {
    if (!is_imagined(stream)) cudaStreamSynchronize(stream);
}

// Destroys the stream after its work is done.
inline void end_stream(cudaStream_t stream) {
    drain(stream);
    if (!is_imagined(stream)) cudaStreamDestroy(stream);
}

// ----------------------------------------------------------------------------
// copies and fills
//
// They return once the work is on the stream. The memory must stay valid until the work is done.

// Copies `count` elements between any two places on the device and on the host.
template <typename T>
void copy_async(T* to, const std::type_identity_t<T>* from, size_t count, cudaStream_t stream) {
    if (ledger) {
        LaunchCost cost = {.read = array_bytes(from, count), .written = array_bytes(to, count)};
        if (holder_of(from) != holder_of(to)) cost.place = LaunchCost::host_link;
        return ledger->launched(nullptr, stream, cost);
    }
    cudaCheck(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDefault, stream));
}

template <typename T>
void zero_async(T* data, size_t count, cudaStream_t stream) {
    if (ledger) return ledger->launched(nullptr, stream, LaunchCost{.written = array_bytes(data, count)});
    cudaCheck(cudaMemsetAsync(data, 0, count * sizeof(T), stream));
}

// Copies host memory to the device, in stream order, and waits. A plain cudaMemcpy can return before the
// bytes have arrived, and non-blocking streams do not wait for the stream that it uses.
template <typename T>
void copy_to_device(T* to, const T* from, size_t count, cudaStream_t stream) {
    copy_async(to, from, count, stream);
    synchronize(stream);
}

// Copies columns of one matrix to columns of another, on the device: `columns` elements in each of `rows`
// rows, which begin `from_width` elements apart in the source and `to_width` in the destination.
template <typename T>
void copy_columns(T* to, size_t to_width, const T* from, size_t from_width, size_t columns, size_t rows,
                  cudaStream_t stream) {
    // CUDA limits the distance between rows, and checks it even for a single row, which has none.
    if (rows == 1 || std::max(to_width, from_width) * sizeof(T) > INT_MAX) {
        for (size_t row = 0; row < rows; row++)
            copy_async(to + row * to_width, from + row * from_width, columns, stream);
        return;
    }
    if (ledger)
        return ledger->launched(
            nullptr, stream,
            LaunchCost{.read = array_bytes(from, rows, columns), .written = array_bytes(to, rows, columns)});
    cudaCheck(cudaMemcpy2DAsync(to, to_width * sizeof(T), from, from_width * sizeof(T), columns * sizeof(T),
                                rows, cudaMemcpyDeviceToDevice, stream));
}

// ----------------------------------------------------------------------------
// work on the host

// Runs work() on the host when the stream reaches it; the caller may already be at the next step. work() must
// not call CUDA. threads: number of OpenMP threads; 0: as OpenMP chooses.
inline void host_work(cudaStream_t stream, int threads, std::function<void()> work) {
    struct Task {
        int threads;
        std::function<void()> work;
    };
    auto run = [](void* data) {
        std::unique_ptr<Task> task((Task*)data);
#ifdef _OPENMP
        // this thread belongs to CUDA or to a stream and has its own OpenMP setting
        if (task->threads) omp_set_num_threads(task->threads);
#endif
        task->work();
    };
    cudaCheck(cudaLaunchHostFunc(stream, run, new Task{threads, std::move(work)}));
}

// ----------------------------------------------------------------------------
// events

// A point in a stream's work: the last one at which the event was recorded.
class Event {
public:
    // For ordering only: it measures no time.
    Event() : Event(cudaEventDisableTiming) {}
    explicit Event(unsigned flags) {
        if (ledger)
            event_ = ledger->imagine<cudaEvent_t>();
        else
            cudaCheck(cudaEventCreateWithFlags(&event_, flags));
    }
    ~Event() {
        if (event_ && !is_imagined(event_)) cudaEventDestroy(event_);
    }
    Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    Event& operator=(Event&&) = delete;

    void record(cudaStream_t stream) const {
        if (ledger) return ledger->add({.kind = LedgerEntry::record, .stream = stream, .event = event_});
        cudaCheck(cudaEventRecord(event_, stream));
    }
    // Makes the stream's next work wait for that point. An event that was never recorded counts as reached.
    void hold(cudaStream_t stream) const {
        if (ledger) return ledger->add({.kind = LedgerEntry::hold, .stream = stream, .event = event_});
        cudaCheck(cudaStreamWaitEvent(stream, event_, 0));
    }
    // Makes work put on `after` from now on wait for all work that is already on `before`.
    void order(cudaStream_t before, cudaStream_t after) const {
        if (before == after) return;
        record(before);
        hold(after);
    }
    // Makes the host wait for that point.
    void wait() const {
        if (!ledger) cudaCheck(cudaEventSynchronize(event_));
    }
    cudaError_t query() const { return ledger ? cudaSuccess : cudaEventQuery(event_); }

    // Returns the time from `start` to this event. Both must have been reached, and must measure time
    // (cudaEventDefault).
    double seconds_since(const Event& start) const {
        float milliseconds = 0;
        cudaCheck(cudaEventElapsedTime(&milliseconds, start.event_, event_));
        return milliseconds / 1e3;
    }

private:
    cudaEvent_t event_ = nullptr;
};

// Times the work that is put on a stream between start() and stop().
class StreamTimer {
public:
    explicit StreamTimer(cudaStream_t stream) : stream_(stream) {}

    void start() const { start_.record(stream_); }
    void stop() const { end_.record(stream_); }

    // Waits for the end of the work.
    double seconds() const {
        end_.wait();
        return std::max(end_.seconds_since(start_), 1e-9);
    }

private:
    cudaStream_t stream_;
    Event start_{cudaEventDefault}, end_{cudaEventDefault};
};
