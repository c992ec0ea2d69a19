/*
The errors that calls of the runtime return: cudaGetLastError() gives the last one of the thread.
*/
#pragma once

#include <cuda_runtime.h>

namespace nocard {

inline thread_local cudaError_t last_error = cudaSuccess;

// For the results of calls. cudaErrorNotReady is an answer, not an error.
inline cudaError_t noted(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

}  // namespace nocard
