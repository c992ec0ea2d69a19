/*
The names and texts of errors, in the words of the CUDA runtime.
*/
#include "test/nocard/errors.h"

#include <utility>

using namespace nocard;

extern "C" {

cudaError_t cudaGetLastError() {
    return std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaPeekAtLastError() {
    return last_error;
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidConfiguration:
        return "invalid configuration argument";
    case cudaErrorInvalidPitchValue:
        return "invalid pitch argument";
    case cudaErrorNoDevice:
        return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
        return "no kernel image is available for execution on the device";
    case cudaErrorInvalidResourceHandle:
        return "invalid resource handle";
    case cudaErrorIllegalState:
        return "the operation cannot be performed in the present state";
    case cudaErrorNotReady:
        return "device not ready";
    case cudaErrorLaunchOutOfResources:
        return "too many resources requested for launch";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
        return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge:
        return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnjoined:
        return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
        return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit:
        return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent:
        return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorStreamCaptureWrongThread:
        return "attempt to terminate a thread-local capture sequence from another thread";
    default:
        return "unknown error";
    }
}

const char* cudaGetErrorName(cudaError_t error) {
    return cudaGetErrorString(error);
}
}
