/*
Streams, events and captures, as the other files use them: work goes to a stream, or, while that is captured,
into a graph.
*/
#pragma once

#include <cuda_runtime.h>
#include <string>
#include <vector>

#include "test/nocard/schedule.h"

namespace nocard {

// Puts work on the stream, in whose name `operation.call` is asked for. Ends the process if the stream is
// dead.
cudaError_t enqueue(cudaStream_t stream, const Operation& operation);

// One piece of work that all of these streams wait for, and that waits for all of them.
cudaError_t enqueue_together(const std::vector<cudaStream_t>& streams, const Operation& operation);

// Waits until the stream has done all that it was given; for calls that are synchronous.
cudaError_t synchronize(const std::string& call, cudaStream_t stream);

bool is_capturing(cudaStream_t stream);

// The error with which a call must be refused that could wait for the card while this thread captures; the
// capture is lost.
cudaError_t refused_by_capture();

// Ends the process where a host function makes the call.
void require_outside_of_host_function(const std::string& call);

}  // namespace nocard
