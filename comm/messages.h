/*
Messages of a process: the link over which they leave, and flows that have several of them in flight.

The link counts the bytes sent over it, and can be made as slow as a real one. Ranks on one machine
communicate through memory, which is too fast to show what communication costs; a slow link shows whether a
run hides communication behind computation.
*/
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "comm/mpi_calls.h"  // mpi_mutex, mpi_error_text

// One full-duplex link, shared by all threads of the process: messages leave one after another.
class HostLink {
public:
    // 0: no limit.
    void set_speed(double gigabytes_per_second) {
        std::lock_guard lock(mutex_);
        bytes_per_nanosecond_ = gigabytes_per_second;
        free_at_ = {};
    }

    // Returns the time at which the last byte of a message that is ready now will have left. The whole
    // message is sent at that time.
    Clock::time_point book(size_t bytes) {
        std::lock_guard lock(mutex_);
        if (bytes_per_nanosecond_ <= 0) return {};
        auto duration = std::chrono::duration<double, std::nano>((double)bytes / bytes_per_nanosecond_);
        free_at_ = std::max(free_at_, Clock::now()) + std::chrono::ceil<Clock::duration>(duration);
        return free_at_;
    }

    std::atomic<uint64_t> bytes_sent = 0;

private:
    std::mutex mutex_;
    double bytes_per_nanosecond_ = 0;
    Clock::time_point free_at_;
};
inline HostLink host_link;

// Limits the speed at which this process sends; 0: no limit.
inline void host_link_speed(double gigabytes_per_second) {
    host_link.set_speed(gigabytes_per_second);
}

#ifndef WITHOUT_MPI

// ----------------------------------------------------------------------------
// A flow: a sequence of messages to one rank and a sequence of messages from one rank, advanced step by step
// without waiting. Each is sent or received in order, with several messages in flight: while one piece of a
// buffer is summed, the next is on its way.
//
// A flow does not know what it carries. The algorithm that derives from it (comm/rings.h) defines where
// message i of either sequence lies in memory, and what is done with one that has arrived.

// A group of ranks that shares an MPI communicator with other groups, and so has its own tags.
struct MessageGroup {
    MPI_Comm mpi = MPI_COMM_NULL;
    std::vector<int> members;  // MPI ranks, in the order of the group
    int first_tag = 0;
};

struct Piece {
    char* data;
    size_t bytes;  // less than 2^31; both ends know it, and nothing is sent for 0
};

class MessageFlow {
public:
    virtual ~MessageFlow() = default;

    // Does what can be done without waiting. Returns whether it did anything. Throws Error on an MPI error.
    bool advance() {
        bool any = false;
        while (!done() && advance_once()) any = true;
        return any;
    }

    bool done() const { return arrived_ == receives && sent_ == sends; }

    // Returns when the next message is due to be sent; max() if none is waiting to be sent.
    Clock::time_point next_send() const {
        return started_ < booked_ ? due_[started_ % most_under_way] : Clock::time_point::max();
    }

    // Abandons the messages in flight. MPI may still access their memory while the communicator exists.
    void abandon() {
        std::lock_guard lock(mpi_mutex);
        for (MPI_Request& request : receive_requests_) {
            if (request != MPI_REQUEST_NULL) MPI_Cancel(&request);
        }
        for (auto* requests : {&send_requests_, &receive_requests_}) {
            for (MPI_Request& request : *requests) {
                if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
            }
        }
    }

protected:
    static constexpr size_t most_under_way = 4;

    // to, from: ranks of the group, or -1 for none.
    MessageFlow(const MessageGroup& group, int tag, int to, int from)
        : comm_(group.mpi),
          tag_(group.first_tag + tag),
          to_(to < 0 ? to : group.members[(size_t)to]),
          from_(from < 0 ? from : group.members[(size_t)from]) {
        send_requests_.fill(MPI_REQUEST_NULL);
        receive_requests_.fill(MPI_REQUEST_NULL);
    }

    virtual Piece outgoing(size_t index) = 0;
    virtual Piece incoming(size_t index) = 0;
    virtual void arrived(size_t) {}

    size_t sends = 0, receives = 0;     // messages in all
    size_t under_way = most_under_way;  // in flight in each sequence, at most
    size_t lead = 0;                    // message i can be sent when message i - lead has arrived

private:
    // Receive i is posted only when send i - under_way is complete. So memory that was sent from can be
    // received into `under_way` messages later, and no ring of ranks deadlocks: each waits for an earlier
    // message.
    bool can_expect() const {
        return expected_ < receives && expected_ < arrived_ + under_way &&
               (sends == 0 || expected_ < sent_ + under_way);
    }
    bool can_book() const {
        return booked_ < sends && booked_ < sent_ + under_way && (receives == 0 || booked_ < arrived_ + lead);
    }

    bool advance_once() {
        size_t before = expected_ + started_ + sent_ + arrived_;
        bool here = false;
        {
            std::lock_guard lock(mpi_mutex);
            for (; can_expect(); expected_++) {
                Piece piece = incoming(expected_);
                MPI_Request& request = receive_requests_[expected_ % most_under_way];
                if (piece.bytes)
                    check(MPI_Irecv(piece.data, (int)piece.bytes, MPI_BYTE, from_, tag_, comm_, &request));
            }
            for (; can_book(); booked_++)
                due_[booked_ % most_under_way] = host_link.book(outgoing(booked_).bytes);
            for (; started_ < booked_ && next_send() <= Clock::now(); started_++) {
                Piece piece = outgoing(started_);
                MPI_Request& request = send_requests_[started_ % most_under_way];
                if (piece.bytes)
                    check(MPI_Isend(piece.data, (int)piece.bytes, MPI_BYTE, to_, tag_, comm_, &request));
                host_link.bytes_sent += piece.bytes;
            }
            while (sent_ < started_ && complete(send_requests_[sent_ % most_under_way])) sent_++;
            if (arrived_ < expected_) here = complete(receive_requests_[arrived_ % most_under_way]);
        }
        if (here) arrived(arrived_++);  // outside the mutex: it may take a long time
        return expected_ + started_ + sent_ + arrived_ != before;
    }

    static bool complete(MPI_Request& request) {
        int flag = 0;
        check(MPI_Test(&request, &flag, MPI_STATUS_IGNORE));
        return flag;
    }

    static void check(int code) {
        if (code != MPI_SUCCESS) fail_part("MPI: a message failed: %s", mpi_error_text(code).c_str());
    }

    MPI_Comm comm_;
    int tag_, to_, from_;
    std::array<MPI_Request, most_under_way> send_requests_, receive_requests_;
    std::array<Clock::time_point, most_under_way> due_;
    // Messages that have reached each state; a message goes through the states of a line from left to right.
    size_t booked_ = 0, started_ = 0, sent_ = 0;
    size_t expected_ = 0, arrived_ = 0;
};

#endif
