/*
What NCCL's calls do, as work of the card: messages, sums and copies of a group of ranks.

The calls on a group must be the same on all its ranks, in the same order. So each message says what its
sender calls, and whoever takes it compares.
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
    uint64_t number = 0;       // all ranks have this one, and no other group has it
    std::vector<int> members;  // among all ranks of MPI
    int rank = 0;
    bool blocking = true;
    size_t memory = 0;  // bytes of the card

    // calls until now, in their order
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
    size_t count;  // the call has it so: of all_gather and reduce_scatter, elements of a part
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int root;  // or the other rank
};

size_t bytes_of(ncclDataType_t type);
const char* name_of(CollectiveKind kind);

// Ends the process unless the memory is right.
void check_memory(const Group& group, const CollectiveCall& call);

// Calls on a group that are made together.
Operation collective_operation(const GroupPtr& group, const std::vector<CollectiveCall>& calls);

}  // namespace nocard
