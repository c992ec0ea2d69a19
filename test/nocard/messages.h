/*
Messages between the ranks, for nccl.cc, over MPI. Each says what it belongs to, so it can come at any time
and in any order: it waits in an inbox until somebody asks for it. Nothing here waits inside MPI for another
rank.

The program calls MPI itself, from other threads: MPI_Init_thread is asked for MPI_THREAD_MULTIPLE instead of
what the program asks for, and messages go over a communicator of their own.
*/
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace nocard {

// A message belongs to this call, and its sender thinks that it is this.
struct Label {
    uint64_t group;   // the ranks that talk
    uint64_t number;  // the call's, within its group or among those of a sender to a receiver
    int32_t phase;    // the call's
    int32_t call, type, reduction, root;
    uint64_t count;
};

struct Message {
    Label label;
    std::vector<char> bytes;
};

// Tells whether MPI runs, and this process's number among all.
bool has_messages();
int world_rank();
int world_size();

// Sends a copy. The result is true when the receiver, or MPI, has it.
class Sending;
std::shared_ptr<Sending> send_message(int to, const Label& label, const void* data, size_t bytes);
bool is_sent(Sending& sending);

// The message of this group, number and phase from a rank, if it has come.
std::unique_ptr<Message> take_message(int from, uint64_t group, uint64_t number, int32_t phase);

}  // namespace nocard
