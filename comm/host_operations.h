/*
Collectives as they wait on a stream, and what runs them when their turn has come. Operations that were called
as a group run at once, a little of each in turn, so it does not matter in which order the other ranks come
to theirs.
*/
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include "comm/host_communicator.h"  // ncclComm
#include "comm/host_sums.h"          // HostType
#include "comm/rings.h"              // RingFlow, ChainFlow

enum class HostCall { all_reduce, reduce_scatter, all_gather, broadcast, send, receive };

struct HostOperation {
    std::shared_ptr<ncclComm> comm;
    HostCall call;
    const char* from;
    char* to;
    size_t count;  // elements of the whole buffer; of reduce_scatter and all_gather: of one rank's part
    HostType type;
    int peer = -1;  // or root
    int tag = 0;

    size_t bytes() const { return count * type.bytes; }
    size_t all_bytes() const { return bytes() * (size_t)comm->size; }
    bool is_root() const { return call == HostCall::broadcast && peer == comm->rank; }
    size_t bytes_read() const {
        if (call == HostCall::receive || (call == HostCall::broadcast && !is_root())) return 0;
        return call == HostCall::reduce_scatter ? all_bytes() : bytes();
    }
    size_t bytes_written() const {
        if (call == HostCall::send) return 0;
        return call == HostCall::all_gather ? all_bytes() : bytes();
    }
};

// What needs no other rank: the own part to where it belongs.
inline void copy_own_part(const HostOperation& o) {
    bool sums = o.call == HostCall::all_reduce || o.call == HostCall::reduce_scatter;
    bool moves = o.call == HostCall::all_gather || o.is_root() || (sums && o.comm->size == 1);
    char* own = o.to + (o.call == HostCall::all_gather ? (size_t)o.comm->rank * o.bytes() : 0);
    if (moves && own != o.from && o.bytes()) memcpy(own, o.from, o.bytes());
}

// What needs the others.
inline std::unique_ptr<MessageFlow> make_flow(const HostOperation& o) {
    int rank = o.comm->rank, size = o.comm->size;
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    auto ring = [&](RingPass pass, size_t count) {
        RingBuffers buffers = {o.from, o.to, count, o.type.bytes, o.type.add};
        return std::make_unique<RingFlow>(o.comm->mpi, o.tag, rank, size, pass, buffers);
    };
    auto chain = [&](char* data, int from, int to) {
        return std::make_unique<ChainFlow>(o.comm->mpi, o.tag, data, o.bytes(), from, to);
    };
    switch (o.call) {
    case HostCall::all_reduce:
        return ring(RingPass::all_reduce, o.count);
    case HostCall::reduce_scatter:
        return ring(RingPass::reduce_scatter, o.count * (size_t)size);
    case HostCall::all_gather:
        return ring(RingPass::all_gather, o.count * (size_t)size);
    case HostCall::broadcast:
        return chain(o.to, o.is_root() ? -1 : before, next == o.peer ? -1 : next);
    case HostCall::send:
        return chain(const_cast<char*>(o.from), -1, o.peer);
    case HostCall::receive:
        return chain(o.to, o.peer, -1);
    }
    return nullptr;
}

// Runs all operations at once, and waits until they are done. An error is kept in the communicator, and what
// is still to be done on that is left undone.
inline void run_operations(const std::vector<HostOperation>& operations) {
    struct Running {
        ncclComm* comm;
        std::unique_ptr<MessageFlow> flow;  // null when it is over
    };
    std::vector<Running> running;
    auto attempt = [](ncclComm& comm, auto&& step) {
        try {
            step();
        } catch (const std::exception& error) {
            comm.fail(ncclRemoteError, error.what());
        }
    };
    for (const HostOperation& operation : operations) {
        ncclComm& comm = *operation.comm;
        if (comm.error != ncclSuccess) continue;
        copy_own_part(operation);
        if (comm.size > 1) attempt(comm, [&] { running.push_back({&comm, make_flow(operation)}); });
    }
    Patience patience;
    while (!running.empty()) {
        bool any = false;
        auto next_send = Clock::time_point::max();
        for (Running& run : running) {
            attempt(*run.comm, [&] { any = run.flow->advance() || any; });
            if (run.comm->error != ncclSuccess) {
                run.flow->abandon();
                run.comm->keep(std::move(run.flow));
            } else if (run.flow->done()) {
                run.flow.reset();
            } else {
                next_send = std::min(next_send, run.flow->next_send());
            }
        }
        std::erase_if(running, [](const Running& run) { return !run.flow; });
        if (any)
            patience.reset();
        else if (!running.empty())
            patience.wait(next_send);
    }
}
