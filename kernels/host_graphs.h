/*
CUDA graphs for machines without a GPU: work is captured once, from one or more streams, and can then be run
repeatedly. Calls that CUDA refuses during a capture fail here too: waiting for a captured stream, allocating
memory, making a stream wait for an event from outside the capture, and ending a capture while one of its
streams has not been joined to the first.
*/
#pragma once

#include <memory>
#include <utility>

#include "kernels/host_streams.h"

using HostGraph = std::vector<std::function<void()>>;
using cudaGraph_t = std::shared_ptr<const HostGraph>*;
using cudaGraphExec_t = std::shared_ptr<const HostGraph>*;

// The only mode here: a capture is not affected by other threads' calls.
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream) return cudaErrorStreamCaptureUnsupported;
    if (stream->capture()) return cudaErrorIllegalState;
    auto capture = std::make_shared<HostCapture>();
    capture->origin = stream;
    stream->join(capture);
    host_captures++;
    return cudaSuccess;
}

// Must be called by the thread that began the capture.
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = nullptr;
    if (!stream || !stream->capture() || stream->capture()->origin != stream) return cudaErrorIllegalState;
    auto capture = stream->capture();
    for (HostStream* captured : capture->streams) captured->leave_capture();
    capture->ended = true;
    host_captures--;
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!capture->unjoined.empty()) return cudaErrorStreamCaptureUnjoined;
    *graph = new std::shared_ptr(std::make_shared<const HostGraph>(std::move(capture->tasks)));
    return cudaSuccess;
}

inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned = 0) {
    *executable = new std::shared_ptr(*graph);
    return cudaSuccess;
}

inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    if (host_stream(stream).capture()) return refuse_while_capturing(host_stream(stream));
    host_stream(stream).enqueue([graph = *executable] {
        for (auto& task : *graph) task();
    });
    return cudaSuccess;
}

inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}

inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;
    return cudaSuccess;
}
