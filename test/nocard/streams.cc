/*
The calls of the runtime for streams, events, captures and graphs.

A capture is a list of nodes. Each stream that takes part has a frontier: the nodes that its next one waits
for. Waiting for an event of the capture adds the frontier that the event's stream had then.
*/
#include "test/nocard/streams.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>

#include "test/nocard/errors.h"
#include "test/nocard/fault.h"
#include "test/nocard/graphs.h"
#include "test/nocard/record.h"
#include "test/nocard/report.h"

namespace nocard {
namespace {

struct Stream;

struct Capture {
    Stream* origin;
    std::vector<Stream*> streams;
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    cudaStreamCaptureMode mode;
    bool invalid = false, ended = false;
};
using CapturePtr = std::shared_ptr<Capture>;

struct Stream {
    int lane;
    bool blocking;  // the stream and the legacy stream wait for each other
    ItemPtr last;
    CapturePtr capture;
    std::vector<size_t> frontier;  // the nodes that the next one waits for
};

struct Event {
    bool timing;
    ItemPtr mark;        // null: not recorded outside of a capture
    CapturePtr capture;  // in which it was recorded
    std::vector<size_t> frontier;
    RecordedPlace place = {};
};

struct Executable {
    std::shared_ptr<const Graph> graph;
    ItemPtr last;  // its launches run one after another
};

// All handles. Dead ones stay allocated, so that no new one gets the same address.
template <typename T>
class Handles {
public:
    T* make(T value) {
        T* handle = new T(std::move(value));
        live_.insert(handle);
        return handle;
    }
    void end(const char* call, const char* what, const void* handle) {
        require(call, what, handle);
        live_.erase((T*)handle);
    }
    T& require(const std::string& call, const char* what, const void* handle) {
        if (!live_.count((T*)handle))
            fault(call, text("%p is no %s, or one that was destroyed", handle, what));
        return *(T*)handle;
    }
    const std::set<T*>& live() const { return live_; }

private:
    std::set<T*> live_;
};

struct State {
    std::mutex mutex;
    Handles<Stream> streams;
    Handles<Event> events;
    Handles<std::shared_ptr<Graph>> graphs;
    Handles<Executable> executables;
    Stream legacy = {0, true, nullptr, nullptr, {}};
    int lanes = 0;
};

State& state() {
    static State& state = *new State;
    return state;
}

std::atomic<int> global_captures = 0;
thread_local std::vector<CapturePtr> captures_of_thread;

Stream& stream_of(const std::string& call, cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy) return state().legacy;
    if (handle == cudaStreamPerThread) fault(call, "a stream per thread is not known here");
    return state().streams.require(call, "stream", handle);
}

// Returns what a stream's next work waits for: the last work of the stream, and that of the legacy stream or,
// if it is the legacy stream, of all blocking streams.
std::vector<ItemPtr> work_before(const Stream& stream) {
    std::vector<ItemPtr> before = {stream.last};
    if (&stream == &state().legacy) {
        for (Stream* other : state().streams.live())
            if (other->blocking) before.push_back(other->last);
    } else if (stream.blocking) {
        before.push_back(state().legacy.last);
    }
    return before;
}

void add_missing(std::vector<size_t>& to, const std::vector<size_t>& from) {
    for (size_t node : from)
        if (std::find(to.begin(), to.end(), node) == to.end()) to.push_back(node);
}

// The legacy stream would have to wait for blocking streams that are being captured, which is impossible: the
// captures are invalidated.
cudaError_t refused_by_legacy(const Stream& stream) {
    if (&stream != &state().legacy) return cudaSuccess;
    cudaError_t error = cudaSuccess;
    for (Stream* other : state().streams.live()) {
        if (!other->capture || !other->blocking) continue;
        other->capture->invalid = true;
        error = cudaErrorStreamCaptureImplicit;
    }
    return error;
}

// Returns the error with which a capture refuses a call that waits for a stream or polls it, or success.
cudaError_t refused(Stream& stream) {
    if (stream.capture) {
        stream.capture->invalid = true;
        return cudaErrorStreamCaptureUnsupported;
    }
    if (cudaError_t error = refused_by_legacy(stream)) return error;
    return refused_by_capture();
}

cudaError_t add_to_capture(const std::vector<Stream*>& streams, const Operation& operation) {
    CapturePtr capture;
    for (Stream* stream : streams)
        if (stream->capture) capture = stream->capture;
    std::vector<size_t> before;
    for (Stream* stream : streams) {
        if (stream->capture != capture) {
            capture->invalid = true;
            return cudaErrorStreamCaptureIsolation;
        }
        add_missing(before, stream->frontier);
    }
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    size_t node = capture->graph->add(operation, streams[0]->lane, before);
    for (Stream* stream : streams) stream->frontier = {node};
    return cudaSuccess;
}

cudaError_t wait_in_capture(Stream& stream, const Event& event) {
    Capture& capture = *event.capture;
    if (capture.ended) return cudaErrorCapturedEvent;
    if (!stream.capture) {
        if (&stream == &state().legacy) return capture.invalid = true, cudaErrorStreamCaptureImplicit;
        stream.capture = event.capture;
        stream.frontier.clear();
        capture.streams.push_back(&stream);
    }
    if (stream.capture != event.capture) {
        capture.invalid = stream.capture->invalid = true;
        return cudaErrorStreamCaptureMerge;
    }
    add_missing(stream.frontier, event.frontier);
    return cudaSuccess;
}

// Waits outside of the lock, because others must be able to give work meanwhile.
cudaError_t wait_outside(std::unique_lock<std::mutex>& lock, const ItemPtr& item) {
    lock.unlock();
    if (item) wait_for(item);
    return cudaSuccess;
}

}  // namespace

// ----------------------------------------------------------------------------
// for other files

cudaError_t enqueue_together(const std::vector<cudaStream_t>& handles, const Operation& operation) {
    require_outside_of_host_function(operation.call);
    std::lock_guard lock(state().mutex);
    std::vector<Stream*> streams;
    bool captured = false;
    for (cudaStream_t handle : handles) {
        streams.push_back(&stream_of(operation.call, handle));
        captured = captured || streams.back()->capture;
        if (cudaError_t error = refused_by_legacy(*streams.back())) return noted(error);
    }
    if (captured) return noted(add_to_capture(streams, operation));
    std::vector<ItemPtr> before;
    for (Stream* stream : streams)
        for (const ItemPtr& item : work_before(*stream)) before.push_back(item);
    ItemPtr item = give(operation, streams[0]->lane, before);
    for (Stream* stream : streams) stream->last = item;
    return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, const Operation& operation) {
    return enqueue_together({stream}, operation);
}

cudaError_t synchronize(const std::string& call, cudaStream_t handle) {
    require_outside_of_host_function(call);
    std::unique_lock lock(state().mutex);
    Stream& stream = stream_of(call, handle);
    if (cudaError_t error = refused(stream)) return noted(error);
    bool legacy = &stream == &state().legacy;
    return wait_outside(lock, legacy ? give_mark(stream.lane, work_before(stream)) : stream.last);
}

bool is_capturing(cudaStream_t handle) {
    std::lock_guard lock(state().mutex);
    return stream_of("", handle).capture != nullptr;
}

cudaError_t refused_by_capture() {
    bool refuses = global_captures > 0;
    for (const CapturePtr& capture : captures_of_thread) {
        if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
        capture->invalid = true;
        refuses = true;
    }
    return refuses ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

void require_outside_of_host_function(const std::string& call) {
    if (in_host_function()) fault(call, "called by a host function, which may not call CUDA");
}

}  // namespace nocard

using namespace nocard;

extern "C" {

// ----------------------------------------------------------------------------
// streams

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    require_outside_of_host_function("cudaStreamCreateWithPriority");
    std::lock_guard lock(state().mutex);
    bool blocking = !(flags & cudaStreamNonBlocking);
    *stream = (cudaStream_t)state().streams.make({++state().lanes, blocking, nullptr, nullptr, {}});
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

// The stream's work is still done.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    require_outside_of_host_function("cudaStreamDestroy");
    std::lock_guard lock(state().mutex);
    Stream& stream = state().streams.require("cudaStreamDestroy", "stream", handle);
    if (stream.capture) fault("cudaStreamDestroy", text("stream %p is being captured", (void*)handle));
    state().streams.end("cudaStreamDestroy", "stream", handle);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return synchronize("cudaStreamSynchronize", stream);
}

cudaError_t cudaDeviceSynchronize() {
    require_outside_of_host_function("cudaDeviceSynchronize");
    if (cudaError_t error = refused_by_capture()) return noted(error);
    wait_for_all();
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    require_outside_of_host_function("cudaStreamQuery");
    std::unique_lock lock(state().mutex);
    Stream& stream = stream_of("cudaStreamQuery", handle);
    if (cudaError_t error = refused(stream)) return noted(error);
    bool legacy = &stream == &state().legacy;
    ItemPtr last = legacy ? give_mark(stream.lane, work_before(stream)) : stream.last;
    lock.unlock();
    return !last || ask(last) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return enqueue(stream, host_function(function, data));
}

// ----------------------------------------------------------------------------
// events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    std::lock_guard lock(state().mutex);
    *event = (cudaEvent_t)state().events.make({!(flags & cudaEventDisableTiming), nullptr, nullptr, {}});
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    std::lock_guard lock(state().mutex);
    state().events.end("cudaEventDestroy", "event", event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
    require_outside_of_host_function("cudaEventRecord");
    std::lock_guard lock(state().mutex);
    Event& event = state().events.require("cudaEventRecord", "event", handle);
    Stream& stream = stream_of("cudaEventRecord", on);
    if (cudaError_t error = refused_by_legacy(stream)) return noted(error);
    event.mark = nullptr;
    event.capture = stream.capture;
    event.frontier = stream.frontier;
    event.place = recorded_place(on);
    if (!event.capture) event.mark = stream.last = give_mark(stream.lane, work_before(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t waits, cudaEvent_t handle, unsigned) {
    require_outside_of_host_function("cudaStreamWaitEvent");
    std::lock_guard lock(state().mutex);
    Stream& stream = stream_of("cudaStreamWaitEvent", waits);
    Event& event = state().events.require("cudaStreamWaitEvent", "event", handle);
    if (event.capture) return noted(wait_in_capture(stream, event));
    if (cudaError_t error = refused_by_legacy(stream)) return noted(error);
    if (!event.mark) return cudaSuccess;
    if (stream.capture) {
        stream.capture->invalid = true;
        return noted(cudaErrorStreamCaptureIsolation);
    }
    record_wait(waits, event.place);
    std::vector<ItemPtr> before = work_before(stream);
    before.push_back(event.mark);
    stream.last = give_mark(stream.lane, before);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    require_outside_of_host_function("cudaEventSynchronize");
    std::unique_lock lock(state().mutex);
    Event& event = state().events.require("cudaEventSynchronize", "event", handle);
    if (event.capture) return noted(cudaErrorCapturedEvent);
    if (cudaError_t error = refused_by_capture()) return noted(error);
    return wait_outside(lock, event.mark);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    require_outside_of_host_function("cudaEventQuery");
    std::unique_lock lock(state().mutex);
    Event& event = state().events.require("cudaEventQuery", "event", handle);
    if (event.capture) return noted(cudaErrorCapturedEvent);
    if (cudaError_t error = refused_by_capture()) return noted(error);
    ItemPtr mark = event.mark;
    lock.unlock();
    return !mark || ask(mark) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    std::lock_guard lock(state().mutex);
    Event& first = state().events.require("cudaEventElapsedTime", "event", start);
    Event& last = state().events.require("cudaEventElapsedTime", "event", end);
    for (Event* event : {&first, &last}) {
        if (!event->timing || !event->mark) return noted(cudaErrorInvalidResourceHandle);
        if (!is_done(event->mark)) return noted(cudaErrorNotReady);
    }
    *milliseconds = (float)(1e3 * (time_done(last.mark) - time_done(first.mark)));
    return cudaSuccess;
}

// ----------------------------------------------------------------------------
// captures and graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    std::lock_guard lock(state().mutex);
    Stream& stream = stream_of("cudaStreamBeginCapture", handle);
    if (&stream == &state().legacy) return noted(cudaErrorStreamCaptureUnsupported);
    if (stream.capture) return noted(cudaErrorIllegalState);
    auto capture = std::make_shared<Capture>();
    capture->origin = &stream;
    capture->streams = {&stream};
    capture->mode = mode;
    stream.capture = capture;
    stream.frontier.clear();
    captures_of_thread.push_back(capture);
    global_captures += mode == cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    std::lock_guard lock(state().mutex);
    *graph = nullptr;
    Stream& stream = stream_of("cudaStreamEndCapture", handle);
    CapturePtr capture = stream.capture;
    if (!capture || capture->origin != &stream) return noted(cudaErrorIllegalState);
    if (capture->mode != cudaStreamCaptureModeRelaxed && std::erase(captures_of_thread, capture) == 0)
        return noted(cudaErrorStreamCaptureWrongThread);
    std::erase(captures_of_thread, capture);
    global_captures -= capture->mode == cudaStreamCaptureModeGlobal;
    bool joined = true;
    for (size_t node : capture->graph->last()) {
        auto& reached = stream.frontier;
        joined = joined && std::find(reached.begin(), reached.end(), node) != reached.end();
    }
    for (Stream* captured : capture->streams) captured->capture = nullptr, captured->frontier.clear();
    capture->ended = true;
    if (capture->invalid) return noted(cudaErrorStreamCaptureInvalidated);
    if (!joined) return noted(cudaErrorStreamCaptureUnjoined);
    *graph = (cudaGraph_t)state().graphs.make(capture->graph);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    std::lock_guard lock(state().mutex);
    const CapturePtr& capture = stream_of("cudaStreamIsCapturing", handle).capture;
    *status = !capture           ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t handle, unsigned long long) {
    std::lock_guard lock(state().mutex);
    auto& graph = state().graphs.require("cudaGraphInstantiate", "graph", handle);
    *executable = (cudaGraphExec_t)state().executables.make({graph, nullptr});
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t on) {
    require_outside_of_host_function("cudaGraphLaunch");
    std::lock_guard lock(state().mutex);
    Executable& executable = state().executables.require("cudaGraphLaunch", "executable graph", handle);
    Stream& stream = stream_of("cudaGraphLaunch", on);
    if (stream.capture)
        fault("cudaGraphLaunch", "into a stream that is captured: graphs in graphs are not known here");
    if (cudaError_t error = refused_by_legacy(stream)) return noted(error);
    std::vector<ItemPtr> before = work_before(stream);
    before.push_back(executable.last);
    stream.last = executable.last = executable.graph->launch(stream.lane, before);
    report_work("graph launches");
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    std::lock_guard lock(state().mutex);
    state().graphs.end("cudaGraphDestroy", "graph", graph);
    return cudaSuccess;
}

// Launched work is still done.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    std::lock_guard lock(state().mutex);
    state().executables.end("cudaGraphExecDestroy", "executable graph", executable);
    return cudaSuccess;
}
}
