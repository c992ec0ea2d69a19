/*
What stands for NCCL in a program built without it and without MPI: the calls are there, so that the source is
the same, and all refuse. Such a program is one process, whose groups of one never come to them.
*/
#pragma once

#include "comm/nccl_types.h"  // ncclResult_t

#define NCCL_CALL_REFUSED(name)                                                                              \
    template <typename... Arguments>                                                                         \
    ncclResult_t name(Arguments...) {                                                                        \
        return ncclInvalidUsage;                                                                             \
    }

NCCL_CALL_REFUSED(ncclGetUniqueId)
NCCL_CALL_REFUSED(ncclCommInitRank)
NCCL_CALL_REFUSED(ncclCommSplit)
NCCL_CALL_REFUSED(ncclCommCount)
NCCL_CALL_REFUSED(ncclCommUserRank)
NCCL_CALL_REFUSED(ncclCommGetAsyncError)
NCCL_CALL_REFUSED(ncclGroupStart)
NCCL_CALL_REFUSED(ncclGroupEnd)
NCCL_CALL_REFUSED(ncclAllReduce)
NCCL_CALL_REFUSED(ncclReduceScatter)
NCCL_CALL_REFUSED(ncclAllGather)
NCCL_CALL_REFUSED(ncclBroadcast)
NCCL_CALL_REFUSED(ncclSend)
NCCL_CALL_REFUSED(ncclRecv)

// no templates, for these two are passed on as functions
inline ncclResult_t ncclCommAbort(ncclComm_t) {
    return ncclInvalidUsage;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t) {
    return ncclInvalidUsage;
}

inline const char* ncclGetLastError(ncclComm_t) {
    return "this program was built without MPI";
}
