/*
Streams; the work on them that is no kernel, which is copies and fills; and events, by which streams wait for
each other, and the host for them. The model asks CUDA for these here alone.
*/
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "kernels/common.cuh"

// ----------------------------------------------------------------------------
// streams

// A new stream. first: where it competes with others for a GPU, it goes first.
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

// For destructors: waits, and throws nothing.
inline void drain(cudaStream_t stream) {
    if (!is_imagined(stream)) cudaStreamSynchronize(stream);
}

// Ends the stream when its work is done.
inline void end_stream(cudaStream_t stream) {
    drain(stream);
    if (!is_imagined(stream)) cudaStreamDestroy(stream);
}

// ----------------------------------------------------------------------------
// copies and fills
//
// They return when the stream has been given the work. The memory must stay until it is done.

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

// Host memory to the device, in the order of the stream, and waits. A plain cudaMemcpy can return before the
// bytes have arrived, and streams that do not block do not wait for the stream that it uses.
template <typename T>
void copy_to_device(T* to, const T* from, size_t count, cudaStream_t stream) {
    copy_async(to, from, count, stream);
    synchronize(stream);
}

// Columns of a matrix to those of another, on the device: `columns` elements of each of `rows` rows, whose
// beginnings are `from_width` apart, to where they are `to_width` apart.
template <typename T>
void copy_columns(T* to, size_t to_width, const T* from, size_t from_width, size_t columns, size_t rows,
                  cudaStream_t stream) {
    // CUDA has a limit for widths, and looks at those of one row too, which nothing needs.
    if (rows == 1) to_width = from_width = columns;
    if (ledger)
        return ledger->launched(
            nullptr, stream,
            LaunchCost{.read = array_bytes(from, rows, columns), .written = array_bytes(to, rows, columns)});
    cudaCheck(cudaMemcpy2DAsync(to, to_width * sizeof(T), from, from_width * sizeof(T), columns * sizeof(T),
                                rows, cudaMemcpyDeviceToDevice, stream));
}

// ----------------------------------------------------------------------------
// work of the host

// Does it when the stream comes here, where the caller may be at the next step already. It may not call CUDA.
// threads: OpenMP's; 0: as OpenMP chooses.
inline void host_work(cudaStream_t stream, int threads, std::function<void()> work) {
    struct Task {
        int threads;
        std::function<void()> work;
    };
    auto run = [](void* data) {
        std::unique_ptr<Task> task((Task*)data);
#ifdef _OPENMP
        // a thread of CUDA's or of a stream's: it does not know what others were told
        if (task->threads) omp_set_num_threads(task->threads);
#endif
        task->work();
    };
    cudaCheck(cudaLaunchHostFunc(stream, run, new Task{threads, std::move(work)}));
}

// ----------------------------------------------------------------------------
// events

// A place in the work of a stream: the last one at which it was recorded.
class Event {
public:
    // It is for order alone, and measures no time.
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
    // The stream's next work waits until that place has come. One that was never recorded is over.
    void hold(cudaStream_t stream) const {
        if (ledger) return ledger->add({.kind = LedgerEntry::hold, .stream = stream, .event = event_});
        cudaCheck(cudaStreamWaitEvent(stream, event_, 0));
    }
    // Work given to `after` from now on waits for the work given to `before` until now.
    void order(cudaStream_t before, cudaStream_t after) const {
        if (before == after) return;
        record(before);
        hold(after);
    }
    // The host waits likewise.
    void wait() const {
        if (!ledger) cudaCheck(cudaEventSynchronize(event_));
    }
    cudaError_t query() const { return ledger ? cudaSuccess : cudaEventQuery(event_); }

    // Between two places that have come, of events that measure time.
    double seconds_since(const Event& start) const {
        float milliseconds = 0;
        cudaCheck(cudaEventElapsedTime(&milliseconds, start.event_, event_));
        return milliseconds / 1e3;
    }

private:
    cudaEvent_t event_ = nullptr;
};

// Times the work that a stream is given between two calls.
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
