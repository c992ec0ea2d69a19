/*
Everyone's messages to everyone, in host memory. Most ranks have nothing to say to most others, and messages
are large: so the ranks tell each other the lengths, and send what is not empty from where it lies.
*/
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/world.h"

inline std::vector<std::string> World::exchange(const std::vector<std::string_view>& to_each) const {
    std::vector<std::string> from_each(to_each.size());
    from_each[(size_t)rank_] = to_each[(size_t)rank_];
#ifndef WITHOUT_MPI
    if (size_ == 1) return from_each;
    std::vector<int> lengths, incoming(to_each.size());
    for (std::string_view message : to_each) {
        if (message.size() > INT_MAX)
            fail("World::exchange: %zu bytes are too many; send less", message.size());
        lengths.push_back((int)message.size());
    }
    MPI_Request sizes;
    mpiCheck(MPI_Ialltoall(lengths.data(), 1, MPI_INT, incoming.data(), 1, MPI_INT, control_, &sizes));
    mpi_wait(&sizes, 1);
    constexpr int tag = 0;
    std::vector<MPI_Request> requests;
    for (int peer = 0; peer < size_; peer++) {
        std::string& message = from_each[(size_t)peer];
        int bytes = incoming[(size_t)peer];
        if (peer == rank_ || bytes == 0) continue;
        message.resize((size_t)bytes);
        mpiCheck(MPI_Irecv(message.data(), bytes, MPI_BYTE, peer, tag, control_, &requests.emplace_back()));
    }
    for (int peer = 0; peer < size_; peer++) {
        int bytes = lengths[(size_t)peer];
        if (peer == rank_ || bytes == 0) continue;
        mpiCheck(MPI_Isend(to_each[(size_t)peer].data(), bytes, MPI_BYTE, peer, tag, control_,
                           &requests.emplace_back()));
    }
    mpi_wait(requests.data(), (int)requests.size());
#endif
    return from_each;
}
