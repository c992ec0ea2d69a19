/*
Waiting for work that other ranks take part in. A plain cudaStreamSynchronize would not be told by NCCL of a
broken link, which tells only those who ask. So the wait looks at the stream again and again, and asks the
groups for errors meanwhile. How long it may take is the watchdog's concern (comm/watchdog.h).
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "comm/mesh.h"
#include "data/base/deadlines.h"
#include "data/base/error.h"
#include "kernels/common.cuh"

// Waits until look() is no longer cudaErrorNotReady. If a group of the mesh reports an error, it aborts the
// groups, so that streams can end, and throws Error; the run cannot go on then.
template <typename Look>
void wait_watching(const Mesh& mesh, Look&& look) {
    using namespace std::chrono_literals;
    constexpr Clock::duration shortest_nap = 5us, longest_nap = 200us, between_checks = 20ms;
    Clock::time_point start = Clock::now(), checked = start;
    WaitsForOthers wait;
    try {
        for (;;) {
            cudaError_t work = look();
            if (work == cudaSuccess) return;
            if (work != cudaErrorNotReady) cudaCheck(work);
            Clock::time_point now = Clock::now();
            if (now - checked > between_checks) {
                mesh.check();
                checked = now;
            }
            // A nap grows with the wait: it makes that longer by no more than an eighth.
            std::this_thread::sleep_for(
                std::clamp<Clock::duration>((now - start) / 8, shortest_nap, longest_nap));
        }
    } catch (const Error&) {
        mesh.abort();
        throw;
    }
}

// Waits until all work in the stream is done.
inline void wait_for(cudaStream_t stream, const Mesh& mesh) {
    if (mesh.shape.ranks() == 1) {
        cudaCheck(cudaStreamSynchronize(stream));
        return;
    }
    wait_watching(mesh, [&] { return cudaStreamQuery(stream); });
}

// Waits until the stream has come to the event. One that was never recorded is over.
inline void wait_for(cudaEvent_t event, const Mesh& mesh) {
    if (mesh.shape.ranks() == 1) {
        cudaCheck(cudaEventSynchronize(event));
        return;
    }
    wait_watching(mesh, [&] { return cudaEventQuery(event); });
}

// Copies what the stream's work leaves on the device, and waits. To memory that is not pinned, CUDA's own
// copy would wait for that work, unwatched.
template <typename T>
void copy_to_host(T* to, const T* from, size_t count, cudaStream_t stream, const Mesh& mesh) {
    wait_for(stream, mesh);
    cudaCheck(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDefault, stream));
    cudaCheck(cudaStreamSynchronize(stream));
}

// An event for order alone: it measures no time.
class Event {
public:
    Event() { cudaCheck(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
    ~Event() {
        if (event_) cudaEventDestroy(event_);
    }
    Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    Event& operator=(Event&&) = delete;

    void record(cudaStream_t stream) { cudaCheck(cudaEventRecord(event_, stream)); }
    // The stream waits until what was recorded last has come.
    void hold(cudaStream_t stream) const { cudaCheck(cudaStreamWaitEvent(stream, event_, 0)); }

    // The host waits until the stream comes to what was recorded last, watching as wait_for() does.
    void wait(const Mesh& mesh) const { wait_for(event_, mesh); }

private:
    cudaEvent_t event_ = nullptr;
};
