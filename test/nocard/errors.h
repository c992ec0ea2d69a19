/*
The errors that calls of the runtime return. cudaGetLastError() returns the thread's last one.
*/
#pragma once

#include <cuda_runtime.h>

namespace nocard {

inline thread_local cudaError_t last_error = cudaSuccess;

// Records the result of a call, and returns it. cudaErrorNotReady is an answer, not an error.
inline cudaError_t noted(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

}  // namespace nocard
