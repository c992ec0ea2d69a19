/*
Messages between the ranks over MPI, for nccl.cc. Each carries a label, so it may arrive at any time and in
any order; it stays in an inbox until it is taken. No function here blocks inside MPI on another rank.

The program calls MPI itself, from other threads. So MPI_Init_thread() requests MPI_THREAD_MULTIPLE whichever
level the program asks for, and messages use a communicator of their own.
*/
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace nocard {

// Identifies the call that a message belongs to, and describes it as its sender made it.
struct Label {
    uint64_t group;   // the group of ranks
    uint64_t number;  // the call's, within its group or among those from a sender to a receiver
    int32_t phase;    // the call's
    int32_t call, type, reduction, root;
    uint64_t count;
};

struct Message {
    Label label;
    std::vector<char> bytes;
};

// Return whether MPI is running, this process's rank, and the number of ranks.
bool has_messages();
int world_rank();
int world_size();

// Sends a copy of the data. is_sent() returns true once the receiver, or MPI, has it.
class Sending;
std::shared_ptr<Sending> send_message(int to, const Label& label, const void* data, size_t bytes);
bool is_sent(Sending& sending);

// Takes the message of this group, number and phase from a rank; returns null if it has not arrived.
std::unique_ptr<Message> take_message(int from, uint64_t group, uint64_t number, int32_t phase);

}  // namespace nocard
