/*
The types of NCCL's API that train_gpt uses, with NCCL's names and values, for builds without NCCL: those over
MPI, and those for a single process.
*/
#pragma once

enum ncclResult_t {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
};

enum ncclDataType_t {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat = 7,
    ncclDouble = 8,
    ncclBfloat16 = 9,
};

enum ncclRedOp_t { ncclSum = 0 };

constexpr int NCCL_SPLIT_NOCOLOR = -1;

struct ncclUniqueId {
    char internal[128];
};

// How a group is made. Calls on a nonblocking group return once they have begun, and are complete when
// ncclCommGetAsyncError reports so.
struct ncclConfig_t {
    int blocking = 1;
    int maxCTAs = 0;  // unused: messages over MPI need no thread blocks
};
#define NCCL_CONFIG_INITIALIZER                                                                              \
    {}

struct ncclComm;
using ncclComm_t = ncclComm*;

inline const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "a CUDA call failed";
    case ncclSystemError:
        return "an MPI call or a system call failed";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclInvalidUsage:
        return "invalid usage";
    case ncclRemoteError:
        return "another process failed or left";
    case ncclInProgress:
        return "the call has not finished";
    default:
        return "internal error";
    }
}
