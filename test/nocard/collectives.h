/*
The work that NCCL's calls put on a card: messages, sums and copies within a group of ranks.

All ranks of a group must make the same calls in the same order. Each message therefore states its sender's
call, and the receiver compares that with its own.
*/
#pragma once

#include <atomic>
#include <memory>
#include <nccl.h>
#include <vector>

#include "test/nocard/messages.h"
#include "test/nocard/schedule.h"

namespace nocard {

// A group of ranks: an NCCL communicator.
struct Group {
    uint64_t number = 0;       // shared by all its ranks, and unique to the group
    std::vector<int> members;  // their ranks in MPI
    int rank = 0;
    bool blocking = true;
    size_t memory = 0;  // bytes on the card

    // numbers of calls so far
    std::atomic<uint64_t> collectives = 0, splits = 0;
    std::vector<uint64_t> sent, received;  // to and from each member

    std::atomic<int> outstanding = 0;  // operations that are not done
    std::atomic<bool> aborted = false;

    int size() const { return (int)members.size(); }
};
using GroupPtr = std::shared_ptr<Group>;

enum class CollectiveKind { all_reduce, reduce_scatter, all_gather, broadcast, send, receive };

struct CollectiveCall {
    CollectiveKind kind;
    const void* from;
    void* to;
    size_t count;  // the call's count: for all_gather and reduce_scatter, the elements of one part
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int root;  // or the other rank of send and receive
};

size_t bytes_of(ncclDataType_t type);
const char* name_of(CollectiveKind kind);

// Ends the process unless the buffers are live device memory, and overlap only where NCCL works in place.
void check_memory(const Group& group, const CollectiveCall& call);

// Returns one operation for calls on a group that are made together.
Operation collective_operation(const GroupPtr& group, const std::vector<CollectiveCall>& calls);

}  // namespace nocard
