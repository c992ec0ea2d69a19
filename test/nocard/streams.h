/*
Streams, events and captures, for the other files: work is put on a stream or, while that is captured, into a
graph.
*/
#pragma once

#include <cuda_runtime.h>
#include <string>
#include <vector>

#include "test/nocard/schedule.h"

namespace nocard {

// Puts work on the stream. Errors name `operation.call`. Ends the process if the stream is dead.
cudaError_t enqueue(cudaStream_t stream, const Operation& operation);

// Puts one piece of work on several streams: it waits for all of them, and all of them wait for it.
cudaError_t enqueue_together(const std::vector<cudaStream_t>& streams, const Operation& operation);

// Waits until the stream has done all its work; for synchronous calls.
cudaError_t synchronize(const std::string& call, cudaStream_t stream);

bool is_capturing(cudaStream_t stream);

// Returns the error with which a call that could wait for the card is refused while this thread captures, or
// any thread in global mode. This thread's captures are invalidated, except relaxed ones.
cudaError_t refused_by_capture();

// Ends the process if a host function makes the call.
void require_outside_of_host_function(const std::string& call);

}  // namespace nocard
